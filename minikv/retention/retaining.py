"""A radix cache that asks a policy which leaf to evict, and keeps what is pinned."""

import heapq
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from minikv.blocks import BlockPool
from minikv.groups import GroupCache
from minikv.radix import Key, Node, RadixCache

LONGEST = 600.0  # seconds
MOST = 0.5


class Rank(NamedTuple):
    """What a policy says of a leaf."""

    until: float  # seconds of the cache's clock: before this time, others go first
    age: Any  # is compared: the least goes first


Policy = Callable[["RetainingCache", Node], Rank]
# Between two uses of a leaf its age may only rise.


def pinned(cache: "RetainingCache", leaf: Node) -> Rank:
    """Leaves without a pin go first, then those whose pin is not over, and within each half the
    least recently used. `cache.pins` and `cache.last_use` have seconds by node; a leaf that was
    never pinned is not in `pins`, and a time of 0 is always over. Returns Rank(until, age): before
    `until` others go first, and of the rest the least `age` goes first."""
    return Rank(cache.pins.get(leaf, 0.0), cache.last_use[leaf])


class RetainingCache(RadixCache):
    """A radix cache that asks a policy which leaf to evict.

    `clock()` returns seconds that never go back. `last_use` has an entry for each node; no two uses
    have the same time. `pins` are nodes where a request ended that asked to be kept. When a leaf
    goes, its parent takes its pin over.

    `order` is a heap of leaves. Each use of a leaf adds an entry, and its old ones stay: they are
    too early, and are corrected when they come first. If most of the heap is old, it is made again.
    `deadlines` is a heap of (until, id, leaf).
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
        self.order: list[tuple[bool, Any, float, int, Node]] = []  # see `_entry`
        self.deadlines: list[tuple[float, int, Node]] = []  # when leaves are no longer kept
        self._latest = -math.inf

    def pin(self, node: Node, seconds: float) -> bool:
        """Keep `node` and all its ancestors, if possible, for `seconds` from now, at most LONGEST.
        A pin that it has already is replaced.

        Returns False, and leaves the node without a pin, if all pins together would then hold more
        than MOST of the pool's blocks. Pins whose time is over do not count, and are forgotten; a
        block that several pins hold counts once. A node that the tree has forgotten gets none,
        either. `_queue` is told, for the node may now be due earlier.
        """
        if node.parent is None:
            return False
        now = self.clock()
        self.pins = {one: until for one, until in self.pins.items() if now < until}
        self.pins[node] = now + min(seconds, LONGEST)
        held: dict[Node, int] = {}  # blocks of each node on a pinned path
        for one in self.pins:
            while one.parent is not None and one not in held:
                held[one] = len(one.block_ids)
                one = one.parent
        if sum(held.values()) > MOST * self.pool.num_blocks:
            del self.pins[node]
        self._queue(node)
        return node in self.pins

    def first_leaf(self) -> Node:
        """Of all unlocked leaves, the one that goes first, by `_entry`. Called only if there is
        one, and O(log leaves): a leaf whose place has changed is put where it belongs when its
        entry comes first in `order`, and the entry of a node that is no unlocked leaf is dropped.
        A leaf whose time is over, by `deadlines`, gets a new entry."""
        now = self.clock()
        while self.deadlines and self.deadlines[0][0] <= now:
            self._queue(heapq.heappop(self.deadlines)[-1])
        while True:
            entry = heapq.heappop(self.order)
            leaf = entry[-1]
            if leaf in self.unlocked and not leaf.children:
                current = self._entry(leaf, now)
                heapq.heappush(self.order, current)
                if current == entry:
                    return leaf

    def lock(self, node: Node) -> None:
        """As in `RadixCache`; a pin on `node` ends, for what it was waiting for has come."""
        self.pins.pop(node, None)
        super().lock(node)

    def unlock(self, node: Node) -> None:
        super().unlock(node)
        self._used(node)

    def clear(self) -> None:
        super().clear()
        for part in (self.last_use, self.pins, self.order, self.deadlines):
            part.clear()

    def check(self) -> None:
        super().check()
        nodes = set(self.nodes())
        if self.last_use.keys() != nodes or not self.pins.keys() <= nodes:
            raise AssertionError("prefix cache: a use or a pin of a node that is gone")
        leaves = {node for node in self.unlocked if not node.children}
        if not leaves <= {entry[-1] for entry in self.order}:
            raise AssertionError("prefix cache: a leaf that is never due")

    def _entry(self, leaf: Node, now: float) -> tuple[bool, Any, float, int, Node]:
        """Where a leaf stands in the order of eviction: the least goes first. At `until` itself
        its time is over."""
        until, age = self.policy(self, leaf)
        return now < until, age, self.last_use[leaf], id(leaf), leaf

    def _queue(self, node: Node) -> None:
        """If `node` is an unlocked leaf, put it where it stands now."""
        if node not in self.unlocked or node.children:
            return
        now, leaves = self.clock(), [node]
        if len(self.order) + len(self.deadlines) > 3 * len(self.unlocked) + 64:
            self.order, self.deadlines = [], []  # most of them are no longer true
            leaves = [one for one in self.unlocked if not one.children]
        for leaf in leaves:
            heapq.heappush(self.order, self._entry(leaf, now))
            until = self.policy(self, leaf).until
            if now < until:
                heapq.heappush(self.deadlines, (until, id(leaf), leaf))

    def _touch(self, node: Node) -> None:
        super()._touch(node)
        self._used(node)

    def _used(self, node: Node) -> None:
        self._latest = max(self.clock(), math.nextafter(self._latest, math.inf))
        one = node
        while one.parent is not None:
            self.last_use[one] = self._latest
            one = one.parent
        self._queue(node)

    def _remove(self, leaf: Node, first_key: Key) -> None:
        parent = leaf.parent
        super()._remove(leaf, first_key)
        del self.last_use[leaf]
        until = self.pins.pop(leaf, 0.0)
        if until > self.pins.get(parent, 0.0) and parent.parent is not None:
            self.pins[parent] = until
        self._queue(parent)


class RetainingGroupCache(RetainingCache, GroupCache):
    """The same, over layers with windows."""
