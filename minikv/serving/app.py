"""The application: OpenAI's completions and chat over anything that has `submit` and `cancel`.

    POST /v1/completions          {"prompt": "def f(", "max_tokens": 64, "stream": true}
    POST /v1/chat/completions     {"messages": [{"role": "user", "content": "…"}]}
    GET  /v1/models               the one model; also /v1/models/NAME
    POST /tokenize                {"prompt": "def f("}
    GET  /health                  503 when no engine is up, or when each has hung in a step
    GET  /metrics                 for Prometheus
    GET  /                        a page that shows the cache at work, by what /events tells

Each request needs one of the server's keys, as `Authorization: Bearer KEY`, if it has any. The page
comes without a key, and asks for one. /health answers without one, because load balancers send
none: then only its status says something. Clients with different keys never share a prefix,
whatever `cache_salt` they send. A server without keys answers no page of another origin, so it is
reached under an address or as localhost. There is no encryption: on an open network, put a server
with TLS in front.

A client that leaves, streaming or not, cancels its request before the engine's next step.
"""

import asyncio
import hmac
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from ipaddress import ip_address
from math import inf, nan
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minikv.config import EngineConfig
from minikv.errors import require_ids, require_text
from minikv.outputs import Delta
from minikv.sampling import SamplingParams
from minikv.serving.admission import Admission, Room
from minikv.serving.inbox import Busy, Inbox, RequestFailed, Rounds
from minikv.serving.loop import EngineLoop, Health
from minikv.serving.metrics import Metrics
from minikv.serving.requests import (
    ChatRequest,
    CompletionRequest,
    Options,
    TokenizeRequest,
    in_words,
)
from minikv.serving.scores import Asked, Token
from minikv.serving.spelling import Places, Spelling
from minikv.serving.watch import View

log = logging.getLogger("minikv")

PAGE = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
# A browser lets the page load nothing from elsewhere, and no other page show it in a frame.
POLICY = "default-src 'self'; img-src data:; frame-ancestors 'none'"

LARGEST = 2**20  # bytes of a request
LEFT = 499  # the status of an answer that nobody reads
FIRST_TOKEN = 30.0  # seconds that a request may wait for its first token, if others wait, too
ENOUGH = 256  # prompt tokens that a measurement of their rate needs
CROWD = 32  # engines that waiting requests could fill, while it is not known how long they take
MAX_PACE = 1.0  # seconds that a page may slow each step down, on a server without keys
MAX_VIEWS = 16  # of pages, at a time
HANGS = 60.0  # seconds of one step, after which an engine counts as hung
MAX_CHOICES = 128  # of one request
# Chunks per second, of all streams together: each one is a call of the operating system, which can
# cost more than computing its token. Tokens that come sooner go together, but none waits for longer
# than LONGEST seconds.
CHUNKS, LONGEST = 500, 0.1

Model = TypeVar("Model", bound=BaseModel)


class Running(Protocol):
    """A request under way."""

    @property
    def num_prompt(self) -> int: ...

    @property
    def num_cached(self) -> int: ...

    @property
    def has_begun(self) -> bool: ...

    def cancel(self) -> None: ...


class Service(Protocol):
    """What is served: an `EngineLoop`, or a cluster's front."""

    tokenizer: Any
    max_length: int  # tokens of a prompt and its answer
    vocab_size: int  # of the model: it may have more or fewer tokens than the tokenizer
    config: EngineConfig  # of each engine

    @property
    def num_engines(self) -> int: ...

    def submit(
        self, prompt: list[int], params: SamplingParams, session: str | None, *, reader: Inbox
    ) -> Running: ...

    def health(self) -> list[Health]: ...


class Template(Protocol):
    """From messages to a prompt. Raises ValueError, naming the argument."""

    async def __call__(self, messages: Sequence[dict[str, Any]]) -> str: ...

    async def ends(self, tokenizer: Any) -> tuple[str | int, ...]:
        """What ends an answer, beside the model's end tokens, as `SamplingParams.stop` has it."""
        ...


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


# ── Answers that are no tokens ────────────────────────────────────────────────


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """As JSON, in ASCII: half of a surrogate pair can be quoted in it."""
    return Response(json.dumps(content), status, headers, "application/json")


def error_body(status: int, text: str) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    code = {401: "invalid_api_key", 404: "not_found", 413: "too_large"}.get(status)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    name, colon, _ = text.partition(": ")
    param = name if colon and name.isidentifier() and status == 400 else None
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def refusal(status: int, text: str, headers: Any = None) -> Response:
    return reply(error_body(status, text), status, headers)


def shortened(error: Exception) -> str:
    """Its text, which may quote what a client has sent, whole."""
    text = str(error)
    return text if len(text) <= 500 else f"{text[:500]} …"


async def refuse(request: Request, error: Exception) -> Response:
    """What Starlette and we raise to end a request."""
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code in (404, 405) and text in ("Not Found", "Method Not Allowed"):
        text = f"there is no {request.method} {request.url.path}"
    return refusal(error.status_code, text, error.headers)


async def apologise(request: Request, error: Exception) -> Response:
    """A fault of this program. Its text is not sent: it may have words of other requests."""
    return refusal(500, f"the server has failed: {type(error).__name__}")


class Keys:
    """Lets requests in that show a key, and notes whose they are and when they came. Around the
    application. Without keys, any page that a browser of this machine shows could use the server:
    then requests are refused that a page of another origin has made."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], origins: Sequence[str] = ()):
        self.app, self.keys, self.origins = app, keys, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["came"] = time.monotonic()
            key = self._key(dict(scope["headers"]).get(b"authorization", b""))
            scope["is_known"] = key is not None or not self.keys
            # What a key's requests share: not the key itself, for it gets to stores and files.
            scope["tenant"] = sha256(key.encode()).hexdigest() if key is not None else None
            if not scope["is_known"] and scope["path"] not in ("/health", *PAGE):
                text = "the header Authorization: Bearer KEY is missing or wrong"
                answer = refusal(401, text, {"WWW-Authenticate": "Bearer"})
                return await answer(scope, receive, send)
            if not self.keys and (text := self._stranger(scope)):
                return await refusal(403, text)(scope, receive, send)
        try:
            await self.app(scope, receive, send)
        except Exception:  # Uvicorn's log is off, and a client is told the error's type alone
            log.exception("%s %s has failed", scope["method"], ascii(scope["path"])[:80])
            raise

    def _stranger(self, scope: Scope) -> str:
        """Why a browser must not send this for another page, or "". Other programs send neither an
        Origin nor Sec-Fetch-Site. A page whose name was made to mean this machine (DNS rebinding)
        gives itself away by that name."""
        heads = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = heads.get(b"host", "localhost"), heads.get(b"origin")
        if not is_address(host):
            return (
                f"Host: must be an address or localhost where no key is needed, was {host[:80]!r}"
            )
        is_own = origin is None or origin.partition("://")[2] == host
        if not (is_own or "*" in self.origins or origin in self.origins):
            return f"Origin: pages of {ascii(origin)[:80]} are not let in; see --allow-origin"
        is_fetched = scope["path"] not in PAGE  # a link to the page is welcome
        site = heads.get(b"sec-fetch-site", "none")
        if is_own and is_fetched and site not in ("none", "same-origin"):
            return f"Sec-Fetch-Site: other pages are not let in, was {ascii(site)[:80]}"
        return ""

    def _key(self, shown: bytes) -> str | None:
        """The key that a client shows. In constant time: the time of a refusal does not tell how
        much of a key was right."""
        scheme, _, given = shown.partition(b" ")
        right = [one for one in self.keys if hmac.compare_digest(given, one.encode())]
        return right[0] if right and scheme.lower() == b"bearer" else None


def is_address(host: str) -> bool:
    """Whether the header Host has an IP address, or localhost, with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or bool(ip_address(name))
    except ValueError:
        return False


async def read(model: type[Model], request: Request) -> Model:
    """A request's body, checked. Clients such as curl do not always say that it is JSON."""
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > LARGEST:
                raise HTTPException(413, f"the body has more than {LARGEST} bytes")
        content = json.loads(data)
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise ValueError(f"the body must be an object in JSON, was {kind}")
        return model.model_validate(content)
    except ClientDisconnect:
        raise HTTPException(LEFT, "the client has left") from None
    except ValidationError as error:
        raise HTTPException(400, in_words(error)) from None
    except (ValueError, RecursionError) as error:  # the second: JSON that is nested too deep
        raise HTTPException(400, str(error)) from None


# ── The two shapes of an answer ───────────────────────────────────────────────


class Completion:
    """An answer of /v1/completions."""

    prefix, chunk_kind, whole_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, spelling: Spelling, echoes: Callable[[int], str], body: CompletionRequest):
        """echoes: what stands before the text of a choice."""
        self._spelling, self._echoes, self._body = spelling, echoes, body
        self._places: dict[int, Places] = {}  # of each choice's tokens

    def chunk(self, index: int, delta: Delta, is_first: bool) -> dict[str, Any]:
        echo = self._echoes(index) if is_first else ""
        told = [one for one in delta.token_ids if isinstance(one, Token)]
        prompt = told[0].prompt if told else ()
        if self._body.only_echoes:
            told, delta = [], Delta([], "", "length")
        choice = {"index": index, "text": echo + delta.text, "token_ids": delta.token_ids}
        logprobs = self._logprobs(index, len(echo), prompt, told)
        return {**choice, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _logprobs(
        self, index: int, width: int, prompt: Sequence[int], told: list[Token]
    ) -> dict[str, Any] | None:
        """width: characters of the prompt."""
        tokens = [*prompt, *told]
        if not tokens or self._body.logprobs is None:
            return None
        text_of = self._spelling.text_of
        places = self._places.setdefault(index, Places(self._spelling, width))
        offsets = self._spelling.places(prompt, width) + [places.take(one) for one in told]
        return {
            "tokens": [text_of(one) for one in tokens], "text_offset": offsets,
            "token_logprobs": [getattr(one, "logprob", None) for one in tokens],
            # Of several tokens with the same text the likeliest is told.
            "top_logprobs": [
                {text_of(other): value for other, value in reversed(one.top)}
                if isinstance(one, Token) else None
                for one in tokens
            ],
        }  # fmt: skip

    def whole(
        self, index: int, text: str, token_ids: list[int], reason: str | None
    ) -> dict[str, Any]:
        return self.chunk(index, Delta(token_ids, text, reason), is_first=True)


class Chat:
    """An answer of /v1/chat/completions."""

    prefix, chunk_kind, whole_kind = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, spelling: Spelling):
        self._spelling = spelling

    def chunk(self, index: int, delta: Delta, is_first: bool) -> dict[str, Any]:
        message = {"role": "assistant"} if is_first else {}
        choice = {"index": index, "delta": {**message, "content": delta.text}}
        logprobs = self._logprobs([one for one in delta.token_ids if isinstance(one, Token)])
        more = {"token_ids": delta.token_ids, "finish_reason": delta.finish_reason}
        return {**choice, "logprobs": logprobs, **more}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        def told(token_id: int, value: float) -> dict[str, Any]:
            text, data = self._spelling.text_of(token_id), self._spelling.bytes_of(token_id)
            return {"token": text, "logprob": value, "bytes": [*data]}

        content = [
            {**told(one, one.logprob), "top_logprobs": [told(*other) for other in one.top]}
            for one in tokens
        ]
        return {"content": content, "refusal": None} if content else None

    def whole(
        self, index: int, text: str, token_ids: list[int], reason: str | None
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        chunk = self.chunk(index, Delta(token_ids, text, reason), is_first=True)
        del chunk["delta"]
        return {**chunk, "message": message}


class Events(Response):
    """Server-sent events. `is_over`: whether the newest is the last: it is then sent together with
    the end of the answer."""

    def __init__(self, events: AsyncIterator[bytes], is_over: Callable[[], bool] = lambda: False):
        super().__init__(None, 200, {"Cache-Control": "no-cache"}, "text/event-stream")
        self.raw_headers = [one for one in self.raw_headers if one[0] != b"content-length"]
        self._events, self._is_over = events, is_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            more = True
            async for event in self._events:
                more = not self._is_over()
                await send({"type": "http.response.body", "body": event, "more_body": more})
            if more:
                await send({"type": "http.response.body", "body": b""})
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]


encode = json.JSONEncoder(default=vars).encode


def event(content: Any) -> bytes:
    return b"data: " + encode(content).encode() + b"\n\n"


async def client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ── One HTTP request at work ──────────────────────────────────────────────────


class Work:
    """The answers to one HTTP request: those of each prompt, one after the other. (The engine
    computes them together.) Cancels what is unfinished when it is closed or the client leaves.
    came: when the request did, by the `clock`."""

    def __init__(
        self, metrics: Metrics, params: SamplingParams, came: float, streams: set[Inbox],
        leave: Callable[[Inbox], None], only_echoes: bool, clock: Callable[[], float],
    ):  # fmt: skip
        self._only_echoes, self._clock = only_echoes, clock
        self._metrics, self._params, self._came = metrics, params, came
        self._streams, self._leave = streams, leave
        self._running: list[tuple[Running, Inbox]] = []
        self._watch: asyncio.Task | None = None
        self._num_over = 0  # how many of `_running`, from the first on, are over
        self.num_generated = 0

    def add(self, running: Running, inbox: Inbox) -> None:
        self._running.append((running, inbox))
        self._streams.add(inbox)

    def watch(self, request: Request) -> None:
        """Cancel everything when the client leaves."""
        self._watch = asyncio.create_task(self._wait_for_leaving(request))

    async def _wait_for_leaving(self, request: Request) -> None:
        await client_leaves(request)
        for running, inbox in self._running:
            running.cancel()
            inbox.put(ClientLeft())

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for running, _ in self._running[self._num_over :]:
            running.cancel()
        for _, inbox in self._running:
            self._leave(inbox)
            self._streams.discard(inbox)

    @property
    def has_begun(self) -> bool:
        """Whether the first request is being computed."""
        return self._running[0][0].has_begun

    async def begin(self) -> None:
        """Wait for the first token. Raises what `deltas` does, and ValueError for what can never
        run."""
        await self._running[0][1].arrive()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, what it got). Raises RequestFailed or ClientLeft."""
        for place, (running, inbox) in enumerate(self._running):
            lengths, before = [0] * self._params.n, 0.0
            num_open = self._params.n
            while num_open:
                news = await inbox.take()
                now = self._clock()  # as the client sees it
                assert inbox.first is not None
                if not before:
                    before = inbox.first
                    self._metrics.begun(now - self._came, running.num_prompt, running.num_cached)
                for sample, delta in news:
                    if delta.finish_reason == "abort":
                        raise RequestFailed("the request was cancelled")
                    self.num_generated += len(delta.token_ids)
                    self._metrics.grown(len(delta.token_ids), now - before, not lengths[sample])
                    lengths[sample] += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        num_open -= 1
                        times = now - inbox.first, now - self._came
                        self._metrics.ended(delta.finish_reason, lengths[sample], *times)
                    self._num_over = place + (num_open == 0)
                    yield place * self._params.n + sample, delta
                before = now

    @property
    def is_over(self) -> bool:
        """Whether nothing comes after the newest delta."""
        return self._num_over == len(self._running)

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far. Cached ones are among the prompt's."""
        num_prompt = sum(running.num_prompt for running, _ in self._running)
        num_cached = sum(running.num_cached for running, _ in self._running)
        num_new = 0 if self._only_echoes else self.num_generated
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


class Api:
    """The endpoints."""

    def __init__(
        self, target: Service, model: str, template: Template | None, admission: Admission,
        max_queued: int, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.target, self.model, self.template = target, model, template
        self.admission, self.max_queued, self.clock = admission, max_queued, clock
        self.room = Room(admission.target, CROWD)
        self.metrics, self.spelling = Metrics(target.health, model), Spelling(target.tokenizer)
        self.began, self._next_id = int(time.time()), 0
        self.streams: set[Inbox] = set()  # that are open
        self.rounds = Rounds(self.pause)
        self.num_views = 0

    def pause(self) -> float:
        """Seconds between two rounds of chunks."""
        return min(LONGEST, len(self.streams) / CHUNKS)

    def share(self, num_prompt: int, params: SamplingParams) -> float:
        """How much of an engine a request can take: of its seats, or of its memory."""
        config = self.target.config
        num_tokens = num_prompt + params.n * params.max_tokens
        return max(params.n / config.max_num_seqs,
                   num_tokens / (config.num_blocks * config.block_size))  # fmt: skip

    def enter(self, inbox: Inbox, num_tokens: int, share: float = 0.0) -> None:
        """Let a request wait for its first token. Raises Busy if that would take too long; while
        that is not known, if too many tokens would wait."""
        self._settle()
        seconds = self.room.enter(inbox, share, self.target.num_engines, self.clock())
        if seconds:
            text = f"{len(self.room.shares)} requests run or wait already, with all that they may"
            raise Busy(f"{text} take", seconds)
        queued = self.admission.queued
        is_full = self.admission.rate is None and 0 < queued > self.max_queued - num_tokens
        seconds = 1 if is_full else self.admission.enter(inbox, num_tokens, self.clock())
        if seconds:
            raise Busy(f"{queued} prompt tokens wait already", seconds)

    def leave(self, inbox: Inbox) -> None:
        """A request is over, whether it had a token or not."""
        self._settle()
        self.admission.leave(inbox)
        self.room.leave(inbox, self.target.num_engines)

    async def _first_token(self, work: Work) -> None:
        """Wait for it. Raises Busy if the request has not even begun when it should have a token,
        because of others; else as `Work.begin`. Nothing is sent yet, so the status is still free.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.admission.target):
                    return await work.begin()
            self._settle()
            waits = len(self.admission.waiting) > 1 or self.room.full_since is not None
            if waits and not work.has_begun:
                text = f"others have taken all room for {self.admission.target:.0f} s"
                raise Busy(text, math.ceil(self.admission.target))

    def _settle(self) -> None:
        for inbox in [*self.admission.waiting]:
            if inbox.first is not None:
                self.admission.first_token(inbox, inbox.first)

    async def completions(self, request: Request) -> Response:
        body = await read(CompletionRequest, request)
        self._check(body, len(body.prompts))
        prompts = [await self._encode(prompt) for prompt in body.prompts]

        def echo(index: int) -> str:
            prompt = body.prompts[index // (body.n or 1)] if body.echo else ""
            return prompt if isinstance(prompt, str) else self.target.tokenizer.decode(prompt)

        shape = Completion(self.spelling, echo, body)
        return await self._answer(request, body, prompts, shape, 16)

    async def chat(self, request: Request) -> Response:
        body = await read(ChatRequest, request)
        self._check(body, 1)
        prompt = await self._chat_prompt(body.messages)
        room = max(1, self.target.max_length - len(prompt))  # what OpenAI's have by default
        ends = await self.template.ends(self.target.tokenizer) if self.template else ()
        return await self._answer(request, body, [prompt], Chat(self.spelling), room, ends)

    async def tokenize(self, request: Request) -> Response:
        body = await read(TokenizeRequest, request)
        if (body.prompt is None) == (body.messages is None):
            raise HTTPException(400, "prompt: give either this or messages")
        self._check_model(body.model)
        if body.messages is not None:
            ids = await self._chat_prompt(body.messages)
        else:
            try:
                prompt = await self._encode(body.prompt)
                ids = require_ids("prompt", prompt, self.target.vocab_size)
            except ValueError as error:
                raise HTTPException(400, shortened(error)) from None
        return reply({"count": len(ids), "max_model_len": self.target.max_length, "tokens": ids})

    async def models(self, request: Request) -> Response:
        return reply({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return reply(self._card())

    async def health(self, request: Request) -> Response:
        found = self.target.health()
        is_up = any(one.pid is not None and one.can_answer and one.age < HANGS for one in found)
        content = {"workers": self._workers(found)} if request.scope["is_known"] else {}
        text = json.dumps(content, default=vars)
        return Response(text, 200 if is_up else 503, None, "application/json")

    def _workers(self, found: Sequence[Health]) -> list[dict[str, Any]]:
        return [
            {"pid": one.pid, "seconds_in_step": round(one.age, 3), "stats": one.stats}
            for one in found
        ]

    async def page(self, request: Request) -> Response:
        name = request.url.path[1:] or "index.html"
        data = (files("minikv.serving") / "page" / name).read_bytes()
        head = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        return Response(data, 200, head, PAGE[request.url.path])

    async def events(self, request: Request) -> Response:
        """What the page draws, until it leaves. A pace slows everybody down, so it needs a server
        without keys. Texts are told to those whose key they came with."""
        if self.num_views >= MAX_VIEWS:
            raise HTTPException(503, f"{self.num_views} pages look already", {"Retry-After": "1"})
        pace = request.query_params.get("pace", "0")
        try:
            seconds = float(pace)
        except ValueError:
            seconds = nan
        if not 0 <= seconds < inf:
            raise HTTPException(400, f"pace: must be seconds, was {ascii(pace)[:80]}")
        tenant = request.scope["tenant"]

        def sees(salt: Any) -> bool:
            return tenant is None or str(salt).partition("/")[0] == tenant

        view = View(min(seconds, MAX_PACE) if tenant is None else 0.0, sees)
        return Events(self._look(request, view))

    async def _look(self, request: Request, view: View) -> AsyncIterator[bytes]:
        leaving = asyncio.create_task(client_leaves(request))
        leaving.add_done_callback(lambda _: view.end())
        self.num_views += 1
        try:
            if isinstance(self.target, EngineLoop):
                self.target.watch(view)
                while (found := await view.take()) is not None:
                    yield event(view.as_json(self.target.engine, *found))
            while not leaving.done():  # a cluster: what its workers report
                yield event({"workers": self._workers(self.target.health())})
                await asyncio.wait([leaving], timeout=0.5)
        finally:
            self.num_views -= 1
            if isinstance(self.target, EngineLoop):
                self.target.unwatch(view)
            leaving.cancel()

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _card(self) -> dict[str, Any]:
        card = {"id": self.model, "object": "model", "created": self.began, "owned_by": "minikv"}
        return {**card, "max_model_len": self.target.max_length}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            raise HTTPException(
                404, f"model: {self.model!r} is served here, was {ascii(name)[:80]}"
            )

    def _check(self, body: Options, num_prompts: int) -> None:
        """What is known before a prompt is encoded."""
        self._check_model(body.model)
        number = num_prompts * body.num_samples
        if number > MAX_CHOICES:
            name = "best_of" if getattr(body, "best_of", None) else "n"
            text = f"{name}: at most {MAX_CHOICES} choices at a time, were {number}"
            raise HTTPException(400, text)

    def _check_ids(self, params: SamplingParams) -> None:
        size = self.target.vocab_size
        bias = params.logit_bias if isinstance(params, Asked) else ()
        stop = [one for one in params.stop if isinstance(one, int)]
        for name, ids in (("logit_bias", [one for one, _ in bias]), ("stop", stop)):
            for token_id in ids:
                if not 0 <= token_id < size:
                    raise ValueError(f"{name}: {token_id} is no token id; there are {size}")

    async def _encode(self, prompt: Any) -> Any:
        """Token ids. Long texts take a while, so other requests go on meanwhile."""
        if not isinstance(prompt, str):
            return prompt  # the engine checks them
        return await self._ids("prompt", prompt, adds_start=True)

    async def _chat_prompt(self, messages: Any) -> list[int]:
        if self.template is None:
            raise HTTPException(400, "messages: there is no chat template; use /v1/completions")
        try:
            text = await self.template([one.model_dump(exclude_none=True) for one in messages])
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return await self._ids("messages", text, adds_start=False)

    async def _ids(self, name: str, text: str, adds_start: bool) -> list[int]:
        tokenizer = self.target.tokenizer
        try:
            require_text(name, text)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        encode = tokenizer.encode
        if len(text) < 10_000:  # sooner done than handed to another thread
            return encode(text, add_special_tokens=adds_start).ids
        found = await asyncio.to_thread(encode, text, add_special_tokens=adds_start)
        return found.ids

    async def _answer(
        self, request: Request, body: Options, prompts: list[Any], shape: Completion | Chat,
        max_tokens: int, ends: tuple[str | int, ...] = (),
    ) -> Response:  # fmt: skip
        tenant, salt = request.scope["tenant"], body.cache_salt
        if tenant is not None:  # a client may divide what is its own, and no more
            salt = tenant if salt is None else f"{tenant}/{salt}"
        work = None
        try:
            params = body.params(max_tokens, salt)
            self._check_ids(params)
            if ends and not params.ignore_eos:
                params = replace(params, stop=(*params.stop, *ends))
            streams = self.streams if body.stream else set()
            came = request.scope["came"]
            work = Work(
                self.metrics, params, came, streams, self.leave, body.only_echoes, self.clock
            )
            for prompt in prompts:
                inbox = Inbox(not body.stream, self.rounds, self.clock)
                session = body.prompt_cache_key or body.user
                running = self.target.submit(prompt, params, session, reader=inbox)
                work.add(running, inbox)
                self.enter(inbox, running.num_prompt, self.share(running.num_prompt, params))
            self.metrics.samples.observe(params.n)
            self.metrics.max_tokens.observe(params.max_tokens)
            work.watch(request)
            await self._first_token(work)  # raises for what cannot run, before anything is sent
            if not body.stream:
                return await self._whole(body, shape, work)
            events = Events(self._events(body, shape, work), lambda: work.is_over)
        except BaseException as error:
            if work is not None:
                work.close()
            if isinstance(error, ClientLeft):
                return Response(status_code=LEFT)
            if isinstance(error, ValueError):
                text = shortened(error)
                if text.startswith("n: ") and isinstance(body, CompletionRequest) and body.best_of:
                    text = f"best_of{text[1:]}"
                raise HTTPException(400, text) from None
            if isinstance(error, Busy):
                self.metrics.rejections.labels(self.model, "0", "capacity").inc()
                after = {"Retry-After": str(error.seconds)}
                raise HTTPException(503, str(error), after) from None
            if isinstance(error, RequestFailed):
                raise HTTPException(500, str(error)) from None
            raise
        return events

    def _head(self, shape: Completion | Chat, kind: str) -> dict[str, Any]:
        self._next_id += 1
        name = f"{shape.prefix}-{self.began}-{self._next_id}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}

    async def _whole(self, body: Options, shape: Completion | Chat, work: Work) -> Response:
        texts: dict[int, list[str]] = {}
        token_ids: dict[int, list[int]] = {}
        reasons: dict[int, str | None] = {}
        async for index, delta in work.deltas():
            texts.setdefault(index, []).append(delta.text)
            token_ids.setdefault(index, []).extend(delta.token_ids)
            reasons[index] = delta.finish_reason
        work.close()
        answered = body.answered([token_ids[index] for index in sorted(token_ids)])
        choices = [
            shape.whole(index, "".join(texts[sample]), token_ids[sample], reasons[sample])
            for index, sample in enumerate(answered)
        ]
        head = self._head(shape, shape.whole_kind)
        return reply({**head, "choices": choices, "usage": work.usage})

    async def _events(
        self, body: Options, shape: Completion | Chat, work: Work
    ) -> AsyncIterator[bytes]:
        options = body.stream_options
        tells = options is not None and options.include_usage
        tells_always = options is not None and options.continuous_usage_stats
        head, begun = self._head(shape, shape.chunk_kind), set()
        try:
            async for index, delta in work.deltas():
                chunk = {**head, "choices": [shape.chunk(index, delta, index not in begun)]}
                if tells or tells_always:
                    chunk["usage"] = work.usage if tells_always else None
                begun.add(index)
                data = event(chunk)
                if work.is_over:  # the last events go together
                    if tells:
                        data += event({**head, "choices": [], "usage": work.usage})
                    data += b"data: [DONE]\n\n"
                yield data
        except ClientLeft:
            pass
        except RequestFailed as error:  # the status is sent already
            yield event(error_body(500, str(error)))
        finally:
            work.close()


def make_app(
    target: Service,
    model: str,
    keys: Sequence[str] = (),
    template: Template | None = None,
    first_token: float = FIRST_TOKEN,
    max_queued_tokens: int | None = None,
    origins: Sequence[str] = (),
) -> Starlette:
    """The application over `target`. keys: those that let clients in; none: everybody comes in.
    template: from messages to a prompt. first_token: seconds that a request may wait for its first
    token. max_queued_tokens: that may wait until it is known how long that takes; by default 64 of
    the longest requests. origins: of other pages that a browser lets read answers
    (CORS); "*" is all of them, and without keys every page can then use the server. Raises
    ValueError for a model without a tokenizer, because answers are text."""
    if target.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, without which the server has no text")
    max_queued = max_queued_tokens or 64 * target.max_length
    api = Api(target, model, template, Admission(first_token, ENOUGH), max_queued)
    app = Starlette()
    app.router.redirect_slashes = False
    if not all(key.strip() for key in keys):
        raise ValueError("keys: one is empty, and lets everybody in")
    app.add_middleware(Keys, keys=tuple(keys), origins=tuple(origins))
    if origins:  # before the keys: browsers ask first, and show none
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(Exception, apologise)
    for path, endpoint, method in (
        ("/v1/completions", api.completions, "POST"),
        ("/v1/chat/completions", api.chat, "POST"),
        ("/v1/models", api.models, "GET"),
        ("/v1/models/{name:path}", api.one_model, "GET"),
        ("/tokenize", api.tokenize, "POST"),
        ("/health", api.health, "GET"),
        ("/metrics", api.show_metrics, "GET"),
        ("/events", api.events, "GET"),
    ):
        app.add_route(path, endpoint, [method])
    for path in PAGE:
        app.add_route(path, api.page)
    return app
