"""Serving: an engine's thread and its readers, text, clients that leave, load, and metrics.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("15.1") in the notebook, or in a terminal: python -m minikv check 15.1
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from minikv.course.chapters.ch15_serving.given import Lookup
from minikv.engine import Engine
from minikv.outputs import REPLACEMENT, Delta, RequestOutput, find_stop
from minikv.sampling import SamplingParams


class Inbox:
    """One request's way from the engine's thread to a reader in an event loop.

    engine's thread ── put(output) ──> Inbox ── await take() ──> what is new since the last take
    """

    def __init__(self):
        self.loop = asyncio.get_running_loop()  # the reader's
        self.woken = asyncio.Event()  # of that loop: only its thread may set it
        self.lock = Lock()  # guards all that follows
        self.output = None  # the newest RequestOutput that was not collected
        self.error = None  # an exception that was put
        self.is_waking = False  # a wake-up was sent, and nothing was collected since
        self.num_tokens = self.num_chars = 0  # that were collected

    # ── 15.1 From one thread to many readers ──────────────────────────────────────
    def put(self, found: RequestOutput | Exception) -> None:
        """Hand over the request as it stands now, or why it failed. In the engine's thread.

        Keeps only the newest: an output has all tokens of its request so far. Wakes the reader by
        `self.loop.call_soon_threadsafe(self.woken.set)`, unless a wake-up was sent since the last
        `collect`. Never waits for the reader and never raises: that call raises RuntimeError if the
        loop is closed, and then there is no reader any more.
        """
        raise NotImplementedError("Exercise 15.1: Inbox.put")

    # ── 15.1 From one thread to many readers ──────────────────────────────────────
    def collect(self) -> Delta:
        """What is new since the last `collect`. In the loop's thread, after a wake-up.

        Returns Delta(token_ids, text, finish_reason): what was added, and the output's own
        `finish_reason`. Raises what was put, if that was an exception. The next `take` then waits
        for the next `put`, which may come while this one runs.
        """
        raise NotImplementedError("Exercise 15.1: Inbox.collect")

    async def take(self) -> Delta:
        """Waits until something was put."""
        await self.woken.wait()
        return self.collect()


# ── 15.2 Text from tokens ─────────────────────────────────────────────────────────
def visible_text(text: str, stop: tuple[str | int, ...], finished: bool) -> str:
    """What of an answer's text may be sent.

    A stop string ends it: only what stands before the first one is visible. While the answer is
    unfinished, an end that may still change is held back, and no more: half a character, which
    decodes to one or more U+FFFD, and then whatever could begin a stop string. Token ids among
    `stop` are not looked for.

    Worked example, stop strings "END" and "class": of "a E" one character is held back, of "a cla"
    three, and of "a END b" the last five are never sent.
    """
    raise NotImplementedError("Exercise 15.2: visible_text")


class TextStream:
    """The text of one answer, in pieces. No piece is ever taken back."""

    def __init__(
        self, decode: Callable[[list[int]], str], prompt_ids: list[int], stop: tuple[str, ...] = ()
    ):
        self.decode, self.prompt_ids, self.stop = decode, prompt_ids, stop
        self.token_ids: list[int] = []  # of the answer
        self.num_sent = 0  # characters

    # ── 15.2 Text from tokens ─────────────────────────────────────────────────────
    def add(self, token_ids: list[int], finished: bool) -> str:
        """The text to send now that the answer has these further tokens.

        If the prompt ends inside a character, the answer begins with that character, whole, or with
        U+FFFD if it does not complete it. No other text of the prompt is sent. The pieces join to
        the `visible_text` of the answer.

        Worked example: the prompt is "é" without its last byte. The answer's first token is that
        byte: "é" is sent.
        """
        raise NotImplementedError("Exercise 15.2: TextStream.add")


class Front:
    """Which client waits for which requests of an engine. Called between two steps only."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.owners: dict[int, str] = {}  # request id -> client, of unfinished requests
        self.streams: set[int] = set()  # those whose tokens are sent one by one

    def submit(self, client: str, prompt_ids: list[int], max_tokens: int, stream: bool) -> int:
        """Queue a request of a client; returns its id. A client may have several."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request_id = self.engine.add_request(prompt_ids, params)
        self.owners[request_id] = client
        if stream:
            self.streams.add(request_id)
        return request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine. What is finished has no owner any more."""
        outputs = list(self.engine.step())
        for output in outputs:
            if output.finish_reason is not None:
                self.forget(output.request_id)
        return outputs

    # ── 15.3 Tokens that no one reads: broken, fix it ─────────────────────────────
    def leave(self, client: str) -> None:
        """The client has closed its connection. Its blocks are free before the next step, and
        nothing more is computed for it."""
        for request_id, owner in list(self.owners.items()):
            if owner == client and request_id in self.streams:
                self.forget(request_id)
                self.abort(request_id)

    def abort(self, request_id: int) -> None:
        """Stop a request, unless it is over."""
        if request_id in self.owners:
            self.engine.abort(request_id)

    def forget(self, request_id: int) -> None:
        self.owners.pop(request_id, None)
        self.streams.discard(request_id)


class Admission:
    """Lets requests in as long as they get their first token in time.

    target: seconds that a request may wait for its first token.
    enough: tokens that a measurement of the rate needs; fewer would measure a single step.
    Times are seconds of any clock; a request is named by a `key`.
    """

    def __init__(self, target: float, enough: int = 0):
        self.target, self.enough = target, enough
        self.waiting: dict[Any, int] = {}  # prompt tokens of requests without a first token
        self.began: dict[Any, tuple[float, int]] = {}  # when each came, and all tokens queued then
        self.measured: deque[tuple[int, float]] = deque(maxlen=8)  # (tokens, seconds)

    @property
    def queued(self) -> int:
        """Prompt tokens that wait."""
        return sum(self.waiting.values())

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second, over the last measurements; None before the first."""
        seconds = sum(one for _, one in self.measured)
        return sum(one for one, _ in self.measured) / seconds if seconds else None

    # ── 15.4 How long may a queue be? ─────────────────────────────────────────────
    def enter(self, key: Any, num_tokens: int, now: float) -> int:
        """Let a request wait, and return 0. Or refuse it, and return after how many seconds it
        would be let in if no other came: the value of Retry-After, rounded up.

        It would wait for all tokens that are queued, and for its own, at `self.rate`. If that is at
        most `self.target`, it is let in. So it is if the rate is not known, or nothing waits.
        """
        raise NotImplementedError("Exercise 15.4: Admission.enter")

    # ── 15.4 How long may a queue be? ─────────────────────────────────────────────
    def first_token(self, key: Any, now: float) -> None:
        """A request has its first token and waits no more. Since it came, all that was queued then
        was computed, its own tokens included: a measurement of the rate, if it is of at least
        `self.enough` tokens."""
        raise NotImplementedError("Exercise 15.4: Admission.first_token")

    def leave(self, key: Any) -> None:
        """A client has left. It waits no more, and nothing was measured."""
        self.waiting.pop(key, None)
        self.began.pop(key, None)


# ── 15.5 What the metrics say ─────────────────────────────────────────────────────
def quantile(
    bounds: Sequence[float], before: Sequence[int], after: Sequence[int], share: float
) -> float | None:
    """Below which value this share of the observations is, by a histogram read twice.

    bounds: the buckets' upper limits, ascending; the last is infinity. before, after: the counter
    of each bucket at two times. Counters only grow, and are cumulative: each counts all
    observations up to its limit. share: above 0, at most 1.

    The observations of a bucket are taken as evenly spread over it; the first begins at 0. In the
    last bucket the highest finite limit is returned, because more is not known. None if there was
    no observation in between. (As Prometheus' `histogram_quantile`.)

    Worked example: limits 1, 2, inf with 0, 0, 0 before and 2, 6, 6 after. Half of 6 is the third
    observation, the first of four between 1 and 2: 1.25.
    """
    raise NotImplementedError("Exercise 15.5: quantile")


# ── 15.5 What the metrics say ─────────────────────────────────────────────────────
def hit_rate(lookups: Sequence[Lookup]) -> float:
    """The share of looked-up tokens that the prefix cache had, 0.0 if none was looked up.

    Each has num_tokens looked up, num_found, is_admitted, and num_preemptions until then. Only what
    was saved counts: a look-up after which the request was not admitted is repeated in the next
    step, and one after a preemption finds the request's own blocks.
    """
    raise NotImplementedError("Exercise 15.5: hit_rate")


# ── 15.6 A server on paper ────────────────────────────────────────────────────────
def on_paper() -> dict[str, float]:
    """A server, before it is built. A step with n sequences takes 6 + n milliseconds, for any n up
    to 64, and each sequence gets a token from it. An answer has 50 tokens. Prompts cost nothing.
    Users accept at most 16 ms between two tokens; a slower answer is worth nothing to them.

    "tokens": tokens per second with 16 sequences.
    "most": with how many sequences at most are users satisfied?
    "goodput": answers per second that satisfy, with that many.
    "throughput": answers per second with 64 sequences.
    "goodput of 64": of these, those that satisfy.
    "refused": 20 requests per second come. Which share must be refused, so that all others are
        satisfied at once?
    "wait": no one is refused, "most" run at a time, and the others wait in a queue. How many
        seconds does the request wait that comes after a minute?
    """
    raise NotImplementedError("Exercise 15.6: on_paper")
