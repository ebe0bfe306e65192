"""Prefill: chunks of queries of any length, each after the cached tokens of its sequence.

After FlashAttention (Dao et al., 2022) and vLLM's unified kernel: a program holds a tile of
queries in registers and walks the keys before them. The batch is flat, as in `minikv.batch`.
For a chunk of four after a prefix of four, groups of two query heads, and eight rows per tile:

    keys       0 1 2 3 4 5 6 7
    query 4    x x x x x . . .     rows 0, 1: its two heads
    query 5    x x x x x x . .     rows 2, 3
    query 6    x x x x x x x .     rows 4, 5
    query 7    x x x x x x x x     rows 6, 7

A decode is a chunk of one, so both may be mixed in one launch.
"""

import torch
import triton
import triton.language as tl

from minikv_kernels import settings
from minikv_kernels.arguments import check_out, check_paged, check_queries, check_runnable
from minikv_kernels.mode import INTERPRETED
from minikv_kernels.settings import Setting
from minikv_kernels.walk import locate, walk

LOG2_E = 1.4426950408889634  # a GPU computes 2^x, not e^x: e^x = 2^(x log2(e))


# What changes from step to step, and must not make the compiler run again.
CHANGES = {
    "do_not_specialize": ["num_seqs", "table_stride"],
    "do_not_specialize_on_alignment": ["block_tables", "context_lens", "query_start"],
}


@triton.jit
def count_tiles(query_start, num_seqs, SEQS: tl.constexpr, QUERIES: tl.constexpr):
    """Tiles of QUERIES queries of each sequence: (SEQS,), 0 past the last one."""
    index = tl.arange(0, SEQS)
    starts = tl.load(query_start + index, mask=index < num_seqs, other=0)
    ends = tl.load(query_start + index + 1, mask=index < num_seqs, other=0)
    return tl.cdiv((ends - starts).to(tl.int32), QUERIES)


@triton.jit
def rows_of_tile(
    query_start, context_lens, sequence, tile, kv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Row r of a tile is its query r // GROUP, for head r % GROUP of the KV head's group.

    Returns the sequence's context and first row of q, the position of its first query, and for
    each row: its position (ROWS,), also the last key that it sees; its row of q (ROWS, 1), int64;
    place and mask (ROWS, PAD) in that row.
    """
    start = tl.load(query_start + sequence).to(tl.int64)
    num_queries = (tl.load(query_start + sequence + 1) - start).to(tl.int32)
    context = tl.load(context_lens + sequence).to(tl.int32)
    row = tl.arange(0, ROWS)
    query = tile * (ROWS // GROUP) + row // GROUP
    is_row = (row < ROWS // GROUP * GROUP) & (query < num_queries)
    first = context - num_queries
    column = tl.arange(0, PAD)
    mask = is_row[:, None] & (column < HEAD_DIM)[None, :]
    place = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + column[None, :]
    return context, start, first, first + query, (start + query)[:, None], place, mask


@triton.jit(**CHANGES)
def paged_prefill_kernel(
    q, kv, block_tables, context_lens, query_start, out,
    num_seqs, q_stride, table_stride, scale,
    SEQS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program per KV head (axis 0) and tile of ROWS // GROUP queries."""
    queries: tl.constexpr = ROWS // GROUP
    tiles = count_tiles(query_start, num_seqs, SEQS, queries)
    # Backwards: the last tile sees the most keys, and long work should start early.
    sequence, tile = locate(tiles, tl.num_programs(1) - 1 - tl.program_id(1))
    if sequence >= num_seqs:  # the grid is an upper bound
        return
    kv_head = tl.program_id(0)
    context, _, first, position, token, place, mask = rows_of_tile(
        query_start, context_lens, sequence, tile, kv_head, GROUP, HEAD_DIM, ROWS, PAD
    )
    rows = tl.load(q + token * q_stride + place, mask=mask, other=0.0)  # (ROWS, PAD)
    if WIDEN:
        rows = rows.to(tl.float32)

    lowest = first + tile * queries  # the position of the tile's first query
    end = tl.minimum(lowest + queries, context)
    begin = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW else 0
    # Every query sees the keys up to `lowest`: whole tiles of those need no mask.
    full = 0 if WINDOW else (lowest + 1) // TILE * TILE
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PAD), tl.float32)
    kv += kv_head * HEAD_DIM
    table = block_tables + sequence.to(tl.int64) * table_stride
    if not WINDOW:
        top, total, acc = walk(
            rows, top, total, acc, kv, table, begin, full, position, scale,
            BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, TILE, WINDOW, MASKED=False, WIDEN=WIDEN,
        )  # fmt: skip
    top, total, acc = walk(
        rows, top, total, acc, kv, table, begin if WINDOW else full, end, position, scale,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, TILE, WINDOW, MASKED=True, WIDEN=WIDEN,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # padding has no key
    tl.store(out + token * (KV_HEADS * GROUP * HEAD_DIM) + place, result, mask=mask)


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    window: int | None = None,
    out: torch.Tensor | None = None,
    setting: Setting | None = None,
) -> torch.Tensor:
    """Causal attention of a flat batch of chunks: (T, num_heads, head_dim).

    q: (T, num_heads, head_dim); kv, block_tables, window, out, setting: as in `paged_decode`.
    context_lens: (S,), int32 or int64: the tokens of each sequence, those of its chunk included.
    query_start: (S + 1,), int32 or int64, non-decreasing: the queries of sequence s are the rows
        query_start[s] to query_start[s + 1] of q, and stand at the end of its context: query i
        of n sees the keys 0 to context_len - n + i. Other rows of q are neither read nor written.

    All on one CUDA device, or on the CPU in the interpreter. Moves q and out once, and K and V of a
    context once for every rows // group queries, which share a tile.

    Raises ValueError that names the argument; the contents of GPU memory are not checked.
    """
    _check(q, kv, block_tables, context_lens, query_start, window)
    check_out(out, q)
    check_runnable("q", q)
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, num_kv_heads = len(context_lens), kv.shape[3]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    setting = setting or settings.choose("prefill", head_dim, q.dtype, q.device)
    group = num_heads // num_kv_heads
    rows = settings.rows_for(setting, group)
    # Each sequence has at most one tile that is not full.
    tiles = min(num_tokens, num_tokens // (rows // group) + num_seqs)
    paged_prefill_kernel[(num_kv_heads, tiles)](
        q, kv, block_tables, context_lens, query_start, out,
        num_seqs, q.stride(0), block_tables.stride(0), head_dim**-0.5 * LOG2_E,
        SEQS=settings.lanes(num_seqs), KV_HEADS=num_kv_heads, GROUP=group,
        HEAD_DIM=head_dim, BLOCK_SIZE=kv.shape[1], ROWS=rows, PAD=settings.padded(head_dim),
        TILE=setting.tile, WINDOW=window or 0, WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=setting.num_warps, num_stages=setting.num_stages,
    )  # fmt: skip
    return out


def paged_prefill_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """`paged_prefill` in PyTorch: gather each sequence's K and V, then attend as the formula says.

    Same arguments, same errors, any device. Rows of q that belong to no sequence are 0.
    """
    _check(q, kv, block_tables, context_lens, query_start, window)
    out = torch.zeros_like(q)
    slots = kv.flatten(0, 1)  # (num_slots, 2, K, D)
    starts = query_start.tolist()
    for row, context in enumerate(context_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        if context > 0:
            key = torch.arange(context, device=q.device)
            block = block_tables[row, key // kv.shape[1]].long()
            k, v = slots[block * kv.shape[1] + key % kv.shape[1]].unbind(1)  # (L, K, D) each
            out[queries] = _attend(q[queries], k, v, window)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v in float32: q (Q, H, D), k and v (L, K, D) -> (Q, H, D).

    The queries are the last Q of the L positions.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).float() for x in (k, v))  # (L, H, D)
    scores = torch.einsum("qhd,lhd->hql", q.float(), k) * q.shape[-1] ** -0.5
    key = torch.arange(len(k), device=q.device)
    query = key[len(k) - len(q) :, None]
    visible = (key <= query) & (key > query - (window or len(k)))  # (Q, L)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hql,lhd->qhd", weights, v).to(q.dtype)


def _check(q, kv, block_tables, context_lens, query_start, window) -> None:
    check_paged(q, kv, block_tables, context_lens, window)
    check_queries(q, context_lens, query_start)
