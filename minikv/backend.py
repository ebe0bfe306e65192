"""Attention inside the engine: the interface of a backend, and the backend for any device.

A backend is made once, over the engine's store of K and V. For each step it is bound to the
step's batch, and what comes out is the `attend` that the model calls in every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F

from minikv.batch import Batch
from minikv.blocks import blocks_for
from minikv.config import ModelConfig
from minikv.model import Attend, Transformer
from minikv.paged import KVStore

Rows = slice | np.ndarray  # some sequences of a batch
Computed = tuple[torch.Tensor, torch.Tensor]  # logits, and the hidden states below them


@runtime_checkable
class AttentionBackend(Protocol):
    """What the engine asks of a backend. A class that inherits from this one must write `bind`,
    and set `store` to the KVStore that it is made with."""

    store: KVStore
    recordable: bool = False  # `attend` asks nothing of the host: for the graphs of minikv.gpu
    # Whether all rows of a batch are computed in one way; None: it cannot be asked for.
    one_kernel: bool | None = None
    states: Any = None  # what it counts beside blocks: `minikv.states.StatePool`

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch: it writes the new tokens' K and V to their slots, then
        attends through the block tables."""

    def compute(self, transformer: Transformer, batch: Batch) -> Computed | None:
        """The logits after the last token of each sequence, (S, vocab_size), and the hidden states
        that they are computed from, (S, hidden_size), if the backend can compute this whole batch
        in a faster way than layer by layer; otherwise None."""
        return None

    def on_one_thread(self, call: Callable) -> Callable:
        """`call`, of what computes beside the backend (a sampler, a drafter), without threads that
        the backend's own would wait for."""
        return call

    def keep(self, counts: list[int]) -> None:
        """After a batch with drafts: of the decode in row i, its own token and the drafts behind
        it, only the first `counts[i]` are kept. To K and V of the others this makes no difference:
        they are written over before they are read."""
        return

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) within the store, in all layers: what copy-on-write asks for.

        A block may be a target after it has been a source, but is never a source after it has
        been a target.
        """
        self.store.copy_to(self.store, pairs)


MakeBackend = Callable[[ModelConfig, KVStore], AttentionBackend]


class TorchAttention(AttentionBackend):
    """Paged attention in PyTorch, on any device: an `attend` for the model, bound to a batch.

    Sequences with one query and contexts of about the same length are computed in one
    call, each prefill chunk in one of its own. Query heads of a group are packed beside
    each other as if they were queries, so K and V are never repeated.
    """

    def __init__(self, config: ModelConfig, store: KVStore):
        self.config = config
        self.store = store
        # Of each layer: K and V by slot, (num_slots, K, D), and both by block,
        # (num_blocks, block_size, 2, K, D). Views, made once.
        pairs = zip(store.slots, store.blocks, strict=True)
        self.layers = [(*slots.unbind(1), blocks) for slots, blocks in pairs]

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch. What all layers share is computed here, once per step."""
        groups = [self._group(batch, rows) for rows in self._rows_alike(batch)]
        windows, slots = self.config.windows, batch.slot_mapping

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            k_slots, v_slots, blocks = self.layers[layer]
            k_slots.index_copy_(0, slots, k)
            v_slots.index_copy_(0, slots, v)
            if len(groups) == 1:
                return groups[0].attend(q, blocks, windows[layer])
            out = torch.empty_like(q)  # (T, H, D)
            for group in groups:
                out[group.tokens] = group.attend(q[group.tokens], blocks, windows[layer])
            return out

        return attend

    def _rows_alike(self, batch: Batch) -> list[Rows]:
        """Which sequences to compute together. There is at most as much padding as content:
        decodes are split by powers of two where their contexts differ by more."""
        num_decodes, num_seqs = batch.num_decodes, len(batch.context_lens)
        chunks: list[Rows] = [slice(row, row + 1) for row in range(num_decodes, num_seqs)]
        if num_decodes == 0:
            return chunks
        lens = batch.context_lens_host[:num_decodes]
        if lens.max() <= 2 * max(lens.min(), self.store.block_size):
            return [slice(0, num_decodes), *chunks]
        sizes = np.ceil(np.log2(lens))
        return [np.flatnonzero(sizes == size) for size in np.unique(sizes)] + chunks

    def _group(self, batch: Batch, rows: Rows) -> "PaddedGroup":
        device = batch.positions.device
        first = batch.query_start_host[:-1][rows]
        num_queries = int(batch.query_start_host[1:][rows][0] - first[0])
        num_rows = len(first)
        which = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(device)
        tokens = which  # of decodes: token i belongs to sequence i
        if isinstance(rows, slice):
            tokens = slice(int(first[0]), int(first[0]) + num_rows * num_queries)
        longest = int(batch.context_lens_host[rows].max())
        num_blocks = blocks_for(longest, self.store.block_size)
        block_ids = batch.block_tables[which, :num_blocks].flatten()
        positions = batch.positions[tokens].view(num_rows, num_queries, 1)
        keys = torch.arange(num_blocks * self.store.block_size, device=device)
        masks = {}
        for window in set(self.config.windows):
            visible = keys <= positions  # (R, Q, L)
            if window is not None:
                visible &= keys > positions - window
            mask = torch.zeros(visible.shape, dtype=self.store.dtype, device=device)
            mask.masked_fill_(~visible, -torch.inf)
            # One line for each query head of the group.
            masks[window] = mask.repeat_interleave(self.config.group_size, dim=1)[:, None]
        return PaddedGroup(tokens, num_rows, num_queries, block_ids, masks)


@dataclass(slots=True)
class PaddedGroup:
    """Sequences with the same number of queries, padded to the longest context among them."""

    tokens: slice | torch.Tensor  # their places in the flat batch
    num_rows: int  # R
    num_queries: int  # Q of each
    block_ids: torch.Tensor  # (R * blocks,)
    masks: dict[int | None, torch.Tensor]  # by window: (R, 1, Q * G, L), 0 or -inf

    def attend(self, q: torch.Tensor, blocks: torch.Tensor, window: int | None) -> torch.Tensor:
        """q (R * Q, H, D), blocks (num_blocks, block_size, 2, K, D) -> (R * Q, H, D)."""
        gathered = blocks.index_select(0, self.block_ids)
        k, v = gathered.view(self.num_rows, -1, *blocks.shape[2:]).permute(2, 0, 3, 1, 4)
        return self.attend_to(q, k, v, window)

    def attend_to(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """q (R * Q, H, D), k and v (R, K, L, D) -> (R * Q, H, D)."""
        _, num_heads, head_dim = q.shape
        kv_heads = k.shape[1]
        if self.num_queries == 1:  # in order already, and every call counts in a decode
            q = q.reshape(self.num_rows, kv_heads, -1, head_dim)  # (R, K, G, D)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[window])
            return out.reshape(-1, num_heads, head_dim)
        q = q.reshape(self.num_rows, self.num_queries, kv_heads, -1, head_dim)  # (R, Q, K, G, D)
        q = q.transpose(1, 2).flatten(2, 3)  # (R, K, Q * G, D)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[window])
        out = out.view(self.num_rows, kv_heads, self.num_queries, -1, head_dim)
        return out.transpose(1, 2).reshape(-1, num_heads, head_dim)
