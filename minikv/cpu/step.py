"""A step as one program: embedding to logits in one compiled call.

A decode step of a small model is some hundred short operations, and PyTorch needs longer to start
each of them than to compute it. Here Python starts one program for all of them, as a CUDA graph
does on a GPU.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import CDLL
from functools import partial, wraps
from time import perf_counter, thread_time
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from minikv.backend import Computed
from minikv.batch import Batch
from minikv.cpu import helpers
from minikv.cpu.addresses import Packed, address_of
from minikv.cpu.compiler import compiled_beside, num_compiled
from minikv.cpu.kernels import (
    DECODES,
    HELPERS,
    NUM_SHARED,
    OWN,
    PHASES,
    SEQS,
    TOKENS,
    UNIT,
    Buffers,
    Weights,
    run_step,
    write_layer,
)  # fmt: skip
from minikv.cpu.tiles import from_panels, in_panels
from minikv.fast import FastLinear, FastRMSNorm
from minikv.model import Linear, RMSNorm, Transformer, mix, project, rope_table
from minikv.paged import KVStore

log = logging.getLogger("minikv")

CHUNKS_PER_THREAD = 2
PATIENCE = 2e-3  # seconds that a helper waits for the next step, awake
LONG = 1e-3  # seconds: a wait of the leading thread that is shorter is not held against the helpers
LEAST = 0.1  # of the chunks, for helpers that are worth their cores
TURNS = 1_000_000  # of a waiting loop, to measure how long one takes


def weights_of(transformer: Transformer) -> Weights:
    """The weights in the layout of the program: in panels, all layers of a kind in one array.

    In float32 this is a second copy. The first, in the layout that oneDNN reads fastest, is for
    attention that is computed layer by layer. In bfloat16 the transformer's own products read the
    panels from now on, and the first copy goes. Engines that serve the same model share them.
    """
    if transformer not in _weights:
        _weights[transformer] = _copy_weights(transformer)
    return _weights[transformer]


_weights: WeakKeyDictionary[Transformer, Weights] = WeakKeyDictionary()


def _copy_weights(transformer: Transformer) -> Weights:
    layers, config = transformer.layers, transformer.config

    def stack(rows: Iterable[np.ndarray]) -> np.ndarray:
        found = list(rows)
        return np.stack(found) if found else np.empty((0, 1), np.float32)

    def norms(name: str) -> np.ndarray:
        ops = [getattr(layer, name) for layer in layers]
        return stack(norm_weight(op) for op in ops if op is not None)

    products = {}
    into = {"qkv": "norm_1", "gate_up": "norm_2"}  # a norm's weights go into float32 matrices
    for name in ("qkv", "out", "gate_up", "down"):
        ops: list[Any] = [getattr(layer, name) for layer in layers]
        biases = [op.bias.float() for op in ops if op.bias is not None]
        panels = np.empty(0)
        for i, layer in enumerate(layers):  # one by one, for there may not be room for all twice
            matrix = plain(ops[i].weight)
            if name in into and matrix.dtype == np.float32:
                matrix = matrix * norm_weight(getattr(layer, into[name]))
            parts = np.split(matrix, 2 if name == "gate_up" else 1)
            found = np.stack([in_panels(one) for one in parts])
            panels = panels if i else np.empty((len(layers), *found.shape), found.dtype)
            panels[i] = found
            if found.dtype == np.uint32:
                ops[i] = InPanels(panels[i], len(parts) * len(parts[0]), ops[i].bias)
                setattr(layer, name, ops[i])
        give_back()
        products[name] = panels if name == "gate_up" else panels[:, 0]
        products[f"{name}_bias"] = stack(map(plain, biases))
    head = in_panels(plain(transformer.head.weight))
    if head.dtype == np.uint32:
        vars(transformer)["head"] = InPanels(head[None], config.vocab_size, None)
    rope, apart = transformer.rope_table, list[Any]()  # layers whose norms are in no matrix
    if rope.dtype != torch.float32:
        rope, apart = rope_table(config), layers  # not rounded to 16 bits
    return Weights(
        embedding=plain(transformer.embedding),
        norms=stack(norm_weight(one) for layer in apart for one in (layer.norm_1, layer.norm_2)),
        norm=norm_weight(transformer.norm), head=head,
        q_norm=norms("q_norm"), k_norm=norms("k_norm"),
        rope=plain(rope),
        windows=np.array([window or 0 for window in config.windows]),
        eps=np.float32(config.rms_norm_eps),
        **products,
    )  # fmt: skip


def give_back() -> None:
    """Memory that was freed in many pieces, to the system: glibc keeps it until it is asked."""
    with suppress(AttributeError, OSError, TypeError):  # other systems
        CDLL(None).malloc_trim(0)


class InPanels:
    """`Linear` on a weight in bfloat16 that lies in panels alone. It is laid out row by row for
    each call: for what is computed layer by layer beside a program, now and then."""

    def __init__(self, panels: np.ndarray, num_outputs: int, bias: torch.Tensor | None):
        """panels (1 or 2, any, inputs / 2, LANES): those of all outputs, or of each half."""
        self.panels, self.num_outputs, self.bias = panels, num_outputs, bias

    @property
    def weight(self) -> torch.Tensor:
        """(outputs, inputs) bfloat16, a copy."""
        size = self.num_outputs // len(self.panels)
        rows = np.concatenate([from_panels(one)[:size] for one in self.panels])
        return torch.from_numpy(rows).view(torch.bfloat16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, inputs) -> (T, outputs)."""
        return F.linear(x, self.weight, self.bias)


def plain(tensor: torch.Tensor) -> np.ndarray:
    """A tensor row by row, whatever layout oneDNN gave it; bfloat16, which NumPy does not have, as
    uint16."""
    rows = (tensor.to_dense() if tensor.is_mkldnn else tensor).contiguous()
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def norm_weight(norm: Any) -> np.ndarray:
    root = len(norm.weight) ** 0.5 if isinstance(norm, FastRMSNorm) else 1  # it has that in it
    return plain(norm.weight / root)


def compile_for(weights: Packed, buffers: Buffers, kv: Packed, attend: Any, write: Any) -> Packed:
    """Compile what an engine calls, or read it from disk. All models have arrays of the same types,
    so this takes time for the first engine of a process only. Returns buffers with the addresses.
    """
    started, before, b = perf_counter(), num_compiled(), buffers
    batch = b.block_tables, b.context_lens, b.query_start, 0
    collects = gc.isenabled()
    gc.disable()  # it would look at all that the compiler makes, and find little to free
    try:
        with compiled_beside(run_step, weights, Packed(b), 1, 1):
            attending = address_of(attend, kv, 0, b.heads, *batch, b.heads_out, 0, 0, 0)
            writing = address_of(write, kv, 0, b.heads, b.slots, 0)
        packed = Packed(b._replace(write=writing, attend=attending))
        run_step(weights, packed, 1, 1)  # of no tokens
    finally:
        if collects:
            gc.enable()
    if num_compiled() > before:
        seconds = perf_counter() - started
        log.warning("compiled the engine's step for this machine in %.1f s", seconds)
    return packed


def can_compile(transformer: Transformer) -> bool:
    """Whether its layers are computed as `minikv.model` has it, in the forms for a CPU."""
    ops = [(type(layer.norm_1), type(layer.qkv)) for layer in transformer.layers]
    norm: type = FastRMSNorm
    products: type = FastLinear
    if transformer.dtype == torch.bfloat16:
        norm, products, c = RMSNorm, InPanels, transformer.config
        if c.hidden_size % 2 or c.intermediate_size % 2:  # inputs lie in pairs
            return False
    usual = all(n is norm and p in (products, Linear) for n, p in ops)
    return usual and (transformer.project, transformer.mix) == (project, mix)


def on_one_thread(choose: Callable) -> Callable:
    """A sampler that computes on the thread that calls it. Torch's other threads would spin for a
    while afterwards, on the cores that the next step's helpers need. So would those that have made
    the engine, maybe on another thread than the one that takes steps: they end here."""
    helpers.end_torchs_threads()

    @wraps(choose, assigned=(), updated=())  # __wrapped__ is the sampler
    def chosen(*args: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return choose(*args)
        finally:
            torch.set_num_threads(threads)

    return chosen


class Crowd:
    """Decides whether a step is shared between threads.

    Beside other busy programs a helper may lose its core in the middle of a chunk, and all wait for
    it: for milliseconds, where a chunk takes microseconds. Or it has a core only when the leading
    thread has none: then it takes no chunks, but the time of that core. One such step is a hiccup.
    After several the steps go on one thread for a while, and if the first one after it is as bad,
    for twice as many.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.lost = 0  # grows by 4 in a step with a long wait, by 1 without help, falls by 1
        self.alone, self.penalty = 0, 16  # steps to go alone; how many it will be next
        self.num_alone = 0  # steps that went alone, so far

    def goes_alone(self) -> bool:
        """Whether the next step goes alone."""
        self.alone = max(self.alone - 1, 0)
        self.num_alone += self.alone > 0
        return self.alone > 0

    def judge(self, wait: float, seconds: float, helped: float, num_helpers: int) -> None:
        """After a shared step: its waits of more than LONG, and the time that it computed or waited
        on the leading thread, both in seconds; the share of the chunks that others computed, and
        how many others there were.

        Alone, it would have taken (seconds - wait) / (1 - helped). That is less than `seconds` if
        the wait is more than helped * seconds. Without help it would have taken as long, but the
        helpers' cores would have been free.
        """
        if wait <= helped * seconds and (helped >= LEAST or num_helpers == 0):
            self.lost, self.penalty = max(self.lost - 1, 0), max(self.penalty - 1, 16)
            return
        self.lost += 4 if wait > 0 else 1
        if self.lost > 8:  # the third wait in a dozen steps; after some alone, the first bad step
            self.lost, self.alone, self.penalty = 8, self.penalty, min(2 * self.penalty, 1024)


class Program:
    """The step of one transformer over one store, for batches up to a size."""

    def __init__(
        self,
        transformer: Transformer,
        store: KVStore,
        kv: Any,
        attend: Any,
        crowd: Crowd,
        shape: tuple[int, int, int],
        write: Any = write_layer,
    ):
        """kv: the store's numbers as `kernels.layer_of` takes them; attend: `attend_layer`, or what
        takes its place for this kind, and so is write. shape: tokens, sequences, and blocks per
        sequence. The rows of the layers' `qkv` are whole heads, with K and V at the end."""
        self.kv, self.packed, self.attend = kv, Packed(kv), attend
        self.store, self.crowd, self.shape = store, crowd, shape
        self.transformer, self.weights = transformer, weights_of(transformer)
        c, (rows, seqs, max_blocks) = transformer.config, shape
        first: Any = transformer.layers[0]
        heads = first.qkv.weight.shape[0] // c.head_dim
        found = first.out.weight.shape[1] // c.head_dim

        def floats(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.float32)

        def whole(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.int64)

        qkv, out = floats(rows, heads, c.head_dim), floats(rows, found, c.head_dim)
        x = floats(rows, c.hidden_size)
        b = Buffers(
            token_ids=whole(rows), positions=whole(rows), slots=whole(rows),
            query_start=whole(seqs + 1), context_lens=whole(seqs),
            block_tables=whole(seqs, max_blocks),
            kv=self.packed.address, write=0, attend=0, kv_heads=c.num_kv_heads,
            x=x, normed=np.empty_like(x) if len(self.weights.norms) else x, scale=floats(rows),
            squares=floats(-(-c.hidden_size // UNIT), rows),
            qkv=qkv.reshape(rows, -1), heads=qkv, attended=out.reshape(rows, -1), heads_out=out,
            gate_up=floats(rows, 2 * c.intermediate_size),
            product=floats(rows, c.intermediate_size),
            hidden=floats(seqs, c.hidden_size), logits=floats(seqs, c.vocab_size),
            shared=whole(NUM_SHARED),
        )  # fmt: skip
        weights = Packed(self.weights)
        self.arguments = weights, compile_for(weights, b, self.packed, attend, write)
        self.buffers = b = self.arguments[1].value
        self.logits, self.hidden = torch.from_numpy(b.logits), torch.from_numpy(b.hidden)
        started = thread_time()
        run_step(*self.arguments, 0, TURNS)  # there is nothing to help with, so it waits
        self.seconds_per_turn = (thread_time() - started) / TURNS
        self.help = partial(run_step, *self.arguments, 0, int(PATIENCE / self.seconds_per_turn))

    def fits(self, transformer: Transformer, batch: Batch) -> bool:
        """Whether it is for this transformer, with room for this batch."""
        sizes = zip(shape_of(batch), self.shape, strict=True)
        return self.transformer is transformer and all(size <= room for size, room in sizes)

    def run(self, batch: Batch) -> Computed:
        """After the last token of each sequence logits (S, vocab_size), and hidden states
        (S, hidden_size), until the next call."""
        b, shared = self.buffers, self.buffers.shared
        num_tokens, num_seqs, width = shape_of(batch)
        b.token_ids[:num_tokens] = batch.token_ids.numpy()
        b.positions[:num_tokens] = batch.positions.numpy()
        b.slots[:num_tokens] = batch.slot_mapping.numpy()
        b.query_start[: num_seqs + 1] = batch.query_start_host
        b.context_lens[:num_seqs] = batch.context_lens_host
        b.block_tables[:num_seqs, :width] = batch.block_tables.numpy()
        shared[TOKENS], shared[SEQS], shared[DECODES] = num_tokens, num_seqs, batch.num_decodes
        num_threads = self.crowd.num_threads
        if num_threads == 1 or self.crowd.goes_alone():
            run_step(*self.arguments, 1, 1)
            return self.logits[:num_seqs], self.hidden[:num_seqs]
        helpers.end_torchs_threads()
        if shared[HELPERS] < num_threads - 1:
            helpers.offer(self.help, num_threads - 1)
        long, started = int(LONG / self.seconds_per_turn), thread_time()
        num_chunks = CHUNKS_PER_THREAD * num_threads  # of each phase
        lost = run_step(*self.arguments, num_chunks, long)
        helped = 1 - shared[OWN] / (num_chunks * (PHASES * len(self.weights.qkv) + 1))
        wait, seconds = lost * self.seconds_per_turn, thread_time() - started
        self.crowd.judge(wait, seconds, helped, shared[HELPERS])
        return self.logits[:num_seqs], self.hidden[:num_seqs]


def shape_of(batch: Batch) -> tuple[int, int, int]:
    """How many tokens, sequences, and blocks per sequence."""
    return len(batch.token_ids), *batch.block_tables.shape


def room_for(batch: Batch, program: Program | None) -> tuple[int, int, int]:
    """The shape of a new program: the next powers of two, and no less than the last one had."""
    last = program.shape if program is not None else (64, 64, 16)
    sizes = zip(shape_of(batch), last, strict=True)
    tokens, seqs, blocks = (max(1 << (size - 1).bit_length(), room) for size, room in sizes)
    return tokens, seqs, blocks
