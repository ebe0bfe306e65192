"""What the kernels of chapter 09 are given: how they are compiled, the weights, and threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from minikv.cpu.kernels import FASTMATH
from minikv.fast import FastRMSNorm
from minikv.model import Transformer

# As the engine's own kernels, but not kept on disk: your file changes all the time, and what is
# kept is found again by its name and its line.
compiled = njit(nogil=True, fastmath=FASTMATH, error_model="numpy")


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


def weights_of(transformer: Transformer, block_size: int) -> Weights:
    """The weights of a Llama without biases, on a CPU in float32. It is a copy: PyTorch's faster
    products keep theirs in a layout of their own."""

    def plain(linear: Any) -> torch.Tensor:
        return linear.weight.to_dense() if linear.weight.is_mkldnn else linear.weight

    def norm(one: Any) -> torch.Tensor:
        return one.weight / len(one.weight) ** 0.5 if isinstance(one, FastRMSNorm) else one.weight

    def of_all(name: str, weight: Callable[[Any], torch.Tensor]) -> np.ndarray:
        return torch.stack([weight(getattr(layer, name)) for layer in transformer.layers]).numpy()

    return Weights(
        embedding=transformer.embedding.numpy(),
        norm_1=of_all("norm_1", norm), qkv=of_all("qkv", plain), out=of_all("out", plain),
        norm_2=of_all("norm_2", norm), gate_up=of_all("gate_up", plain),
        down=of_all("down", plain),
        norm=norm(transformer.norm).numpy(),
        head=plain(transformer.head).contiguous().numpy(),
        rope=transformer.rope_table.numpy(),
        eps=np.float32(transformer.config.rms_norm_eps),
        block_size=block_size,
    )  # fmt: skip


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
