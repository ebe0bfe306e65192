"""Blocks as boxes in rows: where they are, in a colour that says it.

A row is an engine, a kind of layer, or a branch of a tree; then lines lead from box to box. The
same step of a recording has a box in the same place, whatever becomes of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minikv.course.pictures import style
from minikv.course.pictures.recording import Recording
from minikv.course.pictures.scene import (
    SMALL,
    Legend,
    LegendEntry,
    Pen,
    Scene,
    evenly,
    room,
    width_of,
)

Spot = tuple[int, int]  # row, column

FONT = 7.4  # points
LEAST, MOST, HEIGHT, SQUARE = 0.38, 0.62, 0.25, 0.14  # inches: of a box, and of a mark below it
GAP, LINE = 0.05, 0.14  # between two boxes, and where a line leads from one to the other


@dataclass(frozen=True)
class Box:
    """One block. Its look is "filled", "pale", "hatched", or "absent": a dashed outline."""

    text: str
    color: str
    look: str = "filled"
    new: bool = False  # a thick outline
    marks: tuple[tuple[str, str], ...] = ()  # squares below it: letter, colour
    after: str = ""  # letters behind it


@dataclass(frozen=True)
class Board:
    """What is drawn of one step."""

    boxes: Mapping[Spot, Box]
    lines: Mapping[Spot, Spot] = field(default_factory=dict)  # to each box, from which one


class BoxRecording(Recording):
    """A recording that is drawn as rows of boxes."""

    rows: Sequence[str] = ()  # their names, if they have any
    meanings: Mapping[str, Box]  # what the legend says, and a sample of it

    def boards(self, chosen: Sequence[int]) -> list[Board]:
        """What is drawn of these steps."""
        raise NotImplementedError

    def scene(self, chosen: Sequence[int], alone: bool) -> Scene:
        boards = self.boards(chosen)
        at = BoxLayout(boards, self.rows)
        across = 1 if alone else evenly(len(boards), at.across)

        def panel(pen: Pen, n: int, x: float, y: float) -> None:
            for row, name in enumerate(self.rows):
                pen.text(x, y + row * at.row + HEIGHT / 2, name, SMALL)
            for spot, box in boards[n].boxes.items():
                left, top = x + at.left(spot), y + spot[0] * at.row
                draw_box(pen, left, top, (at.body, HEIGHT), box, at.letters)
                if spot in boards[n].lines:
                    row, column = boards[n].lines[spot]
                    start, high = x + at.left((row, column)) + at.body, y + row * at.row
                    bend = left - at.gap / 2
                    points = [(start, high), (bend, high), (bend, top), (left, top)]
                    middles = [(px, py + HEIGHT / 2) for px, py in points]
                    pen.line(middles, style.FAINT, 0.9, zorder=0.5)

        lowest = [max(row for row, _ in board.boxes) for board in boards]
        heights = [max(row + 1, len(self.rows)) * at.row for row in lowest]
        return Scene(heights, panel, _legend(self.meanings), across)


class BoxLayout:
    """The places of one panel, the same at every step."""

    def __init__(self, boards: Sequence[Board], rows: Sequence[str]):
        boxes = [box for board in boards for box in board.boxes.values()]
        columns = 1 + max(column for board in boards for _, column in board.boxes)
        self.gap = LINE if any(board.lines for board in boards) else GAP
        self.start = max((width_of(name, SMALL) + 0.12 for name in rows), default=0.0)
        end = max(width_of(box.after, SMALL, 0.7) for box in boxes)
        letter, longest = width_of("0", FONT, 0.603), max(len(box.text) for box in boxes)
        self.body = min(
            max(LEAST, longest * letter + 0.08), MOST,
            (room(1) - self.start - end) / columns - self.gap,
        )  # fmt: skip
        self.letters = int((self.body - 0.06) / letter)
        self.row = HEIGHT + (1.45 * SQUARE if any(box.marks for box in boxes) else 0.0) + 0.14
        width = self.start + columns * (self.body + self.gap) + end
        self.across = next((n for n in (3, 2) if width <= room(n)), 1)

    def left(self, spot: Spot) -> float:
        return self.start + spot[1] * (self.body + self.gap)


def draw_box(
    pen: Pen, x: float, y: float, size: tuple[float, float], box: Box, letters: int
) -> None:
    """With its text, its marks and what stands behind it; (x, y) is its upper left corner."""
    width, height = size
    look: dict[str, Any] = dict(facecolor=box.color, zorder=1)
    ink, field_ = style.ink_on(box.color), None
    if box.look == "pale":
        look |= dict(facecolor=style.tint(box.color, 0.2))
        ink = style.INK
    elif box.look == "absent":
        look |= dict(facecolor="none", edgecolor=style.FAINT, linestyle=(0, (2, 2)))
        ink = style.FAINT
    elif box.look == "hatched":
        pen.box(x, y, *size, 0.05, edgecolor=box.color, hatch="//////", linewidth=0,
                zorder=1.5)  # fmt: skip
        look |= dict(facecolor=style.PAPER)
        ink, field_ = style.INK, dict(facecolor=style.PAPER, linewidth=0, pad=0.8)
    pen.box(x, y, *size, 0.05, linewidth=2.2 if box.new else 0.9, **look)
    text = box.text if len(box.text) <= letters else f"{box.text[: letters - 1]}…"
    middle = y + height / 2
    if text:
        pen.text(x + width / 2, middle, text, FONT, "center", ink, family="monospace",
                 bbox=field_, zorder=2)  # fmt: skip
    pen.text(x + width + 0.04, middle, box.after, SMALL, weight="bold")
    for n, (letter, color) in enumerate(box.marks):
        left, top = x + n * 1.2 * SQUARE, y + height + 0.05
        pen.square(left, top, SQUARE, SQUARE, color, line=0.5)
        pen.text(left + SQUARE / 2, top + SQUARE / 2, letter, FONT, "center",
                 style.ink_on(color), weight="bold", zorder=2)  # fmt: skip


def _legend(meanings: Mapping[str, Box]) -> Legend:
    """A box of each look, with what it means."""

    def entry(meaning: str, box: Box) -> LegendEntry:
        return LegendEntry(
            0.3, meaning, lambda pen, x, y: draw_box(pen, x, y - 0.09, (0.3, 0.18), box, 0)
        )

    return Legend([entry(meaning, box) for meaning, box in meanings.items()])
