"""The ring, seen step by step: copied from live cells, then drawn.

    history = RingHistory(cells)
    history.snap("A's prompt")                        # copies what is there now
    context_shift(cells, n_keep=2)
    history.snap("half is discarded")
    history.picture()                                 # all steps, one below the other
    history.widget()                                  # a player

A `RingSnapshot` says in plain data what is drawn, so a test can ask it. It reads `positions`,
`sequences`, `shifts` and `head` of the cells, the engine's own or a reader's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from matplotlib.patches import Polygon

from minikv.course.pictures import style
from minikv.course.pictures.recording import Recording, check_surface
from minikv.course.pictures.scene import SIDE, Legend, LegendEntry, Pen, Scene, room, slot_entry
from minikv.course.pictures.snapshot import counted
from minikv.course.pictures.timeline import visible
from minikv.ring.cells import FREE

MOST_IN_A_ROW = 24
SURFACE = ("positions", "sequences", "shifts", "head")


@dataclass(frozen=True)
class SeenCell:
    """What one cell said."""

    position: int | None  # None: the cell is free
    owners: tuple[str, ...] = ()  # letters of its sequences
    shift: int = 0  # by how many positions its key is still to be turned
    text: str = ""  # of its token, if known


@dataclass(frozen=True)
class RingSnapshot:
    """All cells at one moment."""

    words: str
    cells: tuple[SeenCell, ...]
    head: int
    warnings: tuple[str, ...]  # what contradicts itself: in a sound ring, nothing

    @property
    def num_used(self) -> int:
        return sum(cell.position is not None for cell in self.cells)

    @property
    def used_max(self) -> int:
        """One more than the index of the last used cell."""
        used = (i for i, cell in enumerate(self.cells) if cell.position is not None)
        return max(used, default=-1) + 1

    def describe(self) -> str:
        """The picture in words."""
        parts = [
            f"{self.num_used} of {counted(len(self.cells), 'cell')} used, the last one is "
            f"cell {self.used_max - 1}; head at {self.head}."
            if self.num_used
            else f"All {len(self.cells)} cells are free; head at {self.head}."
        ]
        numbered = enumerate(self.cells)
        for (owners, _, shift), run in groupby(
            numbered,
            lambda pair: (pair[1].owners, (pair[1].position or 0) - pair[0], pair[1].shift),
        ):
            cells = list(run)
            if owners:
                (first, a), (last, b) = cells[0], cells[-1]
                turn = f", keys to be turned by {shift}" if shift else ""
                parts.append(
                    f"{' and '.join(owners)}: {spanned('position', a.position, b.position)} in "
                    f"{spanned('cell', first, last)}{turn}."
                )
        return " ".join(parts)


def spanned(noun: str, first: int | None, last: int | None) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


class RingHistory(Recording):
    """Snapshots of one ring, in the order in which they were taken."""

    title = "Ring"
    steps: list[RingSnapshot]

    def __init__(self, cells):
        super().__init__()
        check_surface("cells", cells, SURFACE)
        self.cells = cells

    def snap(self, words: str, texts: Mapping[int, str] | None = None) -> RingSnapshot:
        """Copy what is there now. `texts` are of tokens, by cell."""
        live, texts = self.cells, texts or {}
        seen = tuple(
            SeenCell(None)
            if position == FREE
            else SeenCell(
                int(position),
                tuple(style.letter(seq) for seq in sorted(owners)),
                int(shift),
                texts.get(i, ""),
            )
            for i, (position, owners, shift) in enumerate(
                zip(live.positions, live.sequences, live.shifts, strict=True)
            )
        )
        warnings = tuple(
            f"cell {i}: position {position}, but it belongs to {sorted(owners) or 'no sequence'}"
            for i, (position, owners) in enumerate(zip(live.positions, live.sequences, strict=True))
            if (position == FREE) == bool(owners)
        )
        return self.keep(RingSnapshot(words, seen, int(live.head), warnings))

    def counted(self, i: int) -> dict[str, int]:
        step = self.steps[i]
        return {f"cells in use of {len(step.cells)}": step.num_used}

    def scene(self, chosen: Sequence[int], alone: bool) -> Scene:
        layout, pairs = Layout(self.steps), self.pairs(chosen)

        def panel(pen: Pen, place: int, x: float, y: float) -> None:
            before, i = pairs[place]
            was = None if before is None else self.steps[before]
            draw_ring(pen, layout, x, y, self.steps[i], was)

        shown = [self.steps[i] for i in chosen]
        return Scene([layout.height] * len(chosen), panel, legend(shown))


class Layout:
    """The places of the cells: the same at every step."""

    def __init__(self, steps: Sequence[RingSnapshot]):
        self.num_cells = len(steps[0].cells)
        self.in_a_row = min(self.num_cells, MOST_IN_A_ROW)
        self.side = min(0.4, room(1) / self.in_a_row)
        self.has_texts = any(cell.text for step in steps for cell in step.cells)
        self.has_shifts = any(cell.shift for step in steps for cell in step.cells)
        self.line = 0.15
        lines = 1 + self.has_texts + self.has_shifts
        self.row = 0.3 + self.side + lines * self.line + 0.06
        self.height = self.row * -(-self.num_cells // self.in_a_row)

    def place(self, cell: int) -> tuple[float, float]:
        """The middle of a cell."""
        row, column = divmod(cell, self.in_a_row)
        return (column + 0.5) * self.side, row * self.row + 0.3 + self.side / 2


def draw_ring(
    pen: Pen, at: Layout, x: float, y: float, step: RingSnapshot, before: RingSnapshot | None
) -> None:
    """One step, and what is new since the one before it."""
    for i, cell in enumerate(step.cells):
        middle, level = x + at.place(i)[0], y + at.place(i)[1]
        pen.text(middle, level - at.side / 2 - 0.08, str(i), 7, "center", style.FAINT)
        was = before.cells[i] if before else cell
        if cell.position is None:
            pen.slot(middle, level, at.side)
            if was.position is not None:
                pen.text(middle, level, "×", 9, "center", style.FAINT)
            continue
        new = (cell.position, cell.owners) != (was.position, was.owners)
        draw_cell(pen, middle, level, at.side, cell, new)
        below = level + at.side / 2 + 0.09
        pen.text(middle, below, "".join(cell.owners), 8, "center", weight="bold")
        if at.has_texts:
            below += at.line
            letters = max(2, int(at.side * 72 / 3.9))
            pen.text(middle, below, visible(cell.text, letters), 6, "center", family="monospace")
        if at.has_shifts and cell.shift:
            pen.text(middle, below + at.line, f"{cell.shift:+d}".replace("-", "−"), 7.5, "center",
                     style="italic")  # fmt: skip
    middle, level = x + at.place(step.head)[0], y + at.place(step.head)[1] - at.side / 2
    head_mark(pen, middle, level - 0.15)
    pen.text(middle + 0.09, level - 0.22, "head", 7)
    if step.used_max:
        edge, level = (
            pair[0] + pair[1] for pair in zip((x, y), at.place(step.used_max - 1), strict=True)
        )
        edge += at.side / 2
        ends = level - at.side * 0.62, level + at.side * 0.62
        pen.line([(edge, end) for end in ends], lw=1.8, zorder=3)


def draw_cell(pen: Pen, x: float, y: float, side: float, cell: SeenCell, new: bool = False) -> None:
    """A square in the colours of its sequences, with its position."""
    size = min(9.0, 72 * side * 0.36)
    pen.slot(x, y, side, cell.owners, new, token=(str(cell.position), size))
    if len(cell.owners) > 1:
        box = dict(boxstyle="round,pad=0.12", facecolor=style.PAPER, linewidth=0, alpha=0.85)
        pen.text(x, y, str(cell.position), size, "center", family="monospace", bbox=box)


def head_mark(pen: Pen, x: float, y: float) -> None:
    pen.add(Polygon([(x - 0.05, y - 0.08), (x + 0.05, y - 0.08), (x, y)], facecolor=style.INK))


def legend(steps: Sequence[RingSnapshot]) -> Legend:
    """What is drawn in these steps and is to be explained, always in this order."""
    cells = [cell for step in steps for cell in step.cells]
    one, two = SeenCell(7, ("A",)), SeenCell(7, ("A", "B"))

    def sample(cell: SeenCell, new: bool = False):
        return lambda pen, x, y: draw_cell(pen, x + SIDE / 2 + 0.02, y, SIDE + 0.06, cell, new)

    width = SIDE + 0.12
    entries = [LegendEntry(width, "cell: the token at position 7 of A", sample(one))]
    if any(len(cell.owners) > 1 for cell in cells):
        entries.append(LegendEntry(width, "shared by A and B", sample(two)))
    entries.append(slot_entry("free", ""))
    changes = [pair for a, b in pairwise(steps) for pair in zip(a.cells, b.cells, strict=True)]
    if any(now.owners and old != now for old, now in changes):
        entries.append(LegendEntry(width, "new or moved", sample(one, new=True)))
    if any(old.position is not None and now.position is None for old, now in changes):
        entries.append(
            LegendEntry(0.1, "freed in this step", lambda pen, x, y: pen.text(x, y, "×", 9))
        )
    entries.append(LegendEntry(0.1, "head", lambda pen, x, y: head_mark(pen, x + 0.05, y + 0.04)))
    entries.append(LegendEntry(0.06, "end of the used cells", _end_sample))
    if any(cell.shift for cell in cells):
        sign = lambda pen, x, y: pen.text(x, y, "−4", 8, style="italic")  # noqa: E731
        entries.append(LegendEntry(0.16, "key still to be turned, by −4", sign))
    return Legend(entries)


def _end_sample(pen: Pen, x: float, y: float) -> None:
    pen.line([(x + 0.03, y - 0.1), (x + 0.03, y + 0.1)], lw=1.8)
