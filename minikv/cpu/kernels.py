"""The operations of a transformer as loops that Numba compiles for this machine.

The walk over the block table is that of `paged.blockwise_attention`, and the formulas are those
of `minikv.model`. Each kernel fills memory that it is given and does not hold Python's lock
(`nogil`), so threads can run parts of it side by side: `first` and `last` say which part, and no
two parts write to the same element.

All arrays are float32 or int64, and contiguous; weights, K and V may be bfloat16, as uint16, which
is the upper half of a float32. T tokens, S sequences, H query heads, K KV heads,
G = H / K query heads per KV head, D the head dim, N and I and O any number of channels.
"""

import inspect
import math
from functools import partial
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from minikv.cpu.addresses import call, unpacked
from minikv.cpu.atomics import atomic_add, atomic_load, atomic_store, atomic_swap, give_way
from minikv.cpu.compiler import INLINE, apart, inline, inner, keep, kernel, part
from minikv.cpu.tiles import (
    HEADS,
    KEYS,
    LANES,
    PANELS,
    ROWS,
    add_rows,
    ask_for,
    dot_rows,
    rows_of,
    tile,
)

zero, one = np.float32(0), np.float32(1)  # a bare 0.0 is a double, and so is every sum with it
# A bare 0, True or False as an argument has another type, for which a kernel would be compiled
# again.
START, ADD, SET = np.int64(0), np.bool_(True), np.bool_(False)


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
def matmul(x, panels, out, to, add, first, last):
    """out[:, to + first : to + last] = x times the weight's outputs first to last, added to what
    is there if `add`.

    x (T, I), panels (O / LANES, I, LANES) or two inputs in a word (see `tiles`), out (T, any).
    `first` is a multiple of
    UNIT, and so is `last`, unless it is the end.

    A panel stays in the first cache while up to CACHED rows of x, which stay in the second, are
    multiplied by it. So the weight comes from memory once for that many rows. The rows are cut
    evenly: 16 become 8 and 8, not 12 and 4. Each tile of them asks for some of the next panels, so
    that the memory is at work while all but the first compute.
    """
    sums, most = np.empty((ROWS, UNIT), np.float32), rows_of(panels)
    for begin in range(0, len(x), CACHED):
        end = min(begin + CACHED, len(x))
        for o in range(first, last, UNIT):
            width = min(UNIT, last - o)
            row, num_tiles = begin, (end - begin + most - 1) // most
            soon = o // LANES + PANELS if o + UNIT < last else o // LANES
            while row < end:
                count = (end - row + num_tiles - 1) // num_tiles
                tile(x, row, count, panels, o // LANES, soon, sums)
                soon = min(soon + 1, o // LANES + 2 * PANELS - 1)
                for r in range(count):
                    target, found = out[row + r, to + o : to + o + width], sums[r]
                    if add:
                        for i in range(width):
                            target[i] += found[i]
                    else:
                        for i in range(width):
                            target[i] = found[i]
                row, num_tiles = row + count, num_tiles - 1


UNIT = PANELS * LANES  # outputs that are computed together
CACHED = 192  # rows


@kernel
def rotate_and_write(qkv, rope, positions, slots, kv, first, last):
    """RoPE on the queries and keys of tokens first to last, in place; then their keys and values
    into their slots.

    qkv (T, H + 2 K, D); rope (P, 2, D): cos and sin by position, the first half of sin negated;
    positions (T,), slots (T,); kv (num_slots, 2, K, D) of one layer.
    """
    kv_heads, head_dim = kv.shape[2], kv.shape[3]
    num_keys = qkv.shape[1] - kv_heads  # heads in front of the values: all that is rotated
    rotate(qkv, 0, num_keys, rope, positions, first, last)
    for t in range(first, last):
        slot = slots[t]
        for head in range(kv_heads):
            k, v = qkv[t, num_keys - kv_heads + head], qkv[t, num_keys + head]
            k_slot, v_slot = kv[slot, 0, head], kv[slot, 1, head]
            for i in range(head_dim):
                k_slot[i] = k[i]
                v_slot[i] = v[i]


@inner
def rotate(qkv, first_head, last_head, rope, positions, first, last):
    """RoPE on the heads first_head to last_head of tokens first to last, in place, as in
    `rotate_and_write`."""
    half = qkv.shape[2] // 2
    for t in range(first, last):
        cos, sin = rope[positions[t], 0], rope[positions[t], 1]
        for head in range(first_head, last_head):
            x = qkv[t, head]
            for i in range(half):
                a, b = x[i], x[i + half]
                x[i] = a * cos[i] + b * sin[i]
                x[i + half] = b * cos[i + half] + a * sin[i + half]


@kernel
def write_cache(k, v, slots, kv):
    """Write keys and values, k and v (T, K, D), into their slots (T,).

    kv (num_slots, 2, K, D) of one layer.
    """
    for t in range(len(k)):
        for head in range(k.shape[1]):
            write_row(k[t, head], kv[slots[t], 0, head])
            write_row(v[t, head], kv[slots[t], 1, head])


@inline
def attend_decode(q, kv, block_tables, context_lens, window, out, first, last):
    """One query per sequence attends to its context through its block table.

    q (S, H or more, D), of which the first H heads are the queries; kv (num_blocks, block_size,
    2, K, D) of one layer; block_tables (S, B), context_lens (S,); out (S, H, D). A query sees the
    last `window` keys, all of them if that is 0. Item i is KV head i % K of sequence i // K:
    items first to last are computed, of S * K.

    K and V come from memory once for all query heads that read them: SPAN keys at a time, which
    stay in the caches while they are used.
    """
    block_size, kv_heads = dims_of(kv)
    group = out.shape[1] // kv_heads
    scaled, acc, top, total = _scratch(out.shape[1], out.shape[2])
    span = max(SPAN // block_size, 1)  # in blocks
    scores = np.empty((out.shape[1], span * block_size + KEYS), np.float32)
    item = first
    while item < last:  # all our heads of a sequence together, because a token's K and V of all
        row, kv_head = item // kv_heads, item % kv_heads  # heads lie side by side
        num_kv_heads = min(kv_heads - kv_head, last - item)
        item += num_kv_heads
        head, num_heads = kv_head * group, num_kv_heads * group
        end = context_lens[row]
        start = max(end - window, 0) if window > 0 else 0
        for g in range(num_heads):
            _begin(q[row, head + g], scaled[g], acc[g])
            top[g], total[g] = -np.inf, zero
        num_blocks = (end + block_size - 1) // block_size
        for begin in range(start // block_size, num_blocks, span):
            next_row, next_begin = row, begin + span  # what is read after these blocks
            if next_begin >= num_blocks and item < last:
                next_row = row + 1
                next_begin = max(context_lens[next_row] - window, 0) if window > 0 else 0
                next_begin //= block_size
            next_end = (context_lens[next_row] + block_size - 1) // block_size
            for g in range(0, num_heads, group):
                count = START
                for i in range(span):
                    index, soon = begin + i, next_begin + i
                    if soon < next_end:
                        prefetch(kv, 0, block_tables[next_row, soon], kv_head + g // group)
                    if index < num_blocks:
                        lo = max(start - index * block_size, 0)
                        hi = min(end - index * block_size, block_size)
                        place = block_tables[row, index], kv_head + g // group, lo, hi
                        dot_keys(scaled, g, group, kv, place, scores, count)
                        count += hi - lo
                for i in range(g, g + group):
                    _soften(scores[i, :count], START, count, i, top, total, acc[i])
                count = START
                for i in range(span):
                    index, soon = begin + i, next_begin + i
                    if soon < next_end:
                        prefetch(kv, 1, block_tables[next_row, soon], kv_head + g // group)
                    if index < num_blocks:
                        lo = max(start - index * block_size, 0)
                        hi = min(end - index * block_size, block_size)
                        place = block_tables[row, index], kv_head + g // group, lo, hi
                        add_values(scores, count, g, group, kv, place, acc)
                        count += hi - lo
        for g in range(num_heads):
            _finish(acc[g], total[g], out[row, head + g])


SPAN = 64  # keys whose scores are computed before the values are read


@inline
def attend_prefill(q, kv, block_tables, context_lens, query_start, window, out, first, last):
    """Chunks of queries attend to their contexts: the queries of sequence s are the tokens
    query_start[s] to query_start[s + 1], and stand at the last positions of its context.

    q (T, H or more, D), out (T, H, D), query_start (S + 1,), counted from the batch's start; the
    rest as in `attend_decode`. Items first to last are computed, of S * K.

    For many queries this is two matrix products, so a few blocks at a time are laid out for them
    in panels. They are read once for a tile of queries of all heads of the group.
    """
    kv_heads, head_dim = kv.shape[3], kv.shape[4]
    group = out.shape[1] // kv_heads
    scaled, acc, top, total = _scratch(TILE * group, head_dim)
    keys = np.zeros((COLUMNS // LANES, head_dim, LANES), np.float32)
    num_panels = (head_dim + UNIT - 1) // UNIT * PANELS
    values = np.zeros((num_panels, COLUMNS, LANES), np.float32)
    scores = np.empty((TILE * group, COLUMNS), np.float32)
    for item in range(first, last):
        row, kv_head = item // kv_heads, item % kv_heads
        end_of_chunk = query_start[row + 1]
        for query in range(query_start[row], end_of_chunk, TILE):
            num_queries = min(TILE, end_of_chunk - query)
            num_rows = num_queries * group
            seen = context_lens[row] - end_of_chunk + query + 1  # positions for the first query
            for r in range(num_rows):
                _begin(q[query + r // group, kv_head * group + r % group], scaled[r], acc[r])
                top[r], total[r] = -np.inf, zero
            start, end = max(seen - window, 0) if window > 0 else 0, seen + num_queries - 1
            # At multiples of COLUMNS: where a sum is cut does not depend on where the chunk begins.
            for begin in range(start // COLUMNS * COLUMNS, end, COLUMNS):
                unseen, count = max(start - begin, 0), min(COLUMNS, end - begin)
                _lay_out(kv, block_tables[row], kv_head, begin, unseen, count, keys, values)
                top_row = max(begin - seen + 1, START) * group  # those above see none of these keys
                seeing, found = scaled[top_row:num_rows], scores[top_row:num_rows]
                matmul(seeing, keys, found, START, SET, START, count)
                for r in range(top_row, num_rows):
                    hi = min(seen + r // group - begin, count)
                    lo = max(seen + r // group - window - begin, START) if window > 0 else START
                    _soften(scores[r], lo, hi, r, top, total, acc[r])
                matmul(found, values, acc[top_row:], START, ADD, START, head_dim)
            for r in range(num_rows):
                _finish(acc[r], total[r], out[query + r // group, kv_head * group + r % group])


TILE, COLUMNS = 128, 64  # queries, and keys, that meet in one product


@inner
def _lay_out(kv, table, kv_head, begin, first, last, keys, values):
    """Copy the K and V of the positions begin + first to begin + last into panels: `keys`, whose
    inputs are channels, and `values`, whose inputs are keys. Values before and after are set to 0:
    their weight is 0, but what an earlier call left there may be NaN, and 0 times NaN is NaN."""
    block_size, head_dim = kv.shape[1], kv.shape[4]
    values[:, :first] = zero
    for t in range(first, last):
        position = begin + t
        block, slot = table[position // block_size], position % block_size
        k, v, key = kv[block, slot, 0, kv_head], kv[block, slot, 1, kv_head], keys[t // LANES]
        for d in range(head_dim):
            key[d, t % LANES] = widen(k[d])
            values[d // LANES, t, d % LANES] = widen(v[d])
    values[:, last:] = zero


@part
def _soften(scores, lo, hi, row, top, total, acc):
    """Turn the scores of one query into weights, exp(score - top), and 0 outside lo to hi; rescale
    the earlier sums to the new largest score (Milakov and Gimelshein, 2018)."""
    lo = min(lo, len(scores))
    hi = max(lo, hi)
    before, weights, behind = scores[:lo], scores[lo:hi], scores[hi:]
    for t in range(len(before)):
        before[t] = zero
    for t in range(len(behind)):
        behind[t] = zero
    if lo == hi:
        return
    highest = np.int32(LEAST)
    for t in range(hi - lo):
        highest = max(highest, _in_order(np.float32(weights[t]).view(np.int32)))
    new_top = max(top[row], np.int32(_in_order(highest)).view(np.float32))
    shrink = exp(top[row] - new_top)
    for d in range(len(acc)):
        acc[d] *= shrink
    sum_of_weights = zero
    for t in range(hi - lo):
        weights[t] = exp(weights[t] - new_top)
        sum_of_weights += weights[t]
    total[row] = total[row] * shrink + sum_of_weights
    top[row] = new_top


LEAST = -(1 << 31)


@part
def _in_order(bits):
    """A float's bits as a whole number: larger floats have larger ones. And back. The compiler may
    compare whole numbers in any order, and so in all lanes at once; floats could be NaN."""
    return np.int32(bits ^ np.int32(np.int32(bits >> 31) & 0x7FFFFFFF))


@inline
def attend(q, kv, tables, lens, query_start, window, out, first, last, border):
    """Items before `border` are decodes, the rest chunks."""
    if first < border:
        attend_decode(q, kv, tables, lens, window, out, first, min(last, border))
    if last > border:
        start = max(first, border)
        attend_prefill(q, kv, tables, lens, query_start, window, out, start, last)


@inner
def norm_heads(heads, first, last, weight, eps):
    """`rms_norm` of each of the heads first to last, in place: heads (T, any, D), weight (D,)."""
    for t in range(len(heads)):
        rms_norm(heads[t, first:last], weight, eps, heads[t, first:last])


@kernel
def _scratch(rows, head_dim):
    """Scaled queries, and sums of `rows` running softmaxes."""
    scaled = np.empty((rows, head_dim), np.float32)
    acc = np.empty((rows, head_dim), np.float32)
    return scaled, acc, np.empty(rows, np.float32), np.empty(rows, np.float32)


@part
def _begin(query, scaled, acc):
    """A scaled copy of the query, because a slice of a larger array is slower to read; an empty
    sum."""
    head_dim = scaled.shape[0]
    scale = np.float32(one / math.sqrt(head_dim))
    for d in range(head_dim):
        scaled[d] = query[d] * scale
        acc[d] = zero


@part
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
    time. No `reassoc` here: the order of operations is what makes `n` a whole number.
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


# ── Numbers of 16 bits ────────────────────────────────────────────────────────


def widen(number):
    """The float32 whose upper 16 bits these are; a float32 as it is."""
    raise NotImplementedError  # compiled code has one of the functions below in its place


def write_row(values, row):
    """Copy float32 values (N,) to a row (N,) of float32, or to the nearest bfloat16, as uint16."""
    raise NotImplementedError


@overload(widen, jit_options=INLINE)
def _widen(number):
    return _as_it_is if number == types.float32 else _upper_half


@overload(write_row, jit_options=INLINE, strict=False)
def _write_row(values, row):
    return _round if row.dtype == types.uint16 else _copy


def _as_it_is(number):
    return number


def _upper_half(number):
    return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def _copy(values, row):
    for i in range(len(row)):
        row[i] = values[i]


def _round(values, row):
    """Halves to the even one."""
    for i in range(len(row)):
        x = values[i]
        bits = bits_of(x)
        nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        row[i] = np.uint16(nearest >> np.uint32(16)) if x == x else np.uint16(0x7FC0)


@part
def bits_of(x):
    return np.float32(x).view(np.uint32)


# ── K and V ───────────────────────────────────────────────────────────────────
#
# One array is one way to keep them, and `minikv.quant` has others. The kernels use only
# these functions, and the compiler picks their bodies by the type of `kv`.


def layer_of(kv, layer):
    """One layer's part of the K and V of all layers."""
    raise NotImplementedError  # compiled code has one of the functions below in its place


def dims_of(kv):
    """(block_size, K) of one layer."""
    raise NotImplementedError


def write_new(kv, qkv, slots, kv_head, first, last):
    """One head's keys and values of the tokens first to last into their slots: qkv (T, H + 2 K, D),
    slots (T,)."""
    raise NotImplementedError


def dot_keys(q, head, num_heads, kv, place, scores, to):
    """scores[head + h, to + t] = q[head + h] . key t, for h < num_heads. The keys are those of a
    `place`: (block id, KV head, first slot, last slot)."""
    raise NotImplementedError


def prefetch(kv, i, block_id, kv_head):
    """Ask for the keys (i = 0) or values (i = 1) of a block and a head, which will be read soon. A
    processor guesses what a loop reads next, but not across the places to which a block table
    leads. It can wait for a few dozen lines at a time. So keys are asked for while keys are read,
    and values while values are.
    """
    raise NotImplementedError


def add_values(weights, at, head, num_heads, kv, place, acc):
    """acc[head + h] += the sum of weights[head + h, at + t] * value t."""
    raise NotImplementedError


def answer(question, kind, function) -> None:
    """In compiled code `function` takes the place of `question` if `kv` is of this kind: an
    array, or a NamedTuple of arrays."""
    at = list(inspect.signature(question).parameters).index("kv")

    def chosen(*args):
        is_array = isinstance(args[at], types.Array)
        found = np.ndarray if is_array else getattr(args[at], "instance_class", None)
        return function if found is kind else None

    overload(question, jit_options=INLINE, strict=False)(chosen)


def _write_floats(kv, qkv, slots, kv_head, first, last):
    block_size, kv_heads = kv.shape[1], kv.shape[3]
    keys = qkv.shape[1] - 2 * kv_heads
    for t in range(first, last):
        block, slot = slots[t] // block_size, slots[t] % block_size
        for i in range(2):
            source, target = qkv[t, keys + i * kv_heads + kv_head], kv[block, slot, i, kv_head]
            write_row(source, target)


def _dot_floats(q, head, num_heads, kv, place, scores, to):
    block_id, kv_head, lo, hi = place
    stride = 2 * kv.shape[3] * kv.shape[4]
    begin = (block_id * kv.shape[1] + lo) * stride + kv_head * kv.shape[4]
    if q.shape[1] % LANES == 0:
        for h in range(head, head + num_heads, HEADS):
            count = min(HEADS, head + num_heads - h)
            dot_rows(q, h, count, kv, begin, stride, hi - lo, scores, to)
        return
    for h in range(head, head + num_heads):
        for t in range(lo, hi):
            key, score = kv[block_id, t, 0, kv_head], zero
            for d in range(q.shape[1]):
                score += q[h, d] * widen(key[d])
            scores[h, to + t - lo] = score


def _add_floats(weights, at, head, num_heads, kv, place, acc):
    block_id, kv_head, lo, hi = place
    stride = 2 * kv.shape[3] * kv.shape[4]
    begin = (block_id * kv.shape[1] + lo) * stride + (kv.shape[3] + kv_head) * kv.shape[4]
    if acc.shape[1] % LANES == 0:
        for h in range(head, head + num_heads, HEADS):
            count = min(HEADS, head + num_heads - h)
            add_rows(weights, at, h, count, kv, begin, stride, hi - lo, acc)
        return
    for h in range(head, head + num_heads):
        for t in range(lo, hi):
            value, weight = kv[block_id, t, 1, kv_head], weights[h, at + t - lo]
            for d in range(acc.shape[1]):
                acc[h, d] += weight * widen(value[d])


def _prefetch_floats(kv, i, block_id, kv_head):
    size = kv.shape[4]
    stride = 2 * kv.shape[3] * size
    begin = block_id * kv.shape[1] * stride + (i * kv.shape[3] + kv_head) * size
    ask_for(kv, begin, stride, kv.shape[1], size)


answer(layer_of, np.ndarray, lambda kv, layer: kv[layer])
answer(dims_of, np.ndarray, lambda kv: (kv.shape[1], kv.shape[3]))
answer(write_new, np.ndarray, _write_floats)
answer(prefetch, np.ndarray, _prefetch_floats)
answer(dot_keys, np.ndarray, _dot_floats)
answer(add_values, np.ndarray, _add_floats)


# What a step calls. Each way to keep K and V has its own code for these two.


@apart
def write_layer(packed, layer, qkv, slots, num_tokens):
    """The keys and values of a step into their slots. K and V come packed."""
    kv = layer_of(unpacked(packed), layer)
    for kv_head in range(dims_of(kv)[1]):
        write_new(kv, qkv, slots, kv_head, 0, num_tokens)


@apart
def attend_layer(packed, layer, q, tables, lens, query_start, window, out, first, last, border):
    """`attend`."""
    kv = layer_of(unpacked(packed), layer)
    attend(q, kv, tables, lens, query_start, window, out, first, last, border)


# ── A whole step ──────────────────────────────────────────────────────────────


class Weights(NamedTuple):
    """The weights of a transformer with L layers, one array for all layers. A bias or a norm that
    the model does not have is an array without rows: (0, …). Matrices may be bfloat16. If they are
    float32, `qkv` and `gate_up` are multiplied by the norms' weights, channel by channel: whether x
    or the matrix is scaled makes no difference to their product."""

    embedding: np.ndarray  # (V, hidden)
    norms: np.ndarray  # (2 L or 0, hidden): two of each layer
    norm: np.ndarray  # (hidden,): the last one
    qkv: np.ndarray  # (L, (H + 2 K) * D, hidden), in panels: (L, outputs / LANES, hidden, LANES)
    qkv_bias: np.ndarray  # (L or 0, (H + 2 K) * D)
    q_norm: np.ndarray  # (L or 0, D)
    k_norm: np.ndarray
    out: np.ndarray  # (L, hidden, H * D), in panels
    out_bias: np.ndarray  # (L or 0, hidden)
    gate_up: np.ndarray  # (L, 2, intermediate, hidden), in panels
    gate_up_bias: np.ndarray  # (L or 0, 2 * intermediate)
    down: np.ndarray  # (L, hidden, intermediate), in panels
    down_bias: np.ndarray  # (L or 0, hidden)
    head: np.ndarray  # (V, hidden), in panels
    rope: np.ndarray  # (P, 2, D), or (0, 2, D): who writes K turns them, too
    windows: np.ndarray  # (L,), 0 for none
    eps: np.float32


class Buffers(NamedTuple):
    """What a step reads and writes: at most T tokens of S sequences. The arrays stay where they
    are, so that a helping thread can use the same ones in every step. `heads` and `heads_out` are
    other views of `qkv` and `attended`."""

    token_ids: np.ndarray  # (T,)
    positions: np.ndarray  # (T,)
    slots: np.ndarray  # (T,)
    query_start: np.ndarray  # (S + 1,)
    context_lens: np.ndarray  # (S,)
    block_tables: np.ndarray  # (S, B)
    kv: int  # the address of K and V, packed: (L, num_blocks, block_size, 2, K, D), or others
    write: int  # the addresses of `write_layer` and `attend_layer` for this kind of `kv`
    attend: int
    kv_heads: int
    x: np.ndarray  # (T, hidden)
    normed: np.ndarray  # (T, hidden): x times the next of `norms`; x itself if there are none
    squares: np.ndarray  # (hidden / UNIT, T): the sum of x^2, of UNIT channels each
    scale: np.ndarray  # (T,): what RMSNorm multiplies a row of x by
    qkv: np.ndarray  # (T, (H + 2 K) * D)
    heads: np.ndarray  # (T, H + 2 K, D)
    attended: np.ndarray  # (T, H * D)
    heads_out: np.ndarray  # (T, H, D)
    gate_up: np.ndarray  # (T, 2 * intermediate)
    product: np.ndarray  # (T, intermediate)
    hidden: np.ndarray  # (S, hidden): after the last norm
    logits: np.ndarray  # (S, V)
    shared: np.ndarray  # (NUM_SHARED,): what threads tell each other


# A step is a row of phases: five per layer, and the head. Each is cut into chunks, which threads
# take one by one until none is left. The leading thread opens a phase when the one before is done.
# Helping threads come and go: if the system suspends one, the others wait only for its chunk.
QKV, ATTEND, OUT, GATE_UP, DOWN = 0, 1, 2, 3, 4
PHASES = 5

# Places in `shared`. Those that are written often have cache lines of their own.
OPEN = 0  # the open phase: its number << 32 | how many chunks << 16 | the next one to take
DONE = 16  # how many of its chunks are done
HELPERS = 32  # threads that help
LEADS = 40  # whether a step is being computed: meanwhile, helpers stay
PART, TOKENS, SEQS, DECODES = 48, 49, 50, 51  # which phase of the step is open; its batch
OWN = 52  # how many chunks of the last step the leading thread has computed itself
NUM_SHARED = 64
A_WHILE = 1 << 16  # turns of a waiting loop


@partial(kernel, _nrt=False)
def run_step(weights, buffers, num_chunks, patience):
    """Compute a step, embedding to logits, each phase in `num_chunks` chunks (below 2^16). If that
    is 0, help the leading thread with its steps: take chunks of whatever phase is open, until no
    step has begun for `patience` turns of a loop.

    Returns how long the leader has waited for chunks that other threads had taken, in turns of a
    loop: the sum of the waits of more than `patience` turns.
    """
    shared = buffers.shared
    leads = num_chunks > 0
    atomic_add(shared, LEADS if leads else HELPERS, 1)
    number = atomic_load(shared, OPEN) >> 32
    part, waited, lost, own = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    while waited < patience:
        if leads:
            if part > PHASES * len(weights.qkv):
                atomic_add(shared, LEADS, -1)
                shared[OWN] = own
                return lost
            _prepare(weights, buffers, part)
            shared[PART], shared[DONE] = part, 0
            number, part = number + 1, part + 1
            atomic_store(shared, OPEN, number << 32 | num_chunks << 16)
        while True:
            word = atomic_load(shared, OPEN)
            chunk, count = word & 0xFFFF, word >> 16 & 0xFFFF
            if word >> 32 != number or chunk >= count:
                break
            if atomic_swap(shared, OPEN, word, word + 1):  # else another thread was faster
                _compute(weights, buffers, shared[PART], chunk, count)
                atomic_add(shared, DONE, 1)
                own += 1
        waited = 0
        if leads:
            while atomic_load(shared, DONE) < num_chunks:
                waited += 1
            lost, waited = lost + (waited if waited > patience else 0), 0
        else:
            while atomic_load(shared, OPEN) >> 32 == number and (
                waited < patience or atomic_load(shared, LEADS) > 0
            ):
                waited += 1
                if waited % A_WHILE == 0:  # on a busy machine the leader may wait for this core
                    give_way()
            opened = atomic_load(shared, OPEN) >> 32
            waited, number = waited if opened == number else np.int64(0), opened
    atomic_add(shared, HELPERS, -1)
    return lost


@inline
def _prepare(w, b, part):
    """What comes before a phase and is too little work to be shared: the embedding, the scale of
    each row for RMSNorm, K and V into their slots, which rows go on, and what the head multiplies.
    """
    num_tokens, size = b.shared[TOKENS], b.x.shape[1]
    layer, phase = part // PHASES, part % PHASES
    if part == 0:
        for t in range(num_tokens):
            x, row = b.x[t], w.embedding[b.token_ids[t]]
            for i in range(size):
                x[i] = widen(row[i])
        begin_norm(b.x[:num_tokens], w.norms[:1], START, size, b.squares, b.normed)
    if phase in (QKV, GATE_UP):
        for t in range(num_tokens):
            total = zero
            for piece in range(len(b.squares)):
                total += b.squares[piece, t]
            b.scale[t] = one / math.sqrt(total / np.float32(size) + w.eps)
    if phase == ATTEND:  # all K and V before any row attends: a draft's row reads other rows'
        call(b.write, (b.kv, layer, b.heads, b.slots, num_tokens))
        if layer == len(w.qkv) - 1:
            _keep_last(b)
    if layer == len(w.qkv):
        for row in range(b.shared[SEQS]):
            hidden, x, scale = b.hidden[row], b.x[row], b.scale[row]
            for i in range(size):
                hidden[i] = x[i] * scale * w.norm[i]


@inline
def _keep_last(b):
    """Go on with the last token of each sequence alone, in row s that of sequence s. Behind the
    last layer no other token is read, and there the others have done their part: their K and V are
    in their slots. No row is overwritten before it has moved, for each sequence has a token."""
    for row in range(b.shared[SEQS]):
        token = b.query_start[row + 1] - 1
        if token > row:
            for i in range(b.x.shape[1]):
                b.x[row, i] = b.x[token, i]
            for i in range(b.qkv.shape[1]):
                b.qkv[row, i] = b.qkv[token, i]
        b.query_start[row + 1] = row + 1
    b.shared[TOKENS] = b.shared[SEQS]


@inline
def _compute(w, b, part, chunk, num_chunks):
    """One chunk of a phase."""
    num_tokens, num_seqs = b.shared[TOKENS], b.shared[SEQS]
    layer, phase = part // PHASES, part % PHASES
    if phase == ATTEND:
        lens, starts = b.context_lens[:num_seqs], b.query_start
        kv_heads, window = b.kv_heads, w.windows[layer]
        border = b.shared[DECODES] * kv_heads
        first, last = share(lens, starts, window, kv_heads, border, chunk, num_chunks)
        q, tables, out = b.heads, b.block_tables, b.heads_out
        call(b.attend, (b.kv, layer, q, tables, lens, starts, window, out, first, last, border))
        return
    num_rows, x, out, bias = num_tokens, b.normed, b.x, w.qkv_bias[:0]
    if layer == len(w.qkv):
        num_rows, x, weight, out = num_seqs, b.hidden, w.head, b.logits
    elif phase == QKV:
        weight, out, bias = w.qkv[layer], b.qkv, w.qkv_bias[layer : layer + 1]
    elif phase == OUT:
        x, weight, bias = b.attended, w.out[layer], w.out_bias[layer : layer + 1]
    elif phase == GATE_UP:
        weight, out, bias = w.gate_up[layer, 0], b.gate_up, w.gate_up_bias[layer : layer + 1]
    else:
        x, weight, bias = b.product, w.down[layer], w.down_bias[layer : layer + 1]
    x = x[:num_rows]
    if phase in (OUT, DOWN):
        first, last = _bounds(out.shape[1], chunk, num_chunks, UNIT)
        matmul(x, weight, out, START, ADD, first, last)
        _add(bias, out[:num_rows], first, last)
        following = 2 * layer + (1 if phase == OUT else 2)
        norm = w.norms[following : following + 1]  # no row behind the last layer
        begin_norm(out[:num_rows], norm, first, last, b.squares, b.normed)
    elif layer == len(w.qkv):
        first, last = _bounds(out.shape[1], chunk, num_chunks, UNIT)
        matmul(x, weight, out, START, SET, first, last)
    elif phase == QKV:
        head_dim = b.heads.shape[2]
        whole = head_dim * UNIT // math.gcd(head_dim, UNIT)  # a chunk is made of whole heads
        first, last = _bounds(out.shape[1], chunk, num_chunks, whole)
        matmul(x, weight, out, START, SET, first, last)
        _scale_rows(out[:num_rows], b.scale, first, last)
        _add(bias, out[:num_rows], first, last)
        _turn(w, b, layer, first // head_dim, last // head_dim)
    else:
        size = b.product.shape[1]
        first, last = _bounds(size, chunk, num_chunks, UNIT)
        for half in range(2):  # the same channels of both
            to = half * size
            matmul(x, w.gate_up[layer, half], out, to, SET, first, last)
            _scale_rows(out[:num_rows], b.scale, to + first, to + last)
            _add(bias, out[:num_rows], to + first, to + last)
        silu_mul(out, b.product[:num_rows], first, last)


@inline
def _turn(w, b, layer, first, last):
    """Norms and RoPE of those of the heads first to last that are queries or keys: what is between
    the product and attention."""
    num_heads, num_tokens = b.heads_out.shape[1], b.shared[TOKENS]
    num_keys = (b.heads.shape[1] + num_heads) // 2  # heads in front of the values
    if len(w.q_norm) > 0:
        heads = b.heads[:num_tokens]
        norm_heads(heads, first, min(last, num_heads), w.q_norm[layer], w.eps)
        norm_heads(heads, max(first, num_heads), min(last, num_keys), w.k_norm[layer], w.eps)
    if len(w.rope) > 0:
        rotate(b.heads, first, min(last, num_keys), w.rope, b.positions, 0, num_tokens)


@kernel
def _bounds(size, chunk, num_chunks, multiple):
    """Where a chunk of `size` begins and ends: at a multiple of `multiple`, or at the end. Larger
    chunks come first, so that threads which take one by one end at about the same time."""
    units = (size + multiple - 1) // multiple
    per_chunk, more = units // num_chunks, units % num_chunks
    first = chunk * per_chunk + min(chunk, more)
    last = first + per_chunk + (1 if chunk < more else 0)
    return min(first * multiple, size), min(last * multiple, size)


DECODE = 4  # a decode's query takes as long per key as so many queries of a chunk, measured


@kernel
def share(context_lens, query_start, window, kv_heads, border, chunk, num_chunks):
    """Which of the S * K items of attention a chunk computes, (first, last): about as much work as
    the other chunks, in queries times keys. Items before `border` are decodes."""
    total = done = START
    for counts in (False, True):
        first = last = START
        for row in range(len(context_lens)):
            queries = query_start[row + 1] - query_start[row]
            keys = context_lens[row] - queries // 2
            if window > 0:
                keys = min(keys, window)
            work = keys * (DECODE if row * kv_heads < border else queries)
            if not counts:
                total += work * kv_heads
                continue
            for _ in range(kv_heads):
                # Where the middle of its work falls decides.
                place = (2 * done + work) * num_chunks // (2 * total)
                first += place < chunk
                last += place <= chunk
                done += work
    return first, last


@inner
def _add(row, target, first, last):
    """Add the channels first to last of a row, (1, N), to those of every row of the target, (T, N).
    If it is (0, N), there is none."""
    for t in range(len(target) * len(row)):
        values, source = target[t, first:last], row[0, first:last]
        for i in range(last - first):
            values[i] += source[i]


@inner
def _scale_rows(x, scale, first, last):
    """Multiply the channels first to last of row t of x, (T, N), by scale[t]."""
    for t in range(len(x)):
        values, factor = x[t, first:last], scale[t]
        for i in range(last - first):
            values[i] *= factor


@inner
def begin_norm(x, weight, first, last, squares, normed):
    """The part of RMSNorm that channels can do on their own, for the channels first to last of the
    rows of x, (T, N). squares[p, t] is the sum of squares of UNIT channels of row t, from p * UNIT
    on. The pieces are the same however a phase is cut into chunks, and so is the order of sums.
    normed (T, N) is x times the weight, (1, N); (0, N) leaves it alone."""
    for begin in range(first, last, UNIT):
        end, sums = min(begin + UNIT, last), squares[begin // UNIT]
        for t in range(len(x)):
            values, scaled, total = x[t, begin:end], normed[t, begin:end], zero
            for i in range(end - begin):
                total += values[i] * values[i]
            sums[t] = total
            for row in range(len(weight)):
                factors = weight[row, begin:end]
                for i in range(end - begin):
                    scaled[i] = values[i] * factors[i]
