"""K and V in fewer bits, for the kernels: what codes and scales mean, and how they are made.

The same arithmetic as `minikv.quant.formats`, which derives its error bounds; for the same floats
both store the same bits. A program holds a vector, or part of one, in registers.

    int8, fp8, float16, bfloat16    K and V by token: a code per number; 8 bits have a scale
    int4                            V by token, in groups of channels; K by channel of a block

bfloat16 scales are computed as float32 numbers whose lower 16 bits are 0. So storing them rounds
nothing, and no bfloat16 arithmetic is needed, which the interpreter lacks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minikv_kernels.arguments import DTYPES

NAMES = ("float16", "bfloat16", "int8", "fp8", "int4")


class Codes(NamedTuple):
    """K and V of one layer, as `minikv.quant.store` keeps them. All contiguous.

    k_codes, v_codes: (num_blocks, num_kv_heads, block_size, head_dim), of the format's dtype; fp8
        as uint8; int4 (…, head_dim / 2) uint8, channel i in the low half of byte i and channel
        i + head_dim / 2 in the high half.
    k_scale, v_scale: bfloat16. By token (num_blocks, num_kv_heads, block_size); int4: K
        (num_blocks, num_kv_heads, head_dim), V (num_blocks, num_kv_heads, block_size, groups).
    k_low, v_low: int4 alone, like the scales. A number is low + scale * code.
    """

    name: str  # one of NAMES
    k_codes: torch.Tensor
    v_codes: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_low: torch.Tensor | None = None
    v_low: torch.Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(num_blocks, num_kv_heads, block_size). Raises ValueError unless k_codes is 4-D."""
        if self.k_codes.dim() != 4:
            raise ValueError(
                f"codes has k_codes of shape {tuple(self.k_codes.shape)}: want (num_blocks, "
                "num_kv_heads, block_size, head_dim)"
            )
        num_blocks, num_kv_heads, block_size, _ = self.k_codes.shape
        return num_blocks, num_kv_heads, block_size

    @property
    def k_by_block(self) -> bool:
        """Whether the keys of a block are quantised together, when the block is full."""
        return self.name == "int4"

    @property
    def groups(self) -> int:
        """Groups of channels in a value, each with a scale and a low end of its own."""
        return self.v_scale.shape[3] if self.name == "int4" and self.v_scale is not None else 1

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """The six tensors, for a launch. k_codes is passed for those that the format does not have,
        which are not read."""
        return tuple(self.k_codes if part is None else part for part in self[1:])


def check_codes(codes: Codes, k: torch.Tensor) -> None:
    """Raise ValueError, naming the argument, unless these are codes for K and V like k."""
    if codes.name not in NAMES:
        raise ValueError(f"codes is of format {codes.name!r}: want one of {', '.join(NAMES)}")
    if k.dim() != 3 or 0 in k.shape[1:] or k.dtype not in DTYPES:
        raise ValueError(
            f"k is {tuple(k.shape)} {k.dtype}: want (T, num_kv_heads, head_dim), float32, float16 "
            "or bfloat16"
        )
    num_kv_heads, head_dim = k.shape[1:]
    if head_dim > 256 or (codes.name == "int4" and head_dim % 2):
        raise ValueError(f"k has head_dim {head_dim}: want at most 256, and even for int4")
    num_blocks, _, block_size = codes.sizes
    for field, shape, dtype in _parts(codes, num_kv_heads, head_dim, block_size):
        part = getattr(codes, field)
        if (part is None) != (shape is None):
            raise ValueError(f"codes of {codes.name}: {field} is {'missing' if shape else 'extra'}")
        if part is None or shape is None:
            continue
        if part.shape != (num_blocks, *shape) or part.dtype != dtype or part.device != k.device:
            raise ValueError(
                f"codes has {field} {tuple(part.shape)} {part.dtype} on {part.device}: for this k "
                f"want {(num_blocks, *shape)} {dtype} on {k.device}"
            )
        if not part.is_contiguous():
            raise ValueError(f"codes has {field} with strides {part.stride()}: want it contiguous")


def _parts(codes: Codes, num_kv_heads: int, head_dim: int, block_size: int):
    """(field, shape without the blocks or None, dtype) of each part that the format has."""
    dtype = {
        "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8,
    }.get(codes.name, torch.uint8)  # fmt: skip
    vectors: tuple[int, ...] = num_kv_heads, block_size
    k_ends: tuple[int, ...] | None = vectors if codes.name in ("int8", "fp8") else None
    v_ends, low = k_ends, codes.name == "int4"
    if low:
        k_ends, v_ends = (num_kv_heads, head_dim), (*vectors, codes.groups)
    width = head_dim // 2 if low else head_dim
    for side, ends in (("k", k_ends), ("v", v_ends)):
        yield f"{side}_codes", (*vectors, width), dtype
        yield f"{side}_scale", ends, torch.bfloat16
        yield f"{side}_low", ends if low else None, torch.bfloat16


# ── Arithmetic ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _shorten(x, AWAY: tl.constexpr):
    """The nearest float32 with 16 zero bits at its end, towards 0 or AWAY from it. NaN stays."""
    bits = x.to(tl.uint32, bitcast=True)
    if AWAY:
        bits += 0xFFFF
    return tl.where(x == x, (bits >> 16 << 16).to(tl.float32, bitcast=True), x)


@triton.jit
def round_up(x):
    """The smallest bfloat16 that is not below x, as float32."""
    return tl.where(x > 0, _shorten(x, AWAY=True), _shorten(x, AWAY=False))


@triton.jit
def round_down(x):
    """The largest bfloat16 that is not above x, as float32."""
    return tl.where(x < 0, _shorten(x, AWAY=True), _shorten(x, AWAY=False))


@triton.jit
def round_to_bfloat16(x):
    """The nearest bfloat16, halves to the even one, as float32; the interpreter would truncate."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = bits + 0x7FFF + (bits >> 16 & 1)
    return tl.where(x == x, (bits >> 16 << 16).to(tl.float32, bitcast=True), x)


@triton.jit
def nearest(x):
    """x rounded to an integer, halves to the even one; for |x| < 2^22. NaN becomes 0."""
    # Beyond 2^23 a float32 has no fraction. (`rint` is a library call, and not interpreted.)
    return tl.where(x == x, x + 12582912.0 - 12582912.0, 0.0)


@triton.jit
def divide(x, y):
    """x / y, correctly rounded. On a GPU `/` may be off by two bits, and a code then by one."""
    x, y = tl.broadcast(x, y)
    return tl.div_rn(x, y)


@triton.jit
def divisor(scale):
    """The scale, or a tiny number where it is 0. NaN stays, which `tl.maximum` would lose."""
    tiny = tl.full(scale.shape, 1e-38, tl.float32)  # written alone it would be a float64
    return tl.where(scale < tiny, tiny, scale)


@triton.jit
def has_nan(x):
    """(1,): whether any number of x (N,) is NaN. A maximum on a GPU would ignore it."""
    return tl.sum((x != x).to(tl.int32), 0, keep_dims=True) > 0


@triton.jit
def int4_code(x, scale, low):
    """The codes 0 … 15 of float32 numbers, as uint8."""
    code = nearest(divide(x - low, divisor(scale)))
    return tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.uint8)


@triton.jit
def int4_ends(least, greatest):
    """(scale, low) of 16 codes that reach from the least to the greatest number."""
    low = round_down(least)
    return round_up(divide(greatest - low, tl.full(low.shape, 15.0, tl.float32))), low


@triton.jit
def to_fp8(x):
    """The bits of the nearest e4m3 number, |x| <= 448 and float32, as uint8.

    Around a number of exponent e, the e4m3 numbers are 2^(e - 3) apart, eight of them until the
    next power of two; below 2^-6 the distance stays the same. So the code of x is its place among
    them, 8 (e + 6) + x / 2^(e - 3), even if it is rounded up to the next power of two.
    """
    size = tl.abs(x)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    mark = ((exponent + 124) << 23).to(tl.float32, bitcast=True)  # 2^(exponent - 3)
    code = 8 * (exponent + 6) + nearest(size / mark).to(tl.int32)
    return tl.where(x < 0, code + 128, code).to(tl.uint8)


@triton.jit
def from_fp8(code):
    """The float32 of e4m3 bits. Shifted by 7, they are those of a float16 that is 2^8 times
    smaller."""
    code = code.to(tl.uint16)
    bits = (code & 0x80) << 8 | (code & 0x7F) << 7
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
