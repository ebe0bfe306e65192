"""From a block to its part: a backend that knows nothing of groups is asked once for each."""

from dataclasses import replace

import torch

from minikv.backend import AttentionBackend, MakeBackend
from minikv.batch import Batch
from minikv.config import ModelConfig
from minikv.groups.layout import GroupedStore
from minikv.model import Attend
from minikv.paged import KVStore


class GroupedAttention(AttentionBackend):
    """Attention of a model with groups, by a backend for one group."""

    store: GroupedStore

    def __init__(self, make: MakeBackend, config: ModelConfig, store: KVStore):
        if not isinstance(store, GroupedStore):
            raise ValueError(f"store: must be a GroupedStore, was {type(store).__name__}")
        self.store, groups = store, store.layout.groups
        self.place = {  # layer: (its group, which of the group's layers it is)
            layer: (group, i)
            for group, layers in enumerate(groups)
            for i, layer in enumerate(layers)
        }
        layers, windows = len(groups[0]), [store.layout.window_of(i) for i in range(len(groups))]
        of_window = {
            window: make(replace(config, num_layers=layers, windows=(window,) * layers), store)
            for window in set(windows)
        }
        self.backends = [of_window[window] for window in windows]
        self.part_of = torch.from_numpy(store.part_of)  # (groups, num_blocks), the same memory

    def bind(self, batch: Batch) -> Attend:
        """The `attend` of this batch. A block without a part in a group is behind the window of all
        queries; its place in the group's table is filled with part 0, which is masked."""
        size = self.store.block_size
        blocks, offsets = batch.slot_mapping // size, batch.slot_mapping % size
        attends: list[Attend] = []
        for backend, part_of in zip(self.backends, self.part_of, strict=True):
            tables = part_of[batch.block_tables].clamp(min=0)
            slots = part_of[blocks] * size + offsets
            attends.append(backend.bind(replace(batch, block_tables=tables, slot_mapping=slots)))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            group, i = self.place[layer]
            return attends[group](i, q, k, v)

        return attend
