"""The interface of a lower tier, and a thread that uses it beside the engine."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Protocol

from minikv.tiers import entry as entries
from minikv.tiers.costs import Line
from minikv.tiers.names import Name

log = logging.getLogger("minikv.tiers")

# unpack(entry, name=…): the bytes of the block. Raises ValueError for a bad entry.
Unpack = Callable[..., memoryview]


class LowerTier(Protocol):
    """Entries by name: a disk, or another machine. It may fail, forget, or be slow."""

    def names(self) -> Iterable[Name]:
        """The names of what is there when it is opened, as far as they are known."""
        ...

    def get_many(self, names: Seq[Name]) -> list[bytes | None]:
        """The entries of these names, None for one that is not there."""
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
    """A tier that others write to as well, so one has to ask what is there."""

    def contains(self, names: Seq[Name]) -> list[bool]:
        """Whether each of these entries is there now."""
        ...


class Question:
    """A question on its way: which of these names a shared tier has."""

    def __init__(self, names: list[Name]):
        self.names = names
        self.there: set[Name] = set()  # complete when `done` is set
        self.done = threading.Event()


class Fetch:
    """Entries on their way."""

    def __init__(self, names: list[Name], unpack: Unpack):
        self.names, self.unpack = names, unpack
        self.found: dict[Name, memoryview] = {}  # complete when `done` is set
        self.done = threading.Event()


class Background:
    """A lower tier in a thread of its own. No call waits for it, except `wait` and `close`.

    Entries that are still to be written are served from memory. At most `most_waiting` bytes wait
    to be written; beyond that new entries are dropped, because a slow disk must not stop the
    engine. Reads go before writes. An error of the tier becomes one line in the log, and a miss.
    The thread also computes the checksums.
    """

    BATCH = 16 << 20  # bytes written together

    def __init__(self, tier: LowerTier, most_waiting: int = 256 << 20):
        self.tier, self.most_waiting = tier, most_waiting
        self.known = set(tier.names())
        self.reading = Line()  # seconds of a read by its bytes
        self.read_at = perf_counter()  # when it was last measured
        self.num_bytes_in = self.num_bytes_out = self.num_dropped = self.num_bad = 0
        self.seconds_in = self.seconds_out = 0.0
        # To be written, or being written: identity and bytes of the block.
        self._waiting: dict[Name, tuple[bytes, bytes]] = {}
        self._waiting_bytes = 0
        self._order: deque[Name] = deque()
        self._fetches: deque[Fetch | Question] = deque()
        self._said: set[str] = set()
        self._change = threading.Condition()
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._work, name="minikv tier", daemon=True)
        self._thread.start()

    def __contains__(self, name: Name) -> bool:
        return name in self.known

    def put(self, name: Name, identity: bytes, data: bytes) -> bool:
        """Queue a block to be written as an entry. Returns False if it is dropped."""
        with self._change:
            if name in self.known or name in self._waiting:
                return True
            if self._closed or self._waiting_bytes + len(data) > self.most_waiting:
                self.num_dropped += 1
                return False
            self._waiting[name] = identity, data
            self._waiting_bytes += len(data)
            self._order.append(name)
            self.known.add(name)
            self._change.notify_all()
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
        with self._change:
            if self._closed:
                one.done.set()
            else:
                self._fetches.append(one)
                self._change.notify_all()

    def wait(self, patience: float | None = None) -> None:
        """Return when everything is read and written, or after `patience` seconds."""
        with self._change:
            self._change.wait_for(
                lambda: self._closed or not (self._busy or self._order or self._fetches), patience
            )

    def close(self, patience: float | None = None) -> None:
        """Write what waits, and end; after `patience` seconds, if given, drop what is left."""
        self.wait(patience)
        with self._change:
            self._closed = True
            self._change.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._closed or self._order or self._fetches)
                if self._closed:
                    for left in self._fetches:
                        left.done.set()
                    break
                self._busy = True
                fetch = self._fetches.popleft() if self._fetches else None
                batch = {} if fetch else self._next_batch()
            if isinstance(fetch, Question):
                self._answer(fetch)
            elif fetch is not None:
                self._read(fetch)
            else:
                self._write(batch)
        self._try("closed", self.tier.close)

    def _next_batch(self) -> dict[Name, tuple[bytes, bytes]]:
        batch: dict[Name, tuple[bytes, bytes]] = {}
        size = 0
        while self._order and size < self.BATCH:
            name = self._order.popleft()
            batch[name] = self._waiting[name]
            size += len(batch[name][1])
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
        started = perf_counter()
        with self._change:
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
        seconds = perf_counter() - started
        self.reading.add(size, seconds)
        self.read_at = started
        self.num_bytes_in += size
        self.seconds_in += max(0.0, seconds)
        fetch.done.set()

    def _write(self, batch: dict[Name, tuple[bytes, bytes]]) -> None:
        started = perf_counter()
        packed = {name: entries.pack(of, name, data) for name, (of, data) in batch.items()}
        gone = self._try("written", lambda: self.tier.put_many(packed))
        lost = packed.keys() & (packed if gone is None else gone)
        with self._change:
            for name, (_, data) in batch.items():
                del self._waiting[name]
                self._waiting_bytes -= len(data)
            self.known.difference_update(lost if gone is None else gone)
            self.num_dropped += len(lost)
        self.num_bytes_out += sum(len(one) for name, one in packed.items() if name not in lost)
        self.seconds_out += max(0.0, perf_counter() - started)

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
