"""The parts of a compiled decode step, each timed alone, and what limits them. Needs Numba."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

import minikv
from minikv.course.bench.harness import take_steps
from minikv.course.measure.timing import timed
from minikv.cpu.compiler import kernel
from minikv.cpu.kernels import LANES, SET, START, UNIT, _bounds, attend_decode, matmul, zero


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
    """By column, what one turn found: ms, and shares in %."""
    before = engine.stats().host_seconds
    seconds, _ = timed(partial(take_steps, engine, steps))
    step, host = seconds / steps, (engine.stats().host_seconds - before) / steps
    backend: Any = engine.attention
    program, sequences = backend.program, engine.scheduler.running
    w, kv = program.weights, program.buffers.kv
    num_seqs, (num_heads, head_dim) = len(sequences), program.buffers.heads_out.shape[1:]
    lens = np.array([one.num_computed for one in sequences])
    tables = np.zeros((num_seqs, max(-(-lens // 16))), np.int64)
    for row, one in zip(tables, sequences, strict=True):
        held = one.table.block_ids[: len(row)]
        row[: len(held)] = held
    q, attended = program.buffers.heads[:num_seqs], np.empty((num_seqs, num_heads, head_dim), "f4")
    weights = [*w.qkv, *w.out, *w.gate_up[:, 0], *w.gate_up[:, 1], *w.down, w.head]
    inputs = {one.shape[1]: np.ones((num_seqs, one.shape[1]), "f4") for one in weights}
    out = np.empty((max(num_seqs, ROWS), max(len(one) for one in weights) * LANES), "f4")
    square, rows = np.ones((16, 256, LANES), "f4"), np.ones((ROWS, 256), "f4")

    def products(part: int, count: int) -> None:
        for one in weights:
            first, last = _bounds(len(one) * LANES, part, count, UNIT)
            matmul(inputs[one.shape[1]], one, out, START, SET, first, last)

    def attention(part: int, count: int) -> None:
        first, last = _bounds(num_seqs * kv.shape[4], part, count, 1)
        for layer in kv:
            attend_decode(q, layer, tables, lens, START, attended, first, last)

    def best_products(part: int, count: int) -> None:
        for _ in range(20):
            matmul(rows, square, out[:, part * 256 :], START, SET, START, np.int64(256))

    def read_weights(part: int, count: int) -> None:
        for one in weights:
            read(one.reshape(len(one), -1), *_bounds(len(one), part, count, 1))

    def read_blocks(part: int, count: int) -> None:
        first, last = _bounds(tables.size, part, count, 1)
        for layer in kv:
            read_at(layer.reshape(len(layer), -1), tables.reshape(-1), first, last)

    flops = 2 * num_seqs * sum(one.size for one in weights)
    rate = 20 * share.count * 2 * ROWS * square.size / share.seconds(best_products)
    multiply, attend = share.seconds(products), share.seconds(attention)
    least = share.seconds(read_blocks)
    limit = max(flops / rate, share.seconds(read_weights)) + least
    return {
        "a step": 1e3 * step, "host": 1e3 * host, "products": 1e3 * multiply,
        "attention": 1e3 * attend, "rest": 1e3 * (step - host - multiply - attend),
        "limit": 1e3 * limit, "% of limit": 100 * limit / step,
        "attention, % of a read": 100 * least / attend,
    }  # fmt: skip


ROWS = 96  # of a product that reaches the rate of the arithmetic


@kernel
def read(values, first, last):
    """The sum of the rows first to last of values (any, any)."""
    total = zero
    for index in range(first, last):
        row = values[index]
        for i in range(len(row)):
            total += row[i]
    return total


@kernel
def read_at(values, rows, first, last):
    """The same of the rows that the places first to last of `rows` name."""
    total = zero
    for index in rows[first:last]:
        row = values[index]
        for i in range(len(row)):
            total += row[i]
    return total
