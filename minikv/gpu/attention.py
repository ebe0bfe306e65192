"""The attention backend made of the Triton kernels: `EngineConfig(attention="triton")`."""

import torch

from minikv.backend import AttentionBackend
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.model import Attend
from minikv.paged import KVStore
from minikv_kernels.arguments import check_runnable
from minikv_kernels.block_copy import copy_blocks
from minikv_kernels.cache_write import write_cache
from minikv_kernels.paged_decode import paged_decode
from minikv_kernels.paged_prefill import paged_prefill
from minikv_kernels.splits import make_scratch


class TritonAttention(AttentionBackend):
    """Paged attention in Triton: an `attend` for the model, bound to a batch.

    Three launches per layer: write K and V, decodes, prefill chunks; four where contexts are
    long enough to be split. Except for the sizes of the batch, everything that a launch depends
    on stays on the device, so that a step can be captured in a CUDA graph.
    """

    recordable = True  # in a CUDA graph: nothing that `bind` makes asks the host

    def __init__(self, config: ModelConfig, store: KVStore):
        """Raises ValueError for a store on a CPU where kernels are compiled, or a head dim
        over 256."""
        check_runnable("store", store.blocks)
        check_head_dim(config)
        self.windows, self.store = config.windows, store
        self.scratch = make_scratch(
            config.num_heads, config.num_kv_heads, config.head_dim, store.blocks.device
        )

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) within the store, all layers, one pair after the other.

        A block that was read may be written by a later pair: then it takes another launch.
        """
        blocks = self.store.blocks
        together: list[tuple[int, int]] = []
        touched: set[int] = set()
        for source, target in pairs:
            if target in touched:
                copy_blocks(blocks, blocks, torch.tensor(together))
                together, touched = [], set()
            together.append((source, target))
            touched |= {source, target}
        if together:
            copy_blocks(blocks, blocks, torch.tensor(together))

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch. Sequences with one query are the decodes at its front."""
        n = batch.num_decodes
        tables, lens = batch.block_tables, batch.context_lens

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv, window = self.store.blocks[layer], self.windows[layer]
            write_cache(k, v, kv, batch.slot_mapping)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # (T, H, D)
            if n > 0:
                paged_decode(q[:n], kv, tables[:n], lens[:n], window, out[:n], self.scratch)
            if n < len(lens):
                paged_prefill(q, kv, tables[n:], lens[n:], batch.query_start[n:], window, out)
            return out

        return attend


def check_head_dim(config: ModelConfig) -> None:
    """Raise ValueError for vectors that are too long for a program's registers."""
    if config.head_dim > 256:
        raise ValueError(
            f"config: head_dim is {config.head_dim} and these kernels take at most 256; "
            "leave attention at 'torch'"
        )
