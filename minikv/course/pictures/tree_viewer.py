"""The radix prefix cache, seen step by step: copied from live objects, then drawn.

    history = TreeHistory(cache)
    history.snap("empty")
    cache.insert(token_ids, table.block_ids)
    history.snap("A's prompt is cached", lm.decode, {"A": table})
    history.picture()                                     # all steps
    history.widget()                                      # a player

A `TreeSnapshot` says in plain data what is drawn, so a test can ask it. It reads the public
surface alone, of the engine's own classes or of a reader's: `nodes()`, `unlocked`, `pool`
and `block_size` of the cache; `parent`, `children`, `keys`, `block_ids` and `lock_count`
of a node; `salt` of a root; `num_blocks`, `num_free` and `ref_count(block_id)` of the pool.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index as as_int
from typing import Any

from minikv.course.pictures.recording import check_letter, check_surface
from minikv.course.pictures.snapshot import counted
from minikv.course.pictures.timeline import visible
from minikv.course.pictures.tree_drawing import (
    BlockRun,
    Cell,
    DrawnTree,
    Place,
    TreeRecording,
    ordinal,
    shown,
)

MEANINGS = dict(
    count="block; over it: id, references",
    cached="held by the tree alone",
    shared="held by sequences too",
    name="held by A",
    lock="node, locked by 2",
    rank="first to be evicted",
    new="new in this step",
    cut="split in this step",
    gone="evicted in this step",
    wrong="this count cannot be right",
)


@dataclass(frozen=True)
class SeenNode:
    """What one node of the tree said."""

    salt: Hashable  # of its root
    path: tuple[tuple[int, ...], ...]  # the tokens from the root to its end, block by block
    block_ids: tuple[int, ...]  # its own: for the last of those
    texts: tuple[str, ...]  # of its own blocks
    lock_count: int
    rank: int | None  # of eviction among all nodes: 1 is next; None: it is locked

    @property
    def places(self) -> list[Place]:
        """What leads to each of its blocks: the salt, then tokens block by block."""
        before = len(self.path) - len(self.block_ids)
        return [(self.salt, *self.path[: before + i + 1]) for i in range(len(self.block_ids))]


@dataclass(frozen=True)
class CachedBlock:
    """One block of the tree."""

    id: int
    ref_count: int  # what the pool says
    node: SeenNode
    text: str
    holders: tuple[str, ...]  # the sequences that were named
    state: str  # "cached": the tree alone holds it; or "shared"


@dataclass(frozen=True)
class TreeSnapshot:
    """A prefix cache at one moment."""

    words: str
    block_size: int
    num_blocks: int  # of the pool
    num_free: int
    nodes: tuple[SeenNode, ...]  # parents before children
    ref_counts: Mapping[int, int]  # by block id: blocks of the tree and of the holders
    holders: Mapping[str, tuple[int, ...]]  # block ids of sequences, by letter
    warnings: tuple[str, ...]  # what contradicts itself: in a sound cache, nothing

    @cached_property
    def blocks(self) -> dict[Place, CachedBlock]:
        """Every block of the tree, by what leads to it."""
        return {
            place: self._block(node, block_id, text)
            for node in self.nodes
            for place, block_id, text in zip(node.places, node.block_ids, node.texts, strict=True)
        }

    def _block(self, node: SeenNode, block_id: int, text: str) -> CachedBlock:
        count = self.ref_counts[block_id]
        names = tuple(name for name, ids in self.holders.items() if block_id in ids)
        state = "shared" if names or count > 1 else "cached"
        return CachedBlock(block_id, count, node, text, names, state)

    @property
    def num_evictable(self) -> int:
        """Blocks of nodes that nobody has locked."""
        return sum(len(node.block_ids) for node in self.nodes if node.lock_count == 0)

    @property
    def queue(self) -> list[str]:
        """The block ids of each node that can be evicted, the least recently used node first."""
        unlocked = [node for node in self.nodes if node.rank is not None]
        unlocked.sort(key=lambda node: node.rank or 0)
        return [" ".join(map(str, node.block_ids)) for node in unlocked]

    def own_blocks(self, name: str) -> tuple[int, ...]:
        """What a sequence holds and the tree does not have."""
        cached = {block.id for block in self.blocks.values()}
        return tuple(block_id for block_id in self.holders[name] if block_id not in cached)

    def describe(self) -> str:
        """The picture in words."""
        parts = [
            f"{self.num_free} of {self.num_blocks} blocks free. "
            f"{counted(len(self.blocks), 'block')} in the tree, {self.num_evictable} evictable."
        ]
        for node in self.nodes:
            where = f"After block {parent.id}" if (parent := self.parent(node)) else "At the root"
            if parent is None and node.salt is not None:
                where += f" of salt {node.salt!r}"
            status = f"{ordinal(node.rank)} to be evicted" if node.rank else "not unlocked"
            if node.lock_count:
                status = f"locked by {node.lock_count}"
            blocks = ", ".join(
                f"{block_id} (count {self.ref_counts[block_id]}: {visible(text, 24)})"
                for block_id, text in zip(node.block_ids, node.texts, strict=True)
            )
            noun = "block" if len(node.block_ids) == 1 else "blocks"
            parts.append(f"{where}, {noun} {blocks}; {status}.")
        for name, ids in self.holders.items():
            own = self.own_blocks(name)
            cached = [str(block_id) for block_id in ids if block_id not in own]
            told = [f"{', '.join(cached)} of the tree"] if cached else []
            told += [f"{', '.join(map(str, own))} of its own"] if own else []
            parts.append(f"{name} holds {' and '.join(told) or 'nothing'}.")
        parts += [f"Warning: {warning}." for warning in self.warnings]
        return " ".join(parts)

    def parent(self, node: SeenNode) -> CachedBlock | None:
        """The block that stands before a node's first; None at a root."""
        return self.blocks.get(node.places[0][:-1])


@dataclass(frozen=True)
class TreeChanges:
    """What happened to the blocks between two snapshots, by what leads to them."""

    inserted: frozenset[Place]
    evicted: frozenset[Place]
    split: frozenset[Place]  # the first of the lower part of each node that was cut in two
    locks: Mapping[Place, int]  # how many more hold a lock on a node; by its last block

    @classmethod
    def between(cls, before: TreeSnapshot, now: TreeSnapshot) -> "TreeChanges":
        old, new = before.blocks, now.blocks
        gone = {place for place in old if place not in new}
        # The same tokens in another block: evicted and inserted again.
        replaced = {place for place in old.keys() & new.keys() if old[place].id != new[place].id}
        split = set()
        for node in before.nodes:
            for upper, lower in zip(node.places, node.places[1:], strict=False):
                if upper in new and lower in new and new[upper].node is not new[lower].node:
                    split.add(lower)
        locks = {}
        for node in now.nodes:
            last = node.places[-1]
            more = node.lock_count - (old[last].node.lock_count if last in old else 0)
            if more:
                locks[last] = more
        return cls(
            frozenset(new.keys() - old.keys() | replaced), frozenset(gone | replaced),
            frozenset(split), locks,
        )  # fmt: skip

    def describe(self, before: TreeSnapshot, now: TreeSnapshot) -> str:
        """In words."""

        def ids(snapshot: TreeSnapshot, places: Iterable[Place]) -> str:
            found = [str(block.id) for place, block in snapshot.blocks.items() if place in places]
            return ("block " if len(found) == 1 else "blocks ") + ", ".join(found)

        parts = []
        if self.inserted:
            parts.append(f"{ids(now, self.inserted)} inserted")
        if self.split:
            parts.append(f"split before {ids(now, self.split)}")
        more = [place for place, change in self.locks.items() if change > 0]
        less = [place for place, change in self.locks.items() if change < 0]
        if more:
            parts.append(f"locked up to {ids(now, more)}")
        if less:
            parts.append(f"unlocked up to {ids(now, less)}")
        if self.evicted:
            parts.append(f"{ids(before, self.evicted)} evicted")
        return f"In this step: {'; '.join(parts)}." if parts else "In this step, no change."


class TreeHistory(TreeRecording):
    """Snapshots of a prefix cache, in the order they were taken."""

    title, meanings = "Radix tree", MEANINGS
    steps: list[TreeSnapshot]

    def __init__(self, cache):
        super().__init__()
        check_surface("cache", cache, ("nodes", "unlocked", "pool", "block_size"))
        check_surface("cache.pool", cache.pool, ("num_blocks", "num_free", "ref_count"))
        self.cache = cache

    def snap(
        self,
        words: str,
        texts: Callable[[list[int]], str] | None = None,
        holders: Mapping[str, object] | None = None,
    ) -> TreeSnapshot:
        """Copy what is there now; later changes of the live objects don't reach the copy.

        `texts` makes a block's token ids a text, as `lm.decode` does; without it the ids
        are shown. `holders` are sequences by letter: block tables, or lists of block ids.
        """
        if texts is not None and not callable(texts):
            raise TypeError(
                f"texts: must be a function of token ids, as lm.decode is, was {texts!r}"
            )
        pool = self.cache.pool
        held = {name: _block_ids(name, holder) for name, holder in (holders or {}).items()}
        nodes, warnings = self._nodes(texts or (lambda ids: ",".join(map(str, ids))))
        ids = {block_id for node in nodes for block_id in node.block_ids}.union(*held.values())
        counts = {block_id: as_int(pool.ref_count(block_id)) for block_id in sorted(ids)}
        warnings += _contradictions(nodes, counts, held)
        step = TreeSnapshot(
            words, self.cache.block_size, pool.num_blocks, as_int(pool.num_free),
            tuple(nodes), counts, held, tuple(warnings),
        )  # fmt: skip
        return self.keep(step)

    def _nodes(self, texts: Callable[[list[int]], str]) -> tuple[list[SeenNode], list[str]]:
        """The nodes, each after its parent and beside its siblings, and what is wrong with them."""
        live = list(self.cache.nodes())
        order = {id(node): rank for rank, node in enumerate(self.cache.unlocked, 1)}
        below: dict[int, list] = {}  # by the id of the parent
        roots = {}
        for node in live:
            below.setdefault(id(node.parent), []).append(node)
            if node.parent is not None and node.parent.parent is None:
                roots[id(node.parent)] = node.parent
        for parent in [*roots.values(), *live]:  # siblings in their parent's order
            ranks = {id(child): rank for rank, child in enumerate(parent.children.values())}
            below.get(id(parent), []).sort(key=lambda node: ranks.get(id(node), len(ranks)))

        nodes, warnings, num_seen = [], [], 0
        waiting: list[tuple[Any, Hashable, tuple]] = [  # depth first
            (root, root.salt, ()) for root in roots.values()
        ]
        while waiting:
            node, salt, path = waiting.pop()
            for child in reversed(below.get(id(node), [])):
                waiting.append((child, salt, path + tuple(map(tuple, child.keys))))
            if id(node) in roots:
                continue
            num_seen += 1
            if not 0 < len(node.keys) == len(node.block_ids):
                what = counted(len(node.keys), "key"), counted(len(node.block_ids), "block")
                warnings.append("a node of {} and {}".format(*what))
                continue
            nodes.append(
                SeenNode(
                    salt, path, tuple(map(as_int, node.block_ids)),
                    tuple(texts(list(key)) for key in node.keys),
                    node.lock_count, order.get(id(node)),
                )
            )  # fmt: skip
            warnings += _strange_links(node)
        if num_seen < len(live):
            warnings.append(f"{counted(len(live) - num_seen, 'node')} not below any root")
        return nodes, warnings

    def describe(self, i: int, before: int | None) -> str:
        step = self.steps[i]
        if before is None:
            return step.describe()
        changes = TreeChanges.between(self.steps[before], step)
        return f"{step.describe()} {changes.describe(self.steps[before], step)}"

    def counted(self, i: int) -> dict[str, int]:
        step = self.steps[i]
        return {"blocks in the tree": len(step.blocks), "evictable": step.num_evictable}

    def trees(self, chosen: Sequence[int]) -> list[DrawnTree]:
        steps = self.steps
        salts = {node.salt for i in chosen for node in steps[i].nodes}
        return [
            _tree(steps[i], None if before is None else steps[before], salts != {None})
            for before, i in self.pairs(chosen)
        ]


def _block_ids(name: object, holder: Any) -> tuple[int, ...]:
    check_letter("holders", name)
    try:
        return tuple(map(as_int, getattr(holder, "block_ids", holder)))
    except TypeError as error:
        raise TypeError(
            f"holders: {name} must be a block table or a list of block ids, was {holder!r}"
        ) from error


def _strange_links(node) -> list[str]:
    """Where a live node and its parent contradict each other."""
    name, parent = f"the node of block {node.block_ids[0]}", node.parent
    found = []
    if parent.children.get(node.keys[0]) is not node:
        found.append(f"{name} is not among its parent's children")
    if parent.parent is not None and parent.lock_count < node.lock_count:
        found.append(f"{name} is locked by {node.lock_count}, its parent by {parent.lock_count}")
    return found


def _contradictions(
    nodes: Sequence[SeenNode], counts: Mapping[int, int], holders: Mapping[str, Sequence[int]]
) -> list[str]:
    """Where the tree, the pool and the sequences contradict each other."""
    found = []
    in_tree = Counter(block_id for node in nodes for block_id in node.block_ids)
    for block_id, times in in_tree.items():
        names = [name for name, ids in holders.items() if block_id in ids]
        if times > 1:
            found.append(f"block {block_id}: {times} times in the tree")
        elif counts[block_id] == 0:
            found.append(f"block {block_id}: free, yet in the tree")
        elif counts[block_id] < 1 + len(names):
            who = " and ".join(["the tree", *names])
            found.append(f"block {block_id}: count {counts[block_id]}, but held by {who}")
    return found


def _tree(step: TreeSnapshot, before: TreeSnapshot | None, with_salts: bool) -> DrawnTree:
    changes = TreeChanges.between(before, step) if before else None
    runs = []
    for node in step.nodes:
        more = changes.locks.get(node.places[-1], 0) if changes else 0
        cells = [
            _cell(place, step.blocks[place], changes is not None and place in changes.inserted)
            for place in node.places
        ]
        runs.append(
            BlockRun(
                tuple(cells),
                outlined=True,
                num_locks=node.lock_count,
                rank=node.rank,
                change=f"{'+' if more > 0 else '−'}{counted(abs(more), 'lock')}" if more else "",
                cut=changes is not None and node.places[0] in changes.split,
            )
        )
    for node in before.nodes if before else ():
        ghosts = [
            Cell(place, block_id, shown(text), 0, "gone")
            for place, block_id, text in zip(node.places, node.block_ids, node.texts, strict=True)
            if place not in step.blocks
        ]
        if ghosts:
            runs.append(BlockRun(tuple(ghosts), outlined=True, change="evicted"))
    salts = dict.fromkeys(cell.place[0] for run in runs for cell in run.cells)
    return DrawnTree(
        head=(
            f"pool: {step.num_free} of {counted(step.num_blocks, 'block')} free · "
            f"tree: {counted(len(step.blocks), 'block')}, {step.num_evictable} evictable"
        ),
        runs=tuple(runs),
        roots={salt: _root_label(salt, with_salts) for salt in salts},
        outside={name: own for name in step.holders if (own := step.own_blocks(name))},
        queue=step.queue if len(step.queue) > 1 else (),
    )


def _root_label(salt: Hashable, with_salts: bool) -> list[str]:
    if not with_salts:
        return ["root"]
    return ["root", "no salt" if salt is None else visible(str(salt), 10)]


def _cell(place: Place, block: CachedBlock, new: bool) -> Cell:
    wrong = block.ref_count < 1 + len(block.holders)
    return Cell(
        place, block.id, shown(block.text), block.ref_count, block.state, new, wrong,
        block.holders,
    )  # fmt: skip
