"""Who owns each cell of the ring: a position, a set of sequences, and nothing about K and V.

The design is llama.cpp's KV cache (Gerganov and others, 2023): one fixed buffer, no blocks. Two
sequences share a token when the same cell names both, so a fork copies nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from minikv.errors import require, require_int

ALL = -1  # in place of a sequence: every sequence
FREE = -1  # in place of a position: the cell holds no token
PADDING = 32  # attention reads a multiple of this many cells
_require = partial(require, part="ring")


class OutOfCells(Exception):
    """The ring has no room for a batch. Nothing was changed: remove or shift something, or
    defragment if enough cells are free but not in one run."""

    def __init__(self, needed: int, free: int, longest_run: int):
        super().__init__(f"cells needed: {needed}, free: {free}, longest free run: {longest_run}")
        self.needed, self.free, self.longest_run = needed, free, longest_run


class Cells:
    """A position and a set of sequences for each of `num_cells` cells.

    positions[i]: the position of the token in cell i, FREE if there is none.
    sequences[i]: the sequences that the token belongs to; empty exactly if the cell is free.
    shifts[i]: how far the position has moved since K was last turned. See `RingCache`.
    head: where the search for free cells begins.
    contiguous: whether a batch needs one run of cells (`find_slot`) or takes any (`find_cells`).

    Methods that take a range mean positions p0 <= position < p1; p1=None is "to the end". The
    sequence may be ALL where that is said. All raise ValueError, and change nothing, for
    a sequence that is not in the cache and for a reversed range.
    """

    def __init__(self, num_cells: int, contiguous: bool = True):
        self.num_cells = require_int("num_cells", num_cells, 1)
        self.contiguous = contiguous
        self.positions = [FREE] * num_cells
        self.sequences: list[set[int]] = [set() for _ in range(num_cells)]
        self.shifts = [0] * num_cells
        self.head = 0

    # ── What is there ─────────────────────────────────────────────────────────

    @property
    def num_used(self) -> int:
        return self.num_cells - self.num_free

    @property
    def num_free(self) -> int:
        return self.positions.count(FREE)

    @property
    def used_max(self) -> int:
        """One more than the index of the last used cell; 0 if all are free."""
        used = (i for i in reversed(range(self.num_cells)) if self.positions[i] != FREE)
        return next(used, -1) + 1

    @property
    def num_read(self) -> int:
        """How many cells attention reads: `used_max`, padded (llama.cpp's `n_kv`)."""
        return min(self.num_cells, -(-self.used_max // PADDING) * PADDING)

    @property
    def seq_ids(self) -> list[int]:
        """Every sequence that owns a cell, in order."""
        return sorted(set().union(*self.sequences))

    def cells_of(self, seq: int, p0: int = 0, p1: int | None = None) -> list[int]:
        """The cells that belong to `seq` (or to any, for ALL) with a position in the range."""
        p0, end = self._range(p0, p1)
        self._require_known(seq, or_all=True)
        return [
            i
            for i, position in enumerate(self.positions)
            if p0 <= position < end and (seq == ALL or seq in self.sequences[i])
        ]

    def seq_pos_max(self, seq: int) -> int:
        """The last position of a sequence; -1 if it owns no cell."""
        return max(self._positions_of(seq), default=-1)

    # ── Room for new tokens ───────────────────────────────────────────────────

    def find_slot(self, num_tokens: int) -> int:
        """The first cell of a run of `num_tokens` free cells, searched from `head` and, once, from
        the beginning. A run does not go over the end of the buffer.

        Changes nothing. Raises OutOfCells if there is no such run, ValueError if there never can
        be one.
        """
        require_int("num_tokens", num_tokens, 1, self.num_cells)
        start, tested = self.head, 0
        while tested < self.num_cells:
            end = start + num_tokens
            if end > self.num_cells:
                start, tested = 0, tested + self.num_cells - start
                continue
            taken = [i for i in range(start, end) if self.positions[i] != FREE]
            if not taken:
                return start
            tested += taken[-1] + 1 - start  # no run begins at or before a taken cell inside it
            start = taken[-1] + 1
        raise OutOfCells(num_tokens, self.num_free, self.longest_run)

    def find_cells(self, num_tokens: int) -> list[int]:
        """Any `num_tokens` free cells, from `head` on and then from the beginning: enough when K
        and V are written by index. Changes nothing; raises as `find_slot` does."""
        require_int("num_tokens", num_tokens, 1, self.num_cells)
        order = [*range(self.head, self.num_cells), *range(self.head)]
        free = [i for i in order if self.positions[i] == FREE]
        if len(free) < num_tokens:
            raise OutOfCells(num_tokens, len(free), self.longest_run)
        return free[:num_tokens]

    @property
    def longest_run(self) -> int:
        """The length of the longest run of free cells."""
        longest = run = 0
        for position in self.positions:
            run = run + 1 if position == FREE else 0
            longest = max(longest, run)
        return longest

    def place(self, positions: Sequence[int], seqs: Sequence[int]) -> list[int]:
        """Give each token of a batch a cell: token t stands at positions[t] of sequence seqs[t].

        Returns the cells, in the batch's order. All or nothing: raises OutOfCells, or ValueError
        if a sequence has one of these positions already.
        """
        self._require_new(positions, seqs)
        if self.contiguous:
            start = self.find_slot(len(positions))
            cells = list(range(start, start + len(positions)))
        else:
            cells = self.find_cells(len(positions))
        for cell, position, seq in zip(cells, positions, seqs, strict=True):
            self.positions[cell], self.sequences[cell] = position, {seq}
        self.head = (cells[-1] + 1) % self.num_cells
        return cells

    def free(self, cells: Iterable[int]) -> None:
        """Empty these cells. The search begins at the first of them, if that lies before `head`."""
        for cell in cells:
            self.positions[cell], self.sequences[cell], self.shifts[cell] = FREE, set(), 0
            self.head = min(self.head, cell)

    # ── Operations on sequences ───────────────────────────────────────────────

    def seq_rm(self, seq: int, p0: int = 0, p1: int | None = None) -> int:
        """Take a range away from `seq` (or from every sequence, for ALL). A cell that belongs to
        none any more is free. Returns how many cells became free."""
        freed = []
        for cell in self.cells_of(seq, p0, p1):
            left = set() if seq == ALL else self.sequences[cell] - {seq}
            self.sequences[cell] = left
            if not left:
                freed.append(cell)
        self.free(freed)
        return len(freed)

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> int:
        """Let a range of `src` belong to `dst` too. Nothing is copied; returns how many cells are
        newly shared. Raises ValueError if `dst` has other tokens at these positions."""
        self._require_known(src)
        require_int("dst", dst, 0)
        cells = [i for i in self.cells_of(src, p0, p1) if dst not in self.sequences[i]]
        taken = self._positions_of(dst) & {self.positions[i] for i in cells}
        if taken:
            raise ValueError(
                f"dst: sequence {dst} has other tokens at positions {sorted(taken)[:4]}; remove "
                f"them with seq_rm first"
            )
        for cell in cells:
            self.sequences[cell].add(dst)
        return len(cells)

    def seq_add(self, seq: int, p0: int, p1: int | None, delta: int) -> int:
        """Move a range by `delta` positions, forward or back; seq may be ALL. K is turned later,
        once (see `shifts`). Returns how many cells are in the range.

        Raises ValueError, and changes nothing, if a position would fall below 0 or on another
        token of its sequence, or if a cell belongs to other sequences, too: they would move along.
        """
        require_int("delta", delta)
        return self._move(seq, p0, p1, lambda position: position + delta)

    def seq_div(self, seq: int, p0: int, p1: int | None, d: int) -> int:
        """Divide the positions of a range by `d`, rounding down; seq may be ALL. Then d neighbours
        share a position, as in SelfExtend's groups. Raises and returns as `seq_add` does, and
        raises ValueError for d below 1."""
        require_int("d", d, 1)
        return self._move(seq, p0, p1, lambda position: position // d)

    def move_cell(self, source: int, target: int) -> None:
        """Let the free cell `target` stand for all that `source` stood for; `source` is free then.
        K and V are the caller's."""
        self.positions[target] = self.positions[source]
        self.sequences[target] = self.sequences[source]
        self.shifts[target] = self.shifts[source]
        self.free([source])

    def _move(self, seq: int, p0: int, p1: int | None, moved: Callable[[int], int]) -> int:
        """Cells of a range to where `moved` says. Raises ValueError and returns as `seq_add`."""
        cells = self.cells_of(seq, p0, p1)
        targets = {cell: moved(self.positions[cell]) for cell in cells}
        self._require_can_move(seq, targets)
        for cell, to in targets.items():
            self.shifts[cell] += to - self.positions[cell]
            self.positions[cell] = to
        return len(cells)

    def drop(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range of one sequence and move what follows down to close the gap.

        All or nothing, as the two steps `seq_rm` and `seq_add` together are not: raises
        ValueError, and changes nothing, if what follows is shared with another sequence.
        """
        require_int("seq", seq, 0)
        self._require_own(seq, self.cells_of(seq, require_int("p1", p1, p0)))
        self.seq_rm(seq, p0, p1)
        if self.seq_pos_max(seq) >= p1:
            self.seq_add(seq, p1, None, p0 - p1)

    # ── Checks ────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless the bookkeeping is consistent."""
        lengths = len(self.positions), len(self.sequences), len(self.shifts)
        _require(set(lengths) == {self.num_cells}, f"{self.num_cells} cells, lists of {lengths}")
        _require(0 <= self.head < self.num_cells, f"the head is at {self.head}")
        for cell, (position, owners) in enumerate(zip(self.positions, self.sequences, strict=True)):
            shift = self.shifts[cell]
            _require(position >= FREE, f"cell {cell} stands at position {position}")
            _require(all(seq >= 0 for seq in owners), f"cell {cell} belongs to {owners}")
            if position == FREE:
                _require(not owners, f"free cell {cell} belongs to {owners}")
                _require(shift == 0, f"free cell {cell} has a shift of {shift}")
            else:
                _require(len(owners) > 0, f"cell {cell} at position {position} belongs to nobody")
                _require(position >= shift, f"cell {cell}: K was turned to {position - shift}")

    def _positions_of(self, seq: int) -> set[int]:
        pairs = zip(self.positions, self.sequences, strict=True)
        return {position for position, owners in pairs if seq in owners}

    def _range(self, p0: int, p1: int | None) -> tuple[int, float]:
        require_int("p0", p0, 0)
        return p0, float("inf") if p1 is None else require_int("p1", p1, p0)

    def _require_known(self, seq: int, or_all: bool = False) -> None:
        require_int("seq", seq, ALL if or_all else 0)
        if seq != ALL and not any(seq in owners for owners in self.sequences):
            there = ", ".join(map(str, self.seq_ids)) or "none"
            raise ValueError(f"seq: {seq} owns no cell; the sequences in the cache: {there}")

    def _require_new(self, positions: Sequence[int], seqs: Sequence[int]) -> None:
        if len(positions) != len(seqs) or len(positions) == 0:
            raise ValueError(f"seqs: {len(seqs)} for {len(positions)} positions; one for each")
        for seq in seqs:
            require_int("seqs: a sequence (one for each token; seq_cp adds others)", seq, 0)
        held = {seq: self._positions_of(seq) for seq in set(seqs)}
        for position, seq in zip(positions, seqs, strict=True):
            require_int("positions: a position", position, 0)
            if position in held[seq]:
                raise ValueError(f"positions: sequence {seq} has a token at {position} already")
            held[seq].add(position)

    def _require_own(self, seq: int, cells: Iterable[int]) -> None:
        """To move a shared cell for one sequence would move it for the others."""
        for cell in cells:
            others = self.sequences[cell] - {seq}
            if seq != ALL and others:
                raise ValueError(
                    f"seq: position {self.positions[cell]} of sequence {seq} belongs to "
                    f"{sorted(others)}, too; leave it out of the range, or move all with seq={ALL}"
                )

    def _require_can_move(self, seq: int, targets: dict[int, int]) -> None:
        self._require_own(seq, targets)
        stay = {
            (owner, position)
            for cell, position in enumerate(self.positions)
            if cell not in targets
            for owner in self.sequences[cell]
        }
        for cell, to in targets.items():
            position, owners = self.positions[cell], self.sequences[cell]
            if to < 0:
                raise ValueError(f"delta: position {position} would become {to}, below 0")
            if any((owner, to) in stay for owner in owners):
                raise ValueError(
                    f"p0: position {position} would become {to}, where a sequence of "
                    f"{sorted(owners)} has another token; remove that with seq_rm first"
                )
