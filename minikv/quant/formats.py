"""Numbers in 16, 8 and 4 bits: pure functions on tensors, each with its error bound.

A *vector format* encodes vectors: what comes in is (..., D), and out come named pieces, the codes
and what is needed to read them. Formats with a scale choose it for each vector, or for each group
of its channels:

    int8   x^ = scale code                codes -127 … 127, scale = max |x| / 127
    int4   x^ = low + scale code          codes 0 … 15, low = min x, scale = (max x - low) / 15
    fp8    x^ = scale code                codes are floats of 8 bits (e4m3), scale = max |x| / 448

Rounding to the nearest code moves a number by at most half the distance between two codes:

    |x - x^| <= scale / 2                                    int8, int4
    |x - x^| <= max(2^-4 |x|, 2^-10 scale)                   fp8: 3 bits behind the leading one
    |x - x^| <= max(2^-11 |x|, 2^-25), for |x| < 65,520      float16
    |x - x^| <= 2^-8 |x|                                     bfloat16

For int8 and int4 this holds only if no number lies outside the codes' range, and if the codes are
computed with the scale that is stored. Scales are stored as bfloat16, so `scale` is rounded up and
`low` is rounded down before the codes are computed. The bound then holds up to the rounding of
float32.

NaN and infinity stay visible. They make the scale NaN or infinite, and then every number of its
group reads as NaN, but no other number does. int4 needs max x - min x to be finite, too. float16
turns 65,520 and more into infinity.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Pieces = dict[str, torch.Tensor]  # by name: "codes", and perhaps "scale" and "low"
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of each piece, without leading dimensions


def round_up(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not below x."""
    near = x.bfloat16()
    return torch.where(near < x, torch.nextafter(near, torch.full_like(near, torch.inf)), near)


def round_down(x: torch.Tensor) -> torch.Tensor:
    """The largest bfloat16 that is not above x."""
    return -round_up(-x)


def quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D), floats of any dtype -> codes (..., D) int8 and scale (...) bfloat16, with x near
    scale * code. Computed in float32.

    Symmetric: 0 stays 0, and the codes -127 and 127 are equally far from it. |x - x^| <= scale / 2.
    A vector of zeros has scale 0 and codes 0.

    Worked example: x = [-254, 100.2, 2.2] has scale 2 and codes [-127, 50, 1].
    """
    scale = round_up(x.float().abs().amax(-1) / 127)
    step = scale.float().clamp_min(TINY)[..., None]  # a vector of zeros has scale 0
    return (x / step).nan_to_num(0, 0, 0).round().to(torch.int8), scale


def dequantise_int8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes (..., D), scale (...) -> (..., D) float32: [-127, 50, 1] and 2 -> [-254, 100, 2]."""
    return codes.float() * scale.float()[..., None]


def quantise_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (..., D) -> codes (..., D) uint8 from 0 to 15, scale (...) and low (...) bfloat16.

    Asymmetric: the 16 codes cover what is there, from the least number to the greatest, wherever
    0 is. x is near low + scale * code, and |x - x^| <= scale / 2.
    """
    x = x.float()
    low = round_down(x.amin(-1))
    scale = round_up((x.amax(-1) - low.float()) / 15)
    step = scale.float().clamp_min(TINY)[..., None]
    codes = ((x - low.float()[..., None]) / step).nan_to_num(0, 0, 0).round().clamp(0, 15)
    return codes.to(torch.uint8), scale, low


def dequantise_int4(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """codes (..., D), scale and low (...) -> (..., D) float32."""
    return low.float()[..., None] + codes.float() * scale.float()[..., None]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of 4 bits per byte: codes (..., D) uint8 -> (..., D / 2) uint8.

    Channel i is in the low half of byte i, channel i + D / 2 in the high half: each half of the
    channels is contiguous when it is unpacked.

    Worked example: [1, 2, 3, 4] -> [3 * 16 + 1, 4 * 16 + 2] = [49, 66].
    """
    low, high = codes.chunk(2, -1)
    return low | high << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """(..., D / 2) uint8 -> codes (..., D) uint8: [49, 66] -> [1, 2, 3, 4]."""
    return torch.cat([packed & 15, packed >> 4], -1)


TINY = 1e-38  # in place of a scale of 0, as a divisor


class VectorFormat(Protocol):
    """How vectors are stored."""

    def shapes(self, dim: int) -> Shapes:
        """What a vector of `dim` numbers is stored in."""
        ...

    def encode(self, x: torch.Tensor) -> Pieces:
        """x (..., D) -> pieces, each (..., its shape)."""
        ...

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Pieces -> (..., D) float32."""
        ...


@dataclass(frozen=True)
class Half:
    """float16 or bfloat16: rounded, without a scale."""

    dtype: torch.dtype

    def shapes(self, dim: int) -> Shapes:
        return {"codes": ((dim,), self.dtype)}

    def encode(self, x: torch.Tensor) -> Pieces:
        return {"codes": x.to(self.dtype)}

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return pieces["codes"].float()


class Int8:
    """8 bits and one scale per vector."""

    def shapes(self, dim: int) -> Shapes:
        return {"codes": ((dim,), torch.int8), "scale": ((), torch.bfloat16)}

    def encode(self, x: torch.Tensor) -> Pieces:
        codes, scale = quantise_int8(x)
        return {"codes": codes, "scale": scale}

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantise_int8(pieces["codes"], pieces["scale"])


class Fp8:
    """Floats of 8 bits (e4m3: 4 of exponent, 3 of mantissa) and one scale per vector.

    The codes are stored as uint8, which every device can index.
    """

    def shapes(self, dim: int) -> Shapes:
        return {"codes": ((dim,), torch.uint8), "scale": ((), torch.bfloat16)}

    def encode(self, x: torch.Tensor) -> Pieces:
        scale = round_up(x.float().abs().amax(-1) / LARGEST_FP8)
        codes = (x / scale.float().clamp_min(TINY)[..., None]).nan_to_num(0, 0, 0)
        codes = codes.clamp(-LARGEST_FP8, LARGEST_FP8)
        return {"codes": codes.to(torch.float8_e4m3fn).view(torch.uint8), "scale": scale}

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = pieces["codes"].view(torch.float8_e4m3fn)
        return codes.float() * pieces["scale"].float()[..., None]


LARGEST_FP8 = 448.0


@dataclass(frozen=True)
class Int4:
    """4 bits, and a scale and a zero point for each group of at most `group` channels."""

    group: int = 32

    def groups(self, dim: int) -> int:
        """The number of groups that `dim` channels are cut into: equal ones, as large as
        allowed."""
        return next(dim // size for size in range(min(self.group, dim), 0, -1) if dim % size == 0)

    def shapes(self, dim: int) -> Shapes:
        ends = (self.groups(dim),), torch.bfloat16
        return {"codes": ((dim // 2,), torch.uint8), "scale": ends, "low": ends}

    def encode(self, x: torch.Tensor) -> Pieces:
        grouped = x.unflatten(-1, (self.groups(x.shape[-1]), -1))  # (..., groups, channels of one)
        codes, scale, low = quantise_int4(grouped)
        return {"codes": pack(codes.flatten(-2)), "scale": scale, "low": low}

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale, low = pieces["scale"], pieces["low"]
        codes = unpack(pieces["codes"]).unflatten(-1, (scale.shape[-1], -1))
        return dequantise_int4(codes, scale, low).flatten(-2)


class Int4ByChannel:
    """4 bits, and a scale and a zero point for each channel of a block: what KIVI does to keys.

    A few channels of K are large in all tokens, so the numbers of one channel are more alike than
    those of one token (Liu et al., 2024). The "vector" is a whole block of one head here,
    (..., block_size, D), so it can be encoded only when the block's last token is there.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size

    def shapes(self, dim: int) -> Shapes:
        ends = (dim,), torch.bfloat16
        return {
            "codes": ((self.block_size, dim // 2), torch.uint8), "scale": ends, "low": ends,
        }  # fmt: skip

    def encode(self, x: torch.Tensor) -> Pieces:
        codes, scale, low = quantise_int4(x.transpose(-1, -2))
        return {"codes": pack(codes.transpose(-1, -2)), "scale": scale, "low": low}

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = unpack(pieces["codes"]).transpose(-1, -2)
        return dequantise_int4(codes, pieces["scale"], pieces["low"]).transpose(-1, -2)


@dataclass(frozen=True)
class KVFormat:
    """How K and V are stored: `k` is for vectors, or for whole blocks if `k_by_block`."""

    name: str
    k: VectorFormat
    v: VectorFormat
    k_by_block: bool = False


def format_of(kv_dtype: str, block_size: int) -> KVFormat:
    """The format that `EngineConfig.kv_dtype` names."""
    if kv_dtype == "int4":
        return KVFormat(kv_dtype, Int4ByChannel(block_size), Int4(), k_by_block=True)
    by_token: dict[str, VectorFormat] = {
        "float16": Half(torch.float16), "bfloat16": Half(torch.bfloat16), "int8": Int8(),
        "fp8": Fp8(),
    }  # fmt: skip
    return KVFormat(kv_dtype, by_token[kv_dtype], by_token[kv_dtype])


# ── What the error of K does to the weights ───────────────────────────────────


def logit_bound(q: torch.Tensor, k_error: torch.Tensor) -> torch.Tensor:
    """How far a logit q . k / sqrt(D) can move: q (..., D), k_error (..., D) -> (...).

    `k_error` bounds |k - k^| channel by channel; for int8 it is scale / 2 everywhere, and the
    bound is then sum |q| * scale / (2 sqrt(D)).

    Worked example: q = [2, -1, 0, 3] and an error of 0.5 everywhere: 6 * 0.5 / 2 = 1.5.
    """
    return (q.abs() * k_error).sum(-1) * q.shape[-1] ** -0.5
