"""Chapter 09: the walk over the block table, compiled for this CPU, up to a whole decode step.

Each kernel is the one before plus one idea. They take NumPy arrays, float32 and contiguous, and
write into arrays that they are given. The functions that take tensors call them for the engine.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import njit

from minikv.course.chapters.ch09_cpu_kernels.given import FAST, Weights, in_threads

# ── One query head at a time ──────────────────────────────────────────────────────────────


@njit(nogil=True, fastmath=FAST)
def attend_heads(q, kv, block_tables, context_lens, out):
    """One query for each of S sequences, through the block table: the loop of 04.4 in numbers.

    q, out (S, H, D); kv (num_blocks, block_size, 2, K, D) of one layer; block_tables (S, B) and
    context_lens (S,) int64. Query head h reads KV head h // (H // K). For each query head, every
    key and value of the context is read once, a block at a time, and only `out` is written.
    A sequence's entries past its last block are not read, nor are slots without a token: they
    may hold anything, NaN too.

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


@njit(nogil=True, fastmath=FAST)
def attend_groups(q, kv, block_tables, context_lens, out, first, last):
    """The same for a piece of the work, each block read once for all query heads of its group.

    Shapes as in `attend_heads`, G = H // K query heads in a group. Item w of the work is KV head
    w % K of sequence w // K, with the G query heads that read it; there are S * K items. This
    call does items `first` … `last` - 1 and writes their rows of `out` and no others.

    For 2 sequences and 2 KV heads, items 1 and 2 are KV head 1 of sequence 0 and KV head 0 of
    sequence 1. Within an item, a block's K and V are read for all G heads before the next block
    is touched: what G heads need then comes from memory once.
    """
    heads, dim = q.shape[1:]
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


# ── Pieces for threads ────────────────────────────────────────────────────────────────────


def share(context_lens: list[int], kv_heads: int, num_pieces: int) -> list[tuple[int, int]]:
    """Cut the items of `attend_groups` into `num_pieces` pieces (first, last) of about equal work.

    Item w reads the context of sequence w // kv_heads, so that is its work, in tokens. The pieces
    lie side by side, from item 0 to the last one, and every item is in exactly one; a piece may
    be empty, as (3, 3). No piece has more work than the even share plus one longest context:
    total / num_pieces + max(context_lens).

    Contexts of 90, 10, 10 and 10 and one KV head are 120 tokens, 60 for each of two pieces.
    [(0, 1), (1, 4)] is 90 and 30 tokens; two items each would be 100 and 20.
    """
    work = np.repeat(np.asarray(context_lens), kv_heads)
    before = np.cumsum(work) - work  # tokens of all items before each
    cuts = [int(np.searchsorted(before, work.sum() * i / num_pieces)) for i in range(num_pieces)]
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


@njit(nogil=True, fastmath=FAST)
def attend_item(q, kv, block_table, context, out, scores, weights):
    """One item of the work, in two passes over its context, with room for L = B * block_size.

    q, out (G, D); kv (num_blocks, block_size, 2, D) of one KV head; block_table (B,) of one
    sequence, `context` its tokens. `scores` (G, L) and `weights` (G, L) are room to work in.
    """
    group, dim = q.shape
    block_size = kv.shape[1]
    scale = np.float32(1 / math.sqrt(dim))
    for g in range(group):
        top = np.float32(-np.inf)
        for p in range(context):
            block, offset = block_table[p // block_size], p % block_size
            score = np.float32(0)
            for d in range(dim):
                score += q[g, d] * kv[block, offset, 0, d]
            scores[g, p] = score * scale
            top = max(top, scores[g, p])
        for p in range(context):
            weights[g, p] = math.exp(scores[g, p] - top)
    for g in range(group):
        total = np.float32(0)
        for p in range(context):
            total += weights[g, p]
        out[g] = 0
        for p in range(context):
            block, offset = block_table[p // block_size], p % block_size
            for d in range(dim):
                out[g, d] += weights[g, p] / total * kv[block, offset, 1, d]


def decode_items(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor,
    run: Callable = in_threads,
) -> torch.Tensor:  # fmt: skip
    """q (S, H, D), kv (num_blocks, block_size, 2, K, D) -> (S, H, D).

    One call of `attend_item` for each sequence and KV head; `run(kernel, calls)` makes them, in
    any order or at the same time.
    """
    out = torch.empty(q.shape)
    kv_heads = kv.shape[3]
    group, room = q.shape[1] // kv_heads, block_tables.shape[1] * kv.shape[1]
    calls = []
    for s in range(len(q)):
        for kv_head in range(kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            scores, weights = np.empty((2, group, room), np.float32)
            calls.append(
                (q[s, heads].numpy(), kv[:, :, :, kv_head].numpy(), block_tables[s].numpy(),
                 int(context_lens[s]), out[s, heads].numpy(), scores, weights)
            )  # fmt: skip
    run(attend_item, calls)
    return out


# ── Weights once for a batch ──────────────────────────────────────────────────────────────


@njit(nogil=True, fastmath=FAST)
def linear(x, weight, out, add):
    """out = x W^T, or out += x W^T if `add`; every row of W is read once for all rows of x.

    x (S, inputs), weight (outputs, inputs), out (S, outputs). Four rows of x at a time share
    each weight that is loaded; the rows left over are done one by one.

    For x = [[1, 2], [0, 1]] and W = [[3, 4]], out is [[11], [4]]. If out was [[100], [100]] and
    `add` is true, it is then [[111], [104]].
    """
    rows, inputs = x.shape
    for o in range(len(weight)):
        row = 0
        while row + 4 <= rows:
            a = b = c = d = np.float32(0)
            for i in range(inputs):
                w = weight[o, i]
                a += w * x[row, i]
                b += w * x[row + 1, i]
                c += w * x[row + 2, i]
                d += w * x[row + 3, i]
            if add:
                out[row, o] += a
                out[row + 1, o] += b
                out[row + 2, o] += c
                out[row + 3, o] += d
            else:
                out[row, o] = a
                out[row + 1, o] = b
                out[row + 2, o] = c
                out[row + 3, o] = d
            row += 4
        while row < rows:
            a = np.float32(0)
            for i in range(inputs):
                a += weight[o, i] * x[row, i]
            if add:
                out[row, o] += a
            else:
                out[row, o] = a
            row += 1


# ── The whole step ────────────────────────────────────────────────────────────────────────


@njit(nogil=True, fastmath=FAST)
def rms_norm(x, weight, eps, out):
    """Each row of x (S, hidden) / sqrt(mean of its squares + eps) * weight (hidden,) -> out."""
    for row in range(len(x)):
        squares = np.float32(0)
        for i in range(x.shape[1]):
            squares += x[row, i] * x[row, i]
        shrink = np.float32(1 / math.sqrt(squares / x.shape[1] + eps))
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * shrink * weight[i]


@njit(nogil=True, fastmath=FAST)
def rotate_and_write(qkv, rope, positions, slots, kv, q):
    """Split what a layer has projected: queries, rotated, into q; keys, rotated, and values into
    their slots.

    qkv (S, (H + 2 K) * D): the queries of a row, then its keys, then its values. rope (P, 2, D):
    cos and sin of each position, the first half of sin negated. positions, slots (S,);
    kv (num_blocks, block_size, 2, K, D) of one layer; q (S, H, D).
    """
    num_seqs, heads, dim = q.shape
    block_size, kv_heads = kv.shape[1], kv.shape[3]
    for s in range(num_seqs):
        block, offset = slots[s] // block_size, slots[s] % block_size
        for h in range(heads + kv_heads):
            to = q[s, h] if h < heads else kv[block, offset, 0, h - heads]
            for d in range(dim):
                swapped = qkv[s, h * dim + (d + dim // 2) % dim]
                cos, sin = rope[positions[s], 0, d], rope[positions[s], 1, d]
                to[d] = qkv[s, h * dim + d] * cos + swapped * sin
        for k in range(kv_heads):
            for d in range(dim):
                kv[block, offset, 1, k, d] = qkv[s, (heads + kv_heads + k) * dim + d]


@njit(nogil=True, fastmath=FAST)
def silu_mul(gate_up, out):
    """silu(gate) * up: gate_up (S, 2 * inner), the gates of a row first -> out (S, inner)."""
    inner = out.shape[1]
    for row in range(len(out)):
        for i in range(inner):
            gate = gate_up[row, i]
            out[row, i] = gate / (np.float32(1) + np.float32(math.exp(-gate))) * gate_up[row, inner + i]


@njit(nogil=True, fastmath=FAST)
def decode_step(token_ids, positions, block_tables, context_lens, slots, weights, kv, logits):
    """One token for each of S sequences, from its id to its logits: a decode step as one program.

    token_ids, positions, context_lens, slots (S,) int64: the newest token of each sequence, its
    position, the tokens it attends to (itself included) and the slot of its K and V.
    kv (L, num_blocks, block_size, 2, K, D), all layers; logits (S, vocab). `weights` is a
    `Weights`: its docstring has the shapes. Writes the new tokens' K and V of every layer, and
    all of `logits`.

    A layer: normalise, project to q, k and v, rotate and write, attend, project and add to x;
    normalise, project to gate and up, silu and multiply, project and add to x.
    """
    num_seqs, hidden = len(token_ids), weights.embedding.shape[1]
    num_layers, kv_heads, dim = kv.shape[0], kv.shape[4], kv.shape[5]
    heads = weights.out.shape[2] // dim
    inner = weights.down.shape[2]
    x = np.empty((num_seqs, hidden), np.float32)
    normed = np.empty((num_seqs, hidden), np.float32)
    qkv = np.empty((num_seqs, (heads + 2 * kv_heads) * dim), np.float32)
    q = np.empty((num_seqs, heads, dim), np.float32)
    attended = np.empty((num_seqs, heads, dim), np.float32)
    gate_up = np.empty((num_seqs, 2 * inner), np.float32)
    mixed = np.empty((num_seqs, inner), np.float32)
    for s in range(num_seqs):
        x[s] = weights.embedding[token_ids[s]]
    for layer in range(num_layers):
        rms_norm(x, weights.norm_1[layer], weights.eps, normed)
        linear(normed, weights.qkv[layer], qkv, False)
        rotate_and_write(qkv, weights.rope, positions, slots, kv[layer], q)
        attend_groups(
            q, kv[layer], block_tables, context_lens, attended, 0, num_seqs * kv_heads
        )
        linear(attended.reshape(num_seqs, heads * dim), weights.out[layer], x, True)
        rms_norm(x, weights.norm_2[layer], weights.eps, normed)
        linear(normed, weights.gate_up[layer], gate_up, False)
        silu_mul(gate_up, mixed)
        linear(mixed, weights.down[layer], x, True)
    rms_norm(x, weights.norm, weights.eps, normed)
    linear(normed, weights.head, logits, False)
