"""What chapter 09 gives: how kernels are compiled, weights, threads, and what limits a CPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numba import njit

from minikv.cpu import step
from minikv.cpu.compiler import FASTMATH
from minikv.model import Transformer

# As the engine's own kernels, but not kept on disk: your file changes all the time, and what is
# kept is found again by its name and its line.
compiled: Any = njit(nogil=True, fastmath=FASTMATH, error_model="numpy")


class Weights(NamedTuple):
    """A model's weights as arrays, one for all N layers of a kind. float32, but for the last.

    H query heads, K KV heads, D head dim; rope is cos and sin by position.
    """

    embedding: np.ndarray  # (vocab, hidden)
    norm_1: np.ndarray  # (N, hidden)
    qkv: np.ndarray  # (N, (H + 2 K) * D, hidden)
    out: np.ndarray  # (N, hidden, H * D)
    norm_2: np.ndarray  # (N, hidden)
    gate_up: np.ndarray  # (N, 2 * inner, hidden)
    down: np.ndarray  # (N, hidden, inner)
    norm: np.ndarray  # (hidden,)
    head: np.ndarray  # (vocab, hidden)
    rope: np.ndarray  # (positions, 2, D)
    eps: np.float32  # of all norms
    block_size: int


class Stored(NamedTuple):
    """A format of K and V."""

    number_bytes: float  # of a number: 4 in float32, 0.5 in 4 bits
    scale_bytes: int = 0  # of the scale that each key and each value of each KV head has
    convert: int = 0  # operations that make one number a float32


class Cpu(NamedTuple):
    """What a CPU can do at most, measured. Bytes are those of K and V, read as attention does."""

    thread_rate: float  # bytes per second that one thread reads
    memory_rate: float  # bytes per second that all threads together read, however many they are
    flop_rate: float  # operations per second of one thread


class Limit(NamedTuple):
    """What attention in one decode step must do, and how fast it can be at most."""

    num_bytes: float  # to read
    operations: float
    seconds: float  # at least
    holds: str  # what takes that long: "reading" or "arithmetic"


def weights_of(transformer: Transformer, block_size: int) -> Weights:
    """The weights of a Llama without biases, row by row."""
    if transformer not in _weights:
        kept, products = step.weights_of(transformer), {}
        for name in ("qkv", "out", "gate_up", "down"):
            ops: Any = [getattr(layer, name) for layer in transformer.layers]
            products[name] = np.stack([step.plain(op.weight) for op in ops])
        for name in ("norm_1", "norm_2"):
            norms = [getattr(layer, name) for layer in transformer.layers]
            products[name] = np.stack([step.norm_weight(norm) for norm in norms])
        head: Any = transformer.head
        _weights[transformer] = Weights(
            **products, head=step.plain(head.weight), norm=kept.norm,
            embedding=kept.embedding, rope=kept.rope, eps=kept.eps, block_size=block_size,
        )  # fmt: skip
    return _weights[transformer]._replace(block_size=block_size)


_weights: WeakKeyDictionary[Transformer, Weights] = WeakKeyDictionary()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="piece")


def in_threads(kernel: Callable, calls: Sequence[tuple]) -> None:
    """Make all calls of a kernel at the same time, the first in this thread. A compiled kernel
    does not hold Python's lock, so they really run side by side."""
    others = [_pool().submit(kernel, *call) for call in calls[1:]]
    kernel(*calls[0])
    for other in others:
        other.result()
