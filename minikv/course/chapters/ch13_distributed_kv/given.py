"""What the exercises and the notebook of chapter 13 work with."""

import builtins
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from minikv.cluster.local_server import NO_SERVER, find_server, local_server
from minikv.cluster.valkey_store import MISSING
from minikv.course.chapters.ch07_radix_prefix_cache.hit_rate import Ids
from minikv.tiers.entry import EntryError


@contextmanager
def in_process(module: ModuleType, seed: int) -> Iterator[None]:
    """`module` as it is in another process: there `hash` gives other numbers for strings, as it
    does since Python 3.3, and here for everything."""
    there = vars(module)
    there["hash"] = lambda thing: builtins.hash((seed, thing))
    try:
        yield
    finally:
        del there["hash"]


class UnreliableStore:
    """A store that others use, too: it may have lost what it claims to have, and hand out anything.

    says: names that it claims to have. entries: what it sends. fails: the call that raises OSError.
    `calls` counts what it was asked, in names.
    """

    def __init__(
        self, says: Sequence[bytes], entries: Mapping[bytes, object], fails: str | None = None
    ):
        self.says, self.entries, self.fails = set(says), entries, fails
        self.calls: list[tuple[str, int]] = []

    def contains(self, names: Sequence[bytes]) -> list[bool]:
        self._called("contains", names)
        return [name in self.says for name in names]

    def get_many(self, names: Sequence[bytes]) -> list:
        self._called("get_many", names)
        return [self.entries.get(name) for name in names]

    def _called(self, call: str, names: Sequence[bytes]) -> None:
        self.calls.append((call, len(names)))
        if self.fails == call:
            raise OSError("the store does not answer")


def unpack_text(entry: tuple[bytes, str], name: bytes) -> str:
    """The content of an entry (name, content), if it is this block's."""
    its_name, content = entry
    if its_name != name:
        raise EntryError("another block's")
    return content


class Caches:
    """Workers with a cache each, and a store behind them if `store` is not 0: no model, no times.

    Blocks are ids, as in chapter 07. `fetched` counts blocks that came from the store.
    """

    def __init__(self, workers: int, blocks: int | None, store: int = 0):
        self.blocks, self.num_stored, self.fetched = blocks, store, 0
        self.workers: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
        self.store: OrderedDict[int, None] = OrderedDict()

    def serve(self, worker: int, ids: Ids) -> int:
        """How many of the first blocks are found on the worker or in the store."""
        cache = self.workers[worker]
        found = 0
        for id_ in ids:
            if id_ not in cache:
                if id_ not in self.store:
                    break
                self.fetched += 1
            found += 1
        self._use(cache, ids, self.blocks)
        if self.num_stored:
            self._use(self.store, ids, self.num_stored)
        return found

    @staticmethod
    def _use(cache: OrderedDict[int, None], ids: Ids, most: int | None) -> None:
        for id_ in reversed(ids):
            cache[id_] = None
            cache.move_to_end(id_)
        while most is not None and len(cache) > most:
            cache.popitem(last=False)


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def calls_to_the_dead(breaker: Any, clock: Clock, down: float, limit: float, pause: float) -> int:
    """How many calls a store gets in the `down` seconds during which it does not answer. Requests
    come one after the other, with `pause` seconds between them; each asks the breaker. A call
    waits for `limit` seconds, and has failed then."""
    calls, end = 0, clock.now + down
    while clock.now < end:
        if breaker.allows():
            calls += 1
            clock.now += limit
            breaker.failed()
        clock.now += pause
    return calls


@dataclass
class Transfer:
    """K and V of a prompt on their way."""

    sender: str
    blocks: list[int]
    wanted: bool = True
    complete: bool = False


@contextmanager
def real_store() -> Iterator[dict[str, Any]]:
    """Settings for engines that share a store: a server of this machine, which is started here and
    ended; a folder if that is not possible. It prints which, and what is missing."""
    reason = MISSING if find_spec("valkey") is None else NO_SERVER if find_server() is None else ""
    if reason:
        print(f"A folder takes the server's place. {reason}")
        with TemporaryDirectory() as folder:
            yield {"disk_path": folder}
    else:
        with local_server() as server:
            print(f"a server in process {server.pid}, at port {server.port} of this machine")
            yield {"store": server.url}
