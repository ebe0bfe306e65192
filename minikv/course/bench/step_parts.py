"""The parts of a compiled decode step, each timed alone, and what limits them. Needs Numba."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

import minikv
from minikv.course.bench.harness import take_steps
from minikv.course.workloads.timing import timed
from minikv.cpu import CpuAttention
from minikv.cpu.compiler import kernel
from minikv.cpu.kernels import (
    LANES,
    PHASES,
    SET,
    START,
    UNIT,
    _bounds,
    _prepare,
    attend_decode,
    layer_of,
    matmul,
)


class Threads(ThreadPoolExecutor):
    """Runs a function of (part, number of parts) on every thread."""

    def __init__(self, count: int):
        super().__init__(count)
        self.count = count

    def seconds(self, work: Callable[[int, int], None]) -> float:
        """Of the fastest of five runs."""
        return min(timed(partial(self._run, work))[0] for _ in range(5))

    def _run(self, work: Callable[[int, int], None]) -> None:
        for done in [self.submit(work, i, self.count) for i in range(self.count)]:
            done.result()


def parts(engine: minikv.Engine, share: Threads, steps: int) -> dict[str, float]:
    """By column, what one round found: ms, and shares in %."""
    backend: Any = engine.attention
    before, backend.crowd.num_alone = engine.stats().host_seconds, 0
    seconds, _ = timed(partial(take_steps, engine, steps))
    step, host = seconds / steps, (engine.stats().host_seconds - before) / steps
    program, sequences = backend.program, engine.scheduler.running
    w, kv = program.weights, program.kv
    num_seqs = len(sequences)
    lens = np.array([one.num_computed for one in sequences])
    tables = np.zeros((num_seqs, max(-(-lens // 16))), np.int64)
    for row, one in zip(tables, sequences, strict=True):
        held = one.table.block_ids[: len(row)]
        row[: len(held)] = held
    weights = [*w.qkv, *w.out, *w.gate_up[:, 0], *w.gate_up[:, 1], *w.down, w.head]
    inputs = {one.shape[1]: np.ones((num_seqs, one.shape[1]), "f4") for one in weights}
    out = np.empty((max(num_seqs, ROWS), max(len(one) for one in weights) * LANES), "f4")
    square, rows = np.ones((16, 256, LANES), "f4"), np.ones((ROWS, 256), "f4")

    def products(part: int, count: int) -> None:
        for one in weights:
            first, last = _bounds(len(one) * LANES, part, count, UNIT)
            matmul(inputs[one.shape[1]], one, out, START, SET, first, last)

    def best_products(part: int, count: int) -> None:
        for _ in range(20):
            matmul(rows, square, out[:, part * 256 :], START, SET, START, np.int64(256))

    def read_weights(part: int, count: int) -> None:
        for one in weights:
            rows = np.arange(len(one))
            read(one.reshape(len(one), -1).view(np.int64), rows, *_bounds(len(one), part, count, 1))

    attention, read_blocks = over_blocks(engine.lm.config, kv, tables, lens)

    def read_all(part: int, count: int) -> None:
        """By turns, as a step does: what it reads in between may drive the other from a cache."""
        read_weights(part, count)
        read_blocks(part, count)

    flops = 2 * num_seqs * sum(one.size for one in weights)
    rate = 20 * share.count * 2 * ROWS * square.size / share.seconds(best_products)
    multiply, attend = share.seconds(products), share.seconds(attention)
    alone = min(timed(partial(prepare, w, program.buffers))[0] for _ in range(5))
    fixed = host + alone
    faster = [step / (fixed + (step - fixed) * share.count / cores) for cores in (4, 8, 16)]
    least = share.seconds(read_blocks)
    limit = max(flops / rate + least, share.seconds(read_all))
    return {
        "a step": 1e3 * step, "host": 1e3 * host, "products": 1e3 * multiply,
        "attention": 1e3 * attend, "rest": 1e3 * (step - host - multiply - attend),
        "limit": 1e3 * limit, "% of limit": 100 * limit / step,
        "attention, % of a read": 100 * least / attend, "serial, %": 100 * alone / step,
        "× on 4 cores": faster[0], "on 8": faster[1], "on 16": faster[2],
        "alone": backend.crowd.num_alone,
    }  # fmt: skip


ROWS = 96  # of a product that reaches the rate of the arithmetic


@kernel
def prepare(weights, buffers):
    """What one thread does alone in a step. It writes K and V of the last tokens over again, in all
    layers those of the last one: what the engine says afterwards is of no use."""
    for part in range(PHASES * len(weights.qkv) + 1):
        _prepare(weights, buffers, part)


def over_blocks(config: minikv.ModelConfig, kv: Any, tables: np.ndarray, lens: np.ndarray):
    """For `Threads`: one query of each sequence attends, in all layers; and a plain read of the
    same blocks. kv is what `layer_of` takes; tables (S, B), lens (S,)."""
    heads, size = config.num_heads, config.head_dim
    q = np.random.default_rng(0).standard_normal((len(lens), heads, size), "f4")
    out, num_items = np.empty_like(q), len(lens) * config.num_kv_heads
    arrays = [kv] if isinstance(kv, np.ndarray) else kv
    blocks = [layer.reshape(len(layer), -1).view(np.int64) for one in arrays for layer in one]

    def attention(part: int, count: int) -> None:
        first, last = _bounds(num_items, part, count, 1)
        for layer in range(config.num_layers):
            attend_layer(q, kv, layer, tables, lens, out, first, last)

    def read_blocks(part: int, count: int) -> None:
        first, last = _bounds(tables.size, part, count, 1)
        for one in blocks:
            read(one, tables.reshape(-1), first, last)

    return attention, read_blocks


def attention_share(
    engine: Any, share: Threads, batch: int, context: int, round_: int = 0
) -> float:
    """What attention of a decode step reaches of the rate of a plain read of the same blocks, in %,
    over the engine's own store, which is filled at random. `round_` changes nothing."""
    backend, store = engine.attention, engine.store
    is_plain = isinstance(backend, CpuAttention)
    for part in [store.blocks] if is_plain else store.parts.values():
        part.random_(-100, 100)
    tables = np.random.default_rng(0).permutation(batch * context // 16).reshape(batch, -1)
    kv = backend.kv if is_plain else backend.of_all_layers
    attention, read_blocks = over_blocks(engine.lm.config, kv, tables, np.full(batch, context))
    return 100 * share.seconds(read_blocks) / share.seconds(attention)


@kernel
def attend_layer(q, kv, layer, tables, lens, out, first, last):
    attend_decode(q, layer_of(kv, layer), tables, lens, START, out, first, last)


@kernel
def read(values, rows, first, last):
    """The sum of those rows of values (any, any) int64 that the places first to last of `rows`
    name."""
    total = np.int64(0)
    for index in rows[first:last]:
        row = values[index]
        for i in range(len(row)):
            total += row[i]
    return total
