"""Hit rate against cache size: many prompts through caches of several kinds, and no model.

    streams = ids_of_jobs(conversations(lm, 200, turns=6, real_answers=False))
    streams = ids_of_trace(read_trace("conversation_trace.jsonl"))
    rates = hit_rates(streams)

A prompt is the ids of its blocks. An id stands for a block and all before it, as a chained hash
does: equal ids, equal prefixes. Prompts come one after the other. In each, the blocks up to the
first missing one are hits; then the cache holds the whole prompt. Answers are not cached: the
next turn of a chat finds its old prompt, and not what came after it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence as Seq
from typing import NamedTuple

from minikv.blocks import BlockPool
from minikv.course.workloads.workload import Job, TraceRequest
from minikv.radix import RadixCache

Ids = Seq[int]  # of a prompt's blocks, in order


def ids_of_jobs(jobs: Iterable[Job], block_size: int = 16) -> list[Ids]:
    """The whole blocks of each prompt; a block's id is new unless it was seen after the same
    blocks and under the same salt."""
    known: dict[Hashable, int] = {}  # a chained hash that cannot collide
    streams: list[Ids] = []
    for job in jobs:
        ids: list[int] = []
        for end in range(block_size, len(job.prompt_ids) + 1, block_size):
            before = ids[-1] if ids else ("salt", job.salt)
            key = before, tuple(job.prompt_ids[end - block_size : end])
            ids.append(known.setdefault(key, len(known)))
        streams.append(ids)
    return streams


def ids_of_trace(requests: Iterable[TraceRequest]) -> list[Ids]:
    """The `hash_ids` of a trace, each of 512 tokens. Raises ValueError if there are none."""
    streams: list[Ids] = [request.hash_ids for request in requests]
    if not any(streams):
        raise ValueError("requests: have no hash_ids; a trace like Mooncake's has them, in jsonl")
    return streams


# ── The caches ────────────────────────────────────────────────────────────────


class FirstToLast:
    """Blocks by their chained hash. Evicts the least recently used block, whatever follows it.

    A prompt's blocks are used from the first to the last. So the first is the oldest and goes
    first, and the others can no longer be found.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.ids: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def serve(self, ids: Ids) -> int:
        """How many of the first blocks are cached; then all of them are, if there is room."""
        hits = next((place for place, id_ in enumerate(ids) if id_ not in self.ids), len(ids))
        for id_ in self.order(ids):
            if id_ in self.ids:
                self.ids.move_to_end(id_)
                continue
            if len(self.ids) == self.num_blocks:
                self.ids.popitem(last=False)
            self.ids[id_] = None
        return hits

    def order(self, ids: Ids) -> Iterable[int]:
        return ids


class LastToFirst(FirstToLast):
    """The same, used from the last to the first: a prompt loses its end before its beginning.

    vLLM frees the blocks of a request in this order.
    """

    def order(self, ids: Ids) -> Iterable[int]:
        return reversed(ids)


class RadixBlocks:
    """The engine's own prefix cache, with blocks of one id. Evicts the end of the least recently
    used leaf."""

    def __init__(self, num_blocks: int):
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, block_size=1)

    def serve(self, ids: Ids) -> int:
        """As with chained hashes. A prompt longer than the whole cache is cut off."""
        ids = ids[: self.pool.num_blocks]
        match = self.cache.match(ids)
        needed = len(ids) - match.num_tokens
        self.cache.lock(match.node)
        self.cache.evict(max(0, needed - self.pool.num_free))
        self.cache.unlock(match.node)
        new = [self.pool.allocate() for _ in range(needed)]
        self.cache.insert(ids, match.block_ids + new)
        for block_id in new:
            self.pool.release(block_id)  # the tree holds it now
        return match.num_tokens


CACHES: dict[str, type] = {
    "radix tree": RadixBlocks,
    "chained hashes, last block first": LastToFirst,
    "chained hashes, first block first": FirstToLast,
}


# ── Hit rates ─────────────────────────────────────────────────────────────────


class HitRates(NamedTuple):
    """Hit blocks divided by all blocks, of each cache and each of `sizes`."""

    sizes: list[int]  # blocks, ascending; the last one has room for all
    rates: dict[str, list[float]]  # by cache
    num_prompts: int
    num_blocks: int  # of all prompts
    num_distinct: int


def hit_rates(
    streams: Seq[Ids], sizes: Iterable[int] | None = None, caches: Mapping[str, type] = CACHES
) -> HitRates:
    """Serve all prompts from an empty cache of each kind and size.

    `sizes`, in blocks: by default about two per octave, from the longest prompt on. The number of
    distinct blocks comes last; there nothing is ever evicted. `caches`: name: class, made with
    the size; its `serve(ids)` returns the number of hits.
    """
    longest = max(map(len, streams), default=0)
    if longest == 0:
        raise ValueError("streams: no prompt has a whole block")
    distinct = len(set().union(*streams))
    if sizes is None:
        sizes = (round(longest * 2 ** (half / 2)) for half in range(60))
    sizes = [*sorted({size for size in sizes if size < distinct}), distinct]
    if sizes[0] < 1:
        raise ValueError(f"sizes: must be at least 1 block, were {sizes}")
    total = sum(map(len, streams))
    rates = {
        name: [sum(map(cache(size).serve, streams)) / total for size in sizes]
        for name, cache in caches.items()
    }
    return HitRates(sizes, rates, len(streams), total, distinct)
