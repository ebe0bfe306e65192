"""The ring cache: cells, keys that move, a context that shifts, a window that rolls.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("11.1") in the notebook, or in a terminal: python -m minikv check 11.1
"""

from collections.abc import Callable, Sequence

import torch

from minikv.errors import require_int
from minikv.model import Attend, rotate
from minikv.ring import RingCache, cells, shift, window
from minikv.ring.attention import masked_attention
from minikv.ring.cells import FREE, OutOfCells
from minikv.ring.defrag import Move


class Cells(cells.Cells):
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

    # ── 11.1 Find a slot ──────────────────────────────────────────────────────────
    def find_slot(self, num_tokens: int) -> int:
        """The first cell of a run of `num_tokens` free cells, searched from `head` and, once, from
        the beginning. A run does not go over the end of the buffer.

        Changes nothing. Raises OutOfCells if there is no such run, ValueError if there never can
        be one.
        """
        raise NotImplementedError("Exercise 11.1: Cells.find_slot")

    # ── 11.6 Right positions, wrong keys: broken, fix it ──────────────────────────
    def seq_div(self, seq: int, p0: int, p1: int | None, d: int) -> int:
        """Divide the positions of a range by `d`, rounding down; seq may be ALL. Then d neighbours
        share a position, as in SelfExtend's groups. Raises and returns as `seq_add` does, and
        raises ValueError for d below 1."""
        require_int("d", d, 1)
        cells = self.cells_of(seq, p0, p1)
        self._require_can_move(seq, {cell: self.positions[cell] // d for cell in cells})
        for cell in cells:
            before = self.positions[cell]
            self.positions[cell] //= d
            self.shifts[cell] += before - self.positions[cell]
        return len(cells)

    # ── 11.6 Right positions, wrong keys: broken, fix it ──────────────────────────
    def _move(self, seq: int, p0: int, p1: int | None, moved: Callable[[int], int]) -> int:
        """Cells of a range to where `moved` says. Raises ValueError and returns as `seq_add`."""
        cells = self.cells_of(seq, p0, p1)
        targets = {cell: moved(self.positions[cell]) for cell in cells}
        self._require_can_move(seq, targets)
        for cell, to in targets.items():
            self.shifts[cell] = to - self.positions[cell]
            self.positions[cell] = to
        return len(cells)

    # ── 11.3 The context shift ────────────────────────────────────────────────────
    def drop(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range of one sequence and move what follows down to close the gap.

        All or nothing, as the two steps `seq_rm` and `seq_add` together are not: raises
        ValueError, and changes nothing, if what follows is shared with another sequence.
        """
        raise NotImplementedError("Exercise 11.3: Cells.drop")


# ── 11.2 Turn a key further ───────────────────────────────────────────────────────
def turn(k: torch.Tensor, deltas: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Keys turned as if each had stood `deltas` positions later (earlier, if negative).

    k (..., N, K, D); deltas (N,) int64; frequencies (D / 2,), of `config.inverse_frequencies()`.
    Returns the shape and dtype of k. Computed in float32, so that half precision is rounded only
    once; the angles are float64, because large deltas have no digits to spare.
    """
    raise NotImplementedError("Exercise 11.2: turn")


# ── 11.3 The context shift ────────────────────────────────────────────────────────
def context_shift(cache: Cells, n_keep: int = 0, seq: int = 0, n_discard: int | None = None) -> int:
    """Make room at the end of a sequence: keep its first `n_keep` positions, discard the next
    `n_discard` (half of the rest, if None), and move what remains down. Returns `n_discard`.

    K moves by turning, so nothing is computed again. The tokens that remain have seen those that
    go: their K and V stay as they were, and differ from what a fresh start would compute.

    Raises ValueError, changing nothing, if fewer than two positions follow the first `n_keep` (also
    when `n_discard` is given), if `n_discard` is not from 1 to their number, or if a cell to be
    moved is shared with another sequence.
    """
    raise NotImplementedError("Exercise 11.3: context_shift")


# ── 11.4 A buffer that rolls ──────────────────────────────────────────────────────
def in_window(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which positions a query may see: not later than its own, and among the last `window`.

    query (T,), key (N,) -> (T, N) bool.
    """
    raise NotImplementedError("Exercise 11.4: in_window")


class RollingCache(window.RollingCache):
    """One sequence. A layer with a window of W has W cells, one without has `num_tokens_max`.

    window: for every layer; without it each layer has the model's own.
    num_tokens_max: how long the sequence may become, for the layers without a window.
    """

    # ── 11.4 A buffer that rolls ──────────────────────────────────────────────────
    def held(self, size: int) -> torch.Tensor:
        """The positions in the used cells of a buffer of `size`: cell c of a full one holds the
        last position before `num_tokens` that is c modulo `size`."""
        raise NotImplementedError("Exercise 11.4: RollingCache.held")

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """q (T, H, D), k, v (T, K, D) of the next T tokens, at most `chunk_size` -> (T, H, D).

        Attends over the buffer and the chunk together: the chunk's own tokens would overwrite
        what its first queries still see. After the last layer the chunk is written.
        """
        if layer == 0:
            self._chunk = []
        self._chunk.append(torch.stack([k, v]))
        new = torch.arange(self.num_tokens, self.num_tokens + len(k))  # positions of the chunk
        old = self.held(self.sizes[layer])  # (N,), N <= W
        keys, values = torch.cat([self.kv[layer][:, : len(old)].to(k.dtype), self._chunk[layer]], 1)
        out = self.attend_over(layer, q, new, keys, values, torch.cat([old, new]))
        if layer == len(self.kv) - 1:
            self.write(new)
        return out

    def attend_over(
        self,
        layer: int,
        q: torch.Tensor,
        queries: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """q (T, H, D) at positions queries (T,), over k, v (N, K, D) at positions (N,)
        -> (T, H, D)."""
        visible = in_window(queries, positions, self.windows[layer])  # (T, N)
        return masked_attention(q, k, v, visible.to(q.device))

    # ── 11.4 A buffer that rolls ──────────────────────────────────────────────────
    def write(self, positions: torch.Tensor) -> None:
        """Keep the chunk, whose tokens stand at these positions, in the buffers, in their dtype;
        `_chunk` is empty afterwards, so that nothing holds its memory."""
        raise NotImplementedError("Exercise 11.4: RollingCache.write")


# ── 11.5 Moves that close the holes ───────────────────────────────────────────────
def plan_moves(is_used: Sequence[bool]) -> list[Move]:
    """The moves after which all used cells lie in front, in runs as long as they can be.

    With u used cells, the holes are the free cells before u and the data to be moved are the
    used cells from u on: equally many. Both are taken in order, so neighbours stay neighbours.
    """
    raise NotImplementedError("Exercise 11.5: plan_moves")


class UnturnedRing(RingCache):
    """A ring that keeps K as it is before RoPE. A move changes a position, and no key.

    `self.k` (layers, cells, K, D) is allocated by `RingCache`, in the cache's dtype, and
    `self.positions` says where each cell stands. `shift.turn(k, deltas, frequencies)` is exercise
    11.2: k (N, K, D), deltas (N,) int64.
    """

    @property
    def frequencies(self) -> torch.Tensor:
        """(D / 2,), the angle per position of each pair of channels."""
        return self.config.inverse_frequencies()

    # ── 11.7 Keys that are never turned ───────────────────────────────────────────
    def store(self, layer: int, cells: Sequence[int], k: torch.Tensor) -> None:
        """Keep the keys of new tokens, k (T, K, D), in these cells of a layer.

        The model has turned each key to the position of its cell. What is kept is not turned: the
        key as it would be at position 0.
        """
        raise NotImplementedError("Exercise 11.7: UnturnedRing.store")

    # ── 11.7 Keys that are never turned ───────────────────────────────────────────
    def keys(self, layer: int, num_read: int) -> torch.Tensor:
        """The keys of the first `num_read` cells, turned to where their cells stand now:
        (num_read, K, D) float32. A free cell may hold anything that is finite.

        Changes nothing that is kept. Keys of a cache in half precision are turned as float32, so
        that they are rounded once, when they are stored.
        """
        raise NotImplementedError("Exercise 11.7: UnturnedRing.keys")

    # ── 11.7 Keys that are never turned ───────────────────────────────────────────
    def apply_shifts(self) -> int:
        """What `RingCache` does before a step to the cells that have moved. Returns how many keys
        were turned; afterwards all of `self.shifts` are 0."""
        raise NotImplementedError("Exercise 11.7: UnturnedRing.apply_shifts")

    def bind(self, cells: Sequence[int]) -> Attend:
        """The `attend` of one step whose tokens lie in `cells`, by `store` and `keys`."""
        num_read = self.num_read
        visible = {window: self.visible(cells, window) for window in set(self.windows)}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            self.store(layer, cells, k)
            self.v[layer, cells] = v.to(self.v.dtype)
            keys, values = self.keys(layer, num_read), self.v[layer, :num_read]
            return masked_attention(q, keys, values, visible[self.windows[layer]])

        return attend
