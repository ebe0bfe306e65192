"""Which layers share a part of a block, and the memory of all parts."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from minikv.config import ModelConfig
from minikv.paged import KVStore


@dataclass(frozen=True)
class Layout:
    """Groups of equal size, those that see everything first. All window groups have one window."""

    groups: tuple[tuple[int, ...], ...]  # the layers of each
    num_full: int  # groups at the front that see everything
    window: int  # of the others, in tokens

    def window_of(self, group: int) -> int | None:
        return None if group < self.num_full else self.window


def layout_of(config: ModelConfig) -> Layout | None:
    """The groups of a model; None if one group is all that helps: no layer has a window below the
    model's context, or windows differ.

    As many layers as possible are in a group, so that there are few parts: the greatest common
    divisor of the number of layers with and without a window. (With 22 and 4 of them: 2.)
    """
    full = [i for i, window in enumerate(config.windows) if window is None]
    windowed = [i for i, window in enumerate(config.windows) if window is not None]
    windows = {config.windows[i] for i in windowed}
    if len(windows) != 1 or not 0 < (window := windows.pop() or 0) < config.max_context:
        return None
    size = math.gcd(len(full), len(windowed))
    cut = [layers[i : i + size] for layers in (full, windowed) for i in range(0, len(layers), size)]
    return Layout(tuple(map(tuple, cut)), len(full) // size, window)


class GroupedStore(KVStore):
    """K and V of every part: one tensor (layers of a group, num_parts, block_size, 2, K, D).

    It has the bytes of a plain store of `num_blocks` blocks. `part_of[group, block_id]` is a part,
    or -1 where the block has none; a pool writes it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        layout = layout_of(config)
        if layout is None:
            raise ValueError(f"config: layers with windows {config.windows} make one group")
        self.layout, self.num_parts = layout, num_blocks * len(layout.groups)
        layers = len(layout.groups[0])
        one = replace(config, num_layers=layers, windows=(None,) * layers)
        super().__init__(one, self.num_parts, block_size, device, dtype)
        self.bytes_per_token = config.kv_bytes_per_token(dtype)
        # More blocks than these can never have a part for each full group. If all groups have
        # windows, blocks outlive their parts: four times as many ids as parts.
        num_ids = self.num_parts // layout.num_full if layout.num_full else 4 * self.num_parts
        self.part_of = np.full((len(layout.groups), num_ids), -1)
        self.copies: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of blocks, as parts

    def num_free(self, pool: Any) -> int:
        return pool.num_whole

    def num_cached(self, cache: Any) -> int:
        """Parts that may be taken at any time do not count: they are free."""
        return cache.pool.num_parts_of(cache.block_ids()) // len(self.layout.groups)

    def copy_to(self, other: KVStore, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) within this store: the parts that they had when the copy was
        planned, because the source may have been given back since then."""
        if pairs:
            planned = [self.copies.pop(pair) for pair in dict.fromkeys(pairs)]
            super().copy_to(other, [parts for one in planned for parts in one])
