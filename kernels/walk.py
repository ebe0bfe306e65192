"""What decode and prefill share: finding the work of a program, then walking a block table.

`locate` tells a program which sequence it works for. `walk` is attention itself, over the keys of
that sequence, a tile at a time, with the running softmax of chapter 04. Both are inlined into the
kernels that call them.
"""

import triton
import triton.language as tl


@triton.jit
def locate(counts, item):
    """The owner of `item`, if sequence i owns the next counts[i] items after sequence i - 1.

    counts (N,) -> (sequence, place of the item among the sequence's items). For an item past the
    last one, the sequence is past all that own items.

        counts [3, 1, 2]   items 0 1 2 | 3 | 4 5   item 4 -> sequence 2, place 0

    Every program counts by itself, so the host need not know how the work is divided.
    """
    before = tl.cumsum(counts, 0) <= item  # sequences whose items all lie before this one
    sequence = tl.sum(before.to(tl.int32), 0)
    return sequence, item - tl.sum(tl.where(before, counts, 0), 0)


@triton.jit
def walk(
    q, top, total, acc, kv, table, start, end, position, scale,
    BLOCK_SIZE: tl.constexpr, KV_ROW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Let the rows of q attend to the keys [start, end), and return the state after them.

    q: (ROWS, PAD), the rows of one dot product: query heads, queries, or both.
    top, total: (ROWS,) float32, the largest score so far and the sum of 2^(score - top).
    acc: (ROWS, PAD) float32, the sum of 2^(score - top) v.
    kv: pointer to the K of slot 0, the WIDTH elements that belong to the columns of q; their V
        lies KV_ROW elements further.
    table: pointer to the sequence's block table.
    position: (ROWS,), the last key that each row may see, and the WINDOW - 1 before it.
    scale: turns a dot product into an exponent of 2: log2(e) / sqrt(head_dim).

    A tile is TILE tokens, whatever the block size: it may span blocks or be part of one. If the
    last tile is not whole, no row may see a key from `end` on. MASKED is False if the caller knows
    that every row sees every key.
    """
    column = tl.arange(0, q.shape[1])
    for at in range(start, end, TILE):
        key = at + tl.arange(0, TILE)
        held = key < end
        place = key.to(tl.uint32)  # never negative: its quotient and remainder are cheaper so
        block = tl.load(table + place // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        # 64 bits before this product: 2**31 elements are a pool of only 4 GiB in float16.
        row = kv + (block * BLOCK_SIZE + place % BLOCK_SIZE) * (2 * KV_ROW)  # (TILE,) pointers
        mask = held[:, None] & (column < WIDTH)[None, :]
        # Zeros where nothing is read: whatever lies there, perhaps NaN, must not reach a sum.
        k = tl.load(row[:, None] + column[None, :], mask=mask, other=0.0)  # (TILE, PAD)
        v = tl.load(row[:, None] + (KV_ROW + column)[None, :], mask=mask, other=0.0)
        if WIDEN:  # the interpreter's bfloat16 products are wrong
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # "ieee": float32 must not be rounded to tf32. It changes nothing for 16 bits.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # (ROWS, TILE)
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        # Scaled here and in the exponent, where one instruction scales and subtracts.
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        # A row that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores * scale - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc
