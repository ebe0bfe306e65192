"""Prefixes as a tree whose blocks are coloured by tier, step by step, from a live engine.

    history = TierHistory(engine)
    history.snap("A has been answered", {"A": token_ids})
    history.picture()                                     # all steps
    history.widget()                                      # a player

The tree is that of the texts named, down to what has been forgotten. Where a block is, the
engine's tiers say. A block may be in several; its colour is that of the fastest, and the squares
below it say all. A `TierSnapshot` is plain data, so a test can ask it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minikv.course.pictures import style
from minikv.course.pictures.block_drawing import (
    MARGIN,
    SMALL,
    Entry,
    Legend,
    Pen,
    evenly,
    room,
    strip,
    width_of,
)
from minikv.course.pictures.block_viewer import Recording
from minikv.course.pictures.snapshot import counted
from minikv.course.pictures.tree_drawing import Place, rows_of, shown

TIERS = ("device", "host", "disk")  # the fastest first
LETTERS = {"device": "1", "host": "2", "disk": "3"}
COLORS = dict(zip(TIERS, (style.PALETTE[0], style.PALETTE[4], style.PALETTE[5]), strict=True))
FONT = 7.4  # points, also of the letters of the tiers
BODY, GAP, END = (0.62, 0.2), 0.14, 0.2  # inches: of a block, between two, for the letters behind
SQUARE = 0.14


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


def tiers_of(engine: Any, token_ids: Sequence[int], salt: Hashable = None) -> list[tuple[str, ...]]:
    """For each whole block of a text, the tiers that have it, the fastest first; of those that are
    drawn here."""
    everywhere = engine.tiers.everywhere(token_ids, salt)
    return [tuple(tier for tier in tiers if tier in TIERS) for tiers in everywhere]


class TierHistory(Recording):
    """Snapshots of one engine's tiers, in the order in which they were taken."""

    title = "Tiers"
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
            for i, tiers in enumerate(tiers_of(self.engine, token_ids)):
                key = tuple(token_ids[i * size : (i + 1) * size])
                place = (*place, key)
                blocks[place] = tiers
                told[place] = shown(self.engine.lm.decode(list(key)))
            ends[place] = (*ends.get(place, ()), name)
        step = TierSnapshot(words, blocks, told, ends)
        self.steps.append(step)
        return step

    def describe(self, i: int, before: int | None) -> str:
        return self.steps[i].describe()

    def counted(self, i: int) -> dict[str, int]:
        return {f"blocks on the {tier}": self.steps[i].count(tier) for tier in TIERS}

    def draw(self, chosen: Sequence[int]) -> Figure:
        layout = Layout([self.steps[i] for i in chosen])
        across = evenly(len(chosen), max(1, int(room(1) // layout.width)))

        def panel(pen: Pen, place: int, x: float, y: float) -> None:
            i = chosen[place]
            before = chosen[place - 1] if place else i - 1
            draw_tree(pen, layout, x, y, self.steps[i], self.steps[before] if i else None)

        heights = [layout.height([self.steps[i]]) for i in chosen]
        return strip(self.steps, chosen, across, heights, panel, LEGEND)

    def frame(self, i: int) -> Figure:
        steps = self.taken()
        layout = Layout(steps)
        height = layout.height(steps)
        pen = Pen(MARGIN + height + LEGEND.height)
        draw_tree(pen, layout, MARGIN, MARGIN, steps[i], steps[i - 1] if i else None)
        LEGEND.draw(pen, MARGIN + height)
        return pen.figure


class Layout:
    """The places of the blocks: the same at every step."""

    def __init__(self, steps: Sequence[TierSnapshot]):
        self.rows, _ = rows_of([list(step.blocks) for step in steps])
        columns = max(len(place) - 1 for step in steps for place in step.blocks)
        self.body = min(BODY[0], (room(1) - END) / columns - GAP)
        self.pitch = self.body + GAP
        self.row = BODY[1] + 1.45 * SQUARE + 0.14
        self.width = columns * self.pitch + END
        self.letters = max(2, int((self.body - 0.06) / width_of("0", FONT, 0.603)))

    def height(self, steps: Sequence[TierSnapshot]) -> float:
        """That any of these steps needs."""
        last = max(self.rows[place] for step in steps for place in step.blocks)
        return (last + 1) * self.row + 0.08

    def place(self, place: Place) -> tuple[float, float]:
        """The upper left corner of a block."""
        return (len(place) - 2) * self.pitch, self.rows[place] * self.row + 0.06


def draw_tree(
    pen: Pen, at: Layout, x: float, y: float, step: TierSnapshot, before: TierSnapshot | None
) -> None:
    """One step, and what has moved since the one before it."""
    for place, tiers in step.blocks.items():
        left, top = x + at.place(place)[0], y + at.place(place)[1]
        if len(place) > 2:
            start = at.place(place[:-1])
            turn = left - GAP / 2
            ys = y + start[1] + BODY[1] / 2, top + BODY[1] / 2
            pen.axes.plot([x + start[0] + at.body, turn, turn, left], [ys[0], ys[0], ys[1], ys[1]],
                          color=style.FAINT, lw=0.9, zorder=0.5)  # fmt: skip
        moved = before is not None and place in before.blocks and before.blocks[place] != tiers
        new = before is not None and place not in before.blocks
        _body(pen, left, top, (at.body, BODY[1]), tiers, moved or new)
        for n, tier in enumerate(tiers):
            _square(pen, left + n * 1.2 * SQUARE, top + BODY[1] + 0.05, tier)
        color = style.ink_on(COLORS[tiers[0]]) if tiers else style.FAINT
        text = step.texts[place]
        if len(text) > at.letters:
            text = f"{text[: at.letters - 1]}…"
        pen.text(left + at.body / 2, top + BODY[1] / 2, text, FONT, "center", color,
                 family="monospace", zorder=2)  # fmt: skip
        for n, name in enumerate(step.ends.get(place, ())):
            pen.text(left + at.body + 0.04 + 0.1 * n, top + BODY[1] / 2, name, SMALL, weight="bold")


def _body(
    pen: Pen, x: float, y: float, size: tuple[float, float], tiers: Sequence[str], moved: bool
) -> None:
    """A block in the colour of its fastest tier; (x, y) is its upper left corner."""
    look: dict[str, Any] = dict(facecolor="none", edgecolor=style.FAINT, linestyle=(0, (3, 2)))
    if tiers:
        look = dict(facecolor=COLORS[tiers[0]], edgecolor=style.INK)
    look |= dict(boxstyle="round,pad=0,rounding_size=0.05", linewidth=2.2 if moved else 0.9)
    pen.add(FancyBboxPatch((x, y), *size, zorder=1, **look))


def _square(pen: Pen, x: float, y: float, tier: str) -> None:
    """The mark of a tier; (x, y) is its upper left corner."""
    pen.square(x, y, SQUARE, SQUARE, COLORS[tier], line=0.5)
    ink, middle = style.ink_on(COLORS[tier]), (x + SQUARE / 2, y + SQUARE / 2)
    pen.text(*middle, LETTERS[tier], FONT, "center", ink, weight="bold", zorder=2)


def _entry(meaning: str, tiers: Sequence[str], moved: bool = False) -> Entry:
    def draw(pen: Pen, x: float, y: float) -> None:
        _body(pen, x, y - 0.085, (0.3, 0.17), tiers, moved)
        for tier in tiers:
            _square(pen, x + 0.34, y - SQUARE / 2, tier)

    return Entry(0.34 + 0.16 * len(tiers), meaning, draw)


LEGEND = Legend(
    [
        _entry("on the device", ["device"]),
        _entry("on the host", ["host"]),
        _entry("on disk", ["disk"]),
        _entry("forgotten", []),
        _entry("moved or new in this step", ["host"], moved=True),
    ]
)
