"""Which backend reads quantised K and V: what `EngineConfig.attention` names, and "auto"."""

from minikv.backend import AttentionBackend, MakeBackend
from minikv.config import EngineConfig, ModelConfig
from minikv.cpu.choice import require_float32_on_cpu, require_numba, say_once
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
    """Raises ValueError if the compiled kernels cannot run here, and says what can."""
    store = require_quantised(store)
    name = store.format.name
    require_float32_on_cpu(store.device, store.dtype)
    if name not in COMPILED:
        raise ValueError(
            f"kv_dtype: the compiled kernels read {', '.join(COMPILED)}, was {name!r}; use "
            "attention='torch'"
        )
    require_numba()
    from minikv.quant.compiled import CompiledAttention

    return CompiledAttention(config, store)
