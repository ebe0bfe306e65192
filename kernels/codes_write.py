"""Quantise the K and V of a step's tokens into their slots, as `cache_write` writes floats.

A number is read once, as a float, and written once, as a code. One program has one token of one
KV head, and computes its scale in registers. K in int4 is different: a channel's scale is known
only when its block is full. Until then the keys are kept as they are, in their block's row of *open
keys*. A second kernel quantises the blocks that this step fills.
"""

import torch
import triton
import triton.language as tl

from minikv_kernels.arguments import INDICES, check_runnable
from minikv_kernels.codes import (
    Codes,
    check_codes,
    divide,
    divisor,
    has_nan,
    int4_code,
    int4_ends,
    nearest,
    round_to_bfloat16,
    round_up,
    to_fp8,
)
from minikv_kernels.settings import padded

TOKENS = 16  # of a block that are quantised at once


@triton.jit
def put_vector(x, codes, scales, row, is_held, HEAD_DIM: tl.constexpr, PAD: tl.constexpr,
               FORMAT: tl.constexpr):  # fmt: skip
    """Store the vector at pointer x as vector `row` of codes and scales, if `is_held`."""
    column = tl.arange(0, PAD)
    mask = (column < HEAD_DIM) & is_held
    numbers = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    if FORMAT == "int8" or FORMAT == "fp8":
        largest: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        top = tl.max(tl.abs(numbers), 0, keep_dims=True)  # (1,)
        top = tl.where(has_nan(numbers), float("nan"), top)
        scale = round_up(divide(top, tl.full((1,), largest, tl.float32)))
        tl.store(scales + row + tl.arange(0, 1), scale.to(tl.bfloat16), mask=is_held)
        numbers = divide(numbers, divisor(scale))
        if FORMAT == "int8":
            numbers = nearest(numbers).to(tl.int8)
        else:  # the rounded scale reaches the largest number, up to one float32 bit
            numbers = tl.where(numbers == numbers, numbers, 0.0)
            numbers = to_fp8(tl.minimum(tl.maximum(numbers, -largest), largest))
    elif FORMAT == "bfloat16":
        numbers = round_to_bfloat16(numbers)
    tl.store(codes + row * HEAD_DIM + column, numbers.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def put_groups(x, codes, scales, lows, row, is_held, HEAD_DIM: tl.constexpr, PAD: tl.constexpr,
               GROUPS: tl.constexpr):  # fmt: skip
    """`put_vector` for int4: each group of channels has its own scale, and a byte has two
    channels."""
    half: tl.constexpr = HEAD_DIM // 2
    size: tl.constexpr = HEAD_DIM // GROUPS
    column = tl.arange(0, PAD)
    mask = (column < half) & is_held
    first = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + half + column, mask=mask, other=0.0).to(tl.float32)
    byte = tl.zeros((PAD,), tl.uint8)
    for group in range(GROUPS):
        in_first = mask & (column // size == group)
        in_second = mask & ((column + half) // size == group)
        one = tl.where(in_first, first, float("inf"))
        other = tl.where(in_second, second, float("inf"))
        least = tl.min(tl.minimum(one, other), 0, keep_dims=True)  # (1,)
        one = tl.where(in_first, first, -float("inf"))
        other = tl.where(in_second, second, -float("inf"))
        greatest = tl.max(tl.maximum(one, other), 0, keep_dims=True)
        spoilt = has_nan(one) | has_nan(other)
        scale, low = int4_ends(
            tl.where(spoilt, float("nan"), least), tl.where(spoilt, float("nan"), greatest)
        )
        ends = row * GROUPS + group + tl.arange(0, 1)
        tl.store(scales + ends, scale.to(tl.bfloat16), mask=is_held)
        tl.store(lows + ends, low.to(tl.bfloat16), mask=is_held)
        byte = tl.where(in_first, byte | int4_code(first, scale, low), byte)
        byte = tl.where(in_second, byte | int4_code(second, scale, low) << 4, byte)
    tl.store(codes + row * half + column, byte, mask=mask)


@triton.jit
def write_codes_kernel(
    k, v, open_keys, places, k_codes, v_codes, k_scale, v_scale, k_low, v_low, slot_mapping,
    k_stride, v_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAD: tl.constexpr,
    FORMAT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program per token (axis 0) and KV head."""
    # 64 bits before any product: a pool soon has 2**31 elements.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    row = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    k += token * k_stride + head * HEAD_DIM
    v += token * v_stride + head * HEAD_DIM
    if FORMAT != "int4":
        put_vector(k, k_codes, k_scale, row, slot >= 0, HEAD_DIM, PAD, FORMAT)
        put_vector(v, v_codes, v_scale, row, slot >= 0, HEAD_DIM, PAD, FORMAT)
    else:
        put_groups(v, v_codes, v_scale, v_low, row, slot >= 0, HEAD_DIM, PAD, GROUPS)
        place = tl.load(places + token).to(tl.int64)  # in the open keys
        row = (place // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + place % BLOCK_SIZE
        column = tl.arange(0, PAD)
        mask = (column < HEAD_DIM) & (place >= 0)
        tl.store(open_keys + row * HEAD_DIM + column, tl.load(k + column, mask=mask), mask=mask)


@triton.jit
def load_keys(k, own, token, column, mask, is_new, k_stride, HEAD_DIM: tl.constexpr):
    """Keys (tokens, columns) in float32: if `is_new` those at k, `k_stride` apart, else the open
    ones at `own`."""
    new = tl.load(k + token[:, None] * k_stride + column[None, :], mask=mask & is_new, other=0.0)
    mask = mask & (is_new == 0)
    old = tl.load(own + token[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    return tl.where(is_new, new.to(tl.float32), old.to(tl.float32))


@triton.jit
def channel_ends(
    k, own, column, is_held, is_new, k_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """(scale, low) of these channels over all keys of a block."""
    least = tl.full(column.shape, float("inf"), tl.float32)
    greatest = tl.full(column.shape, -float("inf"), tl.float32)
    spoilt = tl.zeros(column.shape, tl.int32)
    for at in range(0, BLOCK_SIZE, TOKENS):
        token = at + tl.arange(0, TOKENS)
        mask = (token < BLOCK_SIZE)[:, None] & is_held[None, :]
        x = load_keys(k, own, token, column, mask, is_new, k_stride, HEAD_DIM)
        least = tl.minimum(least, tl.min(tl.where(mask, x, float("inf")), 0))
        greatest = tl.maximum(greatest, tl.max(tl.where(mask, x, -float("inf")), 0))
        spoilt += tl.sum((x != x).to(tl.int32), 0)
    # One NaN makes the whole channel of the block NaN, as in `minikv.quant.formats`.
    least = tl.where(spoilt > 0, float("nan"), least)
    return int4_ends(least, tl.where(spoilt > 0, float("nan"), greatest))


@triton.jit
def close_blocks_kernel(
    k, open_keys, k_codes, k_scale, k_low, closing, k_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per block that is full now (axis 0) and KV head: its keys, by channel."""
    half: tl.constexpr = HEAD_DIM // 2
    which, head = tl.program_id(0), tl.program_id(1)
    block = tl.load(closing + 3 * which).to(tl.int64)
    row = tl.load(closing + 3 * which + 1).to(tl.int64)
    first_token = tl.load(closing + 3 * which + 2).to(tl.int64)
    is_new = row < 0  # all keys of the block are this step's
    k += first_token * k_stride + head * HEAD_DIM
    own = open_keys + (tl.maximum(row, 0) * KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)

    column = tl.arange(0, PAD)
    is_held = column < half
    scale_0, low_0 = channel_ends(
        k, own, column, is_held, is_new, k_stride, BLOCK_SIZE, HEAD_DIM, TOKENS
    )
    scale_1, low_1 = channel_ends(
        k, own, column + half, is_held, is_new, k_stride, BLOCK_SIZE, HEAD_DIM, TOKENS
    )
    ends = (block * KV_HEADS + head) * HEAD_DIM + column
    tl.store(k_scale + ends, scale_0.to(tl.bfloat16), mask=is_held)
    tl.store(k_scale + ends + half, scale_1.to(tl.bfloat16), mask=is_held)
    tl.store(k_low + ends, low_0.to(tl.bfloat16), mask=is_held)
    tl.store(k_low + ends + half, low_1.to(tl.bfloat16), mask=is_held)

    for at in range(0, BLOCK_SIZE, TOKENS):
        token = at + tl.arange(0, TOKENS)
        mask = (token < BLOCK_SIZE)[:, None] & is_held[None, :]
        first = load_keys(k, own, token, column, mask, is_new, k_stride, HEAD_DIM)
        second = load_keys(k, own, token, column + half, mask, is_new, k_stride, HEAD_DIM)
        byte = int4_code(first, scale_0[None, :], low_0[None, :])
        byte = byte | int4_code(second, scale_1[None, :], low_1[None, :]) << 4
        place = (block * KV_HEADS + head) * BLOCK_SIZE + token
        tl.store(k_codes + place[:, None] * half + column[None, :], byte, mask=mask)


def write_codes(
    k: torch.Tensor,
    v: torch.Tensor,
    codes: Codes,
    slot_mapping: torch.Tensor,
    open_keys: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    closing: torch.Tensor | None = None,
) -> None:
    """Quantise `k[t]` and `v[t]` into slot `slot_mapping[t]`, in place; for int4, keys as below.

    k, v: (T, num_kv_heads, head_dim), float32, float16 or bfloat16, each row contiguous.
    codes: one layer's.
    slot_mapping: (T,), int32 or int64, contiguous; a negative slot is skipped. Slot s is position
        s % block_size of block s // block_size. Two tokens must not share a slot.

    K in int4 needs three more, the last two int32 or int64, all contiguous:

    open_keys: (rows, num_kv_heads, block_size, head_dim), dtype of k: keys of blocks that are
        not full.
    places: (T,): where in open_keys to keep k[t], row * block_size + offset; -1 for a token whose
        whole block is written in this call.
    closing: (C, 3): blocks that are full after this call, each with the row of its keys and 0, or
        with -1 and the first of its tokens in k. Rows stay as they are.

    All on one CUDA device, or on the CPU in the interpreter. Raises ValueError that names the
    argument. The range of slots, places and rows is checked on the CPU only.
    """
    _check(k, v, codes, slot_mapping, open_keys, places, closing)
    check_runnable("k", k)
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    sizes = dict(KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=codes.sizes[2])
    write_codes_kernel[(num_tokens, num_kv_heads)](
        k, v, k if open_keys is None else open_keys, slot_mapping if places is None else places,
        *codes.pointers(), slot_mapping, k.stride(0), v.stride(0),
        PAD=padded(head_dim), FORMAT=codes.name, GROUPS=codes.groups, num_warps=1, **sizes,
    )  # fmt: skip
    if open_keys is not None and closing is not None and len(closing) > 0:
        # After the first kernel, which has put the last keys of these blocks into their rows.
        close_blocks_kernel[(len(closing), num_kv_heads)](
            k, open_keys, codes.k_codes, codes.k_scale, codes.k_low, closing, k.stride(0),
            PAD=padded(head_dim // 2), TOKENS=TOKENS, num_warps=4, **sizes,
        )  # fmt: skip


def _check(k, v, codes, slot_mapping, open_keys, places, closing) -> None:
    check_codes(codes, k)
    if v.shape != k.shape or v.dtype != k.dtype or v.device != k.device:
        raise ValueError(
            f"v is {tuple(v.shape)} {v.dtype} on {v.device}: want that of k, {tuple(k.shape)} "
            f"{k.dtype} on {k.device}"
        )
    for name, tensor in (("k", k), ("v", v)):
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}: want each row contiguous: .contiguous()"
            )
    vectors = {"slot_mapping": slot_mapping}
    if codes.k_by_block:
        if open_keys is None or places is None or closing is None:
            raise ValueError("codes of int4: want open_keys, places and closing, too")
        check_open_keys(open_keys, codes, k)
        vectors |= {"places": places}
        if closing.dim() != 2 or closing.shape[1] != 3:
            raise ValueError(f"closing has shape {tuple(closing.shape)}: want (C, 3)")
    for name, tensor in vectors.items():
        if tensor.shape != k.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: want ({len(k)},)")
    if closing is not None:
        vectors |= {"closing": closing}
    for name, tensor in vectors.items():
        if tensor.dtype not in INDICES or tensor.device != k.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}: want "
                f"int32 or int64 on {k.device}, contiguous"
            )
    if k.device.type == "cpu" and len(k):
        num_blocks, _, block_size = codes.sizes
        _check_below("slot_mapping", slot_mapping, num_blocks * block_size, "slots")
        if open_keys is not None and places is not None and closing is not None:
            _check_below("places", places, len(open_keys) * block_size, "open places")
            _check_below("closing", closing[:, 0], num_blocks, "blocks")
            _check_below("closing", closing[:, 1], len(open_keys), "rows of open_keys")


def check_open_keys(open_keys: torch.Tensor, codes: Codes, k: torch.Tensor) -> None:
    """Raise ValueError unless this can hold keys of open blocks."""
    shape = (k.shape[1], codes.sizes[2], k.shape[2])
    if open_keys.shape[1:] != shape or open_keys.dtype != k.dtype or open_keys.device != k.device:
        raise ValueError(
            f"open_keys is {tuple(open_keys.shape)} {open_keys.dtype} on {open_keys.device}: want "
            f"(rows, {', '.join(map(str, shape))}) {k.dtype} on {k.device}"
        )
    if not open_keys.is_contiguous():
        raise ValueError(f"open_keys has strides {open_keys.stride()}: want it contiguous")


def _check_below(name: str, numbers: torch.Tensor, limit: int, what: str) -> None:
    if len(numbers) and int(numbers.max()) >= limit:
        raise ValueError(f"{name} has {int(numbers.max())}: want less than the {limit} {what}")
