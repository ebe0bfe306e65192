"""Long contexts are split among several programs, and a second kernel joins their results.

After flash-decoding (Dao et al., 2023): nearly all the time of a decode goes into reading K and V,
and a GPU reads at full speed only if all its multiprocessors take part.

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

from minikv_kernels import settings
from minikv_kernels.walk import locate

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

    A sequence gets scratch rows in proportion to its tokens, but no split has fewer than MIN_SPLIT
    tokens. The number is rounded down, so that all splits fit into the scratch.
    """
    index = tl.arange(0, SEQS)
    visible = tl.load(context_lens + index, mask=index < num_seqs, other=0).to(tl.int32)
    if WINDOW:
        visible = tl.minimum(visible, WINDOW)
    share = tl.maximum(tl.cdiv(tl.sum(visible, 0), scratch_rows), MIN_SPLIT)
    return tl.where(index < num_seqs, tl.maximum(visible // share, 1), 0)


@triton.jit
def span_of_split(
    counts, sequence, split, context_lens,
    SEQS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The keys [start, end) of a split, in whole tiles: (start, end, context, splits of its
    sequence)."""
    count = tl.sum(tl.where(tl.arange(0, SEQS) == sequence, counts, 0), 0)
    context = tl.load(context_lens + sequence).to(tl.int32)
    oldest = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    span = tl.cdiv(context - oldest, count * TILE) * TILE
    start = oldest + split * span
    # not after start: an empty split, weight 0
    return start, tl.minimum(start + span, context), context, count


@triton.jit
def write_split(
    out, partial, lse, counts, count, sequence, split, top, total, acc, head, is_head, place, mask,
    SEQS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write the result of a split for the heads `head` (ROWS,): to the output if it is the only
    split of its sequence, else to the scratch. place, mask: (ROWS, PAD), in a row of
    (HEADS, HEAD_DIM)."""
    # No key at all (an empty split, or padding of the batch): 0, and not 0 / 0.
    total = tl.where(total > 0, total, 1.0)
    result = acc / total[:, None]
    if count == 1:
        tl.store(out + sequence.to(tl.int64) * (HEADS * HEAD_DIM) + place, result, mask=mask)
    else:
        before = (tl.arange(0, SEQS) < sequence) & (counts > 1)
        row = split + tl.sum(tl.where(before, counts, 0), 0)
        tl.store(partial + row.to(tl.int64) * (HEADS * HEAD_DIM) + place, result, mask=mask)
        # -inf for an empty split
        tl.store(lse + row * HEADS + head, top + tl.log2(total), mask=is_head)


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
    """The results of the splits of one call, in float32. Made once, used again in every step."""

    partial: torch.Tensor  # (rows, num_heads, head_dim): softmax(q k) v over the split alone
    lse: torch.Tensor  # (rows, num_heads): log2 of the sum of 2^score


def make_scratch(
    num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, rows: int | None = None
) -> Scratch:
    """Scratch for any batch of this model: `rows` splits at most, by default as many as fill the
    device."""
    if rows is None:
        heads = min(num_heads, max(16, num_heads // num_kv_heads))  # of a program, at most
        rows = max(1, settings.num_programs(device) * heads // num_heads)
    elif rows < 1:
        raise ValueError(f"rows was {rows}: want at least 1")
    return Scratch(
        torch.empty(rows, num_heads, head_dim, device=device, dtype=torch.float32),
        torch.empty(rows, num_heads, device=device, dtype=torch.float32),
    )


class Splits(NamedTuple):
    """How the work of one launch is divided."""

    num_seqs: int
    items: int  # upper bound
    longest: int  # most splits of one sequence, by the width of the block tables
    scratch_rows: int
    sizes: dict  # constants of both kernels


def plan_splits(
    q: torch.Tensor, max_context: int, programs: int, window: int | None, scratch: Scratch
) -> Splits:
    """Divide the decode of q (S, num_heads, head_dim), S > 0. programs: programs per item."""
    num_seqs, _, head_dim = q.shape
    # No more splits than fill the device.
    rows = min(len(scratch.lse), max(1, settings.num_programs(q.device) // programs))
    longest = max(1, max_context // settings.MIN_SPLIT)
    sizes = dict(
        SEQS=settings.lanes(num_seqs), HEAD_DIM=head_dim, WINDOW=window or 0,
        MIN_SPLIT=settings.MIN_SPLIT,
    )  # fmt: skip
    return Splits(num_seqs, min(num_seqs + rows, num_seqs * longest), longest, rows, sizes)


def join_splits(
    splits: Splits, context_lens: torch.Tensor, out: torch.Tensor, scratch: Scratch
) -> None:
    """Write to out (S, num_heads, head_dim) the rows whose contexts were split."""
    most_split = min(splits.num_seqs, splits.scratch_rows // 2)
    if splits.longest > 1 and most_split > 0:
        _, num_heads, head_dim = out.shape
        join_splits_kernel[(num_heads, most_split)](
            context_lens, out, *scratch, splits.num_seqs, splits.scratch_rows,
            HEADS=num_heads, PAD=settings.padded(head_dim), CHUNK=CHUNK, num_warps=1,
            **splits.sizes,
        )  # fmt: skip
