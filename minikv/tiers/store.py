"""The interface of a lower tier, and a thread that uses it beside the engine."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Protocol

from minikv.tiers import entry as entries
from minikv.tiers.costs import FittedLine
from minikv.tiers.names import Name

log = logging.getLogger("minikv.tiers")

STUCK = 20.0  # seconds without any progress, after which nobody waits for a tier any longer
FORGET_AFTER = 30.0  # seconds without a read, after which a tier that was slow is tried again

# unpack(entry, name=…): the bytes of the block. Raises ValueError for a bad entry.
Unpack = Callable[..., memoryview]


class LowerTier(Protocol):
    """Entries by name: a disk, or another machine. It may fail, forget, or be slow."""

    def names(self) -> Iterable[Name]:
        """The names of what is there when it is opened, as far as they are known."""
        ...

    def get_many(self, names: Seq[Name]) -> list[bytes | None]:
        """The entries of these names, None for a name that is not there."""
        ...

    def put_many(self, entries: Mapping[Name, bytes]) -> list[Name]:
        """Keep entries, if necessary in place of older ones; returns the names that were
        dropped."""
        ...

    def remove(self, name: Name) -> None:
        """Forget an entry, because it is damaged."""
        ...

    def close(self) -> None: ...


class SharedTier(LowerTier, Protocol):
    """A tier that others write to as well, so it must be asked what is there."""

    def contains(self, names: Seq[Name]) -> list[bool]:
        """Whether each of these entries is there now."""
        ...


class Signal:
    """Set by one thread, awaited by another.

    As threading.Event, but without a lock that an interrupt could leave held: Event and Condition
    take theirs in Python, and Control-C may arrive between taking it and the `try` that gives it
    back. A SimpleQueue's calls are one step each, so they are done or not done.
    """

    def __init__(self):
        self._is_set = False
        self._news: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._news.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Return whether it is set, at once or after so many seconds."""
        if not self._is_set:
            with suppress(Empty):
                self._news.get(timeout=max(0.0, seconds))
                self._news.put(None)  # for another thread that waits
        return self._is_set


class Wait(Signal):
    """Set when all is done that was handed over before, or when a write has failed."""

    has_failed = False


class Question:
    """A question on its way: which of these names a shared tier has."""

    def __init__(self, names: list[Name]):
        self.names = names
        self.there: set[Name] = set()  # complete when `done` is set
        self.done = Signal()


class Fetch:
    """Entries on their way."""

    def __init__(self, names: list[Name], unpack: Unpack):
        self.names, self.unpack = names, unpack
        self.found: dict[Name, memoryview] = {}  # complete when `done` is set
        self.done = Signal()


class Background:
    """A lower tier in a thread of its own. No call waits for it, except `wait` and `close`.

    Entries that are still to be written are served from memory. At most `most_waiting` bytes wait
    to be written; beyond that new entries are dropped, because a slow disk must not stop the
    engine. Reads go before writes. An error of the tier becomes one line in the log, and a miss.
    The thread also computes the checksums.

    There is no lock, so no interrupt can leave one held. What both threads change are a dictionary,
    a set and queues, by calls that are one step each; every counter is written by one thread. So an
    interrupt of the engine's thread may lose the block or the question that it was handing over,
    and nothing else.
    """

    BATCH = 16 << 20  # bytes written together

    def __init__(
        self, tier: LowerTier, most_waiting: int = 256 << 20, stuck: float = STUCK,
        clock: Callable[[], float] = perf_counter,
    ):  # fmt: skip
        self.tier, self.most_waiting, self.stuck, self.clock = tier, most_waiting, stuck, clock
        self.known = set(tier.names())
        self.reading = FittedLine(FORGET_AFTER, clock)  # seconds of a read by its bytes
        self.num_bytes_in = self.num_bytes_out = self.num_bad = self.num_failed = 0
        self.seconds_in = self.seconds_out = 0.0
        self._num_refused = self._num_lost = 0  # by the engine's thread, and by the writer's
        # To be written, or being written, the oldest first: identity and bytes of the block.
        self._waiting: dict[Name, tuple[bytes, bytes]] = {}
        self._fetches: deque[Fetch | Question] = deque()
        self._waits: deque[Wait] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()  # one for each thing to do, or more
        self._said: set[str] = set()
        self._closed, self._ended = False, Signal()
        self._thread = threading.Thread(target=self._work, name="minikv tier", daemon=True)
        self._thread.start()

    def __contains__(self, name: Name) -> bool:
        return name in self.known

    @property
    def num_dropped(self) -> int:
        """Entries that were not written."""
        return self._num_refused + self._num_lost

    def put(self, name: Name, identity: bytes, data: bytes) -> bool:
        """Queue a block to be written as an entry. Returns False if it is dropped. All blocks of
        one tier have the same number of bytes."""
        if name in self.known or name in self._waiting:
            return True
        if self._closed or (len(self._waiting) + 1) * len(data) > self.most_waiting:
            self._num_refused += 1
            return False
        self.known.add(name)
        self._waiting[name] = identity, data
        self._wake.put(None)
        return True

    def get(self, names: list[Name], unpack: Unpack) -> Fetch:
        """Begin to read these entries."""
        fetch = Fetch(names, unpack)
        self._begin(fetch)
        return fetch

    def ask(self, names: list[Name]) -> Question:
        """Begin to ask a SharedTier which of these it has."""
        question = Question(names)
        self._begin(question)
        return question

    def _begin(self, one: Fetch | Question) -> None:
        self._fetches.append(one)
        if self._ended.is_set():
            one.done.set()
        self._wake.put(None)

    def wait(self, patience: float | None = None) -> bool:
        """Return True when everything is read and written. Returns False if a write fails, or after
        `patience` seconds; without patience, when there is no progress for `stuck` seconds."""
        failed, end = self.num_failed, Wait()
        self._waits.append(end)
        self._wake.put(None)
        if self.num_failed > failed or self._ended.is_set():  # it may not be noticed any more
            return False
        done = -1
        while not end.wait(self.stuck if patience is None else patience):
            if patience is not None or done == (done := self._progress()):
                return False
        return not end.has_failed

    def _progress(self) -> int:
        return self.num_bytes_in + self.num_bytes_out + self._num_lost

    def close(self, patience: float | None = None) -> None:
        """Write what waits, and end; what is left after `patience` seconds is dropped, or if there
        is no progress, or if a write fails."""
        is_inside = threading.current_thread() is self._thread  # a finalizer may run anywhere
        if not (self._closed or is_inside):
            self.wait(patience)
        self._closed = True
        self._wake.put(None)
        if not is_inside:
            self._ended.wait(self.stuck if patience is None else patience)

    def _work(self) -> None:
        while not self._closed:
            due = len(self._waits)  # what these wait for was handed over before them
            if self._fetches:
                one = self._fetches.popleft()
                if isinstance(one, Question):
                    self._answer(one)
                else:
                    self._read(one)
            elif self._waiting:
                if not self._write(self._next_batch()):  # nobody waits for the next failures
                    self._end_waits(len(self._waits), have_failed=True)
            else:
                self._end_waits(due)
                self._wake.get()
        self._try("closed", self.tier.close)
        self._ended.set()
        while self._fetches:
            self._fetches.popleft().done.set()
        self._end_waits(len(self._waits), have_failed=bool(self._waiting))

    def _end_waits(self, count: int, have_failed: bool = False) -> None:
        for _ in range(count):
            end = self._waits.popleft()
            end.has_failed = have_failed
            end.set()

    def _next_batch(self) -> dict[Name, tuple[bytes, bytes]]:
        batch: dict[Name, tuple[bytes, bytes]] = {}
        size = 0
        for name in list(self._waiting):
            batch[name] = self._waiting[name]
            size += len(batch[name][1])
            if size >= self.BATCH:
                break
        return batch

    def _answer(self, question: Question) -> None:
        ask: Callable = self.tier.contains  # type: ignore[attr-defined]  # of a SharedTier
        answers = self._try("asked", lambda: ask(question.names)) or [False] * len(question.names)
        for name, is_there in zip(question.names, answers, strict=True):
            if is_there:
                question.there.add(name)
        self.known |= question.there
        self.known.difference_update(set(question.names) - question.there)
        question.done.set()

    def _read(self, fetch: Fetch) -> None:
        started = self.clock()
        # Only this thread takes away from what waits.
        waiting = [name for name in fetch.names if name in self._waiting]
        fetch.found |= {name: memoryview(self._waiting[name][1]) for name in waiting}
        on_tier = [name for name in fetch.names if name not in fetch.found]
        size = sum(map(len, fetch.found.values()))
        read = self._try("read", lambda: self.tier.get_many(on_tier)) if on_tier else []
        for name, entry in zip(on_tier, read or [None] * len(on_tier), strict=True):
            if entry is None:
                self.known.discard(name)
                continue
            try:
                fetch.found[name] = fetch.unpack(entry, name=name)
                size += len(entry)
            except ValueError as error:
                self.num_bad += 1
                self.known.discard(name)
                self._say(f"an entry is refused and removed: {error}")
                self._try("changed", lambda name=name: self.tier.remove(name))
        seconds = self.clock() - started
        self.reading.add(size, seconds)
        self.num_bytes_in += size
        self.seconds_in += max(0.0, seconds)
        fetch.done.set()

    def _write(self, batch: dict[Name, tuple[bytes, bytes]]) -> bool:
        """Returns False if the tier failed."""
        started = self.clock()
        packed = {name: entries.pack(of, name, data) for name, (of, data) in batch.items()}
        gone = self._try("written", lambda: self.tier.put_many(packed))
        lost = packed.keys() & (packed if gone is None else gone)
        self.known.difference_update(lost if gone is None else gone)
        for name in batch:
            del self._waiting[name]
        self._num_lost += len(lost)
        self.num_bytes_out += sum(len(one) for name, one in packed.items() if name not in lost)
        self.seconds_out += max(0.0, self.clock() - started)
        self.num_failed += gone is None
        return gone is not None

    def _try(self, what: str, call: Callable):
        """What a call of the tier returns, or None if it fails; the log says so."""
        try:
            return call()
        except Exception as error:  # a library's or the system's: the engine serves on without it
            self._say(f"the tier cannot be {what}: {type(error).__name__}: {error}")
            return None

    def _say(self, text: str) -> None:
        """One line in the log, once."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
