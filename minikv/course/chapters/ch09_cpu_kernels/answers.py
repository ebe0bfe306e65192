"""Chapter 09: the walk over the block table, compiled for this CPU, up to a whole decode step.

Each kernel is the one before plus one idea. They take NumPy arrays, float32 and contiguous, and
write into arrays that they are given. The functions that take tensors call them for the engine.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from minikv.course.chapters.ch03_kv_memory.given import Shape
from minikv.course.chapters.ch09_cpu_kernels.given import Cpu, Limit, Stored, compiled, in_threads
from minikv.cpu.kernels import rms_norm, rotate_and_write, silu_mul

# ── One query head at a time ──────────────────────────────────────────────────────────────


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
    num_seqs, heads, dim = q.shape
    block_size, kv_heads = kv.shape[1], kv.shape[3]
    scale = np.float32(1 / math.sqrt(dim))
    scores = np.empty(block_size, np.float32)
    acc = np.empty(dim, np.float32)
    for s in range(num_seqs):
        context = context_lens[s]
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            top, total = np.float32(-np.inf), np.float32(0)
            acc[:] = 0
            for i in range((context + block_size - 1) // block_size):
                block = block_tables[s, i]
                filled = min(block_size, context - i * block_size)
                new_top = top
                for t in range(filled):
                    score = np.float32(0)
                    for d in range(dim):
                        score += q[s, h, d] * kv[block, t, 0, kv_head, d]
                    scores[t] = score * scale
                    new_top = max(new_top, scores[t])
                shrink = np.float32(math.exp(top - new_top))  # 0 in the first block
                total *= shrink
                for d in range(dim):
                    acc[d] *= shrink
                for t in range(filled):
                    weight = np.float32(math.exp(scores[t] - new_top))
                    total += weight
                    for d in range(dim):
                        acc[d] += weight * kv[block, t, 1, kv_head, d]
                top = new_top
            for d in range(dim):
                out[s, h, d] = acc[d] / total


def decode(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """q (S, H, D), kv (num_blocks, block_size, 2, K, D) -> (S, H, D). No tensor is copied on its
    way into the kernel, except a q that is a view with gaps."""
    out = torch.empty(q.shape)
    arrays = (q.contiguous(), kv, block_tables, context_lens, out)
    attend_heads(*(value.numpy() for value in arrays))
    return out


# ── K and V once for a group ──────────────────────────────────────────────────────────────


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
    heads, dim = out.shape[1:]
    block_size, kv_heads = kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    scale = np.float32(1 / math.sqrt(dim))
    scores = np.empty(block_size, np.float32)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    acc = np.empty((group, dim), np.float32)
    for item in range(first, last):
        s, kv_head = item // kv_heads, item % kv_heads
        context = context_lens[s]
        top[:] = -np.inf
        total[:] = 0
        acc[:] = 0
        for i in range((context + block_size - 1) // block_size):
            block = block_tables[s, i]
            filled = min(block_size, context - i * block_size)
            for g in range(group):
                h = kv_head * group + g
                new_top = top[g]
                for t in range(filled):
                    score = np.float32(0)
                    for d in range(dim):
                        score += q[s, h, d] * kv[block, t, 0, kv_head, d]
                    scores[t] = score * scale
                    new_top = max(new_top, scores[t])
                shrink = np.float32(math.exp(top[g] - new_top))
                total[g] *= shrink
                for d in range(dim):
                    acc[g, d] *= shrink
                for t in range(filled):
                    weight = np.float32(math.exp(scores[t] - new_top))
                    total[g] += weight
                    for d in range(dim):
                        acc[g, d] += weight * kv[block, t, 1, kv_head, d]
                top[g] = new_top
        for g in range(group):
            for d in range(dim):
                out[s, kv_head * group + g, d] = acc[g, d] / total[g]


def decode_by_group(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """q (S, H, D), kv (num_blocks, block_size, 2, K, D) -> (S, H, D), in one piece."""
    out = torch.empty(q.shape)
    arrays = (q.contiguous(), kv, block_tables, context_lens, out)
    attend_groups(*(value.numpy() for value in arrays), 0, len(q) * kv.shape[3])
    return out


# ── What limits attention ─────────────────────────────────────────────────────────────────


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
    vectors = 2 * shape.num_layers * shape.num_kv_heads * sum(context_lens)  # keys and values
    group = shape.num_heads // shape.num_kv_heads
    num_bytes = vectors * (shape.head_dim * stored.number_bytes + stored.scale_bytes)
    operations = vectors * shape.head_dim * (2 * group + stored.convert)
    reading = num_bytes / min(threads * cpu.thread_rate, cpu.memory_rate)
    computing = operations / (threads * cpu.flop_rate)
    holds = "reading" if reading >= computing else "arithmetic"
    return Limit(num_bytes, operations, max(reading, computing), holds)


# ── Pieces for threads ────────────────────────────────────────────────────────────────────


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


def decode_in_threads(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """q (S, H, D), kv (num_blocks, block_size, 2, K, D) -> (S, H, D), a piece for each thread."""
    out = torch.empty(q.shape)
    arrays = [value.numpy() for value in (q.contiguous(), kv, block_tables, context_lens, out)]
    pieces = share(context_lens.tolist(), kv.shape[3], torch.get_num_threads())
    in_threads(attend_groups, [(*arrays, first, last) for first, last in pieces])
    return out


# ── Two bugs ──────────────────────────────────────────────────────────────────────────────


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
            for p in range(context):
                block, offset = block_tables[s, p // block_size], p % block_size
                for d in range(dim):
                    acc[d] += scores[g, p] * kv[block, offset, 1, kv_head, d]
            for d in range(dim):
                out[s, h, d] = acc[d] / total


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
    scores = np.empty((num_pieces, group, room), np.float32)
    run(
        attend_piece,
        [(*arrays, own, first, last) for own, (first, last) in zip(scores, pieces, strict=True)],
    )
    return out


# ── Weights once for a batch ──────────────────────────────────────────────────────────────


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
    rows, inputs = x.shape
    fours = rows // 4 * 4
    for o in range(first, last):
        for row in range(0, fours, 4):
            a = b = c = d = np.float32(0)
            for i in range(inputs):
                w = weight[o, i]
                a += w * x[row, i]
                b += w * x[row + 1, i]
                c += w * x[row + 2, i]
                d += w * x[row + 3, i]
            out[row, o] = a + out[row, o] if add else a
            out[row + 1, o] = b + out[row + 1, o] if add else b
            out[row + 2, o] = c + out[row + 2, o] if add else c
            out[row + 3, o] = d + out[row + 3, o] if add else d
        for row in range(fours, rows):
            total = np.float32(0)
            for i in range(inputs):
                total += weight[o, i] * x[row, i]
            out[row, o] = total + out[row, o] if add else total


# ── The whole step ────────────────────────────────────────────────────────────────────────


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
    num_seqs, block_size = len(token_ids), weights.block_size
    num_layers, num_slots, _, kv_heads, dim = kv.shape
    heads = weights.out.shape[2] // dim
    hidden, inner = weights.embedding.shape[1], weights.down.shape[2]
    x = np.empty((num_seqs, hidden), np.float32)
    normed = np.empty((num_seqs, hidden), np.float32)
    qkv = np.empty((num_seqs, (heads + 2 * kv_heads) * dim), np.float32)
    attended = np.empty((num_seqs, heads, dim), np.float32)
    gate_up = np.empty((num_seqs, 2 * inner), np.float32)
    mixed = np.empty((num_seqs, inner), np.float32)
    for s in range(num_seqs):
        for i in range(hidden):
            x[s, i] = weights.embedding[token_ids[s], i]
    for layer in range(num_layers):
        blocks = kv[layer].reshape(num_slots // block_size, block_size, 2, kv_heads, dim)
        rms_norm(x, weights.norm_1[layer], weights.eps, normed)
        matmul(normed, weights.qkv[layer], qkv, False, 0, qkv.shape[1])
        by_head = qkv.reshape(num_seqs, heads + 2 * kv_heads, dim)
        rotate_and_write(by_head, weights.rope, positions, slots, kv[layer], 0, num_seqs)
        attend_groups(by_head, blocks, block_tables, context_lens, attended, 0, num_seqs * kv_heads)
        matmul(attended.reshape(num_seqs, heads * dim), weights.out[layer], x, True, 0, hidden)
        rms_norm(x, weights.norm_2[layer], weights.eps, normed)
        matmul(normed, weights.gate_up[layer], gate_up, False, 0, 2 * inner)
        silu_mul(gate_up, mixed, 0, inner)
        matmul(mixed, weights.down[layer], x, True, 0, hidden)
    rms_norm(x, weights.norm, weights.eps, normed)
    matmul(normed, weights.head, logits, False, 0, logits.shape[1])
