"""Attention sinks: the first tokens are kept beside the window, at positions inside the cache.

StreamingLLM (Xiao et al., 2023). Many models put spare attention on their first tokens. When a
plain window loses these tokens, the text falls apart.
"""

import torch
from torch import Tensor

from minikv.config import ModelConfig
from minikv.errors import require_int
from minikv.ring.attention import in_window, merged_attention
from minikv.ring.shift import turn
from minikv.ring.window import RollingCache


class SinkCache(RollingCache):
    """One sequence: its first `num_sinks` tokens beside the last `window`.

    Positions are those inside the cache: for a query the sinks stand right before the window. RoPE
    depends on distances only, so K is turned only once; for the sinks, the query is turned back to
    num_sinks + window - 1, the cache's last position. A ring that keeps `num_sinks` tokens and
    discards 1 at a time computes the same, but turns all keys for each token.
    """

    def __init__(self, config: ModelConfig, num_sinks: int, window: int):
        super().__init__(config, window)
        self.num_sinks = require_int("num_sinks", num_sinks, 1)
        self.window = window
        self.frequencies = config.inverse_frequencies()
        shape = (config.num_layers, 2, num_sinks, config.num_kv_heads, config.head_dim)
        self.sinks = torch.zeros(shape)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.sinks.nbytes

    def attend_over(
        self, layer: int, q: Tensor, queries: Tensor, k: Tensor, v: Tensor, positions: Tensor
    ) -> Tensor:
        """As in `RollingCache`, with the sinks that have left the window."""
        sink_k, sink_v = self.sinks[layer].to(k.dtype)  # (S, K, D) each
        sinks = torch.arange(self.num_sinks)
        is_near = in_window(queries, positions, self.window)  # (T, N)
        is_far = queries[:, None] - sinks >= self.window  # (T, S)
        visible = torch.cat([is_near, is_far], 1).to(q.device)  # (T, N + S)
        inside = queries.clamp(max=self.num_sinks + self.window - 1)  # (T,)
        k, v = torch.cat([k, sink_k]), torch.cat([v, sink_v])
        far_q = turn(q, (inside - queries).to(q.device), self.frequencies)
        from_window = torch.arange(len(k), device=q.device) < len(positions)
        return merged_attention((q, k), (far_q, k), v, from_window, visible)

    def write(self, positions: Tensor) -> None:
        first = positions[positions < self.num_sinks]
        for sinks, chunk in zip(self.sinks, self._chunk, strict=True):
            sinks[:, first] = chunk[:, : len(first)].to(sinks.dtype)
        super().write(positions)
