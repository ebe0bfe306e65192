"""Attention over quantised blocks in PyTorch, on any device.

Each step gathers and dequantises all that it reads into a temporary copy in float. So this backend
saves memory between steps, but no time. The compiled kernels read the codes directly.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minikv.backend import PaddedGroup, Rows, TorchAttention
from minikv.batch import Batch
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
    are appended to the gathered keys, and the mask says for each query which of the two it reads.
    """

    store: QuantisedStore

    def __init__(self, config: ModelConfig, store: KVStore):
        self.config, self.store = config, require_quantised(store)

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch. What all layers share is computed here, once per step."""
        store, windows = self.store, self.config.windows
        write = store.plan_write(batch)
        groups = [self._with_own_keys(batch, rows, write) for rows in self._rows_alike(batch)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store.write(layer, write, k, v)
            out = torch.empty_like(q)  # (T, H, D)
            for group in groups:
                out[group.plain.tokens] = group.attend(store, layer, q, k, windows[layer])
            return out

        return attend

    def _with_own_keys(self, batch: Batch, rows: Rows, write: Write) -> "QuantisedGroup":
        plain = self._group(batch, rows)
        if self.store.open is None:
            return QuantisedGroup(plain)
        size, device = self.store.block_size, batch.positions.device
        which = np.arange(len(batch.context_lens_host))[rows]
        ends = batch.context_lens_host[which]
        starts = (ends - plain.num_queries) // size * size  # of the first query's block
        length = size if plain.num_queries == 1 else int(ends[0] - starts[0])
        places = torch.from_numpy(starts[:, None] + np.arange(length)).to(device)  # (R, M)

        positions = batch.positions[plain.tokens].view(plain.num_rows, plain.num_queries, 1)
        lines = positions.repeat_interleave(self.config.group_size, dim=1)[:, None]
        for window, mask in plain.masks.items():  # (R, 1, Q * G, L)
            keys = torch.arange(mask.shape[-1], device=device)
            exact = keys // size == lines // size  # keys of the query's own block
            own = mask.masked_fill(~exact, -torch.inf)
            own = own.gather(3, places[:, None, None].expand(-1, 1, mask.shape[2], -1))
            plain.masks[window] = torch.cat([mask.masked_fill(exact, -torch.inf), own], -1)
        return QuantisedGroup(plain, [write.own_rows[row] for row in which], places)


@dataclass(slots=True)
class QuantisedGroup:
    """A group of `TorchAttention`, and which keys are read in full precision. These are appended
    to the others, and so are their columns in the masks: (R, 1, Q * G, L + M)."""

    plain: PaddedGroup
    own_rows: list[int] = field(default_factory=list)  # of each sequence, in the store's `open`
    own_places: Tensor | None = None  # (R, M) of L: keys that are read in full precision

    def attend(
        self, store: QuantisedStore, layer: int, q: Tensor, k: Tensor, window: int | None
    ) -> Tensor:
        """q (T, H, D), k (T, K, D) of the whole batch -> (R * Q, H, D) of this group."""
        plain = self.plain
        k_hat, v_hat = (
            x.to(q.dtype).reshape(plain.num_rows, -1, *k.shape[1:])
            for x in store.read(layer, plain.block_ids)
        )  # (R, L, K, D)
        if self.own_places is not None:
            rows = torch.arange(plain.num_rows, device=q.device)[:, None]
            k_hat = torch.cat([k_hat, self._own_keys(store, layer, k)], 1)  # (R, L + M, K, D)
            v_hat = torch.cat([v_hat, v_hat[rows, self.own_places]], 1)
        return plain.attend_to(
            q[plain.tokens], k_hat.transpose(1, 2), v_hat.transpose(1, 2), window
        )

    def _own_keys(self, store: QuantisedStore, layer: int, k: Tensor) -> Tensor:
        """(R, M, K, D): for a decode the keys of its block, for a chunk those from the beginning of
        its first query's block on."""
        assert store.open is not None and self.own_places is not None
        keys = store.open.keys[layer]
        if self.plain.num_queries == 1:
            return keys[self.own_rows].transpose(1, 2)
        before = self.own_places.shape[1] - self.plain.num_queries  # keys from earlier steps
        earlier = keys[self.own_rows[0], :, :before].transpose(0, 1)
        return torch.cat([earlier, k[self.plain.tokens]])[None]
