"""The radix prefix cache: a tree, hashes, bugs of hits, ends of turns, the engine's step, pins.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("07.1") in the notebook, or in a terminal: python -m minikv check 07.1
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from hashlib import sha256
from typing import Any

from minikv import engine, radix, scheduler
from minikv.blocks import BlockPool
from minikv.course.chapters.ch07_radix_prefix_cache.answers import keys_of
from minikv.errors import require_int
from minikv.outputs import hits_stop_string
from minikv.radix import InsertResult, Key, MatchResult, Node, Root
from minikv.retention import retaining
from minikv.retention.retaining import LONGEST, MOST, Rank
from minikv.sequence import Sequence


class RadixCache(radix.RadixCache):
    """Block-sized prefixes with LRU eviction of leaves.

    Prefixes of different salts never meet. None and "" are two salts like any others.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = require_int("block_size", block_size, 1)
        self._roots: dict[Hashable, Root] = {}  # by salt
        # By block: the node that it was the last block of when it was appended.
        self._ends: dict[int, Node] = {}
        # What `evict` takes first comes first; parents come after their children.
        self.unlocked: OrderedDict[Node, None] = OrderedDict()
        self.num_cached_blocks = 0
        self.num_evictable_blocks = 0  # blocks of unlocked nodes

    def match(self, token_ids: Seq[int], salt: Hashable = None) -> MatchResult:
        """The longest cached prefix of whole blocks, made the most recently used.

        O(len(token_ids)). What is cached does not change, but a node that matches only in
        part is split, so that a lock on the result holds the match and nothing else.
        """
        root = self._roots.get(salt) or Root(salt)
        node, depth, block_ids = self._walk(root, self._keys(token_ids))
        self._touch(node)
        return MatchResult(node, block_ids, depth * self.block_size)

    # ── 07.2 Insert and evict ─────────────────────────────────────────────────────
    def insert(
        self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable = None
    ) -> InsertResult:
        """Cache the whole blocks of a prefix; an incomplete last block is left out.

        Where the tree has a prefix already, it keeps its own block and does not take the
        caller's: the result names the tree's blocks, and the caller must acquire those
        before it releases its own. New blocks gain a holder, the tree.
        Raises ValueError if there are fewer blocks than whole blocks of tokens.
        """
        raise NotImplementedError("Exercise 07.2: RadixCache.insert")

    # ── 07.4 A prefix that vanished: broken, fix it ───────────────────────────────
    def lock(self, node: Node) -> None:
        """Keep `node` and all its ancestors from eviction until `unlock`; may be nested."""
        path = []  # up to the root
        while node.parent is not None:
            node = node.parent
            path.append(node)
        for node in path[:-1]:  # the root is never locked
            if node.lock_count == 0:
                del self.unlocked[node]
                self.num_evictable_blocks -= len(node.block_ids)
            node.lock_count += 1

    # ── 07.4 A prefix that vanished: broken, fix it ───────────────────────────────
    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises ValueError for a node that is not locked."""
        path = []  # up to the root
        while node.parent is not None:
            node = node.parent
            path.append(node)
        for node in path[:-1]:  # the root is never locked
            if node.lock_count == 0:
                raise ValueError("this node is not locked: unlock was called once too often")
            node.lock_count -= 1
            if node.lock_count == 0:
                self.unlocked[node] = None
                self.num_evictable_blocks += len(node.block_ids)

    # ── 07.2 Insert and evict ─────────────────────────────────────────────────────
    def evict(self, num_blocks: int) -> int:
        """Release up to `num_blocks` blocks, least recently used leaves first, each leaf
        from its end. Returns how many; fewer than asked if the rest is locked. Raises ValueError
        for a negative number."""
        raise NotImplementedError("Exercise 07.2: RadixCache.evict")

    def _keys(self, token_ids: Seq[int]) -> list[Key]:
        # An incomplete last block is left out.
        return list(zip(*[iter(token_ids)] * self.block_size, strict=False))

    # ── 07.1 Walk down, and split ─────────────────────────────────────────────────
    def _walk(self, node: Node, keys: list[Key]) -> tuple[Node, int, list[int]]:
        """Follow `keys` down; split where they leave a node halfway.

        Returns the node that ends with the match, the number of blocks matched, and
        the blocks.
        """
        raise NotImplementedError("Exercise 07.1: RadixCache._walk")

    # ── 07.1 Walk down, and split ─────────────────────────────────────────────────
    def _split(self, lower: Node, length: int) -> Node:
        """Cut a node in two; the first `length` blocks become a new parent of the rest.

        The lower part stays the same object: a sequence that has locked it still locks
        everything above it.
        """
        raise NotImplementedError("Exercise 07.1: RadixCache._split")

    def _append(self, node: Node, keys: list[Key], block_ids: list[int]) -> Node:
        """Put blocks below `node`: into the node itself if it is an unlocked leaf, so that the
        blocks of a long decode do not become a chain of nodes with one block each."""
        if node.parent is not None and not node.children and node.lock_count == 0:
            node.keys += keys
            node.block_ids += block_ids
        else:
            parent, node = node, Node(node, keys, block_ids)
            parent.children[keys[0]] = node
            self.unlocked[node] = None
        self.num_evictable_blocks += len(block_ids)
        self._ends[block_ids[-1]] = node
        return node

    def _touch(self, node: Node) -> None:
        """Most recently used: the node first, its ancestors after it."""
        while node.parent is not None:
            if node.lock_count == 0:
                self.unlocked.move_to_end(node)
            node = node.parent

    def _remove(self, leaf: Node, first_key: Key) -> None:
        """Take an emptied leaf out of the tree, and its root too if that was the last."""
        parent = leaf.parent
        del self.unlocked[leaf]
        del parent.children[first_key]
        leaf.parent = None
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.salt]


# ── 07.3 Chained hashes ───────────────────────────────────────────────────────────
def chained_hashes(token_ids: Seq[int], block_size: int, salt: Hashable = None) -> list[Hashable]:
    """A name for each whole block of a prompt, in order: the hash of (the name before it, the
    block's tokens).

    Two blocks have the same name if the salts are equal, and the tokens from the beginning of
    the prompt to the end of the block. Otherwise their names differ, even if an attacker searches
    for two that do not. Python's own `hash` is not enough: hash(0) == hash(2**61 - 1). Nor is a
    short checksum: among 200,000 blocks two have the same crc32.
    """
    raise NotImplementedError("Exercise 07.3: chained_hashes")


class ChainedCache:
    """A prefix cache without a tree: blocks by name, the least recently used first to go.

    The pool's reference counts say whether a block is in use, so nothing has to be locked. It
    has the public methods of `minikv.RadixCache` and can take its place in the engine.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self.blocks: OrderedDict[Hashable, int] = OrderedDict()  # by name, oldest use first

    # ── 07.3 Chained hashes ───────────────────────────────────────────────────────
    def match(self, token_ids: Seq[int], salt: Hashable = None) -> MatchResult:
        """The longest cached prefix of whole blocks, made the most recently used.

        The result's `node` is None. Of the blocks used together the last counts as the
        oldest: a block that is evicted before those that follow it would make them useless.
        """
        raise NotImplementedError("Exercise 07.3: ChainedCache.match")

    # ── 07.3 Chained hashes ───────────────────────────────────────────────────────
    def insert(
        self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable = None
    ) -> InsertResult:
        """Cache whole blocks of a prefix, made the most recently used in the same order.

        Where a name is known, its block stays and the caller's is not taken; the result names
        the cache's blocks, and how many were there before. New blocks gain a holder, the cache.
        Raises ValueError when there are fewer blocks than whole blocks of tokens.
        """
        raise NotImplementedError("Exercise 07.3: ChainedCache.insert")

    # ── 07.3 Chained hashes ───────────────────────────────────────────────────────
    def evict(self, num_blocks: int) -> int:
        """Release up to `num_blocks` blocks that only the cache holds, least recently used
        first. Returns how many; less than asked when the others are in use. Raises ValueError for
        a negative number."""
        raise NotImplementedError("Exercise 07.3: ChainedCache.evict")

    @property
    def num_cached_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_evictable_blocks(self) -> int:
        return sum(self.pool.ref_count(block_id) == 1 for block_id in self.blocks.values())

    def block_ids(self) -> Iterator[int]:
        """Every block that the cache holds."""
        return iter(self.blocks.values())

    def clear(self) -> None:
        """Forget everything. Sequences keep the blocks that they hold themselves."""
        for block_id in self.blocks.values():
            self.pool.release(block_id)
        self.blocks.clear()

    def lock(self, node: None) -> None:
        """Nothing to do: a sequence that uses a block holds it."""

    def unlock(self, node: None) -> None:
        """Nothing to undo."""

    def check(self) -> None:
        """Raise AssertionError if a cached block is free, or cached under two names."""
        if len(set(self.blocks.values())) < len(self.blocks):
            raise AssertionError("chained cache: a block has two names")
        if not all(self.pool.ref_count(block_id) for block_id in self.blocks.values()):
            raise AssertionError("chained cache: a cached block is free")


class Scheduler(scheduler.Scheduler):
    """Owns the waiting and the running sequences, and gives and takes their blocks.

    `host_pool` counts the blocks of host memory; it is None unless preemption is "swap".
    """

    # ── 07.5 Three hits that went wrong: broken, fix it ───────────────────────────
    def look_up(self, sequence: Sequence) -> MatchResult | None:
        """The cached prefix that a waiting sequence can begin with; None if there is none that
        is worth it."""
        if self.cache is None or sequence.host_block_ids is not None:
            return None
        found = vars(self).setdefault("found", {})  # by sequence
        if sequence not in found:  # it may wait for many steps, and ask in each of them
            salt = sequence.request.params.cache_salt
            found[sequence] = self.cache.match(sequence.token_ids, salt)
        match = found[sequence]
        return match if match.num_tokens >= max(1, self.config.min_prefix_tokens) else None

    # ── 07.5 Three hits that went wrong: broken, fix it ───────────────────────────
    def share_full_blocks(self, sequence: Sequence) -> None:
        """Put a running sequence's full blocks into the prefix cache, and use those that it has.

        If another sequence computed the same prefix first, there are two copies of it,
        and ours are given back.
        """
        size, table, ids = self.config.block_size, sequence.table, sequence.token_ids
        num_full = sequence.num_computed // size
        if self.cache is None or num_full == sequence.num_inserted:
            return
        if sequence.node is not None:  # nothing is evicted before it is locked again below
            self.cache.unlock(sequence.node)
        computed = ids if len(ids) // size == num_full else ids[: num_full * size]
        result = self.cache.insert(computed, table.block_ids, sequence.request.params.cache_salt)
        differs = table.block_ids[:num_full] != result.block_ids  # anywhere, after a `clear`
        for index in range(num_full if differs else 0):
            if table.block_ids[index] != result.block_ids[index]:
                self.pool.release(table.block_ids[index])
                sequence.table_version += 1
        self.cache.lock(result.node)
        sequence.node, sequence.num_inserted = result.node, num_full


# ── 07.6 A turn that nobody repeats: broken, fix it ───────────────────────────────
def insert_turn(cache: RadixCache, parts: Seq[tuple[list[int], bool]], block_ids: list[int]) -> int:
    """Cache what the next prompt can find of a turn that has ended; returns the number of dead
    blocks.

    parts: the turn's tokens in order, as pairs (token_ids, again). The next prompt begins with the
    parts whose `again` is true, and leaves out the others, such as reasoning. A part may be empty.
    block_ids: the turn's blocks, with one for each whole block of its tokens.

    A later prompt finds a block only if it repeats all tokens up to the end of that block. So the
    whole blocks before the first token that is left out are inserted, and no others. The turn's
    other whole blocks are dead: no later prompt can find them.
    """
    kept: list[int] = []  # what the next prompt has in common with the turn
    for tokens, again in parts:
        if again:
            kept += tokens
    cache.insert(kept, block_ids)
    size, length = cache.block_size, sum(len(tokens) for tokens, _ in parts)
    return length // size - len(kept) // size


class Loop(engine.Loop):
    """The plain order of work: a step begins when the one before has ended."""

    # ── 07.7 The step of your engine ──────────────────────────────────────────────
    def step(self, engine: "Engine") -> bool:
        """Schedule, run, append. Returns False if nothing can run.

        The scheduler's `schedule()` makes a plan, and the runner's `run(plan)` returns the new
        token ids. The scheduler's `commit(plan)` counts what was computed, and returns the
        sequences that get these tokens, in the same order. A plan without sequences is run as
        well, for it may move blocks.
        """
        raise NotImplementedError("Exercise 07.7: Loop.step")


class Engine(engine.Engine):
    """Serves one model from one pool of blocks.

    What is true of a request is in `_requests` and in the tokens of its sequences. Blocks, tables,
    the prefix cache and the queues follow from that, so an interrupt (or any failure) may leave
    them in any state. The next call throws them away, makes them again, empty, and lets all
    unfinished requests compute their K and V again. Nothing half done is ever read.
    """

    # ── 07.7 The step of your engine ──────────────────────────────────────────────
    def append(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """Give each sequence its new token, share the block that a decode has filled, and remove
        each sequence that is finished.

        `self._moved[request_id]` is set to each request that got a token: `step` returns them.
        `self._generated` counts the tokens. `self.scheduler.share_full_blocks(sequence)` is called
        while the sequence still has its table. If it `_finishes`, `self.scheduler.remove(sequence)`
        frees its blocks; after its last sequence, a request leaves the dict `self._requests`.
        """
        raise NotImplementedError("Exercise 07.7: Engine.append")

    # ── 07.7 The step of your engine ──────────────────────────────────────────────
    def _finishes(self, sequence: Sequence) -> bool:
        """Whether the newest token of a sequence is its last. If so, `finish_reason` says why:
        "stop" if the token is in its request's `stop_ids`, or if the request's `longest_stop` is
        above 0 and `hits_stop_string(sequence, self.lm.decode)`; otherwise "length" when the
        sequence has `max_length` tokens, prompt included."""
        raise NotImplementedError("Exercise 07.7: Engine._finishes")


# ── 07.8 The clock tells ──────────────────────────────────────────────────────────
def guess_prompt(
    first_token_ms: Callable[[Seq[int]], float], guesses: Seq[Seq[int]], decoy: Seq[int]
) -> int | None:
    """Which of `guesses` another customer has sent: its index, or None if the clock shows none.

    first_token_ms(token_ids) sends a prompt to the server and returns the time to its first token.
    The server caches whatever it is sent.
    guesses: prompts of one length, each different from the others in its first block. Another
    customer has sent one of them at most. decoy: a prompt of the same length that nobody has sent,
    so it takes as long as a miss. The same work may take a quarter more or less time than usual;
    a guess is a hit if it takes less than half as long as the decoy.
    """
    raise NotImplementedError("Exercise 07.8: guess_prompt")


# ── 07.9 Retention on a trace ─────────────────────────────────────────────────────
def pinned(cache: "RetainingCache", leaf: Node) -> Rank:
    """Leaves without a pin go first, then those whose pin is not over, and within each half the
    least recently used. `cache.pins` and `cache.last_use` have seconds by node; a leaf that was
    never pinned is not in `pins`, and a time of 0 is always over. Returns Rank(until, age): before
    `until` others go first, and of the rest the least `age` goes first."""
    raise NotImplementedError("Exercise 07.9: pinned")


class RetainingCache(retaining.RetainingCache):
    """A radix cache that asks a policy which leaf to evict.

    `clock()` returns seconds that never go back. `last_use` has an entry for each node; no two uses
    have the same time. `pins` are nodes where a request ended that asked to be kept. When a leaf
    goes, its parent takes its pin over.

    `order` is a heap of leaves. Each use of a leaf adds an entry, and its old ones stay: they are
    too early, and are corrected when they come first. If most of the heap is old, it is made again.
    `deadlines` is a heap of (until, id, leaf).
    """

    # ── 07.9 Retention on a trace ─────────────────────────────────────────────────
    def pin(self, node: Node, seconds: float) -> bool:
        """Keep `node` and all its ancestors, if possible, for `seconds` from now, at most LONGEST.
        A pin that it has already is replaced.

        Returns False, and leaves the node without a pin, if all pins together would then hold more
        than MOST of the pool's blocks. Pins whose time is over do not count, and are forgotten; a
        block that several pins hold counts once. A node that the tree has forgotten gets none,
        either. `_queue` is told, for the node may now be due earlier.
        """
        raise NotImplementedError("Exercise 07.9: RetainingCache.pin")

    # ── 07.9 Retention on a trace ─────────────────────────────────────────────────
    def first_leaf(self) -> Node:
        """Of all unlocked leaves, the one that goes first, by `_entry`. Called only if there is
        one, and O(log leaves): a leaf whose place has changed is put where it belongs when its
        entry comes first in `order`, and the entry of a node that is no unlocked leaf is dropped.
        A leaf whose time is over, by `deadlines`, gets a new entry."""
        raise NotImplementedError("Exercise 07.9: RetainingCache.first_leaf")

    def lock(self, node: Node) -> None:
        """As in `RadixCache`; a pin on `node` ends, for what it was waiting for has come."""
        self.pins.pop(node, None)
        super().lock(node)

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
