"""Chapter 11: what its notebook and checks are given. No exercise is answered here."""

from typing import Any

from minikv.ring import Cells, RingCache

WRITTEN = ("find_slot", "seq_div", "_move", "drop")  # of Cells, by the exercises


def ring_on(cells: type) -> type[RingCache]:
    """A RingCache whose bookkeeping is that of `cells`, a class as in the exercise file."""
    own = {name: getattr(cells, name) for name in WRITTEN}
    return type("RingCache", (RingCache,), own)


def filled(cells: Any, layout: str, head: int = 0) -> Any:
    """Cells of which some are in use: "AAB.A" gives cells 0, 1 and 4 to sequence 0, cell 2 to
    sequence 1, each at that sequence's next position. Returns `cells`, and sets its head."""
    next_position = dict.fromkeys(layout, 0)
    for cell, letter in enumerate(layout):
        if letter != ".":
            cells.positions[cell] = next_position[letter]
            cells.sequences[cell] = {ord(letter) - ord("A")}
            next_position[letter] += 1
    cells.head = head
    return cells


def layout_of(cells: Cells) -> str:
    """The other way round: a letter per cell, "." for a free one, "(AB)" for a shared one."""
    names = ["".join(chr(ord("A") + seq) for seq in sorted(seqs)) for seqs in cells.sequences]
    return "".join("." if not n else n if len(n) == 1 else f"({n})" for n in names)
