"""Chapter 15: references of exercises that the engine does not have, or has in another form."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

from minikv.course.chapters.ch15_serving.given import Lookup
from minikv.engine import Engine
from minikv.outputs import REPLACEMENT, Delta, RequestOutput, visible_text
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

    def put(self, found: RequestOutput | Exception) -> None:
        """Hand over the request as it stands now, or why it failed. In the engine's thread.

        Keeps only the newest: an output has all tokens of its request so far. Wakes the reader by
        `self.loop.call_soon_threadsafe(self.woken.set)`, unless a wake-up was sent since the last
        `collect`. Never waits for the reader and never raises: that call raises RuntimeError if the
        loop is closed, and then there is no reader any more.
        """
        with self.lock:
            if isinstance(found, Exception):
                self.error = found
            else:
                self.output = found
            if self.is_waking:
                return
            self.is_waking = True
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.woken.set)

    def collect(self) -> Delta:
        """What is new since the last `collect`. In the loop's thread, after a wake-up.

        Returns Delta(token_ids, text, finish_reason): what was added, and the output's own
        `finish_reason`. Raises what was put, if that was an exception. The next `take` then waits
        for the next `put`, which may come while this one runs.
        """
        with self.lock:
            self.woken.clear()
            self.is_waking = False
            output, error = self.output, self.error
            self.output = None
        if error is not None:
            raise error
        token_ids, text = output.token_ids, output.text
        news = Delta(token_ids[self.num_tokens :], text[self.num_chars :], output.finish_reason)
        self.num_tokens, self.num_chars = len(token_ids), len(text)
        return news

    async def take(self) -> Delta:
        """Waits until something was put."""
        await self.woken.wait()
        return self.collect()


class TextStream:
    """The text of one answer, in pieces. No piece is ever taken back."""

    def __init__(
        self, decode: Callable[[list[int]], str], prompt_ids: list[int], stop: tuple[str, ...] = ()
    ):
        self.decode, self.prompt_ids, self.stop = decode, prompt_ids, stop
        self.token_ids: list[int] = []  # of the answer
        self.num_sent = 0  # characters

    def add(self, token_ids: list[int], finished: bool) -> str:
        """The text to send now that the answer has these further tokens.

        If the prompt ends inside a character, the answer begins with that character, whole, or with
        U+FFFD if it does not complete it. No other text of the prompt is sent. The pieces join to
        the `visible_text` of the answer.

        Worked example: the prompt is "é" without its last byte. The answer's first token is that
        byte: "é" is sent.
        """
        self.token_ids += token_ids
        begin = len(self.decode(self.prompt_ids).rstrip(REPLACEMENT))
        text = self.decode(self.prompt_ids + self.token_ids)[begin:]
        visible = visible_text(text, self.stop, finished)
        piece = visible[self.num_sent :]
        self.num_sent = len(visible)
        return piece


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

    def leave(self, client: str) -> None:
        """The client has closed its connection. Its blocks are free before the next step, and
        nothing more is computed for it."""
        for request_id, owner in list(self.owners.items()):
            if owner == client:
                self.abort(request_id)
                self.forget(request_id)

    def abort(self, request_id: int) -> None:
        """Stop a request, unless it is over."""
        if request_id in self.owners:
            self.engine.abort(request_id)

    def forget(self, request_id: int) -> None:
        self.owners.pop(request_id, None)
        self.streams.discard(request_id)


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
    counts = [b - a for a, b in zip(before, after, strict=True)]
    rank = share * counts[-1]
    if counts[-1] == 0:
        return None
    place = next(i for i, count in enumerate(counts) if count >= rank)
    if place == len(bounds) - 1:
        return bounds[place - 1]
    lower, below = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0)
    inside = counts[place] - below
    return lower + (bounds[place] - lower) * (rank - below) / inside


def hit_rate(lookups: Sequence[Lookup]) -> float:
    """The share of looked-up tokens that the prefix cache had, 0.0 if none was looked up.

    Each has num_tokens looked up, num_found, is_admitted, and num_preemptions until then. Only what
    was saved counts: a look-up after which the request was not admitted is repeated in the next
    step, and one after a preemption finds the request's own blocks.
    """
    counted = [one for one in lookups if one.is_admitted and one.num_preemptions == 0]
    looked_up = sum(one.num_tokens for one in counted)
    return sum(one.num_found for one in counted) / looked_up if looked_up else 0.0


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
    most = 16 - 6
    goodput = most / (50 * 0.016)
    return {
        "tokens": 16 / 0.022,
        "most": most,
        "goodput": goodput,
        "throughput": 64 / (50 * 0.070),
        "goodput of 64": 0.0,
        "refused": 1 - goodput / 20,
        "wait": 60 * (20 - goodput) / goodput,
    }
