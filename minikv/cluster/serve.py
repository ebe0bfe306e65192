"""A front over HTTP, shaped like OpenAI's completions, so that their clients can talk to it.

    POST /v1/completions   {"prompt": "def f(", "max_tokens": 64, "stream": true}
    GET  /v1/models        the one model
    GET  /health           each worker's process (null: it is being replaced) and what it has done

The standard library's server has a thread for each connection. That is enough for the workers here,
and all of it can be read; Ray Serve and others do more, but hide it. There are `SPARE` more threads
than requests that the front takes. If one more client comes, the one that has been silent for
longest has to go, before it has asked for anything; if all have asked, the new one is refused.

Each request needs the server's token, as `Authorization: Bearer TOKEN`; OpenAI's clients send API
keys in this way. Without it the answer is 401. Only /health answers without a token, because load
balancers send none: then only its status says whether a worker is up. There is no encryption: on an
open network, put a server with TLS in front.

Beside OpenAI's fields there are `top_k`, `ignore_eos`, and `cache_salt`: only requests of the same
salt share a prefix. `user` names the session for sticky routing. An unknown field is refused,
unless its value asks for what is done anyway; routers and clients send such fields with every
request.
"""

import hmac
import json
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from select import select
from threading import Semaphore
from typing import Any

from minikv.cluster.front import Busy, Front, RequestFailed, Stream
from minikv.errors import require_bool
from minikv.outputs import Delta
from minikv.sampling import SamplingParams

LARGEST = 2**20  # bytes of a request
SILENCE = 60  # seconds that a client may take for a read or a write
SPARE = 32  # connections beside those whose requests the front takes
PARAMS = ("temperature", "top_k", "top_p", "seed", "n", "ignore_eos", "cache_salt")

DONE_ANYWAY = {
    "best_of": 1, "echo": False, "frequency_penalty": 0, "no_stop_trim": False,
    "presence_penalty": 0, "return_hidden_states": False, "skip_special_tokens": True,
}  # fmt: skip


class Server(ThreadingHTTPServer):
    """Serves a front. `server_port` is the port, even if the system has chosen it; `token` is what
    requests have to show. If none is given, one is made up."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, front: Front, model: str, host: str = "127.0.0.1", port: int = 0, token: str = ""
    ):
        super().__init__((host, port), Handler)
        self.front, self.model = front, model
        self.token = token or secrets.token_urlsafe(32)
        self.silent: dict[Any, None] = {}  # connections that have not asked yet, the oldest first
        self._room = Semaphore(front.max_requests + SPARE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            for oldest in list(self.silent)[:1]:
                self.silent.pop(oldest, None)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            if not self._room.acquire(timeout=1):
                with suppress(OSError):
                    request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n")
                self.shutdown_request(request)
                return
        self.silent[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.silent.pop(request, None)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # else the client has left
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection: one request."""

    server: Server
    timeout = SILENCE

    def do_GET(self) -> None:
        self.server.silent.pop(self.connection, None)
        if self.path == "/health":
            lanes = self.server.front.lanes
            workers = [
                {"pid": lane.pid, "stats": vars(lane.stats) if lane.stats is not None else None}
                for lane in lanes
            ]
            is_up = any(lane.pid is not None for lane in lanes)
            self._reply(200 if is_up else 503, {"workers": workers} if self._has_token() else {})
        elif not self._has_token():
            self._refuse_stranger()
        elif self.path == "/v1/models":
            model = {"id": self.server.model, "object": "model", "owned_by": "minikv"}
            self._reply(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        if not self._has_token():
            self._refuse_stranger()
            return
        if self.path != "/v1/completions":
            self._refuse(404, f"there is no {self.path}")
            return
        try:
            body = self._body()
            is_stream = require_bool("stream", body.pop("stream", False))
            stream = self._submit(body)
            deltas = iter(stream)
            first = next(deltas)  # raises for what cannot run, before anything is sent
        except (ValueError, RecursionError) as error:  # the second: JSON that is nested too deep
            self._refuse(400, str(error))
        except Busy as error:
            self._refuse(503, str(error), {"Retry-After": "1"})
        except RequestFailed as error:
            self._refuse(500, str(error))
        else:
            self._answer(stream, first, deltas, is_stream)

    def _has_token(self) -> bool:
        shown = self.headers.get("Authorization", "").encode("latin-1")
        # In constant time: the time of a refusal does not tell how much of the token was right.
        return hmac.compare_digest(shown, f"Bearer {self.server.token}".encode())

    def _refuse_stranger(self) -> None:
        text = "the header Authorization: Bearer TOKEN is missing or wrong"
        self._refuse(401, text, {"WWW-Authenticate": "Bearer"})

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST:
            raise ValueError(
                f"Content-Length: must be a number up to {LARGEST}, was {length or 'missing'}"
            )
        data = self.rfile.read(int(length))
        self.server.silent.pop(self.connection, None)
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError(f"the body must be an object in JSON, was {type(body).__name__}")
        return body

    def _submit(self, body: dict[str, Any]) -> Stream:
        if "prompt" not in body:
            raise ValueError("prompt: is missing")
        prompt, session = body.pop("prompt"), body.pop("user", None)
        if session is not None and not isinstance(session, str):
            raise ValueError(f"user: must be a string, was {session!r}")
        model = body.pop("model", self.server.model)
        if model != self.server.model:
            raise ValueError(f"model: {self.server.model!r} is served here, was {model!r}")
        stop = body.pop("stop", None)
        options = {name: body.pop(name) for name in PARAMS if body.get(name) is not None}
        options["max_tokens"] = body.pop("max_tokens", 16)  # OpenAI's default
        options["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else stop
        unknown = [name for name in body if body[name] not in (None, DONE_ANYWAY.get(name))]
        if unknown:
            raise ValueError(f"{unknown[0]}: is not supported here")
        return self.server.front.submit(prompt, SamplingParams(**options), session)

    def _answer(
        self, stream: Stream, first: Delta, deltas: Iterator[Delta], is_stream: bool
    ) -> None:
        head = {
            "id": f"cmpl-{stream.job_id}", "object": "text_completion",
            "created": int(time.time()), "model": self.server.model,
        }  # fmt: skip

        def choice(text: str, token_ids: list[int], reason: str | None) -> dict[str, Any]:
            one = {"index": 0, "text": text, "token_ids": token_ids, "finish_reason": reason}
            return {**head, "choices": [one]}

        try:
            if is_stream:
                self._head(200, "text/event-stream")
                for delta in chain([first], deltas):
                    self._event(choice(delta.text, delta.token_ids, delta.finish_reason))
                self.wfile.write(b"data: [DONE]\n\n")
                return
            texts, token_ids, reason = [], [], None
            for delta in chain([first], deltas):
                texts.append(delta.text)
                token_ids += delta.token_ids
                reason = delta.finish_reason
                if self._has_left():
                    return
            usage = {"prompt_tokens": stream.num_prompt, "completion_tokens": len(token_ids)}
            usage["total_tokens"] = sum(usage.values())
            self._reply(200, {**choice("".join(texts), token_ids, reason), "usage": usage})
        except RequestFailed as error:
            if is_stream:
                self._event({"error": {"message": str(error)}})
            else:
                self._refuse(500, str(error))
        except OSError:
            pass  # the client has left, or reads nothing
        finally:
            stream.cancel()

    def _has_left(self) -> bool:
        """Whether the client has closed the connection."""
        readable, _, _ = select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _head(self, status: int, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _reply(
        self, status: int, content: dict[str, Any], more: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(content, default=vars).encode()
        self._head(status, "application/json", {"Content-Length": str(len(data)), **(more or {})})
        self.wfile.write(data)

    def _refuse(self, status: int, text: str, more: dict[str, str] | None = None) -> None:
        self._reply(status, {"error": {"message": text, "code": status}}, more)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: prompts and salts do not belong in a log."""
