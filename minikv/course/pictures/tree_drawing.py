"""How trees of blocks are drawn: the radix prefix cache, and the beams of a beam search.

A block's column is its place in the sequence: block 0 of every prompt is at the left, and
each next block is to the right of the one before. Its row is that of its branch. Rows and
columns are chosen from all steps together, so a block stays in place as long as it lives;
a node that is split is cut, and its blocks don't move. Over a block stand its id and its
reference count. All measures are inches from the upper left corner.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from minikv.course.pictures import style
from minikv.course.pictures.recording import Recording
from minikv.course.pictures.scene import (
    BODY,
    LOOKS,
    SIDE,
    SMALL,
    Legend,
    LegendEntry,
    Pen,
    Scene,
    body_entry,
    evenly,
    room,
    slot_entry,
    warning_entry,
    width_of,
)
from minikv.course.pictures.timeline import visible

Place = tuple[Hashable, ...]  # what leads to a block, itself last; the first item names its root

FONTS = (8.2, 7.4, 6.8)  # points: the first with which everything fits
FEWEST, MOST = 4, 14  # letters in a line of a block's text
SLOT, END = 0.115, 0.17  # a slot in a block; a line for each sequence that ends beside one
INSET = 0.11  # of a block: what its text leaves of its width
MOST_ROWS = 16


@dataclass(frozen=True)
class Cell:
    """One block in its place."""

    place: Place
    block_id: int
    text: str
    ref_count: int
    state: str  # of LOOKS, or "gone": a ghost
    new: bool = False
    wrong: bool = False  # its count cannot be right
    names: tuple[str, ...] = ()  # of the sequences that hold it
    filled: int | None = None  # slots; None: all of them, and slots are not drawn
    num_new: int = 0  # of the filled slots, the last ones


@dataclass(frozen=True)
class BlockRun:
    """Blocks that follow each other and are drawn as one."""

    cells: tuple[Cell, ...]
    outlined: bool = False  # a node of the radix tree, in a frame of its own
    num_locks: int = 0
    rank: int | None = None  # of eviction: 1 is next
    change: str = ""  # one word
    cut: bool = False  # split off, in this step, from the blocks to its left
    ends: tuple[tuple[str, str], ...] = ()  # (letter, text) of the sequences that end here


@dataclass(frozen=True)
class DrawnTree:
    """What is drawn of one step."""

    head: str
    runs: tuple[BlockRun, ...]
    roots: Mapping[Hashable, Sequence[str]]  # lines at each root; none: it is not drawn
    outside: Mapping[str, Sequence[int]] = field(default_factory=dict)  # blocks of sequences
    queue: Sequence[str] = ()  # nodes in the order in which they would be evicted
    block_size: int = 1


# ── The places ────────────────────────────────────────────────────────────────


def rows_of(trees: Sequence[Sequence[Place]]) -> tuple[dict[Place, int], int]:
    """A row for each place, and how many rows there are.

    The first child stands beside its parent, the others below. Branches that are never
    there at the same step may have the same rows.
    """
    steps: dict[Place, set[int]] = {}
    children: dict[Place, list[Place]] = {(): []}
    for step, places in enumerate(trees):
        for place in places:
            for length in range(1, len(place) + 1):
                prefix = place[:length]
                if prefix not in steps:
                    steps[prefix] = set()
                    children[prefix] = []
                    children[prefix[:-1]].append(prefix)
                steps[prefix].add(step)

    lanes: dict[Place, list[list[Place]]] = {}
    heights: dict[Place, int] = {}
    for place in sorted(children, key=len, reverse=True):  # so children come first
        lanes[place] = []
        for child in children[place]:
            for lane in lanes[place]:
                if not any(steps[child] & steps[other] for other in lane):
                    lane.append(child)
                    break
            else:
                lanes[place].append([child])
        heights[place] = max(1, sum(max(heights[child] for child in lane) for lane in lanes[place]))

    rows: dict[Place, int] = {(): 0}
    for place in sorted(children, key=len):
        row = rows[place]
        for lane in lanes[place]:
            rows.update(dict.fromkeys(lane, row))
            row += max(heights[child] for child in lane)
    return rows, heights[()]


def _columns(runs: Sequence[BlockRun], leave_out: int) -> list[range]:
    """The columns of blocks. Those that look alike may stand as one: at 1 all but the first
    and last of a node, at 2 all but the first."""
    depth = max((len(run.cells[-1].place) - 1 for run in runs), default=1)
    starts = set(range(depth)) if leave_out == 0 else {0}
    for run in runs:
        first, last = (len(cell.place) - 2 for cell in (run.cells[0], run.cells[-1]))
        starts |= {first, first + 1, last + 1} | ({last} if leave_out == 1 else set())
        for i, (left, right) in enumerate(pairwise(run.cells), first):
            if _look(left) != _look(right):
                starts |= {i + 1, i + 2}
    edges = [*sorted(start for start in starts if start < depth), depth]
    return [range(start, end) for start, end in pairwise(edges)]


def _look(cell: Cell) -> tuple:
    return cell.state, cell.new, cell.wrong, cell.names, cell.filled, cell.num_new


def shown(text: str) -> str:
    """A block's text: blanks and line ends can be seen, and indentation is short."""
    return re.sub("·{3,}", "⋯", visible(text, 99))


def broken(text: str, letters: int) -> list[str]:
    """A text in one or two lines, cut if it is too long; rather broken beside a blank."""
    if len(text) > 2 * letters:
        text = text[: 2 * letters - 1] + "…"
    if len(text) <= letters:
        return [text]
    half = len(text) / 2
    at = min(
        range(len(text) - letters, letters + 1),
        key=lambda i: abs(i - half) - 3 * ((text[i : i + 1] in "·↵⋯") != (text[i - 1] in "·↵⋯")),
    )
    return [text[:at], text[at:]]


class TreeLayout:
    """The places of one panel: the same at every step, so that only what changes moves."""

    def __init__(
        self, trees: Sequence[DrawnTree], width: float, font: float, leave_out: int, fewest: int
    ):
        self.width = width
        self.font, self.small, self.line = font, font - 0.6, 1.5 * font / 72  # points; inches
        runs = [run for tree in trees for run in tree.runs]
        cells = [cell for run in runs for cell in run.cells]
        places = [[cell.place for run in tree.runs for cell in run.cells] for tree in trees]
        self.rows, num_rows = rows_of(places)
        self.columns = _columns(runs, leave_out)
        self.block_size = trees[0].block_size
        self.with_slots = any(cell.filled is not None for cell in cells)

        # From left to right: the root, the columns, and the sequences that end there.
        labels = [part for tree in trees for label in tree.roots.values() for part in label]
        self.root = width_of("0" * max(map(len, labels), default=0), font) + 0.1 if labels else 0.0
        letter, char = width_of("0", self.small, 0.603), width_of("0", font, 0.64)
        self.chip = 0.15
        ends = [len(text) for run in runs for _, text in run.ends]
        end = self.chip + max(ends, default=0) * letter + 0.1 if ends else 0.0
        self.gap = 1.9 * font / 72  # between nodes
        self.pad = 0.45 * font / 72 * any(run.outlined for run in runs)  # in their frames
        digits = max((len(str(cell.block_id)) for cell in cells), default=1)
        counts = max((len(str(cell.ref_count)) for cell in cells), default=1)
        label = (digits + counts + len(" refs") + 1) * char * 0.88
        label += 0.15 * any(cell.wrong for cell in cells)
        around = self.gap + 2 * self.pad
        self.start = self.root + self.gap / 2 if labels else 0.0  # of the columns
        room_left = (width - self.start - end) / len(self.columns) - around
        longest = max((len(cell.text) for cell in cells), default=1)
        wish = min(MOST, longest) * letter
        least = max(fewest * letter, label - INSET)
        if self.with_slots:
            wish, least = max(wish, self.block_size * SLOT), max(least, self.block_size * SLOT / 2)
        heads = max(width_of(tree.head, font) for tree in trees)
        self.fits = room_left >= least + INSET and num_rows <= MOST_ROWS and heads <= width
        self.body = min(max(wish, least) + INSET, room_left)
        self.pitch = self.body + around
        self.letters = max(1, int((self.body - INSET) / letter))
        self.slot = min(SLOT, (self.body - INSET) / self.block_size)

        # From top to bottom: the head, then the rows.
        self.label = 1.5 * font / 72  # a block's id and its count, over it
        lines = 2 if longest > self.letters else 1
        self.body_height = (1.25 * lines + 1.1) * self.small / 72
        self.under = 0.0  # slots under a block's text, or letters under the block
        if self.with_slots:
            self.under = self.slot + 0.05
        elif any(cell.names for cell in cells):
            self.under = 0.165
        with_marks = any(run.num_locks or run.rank or run.change for run in runs)
        self.marks = 1.2 * self.line if with_marks else 0.0
        self.frame = self.label + self.body_height + self.under + 2 * self.pad
        self.heights = [self.frame] * num_rows
        for run in runs:
            row = self.rows[run.cells[-1].place]
            self.heights[row] = max(self.heights[row], len(run.ends) * END)
        self.top = 1.5 * self.line

    @classmethod
    def beside(cls, trees: Sequence[DrawnTree]) -> "tuple[TreeLayout, int]":
        """One for panels beside each other, if they need not be cramped; and for how many."""
        for most in range(len(trees), 1, -1):
            across = evenly(len(trees), most)
            for font in FONTS[:-1]:
                layout = cls(trees, room(across), font, 0, 6)
                if layout.fits:
                    return layout, across
        return cls.alone(trees), 1

    @classmethod
    def alone(cls, trees: Sequence[DrawnTree]) -> "TreeLayout":
        """The first that fits: whole, then with what is alike left out, in smaller letters."""
        for leave_out in (0, 1, 2):
            for font in FONTS:
                layout = cls(trees, room(1), font, leave_out, FEWEST)
                if layout.fits:
                    return layout
        raise ValueError(
            f"this tree is too large for a picture: {len(layout.columns)} columns of blocks and "
            f"{len(layout.heights)} rows. Draw fewer steps, as in picture(steps=[0, 1]), or a "
            "smaller tree"
        )

    def foot(self, trees: Sequence[DrawnTree]) -> float:
        """Under the rows that any of them needs."""
        rows = [self.rows[run.cells[-1].place] for tree in trees for run in tree.runs]
        if not rows:
            return self.top + 1.5 * self.line
        return self.middle(max(rows)) + self.heights[max(rows)] / 2 + 0.1

    def height(self, trees: Sequence[DrawnTree]) -> float:
        """That any of them needs."""
        lines = any(tree.queue for tree in trees) + any(tree.outside for tree in trees)
        return self.foot(trees) + 1.6 * self.line * lines

    def column(self, place: Place) -> int:
        """Index in `columns` of where a place stands."""
        return next(i for i, columns in enumerate(self.columns) if len(place) - 2 in columns)

    def left(self, column: int) -> float:
        """End of a frame that begins with this column."""
        return self.start + column * self.pitch + self.gap / 2

    def ends(self, column: int) -> tuple[float, float]:
        """Where lines arrive and leave: at the frame, or at the block that has none."""
        left = self.left(column)
        return left, left + self.pitch - self.gap

    def middle(self, row: int) -> float:
        """Of the frames of a row."""
        above = sum(self.heights[:row]) + row * (self.marks + 0.1)
        return self.top + above + self.marks + self.heights[row] / 2


# ── The ink ───────────────────────────────────────────────────────────────────


def padlock(pen: Pen, x: float, y: float, size: float) -> None:
    """Closed; (x, y) is the middle of its left side, `size` its height."""
    width, body = 0.78 * size, 0.56 * size
    top = y + size / 2 - body
    pen.square(x, top, width, body, style.INK, line=0)
    left, right, high = x + 0.2 * width, x + 0.8 * width, top - 0.95 * (size - body)
    vertices = [(left, top), (left, high), (right, high), (right, top)]
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    pen.add(PathPatch(Path(vertices, codes), facecolor="none", edgecolor=style.INK, linewidth=1.1))


def ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


GHOST: dict[str, Any] = dict(linestyle=(0, (3, 2)), edgecolor=style.FAINT)


class TreePanel:
    """One step, drawn at (x, y), and what is not in the tree at `foot`."""

    def __init__(
        self, pen: Pen, layout: TreeLayout, x: float, y: float, tree: DrawnTree, foot: float
    ):
        self.pen, self.layout, self.x, self.y, self.tree = pen, layout, x, y, tree
        self.foot = foot
        self.spots: dict[Place, tuple[int, int]] = {}  # row and column of each block
        for run in tree.runs:
            for cell in run.cells:  # a node is on one row
                row = layout.rows[run.cells[-1].place if run.outlined else cell.place]
                self.spots[cell.place] = row, layout.column(cell.place)

    def draw(self) -> None:
        at = self.layout
        self._text(0, at.line / 2, self.tree.head, color=style.FAINT)
        for root, lines in self.tree.roots.items():
            self._root(root, lines)
        for run in self.tree.runs:
            self._run(run)
        if not self.tree.runs:
            self._text(0, at.top + at.line / 2, "the tree is empty")
        if self.tree.queue:
            self._queue()
        if self.tree.outside:
            self._outside()

    def _text(self, x, y, text, align="left", size=None, **more) -> None:
        self.pen.text(self.x + x, self.y + y, text, size or self.layout.font, align, **more)

    def _root(self, root: Hashable, lines: Sequence[str]) -> None:
        at = self.layout
        y = at.middle(at.rows[root,])
        height = (len(lines) + 0.35) * at.line
        corner = self.x, self.y + y - height / 2
        self.pen.box(*corner, at.root, height, 0.05, facecolor=style.PAPER)
        for n, line in enumerate(lines):
            middle = y + (n - (len(lines) - 1) / 2) * at.line
            weight = "normal" if n else "bold"
            self._text(at.root / 2, middle, line, "center", weight=weight)

    def _run(self, run: BlockRun) -> None:
        at = self.layout
        columns = [self.spots[cell.place][1] for cell in run.cells]
        left, right = at.left(columns[0]), at.left(columns[-1]) + at.pitch - at.gap
        if run.outlined:
            self._node(run, left, right)
        for column in dict.fromkeys(columns):
            cells = [cell for cell in run.cells if self.spots[cell.place][1] == column]
            if column == columns[0] or not run.outlined:
                self._edge(cells[0], run.cut)
            y = at.middle(self.spots[cells[0].place][0])
            if len(cells) == 1:
                self._block(cells[0], at.left(column) + at.pad, y)
            else:
                self._left_out(cells, at.left(column), y)
        for n, (name, text) in enumerate(run.ends):
            middle = y + (n - (len(run.ends) - 1) / 2) * END
            x = right + 0.4 * at.gap
            self.pen.slot(self.x + x + at.chip / 2, self.y + middle, at.chip, [name])
            self._text(x + at.chip + 0.03, middle, text, size=at.small, family="monospace")

    def _node(self, run: BlockRun, left: float, right: float) -> None:
        at, y = self.layout, self.layout.middle(self.spots[run.cells[0].place][0])
        gone = run.cells[0].state == "gone"
        look = GHOST if gone else dict(linewidth=2.2) if run.num_locks else {}
        top = y - at.frame / 2
        corner = self.x + left, self.y + top
        self.pen.box(*corner, right - left, at.frame, 0.07, facecolor=style.PAPER, **look)
        self._marks(run, left, right, top - 0.55 * at.line)

    def _line(self, points: Sequence[tuple[float, float]], gone: bool) -> None:
        look: dict[str, Any] = dict(color=style.INK, zorder=0.5)
        if gone:  # behind what is left
            look = dict(color=style.FAINT, linestyle=GHOST["linestyle"], zorder=0.4)
        self.pen.line([(self.x + x, self.y + y) for x, y in points], lw=0.9, **look)

    def _edge(self, cell: Cell, cut: bool) -> None:
        """To a block, or its node, from the one before it or from the root."""
        at, before = self.layout, cell.place[:-1]
        row, column = self.spots[cell.place]
        if before in self.spots:
            row_before, column_before = self.spots[before]
            start, high = at.ends(column_before)[1], at.middle(row_before)
        elif len(before) == 1 and before[0] in self.tree.roots:
            start, high = at.root, at.middle(at.rows[before])
        else:
            return
        bend, end, y = at.left(column) - at.gap / 2, at.ends(column)[0], at.middle(row)
        self._line([(start, high), (bend, high), (bend, y), (end, y)], cell.state == "gone")
        if cut:
            look = dict(weight="bold", zorder=3, bbox=dict(facecolor=style.PAPER, lw=0, pad=0.3))
            self._text(bend, y, "✂", "center", at.font + 2.5, **look)

    def _marks(self, run: BlockRun, left: float, right: float, y: float) -> None:
        """Above a node: its locks or its rank, and what became of it."""
        at = self.layout
        x = left
        if run.num_locks:
            padlock(self.pen, self.x + x + 0.02, self.y + y, 0.95 * at.font / 72)
            x += 0.95 * at.font / 72 + 0.03
            self._text(x, y, str(run.num_locks), weight="bold")
            x += width_of(str(run.num_locks), at.font, 0.7) + 0.04
        elif run.rank:
            self._text(x, y, ordinal(run.rank))
            x += width_of(ordinal(run.rank), at.font, 0.64) + 0.05
        if run.change:
            room_left = right + 0.8 * at.gap - x
            size = min(at.font, at.font * room_left / width_of(run.change, at.font, 0.62))
            faint = dict(color=style.FAINT) if run.cells[0].state == "gone" else {}
            self._text(x, y, run.change, size=size, style="italic", **faint)

    def _block(self, cell: Cell, x: float, y: float) -> None:
        at, pen = self.layout, self.pen
        gone = cell.state == "gone"
        faint = style.FAINT if gone else style.INK
        y += (at.label - at.under) / 2
        left, over = x, y - at.body_height / 2 - 0.5 * at.label
        self._text(left + 0.02, over, str(cell.block_id), color=faint, weight="bold")
        under = at.under if at.with_slots else 0.0  # slots are in the block, letters below it
        look = GHOST if gone else dict(facecolor=LOOKS[cell.state]["face"])
        look = look | dict(linewidth=2.2 if cell.new else 0.9, zorder=1)
        corner = self.x + left, self.y + y - at.body_height / 2
        hatch = None if gone else LOOKS[cell.state].get("hatch")
        pen.box(*corner, at.body, at.body_height + under, 0.05, hatch=hatch, **look)
        if cell.state == "shared":  # the hatches are a rim around the text
            self.pen.square(
                self.x + left + 0.035, self.y + y - at.body_height / 2 + 0.035, at.body - 0.07,
                at.body_height + under - 0.07, style.PAPER, line=0, zorder=1.5,
            )  # fmt: skip
        self._words(cell.text, left + at.body / 2, y, faint)
        if not gone:
            refs = "1 ref" if cell.ref_count == 1 else f"{cell.ref_count} refs"
            after = left + at.body - width_of(refs, at.font, 0.57) - 0.18 * cell.wrong
            pen.count(self.x + after, self.y + over, refs, at.font, cell.wrong)
        below = y + at.body_height / 2 + at.under / 2
        if at.with_slots:
            for n in range(at.block_size):
                slot_x = left + at.body / 2 + (n - (at.block_size - 1) / 2) * at.slot
                self._slot(cell, n, self.x + slot_x, self.y + below - 0.02)
        else:
            self._names(cell, left + at.body / 2, below)

    def _names(self, cell: Cell, x: float, y: float) -> None:
        """Of the sequences that hold a block; (x, y) is their middle."""
        at, names = self.layout, list(cell.names)
        fit = max(1, int((at.body + 0.1) / at.chip))
        if len(names) > fit:
            names = [*names[: fit - 1], f"+{len(names) - fit + 1}"]
        for n, name in enumerate(names):
            middle = x + (n - (len(names) - 1) / 2) * at.chip
            if name[0] == "+":
                self._text(middle, y, name, "center", at.small)
            else:
                self.pen.slot(self.x + middle, self.y + y, at.chip, [name])

    def _slot(self, cell: Cell, n: int, x: float, y: float) -> None:
        at, pen = self.layout, self.pen
        side = 0.82 * at.slot
        count = at.block_size if cell.filled is None else cell.filled
        filled, new = n < count, count - cell.num_new <= n < count
        if cell.state == "gone":
            pen.square(x - side / 2, y - side / 2, side, side, "none", style.FAINT, 0.4)
            return
        face = (style.INK if new else style.FAINT) if filled else style.PAPER
        pen.square(x - side / 2, y - side / 2, side, side, face, style.INK, 0.5, zorder=2)

    def _words(self, text: str, x: float, y: float, color: str) -> None:
        at = self.layout
        lines = broken(text, at.letters)
        for n, line in enumerate(lines):
            middle = y + (n - (len(lines) - 1) / 2) * 1.25 * at.small / 72
            self._text(
                x, middle, line, "center", at.small, color=color, family="monospace", zorder=2
            )

    def _left_out(self, cells: Sequence[Cell], left: float, y: float) -> None:
        """Blocks that look alike, as one."""
        at = self.layout
        x, y = left + (at.pitch - at.gap) / 2, y + (at.label - at.under) / 2
        color = style.FAINT if cells[0].state == "gone" else style.INK
        self._text(x, y - 0.35 * at.line, "⋯", "center", at.font + 3, color=color)
        self._text(x, y + 0.5 * at.line, f"{len(cells)} blocks", "center", color=color)
        self._names(cells[0], x, y + at.body_height / 2 + at.under / 2)

    def _queue(self) -> None:
        """The nodes in the order in which they would be evicted: ids of their blocks."""
        at, x, y = self.layout, 0.0, self.foot + 0.7 * self.layout.line
        words = "evicted next →"
        self._text(x, y, words)
        x += width_of(words, at.font, 0.6) + 0.05
        height = 1.25 * at.line
        for text in self.tree.queue:
            width = width_of(text, at.font, 0.6) + 0.12
            if x + width > at.width - 0.15:
                self._text(x, y, "…")
                break
            self.pen.box(self.x + x, self.y + y - height / 2, width, height, 0.04)
            self._text(x + width / 2, y, text, "center")
            x += width + 0.07

    def _outside(self) -> None:
        at, x = self.layout, 0.0
        y = self.foot + (0.7 + 1.6 * bool(self.tree.queue)) * self.layout.line
        self._text(x, y, "not in the tree:")
        x += width_of("not in the tree:", at.font, 0.5) + 0.1
        for name, ids in self.tree.outside.items():
            text = " ".join(map(str, ids[:6])) + (f" … {len(ids)} in all" if len(ids) > 6 else "")
            width = at.chip + 0.05 + width_of(text, at.font, 0.57) + 0.1
            if x + width > at.width - 0.15:
                self._text(x, y, "…")
                break
            self.pen.slot(self.x + x + at.chip / 2, self.y + y, at.chip, [name])
            self._text(x + at.chip + 0.05, y, text)
            x += width


# ── The pictures ──────────────────────────────────────────────────────────────


def _block_sample(pen: Pen, x: float, y: float) -> None:
    _frame_sample(pen, x, y, facecolor=LOOKS["used"]["face"])
    pen.text(x + BODY / 2, y, "text", SMALL - 1, "center", family="monospace")


def _frame_sample(pen: Pen, x: float, y: float, **look) -> None:
    pen.box(x, y - 0.1, BODY, 0.2, 0.05, **look)


def _lock_sample(pen: Pen, x: float, y: float) -> None:
    padlock(pen, x, y, 0.11)
    pen.text(x + 0.12, y, "2", SMALL, weight="bold")
    _frame_sample(pen, x + 0.24, y, linewidth=2.2)
    pen.box(x + 0.34, y - 0.06, BODY - 0.2, 0.12, 0.03, facecolor=LOOKS["cached"]["face"])


def _slots_sample(pen: Pen, x: float, y: float) -> None:
    for n, face in enumerate((style.FAINT, style.INK, style.PAPER)):
        pen.square(x + 0.13 * n, y - 0.05, 0.1, 0.1, face, line=0.5)


def _end_sample(pen: Pen, x: float, y: float) -> None:
    pen.slot(x + SIDE / 2, y, SIDE, "A")
    pen.text(x + SIDE + 0.03, y, "+in", SMALL - 1, family="monospace")


def _new_sample(pen: Pen, x: float, y: float) -> None:
    pen.box(x, y - 0.07, 0.26, 0.14, 0.04, facecolor=LOOKS["cached"]["face"], linewidth=2.2)


SAMPLES = {
    "count": LegendEntry(BODY, "", _block_sample),
    **{state: body_entry("", state) for state in LOOKS},
    "name": slot_entry("", "A"),
    "slots": LegendEntry(0.4, "", _slots_sample),
    "end": LegendEntry(0.4, "", _end_sample),
    "lock": LegendEntry(0.24 + BODY, "", _lock_sample),
    "rank": LegendEntry(0.17, "", lambda pen, x, y: pen.text(x, y, "1st", SMALL)),
    "new": LegendEntry(0.26, "", _new_sample),
    "cut": LegendEntry(0.14, "", lambda pen, x, y: pen.text(x, y, "✂", SMALL + 2, weight="bold")),
    "gone": LegendEntry(BODY, "", partial(_frame_sample, **GHOST)),
    "wrong": warning_entry(""),
}


def _legend(trees: Sequence[DrawnTree], meanings: Mapping[str, str]) -> Legend:
    """What is to be explained of `meanings`, in their order."""
    runs = [run for tree in trees for run in tree.runs]
    marks = [dict(lock=run.num_locks, rank=run.rank, cut=run.cut, end=run.ends) for run in runs] + [
        {cell.state: True, "count": True}
        | dict(name=cell.names, slots=cell.filled, new=cell.new, wrong=cell.wrong)
        for run in runs
        for cell in run.cells
    ]
    there = {kind for mark in marks for kind, seen in mark.items() if seen}
    return Legend(
        [
            replace(SAMPLES[kind], meaning=meaning)
            for kind, meaning in meanings.items()
            if kind in there
        ]
    )


class TreeRecording(Recording):
    """A recording that is drawn as trees of blocks."""

    meanings: Mapping[str, str]  # what its legend says, by the kind of entry

    def trees(self, chosen: Sequence[int]) -> list[DrawnTree]:
        """What is drawn of these steps."""
        raise NotImplementedError

    def scene(self, chosen: Sequence[int], alone: bool) -> Scene:
        trees = self.trees(chosen)
        layout, across = (TreeLayout.alone(trees), 1) if alone else TreeLayout.beside(trees)
        together = [trees if alone else [tree] for tree in trees]  # what needs the same height

        def panel(pen: Pen, n: int, x: float, y: float) -> None:
            TreePanel(pen, layout, x, y, trees[n], layout.foot(together[n])).draw()

        heights = [layout.height(needed) for needed in together]
        return Scene(heights, panel, _legend(trees, self.meanings), across)
