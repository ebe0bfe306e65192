"""The backend made of compiled kernels: `EngineConfig(attention="cpu")`."""

import torch

from minikv.backend import AttentionBackend
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.cpu import kernels
from minikv.cpu.step import Program, can_compile
from minikv.model import Attend, Transformer
from minikv.paged import KVStore

# Steps of at most this many tokens run as one program. With more, starting operations from Python
# costs little beside the arithmetic, and oneDNN cuts large products to fit each cache. Measured on
# a 2-core Xeon, one thread, by processor time: one program takes 0.77 of the time with oneDNN's
# products at 32 tokens of tinypy, 0.80 at 128; on a model with layers of 47 MB 0.91 at 32 tokens,
# 1.06 at 128 and 1.25 at 500.
FEW = 64


class CpuAttention(AttentionBackend):
    """Attention that walks the block tables where they lie, compiled; and whole steps."""

    def __init__(self, config: ModelConfig, store: KVStore):
        self.config, self.store = config, store
        self.blocks = [layer.numpy() for layer in store.blocks]
        self.slots = [layer.numpy() for layer in store.slots]
        self.program: Program | None = None

    def compute(self, transformer: Transformer, batch: Batch) -> torch.Tensor | None:
        """The logits of a batch, valid until the next call; None if the transformer is not the
        usual one."""
        width = batch.block_tables.shape[1]
        if self.program is None or not self.program.fits(transformer, width):
            if not can_compile(transformer):
                return None
            kv = self.store.blocks.numpy()
            self.program = Program(transformer, self.store, kv, FEW, 2 * width)
        few = len(batch.token_ids) <= FEW
        return self.program.run(batch) if few else self.program.run_many(batch)

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch, for a transformer that is not the usual one."""
        decodes, num_seqs = batch.num_decodes, len(batch.context_lens_host)
        slots, tables = batch.slot_mapping.numpy(), batch.block_tables.numpy()
        lens, starts = batch.context_lens_host, batch.query_start_host
        kv_heads = self.config.num_kv_heads

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv, window = self.blocks[layer], self.config.windows[layer] or 0
            out = torch.empty(q.shape)  # (T, H, D)
            queries, found = q.contiguous().numpy(), out.numpy()
            write = k.contiguous().numpy(), v.contiguous().numpy()
            kernels.write_cache(*write, slots, self.slots[layer])
            items, border = num_seqs * kv_heads, decodes * kv_heads
            kernels.attend(queries, kv, tables, lens, starts, window, found, 0, items, border)
            return out

        return attend
