"""Decode: one query per sequence attends to all that is cached, through the block table.

After flash-decoding (Dao et al., 2023): nearly all the time goes into reading K and V, and a
GPU reads at full speed only if all of it takes part. So long contexts are split among
several programs, and a second kernel joins what they found:

    context_lens   [768, 96, 512]
    splits         [  3,  1,   2]          of 256 tokens; 96 are too few to be split
    items           0 1 2 | 3 | 4 5        one program per item and KV head, or several heads
    scratch rows    0 1 2 |   | 3 4        item 3 writes its output itself

Each program works out the number of splits from `context_lens` on the device. The grid
only needs an upper bound, so a captured CUDA graph stays valid while contexts grow.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import settings
from kernels.arguments import check_out, check_paged, check_rows, check_runnable
from kernels.mode import INTERPRETED
from kernels.paged_prefill import LOG2_E, paged_prefill_reference
from kernels.settings import Setting
from kernels.walk import locate, walk

CHUNK = 16  # splits that the reduction joins in one iteration
# What changes from step to step, and must not make the compiler run again.
CHANGES = {
    "do_not_specialize": ["num_seqs", "scratch_rows", "table_stride"],
    "do_not_specialize_on_alignment": ["block_tables", "context_lens"],
}


@triton.jit
def count_splits(
    context_lens, num_seqs, scratch_rows,
    SEQS: tl.constexpr, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Splits of each sequence: (SEQS,), 0 past the last one.

    A sequence gets its share of the scratch rows, as many as its share of all tokens, but
    no split below MIN_SPLIT tokens. Rounded down: those that are split fit into the scratch.
    """
    index = tl.arange(0, SEQS)
    visible = tl.load(context_lens + index, mask=index < num_seqs, other=0).to(tl.int32)
    if WINDOW:
        visible = tl.minimum(visible, WINDOW)
    share = tl.maximum(tl.cdiv(tl.sum(visible, 0), scratch_rows), MIN_SPLIT)
    return tl.where(index < num_seqs, tl.maximum(visible // share, 1), 0)


@triton.jit(**CHANGES)
def paged_decode_kernel(
    q, kv, block_tables, context_lens, out, partial, lse,
    num_seqs, scratch_rows, q_stride, table_stride, scale,
    SEQS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program for PACK KV heads (axis 0: all of a token are read together) and an item."""
    counts = count_splits(context_lens, num_seqs, scratch_rows, SEQS, WINDOW, MIN_SPLIT)
    sequence, split = locate(counts, tl.program_id(1))
    if sequence >= num_seqs:  # the grid is an upper bound
        return
    index = tl.arange(0, SEQS)
    count = tl.sum(tl.where(index == sequence, counts, 0), 0)

    context = tl.load(context_lens + sequence).to(tl.int32)
    first = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    span = tl.cdiv(context - first, count * TILE) * TILE  # tokens per split, in whole tiles
    start = first + split * span
    end = tl.minimum(start + span, context)  # not after start: an empty split, weight 0

    # The query heads of a group read the same K and V: they are the rows of one dot product.
    # It has at least 16 rows, more than most groups fill. So KV heads side by side share it,
    # and a token's K is read in longer pieces. Two KV heads of four numbers, groups of two:
    #
    #                 K 0     K 1
    #     rows 0, 1   q q q q . . . .   zeros (.) where the K of the other head lies,
    #     rows 2, 3   . . . . q q q q   so that it adds nothing
    kv_head = tl.program_id(0) * PACK  # the first of them
    member = tl.arange(0, ROWS)  # rows past the last group are padding
    head = kv_head * GROUP + member
    column = tl.arange(0, PAD)
    mask = (column // HEAD_DIM)[None, :] == (member // GROUP)[:, None]
    mask = mask & (member < PACK * GROUP)[:, None]
    place = head[:, None] * HEAD_DIM + (column % HEAD_DIM)[None, :]  # (ROWS, PAD), in a row of q
    query = tl.load(q + sequence.to(tl.int64) * q_stride + place, mask=mask, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)

    top, total, acc = walk(
        query,
        tl.full((ROWS,), -float("inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, PAD), tl.float32),
        kv + kv_head * HEAD_DIM,
        block_tables + sequence.to(tl.int64) * table_stride,
        start, end, tl.zeros((ROWS,), tl.int32) + context - 1, scale,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, PACK * HEAD_DIM, TILE,
        WINDOW=0, MASKED=True, WIDEN=WIDEN,
    )  # fmt: skip
    # No key at all (an empty split, or padding of the batch): 0, and not 0 / 0.
    total = tl.where(total > 0, total, 1.0)
    result = acc / total[:, None]

    heads: tl.constexpr = KV_HEADS * GROUP
    if count == 1:
        tl.store(out + sequence.to(tl.int64) * (heads * HEAD_DIM) + place, result, mask=mask)
    else:
        row = split + tl.sum(tl.where((index < sequence) & (counts > 1), counts, 0), 0)
        tl.store(partial + row.to(tl.int64) * (heads * HEAD_DIM) + place, result, mask=mask)
        # -inf for an empty split
        tl.store(lse + row * heads + head, top + tl.log2(total), mask=member < PACK * GROUP)


@triton.jit(**CHANGES)
def join_splits_kernel(
    context_lens, out, partial, lse, num_seqs, scratch_rows,
    SEQS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAD: tl.constexpr,
    WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per query head (axis 0) and split sequence: a running softmax over the splits."""
    counts = count_splits(context_lens, num_seqs, scratch_rows, SEQS, WINDOW, MIN_SPLIT)
    is_split = counts > 1
    sequence, _ = locate(is_split.to(tl.int32), tl.program_id(1))
    if sequence >= num_seqs:
        return
    index = tl.arange(0, SEQS)
    count = tl.sum(tl.where(index == sequence, counts, 0), 0)
    first = tl.sum(tl.where((index < sequence) & is_split, counts, 0), 0)
    head = tl.program_id(0)
    column = tl.arange(0, PAD)

    top = -float("inf")
    total = 0.0
    acc = tl.zeros((PAD,), tl.float32)
    for at in tl.range(0, count, CHUNK, num_stages=3):  # two chunks are on their way
        split = at + tl.arange(0, CHUNK)
        row = (first + split).to(tl.int64) * HEADS + head
        mask = (split < count)[:, None] & (column < HEAD_DIM)[None, :]
        found = tl.load(lse + row, mask=split < count, other=-float("inf"))
        result = tl.load(partial + row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(found, 0))  # finite: the first split is never empty
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(found - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * result, 0)
        top = new_top
    place = (sequence.to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(out + place, acc / total, mask=column < HEAD_DIM)


class Scratch(NamedTuple):
    """What the splits of one call found, in float32. Made once, used again in every step."""

    partial: torch.Tensor  # (rows, num_heads, head_dim): softmax(q k) v over the split alone
    lse: torch.Tensor  # (rows, num_heads): log2 of the sum of 2^score


def make_scratch(
    num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, rows: int | None = None
) -> Scratch:
    """Scratch for any batch of this model: `rows` splits at most, as many as fill the device."""
    if rows is None:
        heads = min(num_heads, max(16, num_heads // num_kv_heads))  # of a program, at most
        rows = max(1, settings.num_programs(device) * heads // num_heads)
    elif rows < 1:
        raise ValueError(f"rows was {rows}: want at least 1")
    return Scratch(
        torch.empty(rows, num_heads, head_dim, device=device, dtype=torch.float32),
        torch.empty(rows, num_heads, device=device, dtype=torch.float32),
    )


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None = None,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
    setting: Setting | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v of one query per sequence: (S, num_heads, head_dim).

    q: (S, num_heads, head_dim), float32, float16 or bfloat16, head_dim up to 256. Rows may lie
        apart, as slices of one fused projection do; each row is contiguous.
    kv: (num_blocks, block_size, 2, num_kv_heads, head_dim) of one layer, contiguous, dtype of q.
        num_heads is a multiple of num_kv_heads; any block size.
    block_tables: (S, B), int32 or int64; rows may lie apart. Entries past a context are not read.
    context_lens: (S,), int32 or int64: the tokens each query sees, its own included. 0 gives a
        row of zeros, so that a batch can be padded.
    window: how many of the last tokens a query sees; None for all.
    out: where to write, contiguous; scratch: from `make_scratch`. Without them they are made
        here; a captured graph must be given both.
    setting: from `kernels.settings` if None.

    All on one CUDA device, or on the CPU in the interpreter. Must move 2 * num_kv_heads *
    head_dim * itemsize bytes for every token seen; q and out are small beside that, and each
    split adds 8 * num_heads * (head_dim + 1) bytes, written and read.

    Raises ValueError that names the argument. Lengths and block ids are checked on the CPU
    only, since on a GPU the check would wait for the device.
    """
    _check(q, kv, block_tables, context_lens, window)
    check_out(out, q)
    check_runnable("q", q)
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.shape[1], kv.shape[3]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if scratch is None:
        scratch = make_scratch(num_heads, num_kv_heads, head_dim, q.device)
    elif scratch.partial.shape[1:] != q.shape[1:] or scratch.partial.device != q.device:
        raise ValueError(
            f"scratch is for (num_heads, head_dim) {tuple(scratch.partial.shape[1:])} on "
            f"{scratch.partial.device}: want {tuple(q.shape[1:])} on {q.device}; see make_scratch"
        )
    if num_seqs == 0:
        return out
    setting = setting or settings.choose("decode", head_dim, q.dtype, q.device)
    group = num_heads // num_kv_heads
    pack = settings.packed(setting, head_dim, num_kv_heads, group)
    programs = num_kv_heads // pack  # of an item
    # No more splits than fill the device.
    scratch_rows = min(len(scratch.lse), max(1, settings.num_programs(q.device) // programs))
    sizes = dict(
        SEQS=settings.lanes(num_seqs), HEAD_DIM=head_dim, WINDOW=window or 0,
        MIN_SPLIT=settings.MIN_SPLIT,
    )  # fmt: skip
    # The width of the block tables limits how many splits one sequence can have.
    longest = max(1, block_tables.shape[1] * block_size // settings.MIN_SPLIT)
    items = min(num_seqs + scratch_rows, num_seqs * longest)
    paged_decode_kernel[(programs, items)](
        q, kv, block_tables, context_lens, out, *scratch, num_seqs, scratch_rows,
        q.stride(0), block_tables.stride(0), head_dim**-0.5 * LOG2_E,
        KV_HEADS=num_kv_heads, GROUP=group, BLOCK_SIZE=block_size, PACK=pack,
        ROWS=settings.rows_for(setting, group), PAD=settings.padded(pack * head_dim),
        TILE=setting.tile,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=setting.num_warps, num_stages=setting.num_stages, **sizes,
    )  # fmt: skip
    most_split = min(num_seqs, scratch_rows // 2)
    if longest > 1 and most_split > 0:
        join_splits_kernel[(num_heads, most_split)](
            context_lens, out, *scratch, num_seqs, scratch_rows,
            HEADS=num_heads, PAD=settings.padded(head_dim), CHUNK=CHUNK, num_warps=1, **sizes,
        )  # fmt: skip
    return out


def paged_decode_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """`paged_decode` in PyTorch: same arguments, same errors, any device."""
    _check(q, kv, block_tables, context_lens, window)
    query_start = torch.arange(len(q) + 1, device=q.device)
    return paged_prefill_reference(q, kv, block_tables, context_lens, query_start, window)


def _check(q, kv, block_tables, context_lens, window) -> None:
    check_paged(q, kv, block_tables, context_lens, window)
    check_rows("context_lens", context_lens, len(q), "one sequence per row of q")
