"""What this CPU can do: reading and multiplying on one thread, and what two threads cost."""

from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from minikv.course.chapters.ch09_cpu_kernels.given import compiled, in_threads
from minikv.course.workloads.timing import full_size, no_gc
from minikv.cpu.kernels import matmul
from minikv.cpu.tiles import ask_for, in_panels


def best(work: Callable[[], object], repeats: int = 5, calls: int = 1) -> float:
    """Seconds of one call, the best of several tries; a first one, which may compile, is not
    counted."""
    work()
    seconds = []
    with no_gc():
        for _ in range(full_size(repeats)):
            started = perf_counter()
            for _ in range(calls):
                work()
            seconds.append((perf_counter() - started) / calls)
    return min(seconds)


@compiled
def _read(values, times):
    found = np.float32(0)
    for _ in range(times):
        total = np.float32(0)
        for i in range(len(values)):
            total += values[i]
        values[0] = total  # or the compiler would read once
        found += total
    return found


def read_rate(size: int, total: int = 2**27) -> float:
    """Bytes per second of a kernel that reads `size` bytes again and again, on one thread."""
    # A part of a large array: Linux gives that large pages. An array of a few MB may lie in small
    # ones, which take longer to read, and would look like a slow cache.
    values = np.zeros(max(2**25, size // 4), np.float32)[: size // 4]
    times = max(1, total // size)
    return size * times / best(lambda: _read(values, times), 3)


def product_rate(size: int = 768) -> float:
    """Operations per second of PyTorch's matrix product in float32, on one thread."""
    a, b = torch.ones(2, size, size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 2 * size**3 / best(lambda: a @ b)
    finally:
        torch.set_num_threads(threads)


@compiled
def _read_runs(kv, order, asks):
    """The sum of the blocks in `order`, kv (num_blocks, block_size, runs, any): the first run of
    every token of a block, then the second, and so on. `asks`: for the same run four blocks on."""
    total, (_, block_size, runs, size) = np.float32(0), kv.shape
    for at in range(len(order)):
        for run in range(runs):
            if asks and at + 4 < len(order):
                begin = (order[at + 4] * block_size * runs + run) * size
                ask_for(kv, begin, runs * size, block_size, size)
            for token in range(block_size):
                row = kv[order[at], token, run]
                for i in range(size):
                    total += np.float32(row[i])
    return total


def kv_rates(num_blocks: int = 6144) -> dict[str, float]:
    """Tokens per second whose K and V a kernel reads: two KV heads of 64 channels, blocks of 16
    tokens, in the order of a shuffled block table. Each way changes one thing of the way before."""
    order, threads = np.random.default_rng(9).permutation(num_blocks), torch.get_num_threads()
    kv = np.ones((num_blocks, 16, 4, 64), np.float32)
    whole, codes = kv.reshape(num_blocks, 16, 1, -1), kv.astype(np.int8)

    def rate(kv: np.ndarray, asks: bool, threads: int) -> float:
        calls = [(kv, piece, asks) for piece in np.array_split(order, threads)]
        return 16 * num_blocks / best(lambda: in_threads(_read_runs, calls), 3)

    return {
        "whole tokens, one thread": rate(whole, False, 1),
        "a head at a time": rate(kv, False, 1),
        "and asked for in advance": rate(kv, True, 1),
        f"and on {threads} threads": rate(kv, True, threads),
        "and in 8 bits": rate(codes, True, threads),
    }


@compiled
def _nothing(number):
    return number


def waking() -> float:
    """Seconds that it takes to hand nothing to another thread, and to learn that it is done."""
    return best(lambda: in_threads(_nothing, [(0,), (1,)]), 5, calls=200)


def engine_product(weight: np.ndarray) -> Callable:
    """The engine's own matrix product with this weight, called as the one of 09.5. The weight is
    laid out in panels here, once."""
    panels = in_panels(weight)

    def product(x, weight, out, add, first, last) -> None:
        matmul(x, panels, out, 0, add, first, last)

    return product
