"""Attention over codes, compiled for the CPU: `EngineConfig(attention="cpu", kv_dtype="int8")`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minikv.backend import AttentionBackend, Computed
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.cpu import LANES, Crowd, Program, can_compile, on_one_thread, plain, room_for
from minikv.model import Attend, Transformer
from minikv.paged import KVStore
from minikv.quant import kernels
from minikv.quant.attention import require_quantised
from minikv.quant.store import QuantisedStore


class CompiledAttention(AttentionBackend):
    """Attention that reads codes where they lie, block by block."""

    store: QuantisedStore

    def __init__(self, config: ModelConfig, store: KVStore):
        self.config, self.store = config, require_quantised(store)
        kind = kernels.PARTS[self.store.format.name]
        arrays = {name: plain(part) for name, part in self.store.parts.items()}
        self.parts = [
            kind(**{name: layers[i] for name, layers in arrays.items()})
            for i in range(config.num_layers)
        ]
        self.of_all_layers = kind(**arrays)
        self.program: Program | None = None
        self.crowd = Crowd(torch.get_num_threads())  # of threads, for good
        self.keys: torch.Tensor | None = None  # of open blocks, as the program knows them
        self.rows = np.full(len(self.store.parts["k_codes"][0]), -1)  # see `OpenParts`
        self.no_keys = np.empty((0, config.num_kv_heads, store.block_size, config.head_dim), "f4")

    def on_one_thread(self, call: Callable) -> Callable:
        return on_one_thread(call)

    def compute(self, transformer: Transformer, batch: Batch) -> Computed | None:
        """Logits and hidden states, valid until the next call; None if no program can compute
        them."""
        store, program = self.store, self.program
        is_possible = self.config.head_dim % (2 * LANES if store.open else LANES) == 0
        if store.open:  # the program cannot write chunks, which fill blocks from their start
            is_possible &= batch.num_decodes == len(batch.context_lens_host)
        if not is_possible:
            return None
        is_known = program is not None and program.transformer is transformer
        if not is_known and not can_compile(transformer):
            return None
        if store.open is None:
            return self._program(transformer, batch, self.of_all_layers).run(batch)
        own_rows = store.plan_write(batch).own_rows
        kv = kernels.OpenParts(self.of_all_layers, store.open.keys.numpy(), self.rows)
        program = self._program(transformer, batch, kv)
        blocks = batch.slot_mapping.numpy() // store.block_size
        self.rows[blocks] = own_rows
        try:
            return program.run(batch)
        finally:
            self.rows[blocks] = -1

    def _program(self, transformer: Transformer, batch: Batch, kv: Any) -> Program:
        """The program of earlier steps, or a new one for wider tables or grown `OpenKeys`."""
        program, keys = self.program, self.store.open.keys if self.store.open else None
        if program is None or not program.fits(transformer, batch) or self.keys is not keys:
            room = room_for(batch, program)
            attend = kernels.attend_decodes if self.store.open else kernels.attend_codes
            program = Program(transformer, self.store, kv, attend, self.crowd, room)
            self.program, self.keys = program, keys
        return program

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch. What all layers share is computed here, once per step."""
        store = self.store
        write = store.plan_write(batch)
        own_rows = np.array(write.own_rows, np.int64)
        open_keys = store.open.keys.numpy() if store.open is not None else None
        tables, lens = batch.block_tables.numpy(), batch.context_lens_host
        num_items = len(lens) * self.config.num_kv_heads
        starts = batch.query_start_host

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            store.write(layer, write, k, v)
            out = torch.empty(q.shape)  # (T, H, D)
            queries, new, found = plain(q.float()), plain(k.float()), out.numpy()
            keys = self.no_keys if open_keys is None else open_keys[layer]
            window = self.config.windows[layer] or 0
            rest = keys, own_rows, tables, lens, starts, window
            kernels.attend(queries, new, self.parts[layer], *rest, found, 0, num_items)
            return out.to(q.dtype)

        return attend
