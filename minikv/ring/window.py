"""Sliding window in a rolling buffer: the token at a position lies in cell position mod W.

Mistral 7B (Jiang et al., 2023). A cell is overwritten when its token has left every later
window, so memory stays at W tokens per layer. Layers without a window keep all tokens: a model
that has both kinds gets buffers of two sizes.
"""

from collections.abc import Sequence

import torch

from minikv.config import ModelConfig
from minikv.errors import require_int
from minikv.language_model import LanguageModel
from minikv.ring.attention import in_window, masked_attention


class RollingCache:
    """One sequence. A layer with a window of W has W cells, one without has `num_tokens_max`.

    window: for every layer; without it each layer has the model's own.
    num_tokens_max: how long the sequence may become, for the layers without a window.
    """

    def __init__(
        self,
        config: ModelConfig,
        window: int | None = None,
        num_tokens_max: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if window is None:
            self.windows = config.windows
        else:
            self.windows = (require_int("window", window, 1),) * config.num_layers
        if num_tokens_max is not None:
            require_int("num_tokens_max", num_tokens_max, 1)
        elif None in self.windows:
            raise ValueError("num_tokens_max: must be given, for some layers have no window")
        self.num_tokens_max = num_tokens_max
        self.num_tokens = 0
        self.sizes = [window or num_tokens_max or 0 for window in self.windows]  # cells per layer
        token = (config.num_kv_heads, config.head_dim)
        self.kv = [
            torch.zeros(2, size, *token, dtype=dtype, device=device) for size in self.sizes
        ]  # (2, W, K, D) each
        self._chunk: list[torch.Tensor] = []  # K and V of the step, (2, T, K, D) per layer

    @property
    def num_bytes(self) -> int:
        return sum(kv.nbytes for kv in self.kv)

    @property
    def chunk_size(self) -> int:
        """The most tokens in one step: those of the smallest buffer."""
        return min(self.sizes)

    def held(self, size: int) -> torch.Tensor:
        """The positions in the used cells of a buffer of `size`: cell c of a full one holds the
        last position before `num_tokens` that is c modulo `size`."""
        last = self.num_tokens - 1
        cell = torch.arange(min(size, self.num_tokens))
        return last - (last - cell) % size

    @torch.inference_mode()
    def append(self, lm: LanguageModel, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each of the next T tokens, (T, vocab_size) float32; T as large as it likes.

        Runs in chunks. All or nothing within a chunk: a buffer is written when all layers are done.
        """
        total = self.num_tokens + len(token_ids)
        limit = min(self.num_tokens_max or total, lm.config.max_context)
        if not self.num_tokens < total <= limit:
            raise ValueError(
                f"token_ids: must be 1 to {limit - self.num_tokens} tokens, was {len(token_ids)}"
            )
        size = self.chunk_size
        chunks = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
        return torch.cat([lm.logits(chunk, self) for chunk in chunks])

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """q (T, H, D), k, v (T, K, D) of the next T tokens, at most `chunk_size` -> (T, H, D).

        Attends over the buffer and the chunk together: the chunk's own tokens would overwrite
        what its first queries still see. After the last layer the chunk is written.
        """
        if layer == 0:
            self._chunk = []
        self._chunk.append(torch.stack([k, v]))
        new = torch.arange(self.num_tokens, self.num_tokens + len(k))  # positions of the chunk
        old = self.held(self.sizes[layer])  # (N,), N <= W
        keys, values = torch.cat([self.kv[layer][:, : len(old)].to(k.dtype), self._chunk[layer]], 1)
        out = self.attend_over(layer, q, new, keys, values, torch.cat([old, new]))
        if layer == len(self.kv) - 1:
            self.write(new)
        return out

    def attend_over(
        self,
        layer: int,
        q: torch.Tensor,
        queries: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """q (T, H, D) at positions queries (T,), over k, v (N, K, D) at positions (N,)
        -> (T, H, D)."""
        visible = in_window(queries, positions, self.windows[layer])  # (T, N)
        return masked_attention(q, k, v, visible.to(q.device))

    def write(self, positions: torch.Tensor) -> None:
        """Keep the chunk, whose tokens stand at these positions, in the buffers, in their dtype;
        `_chunk` is empty afterwards, so that nothing holds its memory."""
        for kv, chunk in zip(self.kv, self._chunk, strict=True):
            kv[:, positions % kv.shape[1]] = chunk.to(kv.dtype)
        self.num_tokens += len(positions)
        self._chunk = []
