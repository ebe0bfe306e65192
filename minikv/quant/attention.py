"""Attention over quantised blocks in PyTorch, on any device.

Each step gathers and dequantises all that it reads into a temporary copy in float. So this backend
saves memory between steps, but no time. The compiled kernels read the codes directly.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from minikv.backend import Rows, TorchAttention
from minikv.batch import Batch
from minikv.blocks import blocks_for
from minikv.config import ModelConfig
from minikv.model import Attend
from minikv.paged import KVStore
from minikv.quant.store import QuantisedStore, Write


def require_quantised(store: KVStore) -> QuantisedStore:
    """Returns the store. Raises ValueError if it is not quantised."""
    if not isinstance(store, QuantisedStore):
        raise ValueError(f"store: must be quantised, was {store!r}; set EngineConfig.kv_dtype")
    return store


class QuantisedAttention(TorchAttention):
    """Paged attention over a `QuantisedStore`: sequences are grouped as in `TorchAttention`.

    If K is stored by block, a query reads the keys of its own block in full precision. These keys
    are appended to the gathered ones, and the mask says for each query which of the two it reads.
    """

    store: QuantisedStore

    def __init__(self, config: ModelConfig, store: KVStore):
        self.config, self.store = config, require_quantised(store)

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch. What all layers share is computed here, once per step."""
        store, windows = self.store, self.config.windows
        write = store.plan_write(batch)
        groups = [self._make_group(batch, rows, write) for rows in self._rows_alike(batch)]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            store.write(layer, write, k, v)
            out = torch.empty_like(q)  # (T, H, D)
            for group in groups:
                out[group.tokens] = group.attend(store, layer, q, k, windows[layer])
            return out

        return attend

    def _make_group(self, batch: Batch, rows: Rows, write: Write) -> "QuantisedGroup":
        size, device = self.store.block_size, batch.positions.device
        which = np.arange(len(batch.context_lens_host))[rows]
        first = batch.query_start_host[which]
        num_queries = int(batch.query_start_host[which[0] + 1] - first[0])
        tokens = torch.from_numpy((first[:, None] + np.arange(num_queries)).ravel()).to(device)
        ends = batch.context_lens_host[which]
        num_blocks = blocks_for(int(ends.max()), size)
        block_ids = batch.block_tables[torch.from_numpy(which).to(device), :num_blocks].flatten()
        group = QuantisedGroup(tokens, len(which), num_queries, block_ids)

        positions = batch.positions[tokens].view(len(which), num_queries, 1)  # (R, Q, 1)
        keys = torch.arange(num_blocks * size, device=device)  # (L,)
        exact = keys // size == positions // size  # (R, Q, L): keys of the query's own block
        if self.store.open is not None:
            group.own_rows = [write.own_rows[row] for row in which]
            starts = (ends - num_queries) // size * size  # of the first query's block
            length = size if num_queries == 1 else int(ends[0] - starts[0])
            own = torch.from_numpy(starts[:, None] + np.arange(length)).to(device)
            group.own_places = own  # (R, M): where in the gathered keys
        for window in set(self.config.windows):
            visible = keys <= positions  # (R, Q, L)
            if window is not None:
                visible &= keys > positions - window
            if group.own_places is not None:
                place = group.own_places[:, None].expand(-1, num_queries, -1)
                own = (visible & exact).gather(2, place)
                visible = torch.cat([visible & ~exact, own], -1)  # (R, Q, L + M)
            # One line for each query head of the group.
            lines = visible.repeat_interleave(self.config.group_size, dim=1)
            group.masks[window] = lines[:, None]  # (R, 1, Q * G, L + M)
        return group


@dataclass(slots=True)
class QuantisedGroup:
    """Sequences with the same number of queries, padded to the longest context among them."""

    tokens: torch.Tensor  # (R * Q,), their places in the flat batch
    num_rows: int  # R
    num_queries: int  # Q of each
    block_ids: torch.Tensor  # (R * blocks,)
    # By window: (R, 1, Q * G, L), with M appended: see `own_places`.
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    own_rows: list[int] = field(default_factory=list)  # of each sequence, in the store's `open`
    own_places: torch.Tensor | None = None  # (R, M) of L: keys that are read in full precision

    def attend(
        self,
        store: QuantisedStore,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """q (T, H, D), k (T, K, D) of the whole batch -> (R * Q, H, D) of this group."""
        num_heads, (kv_heads, head_dim) = q.shape[1], k.shape[1:]
        k_hat, v_hat = (
            x.to(q.dtype).reshape(self.num_rows, -1, kv_heads, head_dim)
            for x in store.read(layer, self.block_ids)
        )  # (R, L, K, D)
        if self.own_places is not None:
            rows = torch.arange(self.num_rows, device=q.device)[:, None]
            k_hat = torch.cat([k_hat, self._own_keys(store, layer, k)], 1)  # (R, L + M, K, D)
            v_hat = torch.cat([v_hat, v_hat[rows, self.own_places]], 1)
        q = q[self.tokens].view(self.num_rows, self.num_queries, kv_heads, -1, head_dim)
        q = q.transpose(1, 2).flatten(2, 3)  # (R, K, Q * G, D)
        out = F.scaled_dot_product_attention(
            q, k_hat.transpose(1, 2), v_hat.transpose(1, 2), attn_mask=self.masks[window]
        )
        out = out.view(self.num_rows, kv_heads, self.num_queries, -1, head_dim)
        return out.transpose(1, 2).reshape(-1, num_heads, head_dim)

    def _own_keys(self, store: QuantisedStore, layer: int, k: torch.Tensor) -> torch.Tensor:
        """(R, M, K, D): for a decode the keys of its block, for a chunk those from the beginning of
        its first query's block on."""
        assert store.open is not None and self.own_places is not None
        keys = store.open.keys[layer]
        if self.num_queries == 1:
            return keys[self.own_rows].transpose(1, 2)
        before = self.own_places.shape[1] - self.num_queries  # keys from earlier steps
        earlier = keys[self.own_rows[0], :, :before].transpose(0, 1)
        return torch.cat([earlier, k[self.tokens]])[None]
