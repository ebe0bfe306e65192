"""The shape of a model whose layers are partly linear."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from minikv.config import ModelConfig


@dataclass(frozen=True)
class HybridConfig(ModelConfig):
    """A Qwen3.5 without pictures. `windows`, and what else is about K and V, is of the layers that
    attend."""

    keeps_states: ClassVar[bool] = True
    norm_offset: ClassVar[float] = 1.0

    is_linear: tuple[bool, ...]  # of each layer
    key_heads: int  # of a linear layer, and as many of queries
    value_heads: int  # as many states; a key head serves several
    key_dim: int
    value_dim: int
    width: int  # of the convolution, in tokens
    rotary_dim: int  # channels of a head that RoPE turns

    @property
    def num_linear(self) -> int:
        return sum(self.is_linear)

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one sequence's states, of any length: in each linear layer a matrix for each
        value head in float32, and the convolution's last inputs."""
        matrices = self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return self.num_linear * (matrices + (self.width - 1) * self.channels * dtype.itemsize)

    def inverse_frequencies(self) -> torch.Tensor:
        """(head_dim / 2,): 0, which turns nothing, behind the channels that RoPE turns."""
        plain = replace(self, head_dim=self.rotary_dim)
        turned = ModelConfig.inverse_frequencies(plain)
        return F.pad(turned, (0, (self.head_dim - self.rotary_dim) // 2))
