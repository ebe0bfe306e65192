"""One stream's way from the thread of an engine to a reader in an event loop.

    engine's thread ── put(newest) ──> Inbox ── await take() ──> what is new since the last take

The engine never waits for a reader, and nothing piles up for a slow one: an inbox keeps one state,
the newest, so a reader that comes late takes more tokens at once. An inbox therefore holds at most
the tokens of its request.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic

from minikv.outputs import Delta, RequestOutput


class Busy(Exception):
    """No more requests are taken now. Nothing was changed: try again later."""


class RequestFailed(Exception):
    """A request had to be given up."""


class Inbox:
    """What one request has got and its reader has not taken. Made inside the event loop that reads
    it; `put` may be called from any thread.

    patient: the reader wants the first token and the end, and is not woken in between.
    pause: how many seconds are from one `take` to the next; what comes sooner is taken together.
        The end does not wait.
    """

    def __init__(self, patient: bool = False, pause: Callable[[], float] = lambda: 0.0):
        self._loop, self._patient, self._pause = asyncio.get_running_loop(), patient, pause
        self._last_take = -math.inf  # by the loop's clock
        self._woken = asyncio.Event()
        self._lock = Lock()  # guards what follows
        self._output: RequestOutput | None = None  # an engine's: as it stands now
        self._added: dict[int, Delta] = {}  # a cluster's: what was added, by sample
        self._error: Exception | None = None
        self._is_waking = False
        self.first: float | None = None  # when there was something, by `time.monotonic`
        self.newest = 0.0  # when there was last
        self._taken: dict[int, tuple[int, int]] = {}  # tokens and characters, by sample
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
            wakes = is_last or self.first is None or not self._patient
            self.newest = monotonic()
            self.first = self.newest if self.first is None else self.first
            if not wakes or (self._is_waking and not is_last):
                return
            self._is_waking = True
        with suppress(RuntimeError):  # the event loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._woken.set if is_last else self._wake)

    def _wake(self) -> None:
        wait = self._last_take + self._pause() - self._loop.time()
        if wait > 0:
            self._loop.call_later(wait, self._woken.set)
        else:
            self._woken.set()

    async def take(self) -> list[tuple[int, Delta]]:
        """(sample, what it got) since the last call; waits until there is something. Raises what
        was put."""
        await self._woken.wait()
        self._last_take = self._loop.time()
        with self._lock:
            self._woken.clear()
            self._is_waking = False
            if self._error is not None:
                raise self._error
            output, self._output = self._output, None
            added, self._added = self._added, {}
        return self._since(output) if output is not None else sorted(added.items())

    def _since(self, output: RequestOutput) -> list[tuple[int, Delta]]:
        news = []
        for index, sample in enumerate(output.samples):
            num_tokens, num_chars = self._taken.get(index, (0, 0))
            token_ids, text, reason = sample.token_ids, sample.text, sample.finish_reason
            is_news = len(token_ids) > num_tokens or reason is not None
            if is_news and index not in self._over:
                news.append((index, Delta(token_ids[num_tokens:], text[num_chars:], reason)))
                self._taken[index] = len(token_ids), len(text)
                if reason is not None:
                    self._over.add(index)
        return news
