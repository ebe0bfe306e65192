"""Chapter 08: right solutions written otherwise, and wrong ones."""

from four_ways import Edit, Rewrite

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

STALE = "    self.block_tables[:num_seqs, :width] = block_tables\n"
SHARED = (  # mistakes that every kernel with a running softmax may have, in the words of 1-D sums
    Edit(
        "forgets to rescale acc",
        {"K": (("acc * shrink + ", "acc + "),)},
        says="`acc` is not rescaled when the maximum moves",
    ),
    Edit(
        "forgets to rescale total",
        {"K": (("total * shrink + ", "total + "),)},
        says="`total` is not rescaled when the maximum moves",
    ),
    Edit(
        "turns the factor round",
        {"K": (("tl.exp(top - new_top)", "tl.exp(new_top - top)"),)},
        says="inf * 0 or -inf - -inf: is the factor e^(old - new)?",
    ),
    Edit(
        "forgets the scale",
        {"K": ((" * scale  #", "  #"),)},
        says="the scores are not multiplied by `scale`",
    ),
    Edit(
        "masks with a score of 0",
        {"K": (("        scores = tl.where(held, scores, -float(\"inf\"))\n", ""),)},
        says="so it has a score of 0, and a weight of e^(0 - top)",
    ),
    Edit(
        "does not divide",
        {"K": (("acc / total", "acc"),)},
        says="the weighted sum of V is never divided",
    ),
    Edit(
        "begins with a maximum of 0",
        {"K": (("    top = -float(\"inf\")\n", "    top = 0.0\n"),)},
        says="the largest score is taken to be 0 at least",
    ),
    Edit(
        "subtracts nothing",
        {"K": (
            ("    top = -float(\"inf\")\n", "    top = 0.0\n"),
            ("tl.maximum(top, tl.max(scores, 0))", "0.0"),
        )},
        says="exp of a large number overflows",
    ),
    Edit(
        "takes the maximum of the new tile alone",
        {"K": (("tl.maximum(top, tl.max(scores, 0))", "tl.max(scores, 0)"),)},
        says="the maximum is that of the new tile alone",
    ),
    Edit(
        "exchanges K and V",
        {"K": (
            ("        keys = tl.load(", "        hold = tl.load("),
            ("        values = tl.load(", "        keys = tl.load("),
            ("        scores = tl.sum(", "        values = hold\n        scores = tl.sum("),
        )},
        says="keys and values have changed places",
    ),
)  # fmt: skip


def of(kernel: str, mistakes=SHARED) -> tuple[Edit, ...]:
    return tuple(Edit(m.name, {kernel: m.edits["K"]}, m.says) for m in mistakes)


WRONG = {
    "08.1": (
        Edit(
            "masks nothing",
            {"add_kernel": (("mask = element < size", "mask = element >= 0"),)},
            says="nothing of this tile is masked when it is read",
        ),
        Edit(
            "masks only the loads",
            {"add_kernel": (("total, mask=mask)", "total)"),)},
            says="nothing of this tile is masked when it is written",
        ),
        Edit(
            "lets one too many through",
            {"add_kernel": (("element < size", "element <= size"),)},
            says="the mask lets through what does not exist (< or <=?)",
        ),
        Edit(
            "forgets who it is",
            {"add_kernel": (("tl.program_id(0) * TILE + ", ""),)},
            says="every program does the first tile",
        ),
        Edit(
            "begins a tile at its own number",
            {"add_kernel": (("tl.program_id(0) * TILE", "tl.program_id(0)"),)},
            says="tile p begins at p, not at p * TILE",
        ),
        Edit(
            "leaves the last tile out",
            {"add_kernel": (("element < size", "element < size // TILE * TILE"),)},
            says="the last tile is left out because it is not full",
        ),
        Edit(
            "adds x to itself",
            {"add_kernel": (("tl.load(y", "tl.load(x"),)},
            says="x is added to itself",
        ),
        Edit(
            "stores nothing",
            {"add_kernel": (("    tl.store(out + element, total, mask=mask)\n", ""),)},
            says="elements of the result were never written",
        ),
        Rewrite(
            "is Python, and no kernel",
            {"add_kernel": '''
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    start = tl.program_id(0) * TILE
    for i in range(TILE):
        if start + i >= size:
            break
        tl.store(out + start + i, tl.load(x + start + i) + tl.load(y + start + i))
'''},
            says="the interpreter is Python, and runs what no GPU can",
        ),
        Rewrite(
            "leaves all to program 0",
            {"add_kernel": '''
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    if tl.program_id(0) == 0:
        for start in range(0, size, TILE):
            element = start + tl.arange(0, TILE)
            mask = element < size
            total = tl.load(x + element, mask=mask) + tl.load(y + element, mask=mask)
            tl.store(out + element, total, mask=mask)
'''},
            says="one program does the work of all",
        ),
        Rewrite(
            "goes through its tile number by number",
            {"add_kernel": '''
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    start = tl.program_id(0) * TILE
    for i in range(start, tl.minimum(start + TILE, size)):
        tl.store(out + i, tl.load(x + i) + tl.load(y + i))
'''},
            says="a tile is done one element after the other",
        ),
        Edit(
            "leaves a print in",
            {"add_kernel": (
                ("    total = tl.load", "    print(element)\n    total = tl.load"),
            )},
            says="a print is left in: take it out",
        ),
    ),
    "08.2": (
        *of("attend_kernel"),
        Edit(
            "leaves open what a masked value is",
            {"attend_kernel": (
                ("values = tl.load(v + place, mask=held[:, None], other=0.0)",
                 "values = tl.load(v + place, mask=held[:, None])"),
            )},
            says="a masked load without `other`",
        ),
        Edit(
            "reads a whole last tile",
            {"attend_kernel": (("held = key < context", "held = key >= 0"),)},
            says="nothing of this tile is masked when it is read",
        ),
        Edit(
            "leaves the last tile out",
            {"attend_kernel": (
                ("range(0, context, TILE)", "range(0, context // TILE * TILE, TILE)"),
            )},
            says="only full tiles are read, so the newest tokens are missing",
        ),
        Edit(
            "stops a token early",
            {"attend_kernel": (("held = key < context", "held = key < context - 1"),)},
            says="the last token is not seen",
        ),
        Edit(
            "keeps only the last tile",
            {"attend_kernel": (("total * shrink + ", ""), ("acc * shrink + ", ""))},
            says="only the last one counts",
        ),
        Rewrite(
            "looks for the maximum first, in a pass of its own",
            {"attend_kernel": '''
@triton.jit
def attend_kernel(q, k, v, out, context, scale, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    column = tl.arange(0, HEAD_DIM)
    query = tl.load(q + column)
    top, total = -float("inf"), 0.0
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    for start in range(0, context, TILE):
        key = start + tl.arange(0, TILE)
        at = key[:, None] * HEAD_DIM + column[None, :]
        keys = tl.load(k + at, mask=(key < context)[:, None], other=0.0)
        scores = tl.where(key < context, tl.sum(query[None, :] * keys, 1) * scale, -float("inf"))
        top = tl.maximum(top, tl.max(scores, 0))
    for start in range(0, context, TILE):
        key = start + tl.arange(0, TILE)
        at = key[:, None] * HEAD_DIM + column[None, :]
        keys = tl.load(k + at, mask=(key < context)[:, None], other=0.0)
        values = tl.load(v + at, mask=(key < context)[:, None], other=0.0)
        scores = tl.where(key < context, tl.sum(query[None, :] * keys, 1) * scale, -float("inf"))
        total += tl.sum(tl.exp(scores - top), 0)
        acc += tl.sum(tl.exp(scores - top)[:, None] * values, 0)
    tl.store(out + column, acc / total)
'''},
            says="K or V is read more than once",
        ),
        Edit(
            "lets one too many through",
            {"attend_kernel": (("held = key < context", "held = key <= context"),)},
            says="the mask lets through what does not exist (< or <=?)",
        ),
        Edit(
            "takes powers of two, of scores as they are",
            {"attend_kernel": (
                ("tl.exp(top - new_top)", "tl.exp2(top - new_top)"),
                ("tl.exp(scores - new_top)", "tl.exp2(scores - new_top)"),
            )},
            says="but the scores were not multiplied by log2(e)",
        ),
        Edit(
            "takes the factor as a power of two",
            {"attend_kernel": (("tl.exp(top - new_top)", "tl.exp2(top - new_top)"),)},
            says="the factor is a power of two, and the weights are powers of e",
        ),
        Edit(
            "takes the weights as powers of two",
            {"attend_kernel": (("tl.exp(scores - new_top)", "tl.exp2(scores - new_top)"),)},
            says="the weights are powers of two, and the factor is one of e",
        ),
        Edit(
            "counts keys by TILE",
            {"attend_kernel": (("key[:, None] * HEAD_DIM", "key[:, None] * TILE"),)},
            says="key j is sought at j * TILE, and begins at j * HEAD_DIM",
        ),
        Edit(
            "never updates top",
            {"attend_kernel": (("        top = new_top\n", ""),)},
            says="or `top` is never updated",
        ),
    ),
    "08.3": (
        *of("decode_kernel"),
        Edit(
            "ignores the table",
            {"decode_kernel": (("tl.load(block_tables + sequence * width + i)", "i"),)},
            says="logical block i is read from physical block i",
        ),
        Edit(
            "takes the first row of the table",
            {"decode_kernel": (("block_tables + sequence * width + i", "block_tables + i"),)},
            says="all sequences read the first one's blocks",
        ),
        Edit(
            "takes the first length",
            {"decode_kernel": (("tl.load(context_lens + sequence)", "tl.load(context_lens)"),)},
            says="all sequences see as far as the first",
        ),
        Edit(
            "deals the KV heads out in turns",
            {"decode_kernel": (("head // (HEADS // KV_HEADS)", "head % KV_HEADS"),)},
            says="query heads take turns over the KV heads",
        ),
        Edit(
            "always reads KV head 0",
            {"decode_kernel": ((" * (2 * KV_HEADS) + kv_head", " * (2 * KV_HEADS)"),)},
            says="all query heads read KV head 0",
        ),
        Edit(
            "takes V right behind K",
            {"decode_kernel": (("kv + place + KV_HEADS * HEAD_DIM", "kv + place + HEAD_DIM"),)},
            says="that is the K of the next KV head",
        ),
        Edit(
            "takes the query head for a KV head",
            {"decode_kernel": (("head // (HEADS // KV_HEADS)", "head"),)},
            says="a query head's number is taken for a KV head's",
        ),
        Edit(
            "masks nothing",
            {"decode_kernel": (
                ("held = i * BLOCK_SIZE + offset < context", "held = offset >= 0"),
            )},
            says="the last block is read to its end",
        ),
        Edit(
            "masks the scores, and not the loads",
            {"decode_kernel": (
                ("keys = tl.load(kv + place, mask=held[:, None], other=0.0)",
                 "keys = tl.load(kv + place)"),
                ("KV_HEADS * HEAD_DIM, mask=held[:, None], other=0.0)", "KV_HEADS * HEAD_DIM)"),
            )},
            says="their weight is 0, but 0 * NaN is NaN",
        ),
        Edit(
            "masks by the physical slot",
            {"decode_kernel": (
                ("held = i * BLOCK_SIZE + offset < context",
                 "held = block * BLOCK_SIZE + offset < context"),
            )},
            says="the mask compares places in the pool with the context's length",
        ),
        Edit(
            "reads only full blocks",
            {"decode_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "context // BLOCK_SIZE"),)},
            says="only full tiles are read",
        ),
        Edit(
            "takes a block for a slot",
            {"decode_kernel": (("(block * BLOCK_SIZE + offset) *", "(block + offset) *"),)},
            says="a block's number is taken for a slot's",
        ),
        Edit(
            "every program writes the first head",
            {"decode_kernel": (("tl.store(out + row, ", "tl.store(out + column, "),)},
            says="elements of the result were never written",
        ),
        Edit(
            "writes the whole row of the sequence",
            {"decode_kernel": (
                ("    tl.store(out + row, acc / total)\n",
                 "    for h in range(HEADS):\n"
                 "        if h >= head:\n"
                 "            tl.store(out + (sequence * HEADS + h) * HEAD_DIM + column,"
                 " acc / total)\n"),
            )},
            says="two programs write one element: on a GPU either may come last",
        ),
        Edit(
            "runs one block too far",
            {"decode_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "context // BLOCK_SIZE + 1"),)},
            says="the loop runs one block too far (cdiv, not // + 1",
        ),
        Edit(
            "runs through the whole table",
            {"decode_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "width"),)},
            says="of block table 0 is read, and",
        ),
        Edit(
            "forgets that a slot has K and V",
            {"decode_kernel": (("* (2 * KV_HEADS) + kv_head", "* KV_HEADS + kv_head"),)},
            says="2 * KV_HEADS rows: the 2 is missing",
        ),
        Edit(
            "looks for V behind all K of a block",
            {"decode_kernel": (
                ("(block * BLOCK_SIZE + offset) * (2 * KV_HEADS)",
                 "(block * 2 * BLOCK_SIZE + offset) * KV_HEADS"),
                ("place + KV_HEADS * HEAD_DIM", "place + BLOCK_SIZE * KV_HEADS * HEAD_DIM"),
            )},
            says="V is sought behind all K of a block",
        ),
        Rewrite(
            "has tiles of several blocks, and does not mask the table",
            {"decode_kernel": DIFFERENT["08.3"]["decode_kernel"].replace(
                "BLOCK_SIZE, mask=key < length, other=0)", "BLOCK_SIZE)"
            )},
            says="entry 1 of block table 0 is read, and 4 tokens have 1 block",
        ),
    ),
    "08.4": (
        Edit(
            "leaves float32 to tf32",
            {"packed_kernel": (('tl.trans(keys), input_precision="ieee")', "tl.trans(keys))"),)},
            says="a `tl.dot` rounds float32 to tf32",
        ),
        Edit(
            "multiplies without tl.dot",
            {"packed_kernel": (
                ('tl.dot(queries, tl.trans(keys), input_precision="ieee")',
                 "tl.sum(queries[:, None, :] * keys[None, :, :], 2)"),
                ('tl.dot(weights, values, acc * shrink[:, None], input_precision="ieee")',
                 "acc * shrink[:, None] + tl.sum(weights[:, :, None] * values[None, :, :], 1)"),
            )},
            says="right, but no work for tensor cores",
        ),
        Edit(
            "does not mask the padded rows when it reads",
            {"packed_kernel": (("tl.load(q + row, mask=is_head, other=0.0)", "tl.load(q + row)"),)},
            says="nothing of this tile is masked when it is read",
        ),
        Edit(
            "does not mask the padded rows when it writes",
            {"packed_kernel": (("total[:, None], mask=is_head)", "total[:, None])"),)},
            says="nothing of this tile is masked when it is written",
        ),
        Edit(
            "counts the heads of a group by ROWS",
            {"packed_kernel": (
                ("(sequence * KV_HEADS + kv_head) * GROUP + member",
                 "sequence * KV_HEADS * GROUP + kv_head * ROWS + member"),
            )},
            says="the mask lets through what does not exist",
        ),
        Edit(
            "one maximum for all rows",
            {"packed_kernel": (("tl.max(scores, 1)", "tl.max(scores)"),)},
            says="one maximum serves all rows",
        ),
        Edit(
            "forgets to rescale acc",
            {"packed_kernel": (("acc * shrink[:, None]", "acc"),)},
            says="`acc` is not rescaled when the maximum moves",
        ),
        Edit(
            "forgets to rescale total",
            {"packed_kernel": (("total * shrink + ", "total + "),)},
            says="`total` is not rescaled when the maximum moves",
        ),
        Edit(
            "sums the weights over the rows",
            {"packed_kernel": (("tl.sum(weights, 1)", "tl.sum(weights, 0)"),)},
            says="shapes that do not fit",
        ),
        Edit(
            "masks the scores along the wrong axis",
            {"packed_kernel": (("tl.where(held[None, :], scores", "tl.where(is_head, scores"),)},
            says="so it has a score of 0, and a weight of e^(0 - top)",
        ),
        Edit(
            "does not transpose the keys",
            {"packed_kernel": (("tl.trans(keys)", "keys"),)},
            says="the keys have to be transposed",
        ),
        Edit(
            "forgets the scale",
            {"packed_kernel": (('input_precision="ieee") * scale', 'input_precision="ieee")'),)},
            says="the scores are not multiplied by `scale`",
        ),
        Rewrite(
            "reads the block for each head",
            {"packed_kernel": '''
@triton.jit
def packed_kernel(
    q, kv, block_tables, context_lens, out, width, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    column, offset = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    context = tl.load(context_lens + sequence)
    for member in range(GROUP):
        row = ((sequence * KV_HEADS + kv_head) * GROUP + member) * HEAD_DIM + column
        query = tl.load(q + row)
        top, total = -float("inf"), 0.0
        acc = tl.zeros((HEAD_DIM,), tl.float32)
        for i in range(0, tl.cdiv(context, BLOCK_SIZE)):
            block = tl.load(block_tables + sequence * width + i)
            held = i * BLOCK_SIZE + offset < context
            token = (block * BLOCK_SIZE + offset) * (2 * KV_HEADS) + kv_head
            place = token[:, None] * HEAD_DIM + column[None, :]
            keys = tl.load(kv + place, mask=held[:, None], other=0.0)
            values = tl.load(kv + place + KV_HEADS * HEAD_DIM, mask=held[:, None], other=0.0)
            scores = tl.where(held, tl.sum(query[None, :] * keys, 1) * scale, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 0))
            weights = tl.exp(scores - new_top)
            total = total * tl.exp(top - new_top) + tl.sum(weights, 0)
            acc = acc * tl.exp(top - new_top) + tl.sum(weights[:, None] * values, 0)
            top = new_top
        tl.store(out + row, acc / total)
'''},
            says="K and V are read again for each query head of a group",
        ),
        Edit(
            "runs one block too far",
            {"packed_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "context // BLOCK_SIZE + 1"),)},
            says="the loop runs one block too far (cdiv, not // + 1",
        ),
        Edit(
            "runs through the whole table",
            {"packed_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "width"),)},
            says="of block table 0 is read, and",
        ),
        Edit(
            "takes a KV head for a group of them",
            {"packed_kernel": ((" * (2 * KV_HEADS) + kv_head",
                                " * (2 * KV_HEADS) + kv_head * GROUP"),)},
            says="only in q and out are there GROUP rows for each",
        ),
    ),
    "08.5": (
        Edit(
            "divides by a total of 0",
            {"split_kernel": (("tl.where(total > 0, total, 1.0)", "total"),)},
            says="an empty split: 0 / 0 is NaN",
        ),
        Edit(
            "returns from an empty split",
            {"split_kernel": (
                ("    top = tl.full(", "    if split * share >= blocks:\n        return\n"
                 "    top = tl.full("),
            )},
            says="a program with nothing to do left its place in memory as it was",
        ),
        Edit(
            "rounds the share down",
            {"split_kernel": (("tl.cdiv(blocks, SPLITS)", "blocks // SPLITS"),)},
            says="the share of a split is rounded down",
        ),
        Edit(
            "reads on into the next split",
            {"split_kernel": (("tl.minimum(split * share + share, blocks)",
                               "tl.minimum(split * share + share + 1, blocks)"),)},
            says="each split also reads the first block of the next",
        ),
        Edit(
            "does not stop at the context's end",
            {"split_kernel": (("tl.minimum(split * share + share, blocks)",
                               "split * share + share"),)},
            says="of `block_tables`, which has",
        ),
        Edit(
            "averages the splits",
            {"join_kernel": (
                ("tl.exp(found - tl.max(found, 0))", "tl.where(found > -1e9, 1.0, 0.0)"),
            )},
            says="the splits are averaged, as if all had the same weight",
        ),
        Edit(
            "weighs by the largest score",
            {"split_kernel": (("top + tl.log(some)", "top"),)},
            says="a split counts by its largest score alone",
        ),
        Edit(
            "weighs by the sum alone",
            {"split_kernel": (("top + tl.log(some)", "tl.log(total)"),)},
            says="a split counts by its `total`",
        ),
        Edit(
            "joins without the largest",
            {"join_kernel": (("tl.exp(found - tl.max(found, 0))", "tl.exp(found)"),)},
            says="Or the same in the join: what is subtracted from lse there?",
        ),
        Edit(
            "forgets to divide in the join",
            {"join_kernel": ((" / tl.sum(weights, 0)", ""),)},
            says="the joined output is not divided",
        ),
        Edit(
            "divides only in the join",
            {"split_kernel": (("acc / some[:, None]", "acc"),)},
            says="the weighted sum of V is never divided",
        ),
        Edit(
            "stores padded rows of lse",
            {"split_kernel": (("top + tl.log(some), mask=is_head)", "top + tl.log(some))"),)},
            says="nothing of this tile is masked when it is written",
        ),
        Edit(
            "reads only the first split",
            {"join_kernel": (
                ("found = tl.load(lse + split)",
                 "found = tl.load(lse + split)\n"
                 '    found = tl.where(tl.arange(0, SPLITS) == 0, found, -float("inf"))'),
            )},
            says="only the first split counts",
        ),
        Edit(
            "runs one block too far",
            {"split_kernel": (("tl.minimum(split * share + share, blocks)",
                               "tl.minimum(split * share + share, context // BLOCK_SIZE + 1)"),)},
            says="the loop runs one block too far (cdiv, not // + 1",
        ),
        Edit(
            "splits in powers of two",
            {"split_kernel": (
                ('"ieee") * scale\n', '"ieee") * scale * 1.4426950408889634\n'),
                ("tl.exp(top - new_top)", "tl.exp2(top - new_top)"),
                ("tl.exp(scores - new_top[:, None])", "tl.exp2(scores - new_top[:, None])"),
                ("tl.log(some)", "tl.log2(some)"),
            )},
            says="split and join use different bases: powers of two there",
        ),
        Edit(
            "joins in powers of two",
            {"join_kernel": (("tl.exp(found", "tl.exp2(found"),)},
            says="split and join use different bases: powers of e there",
        ),
    ),
    "08.6": (
        Edit(
            "lets one too many through",
            {"gather_kernel": (("held = position < context", "held = position <= context"),)},
            says="is copied, too, over the next sequence's first tokens",
        ),
        Edit(
            "leaves a full last block out",
            {"gather_kernel": (
                ("held = position < context",
                 "held = position < context // BLOCK_SIZE * BLOCK_SIZE\n"
                 "    if i == context // BLOCK_SIZE:\n"
                 "        held = position < context"),
                ("    block = tl.load(", "    if i * BLOCK_SIZE + BLOCK_SIZE == context:\n"
                 "        held = position < 0\n    block = tl.load("),
            )},
            says="a last block that is full is taken for an empty one",
        ),
        Edit(
            "copies full blocks only",
            {"gather_kernel": (
                ("held = position < context",
                 "held = position < context // BLOCK_SIZE * BLOCK_SIZE"),
            )},
            says="a last block that is not full is not copied at all",
        ),
        Edit(
            "still forgets the tables",
            {"CapturedDecode.replay": ((STALE, ""),)},
            says="the first step, context lengths 5, 2 and 9, blocks of 4: at",
        ),
        Edit(
            "copies the tables of a new batch only",
            {"CapturedDecode.replay": (
                (STALE, "    if len(context_lens) != vars(self).get(\"last\"):\n    " + STALE
                 + "    self.last = len(context_lens)\n"),
            )},
            says="the recording still reads the block tables of an earlier step",
        ),
        Edit(
            "copies only new columns",
            {"CapturedDecode.replay": (
                (STALE, "    for row, length in enumerate(context_lens.tolist()):\n"
                 "        last = (length - 1) // (self.graph.keywords[\"BLOCK_SIZE\"])\n"
                 "        if length == self.context_lens[row] + 1:\n"
                 "            self.block_tables[row, last] = block_tables[row, last]\n"
                 "        else:\n"
                 "            self.block_tables[row, :width] = block_tables[row]\n"),
            )},
            says="sequence 2 has another block in place 0: it has been copied",
        ),
        Edit(
            "puts another tensor in its place",
            {"CapturedDecode.replay": (
                (STALE, "    self.block_tables = torch.zeros_like(self.block_tables)\n" + STALE),
            )},
            says="an input was exchanged for another tensor",
        ),
        Edit(
            "forgets the lengths",
            {"CapturedDecode.replay": (
                ("    self.context_lens[:num_seqs] = context_lens\n",
                 "    if (self.context_lens == 1).all():\n"
                 "        self.context_lens[:num_seqs] = context_lens\n"),
                ("    self.context_lens[num_seqs:] = 1\n", ""),
            )},
            says="the recording still has the context lengths of the step before",
        ),
        Edit(
            "forgets the queries",
            {"CapturedDecode.replay": (
                ("    self.q[:num_seqs] = q\n",
                 "    if (self.q == 0).all():\n        self.q[:num_seqs] = q\n"),
            )},
            says="the recording still has the queries of the step before",
        ),
        Edit(
            "leaves old lengths behind",
            {"CapturedDecode.replay": (("    self.context_lens[num_seqs:] = 1\n", ""),)},
            says="context lengths of the rows that no sequence uses",
        ),
        Edit(
            "decodes anew, without the recording",
            {"CapturedDecode.replay": (
                ("    self.graph()\n", ""),
                ("self.out[:num_seqs]",
                 "decode(q, self.graph.args[1], block_tables, context_lens)"),
            )},
            says="the recording was played 0 times, expected 1",
        ),
    ),
}  # fmt: skip
