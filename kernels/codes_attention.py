"""Paged decode and prefill over codes: K and V in fewer bits.

The work is divided as in `paged_decode` and `paged_prefill`. What differs is how a program gets a
tile of K and V: it loads codes, and turns them into floats in registers. Only codes and scales are
read from memory: for a long context in int8 about half the bytes of bfloat16, in int4 a third.

K in int4 is quantised by channel, a block at a time. A query reads the keys of its own block as
floats, and those of earlier blocks as codes, even in the step that fills the block. So what it
reads depends on its position alone:

    blocks of 4      | 0 1 2 3 | 4 5 6 7 | 8 9
    query 5            c c c c   f f              c  code    f  float
    query 9            c c c c   c c c c   f f
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minikv_kernels import settings
from minikv_kernels.arguments import (
    check_contexts,
    check_out,
    check_queries,
    check_rows,
    check_runnable,
)
from minikv_kernels.codes import Codes, check_codes, from_fp8
from minikv_kernels.codes_write import check_open_keys
from minikv_kernels.mode import INTERPRETED
from minikv_kernels.paged_prefill import (
    CHANGES as PREFILL_CHANGES,
    LOG2_E,
    count_tiles,
    rows_of_tile,
)
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
from minikv_kernels.walk import locate


@triton.jit
def load_codes(codes, row, column, mask, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Codes of the vectors `row` (TILE,) as float32 (TILE, PAD), not yet scaled. Zeros where
    nothing is read: whatever lies there, perhaps NaN, must not reach a sum."""
    if FORMAT == "int4":
        half: tl.constexpr = HEAD_DIM // 2
        byte = tl.load(codes + row[:, None] * half + (column % half)[None, :], mask=mask, other=0)
        return (byte.to(tl.int32) >> (column // half * 4)[None, :] & 15).to(tl.float32)
    code = tl.load(codes + row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0)
    if FORMAT == "fp8":
        return from_fp8(code)
    return code.to(tl.float32)


@triton.jit
def walk_codes(
    q, top, total, acc,
    k_codes, v_codes, k_scale, v_scale, k_low, v_low, k, own_keys, k_stride,
    table, kv_head, start, end, position, first, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`walk.walk` over codes: let the rows of q attend to the keys [start, end).

    q (ROWS, PAD), top, total, acc, table, position, scale: as there. Every tile is masked.
    EXACT (int4): rows may see keys of their own block, which they read as floats: those of this
    step, from position `first` on, at pointer k, `k_stride` apart; earlier ones at own_keys.
    """
    column = tl.arange(0, q.shape[1])
    for at in range(start, end, TILE):
        key = at + tl.arange(0, TILE)
        place = key.to(tl.uint32)  # never negative: its quotient and remainder are cheaper so
        held = key < end
        block = tl.load(table + place // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        # 64 bits before this product: a pool soon has 2**31 elements.
        row = (block * KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE
        mask = held[:, None] & (column < HEAD_DIM)[None, :]
        keys = load_codes(k_codes, row, column, mask, HEAD_DIM, FORMAT)
        if FORMAT == "int4":  # by channel of the block
            ends = ((block * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + column[None, :]
            step = tl.load(k_scale + ends, mask=mask, other=0.0).to(tl.float32)
            keys = keys * step + tl.load(k_low + ends, mask=mask, other=0.0).to(tl.float32)
        # "ieee": float32 must not be rounded to tf32. It changes nothing for 16 bits.
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")  # (ROWS, TILE)
        if FORMAT == "int8" or FORMAT == "fp8":  # one product per score, not one per number
            step = tl.load(k_scale + row, mask=held, other=0.0).to(tl.float32)
            scores = scores * step[None, :]
        if EXACT:
            is_new = (key >= first)[:, None]
            new = k + (key - first).to(tl.int64)[:, None] * k_stride + column[None, :]
            own = own_keys + (place % BLOCK_SIZE)[:, None] * HEAD_DIM + column[None, :]
            new = tl.load(new, mask=mask & is_new, other=0.0)
            own = tl.load(own, mask=mask & (key < first)[:, None], other=0.0)
            keys = tl.where(is_new, new, own)
            exact = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
            is_own = (key // BLOCK_SIZE)[None, :] == (position // BLOCK_SIZE)[:, None]
            scores = tl.where(is_own, exact, scores)
        visible = held[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, -float("inf"))

        # Values are scaled here and not with their weights: as float16, a weight times a small
        # scale would lose its last bits.
        values = load_codes(v_codes, row, column, mask, HEAD_DIM, FORMAT)
        if FORMAT == "int4":
            size: tl.constexpr = HEAD_DIM // GROUPS
            ends = row[:, None] * GROUPS + (column // size)[None, :]
            step = tl.load(v_scale + ends, mask=mask, other=0.0).to(tl.float32)
            values = values * step + tl.load(v_low + ends, mask=mask, other=0.0).to(tl.float32)
        elif FORMAT == "int8" or FORMAT == "fp8":
            step = tl.load(v_scale + row, mask=held, other=0.0).to(tl.float32)
            values = values * step[:, None]

        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        # A row that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores * scale - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(
            weights.to(q.dtype), values.to(q.dtype), acc * shrink[:, None], input_precision="ieee"
        )
        top = new_top
    return top, total, acc


@triton.jit(**CHANGES)
def codes_decode_kernel(
    q, k_codes, v_codes, k_scale, v_scale, k_low, v_low, k, open_keys, own_rows,
    block_tables, context_lens, out, partial, lse,
    num_seqs, scratch_rows, q_stride, k_stride, table_stride, scale,
    SEQS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """One program per KV head (axis 0) and item, a split of a context, as in `paged_decode`. In a
    block a head's numbers lie together, so even one head is read in long pieces."""
    counts = count_splits(context_lens, num_seqs, scratch_rows, SEQS, WINDOW, MIN_SPLIT)
    sequence, split = locate(counts, tl.program_id(1))
    if sequence >= num_seqs:  # the grid is an upper bound
        return
    start, end, context, count = span_of_split(
        counts, sequence, split, context_lens, SEQS, WINDOW, TILE
    )

    kv_head = tl.program_id(0)
    member = tl.arange(0, ROWS)  # rows past the group are padding
    head = kv_head * GROUP + member
    column = tl.arange(0, PAD)
    mask = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    place = head[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q + sequence.to(tl.int64) * q_stride + place, mask=mask, other=0.0)
    if WIDEN:  # the interpreter's bfloat16 products are wrong
        query = query.to(tl.float32)

    position = tl.zeros((ROWS,), tl.int32) + context - 1
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PAD), tl.float32)
    k += sequence.to(tl.int64) * k_stride + kv_head * HEAD_DIM
    table = block_tables + sequence.to(tl.int64) * table_stride
    own = end
    own_keys = open_keys
    if FORMAT == "int4":
        own = tl.minimum(tl.maximum(start, (context - 1) // BLOCK_SIZE * BLOCK_SIZE), end)
        own_row = tl.load(own_rows + sequence).to(tl.int64)
        own_keys = open_keys + (own_row * KV_HEADS + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    top, total, acc = walk_codes(
        query, top, total, acc, k_codes, v_codes, k_scale, v_scale, k_low, v_low, k, own_keys,
        k_stride, table, kv_head, start, own, position, context - 1, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, 0, FORMAT, GROUPS, EXACT=False,
    )  # fmt: skip
    if FORMAT == "int4":
        top, total, acc = walk_codes(
            query, top, total, acc, k_codes, v_codes, k_scale, v_scale, k_low, v_low, k, own_keys,
            k_stride, table, kv_head, own, end, position, context - 1, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, 0, FORMAT, GROUPS, EXACT=True,
        )  # fmt: skip
    write_split(
        out, partial, lse, counts, count, sequence, split, top, total, acc,
        head, member < GROUP, place, mask, SEQS, KV_HEADS * GROUP, HEAD_DIM,
    )  # fmt: skip


@triton.jit(**PREFILL_CHANGES)
def codes_prefill_kernel(
    q, k_codes, v_codes, k_scale, v_scale, k_low, v_low, k, open_keys, own_rows,
    block_tables, context_lens, query_start, out,
    num_seqs, q_stride, k_stride, table_stride, scale,
    SEQS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program per KV head (axis 0) and tile of ROWS // GROUP queries, as in `paged_prefill`."""
    queries: tl.constexpr = ROWS // GROUP
    tiles = count_tiles(query_start, num_seqs, SEQS, queries)
    # Backwards: the last tile sees the most keys, and long work should start early.
    sequence, tile = locate(tiles, tl.num_programs(1) - 1 - tl.program_id(1))
    if sequence >= num_seqs:  # the grid is an upper bound
        return
    kv_head = tl.program_id(0)
    context, start, first, position, token, place, mask = rows_of_tile(
        query_start, context_lens, sequence, tile, kv_head, GROUP, HEAD_DIM, ROWS, PAD
    )
    rows = tl.load(q + token * q_stride + place, mask=mask, other=0.0)  # (ROWS, PAD)
    if WIDEN:
        rows = rows.to(tl.float32)

    lowest = first + tile * queries  # the position of the tile's first query
    end = tl.minimum(lowest + queries, context)
    begin = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW else 0
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PAD), tl.float32)
    k += start * k_stride + kv_head * HEAD_DIM
    table = block_tables + sequence.to(tl.int64) * table_stride
    own = end
    own_keys = open_keys
    if FORMAT == "int4":  # no row sees a key of its own block before this one
        own = tl.maximum(begin, lowest // BLOCK_SIZE * BLOCK_SIZE)
        own_row = tl.load(own_rows + sequence).to(tl.int64)
        own_keys = open_keys + (own_row * KV_HEADS + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    top, total, acc = walk_codes(
        rows, top, total, acc, k_codes, v_codes, k_scale, v_scale, k_low, v_low, k, own_keys,
        k_stride, table, kv_head, begin, own, position, first, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FORMAT, GROUPS, EXACT=False,
    )  # fmt: skip
    if FORMAT == "int4":
        top, total, acc = walk_codes(
            rows, top, total, acc, k_codes, v_codes, k_scale, v_scale, k_low, v_low, k, own_keys,
            k_stride, table, kv_head, own, end, position, first, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FORMAT, GROUPS, EXACT=True,
        )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # padding has no key
    tl.store(out + token * (KV_HEADS * GROUP * HEAD_DIM) + place, result, mask=mask)


class FloatKeys(NamedTuple):
    """What int4 needs beside codes: keys that are read as floats."""

    k: torch.Tensor  # (T, num_kv_heads, head_dim), dtype of q: the keys of the tokens that ask
    keys: torch.Tensor  # (rows, num_kv_heads, block_size, head_dim): keys of open blocks
    # (S,): for each sequence the row with keys of its first query's block from earlier steps; any
    # row if there are none.
    rows: torch.Tensor


def codes_decode(
    q: torch.Tensor,
    codes: Codes,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    own: FloatKeys | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
    setting: Setting | None = None,
) -> torch.Tensor:
    """`paged_decode` over codes: (S, num_heads, head_dim).

    codes: one layer's; those of the queries' own tokens are written already (`write_codes`).
    own: for int4, with a key per query.

    All else as in `paged_decode`. Must move the bytes of the codes and scales of every token seen.
    """
    _check(q, codes, block_tables, context_lens, own, window, out)
    check_rows("context_lens", context_lens, len(q), "one sequence per row of q")
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size = codes.sizes
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if scratch is None:
        scratch = make_scratch(num_heads, num_kv_heads, head_dim, q.device)
    if num_seqs == 0:
        return out
    setting = setting or settings.choose("codes_decode", head_dim, q.dtype, q.device)
    splits = plan_splits(q, block_tables.shape[1] * block_size, num_kv_heads, window, scratch)
    codes_decode_kernel[(num_kv_heads, splits.items)](
        q, *codes.pointers(), *_exact(q, own), block_tables, context_lens, out, *scratch,
        num_seqs, splits.scratch_rows, q.stride(0), _stride(own), block_tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        **_sizes(q, codes, setting), **splits.sizes,
    )  # fmt: skip
    join_splits(splits, context_lens, out, scratch)
    return out


def codes_prefill(
    q: torch.Tensor,
    codes: Codes,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    own: FloatKeys | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
    setting: Setting | None = None,
) -> torch.Tensor:
    """`paged_prefill` over codes: (T, num_heads, head_dim).

    codes: one layer's; those of the chunks' own tokens are written already (`write_codes`).
    own: for int4, with the key of every row of q.

    All else as in `paged_prefill`.
    """
    _check(q, codes, block_tables, context_lens, own, window, out)
    check_queries(q, context_lens, query_start)
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, num_kv_heads = len(context_lens), codes.sizes[1]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    setting = setting or settings.choose("codes_prefill", head_dim, q.dtype, q.device)
    rows = settings.rows_for(setting, num_heads // num_kv_heads)
    # Each sequence has at most one tile that is not full.
    tiles = min(num_tokens, num_tokens // (rows // (num_heads // num_kv_heads)) + num_seqs)
    codes_prefill_kernel[(num_kv_heads, tiles)](
        q, *codes.pointers(), *_exact(q, own), block_tables, context_lens, query_start, out,
        num_seqs, q.stride(0), _stride(own), block_tables.stride(0), head_dim**-0.5 * LOG2_E,
        SEQS=settings.lanes(num_seqs), HEAD_DIM=head_dim, WINDOW=window or 0,
        **_sizes(q, codes, setting),
    )  # fmt: skip
    return out


def _sizes(q: torch.Tensor, codes: Codes, setting: Setting) -> dict:
    """The constants that both kernels have."""
    _, num_kv_heads, block_size = codes.sizes
    group = q.shape[1] // num_kv_heads
    return dict(
        KV_HEADS=num_kv_heads, GROUP=group, BLOCK_SIZE=block_size, FORMAT=codes.name,
        GROUPS=codes.groups, ROWS=settings.rows_for(setting, group),
        PAD=settings.padded(q.shape[2]), TILE=setting.tile,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=setting.num_warps, num_stages=setting.num_stages,
    )  # fmt: skip


def _exact(q: torch.Tensor, own: FloatKeys | None) -> tuple[torch.Tensor, ...]:
    return (q, q, q) if own is None else own  # q is passed, but not read


def _stride(own: FloatKeys | None) -> int:
    return 0 if own is None else own.k.stride(0)


def _check(q, codes, block_tables, context_lens, own, window, out) -> None:
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q has shape {tuple(q.shape)}: want (T, num_heads, head_dim)")
    num_blocks, num_kv_heads, block_size = codes.sizes
    check_codes(codes, q[:, :1].expand(-1, num_kv_heads, -1))
    check_contexts(q, num_blocks, block_size, num_kv_heads, block_tables, context_lens, window)
    if codes.k_by_block and own is None:
        raise ValueError("own is None: want the keys of open blocks, which int4 needs, too")
    if own is not None:
        if own.k.shape != (len(q), num_kv_heads, q.shape[2]) or own.k.dtype != q.dtype:
            raise ValueError(
                f"own has k {tuple(own.k.shape)} {own.k.dtype}: want a key for each row of q, "
                f"{(len(q), num_kv_heads, q.shape[2])} {q.dtype}"
            )
        if not own.k[:1].is_contiguous():
            raise ValueError(f"own has k with strides {own.k.stride()}: want rows contiguous")
        check_open_keys(own.keys, codes, own.k)
        check_rows("own.rows", own.rows, len(context_lens), "one row per sequence")
    check_out(out, q)
    check_runnable("q", q)
