"""Decode: one query per sequence attends to its cached tokens, through the block table.

Long contexts are split (`splits`). K and V are read once for all query heads of a group.
"""

import torch
import triton
import triton.language as tl

from minikv_kernels import settings
from minikv_kernels.arguments import check_out, check_paged, check_rows, check_runnable
from minikv_kernels.mode import INTERPRETED
from minikv_kernels.paged_prefill import LOG2_E, paged_prefill_reference
from minikv_kernels.settings import Setting
from minikv_kernels.splits import (
    CHANGES,
    Scratch,
    count_splits,
    join_splits,
    make_scratch,
    plan_splits,
    span_of_split,
    write_split,
)
from minikv_kernels.walk import locate, walk


@triton.jit(**CHANGES)
def paged_decode_kernel(
    q, kv, block_tables, context_lens, out, partial, lse,
    num_seqs, scratch_rows, q_stride, table_stride, scale,
    SEQS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program per PACK KV heads (axis 0), which are read together, and item."""
    counts = count_splits(context_lens, num_seqs, scratch_rows, SEQS, WINDOW, MIN_SPLIT)
    sequence, split = locate(counts, tl.program_id(1))
    if sequence >= num_seqs:  # the grid is an upper bound
        return
    start, end, context, count = span_of_split(
        counts, sequence, split, context_lens, SEQS, WINDOW, TILE
    )

    # The query heads of a group read the same K and V, so they are the rows of one dot product.
    # It has at least 16 rows, more than most groups fill. So neighbouring KV heads share it, and a
    # token's K is read in longer pieces. For two KV heads of four numbers and groups of two:
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
    write_split(
        out, partial, lse, counts, count, sequence, split, top, total, acc,
        head, member < PACK * GROUP, place, mask, SEQS, KV_HEADS * GROUP, HEAD_DIM,
    )  # fmt: skip


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
    out: where to write, contiguous; scratch: from `make_scratch`. If None they are made here; a
        captured graph needs both.
    setting: from `settings` if None.

    All on one CUDA device, or on the CPU in the interpreter. Must move 2 * num_kv_heads *
    head_dim * itemsize bytes for every token seen; q and out are small beside that, and each
    split adds 8 * num_heads * (head_dim + 1) bytes, written and read.

    Raises ValueError that names the argument. Lengths and block ids are checked on the CPU
    only, because on a GPU the check would wait for the device.
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
    splits = plan_splits(q, block_tables.shape[1] * block_size, programs, window, scratch)
    paged_decode_kernel[(programs, splits.items)](
        q, kv, block_tables, context_lens, out, *scratch, num_seqs, splits.scratch_rows,
        q.stride(0), block_tables.stride(0), head_dim**-0.5 * LOG2_E,
        KV_HEADS=num_kv_heads, GROUP=group, BLOCK_SIZE=block_size, PACK=pack,
        ROWS=settings.rows_for(setting, group), PAD=settings.padded(pack * head_dim),
        TILE=setting.tile,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=setting.num_warps, num_stages=setting.num_stages, **splits.sizes,
    )  # fmt: skip
    join_splits(splits, context_lens, out, scratch)
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
