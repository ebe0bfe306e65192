"""What a pool and a prefix cache tell, and who listens: open blocks of int4, tiers, a worker.

    pool.release ──> freeing(block_id)          prefix cache.insert ──> stored(tokens, blocks, salt)
    a new pool and a new cache ──> begin        prefix cache.clear  ──> clearing

Nothing of this is in the classes. It is put around methods of this pool and this cache, so a class
that is handed in tells as much as the engine's own. In the same way tiers get to plan with the
scheduler, and an error of a prefix cache that was handed in says so. If nobody listens, nothing is
put around anything.
"""

from collections.abc import Callable, Hashable, Sequence as Seq
from functools import partial
from typing import Any

from minikv.blocks import BlockPool
from minikv.errors import blame
from minikv.radix import InsertResult, RadixCache
from minikv.scheduler import Scheduler


class Listener:
    """Wants to know what happens to blocks. Whoever inherits writes what it needs."""

    def begin(self, pool: BlockPool, cache: RadixCache | None) -> None:
        """The engine has a new pool, all of it free, and a new prefix cache. Nothing that was
        told before is true any more."""

    def freeing(self, block_id: int) -> None:
        """The last holder of a block is about to release it. Its K and V can be read until the
        next plan is run."""

    def stored(self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable) -> None:
        """The prefix cache holds these blocks for the whole blocks of these tokens."""

    def clearing(self) -> None:
        """The prefix cache is about to forget everything."""


class LowerTiers(Listener):
    """What an engine asks of the tiers below its device: besides listening, they hold waiting
    sequences back until their blocks have arrived. `minikv.tiers.tiers_of(engine)` has all that
    others can ask."""

    may_wait = True  # for blocks, if nothing can run without them; not beside a step under way

    def hold_back(self, scheduler: Scheduler) -> None:
        """From now on plan with a new scheduler of any class, and lend it the host's blocks."""

    def stats(self) -> dict[str, Any]:
        """Blocks, hits, bytes and seconds, by tier."""
        return {}

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""


def listen(listeners: Seq[Listener], pool: BlockPool, cache: RadixCache | None) -> None:
    """Let a new pool and a new prefix cache of any class tell listeners what happens."""
    _tell(listeners, "begin", pool, cache)
    if listeners:
        wrap(pool, "release", partial(_release, listeners, pool))
    if listeners and cache is not None:
        wrap(cache, "insert", partial(_insert, listeners))
        wrap(cache, "clear", partial(_clear, listeners))


def blamed(make: Callable[..., RadixCache], pool: BlockPool, block_size: int) -> RadixCache:
    """A prefix cache of a class that was handed in. An error that is raised in it says so."""
    cache = blame("prefix cache", make, pool, block_size)
    for method in ("match", "insert", "lock", "unlock", "evict", "clear"):
        wrap(cache, method, partial(blame, "prefix cache"))
    return cache


def wrap(part: Any, method: str, around: Callable) -> None:
    """From now on `part.method(…)` is `around(the plain method, …)`."""
    setattr(part, method, partial(around, getattr(part, method)))


def _tell(listeners: Seq[Listener], what: str, *arguments: Any) -> None:
    for listener in listeners:
        blame("listener", getattr(listener, what), *arguments)


def _release(listeners: Seq[Listener], pool: BlockPool, release: Callable, block_id: int) -> None:
    if pool.ref_count(block_id) == 1:
        _tell(listeners, "freeing", block_id)
    release(block_id)


def _insert(
    listeners: Seq[Listener], insert: Callable, token_ids: Seq[int], block_ids: Seq[int],
    salt: Hashable = None,
) -> InsertResult:  # fmt: skip
    result = insert(token_ids, block_ids, salt)
    _tell(listeners, "stored", token_ids, result.block_ids, salt)
    return result


def _clear(listeners: Seq[Listener], clear: Callable) -> None:
    _tell(listeners, "clearing")
    clear()
