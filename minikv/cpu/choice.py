"""Which attention backend an engine gets: what `EngineConfig.attention` names, and "auto"."""

import logging
from functools import cache

import torch

from minikv.backend import AttentionBackend, TorchAttention
from minikv.config import ModelConfig
from minikv.paged import KVStore

log = logging.getLogger("minikv")


def automatic(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Triton on CUDA, compiled kernels on a CPU in float32, otherwise PyTorch. If a faster one was
    to be expected, one line in the log says why it is not used."""
    blocks = store.blocks
    try:
        if blocks.device.type == "cuda":
            return triton(config, store)
        if blocks.device.type == "cpu" and blocks.dtype == torch.float32:
            return compiled(config, store)
    except (ImportError, ValueError) as error:
        say_once(f"attention is PyTorch's, which is slower: {error}")
    return TorchAttention(config, store)


def compiled(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ValueError unless the model is in float32 on a CPU and Numba works."""
    require_float32_on_cpu(store.blocks.device, store.blocks.dtype)
    require_numba()
    from minikv.cpu.attention import CpuAttention

    return CpuAttention(config, store)


def triton(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ImportError without Triton."""
    from minikv.gpu.attention import TritonAttention

    return TritonAttention(config, store)


def require_float32_on_cpu(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu" or dtype != torch.float32:
        raise ValueError(
            f"attention: 'cpu' computes float32 on a CPU, and the model is {dtype} on {device}; "
            "leave attention at 'auto'"
        )


def require_numba() -> None:
    problem = numba_problem()
    if problem:
        raise ValueError(
            f"attention: 'cpu' needs Numba, and it does not work here ({problem}); run "
            "`pip install -r requirements.txt`, or leave attention at 'auto'"
        )


@cache
def numba_problem() -> str:
    """Why nothing can be compiled, or "". A compiler that was installed for another NumPy or
    another processor may fail in any way."""
    try:
        import minikv.cpu.kernels  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


@cache
def say_once(message: str) -> None:
    log.warning(message)


BACKENDS = {"auto": automatic, "cpu": compiled, "triton": triton}
