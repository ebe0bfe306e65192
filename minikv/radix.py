"""The prefix cache: a radix tree that maps token prefixes to blocks with their K and V.

Chapter 07; the idea is SGLang's RadixAttention (Zheng et al., 2024), here with keys
of whole blocks, because a block is what can be shared.

    root ── [def fib(n):↵  if n <] ── [2: return n …]        a node: one or more blocks
         └─ [import os …]                                    siblings differ in their first block

Two numbers keep it safe. The pool's reference count says that the tree holds a block
(the tree is one holder, like a block table). A node's lock count says how many running
sequences use it or a node below it; only unlocked nodes can be evicted. (SGLang calls it
`lock_ref`.)

Eviction is O(1) per block, by one rule: when a node is touched, its ancestors are touched
after it. Then every node is older than its parent in the list of unlocked nodes, and the
oldest entry of that list is always a leaf.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

from minikv.blocks import BlockPool
from minikv.errors import require, require_int

Key = tuple[int, ...]  # the tokens of one block
_require = partial(require, part="prefix cache")


class Node:
    """A run of blocks that always occur together, and what may follow them."""

    __slots__ = ("block_ids", "children", "keys", "lock_count", "parent")

    def __init__(self, parent: "Node | None", keys: list[Key], block_ids: list[int]):
        self.parent: Node | Any = parent  # None for a root, which is never asked for it
        self.keys = keys  # the tokens, block by block
        self.block_ids = block_ids  # as long as keys
        self.children: dict[Key, Node] = {}  # by the first key of the child
        self.lock_count = 0

    def __repr__(self) -> str:
        return f"<node with blocks {self.block_ids}>"


class Root(Node):
    """The empty prefix of one salt."""

    __slots__ = ("salt",)

    def __init__(self, salt: Hashable):
        super().__init__(None, [], [])
        self.salt = salt


class MatchResult(NamedTuple):
    """The longest cached prefix: `node` ends exactly where it ends (a root if nothing matched)."""

    node: Node
    block_ids: list[int]
    num_tokens: int


class InsertResult(NamedTuple):
    """The tree's own blocks for the inserted prefix, `num_existing` of them there before."""

    node: Node
    block_ids: list[int]
    num_existing: int


class RadixCache:
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

    def insert(
        self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable = None
    ) -> InsertResult:
        """Cache the whole blocks of a prefix; an incomplete last block is left out.

        Where the tree has a prefix already, it keeps its own block and does not take the
        caller's: the result names the tree's blocks, and the caller must acquire those
        before it releases its own. New blocks gain a holder, the tree.
        Raises ValueError if there are fewer blocks than whole blocks of tokens.
        """
        num_full = len(token_ids) // self.block_size
        if len(block_ids) < num_full:
            raise ValueError(f"block_ids: {num_full} blocks of tokens, but {len(block_ids)} blocks")
        root = self._roots.get(salt) or Root(salt)
        start, tree_blocks = self._path_of(block_ids[:num_full]) or (root, [])
        keys = self._keys(token_ids[len(tree_blocks) * self.block_size :])
        node, depth, found = self._walk(start, keys)
        tree_blocks += found
        new_blocks = list(block_ids[len(tree_blocks) : num_full])
        if new_blocks:
            self._roots[salt] = root
            for block_id in new_blocks:
                self.pool.acquire(block_id)
            node = self._append(node, keys[depth:], new_blocks)
            self.num_cached_blocks += len(new_blocks)
        self._touch(node)
        return InsertResult(node, tree_blocks + new_blocks, len(tree_blocks))

    def lock(self, node: Node) -> None:
        """Keep `node` and all its ancestors from eviction until `unlock`; may be nested."""
        while node.parent is not None:
            if node.lock_count == 0:
                del self.unlocked[node]
                self.num_evictable_blocks -= len(node.block_ids)
            node.lock_count += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises ValueError for a node that is not locked."""
        if node.parent is not None and node.lock_count == 0:
            raise ValueError("this node is not locked: unlock was called once too often")
        while node.parent is not None:
            node.lock_count -= 1
            if node.lock_count == 0:
                self.unlocked[node] = None
                self.num_evictable_blocks += len(node.block_ids)
            node = node.parent

    def pin(self, node: Node, seconds: float) -> bool | None:
        """A wish to keep `node` for so long, which this cache ignores: see `minikv.retention`."""

    def evict(self, num_blocks: int) -> int:
        """Release up to `num_blocks` blocks, least recently used leaves first, each leaf
        from its end. Returns how many; fewer than asked if the rest is locked. Raises ValueError
        for a negative number."""
        require_int("num_blocks", num_blocks, 0)
        gone = 0
        while gone < num_blocks and self.unlocked:
            leaf = self.first_leaf()
            while leaf.block_ids and gone < num_blocks:
                self.pool.release(leaf.block_ids.pop())
                key = leaf.keys.pop()
                gone += 1
            if not leaf.block_ids:
                self._remove(leaf, key)
        self.num_cached_blocks -= gone
        self.num_evictable_blocks -= gone
        return gone

    def first_leaf(self) -> Node:
        """The unlocked leaf that `evict` takes first, here the oldest. There must be one."""
        return next(iter(self.unlocked))

    def clear(self) -> None:
        """Forget everything, locked or not. Sequences keep the blocks that they hold."""
        for node in self.nodes():
            for block_id in node.block_ids:
                self.pool.release(block_id)
            node.parent = None  # locks on it now lock nothing
        self._roots.clear()
        self.unlocked.clear()
        self.num_cached_blocks = self.num_evictable_blocks = 0

    def block_ids(self) -> Iterator[int]:
        """Every block that the tree holds."""
        return (block_id for node in self.nodes() for block_id in node.block_ids)

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        nodes = list(self.nodes())
        cached = list(self.block_ids())
        evictable = sum(len(node.block_ids) for node in nodes if node.lock_count == 0)
        _require(len(set(cached)) == len(cached), "a block is in the tree twice")
        _require(len(cached) == self.num_cached_blocks, "num_cached_blocks is off")
        _require(evictable == self.num_evictable_blocks, "num_evictable_blocks is off")
        age = {node: i for i, node in enumerate(self.unlocked)}
        _require(age.keys() == {n for n in nodes if n.lock_count == 0}, "unlocked list is off")
        for node in nodes:
            _require(len(node.keys) == len(node.block_ids) > 0, "a node without blocks")
            _require(all(len(key) == self.block_size for key in node.keys), "a key of another size")
            _require(node.parent.children.get(node.keys[0]) is node, "a child under a wrong key")
            _require(all(map(self.pool.ref_count, node.block_ids)), "a cached block is free")
            for child in node.children.values():
                _require(child.parent is node, "a child of two nodes")
                _require(node.lock_count >= child.lock_count, "a lock does not cover an ancestor")
                _require(node.lock_count or age[child] < age[node], "child younger than its parent")
        for salt, root in self._roots.items():
            _require(root.children and root.salt == salt, "an empty or misplaced root")

    def _keys(self, token_ids: Seq[int]) -> list[Key]:
        # An incomplete last block is left out.
        return list(zip(*[iter(token_ids)] * self.block_size, strict=False))

    def _path_of(self, block_ids: Seq[int]) -> tuple[Node, list[int]] | None:
        """The node that ends with one of these blocks, if there is one, and all blocks from the
        root to its end. Of several, the deepest.

        The tree's own block has the tokens that the path spells, so nothing need be compared: to
        share the block that a decode has filled takes the same time in any context.
        """
        for block_id in reversed(block_ids):
            end = self._ends.get(block_id)
            if end is not None and end.parent is not None and end.block_ids[-1] == block_id:
                node, path = end.parent, end.block_ids.copy()
                while node.parent is not None:
                    node, path = node.parent, node.block_ids + path
                return end, path
        return None

    def _walk(self, node: Node, keys: list[Key]) -> tuple[Node, int, list[int]]:
        """Follow `keys` down; split where they leave a node halfway.

        Returns the node that ends with the match, the number of blocks matched, and
        the blocks.
        """
        depth, block_ids = 0, []
        while depth < len(keys) and (child := node.children.get(keys[depth])) is not None:
            length, longest = 1, min(len(child.keys), len(keys) - depth)
            while length < longest and child.keys[length] == keys[depth + length]:
                length += 1
            if length < len(child.keys):
                child = self._split(child, length)
            node = child
            depth += length
            block_ids += child.block_ids
        return node, depth, block_ids

    def _split(self, lower: Node, length: int) -> Node:
        """Cut a node in two; the first `length` blocks become a new parent of the rest.

        The lower part stays the same object: a sequence that has locked it still locks
        everything above it.
        """
        upper = Node(lower.parent, lower.keys[:length], lower.block_ids[:length])
        upper.lock_count = lower.lock_count
        upper.parent.children[upper.keys[0]] = upper
        lower.keys, lower.block_ids = lower.keys[length:], lower.block_ids[length:]
        upper.children[lower.keys[0]] = lower
        lower.parent = upper
        if upper.lock_count == 0:
            self.unlocked[upper] = None
        return upper

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

    def nodes(self) -> Iterator[Node]:
        """Every node except the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node
