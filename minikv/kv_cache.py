"""The first two KV caches: one that grows by concatenation, one written in place.

Chapter 02. Both hold one sequence. Each is an `attend` function for the model:
it keeps the new tokens' K and V, then attends over all that it has kept.
"""

import torch

from minikv.attention import naive_attention
from minikv.config import ModelConfig


class ConcatCache:
    """Appends by `torch.cat`: every step copies all that came before, so n steps copy O(n^2)."""

    def __init__(self, config: ModelConfig):
        self.windows = config.windows
        self.k: list[torch.Tensor | None] = [None] * config.num_layers  # (L, K, D) each
        self.v: list[torch.Tensor | None] = [None] * config.num_layers

    @property
    def num_tokens(self) -> int:
        return 0 if self.k[-1] is None else len(self.k[-1])

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """q (T, H, D), k, v (T, K, D) of the T tokens after the cached ones -> (T, H, D).

        Appends to this layer's entry of `k` and `v`, None at first, and attends over all that is
        kept. `windows` has each layer's sliding window, or None.
        """
        if self.k[layer] is not None:
            k = torch.cat([self.k[layer], k])  # (L + T, K, D)
            v = torch.cat([self.v[layer], v])
        self.k[layer], self.v[layer] = k, v
        return naive_attention(q, k, v, self.windows[layer])


class PreallocatedCache:
    """Writes in place into storage for `capacity` tokens, all reserved at the start."""

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):  # fmt: skip
        shape = (config.num_layers, 2, capacity, config.num_kv_heads, config.head_dim)
        self.kv = torch.empty(shape, dtype=dtype, device=device)  # [:, 0] holds k, [:, 1] v
        self.windows = config.windows
        self.capacity = capacity
        self.num_tokens = 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """q (T, H, D), k, v (T, K, D) of the T tokens after the cached ones -> (T, H, D).

        Writes them into the slots after the first `num_tokens`, the same ones in every layer, and
        attends over all slots written so far. The last layer of a pass, and no other, moves
        `num_tokens`. A slot that was never written may hold NaN. `windows` has each layer's
        sliding window, or None. Raises ValueError if the T tokens do not fit, and then changes
        nothing.
        """
        start, end = self.num_tokens, self.num_tokens + len(k)
        if end > self.capacity:
            raise ValueError(f"capacity is {self.capacity} tokens, {end} are needed")
        self.kv[layer, 0, start:end] = k
        self.kv[layer, 1, start:end] = v
        if layer == len(self.kv) - 1:  # every layer has written: the tokens are in
            self.num_tokens = end
        return naive_attention(
            q, self.kv[layer, 0, :end], self.kv[layer, 1, :end], self.windows[layer]
        )
