"""A step of few tokens as one program: embedding to logits in one compiled call.

A decode step of a small model is some hundred short operations, and PyTorch needs longer to start
each of them than to compute it. Here Python starts one program for all of them, as a CUDA graph
does on a GPU.
"""

import logging
import os
from functools import partial
from time import perf_counter, thread_time
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from minikv.batch import Batch
from minikv.cpu import helpers
from minikv.cpu.compiler import num_compiled
from minikv.cpu.kernels import (
    DECODES,
    HELPERS,
    NUM_SHARED,
    SEQS,
    TOKENS,
    Buffers,
    Weights,
    norm_heads,
    rms_norm,
    rotate_and_write,
    run_step,
    share_attention,
    silu_mul,
    write_cache,
)  # fmt: skip
from minikv.cpu.tiles import in_panels
from minikv.fast import FastLinear, FastRMSNorm
from minikv.model import Linear, Transformer, mix, project
from minikv.paged import KVStore

log = logging.getLogger("minikv")

CHUNKS_PER_THREAD = 4
PATIENCE = 500_000  # turns of a loop that a helper waits for the next phase: below a millisecond
TOO_LONG = 200_000  # turns: a helper that takes this long for a chunk has lost its core meanwhile


def weights_of(transformer: Transformer) -> Weights:
    """The weights in the layout of the program: in panels, all layers of a kind in one array.

    This is a second copy. The first, in the layout that oneDNN reads fastest, is for steps of many
    tokens. Engines that serve the same model share both.
    """
    if transformer not in _weights:
        _weights[transformer] = _copy_weights(transformer)
    return _weights[transformer]


_weights: WeakKeyDictionary[Transformer, Weights] = WeakKeyDictionary()


def _copy_weights(transformer: Transformer) -> Weights:
    layers, config = transformer.layers, transformer.config

    def stack(rows: list) -> np.ndarray:
        found = [plain(row) for row in rows if row is not None]
        return np.stack(found) if found else np.empty((0, 1), np.float32)

    def norms(name: str) -> np.ndarray:
        ops = [getattr(layer, name) for layer in layers]
        return stack([_norm_weight(op) for op in ops if op is not None])

    products = {}
    for name in ("qkv", "out", "gate_up", "down"):
        ops: Any = [getattr(layer, name) for layer in layers]
        halves = 2 if name == "gate_up" else 1
        panels = [[in_panels(half) for half in np.split(plain(op.weight), halves)] for op in ops]
        products[name] = np.stack(panels) if halves == 2 else np.concatenate(panels)
        products[f"{name}_bias"] = stack([op.bias for op in ops])
    return Weights(
        embedding=plain(transformer.embedding),
        head=in_panels(plain(transformer.head.weight)),
        norm_1=norms("norm_1"), norm_2=norms("norm_2"),
        q_norm=norms("q_norm"), k_norm=norms("k_norm"),
        norm=plain(_norm_weight(transformer.norm)),
        rope=plain(transformer.rope_table),
        windows=np.array([window or 0 for window in config.windows]),
        eps=np.float32(config.rms_norm_eps),
        **products,
    )  # fmt: skip


def plain(tensor: torch.Tensor) -> np.ndarray:
    """A weight row by row, whatever layout oneDNN gave it."""
    return (tensor.to_dense() if tensor.is_mkldnn else tensor).contiguous().numpy()


def _norm_weight(norm: Any) -> torch.Tensor:
    return norm.weight / len(norm.weight) ** 0.5  # `FastRMSNorm` has the root in it


def compile_for(weights: Weights, buffers: Buffers) -> None:
    """Compile what an engine calls, or read it from disk. All models have arrays of the same types,
    so this takes time for the first engine of a process only."""
    started, b, no = perf_counter(), buffers, 0
    shared = np.zeros(NUM_SHARED, np.int64)  # not the step's, where helpers would see open work
    before = num_compiled()
    run_step(weights, b, 1, 1)  # of no tokens
    if isinstance(b.kv, np.ndarray):  # larger steps of codes are not compiled
        kv, table, lens, out = b.kv[0], b.block_tables, b.context_lens, b.heads_out
        write_cache(b.heads[:0], b.heads[:0], b.slots, kv.reshape(-1, *kv.shape[2:]))
        share_attention(shared, b.heads, kv, table, lens, b.query_start, no, out, no, no)
        norm_heads(b.heads, no, no, weights.norm, weights.eps)
    if num_compiled() > before:
        seconds = perf_counter() - started
        log.warning("compiled the engine's step for this machine in %.1f s", seconds)


def can_compile(transformer: Transformer) -> bool:
    """Whether its layers are computed as `minikv.model` has it, in the forms for a CPU."""
    ops = [(layer.norm_1, layer.qkv) for layer in transformer.layers]
    usual = all(type(n) is FastRMSNorm and type(p) in (FastLinear, Linear) for n, p in ops)
    return usual and (transformer.project, transformer.mix) == (project, mix)


def compute_many(
    transformer: Transformer, store: KVStore, batch: Batch, num_threads: int
) -> torch.Tensor:
    """Logits (S, vocab_size) of a step of many tokens: the matrix products are oneDNN's, all that
    lies between them is compiled."""
    w, c = weights_of(transformer), transformer.config
    positions, slots = batch.positions.numpy(), batch.slot_mapping.numpy()
    tables, num_tokens = batch.block_tables.numpy(), len(batch.token_ids)
    walk = tables, batch.context_lens_host, batch.query_start_host
    border, keys = batch.num_decodes * c.num_kv_heads, c.num_heads + c.num_kv_heads
    count = min(8 * num_threads, 0xFFFF) if num_threads > 1 else 1
    x = transformer.embedding.index_select(0, batch.token_ids)  # (T, hidden)
    normed = torch.empty_like(x)
    attended = torch.empty(num_tokens, c.num_heads, c.head_dim)
    product = torch.empty(num_tokens, c.intermediate_size)
    for i, layer in enumerate(transformer.layers):
        rms_norm(x.numpy(), w.norm_1[i], w.eps, normed.numpy())
        heads = layer.qkv(normed).numpy().reshape(num_tokens, -1, c.head_dim)  # (T, H + 2 K, D)
        if len(w.q_norm) > 0:
            norm_heads(heads, 0, c.num_heads, w.q_norm[i], w.eps)
            norm_heads(heads, c.num_heads, keys, w.k_norm[i], w.eps)
        rotate_and_write(heads, w.rope, positions, slots, store.slots[i].numpy(), 0, num_tokens)
        shared = np.zeros(NUM_SHARED, np.int64)
        job = partial(
            share_attention, shared, heads, store.blocks[i].numpy(), *walk, w.windows[i],
            attended.numpy(), border, count,
        )  # fmt: skip
        if num_threads > 1:
            helpers.offer(job, num_threads - 1)
        job()
        x += layer.out(attended.flatten(1))
        rms_norm(x.numpy(), w.norm_2[i], w.eps, normed.numpy())
        silu_mul(layer.gate_up(normed).numpy(), product.numpy(), 0, c.intermediate_size)
        x += layer.down(product)
    last = x[batch.query_start[1:] - 1]  # (S, hidden)
    rms_norm(last.numpy(), w.norm, w.eps, last.numpy())
    return transformer.logits(last)


def is_crowded() -> bool:
    """Whether the load of the last minute is above what this machine's cores can take. Two pools of
    threads that wait for each other can then make a step a hundred times slower."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) + 1


class Program:
    """The step of one transformer over one store, for at most `max_tokens` tokens."""

    def __init__(
        self, transformer: Transformer, store: KVStore, kv: Any, max_tokens: int, max_blocks: int
    ):
        """kv: the store's numbers as `kernels.layer_of` takes them."""
        self.store = store
        self.transformer, self.weights = transformer, weights_of(transformer)
        c = transformer.config
        heads, rows = c.num_heads + 2 * c.num_kv_heads, max_tokens

        def floats(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.float32)

        def whole(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.int64)

        qkv, out = floats(rows, heads, c.head_dim), floats(rows, c.num_heads, c.head_dim)
        self.buffers = b = Buffers(
            token_ids=whole(rows), positions=whole(rows), slots=whole(rows),
            query_start=whole(rows + 1), context_lens=whole(rows),
            block_tables=whole(rows, max_blocks),
            kv=kv,
            x=floats(rows, c.hidden_size), normed=floats(rows, c.hidden_size),
            qkv=qkv.reshape(rows, -1), heads=qkv, attended=out.reshape(rows, -1), heads_out=out,
            gate_up=floats(rows, 2 * c.intermediate_size),
            product=floats(rows, c.intermediate_size),
            logits=floats(rows, c.vocab_size), shared=whole(NUM_SHARED),
        )  # fmt: skip
        compile_for(self.weights, b)
        self.logits = torch.from_numpy(b.logits)
        self.num_threads = torch.get_num_threads()
        self.help = partial(run_step, self.weights, b, 0, PATIENCE)
        self.alone, self.penalty = 0, 16  # steps to go on one thread; how many it will be next
        if self.num_threads > 1 and is_crowded():
            self.go_alone()

    def fits(self, transformer: Transformer, num_blocks: int) -> bool:
        """Whether it is for this transformer, with room for block tables of this width."""
        return self.transformer is transformer and num_blocks <= self.buffers.block_tables.shape[1]

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits (S, vocab_size) after the last token of each sequence, until the next call."""
        b, shared = self.buffers, self.buffers.shared
        num_seqs, width = batch.block_tables.shape
        num_tokens = len(batch.token_ids)
        b.token_ids[:num_tokens] = batch.token_ids.numpy()
        b.positions[:num_tokens] = batch.positions.numpy()
        b.slots[:num_tokens] = batch.slot_mapping.numpy()
        b.query_start[: num_seqs + 1] = batch.query_start_host
        b.context_lens[:num_seqs] = batch.context_lens_host
        b.block_tables[:num_seqs, :width] = batch.block_tables.numpy()
        shared[TOKENS], shared[SEQS], shared[DECODES] = num_tokens, num_seqs, batch.num_decodes
        if self.threads_for_step() == 1:
            run_step(self.weights, b, 1, 1)
            return self.logits[:num_seqs]
        if shared[HELPERS] < self.num_threads - 1:
            helpers.offer(self.help, self.num_threads - 1)
        if run_step(self.weights, b, CHUNKS_PER_THREAD * self.num_threads, 1) > TOO_LONG:
            self.go_alone()
        return self.logits[:num_seqs]

    def run_many(self, batch: Batch) -> torch.Tensor:
        """The same for a batch of many tokens, by `compute_many`."""
        threads = self.threads_for_step()
        torch.set_num_threads(threads)
        try:
            started, computed = perf_counter(), thread_time()
            logits = compute_many(self.transformer, self.store, batch, threads)
            computed, seconds = thread_time() - computed, perf_counter() - started
        finally:
            torch.set_num_threads(self.num_threads)
        if threads > 1 and seconds > 2 * computed:
            self.go_alone()
        return logits

    def threads_for_step(self) -> int:
        """1 for a while after the machine was found busy, otherwise all."""
        if self.alone == 0:
            return self.num_threads
        self.alone -= 1
        if self.alone == 0 and is_crowded():
            self.go_alone()
        return 1

    def go_alone(self) -> None:
        """Compute on one thread for a while, twice as many steps as the last time: the machine is
        busy with other programs, and threads that wait for each other would wait for those, too."""
        self.alone, self.penalty = self.penalty, min(2 * self.penalty, 1024)
