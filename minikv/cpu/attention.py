"""The backend made of compiled kernels: `EngineConfig(attention="cpu")`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from minikv.backend import AttentionBackend, Computed
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.cpu import kernels
from minikv.cpu.step import Crowd, Program, can_compile, on_one_thread, plain, room_for
from minikv.model import Attend, Transformer
from minikv.paged import KVStore


class CompiledSteps(AttentionBackend):
    """Whole steps in one call.

    Decodes have a kernel of their own, which adds the same numbers in another order than the kernel
    for chunks. Nothing else in a step depends on what a row is computed with. So if all rows are
    computed as chunks (`one_kernel`), the bits of a result depend on the tokens before it alone.
    """

    one_kernel: bool | None = False

    def compile_over(self, kv: Any, attend: Any, write: Any = kernels.write_layer) -> None:
        """For `Program`: the store's numbers, and the kernels that attend to them and write."""
        self.kv, self.attend, self.write = kv, attend, write
        self.program: Program | None = None
        self.crowd = Crowd(torch.get_num_threads())  # of threads, for good

    def on_one_thread(self, call: Callable) -> Callable:
        return on_one_thread(call)

    def compute(self, transformer: Transformer, batch: Batch) -> Computed | None:
        """Logits and hidden states, valid until the next call; None if the transformer is not the
        usual one."""
        if self.program is None or not self.program.fits(transformer, batch):
            if not can_compile(transformer):
                if self.one_kernel:
                    raise ValueError("batch_invariant: this transformer's layers were changed")
                return None
            room = room_for(batch, self.program)
            parts = self.store, self.kv, self.attend, self.crowd, room, self.write
            self.program = Program(transformer, *parts)
        return self.program.run(replace(batch, num_decodes=0) if self.one_kernel else batch)


class CpuAttention(CompiledSteps):
    """Attention that walks the block tables where they lie, compiled; and whole steps."""

    def __init__(self, config: ModelConfig, store: KVStore):
        self.config, self.store = config, store
        self.blocks, self.slots = plain(store.blocks), plain(store.slots)
        self.compile_over(self.blocks, kernels.attend_layer)

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch, for a transformer that is not the usual one."""
        decodes, num_seqs = batch.num_decodes, len(batch.context_lens_host)
        slots, tables = batch.slot_mapping.numpy(), batch.block_tables.numpy()
        lens, starts = batch.context_lens_host, batch.query_start_host
        kv_heads = self.config.num_kv_heads

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv, window = self.blocks[layer], self.config.windows[layer] or 0
            out = torch.empty(q.shape)  # (T, H, D)
            found, (queries, *write) = out.numpy(), (plain(one.float()) for one in (q, k, v))
            kernels.write_cache(*write, slots, self.slots[layer])
            items, border = num_seqs * kv_heads, decodes * kv_heads
            kernels.attend(queries, kv, tables, lens, starts, window, found, 0, items, border)
            return out.to(q.dtype)

        return attend
