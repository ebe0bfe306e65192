"""The backend made of compiled kernels: `EngineConfig(attention="cpu")`."""

import torch

from minikv.backend import AttentionBackend
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.cpu import kernels
from minikv.cpu.step import Program, can_compile
from minikv.model import Attend, Transformer
from minikv.paged import KVStore

# Steps of at most this many tokens run as one program. With more, a product reads each weight for
# so many rows that arithmetic is what costs, and there oneDNN is nearly twice as fast as our loop.
FEW = 16


class CpuAttention(AttentionBackend):
    """Attention that walks the block tables where they lie, compiled; and whole steps."""

    def __init__(self, config: ModelConfig, store: KVStore):
        self.config, self.store = config, store
        self.blocks = [layer.numpy() for layer in store.blocks]
        self.slots = [layer.numpy() for layer in store.slots]
        self.program: Program | None = None
        self.transformer: Transformer | None = None  # of the program

    def compute(self, transformer: Transformer, batch: Batch) -> torch.Tensor | None:
        """The logits of a batch of few tokens, by the program. They are valid until the next
        call. None: the batch has many tokens, or the transformer is not the usual one."""
        if len(batch.token_ids) > FEW or not can_compile(transformer):
            return None
        width = batch.block_tables.shape[1]
        if self.transformer is not transformer or not self.program.fits(width):
            self.program = Program(transformer, self.store, FEW, 2 * width)
            self.transformer = transformer
        return self.program.run(batch)

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch, for all that does not run as one program."""
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
            if decodes > 0:
                some = queries[:decodes], kv, tables, lens, window, found[:decodes]
                kernels.attend_decode(*some, 0, decodes * kv_heads)
            if decodes < num_seqs:
                rest = tables[decodes:], lens[decodes:], starts[decodes:]
                kernels.attend_prefill(
                    queries, kv, *rest, window, found, 0, (num_seqs - decodes) * kv_heads
                )
            return out

        return attend
