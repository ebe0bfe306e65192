"""The operations of a transformer as loops that Numba compiles for this machine.

The walk over the block table is that of `paged.blockwise_attention`, and the formulas are those
of `minikv.model`; what changes is who runs them. Each kernel fills memory that it is handed and
holds no lock of Python (`nogil`), so threads can run parts of it side by side: `first` and `last`
say which part, and two parts write nothing in common.

All arrays are float32 or int64, and contiguous. T tokens, S sequences, H query heads, K KV heads,
G = H / K query heads per KV head, D the head dim, N and I and O any number of channels.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from minikv.cpu.atomics import atomic_add, atomic_load, atomic_store, atomic_swap
from minikv.cpu.compiler import keep, kernel

zero, one = np.float32(0), np.float32(1)  # a bare 0.0 is a double, and so is every sum with it


@kernel
def rms_norm(x, weight, eps, out):
    """x / sqrt(mean(x^2) + eps) * weight, row by row.

    x (T, N), weight (N,) -> out (T, N), which may be x.
    """
    num_rows, size = x.shape
    for row in range(num_rows):
        values, normed = x[row], out[row]
        total = zero
        for i in range(size):
            total += values[i] * values[i]
        scale = np.float32(one / math.sqrt(total / np.float32(size) + eps))
        for i in range(size):
            normed[i] = values[i] * scale * weight[i]


@kernel
def matmul(x, weight, out, add, first, last):
    """out[:, first:last] = x weight[first:last]^T, added to what is there if `add`.

    x (T, I), weight (O, I), out (T, O). A value that is loaded is used four times: four rows of
    the weight meet four rows of x, and their 16 sums stay in registers.
    """
    num_rows, size = x.shape
    fours = num_rows // 4 * 4
    o = first
    while o + 4 <= last:
        w0, w1, w2, w3 = weight[o], weight[o + 1], weight[o + 2], weight[o + 3]
        for t in range(0, fours, 4):
            x0, x1, x2, x3 = x[t], x[t + 1], x[t + 2], x[t + 3]
            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
            s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
            for i in range(size):
                a, b, c, d = w0[i], w1[i], w2[i], w3[i]
                p, q, r, s = x0[i], x1[i], x2[i], x3[i]
                s00, s01, s02, s03 = s00 + p * a, s01 + p * b, s02 + p * c, s03 + p * d
                s10, s11, s12, s13 = s10 + q * a, s11 + q * b, s12 + q * c, s13 + q * d
                s20, s21, s22, s23 = s20 + r * a, s21 + r * b, s22 + r * c, s23 + r * d
                s30, s31, s32, s33 = s30 + s * a, s31 + s * b, s32 + s * c, s33 + s * d
            _store4(out[t], o, add, s00, s01, s02, s03)
            _store4(out[t + 1], o, add, s10, s11, s12, s13)
            _store4(out[t + 2], o, add, s20, s21, s22, s23)
            _store4(out[t + 3], o, add, s30, s31, s32, s33)
        for t in range(fours, num_rows):
            row = x[t]
            s0 = s1 = s2 = s3 = zero
            for i in range(size):
                v = row[i]
                s0, s1, s2, s3 = s0 + v * w0[i], s1 + v * w1[i], s2 + v * w2[i], s3 + v * w3[i]
            _store4(out[t], o, add, s0, s1, s2, s3)
        o += 4
    while o < last:  # at most three rows of the weight are left
        weights = weight[o]
        for t in range(num_rows):
            row = x[t]
            total = out[t, o] if add else zero
            for i in range(size):
                total += row[i] * weights[i]
            out[t, o] = total
        o += 1


@kernel
def _store4(row, o, add, s0, s1, s2, s3):
    if add:
        s0, s1, s2, s3 = s0 + row[o], s1 + row[o + 1], s2 + row[o + 2], s3 + row[o + 3]
    row[o], row[o + 1], row[o + 2], row[o + 3] = s0, s1, s2, s3


@kernel
def rotate_and_write(qkv, rope, positions, slots, kv, first, last):
    """RoPE on the queries and keys of tokens first to last, in place; then their keys and values
    into their slots.

    qkv (T, H + 2 K, D); rope (P, 2, D): cos and sin by position, the first half of sin negated;
    positions (T,), slots (T,); kv (num_slots, 2, K, D) of one layer.
    """
    kv_heads, head_dim = kv.shape[2], kv.shape[3]
    num_keys = qkv.shape[1] - kv_heads  # heads in front of the values: all that is rotated
    half = head_dim // 2
    for t in range(first, last):
        cos, sin = rope[positions[t], 0], rope[positions[t], 1]
        for head in range(num_keys):
            x = qkv[t, head]
            for i in range(half):
                a, b = x[i], x[i + half]
                x[i] = a * cos[i] + b * sin[i]
                x[i + half] = b * cos[i + half] + a * sin[i + half]
        slot = slots[t]
        for head in range(kv_heads):
            k, v = qkv[t, num_keys - kv_heads + head], qkv[t, num_keys + head]
            k_slot, v_slot = kv[slot, 0, head], kv[slot, 1, head]
            for i in range(head_dim):
                k_slot[i] = k[i]
                v_slot[i] = v[i]


@kernel
def write_cache(k, v, slots, kv):
    """Write keys and values, k and v (T, K, D), into their slots (T,).

    kv (num_slots, 2, K, D) of one layer.
    """
    num_tokens, kv_heads, head_dim = k.shape
    for t in range(num_tokens):
        for head in range(kv_heads):
            for i in range(head_dim):
                kv[slots[t], 0, head, i] = k[t, head, i]
                kv[slots[t], 1, head, i] = v[t, head, i]


@kernel
def attend_decode(q, kv, block_tables, context_lens, window, out, first, last):
    """One query per sequence attends to its context through its block table.

    q (S, H or more, D), of which the first H heads are the queries; kv (num_blocks, block_size,
    2, K, D) of one layer; block_tables (S, B), context_lens (S,); out (S, H, D). A query sees the
    last `window` keys, all of them if that is 0. Item i is KV head i % K of sequence i // K:
    items first to last are computed, of S * K.

    A block's K and V come from memory once, for all query heads that read them.
    """
    block_size, kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4]
    group = out.shape[1] // kv_heads
    scaled, acc, top, total, scores = _scratch(out.shape[1], head_dim, block_size)
    item = first
    while item < last:  # all heads of a sequence that are ours, together: a token's K and V of all
        row, kv_head = item // kv_heads, item % kv_heads  # heads lie side by side
        num_kv_heads = min(kv_heads - kv_head, last - item)
        item += num_kv_heads
        head, num_heads = kv_head * group, num_kv_heads * group
        end = context_lens[row]
        start = max(end - window, 0) if window > 0 else 0
        for g in range(num_heads):
            _begin(q[row, head + g], scaled[g], acc[g])
            top[g], total[g] = -np.inf, zero
        for index in range(start // block_size, (end + block_size - 1) // block_size):
            begin = index * block_size
            lo, hi = max(start - begin, 0), min(end - begin, block_size)
            block = kv[block_tables[row, index]]
            for g in range(num_heads):
                _fold(scaled[g], block, kv_head + g // group, lo, hi, g, scores, top, total, acc[g])
        for g in range(num_heads):
            _finish(acc[g], total[g], out[row, head + g])


@kernel
def attend_prefill(q, kv, block_tables, context_lens, query_start, window, out, first, last):
    """Chunks of queries attend to their contexts: the queries of sequence s are the tokens
    query_start[s] to query_start[s + 1], and stand at the last positions of its context.

    q (T, H or more, D), out (T, H, D), query_start (S + 1,), counted from the batch's start; the
    rest as in `attend_decode`. Items first to last are computed, of S * K.

    For many queries this is two matrix products, so a few blocks at a time are laid out for them,
    the values turned over. They are read once for a tile of queries of all heads of the group.
    """
    kv_heads, head_dim = kv.shape[3], kv.shape[4]
    group = out.shape[1] // kv_heads
    scaled, acc, top, total, _ = _scratch(TILE * group, head_dim, 1)
    keys, values = np.zeros((KEYS, head_dim), np.float32), np.zeros((head_dim, KEYS), np.float32)
    scores = np.empty((TILE * group, KEYS), np.float32)
    for item in range(first, last):
        row, kv_head = item // kv_heads, item % kv_heads
        end_of_chunk = query_start[row + 1]
        for tile in range(query_start[row], end_of_chunk, TILE):
            num_queries = min(TILE, end_of_chunk - tile)
            num_rows = num_queries * group
            seen = context_lens[row] - end_of_chunk + tile + 1  # positions for the first query
            for r in range(num_rows):
                _begin(q[tile + r // group, kv_head * group + r % group], scaled[r], acc[r])
                top[r], total[r] = -np.inf, zero
            start, end = max(seen - window, 0) if window > 0 else 0, seen + num_queries - 1
            for begin in range(start, end, KEYS):
                count = min(KEYS, end - begin)
                _lay_out(kv, block_tables[row], kv_head, begin, count, keys, values)
                matmul(scaled[:num_rows], keys, scores, False, 0, count)
                for r in range(num_rows):
                    hi = min(seen + r // group - begin, count)
                    lo = max(seen + r // group - window - begin, 0) if window > 0 else 0
                    _soften(scores[r], lo, hi, r, top, total, acc[r])
                matmul(scores[:num_rows], values, acc, True, 0, head_dim)
            for r in range(num_rows):
                _finish(acc[r], total[r], out[tile + r // group, kv_head * group + r % group])


TILE, KEYS = 32, 64  # queries, and keys, that meet in one product


@kernel
def _lay_out(kv, table, kv_head, begin, count, keys, values):
    """Copy the K and V of `count` positions from `begin` on: keys (KEYS, D), values (D, KEYS)."""
    block_size, head_dim = kv.shape[1], kv.shape[4]
    for t in range(count):
        position = begin + t
        block, slot = table[position // block_size], position % block_size
        k, v, key = kv[block, slot, 0, kv_head], kv[block, slot, 1, kv_head], keys[t]
        for d in range(head_dim):
            key[d] = k[d]
            values[d, t] = v[d]


@kernel
def _soften(scores, lo, hi, row, top, total, acc):
    """The scores of one query become weights, exp(score - top), and 0 outside lo to hi; what was
    summed up before shrinks to the new largest score (Milakov and Gimelshein, 2018)."""
    highest = top[row]
    for t in range(lo, hi):
        highest = max(highest, scores[t])
    for t in range(min(lo, len(scores))):
        scores[t] = zero
    for t in range(max(hi, 0), len(scores)):
        scores[t] = zero
    if lo >= hi:
        return
    shrink = exp(top[row] - highest)
    for d in range(len(acc)):
        acc[d] *= shrink
    weights = scores[lo:hi]
    sum_of_weights = zero
    for t in range(hi - lo):
        weights[t] = exp(weights[t] - highest)
        sum_of_weights += weights[t]
    total[row] = total[row] * shrink + sum_of_weights
    top[row] = highest


@kernel
def attend(q, kv, tables, lens, query_start, window, out, first, last, border):
    """Items before `border` are decodes, the rest chunks."""
    if first < border:
        attend_decode(q, kv, tables, lens, window, out, first, min(last, border))
    if last > border:
        start = max(first, border)
        attend_prefill(q, kv, tables, lens, query_start, window, out, start, last)


@kernel
def share_attention(shared, q, kv, tables, lens, query_start, window, out, border, count):
    """`attend`, of all items, in `count` chunks. Threads that call this together take chunks
    until none is left. Returns when all are done. `shared` is zeros at the start."""
    num_items = len(lens) * kv.shape[3]
    while True:
        chunk = atomic_add(shared, OPEN, 1)
        if chunk >= count:
            break
        first, last = _bounds(num_items, chunk, count, 1)
        attend(q, kv, tables, lens, query_start, window, out, first, last, border)
        atomic_add(shared, DONE, 1)
    while atomic_load(shared, DONE) < count:
        pass


@kernel
def norm_heads(heads, first, last, weight, eps):
    """`rms_norm` of each of the heads first to last, in place: heads (T, any, D), weight (D,)."""
    for t in range(len(heads)):
        rms_norm(heads[t, first:last], weight, eps, heads[t, first:last])


@kernel
def _scratch(rows, head_dim, block_size):
    """Scaled queries and sums of `rows` running softmaxes, and the scores of one block."""
    scaled = np.empty((rows, head_dim), np.float32)
    acc = np.empty((rows, head_dim), np.float32)
    top, total = np.empty(rows, np.float32), np.empty(rows, np.float32)
    return scaled, acc, top, total, np.empty(block_size, np.float32)


@kernel
def _begin(query, scaled, acc):
    """A copy of the query, for a slice of a larger array is slower to read; and an empty sum."""
    head_dim = scaled.shape[0]
    scale = np.float32(one / math.sqrt(head_dim))
    for d in range(head_dim):
        scaled[d] = query[d] * scale
        acc[d] = zero


@kernel
def _fold(q, block, kv_head, lo, hi, row, scores, top, total, acc):
    """Fold the keys lo to hi of a block into a running softmax (Milakov and Gimelshein, 2018).

    q (D,), scaled; block (block_size, 2, K, D). top[row] is the largest score so far, total[row]
    the sum of exp(score - top), acc (D,) the sum of exp(score - top) v.
    """
    head_dim = q.shape[0]
    highest = top[row]
    for t in range(lo, hi):
        k = block[t, 0, kv_head]
        score = zero
        for d in range(head_dim):
            score += q[d] * k[d]
        scores[t] = score
        highest = max(highest, score)
    if highest > top[row]:
        shrink = exp(top[row] - highest)
        total[row] *= shrink
        for d in range(head_dim):
            acc[d] *= shrink
        top[row] = highest
    for t in range(lo, hi):
        scores[t] = exp(scores[t] - highest)
        total[row] += scores[t]
    t = lo
    while t + 4 <= hi:  # four values for each time that the sum is loaded and stored
        p0, p1, p2, p3 = scores[t], scores[t + 1], scores[t + 2], scores[t + 3]
        v0, v1 = block[t, 1, kv_head], block[t + 1, 1, kv_head]
        v2, v3 = block[t + 2, 1, kv_head], block[t + 3, 1, kv_head]
        for d in range(head_dim):
            acc[d] += p0 * v0[d] + p1 * v1[d] + p2 * v2[d] + p3 * v3[d]
        t += 4
    while t < hi:
        p, v = scores[t], block[t, 1, kv_head]
        for d in range(head_dim):
            acc[d] += p * v[d]
        t += 1


@kernel
def _finish(acc, total, out):
    scale = one / total
    for d in range(out.shape[0]):
        out[d] = acc[d] * scale


@kernel
def silu_mul(gate_up, out, first, last):
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)), for the channels first to last.

    gate_up (T, 2 I): gate in the first half, up in the second; out (T, I).
    """
    num_rows, size = out.shape
    for t in range(num_rows):
        gate, up = gate_up[t, first:last], gate_up[t, size + first : size + last]
        product = out[t, first:last]
        for i in range(last - first):
            product[i] = gate[i] / (one + exp(-gate[i])) * up[i]


LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
LOWEST, HIGHEST = np.float32(-87), np.float32(88)  # where e^x leaves the range of normal floats
SHIFT = np.float32(3 << 22)  # added to a small float, it leaves no bits for a fraction


@keep
@njit(nogil=True, fastmath={"contract"}, error_model="numpy")
def exp(x):
    """e^x of a float32, within about 2e-7 of it relatively; 0 < e^x always.

    With e^x = 2^n e^r and |r| <= ln(2) / 2 it is a polynomial and an addition to the exponent's
    bits: arithmetic that runs in all lanes at once. The library's `exp` takes one number at a
    time. The order of operations is what makes `n` a whole number, so here it stays.
    """
    x = min(max(x, LOWEST), HIGHEST)
    n = x * LOG2_E + SHIFT - SHIFT
    r = x - n * LN_2
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + one
    p = p * r + one
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


# ── A whole step ──────────────────────────────────────────────────────────────


class Weights(NamedTuple):
    """Of a transformer with L layers, one array for all layers. A bias or a norm that the model
    does not have is an array without rows: (0, …)."""

    embedding: np.ndarray  # (V, hidden)
    norm_1: np.ndarray  # (L, hidden)
    qkv: np.ndarray  # (L, (H + 2 K) * D, hidden)
    qkv_bias: np.ndarray  # (L or 0, (H + 2 K) * D)
    q_norm: np.ndarray  # (L or 0, D)
    k_norm: np.ndarray
    out: np.ndarray  # (L, hidden, H * D)
    out_bias: np.ndarray  # (L or 0, hidden)
    norm_2: np.ndarray  # (L, hidden)
    gate_up: np.ndarray  # (L, 2 * intermediate, hidden)
    gate_up_bias: np.ndarray  # (L or 0, 2 * intermediate)
    down: np.ndarray  # (L, hidden, intermediate)
    down_bias: np.ndarray  # (L or 0, hidden)
    norm: np.ndarray  # (hidden,)
    head: np.ndarray  # (V, hidden)
    rope: np.ndarray  # (P, 2, D)
    windows: np.ndarray  # (L,), 0 for none
    eps: np.float32


class Buffers(NamedTuple):
    """What a step reads and writes: at most T tokens of S sequences. The arrays stay where they
    are, so a thread that helps knows them from the step before. `heads`, `heads_out` and
    `kv_slots` are other views of `qkv`, `attended` and `kv`."""

    token_ids: np.ndarray  # (T,)
    positions: np.ndarray  # (T,)
    slots: np.ndarray  # (T,)
    query_start: np.ndarray  # (S + 1,)
    context_lens: np.ndarray  # (S,)
    block_tables: np.ndarray  # (S, B)
    kv: np.ndarray  # (L, num_blocks, block_size, 2, K, D)
    kv_slots: np.ndarray  # (L, num_slots, 2, K, D)
    x: np.ndarray  # (T, hidden)
    normed: np.ndarray  # (T, hidden)
    qkv: np.ndarray  # (T, (H + 2 K) * D)
    heads: np.ndarray  # (T, H + 2 K, D)
    attended: np.ndarray  # (T, H * D)
    heads_out: np.ndarray  # (T, H, D)
    gate_up: np.ndarray  # (T, 2 * intermediate)
    product: np.ndarray  # (T, intermediate)
    logits: np.ndarray  # (S, V)
    shared: np.ndarray  # (NUM_SHARED,): what threads tell each other


# A step is a row of phases: five per layer, and the head. Each is cut into chunks, which threads
# take one by one until none is left. The thread that leads opens a phase when the one before is
# done. Those that help come and go: one that the system has set aside is missed only while it
# holds a chunk.
QKV, ATTEND, OUT, GATE_UP, DOWN = 0, 1, 2, 3, 4
PHASES = 5

# Places in `shared`. Those that are written often lie on cache lines of their own.
OPEN = 0  # the open phase: its number << 32 | how many chunks << 16 | the next one to take
DONE = 16  # how many of its chunks are done
HELPERS = 32  # threads that help
PART, TOKENS, SEQS, DECODES = 48, 49, 50, 51  # which phase of the step is open; its batch
NUM_SHARED = 64


@kernel
def run_step(weights, buffers, num_chunks, patience):
    """Compute a step, embedding to logits, each phase in `num_chunks` chunks (below 2^16); or, if
    that is 0, help with the steps of the thread that leads: take chunks of whatever phase is open,
    until none has been opened for `patience` turns of a loop.

    Returns the longest wait for a chunk that another thread had taken, in turns of a loop.
    """
    shared = buffers.shared
    leads = num_chunks > 0
    if not leads:
        atomic_add(shared, HELPERS, 1)
    number = atomic_load(shared, OPEN) >> 32
    part, waited, longest = np.int64(0), np.int64(0), np.int64(0)
    while waited < patience:
        if leads:
            if part > PHASES * len(weights.norm_1):
                return longest
            _prepare(weights, buffers, part)
            shared[PART], shared[DONE] = part, 0
            number, part = number + 1, part + 1
            atomic_store(shared, OPEN, number << 32 | num_chunks << 16)
        while True:
            word = atomic_load(shared, OPEN)
            chunk, count = word & 0xFFFF, word >> 16 & 0xFFFF
            if word >> 32 != number or chunk == count:
                break
            if atomic_swap(shared, OPEN, word, word + 1):  # else another thread was faster
                _compute(weights, buffers, shared[PART], chunk, count)
                atomic_add(shared, DONE, 1)
        waited = 0
        if leads:
            while atomic_load(shared, DONE) < num_chunks:
                waited += 1
            longest, waited = max(longest, waited), 0
        else:
            while waited < patience and atomic_load(shared, OPEN) >> 32 == number:
                waited += 1
            number = atomic_load(shared, OPEN) >> 32
    atomic_add(shared, HELPERS, -1)
    return longest


@kernel
def _prepare(w, b, part):
    """What comes before a phase and is too little to be shared."""
    num_tokens = b.shared[TOKENS]
    layer, phase = part // PHASES, part % PHASES
    x = b.x[:num_tokens]
    if layer == len(w.norm_1):  # the head: the last token of each sequence
        for row in range(b.shared[SEQS]):
            token = b.query_start[row + 1] - 1
            _copy(b.x[token : token + 1], b.normed[row : row + 1])
        rms_norm(b.normed[: b.shared[SEQS]], w.norm, w.eps, b.normed)
    elif phase == QKV:
        if layer == 0:
            for t in range(num_tokens):
                token_id = b.token_ids[t]
                _copy(w.embedding[token_id : token_id + 1], b.x[t : t + 1])
        rms_norm(x, w.norm_1[layer], w.eps, b.normed)
        _copy(w.qkv_bias[layer : layer + 1], b.qkv[:num_tokens])
    elif phase == ATTEND:
        if len(w.q_norm) > 0:
            num_heads, num_keys = b.heads_out.shape[1], b.heads.shape[1] - b.kv.shape[4]
            norm_heads(b.heads[:num_tokens], 0, num_heads, w.q_norm[layer], w.eps)
            norm_heads(b.heads[:num_tokens], num_heads, num_keys, w.k_norm[layer], w.eps)
        rotate_and_write(b.heads, w.rope, b.positions, b.slots, b.kv_slots[layer], 0, num_tokens)
    elif phase == OUT:
        _add(w.out_bias[layer : layer + 1], x)
    elif phase == DOWN:
        _add(w.down_bias[layer : layer + 1], x)
    else:
        rms_norm(x, w.norm_2[layer], w.eps, b.normed)
        _copy(w.gate_up_bias[layer : layer + 1], b.gate_up[:num_tokens])


@kernel
def _compute(w, b, part, chunk, num_chunks):
    """One chunk of a phase."""
    num_tokens, num_seqs = b.shared[TOKENS], b.shared[SEQS]
    layer, phase = part // PHASES, part % PHASES
    if phase == ATTEND:
        first, last = _bounds(num_seqs * b.kv.shape[4], chunk, num_chunks, 1)
        q, kv, tables, lens, out = b.heads, b.kv[layer], b.block_tables, b.context_lens, b.heads_out
        border, window = b.shared[DECODES] * b.kv.shape[4], w.windows[layer]
        attend(q, kv, tables, lens, b.query_start, window, out, first, last, border)
        return
    num_rows, size, add, times = num_tokens, b.x.shape[1], True, 1
    if layer == len(w.norm_1):
        x, weight, out, add = b.normed, w.head, b.logits, False
        num_rows, size = num_seqs, len(w.head)
    elif phase == QKV:
        x, weight, out, add = b.normed, w.qkv[layer], b.qkv, len(w.qkv_bias) > 0
        size = len(weight)
    elif phase == OUT:
        x, weight, out = b.attended, w.out[layer], b.x
    elif phase == GATE_UP:
        x, weight, out, add = b.normed, w.gate_up[layer], b.gate_up, len(w.gate_up_bias) > 0
        size, times = len(weight) // 2, 2
    else:
        x, weight, out = b.product, w.down[layer], b.x
    first, last = _bounds(size, chunk, num_chunks, 4)
    for i in range(times):  # the same channels of gate, and of up
        matmul(x[:num_rows], weight, out, add, i * size + first, i * size + last)
    if phase == GATE_UP and layer < len(w.norm_1):
        silu_mul(b.gate_up, b.product[:num_rows], first, last)


@kernel
def _bounds(size, chunk, num_chunks, multiple):
    """Where a chunk of `size` begins and ends: at a multiple of `multiple`, but for the end."""
    per_chunk = (size + num_chunks * multiple - 1) // (num_chunks * multiple) * multiple
    return min(chunk * per_chunk, size), min((chunk + 1) * per_chunk, size)


@kernel
def _copy(source, target):
    """Copy a row, (1, N), to every row of the target, (T, N). If it is (0, N), there is none."""
    for t in range(len(target) * len(source)):
        for i in range(target.shape[1]):
            target[t, i] = source[0, i]


@kernel
def _add(source, target):
    """Add a row, (1, N), to every row of the target, (T, N). If it is (0, N), there is none."""
    for t in range(len(target) * len(source)):
        for i in range(target.shape[1]):
            target[t, i] += source[0, i]
