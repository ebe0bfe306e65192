"""Which values `EngineConfig.kv_dtype` and `kv_memory` may have."""

import re
from typing import Any

from minikv.errors import require_one_of

KV_DTYPES = ("auto", "float16", "bfloat16", "int8", "int4", "fp8")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")  # each 1,024 times the one before


def check_settings(kv_dtype: Any, kv_memory: Any) -> None:
    """Raises ValueError, naming the argument, for a value that does not exist."""
    require_one_of("kv_dtype", kv_dtype, KV_DTYPES)
    if kv_memory is not None:
        parse_bytes("kv_memory", kv_memory)


def parse_bytes(name: str, value: Any) -> int:
    """The number of bytes that "256 MiB" or an int means. Raises ValueError, naming the argument,
    for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = (
        re.fullmatch(rf"([1-9]\d*) ?({'|'.join(UNITS)})", value) if isinstance(value, str) else None
    )
    if found is None:
        raise ValueError(
            f'{name}: must be a number of bytes, such as 268435456 or "256 MiB", was {value!r}'
        )
    return int(found[1]) * 1024 ** UNITS.index(found[2])
