"""Kernels for a CPU, compiled by Numba: attention that walks the block table, one query head
at a time and then a group at a time; what limits attention on this CPU; pieces for threads; a
matrix product; a decode step as one program; and attention whose bits do not depend on the batch.

`@compiled` makes a function a kernel: Numba compiles it when it is first called. A check first runs
your kernels as plain Python, on small arrays, so that a wrong index gives a message and not a
crash; then it compiles them. Unless stated otherwise, numbers are float32 and arrays are
contiguous.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("09.1") in the notebook, or in a terminal: python -m minikv check 09.1
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from minikv.course.chapters.ch03_kv_memory.given import Shape
from minikv.course.chapters.ch09_cpu_kernels.given import Cpu, Limit, Stored, compiled, in_threads
from minikv.course.chapters.ch09_cpu_kernels.invariance import PART
from minikv.cpu.kernels import rms_norm, rotate_and_write, silu_mul


# ── 09.1 The loop, compiled ───────────────────────────────────────────────────────
@compiled
def attend_heads(q, kv, block_tables, context_lens, out):
    """One query for each of S sequences, through the block table: the loop of 04.4 in plain
    numbers.

    q, out (S, H, D); kv (num_blocks, block_size, 2, K, D) of one layer; block_tables (S, B) and
    context_lens (S,) int64. Query head h reads KV head h // (H // K). For each query head, every
    key and value of the context is read once, a block at a time, and only `out` is written. Entries
    of the table past a sequence's last block are not read, nor are slots without a token: they may
    hold anything, even NaN.

    All numbers are float32. A sum that starts as 0.0 is a float64 for Numba, so it starts as
    np.float32(0). A context of 6 in blocks of 4, with table [7, 1]: slots 0 to 3 of block 7,
    then slots 0 and 1 of block 1.
    """
    raise NotImplementedError("Exercise 09.1: attend_heads")


def decode(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """q (S, H, D), kv (num_blocks, block_size, 2, K, D) -> (S, H, D). No tensor is copied on its
    way into the kernel, except a q that is a view with gaps."""
    out = torch.empty(q.shape)
    arrays = (q.contiguous(), kv, block_tables, context_lens, out)
    attend_heads(*(value.numpy() for value in arrays))
    return out


# ── 09.2 K and V once for a group ─────────────────────────────────────────────────
@compiled
def attend_groups(q, kv, block_tables, context_lens, out, first, last):
    """The same for a piece of the work, each block read once for all query heads of its group.

    Shapes as in `attend_heads`, but q may have more than H heads: its first H are the queries, and
    the shape of `out` says how many that is. G = H // K query heads are a group. Item w of the work
    is KV head w % K of sequence w // K, with the G query heads that read it; there are S * K items.
    This call does items `first` … `last` - 1 and writes their rows of `out` and no others.

    For 2 sequences and 2 KV heads, items 1 and 2 are KV head 1 of sequence 0 and KV head 0 of
    sequence 1. Within an item, a block's K and V are read for all G heads before the next block
    is touched: what G heads need then comes from memory once.
    """
    raise NotImplementedError("Exercise 09.2: attend_groups")


def decode_by_group(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """q (S, H, D), kv (num_blocks, block_size, 2, K, D) -> (S, H, D), in one piece."""
    out = torch.empty(q.shape)
    arrays = (q.contiguous(), kv, block_tables, context_lens, out)
    attend_groups(*(value.numpy() for value in arrays), 0, len(q) * kv.shape[3])
    return out


# ── 09.3 What limits attention here ───────────────────────────────────────────────
def attention_limit(
    context_lens: list[int], shape: Shape, stored: Stored, cpu: Cpu, threads: int = 1
) -> Limit:
    """What attention in one decode step of a whole model takes at least, by arithmetic: a
    `Limit(num_bytes, operations, seconds, holds)`.

    `shape` has num_layers, num_heads (query heads), num_kv_heads and head_dim. Every key and value
    is read once: `stored.number_bytes` for each of its numbers, and `stored.scale_bytes` for its
    scale. With a number of it, each query head of the group does one multiplication and one
    addition; before that it is converted in `stored.convert` operations, once for the group. The
    rest (softmax, queries, results) is small and not counted.

    Reading: at `cpu.thread_rate` bytes per second for each thread, but for all together never more
    than `cpu.memory_rate`. Arithmetic: at `cpu.flop_rate` operations per second for each thread. A
    processor reads and computes at the same time, so the slower of the two takes all of the time.
    `holds` is its name, "reading" or "arithmetic"; if they are equal, "reading".

    One token, Shape(1, 4, 2, 10), Stored(4): 2 * 2 * 10 numbers are 160 bytes and 160 operations.
    """
    raise NotImplementedError("Exercise 09.3: attention_limit")


# ── 09.4 Sometimes NaN, sometimes wrong: broken, fix it ───────────────────────────
@compiled
def attend_piece(q, kv, block_tables, context_lens, out, scores, first, last):
    """Items `first` … `last` - 1 as in `attend_groups`, in three passes over each context: all
    scores, their exponentials and sum, the weighted values.

    `scores` (G, L) is scratch memory: L = B * block_size scores for each head of a group.
    """
    dim, block_size, kv_heads = q.shape[2], kv.shape[1], kv.shape[3]
    group = q.shape[1] // kv_heads
    scale = np.float32(1 / math.sqrt(dim))
    acc = np.empty(dim, np.float32)
    for item in range(first, last):
        s, kv_head = item // kv_heads, item % kv_heads
        context = context_lens[s]
        for g in range(group):
            h = kv_head * group + g
            top, total = np.float32(-np.inf), np.float32(0)
            for p in range(context):
                block, offset = block_tables[s, p // block_size], p % block_size
                score = np.float32(0)
                for d in range(dim):
                    score += q[s, h, d] * kv[block, offset, 0, kv_head, d]
                scores[g, p] = score * scale
                top = max(top, scores[g, p])
            for p in range(context):
                scores[g, p] = math.exp(scores[g, p] - top)
                total += scores[g, p]
            acc[:] = 0
            # Whole blocks: no end in the middle, and a weight of 0 adds nothing.
            whole = (context + block_size - 1) // block_size * block_size
            scores[g, context:whole] = 0
            for p in range(whole):
                block, offset = block_tables[s, p // block_size], p % block_size
                for d in range(dim):
                    acc[d] += scores[g, p] * kv[block, offset, 1, kv_head, d]
            for d in range(dim):
                out[s, h, d] = acc[d] / total


# ── 09.4 Sometimes NaN, sometimes wrong: broken, fix it ───────────────────────────
def decode_in_pieces(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor,
    num_pieces: int = 2, run: Callable = in_threads,
) -> torch.Tensor:  # fmt: skip
    """q (S, H, D), kv (num_blocks, block_size, 2, K, D) -> (S, H, D), in `num_pieces` pieces.

    `run(kernel, calls)` makes all calls, in any order or at the same time.
    """
    out = torch.empty(q.shape)
    arrays = [value.numpy() for value in (q.contiguous(), kv, block_tables, context_lens, out)]
    pieces = share(context_lens.tolist(), kv.shape[3], num_pieces)
    group, room = q.shape[1] // kv.shape[3], block_tables.shape[1] * kv.shape[1]
    scores = np.empty((group, room), np.float32)  # once: allocating takes time
    run(
        attend_piece,
        [(*arrays, scores, first, last) for first, last in pieces],
    )
    return out


def share(context_lens: list[int], kv_heads: int, num_pieces: int) -> list[tuple[int, int]]:
    """Cut the items of `attend_groups` into `num_pieces` pieces (first, last) of about equal work.

    Item w reads the context of sequence w // kv_heads, so that is its work, in tokens. The pieces
    lie side by side, from item 0 to the last one, and every item is in exactly one; a piece may be
    empty, such as (3, 3). No piece has more work than the even share plus the longest context:
    total / num_pieces + max(context_lens).

    Contexts of 90, 10, 10 and 10 and one KV head are 120 tokens, 60 for each of two pieces.
    [(0, 1), (1, 4)] is 90 and 30 tokens; two items each would be 100 and 20.
    """
    work = np.repeat(np.asarray(context_lens), kv_heads)
    middles = np.cumsum(work) - work / 2  # a cut belongs before an item whose middle is past it
    cuts = [int(np.searchsorted(middles, work.sum() * i / num_pieces)) for i in range(num_pieces)]
    return list(zip(cuts, [*cuts[1:], len(work)], strict=True))


# ── 09.5 Weights once for a batch ─────────────────────────────────────────────────
@compiled
def matmul(x, weight, out, add, first, last):
    """out[:, first:last] = x weight[first:last]^T, added to what is there if `add` is true.

    x (S, inputs), weight (outputs, inputs), out (S, outputs). Every row of the weight is read
    once, for all rows of x, before the next row is touched; other columns of `out` stay as they
    are. For x = [[1, 2], [0, 1]] and weight = [[3, 4]], out is [[11], [4]]. If out was
    [[100], [100]] and `add` is true, it is then [[111], [104]].

    Four rows of x at a time share each weight that is loaded; the rows left over are computed one
    by one.
    """
    raise NotImplementedError("Exercise 09.5: matmul")


# ── 09.6 A decode step as one program ─────────────────────────────────────────────
@compiled
def decode_step(token_ids, positions, block_tables, context_lens, slots, weights, kv, logits):
    """One token for each of S sequences, from its id to its logits: a decode step as one program.

    token_ids, positions, context_lens, slots (S,) int64: the newest token of each sequence, its
    position, the number of tokens it attends to (itself included), and the slot for its K and V.
    `weights` is a `Weights`, whose docstring has the shapes. kv (N, num_slots, 2, K, D): the slots
    of all N layers. block_tables (S, B). logits (S, vocab).

    Writes all of `logits`, and in every layer the new tokens' K and V. In each layer: normalise,
    project to q, k and v, rotate and write, attend, project and add to x; normalise, project to
    gate and up, silu_mul, project and add to x. After the last layer: normalise, and the head.
    """
    raise NotImplementedError("Exercise 09.6: decode_step")


# ── 09.7 Two equal prompts, different tokens: broken, fix it ──────────────────────
def attend_step(
    queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Attention of one step over several sequences, one head, float32.

    queries[s] (T, D) are the new tokens of sequence s, keys[s] and values[s] (L, D) its whole
    context; the first L - T of them were computed by earlier steps, or found in the prefix cache.
    Query t sees the keys up to its own. Returns (T, D) for each sequence.

    The bits of a row depend on its text alone: on q, k and v up to this token. They do not depend
    on the other sequences of the step, on where a chunk begins, or on what was cached.
    """
    part = max(4, PART * len(queries) // 4)  # few sequences: more parts, for all cores
    found = []
    for q, k, v in zip(queries, keys, values, strict=True):
        num_cached, rows = len(k) - len(q), []
        for row, query in enumerate(q):
            seen = num_cached + row + 1
            starts = [*range(0, num_cached, part), *range(num_cached, seen, part)]
            rows.append(attend_in_parts(query, k[:seen], v[:seen], starts))
        found.append(torch.stack(rows))
    return found


def attend_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: Iterable[int]
) -> torch.Tensor:
    """One query over its context, part by part: q (D,), k and v (L, D) -> (D,), all float32.

    `starts` are the places where parts begin, in order, the first of them 0. Each part is summed by
    itself, so cores could compute them side by side. Then their sums are added, in order, with the
    running softmax of chapter 04.
    """
    borders = [*starts, len(k)]
    top, total, out = torch.tensor(-torch.inf), torch.zeros(()), torch.zeros_like(q)
    for start, end in pairwise(borders):
        scores = (k[start:end] * q).sum(-1) * len(q) ** -0.5
        new_top = torch.maximum(top, scores.max())
        weights, shrink = torch.exp(scores - new_top), torch.exp(top - new_top)
        total = total * shrink + weights.sum()
        out = out * shrink + (weights[:, None] * v[start:end]).sum(0)
        top = new_top
    return out / total
