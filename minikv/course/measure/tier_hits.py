"""Hit rate of several tiers, and no model: which tier would have had each block of a prompt.

    hits, total = tier_hits(ids_of_trace(read_trace("conversation_trace.jsonl")), [1000, 10_000])

A prompt is the ids of its blocks, as in chapter 07's simulator: equal ids, equal prefixes. With one
tier the hits are that simulator's.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq


class TieredBlocks:
    """LRU tiers, the fastest first, as the engine has them: what one drops goes to the next, and
    what comes back stays below as well."""

    def __init__(self, sizes: Seq[int]):
        """`sizes`: the blocks of each tier."""
        self.sizes = sizes
        self.tiers: list[OrderedDict[int, None]] = [OrderedDict() for _ in sizes]

    def serve(self, ids: Seq[int]) -> list[int]:
        """The hits of each tier on a prompt's first blocks; then the first tier has all of it."""
        hits = [0] * len(self.tiers)
        for id_ in ids:
            where = next((i for i, tier in enumerate(self.tiers) if id_ in tier), None)
            if where is None:
                break
            hits[where] += 1
        for id_ in reversed(ids):  # a prompt loses its end before its beginning
            for tier in self.tiers[1:]:
                if id_ in tier:
                    tier.move_to_end(id_)
            self._put(0, id_)
        return hits

    def _put(self, level: int, id_: int) -> None:
        if level == len(self.tiers):
            return
        tier = self.tiers[level]
        if id_ in tier:
            tier.move_to_end(id_)
            return
        if len(tier) == self.sizes[level]:
            self._put(level + 1, tier.popitem(last=False)[0])
        tier[id_] = None


def tier_hits(streams: Iterable[Seq[int]], sizes: Seq[int]) -> tuple[list[int], int]:
    """(hit blocks of each tier, all blocks) of prompts that come one after the other."""
    blocks, hits, total = TieredBlocks(sizes), [0] * len(sizes), 0
    for ids in streams:
        for level, count in enumerate(blocks.serve(ids)):
            hits[level] += count
        total += len(ids)
    return hits, total
