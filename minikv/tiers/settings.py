"""When an engine has tiers, and which of EngineConfig's values for them cannot work."""

import os
from typing import Any

from minikv.config import EngineConfig
from minikv.errors import require_bool
from minikv.quant.settings import parse_bytes
from minikv.runner import Runner


def join(runner: Runner, config: EngineConfig, parts: tuple) -> tuple[Any, tuple]:
    """An engine's tiers, and its parts (the classes, and the policy) joined to them; None and the
    same parts for an engine that has host memory to swap to, but no prefix cache. Raises
    ValueError, naming the argument, for what cannot work."""
    check_settings(config)
    if not config.prefix_cache:
        return None, parts
    from minikv.tiers.joined import joined  # here, because these import much
    from minikv.tiers.tiers import Tiers

    tiers = Tiers(runner, config)
    return tiers, joined(tiers, *parts)


def check_settings(config: EngineConfig) -> None:
    parse_bytes("disk_bytes", config.disk_bytes)
    require_bool("write_through", config.write_through)
    if config.disk_path is not None and not isinstance(config.disk_path, str | os.PathLike):
        raise ValueError(f"disk_path: must be a folder's path, was {config.disk_path!r}")
    if config.store is not None and not isinstance(config.store, str):
        raise ValueError("store: must be the URL of a server, such as redis://127.0.0.1:6379/0")
    below = config.disk_path is not None or config.store is not None or config.write_through
    if below and not (config.host_blocks and config.prefix_cache):
        raise ValueError(
            "disk_path, store, write_through: these need host_blocks, through which blocks come "
            f"back, and prefix_cache, which finds them; host_blocks was {config.host_blocks}, "
            f"prefix_cache {config.prefix_cache}"
        )
