"""Chapter 03: what its exercises are given. No exercise is answered here."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Shape:
    """What the KV cache of a model depends on."""

    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    latent_dim: int = 0  # numbers per token and layer of multi-head latent attention; else 0


class SlotUse(NamedTuple):
    """What the slots of a request hold. `future` is wasted for now, `internal` for good."""

    used: int  # hold K and V of a token
    future: int  # reserved, and still to be used by this request
    internal: int  # internal fragmentation: reserved, and never used


class NoHole(Exception):
    """No hole is large enough, even if all of them together would be. Nothing was changed."""

    def __init__(self, needed: int, largest: int, free: int):
        super().__init__(f"{needed} are needed; {free} are free, at most {largest} in one piece")
        self.needed, self.largest, self.free = needed, largest, free
