"""Chapter 08: mistakes that a reader may make, each as a wrong solution."""

from dataclasses import replace

from minikv.course.chapters.ch08_triton_paged_attention.chapter import (
    TABLES_OF_A_NEW_BATCH_ONLY,
    UP_TO_THE_BLOCKS_END,
)
from minikv.course.exercises.mistakes import Mistake

STALE = "    self.block_tables[:num_seqs, :width] = block_tables\n"
SHARED = (  # mistakes of any kernel with a running softmax, as edits of one with 1-D sums
    Mistake(
        "forgets to rescale acc",
        edits={"K": (("acc * shrink + ", "acc + "),)},
        cause="`acc` is not rescaled when the maximum moves",
        look="which sums were made relative to the old maximum? All of them need the factor",
    ),
    Mistake(
        "forgets to rescale total",
        edits={"K": (("total * shrink + ", "total + "),)},
        cause="`total` is not rescaled when the maximum moves",
        look="which sums were made relative to the old maximum? All of them need the factor",
    ),
    Mistake(
        "inverts the factor",
        edits={"K": (("tl.exp(top - new_top)", "tl.exp(new_top - top)"),)},
        cause="the factor is inverted: e^(new - old) instead of e^(old - new)",
        look="the factor when the maximum rises: it should be below 1",
    ),
    Mistake(
        "forgets the scale",
        edits={"K": ((" * scale  #", "  #"),)},
        cause="the scores are not multiplied by `scale`",
        look="the formula of attention: softmax(q k / sqrt(D)) v",
    ),
    Mistake(
        "masks with a score of 0",
        edits={"K": (("        scores = tl.where(held, scores, -float(\"inf\"))\n", ""),)},
        cause="what is masked out is read as 0, so its score is 0 and its weight is e^(0 - top)",
        look="which score gives a weight of 0? `tl.where` puts it there",
    ),
    Mistake(
        "does not divide",
        edits={"K": (("acc / total", "acc"),)},
        cause="the weighted sum of V is never divided by the sum of the weights",
        look="what is stored: do its weights add up to 1?",
    ),
    Mistake(
        "starts with a maximum of 0",
        edits={"K": (("    top = -float(\"inf\")\n", "    top = 0.0\n"),)},
        cause="`top` starts at 0: where all scores are far below 0, every weight is 0, and the "
        "result is 0 / 0",
        look="what must `top` start with, so that any score is larger?",
    ),
    Mistake(
        "subtracts nothing",
        edits={"K": (
            ("    top = -float(\"inf\")\n", "    top = 0.0\n"),
            ("tl.maximum(top, tl.max(scores, 0))", "0.0"),
        )},
        cause="nothing is subtracted from the scores, and exp of a large score is infinite",
        look="what is subtracted from a score, and the largest argument that `exp` can get",
    ),
    Mistake(
        "takes the maximum of the new tile alone",
        edits={"K": (("tl.maximum(top, tl.max(scores, 0))", "tl.max(scores, 0)"),)},
        cause="the maximum is that of the new tile only, so e^(old - new) overflows when scores "
        "fall",
        look="`top` is the largest score of all tiles so far",
    ),
    Mistake(
        "swaps K and V",
        edits={"K": (
            ("        keys = tl.load(", "        hold = tl.load("),
            ("        values = tl.load(", "        keys = tl.load("),
            ("        scores = tl.sum(", "        values = hold\n        scores = tl.sum("),
        )},
        cause="keys and values are swapped",
        look="which of the two do the scores come from?",
    ),
)  # fmt: skip


def of(kernel: str) -> tuple[Mistake, ...]:
    """The shared mistakes, in this kernel."""
    return tuple(replace(mistake, edits={kernel: mistake.edits["K"]}) for mistake in SHARED)


# Right, in tiles of several blocks; a mistake below takes a mask away.
SEVERAL_BLOCKS = """
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
"""

MISTAKES = {
    "08.1": (
        Mistake(
            "masks nothing",
            edits={"add_kernel": (("mask = element < size", "mask = element >= 0"),)},
            cause="x and y are read past their end: elements from `size` on are not masked",
            look="which elements of this tile exist? Does every `tl.load` have that mask?",
        ),
        Mistake(
            "masks only the loads",
            edits={"add_kernel": (("total, mask=mask)", "total)"),)},
            cause="the store has no mask, and the last tile writes past the end of `out`, to "
            "memory that is not yours",
            look="which elements of this tile exist? Does every `tl.store` have that mask?",
        ),
        Mistake(
            "lets one too many through",
            edits={"add_kernel": (("element < size", "element <= size"),)},
            cause="the mask lets one element too many through: <= instead of <",
            look="work out by hand the last element that the mask lets through",
        ),
        Mistake(
            "ignores the program's number",
            edits={"add_kernel": (("tl.program_id(0) * TILE + ", ""),)},
            cause="every program works on the first tile",
            look="what distinguishes program 2 from program 0?",
        ),
        Mistake(
            "begins a tile at its own number",
            edits={"add_kernel": (("tl.program_id(0) * TILE", "tl.program_id(0)"),)},
            cause="the tiles overlap: tile p begins at p instead of p * TILE",
            look="what is the first element of program 2?",
        ),
        Mistake(
            "leaves the last tile out",
            edits={"add_kernel": (("element < size", "element < size // TILE * TILE"),)},
            cause="the last tile is left out when it is not full",
            look="how many programs are there, and which elements of the last tile exist?",
        ),
        Mistake(
            "adds x to itself",
            edits={"add_kernel": (("tl.load(y", "tl.load(x"),)},
            cause="x is added to itself",
            look="which of the two loads reads y?",
        ),
        Mistake(
            "stores nothing",
            edits={"add_kernel": (("    tl.store(out + element, total, mask=mask)\n", ""),)},
            cause="nothing is ever stored",
            look="only `tl.store` writes to `out`",
        ),
        Mistake(
            "leaves all to program 0",
            sources={"add_kernel": '''
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    if tl.program_id(0) == 0:
        for start in range(0, size, TILE):
            element = start + tl.arange(0, TILE)
            mask = element < size
            total = tl.load(x + element, mask=mask) + tl.load(y + element, mask=mask)
            tl.store(out + element, total, mask=mask)
'''},
            cause="one program does the work of all of them",
            look="program p does the TILE elements from p * TILE on, and no others",
        ),
        Mistake(
            "goes through its tile number by number",
            sources={"add_kernel": '''
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    start = tl.program_id(0) * TILE
    for i in range(start, tl.minimum(start + TILE, size)):
        tl.store(out + i, tl.load(x + i) + tl.load(y + i))
'''},
            cause="a tile is processed one element at a time",
            look="with `tl.arange`, one line does the whole tile",
        ),
        Mistake(
            "is Python, and no kernel",
            sources={"add_kernel": '''
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    start = tl.program_id(0) * TILE
    for i in range(TILE):
        if start + i >= size:
            break
        tl.store(out + start + i, tl.load(x + start + i) + tl.load(y + start + i))
'''},
            cause="the interpreter is Python, and runs what no GPU can: Python's own functions, "
            "`break`, indexing a single number out of a tile, a variable whose shape or type "
            "changes between iterations",
            look="the line that the report names",
        ),
        Mistake(
            "leaves a print in",
            edits={"add_kernel": (
                ("    total = tl.load", "    print(element)\n    total = tl.load"),
            )},
            cause="a print was left in: remove it",
            look="the line that the report names",
        ),
    ),
    "08.2": (
        *of("attend_kernel"),
        Mistake(
            "leaves masked values undefined",
            edits={"attend_kernel": (
                ("values = tl.load(v + place, mask=held[:, None], other=0.0)",
                 "values = tl.load(v + place, mask=held[:, None])"),
            )},
            cause="a masked load has no `other`: its masked elements are undefined on a GPU (NaN "
            "in this check), and 0 * NaN is NaN",
            look="tl.load(…, mask=…, other=0.0)",
        ),
        Mistake(
            "reads a whole last tile",
            edits={"attend_kernel": (("held = key < context", "held = key >= 0"),)},
            cause="the last tile is read without a mask, past the last key",
            look="which keys of this tile exist? Does every `tl.load` of K and V have that mask?",
        ),
        Mistake(
            "leaves the last tile out",
            edits={"attend_kernel": (
                ("range(0, context, TILE)", "range(0, context // TILE * TILE, TILE)"),
            )},
            cause="only full tiles are read, so the newest tokens are missing",
            look="how often does the loop run? 7 tokens in tiles of 4 make two tiles",
        ),
        Mistake(
            "stops a token early",
            edits={"attend_kernel": (("held = key < context", "held = key < context - 1"),)},
            cause="the last token is not seen",
            look="for which keys is the mask true?",
        ),
        Mistake(
            "keeps only the last tile",
            edits={"attend_kernel": (("total * shrink + ", ""), ("acc * shrink + ", ""))},
            cause="each tile overwrites the result of the tiles before it, so only the last one "
            "counts; or `top` is never updated",
            look="what has to be carried from one tile to the next?",
        ),
        Mistake(
            "looks for the maximum first, in a pass of its own",
            sources={"attend_kernel": '''
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
            cause="K or V is read more than once; with a running softmax one pass is enough",
            look="how many times does the kernel load each key and each value?",
        ),
        Mistake(
            "lets one too many through",
            edits={"attend_kernel": (("held = key < context", "held = key <= context"),)},
            cause="the mask lets one key too many through: <= instead of <",
            look="work out by hand the last key that the mask lets through",
        ),
        Mistake(
            "takes powers of two, of scores as they are",
            edits={"attend_kernel": (
                ("tl.exp(top - new_top)", "tl.exp2(top - new_top)"),
                ("tl.exp(scores - new_top)", "tl.exp2(scores - new_top)"),
            )},
            cause="the weights are powers of two, but the scores were not multiplied by log2(e)",
            look="2^(x log2(e)) is e^x",
        ),
        Mistake(
            "takes the factor as a power of two",
            edits={"attend_kernel": (("tl.exp(top - new_top)", "tl.exp2(top - new_top)"),)},
            cause="the factor is a power of two, but the weights are powers of e",
            look="use either `exp` or `exp2`, everywhere",
        ),
        Mistake(
            "takes the weights as powers of two",
            edits={"attend_kernel": (("tl.exp(scores - new_top)", "tl.exp2(scores - new_top)"),)},
            cause="the weights are powers of two, but the factor is a power of e",
            look="use either `exp` or `exp2`, everywhere",
        ),
        Mistake(
            "counts keys by TILE",
            edits={"attend_kernel": (("key[:, None] * HEAD_DIM", "key[:, None] * TILE"),)},
            cause="key j is read at j * TILE, but it begins at j * HEAD_DIM",
            look="k is (context, HEAD_DIM): how many numbers lie between two keys?",
        ),
        Mistake(
            "never updates top",
            edits={"attend_kernel": (("        top = new_top\n", ""),)},
            cause="each tile overwrites the result of the tiles before it, so only the last one "
            "counts; or `top` is never updated",
            look="what has to be carried from one tile to the next?",
        ),
        Mistake(
            "takes all keys as one tile",
            edits={"attend_kernel": (
                ("range(0, context, TILE)", "range(0, context, 64)"),
                ("start + tl.arange(0, TILE)", "start + tl.arange(0, 64)"),
            )},
            cause="the tile has a fixed size instead of TILE, so too many scores are held at once: "
            "for a short context, all of them",
            look="the kernel holds TILE keys at a time, and TILE is an argument",
        ),
        Mistake(
            "scales the query in memory",
            edits={"attend_kernel": (
                ("    top = -float(\"inf\")\n",
                 "    tl.store(q + column, query * scale)\n    top = -float(\"inf\")\n"),
            )},
            cause="the query is scaled in memory, so the next program that reads it scales it "
            "again",
            look="`out` is the only array to write to; `query` is your own copy",
        ),
    ),
    "08.3": (
        *of("decode_kernel"),
        Mistake(
            "clears what lies past the context",
            edits={"decode_kernel": (
                ("        scores = tl.sum(",
                 "        tl.store(kv + place, keys)\n        scores = tl.sum("),
            )},
            cause="the kernel writes to the pool, which other programs read at the same time",
            look="`out` is the only array to write to: what does each `tl.store` get?",
        ),
        Mistake(
            "ignores the table",
            edits={"decode_kernel": (("tl.load(block_tables + sequence * width + i)", "i"),)},
            cause="logical block i is read from physical block i; the block table is never used",
            look="what must be loaded before the keys?",
        ),
        Mistake(
            "takes the first row of the table",
            edits={"decode_kernel": (("block_tables + sequence * width + i", "block_tables + i"),)},
            cause="all sequences read the first sequence's blocks",
            look="where does the row of `sequence` begin, in a table with `width` entries per row?",
        ),
        Mistake(
            "takes the first length",
            edits={"decode_kernel": (
                ("tl.load(context_lens + sequence)", "tl.load(context_lens)"),
            )},
            cause="all sequences use the first sequence's context length",
            look="which element of `context_lens` belongs to this program?",
        ),
        Mistake(
            "assigns the KV heads in turn",
            edits={"decode_kernel": (("head // (HEADS // KV_HEADS)", "head % KV_HEADS"),)},
            cause="the KV heads are assigned to query heads in turn, but the query heads of a "
            "group lie side by side",
            look="with 4 query heads and 2 KV heads, heads 0 and 1 share KV head 0",
        ),
        Mistake(
            "always reads KV head 0",
            edits={"decode_kernel": ((" * (2 * KV_HEADS) + kv_head", " * (2 * KV_HEADS)"),)},
            cause="all query heads read KV head 0",
            look="how many numbers lie between one KV head of a token and the next?",
        ),
        Mistake(
            "takes V right after K",
            edits={"decode_kernel": (
                ("kv + place + KV_HEADS * HEAD_DIM", "kv + place + HEAD_DIM"),
            )},
            cause="V is read right after its K, but the K of the next KV head lies there",
            look="(…, 2, KV_HEADS, HEAD_DIM): how many numbers lie between a K and its V?",
        ),
        Mistake(
            "takes the query head for a KV head",
            edits={"decode_kernel": (("head // (HEADS // KV_HEADS)", "head"),)},
            cause="the query head's number is used as the KV head's, but there are fewer KV heads",
            look="with 4 query heads and 2 KV heads, which KV head does query head 3 read?",
        ),
        Mistake(
            "masks nothing",
            edits={"decode_kernel": (
                ("held = i * BLOCK_SIZE + offset < context", "held = offset >= 0"),
            )},
            cause="the last block is read to its end, including slots where no token was written",
            look="which slots of the last block hold a token?",
        ),
        Mistake(
            "masks the scores, and not the loads",
            edits={"decode_kernel": (
                ("keys = tl.load(kv + place, mask=held[:, None], other=0.0)",
                 "keys = tl.load(kv + place)"),
                ("KV_HEADS * HEAD_DIM, mask=held[:, None], other=0.0)", "KV_HEADS * HEAD_DIM)"),
            )},
            cause="slots that hold no token are read; their weight is 0, but 0 * NaN is NaN",
            look="the masks of the loads, and what replaces the masked elements",
        ),
        Mistake(
            "masks by the physical slot",
            edits={"decode_kernel": (
                ("held = i * BLOCK_SIZE + offset < context",
                 "held = block * BLOCK_SIZE + offset < context"),
            )},
            cause="the mask compares physical slots with the context's length",
            look="what counts is the logical position i * BLOCK_SIZE + offset, wherever its block "
            "lies",
        ),
        Mistake(
            "reads only full blocks",
            edits={"decode_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "context // BLOCK_SIZE"),)},
            cause="only full tiles are read, so the newest tokens are missing",
            look="how often does the loop run? 7 tokens in tiles of 4 make two tiles",
        ),
        Mistake(
            "takes a block for a slot",
            edits={"decode_kernel": (("(block * BLOCK_SIZE + offset) *", "(block + offset) *"),)},
            cause="a block's id is used as a slot; block b begins at slot b * BLOCK_SIZE",
            look="how many slots lie before block 7?",
        ),
        Mistake(
            "every program writes the first head",
            edits={"decode_kernel": (("tl.store(out + row, ", "tl.store(out + column, "),)},
            cause="every program writes to the row of head 0 of sequence 0 in `out`",
            look="where does row (sequence, head) of `out` begin?",
        ),
        Mistake(
            "writes the whole row of the sequence",
            edits={"decode_kernel": (
                ("    tl.store(out + row, acc / total)\n",
                 "    for h in range(HEADS):\n"
                 "        if h >= head:\n"
                 "            tl.store(out + (sequence * HEADS + h) * HEAD_DIM + column,"
                 " acc / total)\n"),
            )},
            cause="two programs write one element; on a GPU either may come last",
            look="which elements belong to this program?",
        ),
        Mistake(
            "runs one block too far",
            edits={"decode_kernel": (
                ("tl.cdiv(context, BLOCK_SIZE)", "context // BLOCK_SIZE + 1"),
            )},
            cause="the loop runs one block too far when the last block is full: // + 1 instead of "
            "cdiv",
            look="how many blocks of 4 do 8 tokens need?",
        ),
        Mistake(
            "runs through the whole table",
            edits={"decode_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "width"),)},
            cause="the loop runs to `width`, but a shorter sequence has fewer blocks: the entries "
            "after them are another sequence's blocks, or none",
            look="how many blocks does this program's context have?",
        ),
        Mistake(
            "forgets that a slot has K and V",
            edits={"decode_kernel": (("* (2 * KV_HEADS) + kv_head", "* KV_HEADS + kv_head"),)},
            cause="a slot holds K and V of every KV head, so 2 * KV_HEADS rows; the 2 is missing",
            look="(…, 2, KV_HEADS, HEAD_DIM): how many numbers lie between two slots?",
        ),
        Mistake(
            "looks for V after all K of a block",
            edits={"decode_kernel": (
                ("(block * BLOCK_SIZE + offset) * (2 * KV_HEADS)",
                 "(block * 2 * BLOCK_SIZE + offset) * KV_HEADS"),
                ("place + KV_HEADS * HEAD_DIM", "place + BLOCK_SIZE * KV_HEADS * HEAD_DIM"),
            )},
            cause="V is read after all K of a block, but each slot has its K and its V side by "
            "side",
            look="(num_blocks, BLOCK_SIZE, 2, …): what comes first, the slot or K and V?",
        ),
        Mistake(
            "has tiles of several blocks, and does not mask the table",
            sources={"decode_kernel": SEVERAL_BLOCKS.replace(
                "BLOCK_SIZE, mask=key < length, other=0)", "BLOCK_SIZE)"
            )},
            cause="block ids are loaded for a whole tile, including tokens past the context; that "
            "load needs a mask, too",
            look="which entries of the table may this tile read?",
        ),
    ),
    "08.4": (
        Mistake(
            "leaves float32 to tf32",
            edits={"packed_kernel": (
                ('tl.trans(keys), input_precision="ieee")', "tl.trans(keys))"),
            )},
            cause="by default `tl.dot` keeps 10 of the mantissa's 23 bits; the interpreter does "
            "not show it",
            look="input_precision=\"ieee\", in both products; \"tf32x3\" rounds, too",
        ),
        Mistake(
            "multiplies without tl.dot",
            edits={"packed_kernel": (
                ('tl.dot(queries, tl.trans(keys), input_precision="ieee")',
                 "tl.sum(queries[:, None, :] * keys[None, :, :], 2)"),
                ('tl.dot(weights, values, acc * shrink[:, None], input_precision="ieee")',
                 "acc * shrink[:, None] + tl.sum(weights[:, :, None] * values[None, :, :], 1)"),
            )},
            cause="a product is computed as a sum, over a tile of three dimensions or one head at "
            "a time: right, but tensor cores can't do it",
            look="scores = queries times keys transposed; acc += weights times values",
        ),
        Mistake(
            "does not mask the padded rows when it reads",
            edits={"packed_kernel": (
                ("tl.load(q + row, mask=is_head, other=0.0)", "tl.load(q + row)"),
            )},
            cause="q is also read for the padded rows, which are other heads or lie past its end",
            look="which rows are heads of this group? Does the load of q have that mask?",
        ),
        Mistake(
            "does not mask the padded rows when it writes",
            edits={"packed_kernel": (("total[:, None], mask=is_head)", "total[:, None])"),)},
            cause="the padded rows are stored, too: over other heads' results, or past the end of "
            "`out`",
            look="which rows are heads of this group? Does the store have that mask?",
        ),
        Mistake(
            "counts the heads of a group by ROWS",
            edits={"packed_kernel": (
                ("(sequence * KV_HEADS + kv_head) * GROUP + member",
                 "sequence * KV_HEADS * GROUP + kv_head * ROWS + member"),
            )},
            cause="groups are taken to be ROWS heads apart, but in q and out they are GROUP apart",
            look="with groups of 3, which head is the first of group 1?",
        ),
        Mistake(
            "one maximum for all rows",
            edits={"packed_kernel": (("tl.max(scores, 1)", "tl.max(scores)"),)},
            cause="all rows share one maximum: a head whose scores are far below it has weights of "
            "0, and a result of 0 / 0",
            look="the axis of `tl.max`: there should be one number per row",
        ),
        Mistake(
            "forgets to rescale acc",
            edits={"packed_kernel": (("acc * shrink[:, None]", "acc"),)},
            cause="`acc` is not rescaled when the maximum moves",
            look="which sums were made relative to the old maximum? All of them need the factor",
        ),
        Mistake(
            "forgets to rescale total",
            edits={"packed_kernel": (("total * shrink + ", "total + "),)},
            cause="`total` is not rescaled when the maximum moves",
            look="which sums were made relative to the old maximum? All of them need the factor",
        ),
        Mistake(
            "sums the weights over the rows",
            edits={"packed_kernel": (("tl.sum(weights, 1)", "tl.sum(weights, 0)"),)},
            cause="the weights are summed over the rows, but each row needs the sum over its "
            "tokens",
            look="the axis of `tl.sum`: which axis is the tokens?",
        ),
        Mistake(
            "masks the scores along the wrong axis",
            edits={"packed_kernel": (
                ("tl.where(held[None, :], scores", "tl.where(is_head, scores"),
            )},
            cause="the scores are masked by row, but it is tokens, the columns, that may not exist",
            look="`held[None, :]` or `is_head`: which of the two belongs to the scores?",
        ),
        Mistake(
            "does not transpose the keys",
            edits={"packed_kernel": (("tl.trans(keys)", "keys"),)},
            cause="the keys are not transposed: a score sums over head_dim, not over tokens",
            look="the shapes: (ROWS, D) times (D, BLOCK_SIZE)",
        ),
        Mistake(
            "forgets the scale",
            edits={"packed_kernel": (
                ('input_precision="ieee") * scale', 'input_precision="ieee")'),
            )},
            cause="the scores are not multiplied by `scale`",
            look="the formula of attention: softmax(q k / sqrt(D)) v",
        ),
        Mistake(
            "reads the block for each head",
            sources={"packed_kernel": '''
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
            cause="K and V are read again for each query head of a group",
            look="what does the loop over the blocks load, and how often?",
        ),
        Mistake(
            "runs one block too far",
            edits={"packed_kernel": (
                ("tl.cdiv(context, BLOCK_SIZE)", "context // BLOCK_SIZE + 1"),
            )},
            cause="the loop runs one block too far when the last block is full: // + 1 instead of "
            "cdiv",
            look="how many blocks of 16 do 32 tokens need?",
        ),
        Mistake(
            "runs through the whole table",
            edits={"packed_kernel": (("tl.cdiv(context, BLOCK_SIZE)", "width"),)},
            cause="the loop runs to `width`, but a shorter sequence has fewer blocks: the entries "
            "after them are another sequence's blocks, or none",
            look="how many blocks does this program's context have?",
        ),
        Mistake(
            "takes a KV head for a group of them",
            edits={"packed_kernel": ((" * (2 * KV_HEADS) + kv_head",
                                " * (2 * KV_HEADS) + kv_head * GROUP"),)},
            cause="in `kv` a KV head is one row; only q and out have GROUP rows for each",
            look="how many numbers lie between one KV head of a token and the next?",
        ),
    ),
    "08.5": (
        Mistake(
            "leaves everything to split 0",
            edits={"split_kernel": (
                ("range(split * share, tl.minimum(split * share + share, blocks))",
                 "range(0, tl.where(split == 0, blocks, 0))"),
            )},
            cause="split 0 reads the whole context, and the other splits read nothing",
            look="the first and the last block of each split",
        ),
        Mistake(
            "divides by a total of 0",
            edits={"split_kernel": (("tl.where(total > 0, total, 1.0)", "total"),)},
            cause="an empty split has a total of 0; 0 / 0 is NaN, and stays NaN when the join "
            "multiplies it by 0",
            look="`top`, `total` and `acc` after a loop that never ran, and how you use them",
        ),
        Mistake(
            "returns from an empty split",
            edits={"split_kernel": (
                ("    top = tl.full(", "    if split * share >= blocks:\n        return\n"
                 "    top = tl.full("),
            )},
            cause="an empty split returns without storing, so the join reads what was in memory "
            "before",
            look="every program has to store, even one without tokens",
        ),
        Mistake(
            "rounds the share down",
            edits={"split_kernel": (("tl.cdiv(blocks, SPLITS)", "blocks // SPLITS"),)},
            cause="the share of a split is rounded down, so the last blocks belong to no split",
            look="5 blocks in 4 splits: how many does each split get?",
        ),
        Mistake(
            "reads on into the next split",
            edits={"split_kernel": (("tl.minimum(split * share + share, blocks)",
                               "tl.minimum(split * share + share + 1, blocks)"),)},
            cause="each split also reads the first block of the next",
            look="where does split 0 end, and where does split 1 begin?",
        ),
        Mistake(
            "does not stop at the context's end",
            edits={"split_kernel": (("tl.minimum(split * share + share, blocks)",
                               "split * share + share"),)},
            cause="the last splits do not stop at the context's last block but continue to the end "
            "of their share",
            look="how often does the loop run, and does its last block exist?",
        ),
        Mistake(
            "averages the splits",
            edits={"join_kernel": (
                ("tl.exp(found - tl.max(found, 0))", "tl.where(found > -1e9, 1.0, 0.0)"),
            )},
            cause="the splits are averaged, as if all had the same weight",
            look="a split's weight is its share of the sum of exp(score)",
        ),
        Mistake(
            "weighs by the largest score",
            edits={"split_kernel": (("top + tl.log(some)", "top"),)},
            cause="a split is weighted by its largest score alone, so its number of tokens makes "
            "no difference",
            look="lse is top + log(total)",
        ),
        Mistake(
            "weighs by the sum alone",
            edits={"split_kernel": (("top + tl.log(some)", "tl.log(total)"),)},
            cause="a split is weighted by its `total` alone, which is relative to its own maximum: "
            "log(total) without top",
            look="lse is top + log(total)",
        ),
        Mistake(
            "joins without the largest",
            edits={"join_kernel": (("tl.exp(found - tl.max(found, 0))", "tl.exp(found)"),)},
            cause="exp is taken of lse directly; with large scores that is infinite, or 0 for all "
            "splits",
            look="what must be subtracted from lse before `exp`?",
        ),
        Mistake(
            "forgets to divide in the join",
            edits={"join_kernel": ((" / tl.sum(weights, 0)", ""),)},
            cause="the joined output is not divided by the sum of the weights",
            look="what do the weights of the splits add up to?",
        ),
        Mistake(
            "divides only in the join",
            edits={"split_kernel": (("acc / some[:, None]", "acc"),)},
            cause="`acc` is stored without being divided by `total`, and the join multiplies by "
            "that sum again",
            look="partial is the output over a split's tokens, with weights that add up to 1",
        ),
        Mistake(
            "stores padded rows of lse",
            edits={"split_kernel": (("top + tl.log(some), mask=is_head)", "top + tl.log(some))"),)},
            cause="lse is also stored for the padded rows: over other heads' values, or past its "
            "end",
            look="which rows are heads of this group? Do both stores have that mask?",
        ),
        Mistake(
            "reads only the first split",
            edits={"join_kernel": (
                ("found = tl.load(lse + split)",
                 "found = tl.load(lse + split)\n"
                 '    found = tl.where(tl.arange(0, SPLITS) == 0, found, -float("inf"))'),
            )},
            cause="only the first split counts",
            look="how many numbers of lse are loaded?",
        ),
        Mistake(
            "runs one block too far",
            edits={"split_kernel": (("tl.minimum(split * share + share, blocks)",
                               "tl.minimum(split * share + share, context // BLOCK_SIZE + 1)"),)},
            cause="the last split runs one block too far when the last block is full: // + 1 "
            "instead of cdiv",
            look="how many blocks of 16 do 32 tokens need?",
        ),
        Mistake(
            "splits in powers of two",
            edits={"split_kernel": (
                ('"ieee") * scale\n', '"ieee") * scale * 1.4426950408889634\n'),
                ("tl.exp(top - new_top)", "tl.exp2(top - new_top)"),
                ("tl.exp(scores - new_top[:, None])", "tl.exp2(scores - new_top[:, None])"),
                ("tl.log(some)", "tl.log2(some)"),
            )},
            cause="split and join use different bases: the split powers of two, the join of e",
            look="log2(total) goes with exp2, log(total) with exp",
        ),
        Mistake(
            "joins in powers of two",
            edits={"join_kernel": (("tl.exp(found", "tl.exp2(found"),)},
            cause="split and join use different bases: the split powers of e, the join of two",
            look="log2(total) goes with exp2, log(total) with exp",
        ),
    ),
    "08.6": (
        Mistake(
            "lets one too many through",
            edits={"gather_kernel": (("held = position < context", "held = position <= context"),)},
            cause="what a block holds past its sequence's end is copied too, over the next "
            "sequence's first tokens",
            look="for which positions is `held` true, in the last block of a sequence?",
        ),
        Mistake(
            "packs as it was found",
            edits={"gather_kernel": UP_TO_THE_BLOCKS_END},
            cause="what a block holds past its sequence's end is copied too, over the next "
            "sequence's first tokens",
            look="for which positions is `held` true, in the last block of a sequence?",
        ),
        Mistake(
            "leaves a full last block out",
            edits={"gather_kernel": (
                ("held = position < context",
                 "held = position < context // BLOCK_SIZE * BLOCK_SIZE\n"
                 "    if i == context // BLOCK_SIZE:\n"
                 "        held = position < context"),
                ("    block = tl.load(", "    if i * BLOCK_SIZE + BLOCK_SIZE == context:\n"
                 "        held = position < 0\n    block = tl.load("),
            )},
            cause="a full last block is treated as an empty one: n % BLOCK_SIZE is 0 then",
            look="how many tokens does the last block of a context of 8 hold, in blocks of 4?",
        ),
        Mistake(
            "copies full blocks only",
            edits={"gather_kernel": (
                ("held = position < context",
                 "held = position < context // BLOCK_SIZE * BLOCK_SIZE"),
            )},
            cause="a last block that is not full is not copied at all",
            look="which of its positions are tokens?",
        ),
        Mistake(
            "replays as it was found",
            edits={"CapturedDecode.replay": TABLES_OF_A_NEW_BATCH_ONLY},
            cause="the recording still reads the block tables of an earlier step",
            look="which of a step's inputs are copied, and on what condition?",
        ),
        Mistake(
            "still forgets the tables",
            edits={"CapturedDecode.replay": ((STALE, ""),)},
            cause="the recording still reads the block tables of an earlier step",
            look="which of a step's inputs are copied, and on what condition?",
        ),
        Mistake(
            "copies the tables of a new batch only",
            edits={"CapturedDecode.replay": (
                (STALE, "    if len(context_lens) != vars(self).get(\"last\"):\n    " + STALE
                 + "    self.last = len(context_lens)\n"),
            )},
            cause="the recording still reads the block tables of an earlier step",
            look="which of a step's inputs are copied, and on what condition?",
        ),
        Mistake(
            "copies only new columns",
            edits={"CapturedDecode.replay": (
                (STALE, "    for row, length in enumerate(context_lens.tolist()):\n"
                 "        last = (length - 1) // (self.graph.keywords[\"BLOCK_SIZE\"])\n"
                 "        if length == self.context_lens[row] + 1:\n"
                 "            self.block_tables[row, last] = block_tables[row, last]\n"
                 "        else:\n"
                 "            self.block_tables[row, :width] = block_tables[row]\n"),
            )},
            cause="the recording still reads the block tables of an earlier step",
            look="which of a step's inputs are copied, and on what condition?",
        ),
        Mistake(
            "puts another tensor in its place",
            edits={"CapturedDecode.replay": (
                (STALE, "    self.block_tables = torch.zeros_like(self.block_tables)\n" + STALE),
            )},
            cause="an input was replaced by another tensor, of which the recording knows nothing: "
            "it has the addresses of the old one",
            look="`tensor[...] = values` writes into a tensor, `name = tensor` does not",
        ),
        Mistake(
            "forgets the lengths",
            edits={"CapturedDecode.replay": (
                ("    self.context_lens[:num_seqs] = context_lens\n",
                 "    if (self.context_lens == 1).all():\n"
                 "        self.context_lens[:num_seqs] = context_lens\n"),
                ("    self.context_lens[num_seqs:] = 1\n", ""),
            )},
            cause="the recording still has the context lengths of the step before",
            look="which inputs does `replay` copy?",
        ),
        Mistake(
            "forgets the queries",
            edits={"CapturedDecode.replay": (
                ("    self.q[:num_seqs] = q\n",
                 "    if (self.q == 0).all():\n        self.q[:num_seqs] = q\n"),
            )},
            cause="the recording still has the queries of the step before",
            look="which inputs does `replay` copy?",
        ),
        Mistake(
            "leaves old lengths behind",
            edits={"CapturedDecode.replay": (("    self.context_lens[num_seqs:] = 1\n", ""),)},
            cause="rows that no sequence uses keep the length of an earlier step, so the kernel "
            "reads that many tokens for nothing",
            look="what should a row hold that no sequence uses?",
        ),
        Mistake(
            "decodes again, without the recording",
            edits={"CapturedDecode.replay": (
                ("    self.graph()\n", ""),
                ("self.out[:num_seqs]",
                 "decode(q, self.graph.args[1], block_tables, context_lens)"),
            )},
            cause="the step does not come from the recording, or the recording is played twice",
            look="`self.graph()` is the step: what does `replay` call besides it?",
        ),
    ),
}  # fmt: skip
