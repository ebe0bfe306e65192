"""Steps over groups, compiled for the CPU. A kernel takes a layer's parts, and a table of them."""

from typing import NamedTuple

import numpy as np

from minikv.config import ModelConfig
from minikv.cpu import (
    CompiledSteps,
    CpuAttention,
    answer,
    apart,
    attend,
    dims_of,
    layer_of,
    plain,
    unpacked,
    write_new,
)  # fmt: skip
from minikv.groups.attention import GroupedAttention
from minikv.paged import KVStore


class GroupedKV(NamedTuple):
    """K and V of all layers."""

    parts: np.ndarray  # (layers of a group, num_parts, block_size, 2, K, D)
    part_of: np.ndarray  # (groups, num_blocks)
    group: np.ndarray  # (L,): of a layer
    place: np.ndarray  # (L,): which of its group's layers it is


class LayerKV(NamedTuple):
    """K and V of one layer."""

    parts: np.ndarray  # (num_parts, block_size, 2, K, D)
    part_of: np.ndarray  # (num_blocks,)


class CompiledGroups(CompiledSteps, GroupedAttention):
    """Whole steps in one call, through the tables of the groups."""

    def __init__(self, config: ModelConfig, store: KVStore):
        GroupedAttention.__init__(self, CpuAttention, config, store)
        places = np.array([self.place[layer] for layer in range(config.num_layers)])
        group, place = np.ascontiguousarray(places.T)
        kv = GroupedKV(plain(self.store.blocks), self.store.part_of, group, place)
        self.compile_over(kv, _attend)


def _layer(kv, layer):
    return LayerKV(kv.parts[kv.place[layer]], kv.part_of[kv.group[layer]])


def _write(kv, qkv, slots, kv_head, first, last):
    size = kv.parts.shape[1]
    own = np.empty(last, np.int64)
    for t in range(first, last):
        own[t] = kv.part_of[slots[t] // size] * size + slots[t] % size
    write_new(kv.parts, qkv, own, kv_head, first, last)


@apart
def _attend(packed, layer, q, tables, lens, query_start, window, out, first, last, border):
    """`attend` through a table of parts, filled in where a query looks."""
    kv = layer_of(unpacked(packed), layer)
    size, kv_heads = kv.parts.shape[1], kv.parts.shape[3]
    own = np.empty(tables.shape, np.int64)
    for row in range(first // kv_heads, (last + kv_heads - 1) // kv_heads):
        seen = lens[row] - (query_start[row + 1] - query_start[row]) + 1  # by the first query
        begin = max(seen - window, 0) // size if window > 0 else 0
        for i in range(begin, (lens[row] + size - 1) // size):
            own[row, i] = kv.part_of[tables[row, i]]
    attend(q, kv.parts, own, lens, query_start, window, out, first, last, border)


answer(layer_of, GroupedKV, _layer)
answer(dims_of, LayerKV, lambda kv: (kv.parts.shape[1], kv.parts.shape[3]))
answer(write_new, LayerKV, _write)
