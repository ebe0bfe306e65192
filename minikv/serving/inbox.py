"""One stream's way from the thread of an engine to a reader in an event loop.

    engine's thread ── put(newest) ──> Inbox ── await take() ──> what is new since the last take
                                         │
                                       Rounds   wake the readers of all inboxes together

The engine never waits for a reader, and nothing piles up for a slow one: an inbox keeps one state,
and a reader that comes late takes all tokens of its request until then.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic

from minikv.outputs import Decode, Delta, RequestOutput, SoFar
from minikv.sequence import Request


def as_it_stands(request: Request, decode: Decode) -> RequestOutput:
    """A request at this moment."""
    return RequestOutput(request, iter([len(one.token_ids) for one in request.sequences]), decode)


class Busy(Exception):
    """No more requests are taken now. Nothing was changed: try again, in so many seconds if that
    is known."""

    def __init__(self, text: str, seconds: int = 1):
        super().__init__(text)
        self.seconds = seconds


class RequestFailed(Exception):
    """A request had to be given up."""


class Rounds:
    """When readers are woken: all who have got something together, `pause` seconds after the round
    before. Another thread calls the event loop once per round, and not once per token and reader:
    each call makes that thread wait for the loop's. Who must not wait for a round is woken with
    those of whom the same is true, and the next round is after a pause then, too."""

    def __init__(self, pause: Callable[[], float] = lambda: 0.0):
        self._pause, self._lock = pause, Lock()
        self._asleep: list[asyncio.Event] = []  # of readers who have got something
        self._urgent: list[asyncio.Event] = []
        self._last = -math.inf  # by the loop's clock

    def join(self, loop: asyncio.AbstractEventLoop, reader: asyncio.Event, urgent: bool) -> None:
        """Wake a reader in the next round, or at once. From any thread."""
        with self._lock:
            joined = self._urgent if urgent else self._asleep
            joined.append(reader)
            is_first = len(joined) == 1
        if is_first and urgent:
            loop.call_soon_threadsafe(self._hurry, loop)
        elif is_first:
            loop.call_soon_threadsafe(self._begin, loop)

    def _hurry(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._asleep:  # else a round is due
            self._last = loop.time()
        self._wake(self._urgent)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        wait = self._last + self._pause() - loop.time()
        if wait > 0:
            loop.call_later(wait, self._begin, loop)
            return
        self._last = loop.time()
        self._wake(self._asleep)

    def _wake(self, joined: list[asyncio.Event]) -> None:
        with self._lock:
            readers = [*joined]
            joined.clear()
        for reader in readers:
            reader.set()


class Inbox:
    """What one request has got and its reader has not taken. Made inside the event loop that reads
    it; `put` may be called from any thread.

    patient: the reader wants the first token and the end, and is not woken in between.
    rounds: in which the reader is woken for what comes between the first token and the end.
    """

    def __init__(
        self, patient: bool = False, rounds: Rounds | None = None,
        clock: Callable[[], float] = monotonic,
    ):  # fmt: skip
        self._loop, self._patient = asyncio.get_running_loop(), patient
        self._clock = clock
        self._rounds = rounds or Rounds()
        self._woken = asyncio.Event()
        self._lock = Lock()  # guards what follows
        self._output: RequestOutput | None = None  # an engine's: as it stands now
        self._added: dict[int, Delta] = {}  # a cluster's: what was added, by sample
        self._error: Exception | None = None
        self.has_news = False  # that were not taken: only the end need be put
        self.first: float | None = None  # when there was a token, by the clock
        self._taken: dict[int, SoFar] = {}  # by sample
        self._over: set[int] = set()  # samples whose end was taken

    def put(self, found: RequestOutput | Delta | Exception, sample: int = 0) -> None:
        """Hand over a request as it stands now, what was added to a sample of it, or why it
        failed."""
        with self._lock:
            if isinstance(found, RequestOutput):
                self._output = found
            elif isinstance(found, Delta):
                old = self._added.get(sample, Delta([], "", None))
                ids, text = old.token_ids + found.token_ids, old.text + found.text
                self._added[sample] = Delta(ids, text, found.finish_reason)
            else:
                self._error = found
            is_last = isinstance(found, Exception) or found.finish_reason is not None
            is_first = self.first is None and self._error is None
            if is_first:
                self.first = self._clock()
            is_told, self.has_news = self.has_news, True
        is_urgent = is_first or is_last
        if not is_urgent and (is_told or self._patient):
            return
        with suppress(RuntimeError):  # the event loop is closed: there is no reader any more
            self._rounds.join(self._loop, self._woken, is_urgent)

    async def arrive(self) -> None:
        """Wait until there is something. Raises what was put."""
        await self._woken.wait()
        if self._error is not None:
            raise self._error

    async def take(self) -> list[tuple[int, Delta]]:
        """(sample, what it got) since the last call; as `arrive`."""
        news: list[tuple[int, Delta]] = []
        while not news:  # the last call may have taken what was put since
            await self.arrive()
            with self._lock:
                self._woken.clear()
                self.has_news = False
                output, self._output = self._output, None
                added, self._added = self._added, {}
            news = self._since(output) if output is not None else sorted(added.items())
        if self._error is not None:  # it came meanwhile; what it ended must not look cancelled
            raise self._error
        return news

    def _since(self, output: RequestOutput) -> list[tuple[int, Delta]]:
        """What its request has got until now, which may be more than when it was put."""
        news = []
        now = as_it_stands(output.request, output.samples[0].decode)
        for index, sample in enumerate(now.samples):
            if index in self._over:
                continue
            delta = self._taken.setdefault(index, SoFar()).news(sample)
            if delta.token_ids or delta.finish_reason is not None:
                news.append((index, delta))
            if delta.finish_reason is not None:
                self._over.add(index)
        return news
