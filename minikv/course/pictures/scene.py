"""How recordings of blocks are drawn: the ink, one legend, and steps beside each other.

A `Scene` is some steps of a recording, drawn with the same places, so that only what changes
moves, over one legend. A slot is a small square, a block a rounded row of slots or a box with its
text. All measures are inches from the upper left corner; the width of a text is estimated.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch, Polygon, Rectangle
from matplotlib.path import Path
from matplotlib.patheffects import Normal, Stroke

from minikv.course.pictures import style

WIDTH = 7.6  # narrower than a chart: letters stay legible where the window is split
MOST_STRIPES = 6  # of the sequences that share a slot
MARGIN, GAP = 0.1, 0.24  # around the picture; between two panels
LIVE, CACHED, HELD = "#f1f1f1", "#dedede", "#a8a8a8"  # what blocks are filled with
LOOKS = dict(  # of a block, by its state
    used=dict(face=LIVE),
    shared=dict(face=style.PAPER, hatch="//////"),
    cached=dict(face=CACHED),
    held=dict(face=HELD),
    free=dict(face="none", edge=style.FAINT),
    freed=dict(face="none", edge=style.FAINT, dashes="--"),
)
WORDS, SMALL = 9.5, 8.0  # points: titles, the legend


def width_of(text: str, size: float, each: float = 0.55) -> float:
    """About how wide a text is, in inches; `each` letter in parts of the font's size."""
    return each * size / 72 * len(text)


# ── The ink ───────────────────────────────────────────────────────────────────


class Pen:
    """Draws on a paper of its own.

    Patches go through `add_artist`: `add_patch` would measure each, for limits that are set.
    Nothing is clipped: all of it is on the paper, and an SVG would say so for each patch.
    """

    def __init__(self, height: float):
        self.figure, self.axes = style.canvas(height, WIDTH, WIDTH)

    def add(self, patch: Patch) -> None:
        self.axes.add_artist(patch).set_clip_on(False)

    def text(self, x, y, text, size, align="left", color=style.INK, **more) -> None:
        self.axes.text(
            x, y, text, fontsize=size, ha=align, va="center_baseline", color=color, **more
        )

    def square(self, x, y, width, height, face, edge=style.INK, line=0.6, zorder=1.0) -> None:
        self.add(
            Rectangle(
                (x, y), width, height, facecolor=face, edgecolor=edge, linewidth=line,
                zorder=zorder,
            )
        )  # fmt: skip

    def box(self, x, y, width, height, rounding, **look) -> FancyBboxPatch:
        """A rounded box; (x, y) is its upper left corner."""
        plain: dict[str, Any] = dict(
            facecolor="none", edgecolor=style.INK, linewidth=0.9, zorder=0.8
        )
        patch = FancyBboxPatch(
            (x, y), width, height, boxstyle=f"round,pad=0,rounding_size={rounding}", **plain | look
        )
        self.add(patch)
        return patch

    def line(self, points: Sequence[tuple[float, float]], color=style.INK, lw=0.5, **more) -> None:
        xs, ys = zip(*points, strict=True)
        self.axes.plot(xs, ys, color=color, lw=lw, **more)

    def body(self, x, y, width, slot, face, hatch=None, edge=style.INK, dashes="-") -> None:
        """The rounded row that a block is; y is its middle."""
        height = 1.36 * slot
        self.box(
            x, y - height / 2, width, height, 0.3 * slot, facecolor=face, edgecolor=edge,
            hatch=hatch, linestyle=dashes, zorder=1,
        ).set_hatch_linewidth(0.8)  # fmt: skip

    def slot(
        self, x, y, side, names: Sequence[str] = (), new: bool = False, wide=0.0, token=("", 0.0)
    ) -> None:
        """A square, or a box `wide`, in the colour of its sequence; (x, y) is its middle.

        In it stands the sequence's letter, or a `token`, (text, points). One that several
        sequences share has their colours, as stripes.
        """
        gap = 0.1 * side  # so that what is behind a row of slots is seen between them
        wide, side = max(wide, side) - gap, side - gap
        left, top = x - wide / 2, y - side / 2
        stripe = wide / max(1, min(len(names), MOST_STRIPES))
        for i, name in enumerate(names[:MOST_STRIPES]):
            color = style.color(number_of(name))
            self.square(left + i * stripe, top, stripe, side, color, line=0)
        if len(names) == 1 and token[0]:
            self.text(x, y, token[0], token[1], "center", style.ink_on(color), family="monospace")
        elif len(names) == 1:
            size = min(10, 72 * side * 0.64 / len(name) ** 0.5)
            self.text(x, y, name, size, "center", style.ink_on(color), weight="bold")
        face = "none" if names else style.PAPER
        self.square(left, top, wide, side, face, style.INK if names else style.FAINT)
        if new:
            thick = min(2.0, 9.5 * side)
            more = thick / 2 / 72
            corner = left - more / 2, top - more / 2
            self.square(*corner, wide + more, side + more, "none", line=thick, zorder=2)

    def count(self, x, y, count: str, size, wrong: bool = False, color=style.INK) -> None:
        """A reference count; one that is wrong is white on black, with a mark."""
        if wrong:
            box = dict(boxstyle="round,pad=0.15", facecolor=style.INK, linewidth=0)
            self.text(x + 0.02, y, count, size, color=style.PAPER, weight="bold", bbox=box)
            self.text(x + width_of(count, size, 0.7) + 0.06, y, "⚠", size + 1, weight="bold")
        else:
            self.text(x, y, count, size, color=color)

    def arrow(self, points: Sequence[tuple[float, float]], color: str, slot: float) -> None:
        """A curve through `points`, level at each, with a head that suits the size of a slot."""
        (x, y), head = points[-1], min(0.08, 0.42 * slot)
        points = [*points[:-1], (x - 0.9 * head, y)]
        vertices, codes = [points[0]], [Path.MOVETO]
        for (x0, y0), (x1, y1) in pairwise(points):
            vertices += [((x0 + x1) / 2, y0), ((x0 + x1) / 2, y1), (x1, y1)]
            codes += [Path.CURVE4] * 3
        thick = min(1.4, 7 * slot)
        rim = [Stroke(linewidth=thick + 1, foreground=style.INK), Normal()]  # for pale colours
        self.add(
            PathPatch(
                Path(vertices, codes), facecolor="none", edgecolor=color, linewidth=thick,
                path_effects=rim, zorder=0.8,
            )
        )  # fmt: skip
        triangle = [(x - head, y - head / 2), (x, y), (x - head, y + head / 2)]
        self.add(Polygon(triangle, facecolor=style.INK, linewidth=0, zorder=0.9))


def number_of(name: str) -> int:
    """Which sequence a letter stands for: the inverse of `style.letter`."""
    return ord(name[0]) - ord("A") + 26 * int(name[1:] or 0)


# ── The legend ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LegendEntry:
    """One thing that a legend explains: a sample `width` wide, and what it means."""

    width: float
    meaning: str
    sample: Callable[[Pen, float, float], None]  # draws it: left end, middle


class Legend:
    """One or more lines at the bottom of every picture."""

    def __init__(self, entries: Sequence[LegendEntry]):
        self.places, x, line = [], MARGIN, 0
        for entry in entries:
            width = entry.width + 0.06 + width_of(entry.meaning, SMALL, 0.56) + 0.2
            if x + width > WIDTH:
                x, line = MARGIN, line + 1
            self.places.append((entry, x, line))
            x += width
        self.height = 0.26 * (line + 1) + 0.14

    def draw(self, pen: Pen, y: float) -> None:
        pen.line([(MARGIN, y + 0.04), (WIDTH - MARGIN, y + 0.04)], style.FAINT)
        for entry, x, line in self.places:
            middle = y + 0.2 + 0.26 * line
            entry.sample(pen, x, middle)
            pen.text(x + entry.width + 0.06, middle, entry.meaning, SMALL)


SIDE, BODY = 0.17, 0.4  # of a slot and of a block in a legend


def slot_entry(meaning: str, names: str, new: bool = False) -> LegendEntry:
    return LegendEntry(SIDE, meaning, lambda pen, x, y: pen.slot(x + SIDE / 2, y, SIDE, names, new))


def body_entry(meaning: str, state: str, names: str = "") -> LegendEntry:
    def sample(pen: Pen, x: float, y: float) -> None:
        pen.body(x, y, BODY, SIDE, **LOOKS[state])
        if names:
            pen.slot(x + BODY / 2, y, SIDE, names)

    return LegendEntry(BODY, meaning, sample)


def warning_entry(meaning: str) -> LegendEntry:
    return LegendEntry(
        0.28, meaning, lambda pen, x, y: pen.count(x + 0.03, y, "0", SMALL, wrong=True)
    )


# ── Steps beside each other ───────────────────────────────────────────────────


def room(across: int) -> float:
    """The width of each of `across` panels beside each other."""
    return (WIDTH - 2 * MARGIN - (across - 1) * GAP) / across


def evenly(panels: int, most: int) -> int:
    """How many panels to put on a line, at most `most`, so that lines are about equally long."""
    return -(-panels // -(-panels // most))


@dataclass(frozen=True)
class Scene:
    """Some steps of a recording, drawn with the same places over one legend."""

    heights: Sequence[float]  # of each step
    draw: Callable[[Pen, int, float, float], None]  # the n-th of them; its upper left corner
    legend: Legend
    across: int = 1  # steps on a line of a film

    def alone(self, place: int) -> Figure:
        """One of the steps, without its words, on a paper that is large enough for each."""
        height = max(self.heights)
        pen = Pen(MARGIN + height + self.legend.height)
        self.draw(pen, place, MARGIN, MARGIN)
        self.legend.draw(pen, MARGIN + height)
        return pen.figure

    def film(self, words: Sequence[str], warnings: Sequence[Sequence[str]]) -> Figure:
        """All steps from left to right, then on the next line, each under its words and its
        warnings."""
        across, width = self.across, room(self.across)
        wrapped = [_wrapped(*step, width) for step in zip(words, warnings, strict=True)]
        line = 1.35 * WORDS / 72
        tops, starts, bottom = [], [], MARGIN  # of each line: its words, and its panels
        for first in range(0, len(words), across):
            tops.append(bottom)
            starts.append(bottom + line * max(map(len, wrapped[first : first + across])) + 0.08)
            bottom = starts[-1] + max(self.heights[first : first + across]) + 0.12

        pen = Pen(bottom + self.legend.height)
        for place, lines in enumerate(wrapped):
            row, column = divmod(place, across)
            x, top = MARGIN + column * (width + GAP), tops[row]
            if column > 0:
                end = tops[row + 1] if row + 1 < len(tops) else bottom
                pen.line([(x - GAP / 2, top), (x - GAP / 2, end - 0.1)], style.FAINT)
            for n, (text, weight) in enumerate(lines):
                pen.text(x, top + (n + 0.5) * line, text, WORDS, weight=weight)
            self.draw(pen, place, x, starts[row])
        self.legend.draw(pen, bottom)
        return pen.figure


def _wrapped(words: str, warnings: Sequence[str], width: float) -> list[tuple[str, str]]:
    """The lines over a panel, with their weights."""
    characters = int(width / width_of("0", WORDS, 0.62))  # bold
    title = textwrap.wrap(words, characters, subsequent_indent="    ")
    lines = [(line, "bold") for line in title]
    for warning in warnings:
        wrapped = textwrap.wrap(f"⚠ {warning}", characters, subsequent_indent="    ")
        lines += [(line, "normal") for line in wrapped]
    return lines
