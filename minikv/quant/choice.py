"""Which backend reads quantised K and V: what `EngineConfig.attention` names, and "auto"."""

import torch

from minikv.backend import AttentionBackend, MakeBackend
from minikv.config import EngineConfig, ModelConfig
from minikv.cpu.choice import numba_problem, say_once
from minikv.paged import KVStore
from minikv.quant.attention import QuantisedAttention, require_quantised

COMPILED = ("bfloat16", "int8", "int4")  # formats that the compiled kernels read


def quantised_backend(config: EngineConfig) -> MakeBackend:
    """The backend that `config.attention` names, for a `QuantisedStore`."""
    return {
        "auto": automatic, "cpu": compiled, "torch": QuantisedAttention, "triton": triton,
    }[config.attention]  # fmt: skip


def automatic(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Triton on CUDA, compiled kernels on a CPU in float32, otherwise PyTorch."""
    try:
        on_cuda = require_quantised(store).device.type == "cuda"
        return triton(config, store) if on_cuda else compiled(config, store)
    except (ImportError, ValueError) as error:
        say_once(f"attention is PyTorch's, which is slower: {error}")
    return QuantisedAttention(config, store)


def triton(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ImportError without Triton."""
    from minikv.gpu.codes import TritonCodes

    return TritonCodes(config, store)


def compiled(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ValueError where the compiled kernels cannot run, and says what can."""
    store = require_quantised(store)
    name = store.format.name
    if store.device.type != "cpu" or store.dtype != torch.float32:
        raise ValueError(
            f"attention: 'cpu' computes float32 on a CPU, and the model is {store.dtype} on "
            f"{store.device}; leave attention at 'auto'"
        )
    if name not in COMPILED:
        raise ValueError(
            f"kv_dtype: the compiled kernels read {', '.join(COMPILED)}, was {name!r}; use "
            "attention='torch'"
        )
    problem = numba_problem()
    if problem:
        raise ValueError(
            f"attention: 'cpu' needs Numba, and it does not work here ({problem}); run "
            "`pip install -r requirements.txt`, or leave attention at 'auto'"
        )
    from minikv.quant.compiled import CompiledAttention

    return CompiledAttention(config, store)
