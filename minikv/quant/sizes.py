"""Sizes of memory as people write them."""

import re
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")  # each 1,024 times the one before


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
            f'{name}: must be a number of bytes, as 268435456 or "256 MiB", was {value!r}'
        )
    return int(found[1]) * 1024 ** UNITS.index(found[2])
