"""How the viewer draws a pool and its block tables: the places, then the ink.

A slot is a small square. A block is a rounded row of slots, with its id at the left and
its reference count at the right. Logical blocks are on the left, physical ones on the
right, and each entry of a block table is an arrow between them.
"""

from collections.abc import Sequence
from itertools import pairwise

from minikv.course.pictures import style
from minikv.course.pictures.scene import (
    BODY,
    LIVE,
    LOOKS,
    SIDE,
    SMALL,
    WIDTH,
    Legend,
    LegendEntry,
    Pen,
    Scene,
    body_entry,
    evenly,
    number_of,
    room,
    slot_entry,
    warning_entry,
    width_of,
)
from minikv.course.pictures.snapshot import SeenBlock, Snapshot
from minikv.course.pictures.timeline import visible

SLOT, FILM_SLOT = 0.24, 0.19  # a slot with room around it: alone, and in a film
SMALLEST = 0.155  # if it had to be smaller, fewer panels or blocks go beside each other
MOST_NAMES = 4  # of the tables that share a block
MOST_BLOCKS = 64  # of a pool are drawn
ROWS = (16, 24, 32)  # of a pool under each other: the best, and if that gets too small


def held_by(block: SeenBlock) -> str:
    """A block's reference count and, if it is shared, the tables that name it: "3 ABC"."""
    names = list(dict.fromkeys(block.named_by))
    if len(names) < 2:
        return str(block.ref_count)
    rest = f"+{len(names) - MOST_NAMES}" if len(names) > MOST_NAMES else ""
    return f"{block.ref_count} {''.join(names[:MOST_NAMES])}{rest}"


# ── The places ────────────────────────────────────────────────────────────────


def _lanes(steps: Sequence[Snapshot]) -> list[dict[str, int]]:
    """For each step the place of its tables, from the top. A table stays where it was."""
    places: list[dict[str, int]] = []
    for step in steps:
        before = places[-1] if places else {}
        now = {name: before[name] for name in step.tables if name in before}
        for name in step.tables:
            if name not in now:
                now[name] = min(set(range(len(step.tables))) - set(now.values()))
        places.append(now)
    return places


class TableLayout:
    """The places of one panel: the same at every step, so that only what changes moves."""

    def __init__(self, steps: Sequence[Snapshot], slot: float, rows: int, letters: int = 6):
        self.slot, self.letters = slot, letters  # of a token, in its slot
        self.block_size = next((s.block_size for s in steps if s.tables), steps[0].block_size)
        self.font = max(7.0, min(9.0, 0.56 * 72 * slot))
        self.char, self.line = width_of("0", self.font, 0.62), 1.7 * self.font / 72
        self.pad = 0.18 * slot  # of a block around its slots
        self.row = 1.68 * slot  # from one block to the next
        self.top = 2.1 * self.line + 0.1 * slot  # under the headings

        texts = [text for step in steps for table in step.tables.values() for text in table.texts]
        self.token_font = max(self.font - 1, style.least_points(WIDTH))
        self.logical_step = slot
        if texts:
            longest = max((visible(text, letters) for text in texts), key=len)
            self.logical_step = max(slot, width_of(longest, self.token_font, 0.6) + 0.08)

        # The lanes, one for each table at a time.
        self.lanes = _lanes(steps)
        num_blocks_in = {0: 0}
        for step, lanes in zip(steps, self.lanes, strict=True):
            for name, lane in lanes.items():
                length = len(step.tables[name].block_ids)
                num_blocks_in[lane] = max(num_blocks_in.get(lane, 0), length)
        self.lane_top, top = {}, self.top
        for lane in sorted(num_blocks_in):
            self.lane_top[lane] = top
            top += 1.2 * self.line + num_blocks_in[lane] * self.row + 0.35 * slot

        # The pool: all of it, or what is ever used of a large one.
        self.num_blocks = num_blocks = len(steps[-1].ref_counts)
        self.drawn = list(range(num_blocks))
        if num_blocks > MOST_BLOCKS:
            seen = [block for step in steps for block in step.blocks]
            used = {block.id for block in seen if block.state != "free" or block.named_by}
            self.drawn = sorted(used)[:MOST_BLOCKS]
        self.columns = max(1, -(-len(self.drawn) // rows))
        self.rows = -(-len(self.drawn) // self.columns)
        rest = self.line if len(self.drawn) < num_blocks else 0
        self.height = max(top, self.top + self.rows * self.row + rest)

        # From left to right.
        digits = max(2, len(str(num_blocks - 1)))
        self.slots = 2 * self.char + 0.04 + self.pad
        self.filled = self.slots + self.block_size * self.logical_step + 2 * self.pad
        self.entry = self.filled + self.char * (4.7 + 2 * len(str(self.block_size)))  # "3 of 4"
        self.entry_width = self.char * digits + 0.06
        self.arrows = self.entry + self.entry_width
        self.pool = self.arrows + max(0.33, 2.3 * slot)
        self.id_width = self.char * digits + 0.07
        self.body = self.block_size * slot + 2 * self.pad
        self.gutter = 0.8 * slot  # between columns: here an arrow comes down
        counts = [held_by(block) for step in steps for block in step.blocks]
        counted = max(4, *(len(text) for text in counts)) * self.char  # the heading is "refs"
        self.column = self.id_width + self.body + 0.05 + counted

    @property
    def width(self) -> float:
        pool = self.columns * self.column + (self.columns - 1) * self.gutter
        total = self.num_blocks
        heading = 0.03 + width_of(f"physical, {total} of {total} free", self.font)
        return self.pool + max(pool, heading)

    @classmethod
    def fitting(cls, steps: Sequence[Snapshot], width: float, most: float) -> "TableLayout":
        """The largest with slots up to `most` that is no wider than `width`.

        Tokens are cut shorter, and a pool of many blocks has fewer and longer columns, where
        slots can be larger for it.
        The arrows get some of the width that is left.
        """
        layouts: list[TableLayout] = []
        for rows, letters in [(ROWS[0], 6), (ROWS[0], 4), *((rows, 3) for rows in ROWS)]:
            slot = most
            while (layout := cls(steps, slot, rows, letters)).width > width and slot > 0.05:
                slot -= 0.005
            layouts.append(layout)
            if layout.slot >= SMALLEST:
                break
        best = max(layouts, key=lambda layout: layout.slot)
        best.pool += max(0.0, min(8 * best.slot, width - best.width))
        return best

    def block(self, place: int) -> tuple[float, float]:
        """Left end and middle of the place-th physical block that is drawn."""
        column, row = divmod(place, self.rows)
        x = self.pool + self.id_width + column * (self.column + self.gutter)
        return x, self.top + (row + 0.5) * self.row


class TablePanel:
    """The `i`-th of the steps, drawn at (x, y), and what is new since the one before it."""

    def __init__(
        self, pen: Pen, layout: TableLayout, x: float, y: float, steps: Sequence[Snapshot], i: int
    ):
        self.pen, self.layout, self.x, self.y = pen, layout, x, y
        self.step, self.lanes = steps[i], layout.lanes[i]
        self.before: Snapshot | None = steps[i - 1] if i else None
        self.lanes_before: dict[str, int] = layout.lanes[i - 1] if i else {}
        self.new: frozenset[tuple[int, int]] = frozenset()
        if self.before:
            self.new = self.step.filled_slots - self.before.filled_slots
        self.places = {block_id: place for place, block_id in enumerate(layout.drawn)}

    def draw(self) -> None:
        self._headings()
        for name in self.step.tables:
            self._table(name)
        self._gone()
        for block_id in self.layout.drawn:
            self._block(self.step.blocks[block_id])
        self._rest()

    def _text(self, x, y, text, align="left", **more) -> None:
        self.pen.text(self.x + x, self.y + y, text, self.layout.font, align, **more)

    def _headings(self) -> None:
        at, y = self.layout, self.layout.line / 2
        total = len(self.step.ref_counts)
        if self.step.tables:
            for x, heading in ((0, "logical"), (at.filled + 0.04, "filled")):
                self._text(x, y, heading, color=style.FAINT)
            self._text(at.entry + at.entry_width / 2, y, "table", "center", color=style.FAINT)
        heading = f"physical, {self.step.num_free} of {total} free"
        self._text(at.pool + 0.03, y, heading, color=style.FAINT)
        for place in range(0, len(at.drawn), at.rows):
            x = at.block(place)[0] + at.body + 0.05
            self._text(x, 1.05 * at.line + y, "refs", color=style.FAINT)

    def _table(self, name: str) -> None:
        at, table = self.layout, self.step.tables[name]
        top = at.lane_top[self.lanes[name]]
        middle = top + at.line / 2
        chip = 1.6 * at.font / 72
        self.pen.slot(self.x + chip / 2, self.y + middle, chip, [name])
        tokens = "1 token" if table.num_tokens == 1 else f"{table.num_tokens} tokens"
        tokens += "" if table.block_ids else ", no blocks"
        self._text(chip + 0.05, middle, tokens, weight="bold")
        for index, block_id in enumerate(table.block_ids):
            y = top + 1.2 * at.line + index * at.row + at.row / 2
            self._logical_block(name, index, block_id, y)

    def _gone(self) -> None:
        """Tables that were there in the step before, where nothing has taken their place."""
        at = self.layout
        for name, lane in self.lanes_before.items():
            if name not in self.step.tables and lane not in self.lanes.values():
                y = at.lane_top[lane] + at.line / 2
                self._text(0, y, f"{name} has left", color=style.FAINT, style="italic")

    def _was(self, block: SeenBlock) -> str:
        """Who held a block that has become free in this step."""
        before = self.before.blocks[block.id].named_by if self.before else ()
        return " ".join(dict.fromkeys(before)) if block.state == "free" else ""

    def _logical_block(self, name: str, index: int, block_id: int, y: float) -> None:
        at, pen = self.layout, self.pen
        texts = self.step.tables[name].texts[index * at.block_size :]
        filled = self.step.filled(name, index)
        body_width = at.block_size * at.logical_step + 2 * at.pad
        self._text(at.slots - at.pad - 0.04, y, str(index), "right")
        left = self.x + at.slots - at.pad
        pen.body(left, self.y + y, body_width, at.slot, LIVE)
        for offset in range(at.block_size):
            x = at.slots + (offset + 0.5) * at.logical_step
            names = [name] if offset < filled else []
            text = visible(texts[offset], at.letters) if offset < len(texts) else ""
            pen.slot(
                self.x + x, self.y + y, at.slot, names, (block_id, offset) in self.new,
                at.logical_step, (text, at.token_font),
            )  # fmt: skip
        self._text(at.filled + 0.04, y, f"{filled} of {at.block_size}")
        height = 1.1 * at.slot
        pen.square(self.x + at.entry, self.y + y - height / 2, at.entry_width, height, style.PAPER)
        self._text(at.entry + at.entry_width / 2, y, str(block_id), "center")
        if block_id in self.places:
            self._arrow(name, y, self.places[block_id])
        else:  # not in the pool at all, or one of too many to draw
            known = 0 <= block_id < len(self.step.ref_counts)
            where = dict(facecolor=style.PAPER, linewidth=0, pad=1)
            self._text(at.arrows + 0.05, y, "→ …" if known else "→ ⚠", bbox=where)

    def _arrow(self, name: str, y: float, place: int) -> None:
        """To a block of the first column directly; to another in the gap above its row."""
        at = self.layout
        end_x, end_y = at.block(place)
        # Arrows to one block arrive one above the other.
        names = list(dict.fromkeys(self.step.blocks[at.drawn[place]].named_by))
        spread = min(0.09, 1.1 * at.slot / len(names))
        end_y += (names.index(name) - (len(names) - 1) / 2) * spread
        end_x -= at.id_width
        points = [(at.arrows, y)]
        if place >= at.rows:
            lane = place // at.rows - at.columns / 2  # beside those to other columns
            gap = at.block(place)[1] - at.row / 2 + 0.3 * at.slot * lane / at.columns
            points += [(at.pool, gap), (end_x - 0.25, gap)]
        points.append((end_x, end_y))
        color = style.color(number_of(name))
        self.pen.arrow([(self.x + x, self.y + y) for x, y in points], color, at.slot)

    def _block(self, block: SeenBlock) -> None:
        at, pen = self.layout, self.pen
        x, y = at.block(self.places[block.id])
        left, middle = self.x + x, self.y + y
        faint = style.FAINT if block.state == "free" else style.INK
        self._text(x - 0.05, y, str(block.id), "right", color=faint)
        was = self._was(block)
        pen.body(left, middle, at.body, at.slot, **LOOKS["freed" if was else block.state])
        if was:
            self._text(x + at.body / 2, y, f"was {was}", "center", color=style.FAINT)
        if block.named_by:
            for offset, names in enumerate(block.slots):
                slot_x = left + at.pad + (offset + 0.5) * at.slot
                pen.slot(slot_x, middle, at.slot, names, (block.id, offset) in self.new)
        after = left + at.body + 0.05
        pen.count(after, middle, held_by(block), at.font, bool(block.warning), faint)

    def _rest(self) -> None:
        """What of a large pool is not drawn, in words."""
        at = self.layout
        others = [block for block in self.step.blocks if block.id not in self.places]
        if not others:
            return
        free = sum(block.ref_count == 0 for block in others)
        used = f"{len(others) - free} in use and " if free < len(others) else ""
        y = at.top + at.rows * at.row + at.line / 2
        self._text(at.pool + at.id_width, y, f"… and {used}{free} free", color=style.FAINT)


def _count_sample(pen: Pen, x: float, y: float) -> None:
    pen.text(x, y, "7", SMALL)
    pen.body(x + 0.11, y, BODY, SIDE, LIVE)
    pen.slot(x + 0.11 + BODY / 2 - SIDE / 2, y, SIDE, "A")
    pen.slot(x + 0.11 + BODY / 2 + SIDE / 2, y, SIDE)
    pen.text(x + 0.11 + BODY + 0.04, y, "1", SMALL)


def _legend(steps: Sequence[Snapshot]) -> Legend:
    """What is drawn of these steps and is to be explained, always in this order."""
    states = {block.state for step in steps for block in step.blocks}
    filled = [step.filled_slots for step in steps]
    entries = {
        "used": slot_entry("slot of A", "A"),
        "new": slot_entry("new in this step", "A", new=True),
        "empty": slot_entry("empty slot", ""),
        "count": LegendEntry(0.64, "block 7, 1 reference", _count_sample),
        "shared": body_entry("shared by A and B", "shared", "AB"),
        "free": body_entry("free block", "free"),
        "freed": body_entry("freed in this step", "freed"),
        "cached": body_entry("cached, unused", "cached"),
        "held": body_entry("in use, by no table here", "held"),
        "wrong": warning_entry("count and tables disagree"),
    }
    there = states | {"count"}
    there |= {"used", "empty"} if states & {"used", "shared"} else set()
    for before, after in pairwise(range(len(steps))):
        there |= {"new"} if filled[after] - filled[before] else set()
        pairs = zip(steps[before].blocks, steps[after].blocks, strict=True)
        there |= {"freed" for old, new in pairs if old.named_by and new.state == "free"}
    there |= {"wrong"} if any(step.warnings for step in steps) else set()
    return Legend([entry for kind, entry in entries.items() if kind in there])


def scene(steps: Sequence[Snapshot], alone: bool) -> Scene:
    """The steps, each compared with the one before it."""
    across = 1 if alone else len(steps)
    most = SLOT if alone else FILM_SLOT
    while across > 1 and TableLayout.fitting(steps, room(across), most).slot < SMALLEST:
        across -= 1
    across = evenly(len(steps), across)
    layout = TableLayout.fitting(steps, room(across), most)

    def panel(pen: Pen, place: int, x: float, y: float) -> None:
        TablePanel(pen, layout, x, y, steps, place).draw()

    return Scene([layout.height] * len(steps), panel, _legend(steps), across)
