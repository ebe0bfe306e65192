"""Attention backends made of chapter 04's functions, the reader's or the reference's.

    minikv.Engine(lm, config, attention=partial(BlockByBlock, attend_one=blockwise_attention))

They find the slots and read the block tables themselves. So these functions are all that K and V
pass through: on their way into slots, and back out of them.
"""

from collections.abc import Callable

import torch

from minikv.backend import AttentionBackend
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.course.chapters.ch04_paged_blocks.answers import batched_attention, slot_mapping
from minikv.model import Attend
from minikv.paged import KVStore, blockwise_attention


class BlockByBlock(AttentionBackend):
    """Every query on its own, over the blocks of its sequence."""

    def __init__(
        self,
        config: ModelConfig,
        store: KVStore,
        attend_one: Callable = blockwise_attention,
        slot_mapping: Callable = slot_mapping,
    ):
        if any(window is not None for window in config.windows):
            raise ValueError("config: this backend has no sliding window, and the model has one")
        self.store, self.attend_one, self.slot_mapping = store, attend_one, slot_mapping

    def bind(self, batch: Batch) -> Attend:
        tables, lens = batch.block_tables.tolist(), batch.context_lens.tolist()
        slot_ids, owners = [], []  # of every token in the batch
        for row, num_queries in enumerate(batch.query_start.diff().tolist()):
            start, end = lens[row] - num_queries, lens[row]
            found = self.slot_mapping(tables[row], self.store.block_size, start, end)
            slot_ids += torch.as_tensor(found).tolist()  # a list, an array or a tensor
            owners += [row] * num_queries
        slots = torch.tensor(slot_ids)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            self.store.slots[layer, slots] = torch.stack([k, v], 1)
            return self._read(self.store.blocks[layer], q, batch, tables, owners)

        return attend

    def _read(self, kv, q, batch, tables, owners) -> torch.Tensor:
        """Attention's output for all queries: (T, H, D)."""
        return self._one_by_one(kv, q, batch, tables, owners, 0)

    def _one_by_one(self, kv, q, batch, tables, owners, start: int) -> torch.Tensor:
        """The same for the queries from `start` on: (T - start, H, D)."""
        lens = (batch.positions + 1).tolist()  # each query sees itself, too
        queries = range(start, len(q))
        return torch.stack([self.attend_one(q[i], kv, tables[owners[i]], lens[i]) for i in queries])


class DecodesTogether(BlockByBlock):
    """All decodes in one call, the queries of a prefill each on its own."""

    def __init__(self, config, store, attend_all: Callable = batched_attention, **others):
        super().__init__(config, store, **others)
        self.attend_all = attend_all

    def _read(self, kv, q, batch, tables, owners) -> torch.Tensor:
        n = batch.num_decodes
        parts = []
        if n > 0:
            tables_of_decodes, lens = batch.block_tables[:n], batch.context_lens[:n]
            parts.append(self.attend_all(q[:n], kv, tables_of_decodes, lens))
        if n < len(q):
            parts.append(self._one_by_one(kv, q, batch, tables, owners, n))
        return torch.cat(parts)
