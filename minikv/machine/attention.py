"""Which attention an engine gets: the one that its configuration names, or the fastest one here.

Each wing is imported only when it is needed, for Numba and Triton may be missing.
"""

import logging
from functools import cache, partial

import torch

from minikv.backend import AttentionBackend, MakeBackend, TorchAttention
from minikv.config import EngineConfig, ModelConfig
from minikv.paged import KVStore

log = logging.getLogger("minikv")

COMPILED = torch.float32, torch.bfloat16  # what kernels for a CPU compute


def backend_of(config: EngineConfig, kind: str) -> MakeBackend:
    """The backend that `config.attention` names, for K and V of a kind."""
    make = {"auto": automatic, "cpu": compiled, "torch": plain, "triton": triton}
    return partial(make[config.attention], kind)


def automatic(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Triton on CUDA, compiled kernels on a CPU in float32 or bfloat16, otherwise PyTorch. If a
    faster one was to be expected, one line in the log says why it is not used."""
    try:
        if store.device.type == "cuda":
            return triton(kind, config, store)
        if kind == "codes" or (store.device.type == "cpu" and store.dtype in COMPILED):
            return compiled(kind, config, store)
    except (ImportError, ValueError) as error:
        say_once(f"attention is PyTorch's, which is slower: {error}")
    return plain(kind, config, store)


def plain(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    if kind == "codes":
        from minikv.quant import QuantisedAttention

        return QuantisedAttention(config, store)
    if kind == "groups":
        from minikv.groups import GroupedAttention

        return GroupedAttention(TorchAttention, config, store)
    return TorchAttention(config, store)


def triton(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ImportError without Triton."""
    from minikv.gpu import triton_attention

    return triton_attention(kind, config, store)


def compiled(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ValueError, saying what to do, unless the model is in float32 or bfloat16 on a CPU and
    Numba works."""
    if store.device.type != "cpu" or store.dtype not in COMPILED:
        raise ValueError(
            f"attention: 'cpu' computes float32 and bfloat16 on a CPU, and the model is "
            f"{store.dtype} on {store.device}; leave attention at 'auto'"
        )
    if problem := numba_problem():
        raise ValueError(
            f"attention: 'cpu' needs Numba, and it does not work here ({problem}); run "
            "`pip install -r requirements.txt`, or leave attention at 'auto'"
        )
    if kind == "plain":
        from minikv.cpu import CpuAttention

        return CpuAttention(config, store)
    if kind == "groups":
        from minikv.groups import compiled_attention
    else:
        from minikv.quant import compiled_attention
    return compiled_attention(config, store)


@cache
def numba_problem() -> str:
    """Why nothing can be compiled, or "". A compiler that was installed for another NumPy or
    another processor may fail in any way."""
    try:
        import minikv.cpu  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


@cache
def say_once(message: str) -> None:
    log.warning(message)
