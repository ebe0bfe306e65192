"""Prefixes as a tree whose blocks are coloured by tier, step by step, from a live engine.

    history = TierHistory(engine)
    history.snap("A has been answered", {"A": token_ids})
    history.picture()                                     # all steps
    history.widget()                                      # a player

The tree is that of the texts named, down to what has been forgotten. Where a block is, the
engine's tiers say. A block may be in several; its colour is that of the fastest, and the squares
below it say all. A `TierSnapshot` is plain data, so a test can ask it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minikv.course.pictures import style
from minikv.course.pictures.box_drawing import Board, Box, BoxRecording
from minikv.course.pictures.snapshot import counted
from minikv.course.pictures.tree_drawing import Place, rows_of, shown

TIERS = ("device", "host", "disk")  # the fastest first
LETTERS = {"device": "1", "host": "2", "disk": "3"}
COLORS = dict(zip(TIERS, (style.PALETTE[0], style.PALETTE[4], style.PALETTE[5]), strict=True))


@dataclass(frozen=True)
class TierSnapshot:
    """Where the blocks of some texts are, at one moment."""

    words: str
    blocks: Mapping[Place, tuple[str, ...]]  # by what leads to it: its tiers, the fastest first
    texts: Mapping[Place, str]
    ends: Mapping[Place, tuple[str, ...]]  # letters of the texts whose last whole block this is
    warnings: tuple[str, ...] = ()

    def count(self, tier: str) -> int:
        """Blocks that are there."""
        return sum(tier in tiers for tiers in self.blocks.values())

    def describe(self) -> str:
        """The picture in words."""
        parts = [", ".join(f"{counted(self.count(tier), 'block')} on the {tier}" for tier in TIERS)]
        for place, names in self.ends.items():
            path = [place[: i + 1] for i in range(1, len(place))]
            where = "".join(LETTERS[self.blocks[p][0]] if self.blocks[p] else "-" for p in path)
            parts.append(f"{' and '.join(names)}: {where}")
        return ". ".join(parts) + "."


def box_of(tiers: Sequence[str], text: str = "", **more: Any) -> Box:
    """A block in the colour of its fastest tier."""
    if not tiers:
        return Box(text, style.PAPER, "absent", **more)
    marks = tuple((LETTERS[tier], COLORS[tier]) for tier in tiers)
    return Box(text, COLORS[tiers[0]], marks=marks, **more)


class TierHistory(BoxRecording):
    """Snapshots of one engine's tiers, in the order in which they were taken."""

    title = "Tiers"
    meanings = {f"{LETTERS[tier]}: on the {tier}": Box("", COLORS[tier]) for tier in TIERS} | {
        "forgotten": box_of([]),
        "moved or new in this step": Box("", style.PAPER, new=True),
    }
    steps: list[TierSnapshot]

    def __init__(self, engine: Any):
        super().__init__()
        if engine.tiers is None:
            raise ValueError("engine: has no tiers; make it with EngineConfig(host_blocks=…)")
        self.engine = engine

    def snap(self, words: str, texts: Mapping[str, Sequence[int]]) -> TierSnapshot:
        """Copy where the blocks of these texts are now."""
        size = self.engine.config.block_size
        blocks: dict[Place, tuple[str, ...]] = {}
        told: dict[Place, str] = {}
        ends: dict[Place, tuple[str, ...]] = {}
        for name, token_ids in texts.items():
            place: Place = (None,)
            for i, tiers in enumerate(self.engine.tiers.everywhere(token_ids)):
                key = tuple(token_ids[i * size : (i + 1) * size])
                place = (*place, key)
                blocks[place] = tuple(tier for tier in tiers if tier in TIERS)  # that are drawn
                told[place] = shown(self.engine.lm.decode(list(key)))
            ends[place] = (*ends.get(place, ()), name)
        return self.keep(TierSnapshot(words, blocks, told, ends))

    def counted(self, i: int) -> dict[str, int]:
        return {f"blocks on the {tier}": self.steps[i].count(tier) for tier in TIERS}

    def boards(self, chosen: Sequence[int]) -> list[Board]:
        rows, _ = rows_of([list(self.steps[i].blocks) for i in chosen])
        spots = {place: (row, len(place) - 2) for place, row in rows.items()}
        boards = []
        for before, i in self.pairs(chosen):
            step, boxes = self.steps[i], {}
            for place, tiers in step.blocks.items():
                boxes[spots[place]] = box_of(
                    tiers,
                    step.texts[place],
                    new=before is not None and self.steps[before].blocks.get(place) != tiers,
                    after="".join(step.ends.get(place, ())),
                )
            lines = {spots[one]: spots[one[:-1]] for one in step.blocks if len(one) > 2}
            boards.append(Board(boxes, lines))
        return boards
