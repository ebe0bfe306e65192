"""Chapter 08: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "08.1": {  # moves the pointers first, and counts what is left
        "add_kernel": """
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    start = tl.program_id(axis=0) * TILE
    lane = tl.arange(0, TILE)
    mine = lane < tl.minimum(size - start, TILE)
    first = tl.load(x + start + lane, mask=mine, other=0.0)
    first += tl.load(y + start + lane, mask=mine, other=0.0)
    tl.store(out + start + lane, first, mask=mine)
""",
    },
    "08.2": {  # a running softmax for each lane of the tile, joined at the end; powers of 2
        "": "LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)",
        "attend_kernel": """
@triton.jit
def attend_kernel(q, k, v, out, context, scale, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    lane, column = tl.arange(0, TILE)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    query = tl.load(q + column) * (scale * LOG2_E)
    top = tl.full((TILE, 1), float("-inf"), tl.float32)
    total = tl.zeros((TILE, 1), tl.float32)
    acc = tl.zeros((TILE, HEAD_DIM), tl.float32)
    for tile in range(tl.cdiv(context, TILE)):
        here = tile * TILE + lane < context
        at = (tile * TILE + lane) * HEAD_DIM + column
        score = tl.sum(query * tl.load(k + at, mask=here, other=0.0), 1, keep_dims=True)
        score = tl.where(here, score, float("-inf"))
        higher = tl.maximum(top, score)
        base = tl.where(higher > float("-inf"), higher, 0.0)
        weight, shrink = tl.exp2(score - base), tl.exp2(top - base)
        total = total * shrink + weight
        acc = acc * shrink + weight * tl.load(v + at, mask=here, other=0.0)
        top = higher
    factor = tl.exp2(top - tl.max(top, 0, keep_dims=True))
    result = tl.sum(acc * factor, 0) / tl.sum(total * factor, 0)
    tl.store(out + tl.arange(0, HEAD_DIM), result)
""",
    },
    "08.3": {  # tiles of 8 tokens, whatever the block size: a block id for each token
        "decode_kernel": """
@triton.jit
def decode_kernel(
    q, kv, block_tables, context_lens, out, width, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    s, h = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, HEAD_DIM)
    q += (s * HEADS + h) * HEAD_DIM
    out += (s * HEADS + h) * HEAD_DIM
    kv += h * KV_HEADS // HEADS * HEAD_DIM
    query = tl.load(q + column)
    length = tl.load(context_lens + s)
    top, total = -float("inf"), 0.0
    acc = tl.zeros_like(query)
    for at in range(0, length, 8):
        key = at + tl.arange(0, 8)
        block = tl.load(block_tables + s * width + key // BLOCK_SIZE, mask=key < length, other=0)
        row = (block * BLOCK_SIZE + key % BLOCK_SIZE) * (2 * KV_HEADS * HEAD_DIM)
        at_k = kv + row[:, None] + column[None, :]
        mask = (key < length)[:, None]
        scores = tl.sum(tl.load(at_k, mask=mask, other=0.0) * query[None, :], axis=1) * scale
        scores = tl.where(key < length, scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores))
        weights = tl.exp(scores - new_top)
        values = tl.load(at_k + KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
        total = total * tl.exp(top - new_top) + tl.sum(weights)
        acc = acc * tl.exp(top - new_top) + tl.sum(values * weights[:, None], axis=0)
        top = new_top
    tl.store(out + column, acc / total)
""",
    },
    "08.4": {  # everything transposed: tokens are rows, heads columns
        "packed_kernel": """
@triton.jit
def packed_kernel(
    q, kv, block_tables, context_lens, out, width, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    s, g = tl.program_id(0), tl.program_id(1)
    head, d, token = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    place = ((s * KV_HEADS + g) * GROUP + head)[None, :] * HEAD_DIM + d[:, None]  # (D, ROWS)
    queries = tl.load(q + place, mask=(head < GROUP)[None, :], other=0.0) * scale
    length = tl.load(context_lens + s)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total, acc = tl.zeros((ROWS,), tl.float32), tl.zeros((HEAD_DIM, ROWS), tl.float32)
    for begin in range(0, length, BLOCK_SIZE):
        block = tl.load(block_tables + s * width + begin // BLOCK_SIZE)
        there = begin + token < length
        at = kv + block * BLOCK_SIZE * 2 * KV_HEADS * HEAD_DIM + g * HEAD_DIM
        at = at + token[:, None] * (2 * KV_HEADS * HEAD_DIM) + d[None, :]
        keys = tl.load(at, mask=there[:, None], other=0.0)
        scores = tl.dot(keys, queries, input_precision="ieee")  # (tokens, ROWS)
        scores = tl.where(there[:, None], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        weights = tl.exp(scores - new_top[None, :])
        values = tl.load(at + KV_HEADS * HEAD_DIM, mask=there[:, None], other=0.0)
        shrink = tl.exp(top - new_top)
        acc = acc * shrink[None, :] + tl.dot(values.trans(), weights, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=0)
        top = new_top
    tl.store(out + place, acc / total[None, :], mask=(head < GROUP)[None, :])
""",
    },
    "08.5": {  # blocks are dealt out in turns; the join goes through the splits one by one
        "split_kernel": """
@triton.jit
def split_kernel(
    q, kv, block_tables, context_lens, partial, lse, width, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):
    s, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, token, member = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE), tl.arange(0, ROWS)
    head = (s * KV_HEADS + g) * GROUP + member
    real = member < GROUP
    queries = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=real[:, None], other=0.0)
    length = tl.load(context_lens + s)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total, acc = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for i in range(split, tl.cdiv(length, BLOCK_SIZE), SPLITS):
        block = tl.load(block_tables + s * width + i)
        there = i * BLOCK_SIZE + token < length
        at = kv + ((block * BLOCK_SIZE + token) * 2 * KV_HEADS + g)[:, None] * HEAD_DIM + d[None, :]
        keys = tl.load(at, mask=there[:, None], other=0.0)
        values = tl.load(at + KV_HEADS * HEAD_DIM, mask=there[:, None], other=0.0)
        scores = tl.dot(queries, keys.trans(), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - new_top[:, None]), tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        top = new_top
    # The weighted sum itself, and what it is relative to: the join divides.
    row = head * SPLITS + split
    tl.store(partial + row[:, None] * HEAD_DIM + d[None, :],
             acc / tl.maximum(total, 1e-30)[:, None], mask=real[:, None])
    tl.store(lse + row, top + tl.log(tl.maximum(total, 1e-30)), mask=real)
""",
        "join_kernel": """
@triton.jit
def join_kernel(partial, lse, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    row, d = tl.program_id(0), tl.arange(0, HEAD_DIM)
    top, total = -float("inf"), 0.0
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    for split in range(SPLITS):
        found = tl.load(lse + row * SPLITS + split)
        new_top = tl.maximum(top, found)
        shrink, weight = tl.exp(top - new_top), tl.exp(found - new_top)
        total = total * shrink + weight
        acc = acc * shrink + weight * tl.load(partial + (row * SPLITS + split) * HEAD_DIM + d)
        top = new_top
    tl.store(out + row * HEAD_DIM + d, acc / total)
""",
    },
    "08.6": {
        "gather_kernel": """
@triton.jit
def gather_kernel(
    kv, block_tables, starts, out, width, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    sequence, i = tl.program_id(0), tl.program_id(1)
    row = tl.load(starts + sequence) + i * BLOCK_SIZE
    left = tl.load(starts + sequence + 1) - row
    block = tl.load(block_tables + sequence * width + i)
    slot, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, ROW)[None, :]
    tokens = tl.load(kv + (block * BLOCK_SIZE + slot) * ROW + column, mask=slot < left, other=0.0)
    tl.store(out + (row + slot) * ROW + column, tokens, mask=slot < left)
""",
        "CapturedDecode.replay": """
def replay(self, q, block_tables, context_lens):
    n, width = block_tables.shape
    self.block_tables.zero_()
    self.context_lens.fill_(1)
    for static, values in ((self.q, q), (self.context_lens, context_lens)):
        static[:n].copy_(values)
    self.block_tables[:n, :width].copy_(block_tables)
    self.graph()
    return self.out[:n].clone()
""",
    },
}
