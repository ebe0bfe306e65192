"""Which values EngineConfig's `disk_path`, `disk_bytes` and `write_through` may have."""

import os
from typing import Any

from minikv.errors import require_bool
from minikv.quant.settings import parse_bytes


def check_settings(config: Any) -> None:
    """Raises ValueError, naming the argument, for what cannot work."""
    parse_bytes("disk_bytes", config.disk_bytes)
    require_bool("write_through", config.write_through)
    if config.disk_path is not None and not isinstance(config.disk_path, str | os.PathLike):
        raise ValueError(f"disk_path: must be a folder's path, was {config.disk_path!r}")
    if not (config.host_blocks and config.prefix_cache):
        raise ValueError(
            "disk_path, write_through: blocks go to the disk by way of the host, and are found by "
            f"the prefix cache; host_blocks was {config.host_blocks}, prefix_cache "
            f"{config.prefix_cache}"
        )
