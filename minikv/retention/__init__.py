"""Retention: what the prefix cache keeps for somebody who will come back.

    engine = Engine(lm, prefix_cache=RetainingCache)
    engine.add_request(prompt, SamplingParams(retain_s=10))  # the answer calls a tool

An agent's request ends with a tool call, and the next one begins with the same tokens a moment
later. Age alone does not know this. With `retain_s`, a request says for how many seconds its prefix
is worth keeping, and its last node is pinned until then (vLLM's RFC #52113 has such a hint). A pin
ends when the prefix is used again, or at its deadline.

A pin is a wish. It changes what is evicted first, never what can be evicted: if only pinned blocks
are left, they go, too. And no pin is longer than `LONGEST`, nor do all pins together hold more than
`MOST` of the pool, so that requests without hints keep a share of it.

A policy is a function of a leaf and of the time; the leaf for which it returns the least is evicted
first, of equal ones the oldest:

    by_age         the least recently used: what `RadixCache` does, there without a search
    time_to_live   those that were not used for so long, then by age
    pinned         those without a pin, by age; then the others, by age

Two of these are the same. Whoever was not used for 30 seconds is older than whoever was, so a
time to live that is equal for all is age. And age already evicts whole conversations: a use makes
all of a path recent, so a path goes from its end to where others share it before a younger one is
touched.
"""

import heapq
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from minikv.blocks import BlockPool
from minikv.errors import require_int
from minikv.radix import Node, RadixCache
from minikv.sequence import Sequence

LONGEST = 600.0  # seconds
MOST = 0.5


class Leaf(NamedTuple):
    """What a policy sees of a leaf, in seconds of the cache's clock."""

    last_use: float
    pinned_until: float  # 0 without a pin


Policy = Callable[[Leaf, float], Any]  # of a leaf, now: the least is evicted first


def by_age(leaf: Leaf, now: float) -> Any:
    """The least recently used goes first."""
    return leaf.last_use


def time_to_live(seconds: float) -> Policy:
    """Leaves that were not used for `seconds` go first; within both halves, by age."""
    return lambda leaf, now: (now < leaf.last_use + seconds, leaf.last_use)


def pinned(leaf: Leaf, now: float) -> Any:
    """Something to compare: leaves without a pin go first, then the pinned ones, and within each
    of the two the least recently used. At `pinned_until` itself a pin is over."""
    return now < leaf.pinned_until, leaf.last_use


class RetainingCache(RadixCache):
    """A radix cache that asks a policy which leaf to evict.

    `clock()` returns seconds that never go back. `last_use` and `pins` have an entry for a node
    where a path ended when it was used or pinned; what comes above it on the path needs none, for
    it cannot be evicted before. When a leaf goes, its parent takes its entries over.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        policy: Policy = pinned,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(pool, block_size)
        self.policy, self.clock = policy, clock
        self.last_use: dict[Node, float] = {}
        self.pins: dict[Node, float] = {}  # until when

    def retain(self, sequence: Sequence) -> None:
        """A sequence is about to leave the engine: follow its hint, unless it was aborted."""
        seconds = sequence.request.params.retain_s
        if seconds > 0 and sequence.node is not None and sequence.finish_reason != "abort":
            self.pin(sequence.node, seconds)

    def pin(self, node: Node, seconds: float) -> bool:
        """Keep `node` and all its ancestors, if possible, for `seconds` from now, at most LONGEST.
        A pin that it has already is replaced.

        Returns False, and leaves the node without a pin, if all pins together would then hold more
        than MOST of the pool's blocks. Pins whose time is over do not count, and a block that
        several of them hold counts once. A node that the tree has forgotten gets none, either.
        """
        if node.parent is None:
            return False
        now = self.clock()
        self.pins[node] = now + min(seconds, LONGEST)
        held: dict[Node, int] = {}  # blocks of each node on a pinned path
        for one, until in self.pins.items():
            while now < until and one.parent is not None and one not in held:
                held[one] = len(one.block_ids)
                one = one.parent
        if sum(held.values()) > MOST * self.pool.num_blocks:
            del self.pins[node]
        return node in self.pins

    def lock(self, node: Node) -> None:
        """As in `RadixCache`; a pin on `node` ends, for what it was waiting for has come."""
        self.pins.pop(node, None)
        super().lock(node)

    def unlock(self, node: Node) -> None:
        super().unlock(node)
        self._used(node)

    def evict(self, num_blocks: int) -> int:
        """Release up to `num_blocks` blocks. Of all unlocked leaves, the one for which
        `policy(leaf, now)` is least goes first, and of equal ones the oldest; each leaf from its
        end. When a leaf is gone, its parent takes over its `last_use` and its pin, if they are
        later than its own, and may be the next one. Returns how many were released; fewer than
        asked if the rest is locked.

        O(unlocked nodes), once per call, and O(log leaves) per leaf.
        """
        require_int("num_blocks", num_blocks, 0)
        now = self.clock()
        place = {node: index for index, node in enumerate(self.unlocked)}  # the oldest first
        heap = [self._entry(node, place, now) for node in place if not node.children]
        heapq.heapify(heap)
        gone = 0
        while gone < num_blocks and heap:
            leaf = heap[0][2]
            while leaf.block_ids and gone < num_blocks:
                self.pool.release(leaf.block_ids.pop())
                key = leaf.keys.pop()
                gone += 1
            if not leaf.block_ids:
                heapq.heappop(heap)
                parent = leaf.parent
                self._remove(leaf, key)
                for times in (self.last_use, self.pins):
                    if leaf in times:
                        later = max(times.pop(leaf), times.get(parent, 0.0))
                        if parent.parent is not None:
                            times[parent] = later
                if parent in place and not parent.children:
                    heapq.heappush(heap, self._entry(parent, place, now))
        self.num_cached_blocks -= gone
        self.num_evictable_blocks -= gone
        return gone

    def clear(self) -> None:
        super().clear()
        self.last_use.clear()
        self.pins.clear()

    def check(self) -> None:
        super().check()
        nodes = set(self.nodes())
        if not self.last_use.keys() | self.pins.keys() <= nodes:
            raise AssertionError("prefix cache: a use or a pin of a node that is gone")
        if not {node for node in nodes if not node.children} <= self.last_use.keys():
            raise AssertionError("prefix cache: a leaf that was never used")

    def _entry(self, leaf: Node, place: dict[Node, int], now: float) -> tuple[Any, int, Node]:
        seen = Leaf(self.last_use[leaf], self.pins.get(leaf, 0.0))
        return self.policy(seen, now), place[leaf], leaf

    def _touch(self, node: Node) -> None:
        super()._touch(node)
        self._used(node)

    def _used(self, node: Node) -> None:
        if node.parent is not None:
            self.last_use[node] = self.clock()
