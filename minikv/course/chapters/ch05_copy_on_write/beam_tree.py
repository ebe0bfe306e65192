"""Beam search as a tree of blocks: copied from live sequences, then drawn.

    history = record_beams(engine, prompt_ids, width=4, steps=3)
    history.picture()                                     # all steps
    history.widget()                                      # a player

or, from your own beams,

    history = BeamHistory(engine.pool, lm.decode)
    history.snap(beams, "4 beams, forked")                # copies what is there now

Each block of the pool stands there once, however many beams hold it. A `BeamSnapshot` says in
plain data what is drawn. Of the beams it reads `token_ids`, `num_computed` and `table`, of
their tables `block_ids` and `block_size`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index as as_int
from typing import TYPE_CHECKING

import torch

from minikv import beam, sequence
from minikv.course.pictures import style
from minikv.course.pictures.recording import check_surface
from minikv.course.pictures.snapshot import counted
from minikv.course.pictures.timeline import visible
from minikv.course.pictures.tree_drawing import (
    BlockRun,
    Cell,
    DrawnTree,
    Place,
    TreeRecording,
    shown,
)
from minikv.errors import require_int
from minikv.sampling import SamplingParams

if TYPE_CHECKING:
    from minikv.engine import Engine

MEANINGS = dict(
    count="block; over it: id, references",
    shared="shared by several beams",
    slots="slots: filled, new in this step, empty",
    end="beam A and its next token",
    new="new block",
    gone="freed in this step",
    wrong="this count cannot be right",
)


@dataclass(frozen=True)
class Beam:
    """What one beam said."""

    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_computed: int  # tokens whose K and V are in the blocks


@dataclass(frozen=True)
class BeamBlock:
    """One block that beams hold."""

    id: int
    ref_count: int  # what the pool says
    names: tuple[str, ...]  # the beams
    token_ids: tuple[int, ...]  # that are in it


@dataclass(frozen=True)
class BeamSnapshot:
    """The beams at one moment."""

    words: str
    block_size: int
    num_free: int
    beams: dict[str, Beam]  # by letter
    ref_counts: dict[int, int]  # by block id: of what they hold

    @cached_property
    def blocks(self) -> dict[Place, BeamBlock]:
        """Every block that a beam holds, by the block ids that lead to it."""
        names: dict[Place, list[str]] = {}
        ids: dict[Place, int] = {}
        tokens: dict[Place, tuple[int, ...]] = {}
        for name, one in self.beams.items():
            for index, block_id in enumerate(one.block_ids):
                place = (None, *one.block_ids[: index + 1])
                start = index * self.block_size
                ids[place] = block_id
                names.setdefault(place, []).append(name)
                tokens[place] = one.token_ids[
                    start : min(start + self.block_size, one.num_computed)
                ]
        return {
            place: BeamBlock(ids[place], self.ref_counts[ids[place]], tuple(who), tokens[place])
            for place, who in names.items()
        }

    @property
    def num_used(self) -> int:
        """Blocks that the beams hold together."""
        return len(self.ref_counts)

    @property
    def num_copied(self) -> int:
        """Blocks that they would hold if each had copies of its own."""
        return sum(len(one.block_ids) for one in self.beams.values())

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Counts that are too small for the beams: in a sound engine, none."""
        return tuple(
            f"block {block.id}: count {block.ref_count}, but held by {' and '.join(block.names)}"
            for block in self.blocks.values()
            if block.ref_count < len(block.names)
        )


@dataclass(frozen=True)
class BeamChanges:
    """What happened to the blocks between two snapshots, by what leads to them."""

    new: frozenset[Place]
    freed: frozenset[Place]

    @classmethod
    def between(cls, before: BeamSnapshot, now: BeamSnapshot) -> "BeamChanges":
        old, new = before.blocks, now.blocks

        def goes_on(place: Place) -> bool:  # the same block, not one that was given out again
            tokens = old[place].token_ids
            return new[place].token_ids[: len(tokens)] == tokens

        same = {place for place in old.keys() & new.keys() if goes_on(place)}
        return cls(frozenset(new.keys() - same), frozenset(old.keys() - same))


class BeamHistory(TreeRecording):
    """Snapshots of the beams of one search, in the order they were taken."""

    title, meanings = "Beams", MEANINGS
    steps: list[BeamSnapshot]

    def __init__(self, pool, decode: Callable[[list[int]], str]):
        super().__init__()
        check_surface("pool", pool, ("num_free", "ref_count"))
        if not callable(decode):
            raise TypeError(
                f"decode: must be a function of token ids, as lm.decode is, was {decode!r}"
            )
        self.pool, self.decode = pool, decode
        self._named: set[str] = set()  # every letter that a beam has had

    def names(self, beams: Sequence[sequence.Sequence]) -> list[str]:
        """A letter for each beam. The first that continues a beam of the last step keeps its
        letter, and so its colour; every other beam gets a letter that no beam has had."""
        last = dict(self.steps[-1].beams) if self.steps else {}
        names, num_named = [], len(self._named)
        for one in beams:
            token_ids = tuple(one.token_ids)
            parent = next(
                (
                    name
                    for name, before in last.items()
                    if token_ids[: len(before.token_ids)] == before.token_ids
                ),
                None,
            )
            if parent is None:
                parent, num_named = style.letter(num_named), num_named + 1
            last.pop(parent, None)
            names.append(parent)
        return names

    def snap(self, beams: Sequence[sequence.Sequence], words: str) -> BeamSnapshot:
        """Copy what is there now. `names` says which letter each beam has."""
        taken, sizes = {}, {step.block_size for step in self.steps}
        for index, one in enumerate(beams):
            name = style.letter(index)
            check_surface(f"beam {name}", one, ("token_ids", "num_computed", "table"))
            check_surface(f"beam {name}'s table", one.table, ("block_ids", "block_size"))
        for name, one in zip(self.names(beams), beams, strict=True):
            sizes.add(as_int(one.table.block_size))
            taken[name] = Beam(
                tuple(map(as_int, one.table.block_ids)),
                tuple(map(as_int, one.token_ids)),
                as_int(one.num_computed),
            )
        if len(sizes) != 1:
            raise ValueError(f"beams: at least one, of one block size, but found {sorted(sizes)}")
        held = sorted({block_id for one in taken.values() for block_id in one.block_ids})
        counts = {block_id: as_int(self.pool.ref_count(block_id)) for block_id in held}
        self._named |= taken.keys()
        free = as_int(self.pool.num_free)
        return self.keep(BeamSnapshot(words, sizes.pop(), free, taken, counts))

    def describe(self, i: int, before: int | None) -> str:
        step = self.steps[i]
        parts = [f"Blocks used: {step.num_used}; copies would use: {step.num_copied}."]
        for name, one in step.beams.items():
            ids = ", ".join(map(str, one.block_ids)) or "none"
            text = visible(self.decode(list(one.token_ids))[-24:], 24)
            tokens = counted(one.num_computed, "token")
            parts.append(f"Beam {name}, {tokens} in blocks {ids}, ends with {text}")
        shared = [
            f"{block.id} by {' '.join(block.names)} (count {block.ref_count})"
            for block in step.blocks.values()
            if len(block.names) > 1
        ]
        if shared:
            parts.append(f"Shared: {', '.join(shared)}.")
        if before is not None:
            last = self.steps[before]
            changes = BeamChanges.between(last, step)
            for told, places, blocks in (
                ("New", changes.new, step.blocks),
                ("Freed", changes.freed, last.blocks),
            ):
                if places:
                    ids = ", ".join(map(str, sorted(blocks[place].id for place in places)))
                    parts.append(f"{told} in this step: {ids}.")
        parts += [f"Warning: {warning}." for warning in step.warnings]
        return " ".join(parts)

    def counted(self, i: int) -> dict[str, int]:
        step = self.steps[i]
        return {"blocks used": step.num_used, "copies would use": step.num_copied}

    def trees(self, chosen: Sequence[int]) -> list[DrawnTree]:
        return [
            self._tree(self.steps[i], None if before is None else self.steps[before])
            for before, i in self.pairs(chosen)
        ]

    def _tree(self, step: BeamSnapshot, before: BeamSnapshot | None) -> DrawnTree:
        changes = BeamChanges.between(before, step) if before else None
        cells = []
        for place, block in step.blocks.items():
            new = changes is not None and place in changes.new
            filled, there = len(block.token_ids), 0
            if before is None:
                there = filled
            elif not new:
                there = len(before.blocks[place].token_ids)
            cells.append(
                Cell(
                    place, block.id, self._text(block.token_ids), block.ref_count,
                    "shared" if len(block.names) > 1 else "used", new,
                    wrong=block.ref_count < len(block.names),
                    filled=filled, num_new=filled - there,
                )
            )  # fmt: skip
        ends: dict[Place, list[tuple[str, str]]] = {}
        for name, one in step.beams.items():
            text = self._text(one.token_ids[one.num_computed :])
            place = (None, *one.block_ids)
            ends.setdefault(place, []).append((name, visible(f"+{text}" if text else "", 8)))
        runs = [
            BlockRun(tuple(chain), ends=tuple(ends.get(chain[-1].place, ())))
            for chain in _chains(cells, ends)
        ]
        if before is not None and changes is not None:
            ghosts = [
                Cell(place, block.id, self._text(block.token_ids), 0, "gone", filled=0)
                for place, block in before.blocks.items()
                if place in changes.freed and place not in step.blocks
            ]
            runs += [BlockRun(tuple(chain)) for chain in _chains(ghosts, ())]
        return DrawnTree(
            head=(
                f"blocks used: {step.num_used} · copies would use: {step.num_copied} · "
                f"free in the pool: {step.num_free}"
            ),
            runs=tuple(runs),
            roots={},
            block_size=step.block_size,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        return shown(self.decode(list(token_ids))) if token_ids else ""


def _chains(cells: Sequence[Cell], ends: Iterable[Place]) -> list[list[Cell]]:
    """Cells that follow each other without a branch, together."""
    children: dict[Place, int] = {}
    for cell in cells:
        children[cell.place[:-1]] = children.get(cell.place[:-1], 0) + 1
    chains: dict[Place, list[Cell]] = {}  # by where they end so far
    for cell in cells:
        before = cell.place[:-1]
        alone = before in chains and children[before] == 1 and before not in ends
        chain = chains.pop(before) if alone else []
        chains[cell.place] = [*chain, cell]
    return list(chains.values())


def record_beams(engine: "Engine", prompt_ids: list[int], width: int, steps: int) -> BeamHistory:
    """The first `steps` steps of a beam search, each as two snapshots: when the tokens are
    chosen, which forks and prunes, and when they are written.

    No beam ends: an end of text is never chosen. In the end the engine's pool is as it was.
    Raises ValueError for what the engine cannot run, and OutOfBlocks if its pool is too small.
    """
    require_int("width", width, 1)
    require_int("steps", steps, 1)
    if width > engine.config.max_num_seqs:
        raise ValueError(
            f"width: {width} beams do not fit a batch of max_num_seqs={engine.config.max_num_seqs}"
        )
    longest = engine.lm.config.max_context - steps
    if not 0 < len(prompt_ids) <= longest:
        raise ValueError(f"prompt_ids: 1 to {longest} tokens, there were {len(prompt_ids)}")
    history = BeamHistory(engine.pool, engine.lm.decode)
    request = sequence.Request(-1, prompt_ids, SamplingParams(max_tokens=steps))
    beams = request.sequences
    beams[0].table = engine.block_table(engine.pool, engine.config.block_size)
    scores: torch.Tensor | float = 0.0  # (beams, 1)
    ends = list(engine.lm.config.eos_ids)
    try:
        log_probs = beam.log_probs_of(engine.runner, beams).double().cpu()  # (beams, V)
        history.snap(beams, f"the prompt: {counted(len(prompt_ids), 'token')}")
        for number in range(1, steps + 1):
            totals = log_probs + scores
            totals[:, ends] = float("-inf")
            best, flat = totals.flatten().topk(width)
            vocab = totals.shape[1]
            chosen = [(index // vocab, index % vocab) for index in flat.tolist()]
            parents = list(history.steps[-1].beams)
            beams, scores = beam.next_beams(beams, chosen), best[:, None]
            families = _families([parents[i] for i, _ in chosen], history.names(beams), parents)
            history.snap(beams, f"token {number} chosen: {families}")
            opens = beams[0].num_computed % beams[0].table.block_size == 0
            before = engine.pool.num_free
            log_probs = beam.log_probs_of(engine.runner, beams).double().cpu()
            taken = before - engine.pool.num_free
            if opens:
                how = "a new block each"
            else:
                how = f"{counted(taken, 'block')} copied first" if taken else "in place"
            history.snap(beams, f"token {number} written: {how}")
    finally:
        for one in beams:
            one.table.release()
    return history


def _families(parent_of: Sequence[str], names: Sequence[str], parents: Sequence[str]) -> str:
    """Which beams end and which branch: "C pruned; A → A, E". The others go on as they are."""
    children = {
        parent: [name for name, of in zip(names, parent_of, strict=True) if of == parent]
        for parent in parents
    }
    pruned = [parent for parent, found in children.items() if not found]
    told = [f"{', '.join(pruned)} pruned"] if pruned else []
    told += [
        f"{parent} → {', '.join(found)}" for parent, found in children.items() if len(found) > 1
    ]
    return "; ".join(told) or "each goes on"
