"""Attention over codes, and writing them, as loops that Numba compiles for this machine.

The walk is that of `minikv.cpu.kernels`, which has the running softmax. What differs is how it
reads a block. The program of a step (`attend_decode`) multiplies codes in registers. `attend`, for
chunks, lets `fetch` turn the codes of one block and one head into floats, in a scratch that stays
in the processor's first cache. Either way about a quarter (int8) or a sixth (int4) of float32's
bytes comes from memory.

The `…Parts` classes are the store's tensors of one layer as arrays, and the compiler picks the
functions by their type. bfloat16 is passed as uint16: its 16 bits are the upper half of a
float32's.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from minikv.cpu import apart, unpacked
from minikv.cpu.compiler import inline, keep, kernel, part
from minikv.cpu.kernels import (
    TILE,
    _begin,
    _finish,
    _scratch,
    add_values,
    answer,
    attend_decode,
    bits_of,
    dims_of,
    dot_keys,
    exp,
    layer_of,
    prefetch,
    widen,
    write_new,
    write_row,
    zero,
)
from minikv.cpu.tiles import HEADS, add_rows, ask_for, dot_rows
from minikv.quant.formats import TINY
from minikv.quant.tiles import add_by_token, dot_by_channel


class BFloat16Parts(NamedTuple):
    k_codes: np.ndarray  # (num_blocks, K, block_size, D) uint16
    v_codes: np.ndarray


class Int8Parts(NamedTuple):
    k_codes: np.ndarray  # (num_blocks, K, block_size, D) int8
    k_scale: np.ndarray  # (num_blocks, K, block_size) uint16
    v_codes: np.ndarray
    v_scale: np.ndarray


class Int4Parts(NamedTuple):
    k_codes: np.ndarray  # (num_blocks, K, block_size, D / 2) uint8
    k_scale: np.ndarray  # (num_blocks, K, D) uint16: by channel of the block
    k_low: np.ndarray
    v_codes: np.ndarray  # (num_blocks, K, block_size, D / 2) uint8
    v_scale: np.ndarray  # (num_blocks, K, block_size, groups) uint16
    v_low: np.ndarray


class OpenParts(NamedTuple):
    """int4 for a step as one program: with the keys of open blocks, in full precision."""

    codes: Int4Parts
    keys: np.ndarray  # (rows, K, block_size, D)
    rows: np.ndarray  # (num_blocks,): the row of a block that this step writes to, otherwise -1


PARTS = {"bfloat16": BFloat16Parts, "int8": Int8Parts, "int4": Int4Parts}


def fetch(parts, block_id, head, lo, hi, block, raw):
    """Write K and V of the tokens lo to hi of a block and head to block (block_size, 2, 1, D).
    raw (block_size * D,) is a scratch."""
    raise NotImplementedError  # compiled code has one of the functions below in its place


@overload(fetch, jit_options={"error_model": "numpy"})
def _fetch(parts, block_id, head, lo, hi, block, raw):
    return {
        BFloat16Parts: _fetch_bfloat16, Int8Parts: _fetch_int8, Int4Parts: _fetch_int4,
    }[parts.instance_class]  # fmt: skip


def _fetch_bfloat16(parts, block_id, head, lo, hi, block, raw):
    for i, codes in enumerate((parts.k_codes[block_id, head], parts.v_codes[block_id, head])):
        for t in range(lo, hi):
            code, out = codes[t], block[t, i, 0]
            for d in range(out.shape[0]):
                out[d] = widen(code[d])


def _fetch_int8(parts, block_id, head, lo, hi, block, raw):
    k_codes, v_codes = parts.k_codes[block_id, head], parts.v_codes[block_id, head]
    k_scales, v_scales = parts.k_scale[block_id, head], parts.v_scale[block_id, head]
    for t in range(lo, hi):
        k, v, k_code, v_code = block[t, 0, 0], block[t, 1, 0], k_codes[t], v_codes[t]
        k_scale, v_scale = widen(k_scales[t]), widen(v_scales[t])
        for d in range(k.shape[0]):
            k[d] = np.float32(k_code[d]) * k_scale
            v[d] = np.float32(v_code[d]) * v_scale


def _fetch_int4(parts, block_id, head, lo, hi, block, raw):
    v_scales, v_lows = parts.v_scale[block_id, head], parts.v_low[block_id, head]
    dim = block.shape[3]
    group = dim // v_scales.shape[1]
    scale, low = np.empty(dim, np.float32), np.empty(dim, np.float32)
    _widen_all(parts.k_scale[block_id, head], scale)
    _widen_all(parts.k_low[block_id, head], low)
    unpack(parts.k_codes[block_id, head].reshape(-1), raw)
    for t in range(lo, hi):
        scale_halves(raw, t, scale, low, block[t, 0, 0])
    unpack(parts.v_codes[block_id, head].reshape(-1), raw)
    for t in range(lo, hi):
        for g in range(v_scales.shape[1]):
            scale[g * group : (g + 1) * group] = widen(v_scales[t, g])
            low[g * group : (g + 1) * group] = widen(v_lows[t, g])
        scale_halves(raw, t, scale, low, block[t, 1, 0])


# int4 takes two passes: one long loop turns the codes of a block into floats, then a loop per token
# applies the scales. Compiled code unpacks dozens of bytes at a time, more than one token has; and
# the compiler does not vectorise loops over many arrays that might overlap.


@kernel
def unpack(packed, raw):
    """Low halves of the bytes to the first half of `raw`, high halves to the second."""
    size = packed.shape[0]
    low, high = raw[:size], raw[size:]
    for i in range(size):
        low[i] = np.float32(np.uint8(packed[i] & 15))
        high[i] = np.float32(np.uint8(packed[i] >> 4))


@kernel
def scale_halves(raw, t, scale, low, out):
    """The channels of token t, whose halves lie apart after `unpack`: low + scale code."""
    half = out.shape[0] // 2
    for begin in (0, half):
        first = begin * (raw.shape[0] // out.shape[0]) + t * half
        codes, a, b = raw[first : first + half], scale[begin:], low[begin:]
        x = out[begin:]
        for d in range(half):
            x[d] = codes[d] * a[d] + b[d]


@inline
def attend(
    q, new_k, parts, open_keys, own_rows, tables, lens, query_start, window, out, first, last
):
    """The queries of sequence s, tokens query_start[s] to query_start[s + 1], attend to its context
    through its block table; they stand at the last positions of it. A decode has one query.

    q (T, H, D), new_k (T, K, D) -> out (T, H, D); tables (S, B), lens (S,), window 0 for none.
    Where K is stored by block, open_keys (rows, K, block_size, D) has the keys of open blocks, and
    own_rows (S,) the row of each sequence's first query's block; else open_keys has no rows.
    Item i is KV head i % K of sequence i // K: items first to last are computed, of S * K.
    """
    kv_heads, head_dim = parts.v_codes.shape[1], new_k.shape[2]
    block_size = parts.v_codes.shape[2]
    group = out.shape[1] // kv_heads
    scaled, acc, top, total = _scratch(TILE * group, head_dim)
    scores = np.empty(block_size, np.float32)
    block = np.empty((block_size, 2, 1, head_dim), np.float32)
    exact = np.empty((block_size, 2, 1, head_dim), np.float32)
    raw = np.empty(block_size * head_dim, np.float32)
    has_exact = len(open_keys) > 0
    for item in range(first, last):
        row, head = item // kv_heads, item % kv_heads
        first_token, end_token = query_start[row], query_start[row + 1]
        first_position = lens[row] - (end_token - first_token)
        for tile in range(first_token, end_token, TILE):
            num_queries = min(TILE, end_token - tile)
            rows = num_queries * group
            position = first_position + tile - first_token  # of the tile's first query
            for r in range(rows):
                _begin(q[tile + r // group, head * group + r % group], scaled[r], acc[r])
                top[r], total[r] = -np.inf, zero
            seen_from = max(position + 1 - window, 0) if window > 0 else 0
            seen_to = position + num_queries
            for index in range(seen_from // block_size, (seen_to + block_size - 1) // block_size):
                begin = index * block_size
                to = min(seen_to - begin, block_size)
                is_own = has_exact and begin + block_size > position
                fetch(parts, tables[row, index], head, 0, to, block, raw)
                if is_own:  # some of these queries read the keys in full precision
                    for t in range(to):
                        token = begin + t - first_position
                        if token < 0:
                            write_row(open_keys[own_rows[row], head, t], exact[t, 0, 0])
                        else:
                            write_row(new_k[first_token + token, head], exact[t, 0, 0])
                        write_row(block[t, 1, 0], exact[t, 1, 0])
                for r in range(rows):
                    at = position + r // group
                    lo = max(at + 1 - window - begin, 0) if window > 0 else 0
                    hi = min(at + 1 - begin, block_size)
                    if lo < hi:
                        source = exact if is_own and at < begin + block_size else block
                        _fold(scaled[r], source, 0, lo, hi, r, scores, top, total, acc[r])
            for r in range(rows):
                _finish(acc[r], total[r], out[tile + r // group, head * group + r % group])


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
def _widen_all(bits, out):
    for i in range(out.shape[0]):
        out[i] = widen(bits[i])


# ── A step as one program ─────────────────────────────────────────────────────


@keep
@njit(nogil=True, error_model="numpy")
def quantise_int8(x, codes):
    """`formats.quantise_int8` of one vector: fills the codes (D,), returns the scale's bits.

    The operations are those that PyTorch does, so the codes are the same.
    """
    top, is_nan = zero, False
    for d in range(len(x)):
        size = abs(x[d])
        top = max(top, size)
        is_nan |= size != size
    scale = round_up(np.float32(np.nan) if is_nan else top / np.float32(127))
    step = widen(scale)
    if step < TINY_STEP:
        step = TINY_STEP
    for d in range(len(x)):
        code = x[d] / step
        code = code if abs(code) < np.float32(128) else zero  # NaN, too
        codes[d] = np.int8(np.rint(code))  # halves to the even one
    return np.uint16(scale)


TINY_STEP = np.float32(TINY)


@keep
@njit(nogil=True, error_model="numpy")
def quantise_int4(x, codes):
    """`formats.quantise_int4` of one vector: fills the codes (D,), returns the bits of scale and
    low. The operations are those that PyTorch does."""
    least, most, is_nan = x[0], x[0], False
    for d in range(len(x)):
        least, most = min(least, x[d]), max(most, x[d])
        is_nan |= x[d] != x[d]
    low = round_up(np.float32(np.nan) if is_nan else -least) ^ np.uint32(0x8000)  # rounded down
    base = widen(low)
    scale = round_up((most - base) / np.float32(15))
    step = widen(scale)
    if step < TINY_STEP:
        step = TINY_STEP
    for d in range(len(x)):
        code = (x[d] - base) / step
        code = code if abs(code) < np.float32(np.inf) else zero  # NaN, too
        codes[d] = np.uint8(min(max(np.rint(code), zero), np.float32(15)))
    return np.uint16(scale), np.uint16(low)


@kernel
def round_up(x):
    """The bits of the smallest bfloat16 that is not below x."""
    bits = bits_of(x)
    if x != x:
        return np.uint32(0x7FC0)
    is_between = bits & np.uint32(0xFFFF) != 0 and bits >> np.uint32(31) == 0
    return (bits >> np.uint32(16)) + np.uint32(is_between)


def _int8_layer(kv, layer):
    return Int8Parts(kv.k_codes[layer], kv.k_scale[layer], kv.v_codes[layer], kv.v_scale[layer])


def _bfloat16_layer(kv, layer):
    return BFloat16Parts(kv.k_codes[layer], kv.v_codes[layer])


def _int4_layer(kv, layer):
    k_codes, k_scale, k_low, v_codes, v_scale, v_low = kv.codes
    k = k_codes[layer], k_scale[layer], k_low[layer]
    codes = Int4Parts(k[0], k[1], k[2], v_codes[layer], v_scale[layer], v_low[layer])
    return OpenParts(codes, kv.keys[layer], kv.rows)


def _dims(kv):
    return kv.v_codes.shape[2], kv.v_codes.shape[1]


def _int4_dims(kv):
    return kv.codes.v_codes.shape[2], kv.codes.v_codes.shape[1]


def _write_int8(kv, qkv, slots, kv_head, first, last):
    kv_heads, size = kv.v_codes.shape[1], kv.v_codes.shape[2]
    value = qkv.shape[1] - kv_heads + kv_head
    for t in range(first, last):
        at = slots[t] // size, kv_head, slots[t] % size
        kv.k_scale[at] = quantise_int8(qkv[t, value - kv_heads], kv.k_codes[at])
        kv.v_scale[at] = quantise_int8(qkv[t, value], kv.v_codes[at])


def _write_bfloat16(kv, qkv, slots, kv_head, first, last):
    kv_heads, size = kv.v_codes.shape[1], kv.v_codes.shape[2]
    value = qkv.shape[1] - kv_heads + kv_head
    for t in range(first, last):
        at = slots[t] // size, kv_head, slots[t] % size
        write_row(qkv[t, value - kv_heads], kv.k_codes[at])
        write_row(qkv[t, value], kv.v_codes[at])


def _write_int4(kv, qkv, slots, kv_head, first, last):
    """A key waits in its block's row. The last key closes the block: its keys become codes."""
    codes = kv.codes
    kv_heads, size, half = codes.v_codes.shape[1:]
    value = qkv.shape[1] - kv_heads + kv_head
    groups = codes.v_scale.shape[3]
    group = 2 * half // groups
    channel, of_head = np.empty(size, np.uint8), np.empty(2 * half, np.uint8)
    for t in range(first, last):
        block, slot = slots[t] // size, slots[t] % size
        waiting, k, v = kv.keys[kv.rows[block], kv_head], qkv[t, value - kv_heads], qkv[t, value]
        for d in range(2 * half):
            waiting[slot, d] = k[d]
        for n in range(groups):
            part, at = slice(n * group, (n + 1) * group), (block, kv_head, slot, n)
            codes.v_scale[at], codes.v_low[at] = quantise_int4(v[part], of_head[part])
        for d in range(half):
            codes.v_codes[block, kv_head, slot, d] = of_head[d] | of_head[half + d] << 4
        if slot < size - 1:
            continue
        packed = codes.k_codes[block, kv_head]
        for d in range(2 * half):
            scale, low = quantise_int4(waiting[:, d], channel)
            codes.k_scale[block, kv_head, d], codes.k_low[block, kv_head, d] = scale, low
            for i in range(size):
                before = np.uint8(0) if d < half else packed[i, d - half]
                packed[i, d % half] = before | channel[i] << (0 if d < half else 4)


@part
def _dot_codes(q, head, num_heads, codes, place, scores, to):
    block_id, kv_head, lo, hi = place
    stride = codes.shape[3]
    begin = ((block_id * codes.shape[1] + kv_head) * codes.shape[2] + lo) * stride
    for h in range(head, head + num_heads, HEADS):
        count = min(HEADS, head + num_heads - h)
        dot_rows(q, h, count, codes, begin, stride, hi - lo, scores, to)


@part
def _add_codes(weights, at, head, num_heads, codes, place, acc):
    block_id, kv_head, lo, hi = place
    stride = codes.shape[3]
    begin = ((block_id * codes.shape[1] + kv_head) * codes.shape[2] + lo) * stride
    for h in range(head, head + num_heads, HEADS):
        count = min(HEADS, head + num_heads - h)
        add_rows(weights, at, h, count, codes, begin, stride, hi - lo, acc)


@part
def _ask_for_head(part, block_id, kv_head):
    """A head's numbers of a block lie side by side: part (num_blocks, K, any, any)."""
    size = part.shape[2] * part.shape[3]
    ask_for(part, (block_id * part.shape[1] + kv_head) * size, size, 1, size)


@part
def _ask_for_ends(part, block_id, kv_head):
    """The same for (num_blocks, K, any)."""
    size = part.shape[2]
    ask_for(part, (block_id * part.shape[1] + kv_head) * size, size, 1, size)


def _prefetch_bfloat16(kv, i, block_id, kv_head):
    _ask_for_head(kv.k_codes if i == 0 else kv.v_codes, block_id, kv_head)


def _prefetch_int8(kv, i, block_id, kv_head):
    _ask_for_ends(kv.k_scale if i == 0 else kv.v_scale, block_id, kv_head)
    _ask_for_head(kv.k_codes if i == 0 else kv.v_codes, block_id, kv_head)


def _prefetch_int4(kv, i, block_id, kv_head):
    codes = kv.codes
    if i == 0:
        _ask_for_ends(codes.k_scale, block_id, kv_head)
        _ask_for_ends(codes.k_low, block_id, kv_head)
        _ask_for_head(codes.k_codes, block_id, kv_head)
    else:
        _ask_for_head(codes.v_scale, block_id, kv_head)
        _ask_for_head(codes.v_low, block_id, kv_head)
        _ask_for_head(codes.v_codes, block_id, kv_head)


def _dot_bfloat16(q, head, num_heads, kv, place, scores, to):
    _dot_codes(q, head, num_heads, kv.k_codes, place, scores, to)


def _add_bfloat16(weights, at, head, num_heads, kv, place, acc):
    _add_codes(weights, at, head, num_heads, kv.v_codes, place, acc)


def _dot_int8(q, head, num_heads, kv, place, scores, to):
    """The scale of a key is multiplied into its score."""
    _dot_codes(q, head, num_heads, kv.k_codes, place, scores, to)
    block_id, kv_head, lo, hi = place
    scales = kv.k_scale[block_id, kv_head, lo:hi]
    for h in range(head, head + num_heads):
        row = scores[h, to : to + hi - lo]
        for t in range(hi - lo):
            row[t] *= widen(scales[t])


def _add_int8(weights, at, head, num_heads, kv, place, acc):
    """The scale of a value is multiplied into its weight, which is not used afterwards."""
    block_id, kv_head, lo, hi = place
    scales = kv.v_scale[block_id, kv_head, lo:hi]
    for h in range(head, head + num_heads):
        row = weights[h, at : at + hi - lo]
        for t in range(hi - lo):
            row[t] *= widen(scales[t])
    _add_codes(weights, at, head, num_heads, kv.v_codes, place, acc)


def _dot_int4(q, head, num_heads, kv, place, scores, to):
    """The query's own block has its keys in full precision."""
    block_id, kv_head, lo, hi = place
    if kv.rows[block_id] >= 0:
        place = kv.rows[block_id], kv_head, lo, hi
        _dot_codes(q, head, num_heads, kv.keys, place, scores, to)
        return
    codes = kv.codes.k_codes
    scale, low = kv.codes.k_scale[block_id, kv_head], kv.codes.k_low[block_id, kv_head]
    stride = codes.shape[3]
    begin = ((block_id * codes.shape[1] + kv_head) * codes.shape[2] + lo) * stride
    for h in range(head, head + num_heads, HEADS):
        count = min(HEADS, head + num_heads - h)
        dot_by_channel(q, h, count, codes, begin, stride, hi - lo, scale, low, scores, to)


def _add_int4(weights, at, head, num_heads, kv, place, acc):
    block_id, kv_head, lo, hi = place
    codes = kv.codes.v_codes
    scale, low = kv.codes.v_scale[block_id, kv_head, lo:], kv.codes.v_low[block_id, kv_head, lo:]
    stride = codes.shape[3]
    begin = ((block_id * codes.shape[1] + kv_head) * codes.shape[2] + lo) * stride
    for h in range(head, head + num_heads, HEADS):
        count = min(HEADS, head + num_heads - h)
        add_by_token(weights, at, h, count, codes, begin, stride, hi - lo, scale, low, acc)


@apart
def attend_codes(packed, layer, q, tables, lens, query_start, window, out, first, last, border):
    """`minikv.cpu.kernels.attend_layer` over int8 or bfloat16."""
    kv = layer_of(unpacked(packed), layer)
    if first < border:
        attend_decode(q, kv, tables, lens, window, out, first, min(last, border))
    if last > border:
        nothing = np.empty((0, kv.v_codes.shape[1], kv.v_codes.shape[2], q.shape[2]), np.float32)
        start, rows = max(first, border), lens
        attend(q, q, kv, nothing, rows, tables, lens, query_start, window, out, start, last)


@apart
def attend_decodes(packed, layer, q, tables, lens, query_start, window, out, first, last, border):
    """The same over int4. A step has no chunks."""
    kv = layer_of(unpacked(packed), layer)
    attend_decode(q, kv, tables, lens, window, out, first, last)


_FORMATS = Int8Parts, BFloat16Parts, OpenParts
for _question, *_answers in (
    (layer_of, _int8_layer, _bfloat16_layer, _int4_layer),
    (dims_of, _dims, _dims, _int4_dims),
    (write_new, _write_int8, _write_bfloat16, _write_int4),
    (prefetch, _prefetch_int8, _prefetch_bfloat16, _prefetch_int4),
    (dot_keys, _dot_int8, _dot_bfloat16, _dot_int4),
    (add_values, _add_int8, _add_bfloat16, _add_int4),
):
    for _format, _answer in zip(_FORMATS, _answers, strict=True):
        answer(_question, _format, _answer)
