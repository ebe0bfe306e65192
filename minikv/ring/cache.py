"""The ring: K and V of every cell, written once, and turned when a cell's position moves."""

from collections.abc import Sequence

import torch

from minikv.config import ModelConfig
from minikv.errors import require_bool, require_int
from minikv.language_model import LanguageModel
from minikv.model import Attend
from minikv.ring.attention import in_window, masked_attention
from minikv.ring.cells import Cells
from minikv.ring.shift import turn


class RingCache(Cells):
    """One fixed buffer for the K and V of all sequences, allocated once.

    A batch may mix sequences and positions. A query sees the cells of its own sequence whose
    positions are not later than its own and, in a layer with a window, inside that. The order of
    the cells does not matter.

    K is kept turned by RoPE. `seq_add` and `seq_div` only note in `shifts` how far a cell moved;
    before the next step each such cell is turned once, by the sum of its moves.

    contiguous: if False, a batch takes any free cells, and K and V are written by index. Then
    nothing needs to be defragmented.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_cells: int,
        *,
        contiguous: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(num_cells, require_bool("contiguous", contiguous))
        self.config, self.windows = config, config.windows
        shape = (config.num_layers, num_cells, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: attention multiplies what a free cell holds by 0, and 0 * NaN is NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # (layers, cells, K, D)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """The bytes of K and V together."""
        return self.k.nbytes + self.v.nbytes

    @torch.inference_mode()
    def decode(
        self,
        lm: LanguageModel,
        token_ids: Sequence[int],
        positions: Sequence[int],
        seqs: Sequence[int],
    ) -> torch.Tensor:
        """Run the model over a batch: token t stands at positions[t] of sequence seqs[t].

        Returns the logits after every token, (T, vocab_size) float32. All or nothing: if there is
        no room (OutOfCells), an argument is bad (ValueError) or the step fails in the middle, the
        cells belong to the same sequences as before.
        """
        self._require_in_model(lm, token_ids, positions)
        before = self.head
        cells = self.place(positions, seqs)
        try:
            self.apply_shifts()
            device = self.k.device
            hidden = lm.transformer.forward(
                torch.tensor(token_ids, device=device),
                torch.tensor(positions, device=device),
                self.bind(cells),
            )
            return lm.transformer.logits(hidden).float()
        except BaseException:
            self.free(cells)
            self.head = before
            raise

    def append(self, lm: LanguageModel, token_ids: Sequence[int], seq: int = 0) -> torch.Tensor:
        """`decode` for the tokens that follow the last position of one sequence."""
        start = self.seq_pos_max(seq) + 1
        positions = list(range(start, start + len(token_ids)))
        return self.decode(lm, token_ids, positions, [seq] * len(token_ids))

    def bind(self, cells: Sequence[int]) -> Attend:
        """The `attend` of one step whose tokens lie in `cells`: it writes their K and V, and reads
        no cell after the last used one."""
        num_read = self.num_read
        visible = {window: self.visible(cells, window) for window in set(self.windows)}
        where = slice(cells[0], cells[-1] + 1) if self.contiguous else torch.tensor(cells)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            self.k[layer, where], self.v[layer, where] = k.to(self.k.dtype), v.to(self.v.dtype)
            keys, values = self.k[layer, :num_read], self.v[layer, :num_read]  # (N, K, D)
            return masked_attention(q, keys, values, visible[self.windows[layer]])

        return attend

    def visible(self, cells: Sequence[int], window: int | None = None) -> torch.Tensor:
        """Which of the first `num_read` cells the tokens in `cells` see: (T, num_read) bool.

        The same sequence, not later, inside the window. A token of several sequences sees what
        the first of them sees.
        """
        num_read = self.num_read
        seqs = [min(self.sequences[cell]) for cell in cells]
        owned = {seq: [seq in owners for owners in self.sequences[:num_read]] for seq in set(seqs)}
        query = torch.tensor([self.positions[cell] for cell in cells])  # (T,)
        key = torch.tensor(self.positions[:num_read])  # (N,)
        same_sequence = torch.tensor([owned[seq] for seq in seqs])  # (T, N)
        return (same_sequence & in_window(query, key, window)).to(self.k.device)

    @torch.inference_mode()
    def apply_shifts(self) -> int:
        """Turn K of every cell that has moved, in all layers, and forget the moves; returns how
        many cells were turned. `decode` calls it in each step."""
        moved = [cell for cell, shift in enumerate(self.shifts) if shift != 0]
        if moved:
            cells = torch.tensor(moved, device=self.k.device)
            deltas = torch.tensor([self.shifts[cell] for cell in moved], device=self.k.device)
            self.k[:, cells] = turn(self.k[:, cells], deltas, self.config.inverse_frequencies())
            self.shifts = [0] * self.num_cells
        return len(moved)

    def _require_in_model(
        self, lm: LanguageModel, token_ids: Sequence[int], positions: Sequence[int]
    ) -> None:
        if len(token_ids) != len(positions) or len(token_ids) == 0:
            raise ValueError(
                f"positions: {len(positions)} for {len(token_ids)} token ids; one for each"
            )
        for token_id in token_ids:
            require_int("token_ids: a token id", token_id, 0, lm.config.vocab_size - 1)
        for position in positions:
            require_int("positions: a position", position, 0)
            if position >= lm.config.max_context:
                raise ValueError(
                    f"positions: {position} is beyond the model's {lm.config.max_context} "
                    f"positions; shift the context, or use with_config(lm, max_context=…)"
                )
