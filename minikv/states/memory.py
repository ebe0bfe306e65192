"""The memory of states: as many equal slots as sequences may run, and some for copies.

    slot    all linear layers' matrices, and the last inputs of their convolutions

A block of K and V is written before it is read, so what was in it does no harm. A state is read
first: each token changes what the one before left. So a slot is zeroed when it is handed out.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from minikv.states.config import HybridConfig


@dataclass(slots=True)
class Counts:
    """Of an engine since it was made; the first two are of now."""

    copies: int = 0  # of states, in the prefix cache
    copied_bytes: int = 0  # that they take
    made: int = 0  # copies that were begun
    used: int = 0  # how often a sequence began with one
    recomputed_tokens: int = 0  # whose K and V the prefix cache had, but no copy behind them


@dataclass
class StateMemory:
    """Allocated once. Pages of it that no sequence ever used take no memory."""

    config: HybridConfig
    dtype: torch.dtype  # of the convolutions' inputs
    num_running: int  # slots for sequences
    num_copies: int  # and for copies
    interval: int  # tokens between copies that are made in any case; 0: none
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        c, num_slots = self.config, self.num_running + self.num_copies
        matrices = num_slots, c.num_linear, c.value_heads, c.key_dim, c.value_dim
        self.matrices = torch.from_numpy(np.zeros(matrices, np.float32))
        inputs = num_slots, c.num_linear, c.width - 1, c.channels
        self.inputs = torch.from_numpy(np.zeros(inputs, np.float32)).to(self.dtype)

    @property
    def num_slots(self) -> int:
        return self.num_running + self.num_copies

    @property
    def slot_bytes(self) -> int:
        return self.config.state_bytes(self.dtype)

    def zero(self, slot: int) -> None:
        """Forget what is in it: the state before a first token."""
        self.matrices[slot].zero_()
        self.inputs[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """The whole state of all layers, at once."""
        self.matrices[target] = self.matrices[source]
        self.inputs[target] = self.inputs[source]
