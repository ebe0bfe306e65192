"""Quantised K and V: number formats, a store of codes and scales, and attention over them.

`minikv.assembly` imports this for an engine with a `kv_dtype` or a `kv_memory`. Read `formats`
first, then `store`, `attention` and `oracle`.
"""

import torch

from minikv.backend import AttentionBackend
from minikv.config import ModelConfig
from minikv.paged import KVStore
from minikv.quant.attention import QuantisedAttention, require_quantised
from minikv.quant.formats import KVFormat, Pieces, Shapes, format_of
from minikv.quant.memory import resolve
from minikv.quant.store import QuantisedStore, part_shapes, store_maker

COMPILED = ("bfloat16", "int8", "int4")  # formats that the compiled kernels read

__all__ = [
    "COMPILED", "KVFormat", "Pieces", "QuantisedAttention", "QuantisedStore", "Shapes",
    "compiled_attention", "format_of", "part_shapes", "require_quantised", "resolve",
    "store_maker",
]  # fmt: skip


def compiled_attention(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Over codes, compiled for the CPU. Raises ValueError for a format that the kernels do not
    read, or not beside a model in bfloat16, and ImportError without Numba."""
    name = require_quantised(store).format.name
    if require_quantised(store).open is not None and store.dtype != torch.float32:
        raise ValueError(
            f"kv_dtype: the compiled kernels read {name!r} for models in float32 only, and this "
            f"one is {store.dtype}; use 'int8', or attention='torch'"
        )
    if name not in COMPILED:
        raise ValueError(
            f"kv_dtype: the compiled kernels read {', '.join(COMPILED)}, was {name!r}; use "
            "attention='torch'"
        )
    from minikv.quant.compiled import CompiledAttention  # here, because it needs Numba

    return CompiledAttention(config, store)
