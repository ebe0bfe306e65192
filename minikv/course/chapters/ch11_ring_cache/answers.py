"""Chapter 11: the other way to let a key move, a ring whose keys are turned when they are read."""

from collections.abc import Sequence

import torch

from minikv.model import Attend
from minikv.ring import RingCache, shift
from minikv.ring.attention import masked_attention


class UnturnedRing(RingCache):
    """A ring that keeps K as it is before RoPE. A move changes a position, and no key.

    `self.k` (layers, cells, K, D) is allocated by `RingCache`, in the cache's dtype, and
    `self.positions` says where each cell stands. `shift.turn(k, deltas, frequencies)` is exercise
    11.2: k (N, K, D), deltas (N,) int64.
    """

    @property
    def frequencies(self) -> torch.Tensor:
        """(D / 2,), the angle per position of each pair of channels."""
        return self.config.inverse_frequencies()

    def store(self, layer: int, cells: Sequence[int], k: torch.Tensor) -> None:
        """Keep the keys of new tokens, k (T, K, D), in these cells of a layer.

        The model has turned each key to the position of its cell. What is kept is not turned: the
        key as it would be at position 0.
        """
        positions = torch.tensor([self.positions[cell] for cell in cells])
        self.k[layer, cells] = shift.turn(k.float(), -positions, self.frequencies).to(self.k.dtype)

    def keys(self, layer: int, num_read: int) -> torch.Tensor:
        """The keys of the first `num_read` cells, turned to where their cells stand now:
        (num_read, K, D) float32. A free cell may hold anything that is finite.

        Changes nothing that is kept. Keys of a cache in half precision are turned as float32, so
        that they are rounded once, when they are stored.
        """
        positions = torch.tensor(self.positions[:num_read])
        return shift.turn(self.k[layer, :num_read].float(), positions, self.frequencies)

    def apply_shifts(self) -> int:
        """What `RingCache` does before a step to the cells that have moved. Returns how many keys
        were turned; afterwards all of `self.shifts` are 0."""
        self.shifts = [0] * self.num_cells
        return 0

    def bind(self, cells: Sequence[int]) -> Attend:
        """The `attend` of one step whose tokens lie in `cells`, by `store` and `keys`."""
        num_read = self.num_read
        visible = {window: self.visible(cells, window) for window in set(self.windows)}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            self.store(layer, cells, k)
            self.v[layer, cells] = v.to(self.v.dtype)
            keys, values = self.keys(layer, num_read), self.v[layer, :num_read]
            return masked_attention(q, keys, values, visible[self.windows[layer]])

        return attend
