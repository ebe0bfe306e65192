"""The K-shift: a key that moves by n positions is turned by n more angles.

RoPE turns a key at position p by p times each channel pair's frequency, and two turns add up. So
K need not be computed again when its position changes. V is never turned.
"""

import torch

from minikv.model import rotate


def turn(k: torch.Tensor, deltas: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Keys turned as if each had stood `deltas` positions later (earlier, if negative).

    k (..., N, K, D); deltas (N,) int64; frequencies (D / 2,), of `config.inverse_frequencies()`.
    Returns the shape and dtype of k. Computed in float32, so that half precision is rounded only
    once; the angles are float64, because large deltas have no digits to spare.
    """
    angles = deltas.double()[:, None] * frequencies.double().to(deltas.device)  # (N, D / 2)
    cos, sin = angles.cos().float(), angles.sin().float()
    cos = torch.cat([cos, cos], -1)[:, None]  # (N, 1, D)
    sin = torch.cat([-sin, sin], -1)[:, None]  # (N, 1, D)
    return rotate(k.float(), cos, sin).to(k.dtype)
