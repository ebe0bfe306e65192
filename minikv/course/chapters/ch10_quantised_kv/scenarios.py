"""Chapter 10 as programs: rulers, axes, attention over codes, copies of blocks."""

from typing import Any

import torch

import minikv
from minikv.course.chapters.ch10_quantised_kv.given import (
    keys_and_values,
    sample_naively,
    sample_together,
)
from minikv.course.judge.checking import Wrong, check, runs_model, tinypy, witness
from minikv.course.judge.programs import OperationMode
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.quant.formats import Int4ByChannel, quantise_int8


def drawn(seed: int, *shape: int, spread: float = 1.0) -> torch.Tensor:
    """Numbers of a normal distribution, the same every time."""
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kind(value: Any) -> Any:
    """The dtype of a tensor, in words."""
    if not isinstance(value, torch.Tensor):
        return f"no tensor, but a {type(value).__name__}"
    return str(value.dtype).removeprefix("torch.")


# ── 10.1 A ruler for a vector ─────────────────────────────────────────────────

# A program is (a description, x): quantised, looked at, and read back.


class NanToCode(OperationMode):
    """Which integer NaN becomes differs between machines: in here it is -128, on all of them."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        source = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}.get(func)
        if source is not None and found.dtype == torch.int8 and bool(args[source].isnan().any()):
            self.seen = True
            found.masked_fill_(args[source].isnan(), -128)
        return found


def rulers(mine, program, log: Log) -> None:
    words, x = program
    with NanToCode() as cast:
        pair = log.call(f"quantise_int8({words})", mine.quantise_int8, x.clone(), see=False)
    if log.events[-1].error is not None:
        return
    codes, scale = pair
    zeros = int((scale == 0).sum())  # TINY is not 0, but is not seen from 0 either
    log(f"quantise_int8({words})", {"the scale": scale.float(), "scales that are 0:": zeros})
    told = "NaN is cast to int8, and what comes of that differs between machines"
    log(told if cast.seen else "", {"the codes": codes.float()})
    log("", {"the dtypes are": [kind(codes), kind(scale)]})
    read = mine.dequantise_int8(codes, scale)
    log("read back", {"numbers": read, "dtype": kind(read)})


# A program is (codes, scale), as lists.


def read_back(mine, program, log: Log) -> None:
    codes, scale = program
    words = f"dequantise_int8({codes}, {scale})"
    tensors = torch.tensor(codes, dtype=torch.int8), torch.tensor(scale, dtype=torch.bfloat16)
    found = log.call(words, mine.dequantise_int8, *tensors)
    log("", {"dtype": kind(found)})


def bounds(mine, program, log: Log) -> None:
    words, q, error = program
    log.call(f"logit_bound({words})", mine.logit_bound, q.clone(), error.clone())


def one(*values: float) -> tuple[str, torch.Tensor]:
    return str(list(values)), torch.tensor(values)


def many(seed: int, *shape: int, spread: float = 1.0) -> tuple[str, torch.Tensor]:
    return f"random numbers of shape {shape}", drawn(seed, *shape, spread=spread)


CHANGES = {
    "in bfloat16": torch.Tensor.bfloat16,
    "in float16": torch.Tensor.half,
    "in float64": torch.Tensor.double,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second number of more": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}

scenario("10.1", rulers,
    Group("one vector whose scale is exact, or nearly",
          [one(127.0, 1.0, -50.0), one(-254.0, 100.2, 2.2), one(2.0, -6.0, 3.0),
          one(0.3, -0.2, 0.7, 0.1)], "how far apart are two marks, and which mark is nearest?"),
    Group("the scale is stored in bfloat16, rounded up, and the codes are computed with it",
          [one(1.0, 0.5012, -0.25), one(0.99, -0.98), one(3.3, 3.29, -3.3, 1.1), many(1, 16)],
          "is the scale rounded up, and are the codes computed with the rounded one?"),
    Group("each vector has a scale of its own",
          [("[[1.0, 2.0], [30.0, -10.2]]", torch.tensor([[1.0, 2.0], [30.0, -10.2]])),
          many(2, 3, 8), many(3, 2, 3, 4), many(4, 5, 2, 64, spread=7), many(5, 1, 1, 6),
          many(6, 4, 1), many(7, 0, 4)],
          "which dimension do the numbers that share a scale lie along?"),
    Group("zeros: scale 0, and codes 0", [one(0.0, 0.0, 0.0),
          ("[[0.0, 0.0], [3.0, -1.2]]", torch.tensor([[0.0, 0], [3, -1.2]]))],
          "what is divided by if the scale is 0, and which scale is returned?"),
    Group("any size of numbers", [many(10 + seed, 4, 1 + seed, spread=10.0 ** (seed % 7 - 3))
          for seed in range(20)],
          "which rows differ: those with the largest numbers, or the smallest?"),
    Group("other types and layouts", [(f"{words}, {how}", change(x))
          for words, x in (many(30, 5, 8), many(31, 2, 3, 16), many(32, 4, 300, spread=30))
          for how, change in CHANGES.items()],
          "in which dtype do you compute, and do all lines take any layout?"),
)  # fmt: skip

scenario("10.1", read_back,
    Group("reading codes back", [([127, -1, 0], 0.5), ([[1, -2], [3, 100]], [2.0, 0.25]),
          ([[[7, 8]], [[9, -10]]], [[0.5], [4.0]]), ([[3, 4], [5, 6]], [0.011, 3.0])],
          "x^ = scale * code: in which dtype, and along which dimension?"),
)  # fmt: skip

scenario("10.1", bounds,
    Group("how far a logit can move", [("q [2, -1, 0, 3], an error of 0.5 everywhere",
          torch.tensor([2.0, -1, 0, 3]), torch.full((4,), 0.5)),
          ("q [1, -1], errors [0.1, 0.3]", torch.tensor([1.0, -1]), torch.tensor([0.1, 0.3])),
          ("two queries, each with errors of its own", drawn(5, 2, 3), drawn(6, 2, 3).abs()),
          ("five queries, errors by channel", drawn(5, 5, 9), drawn(6, 9).abs())],
          "each product is off by at most |q| times its error; what is a logit divided by?"),
)  # fmt: skip


@check(
    "10.1",
    "the bound holds: |x - x^| is at most scale / 2",
    cause="some number is further from its mark than half the distance between two marks",
    look="where are scale, code and number of this element, and who rounds which way?",
)
def _(mine):
    for seed in range(30):
        x = drawn(seed, 7, 33) * 10.0 ** drawn(seed + 99, 7, 1)
        codes, scale = mine.quantise_int8(x)
        error = (mine.dequantise_int8(codes, scale) - x).abs().amax(-1) / scale.float()
        if float(error.max()) > 0.5 * (1 + 1e-4):
            raise Wrong(f"a number is {float(error.max()):.3g} scales from what is read back")


# ── 10.2 Choose the axis ──────────────────────────────────────────────────────


def along(mine, program, log: Log) -> None:
    words, x, dim = program
    log.call(f"int4_along({words}, {dim})", mine.int4_along, x.clone(), dim)


def choices(mine, program, log: Log) -> None:
    words, x = program
    log.call(f"better_axis({words})", mine.better_axis, x.clone())


def listed(*rows: list[float]) -> tuple[str, torch.Tensor]:
    return str([[int(value) for value in row] for row in rows]), torch.tensor(rows)


def loud(seed: int, tokens: int, channels: int, channel: bool, times: float, moved: bool = False):
    """Random numbers with one large channel, or one large token; `moved`: far from 0, in fact."""
    x = drawn(seed, tokens, channels)
    line = x[:, seed % channels] if channel else x[seed % tokens]
    line += times if moved else (times - 1) * line
    what = "channel" if channel else "token"
    return f"{tokens} tokens, {channels} channels, one {what} {times:g} times as large", x


def two_loud(tokens: int, channels: int) -> tuple[str, torch.Tensor]:
    """A large channel, and near the end a token that is much larger."""
    words, x = loud(3, tokens, channels, True, 8.0)
    x[tokens - 6] *= 100
    return f"{words}, and one token near the end 100 times", x


SQUARES = [loud(seed, 12, 12, channel, times) for seed in range(4)
           for channel in (True, False) for times in (8.0, 40.0)]  # fmt: skip
BLOCKS = [
    (f"random numbers of shape {shape}", drawn(seed, *shape))
    for seed, shape in enumerate(
        [(4, 6), (6, 4), (16, 64), (2, 2, 2), (2, 5, 8), (3, 2, 16, 8), (1, 6), (6, 1)]
    )
]

scenario("10.2", along,
    Group("by token: the numbers of a row share a ruler",
          [(*listed([0.0, 1], [15, 16]), -1), (*listed([0.0, 4, 15], [100, 107, 130]), -1)],
          "which dimension does `quantise_int4` look at?"),
    Group("by channel: the numbers of a column share one",
          [(*listed([0.0, 1], [15, 16]), -2), (*listed([0.0, 100], [4, 107], [15, 130]), -2),
          (*listed([0.0, 100, 7], [15, 130, 8]), -2)],
          "the dimension that has to be last, and the way back"),
    Group("any tokens and channels, and more dimensions in front",
          [(*block, dim) for block in BLOCKS for dim in (-1, -2)]
          + [(f"{words}, {how}", change(x), dim) for words, x in BLOCKS[2:4]
          for how, change in CHANGES.items() for dim in (-1, -2)],
          "which two dimensions are swapped, however many there are? `.T` reverses all"),
)  # fmt: skip

scenario(
    "10.2", choices,
    Group("a large channel, a large token",
          [listed([0.0, 100, 2], [1, 101, 3]), listed([0.0, 1], [100, 101], [2, 3]), *SQUARES,
           two_loud(48, 16), two_loud(150, 40)],
          "the mean of the squared errors, for each of the two"),
    Group("both are equal", [listed([3.0, 3], [3, 3]), listed([0.0, 15], [15, 0])],
          "the last sentence of the contract"),
    # A channel that is far from 0 and hardly moves: asymmetric rulers see its range alone.
    Group("errors of any sign, and a few that are large",
          [loud(seed, 16, 16, seed % 2 == 0, 3.0, moved=True) for seed in range(8)]
          + BLOCKS + [(f"{words}, {how}", change(x)) for words, x in SQUARES[:4]
                      for how, change in CHANGES.items() if "float" not in how],
          "squared, then averaged"),
)  # fmt: skip


# ── 10.3 Attention that reads codes ───────────────────────────────────────────

# A program is (H, K, D, block_size, block_ids, context_len, spread of K). With FAR_BELOW, keys
# point away from the queries; with STALE, the scales of slots without a token are NaN.

FAR_BELOW, STALE = -0.6, 0.7


def attention(mine, program, log: Log) -> None:
    heads, kv_heads, dim, size, block_ids, context_len = program[:6]
    tokens = "1 token" if context_len == 1 else f"{context_len} tokens"
    where = f"block {block_ids[0]}" if len(block_ids) == 1 else f"blocks {block_ids}"
    slots = "1 slot" if size == 1 else f"{size} slots"
    words = (
        f"{tokens} in {where} of {slots}, {heads} query head{'s' * (heads > 1)} on {kv_heads}, "
        f"head dim {dim}"
    )
    q, *rest = stored(*program[:7])
    for dtype in program[7:]:
        q, words = q.to(dtype), f"{words}, q in {str(dtype).removeprefix('torch.')}"
    found = log.call(words, mine.attend_int8, q, *rest)
    log(words, {"dtype": kind(found)})


def stored(heads, kv_heads, dim, size, block_ids, context_len, spread):
    """Arguments of `attend_int8`. Slots without a token hold large numbers, which must not be
    read. Tokens differ much in their scales."""
    num_blocks, seed = max(block_ids) + 2, 31 * heads + context_len
    q, parts = drawn(seed + 3, heads, dim), []
    for place in range(2):
        x = drawn(seed + place, num_blocks, kv_heads, size, dim)
        if spread == FAR_BELOW and place == 0:
            x = -30_000 * q[0] * x.abs()
        x = x * (abs(spread) * drawn(seed + place + 7, num_blocks, kv_heads, size, 1)).exp()
        held = [slot for block in block_ids for slot in range(block * size, (block + 1) * size)]
        empty = set(range(num_blocks * size)) - set(held[:context_len])
        for slot in empty:
            x[slot // size, :, slot % size] = 90.0
        parts += quantise_int8(x)
        for slot in empty if spread == STALE else ():
            parts[-1][slot // size, :, slot % size] = torch.nan
    return q, *parts, block_ids, context_len


def contexts(*sizes, spread: float = 0.6) -> list:
    return [(2, 1, 8, size, list(blocks), length, spread) for size, blocks, length in sizes]


scenario("10.3", attention,
    Group("one token: what is read is its value", contexts((1, [0], 1), (4, [0], 1), (4, [2], 1)),
          "the value of the token: its codes times its scale"),
    Group("one block", contexts((4, [0], 4), (4, [1], 3), (16, [0], 16)),
          "where are the scales of K and of V multiplied?"),
    Group("several blocks, in any order, the last not full",
          contexts((2, [0, 1], 4), (4, [3, 0, 2], 10), (3, [1, 4, 0, 2], 11), (1, [2, 0, 1], 3),
          (4, [3, 1], 8)), "running maximum, sum and output; and the slots that hold no token"),
    Group("blocks after the context", contexts((4, [0, 1, 2], 3), (2, [3, 1, 0], 2)),
          "how many blocks hold tokens?"),
    Group("scales of NaN where there is no token",
          contexts((4, [1], 3), (4, [1, 0], 6), spread=STALE),
          "0 times NaN is NaN: are slots without a token read?"),
    Group("groups of query heads", [(4, 2, 8, 4, [1, 0], 6, 0.6), (6, 2, 4, 3, [2, 0], 5, 0.6),
          (4, 4, 8, 2, [0, 2], 4, 0.6), (4, 2, 64, 16, [1, 2, 0], 40, 0.6)],
          "query head h belongs to KV head h // (H / K)"),
    Group("a query in half precision, heads and channels of 1",
          [(4, 2, 8, 4, [1, 0], 6, 0.6, torch.bfloat16),
          (2, 1, 64, 4, [1, 0], 7, 2.0, torch.float16), (1, 1, 1, 3, [1, 0], 4, 0.6),
          (3, 1, 1, 1, [2, 0], 2, 0.6)], "what is computed in float32, and what comes back?"),
    Group("large scores", [(2, 1, 16, 4, [0, 2, 1], 11, 2.5), (4, 2, 64, 4, [2, 1, 0], 12, 2.0),
          (1, 1, 8, 4, [0, 2, 1], 11, FAR_BELOW), (2, 1, 16, 16, [1, 0], 27, 2.5)],
          "M = max(m, m'), and what shrinks when it grows"),
)  # fmt: skip


class LargestFloat(OperationMode):
    """Notes the largest tensor of floats that any operation makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, torch.Tensor) and each.dtype.is_floating_point:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return found


@check("10.3", "no tensor of floats is larger than a block")
def _(mine):
    heads, kv_heads, dim, size, blocks = 4, 2, 64, 16, 160
    arguments = stored(heads, kv_heads, dim, size, list(range(blocks)), blocks * size, 0.5)
    with LargestFloat() as seen:
        mine.attend_int8(*arguments)
    # Twice what a block takes if its KV heads are repeated for all query heads; scales count, too.
    limit = max(2 * 4 * heads * size * dim, arguments[2].nbytes)
    witness(seen.largest > limit)  # whatever the numbers are: other lines look at them
    if seen.largest > limit:
        raise Wrong(
            f"a context of {blocks} blocks: a float tensor of {seen.largest:,} bytes was made; "
            f"one block's keys take {4 * kv_heads * size * dim:,} in float32",
            "floats of many blocks are held at once, whether codes or scores, so a step writes "
            "and reads more bytes than int8 saves",
            "a loop over `block_ids` that converts one block at a time, and keeps a maximum and "
            "two sums",
        )


# ── 10.4 Scores by channel ────────────────────────────────────────────────────

# A program is (words, q, packed, scale, low).


def scores(mine, program, log: Log) -> None:
    words, *arguments = program
    found = log.call(words, mine.scores_by_channel, *(x.clone() for x in arguments))
    log(words, {"dtype": kind(found)})


def full_block(heads, kv_heads, dim, tokens, seed=0, dtype=torch.float32, away=3.0):
    """Keys whose channels differ in size and lie up to `away` from 0, stored by channel."""
    sizes, middles = drawn(seed + 1, kv_heads, 1, dim).exp(), drawn(seed + 2, kv_heads, 1, dim)
    keys = sizes * (drawn(seed, kv_heads, tokens, dim) + away * middles)
    words = (
        f"{heads} query head{'s' * (heads > 1)} on {kv_heads}, {tokens} "
        f"token{'s' * (tokens > 1)}, head dim {dim}"
    )
    if dtype != torch.float32:
        words += f", q in {str(dtype).removeprefix('torch.')}"
    pieces = Int4ByChannel(tokens).encode(keys)
    q = drawn(seed + 3, heads, dim).to(dtype)
    return words, q, pieces["codes"], pieces["scale"], pieces["low"]


def by_hand(q, packed, scale, low):
    """One head, and numbers that are exact."""
    ends = (torch.tensor([x], dtype=torch.bfloat16) for x in (scale, low))
    words = f"q {q}, bytes {packed}, scale {scale}, low {low}"
    return words, torch.tensor([q]), torch.tensor([packed], dtype=torch.uint8), *ends


scenario("10.4", scores,
    Group("zero points of 0: the scales meet q",
          [by_hand([1.0, 2.0], [[1], [32]], [10.0, 1.0], [0.0, 0.0]),
          by_hand([1.0, -1.0, 0.5, 2.0], [[33, 244]], [1.0, 2.0, 4.0, 8.0], [0.0] * 4)],
          "which channel's scale belongs to which number of q, and what is a score divided by?"),
    Group("codes of 0: what the zero points add",
          [by_hand([1.0, 2.0], [[0], [0]], [1.0, 1.0], [0.0, 100.0]),
          by_hand([3.0, -2.0], [[0]], [5.0, 7.0], [-4.0, 10.0])],
          "q . (low + scale code): what is left if all codes are 0?"),
    Group("the example, and one block of one head",
          [by_hand([1.0, 2.0], [[1], [32]], [10.0, 1.0], [0.0, 100.0]), full_block(1, 1, 4, 3),
          full_block(1, 1, 64, 16)], "the sum of both parts, and the root of D under both"),
    Group("groups of query heads", [full_block(4, 2, 8, 4), full_block(6, 2, 4, 3),
          full_block(4, 4, 8, 2), full_block(3, 1, 16, 5)],
          "query head h belongs to KV head h // (H / K)"),
    Group("as many tokens as channels, and one of each",
          [full_block(2, 1, 8, 8), full_block(4, 2, 2, 1), full_block(2, 2, 4, 2)],
          "scale and low have one number per channel, not per token"),
    Group("a query in half precision", [full_block(4, 2, 16, 4, dtype=torch.bfloat16),
          full_block(2, 1, 64, 16, dtype=torch.float16, away=40.0)],
          "where is q converted to float32, and what comes back?"),
)  # fmt: skip


class LargestArithmetic(OperationMode):
    """Notes how many floats a sum or a product made at once, products of matrices left out."""

    KINDS = ("mul", "add", "sub", "rsub", "div", "addcmul", "addcdiv", "lerp")
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.").rstrip("_")
        if name in self.KINDS and found.dtype.is_floating_point:
            self.largest = max(self.largest, found.numel())
        return found


@check("10.4", "no key is made")
def _(mine):
    _, q, packed, scale, low = full_block(4, 2, 64, 32)
    with LargestArithmetic() as seen:
        mine.scores_by_channel(q, packed, scale, low)
    keys = 2 * packed.numel() // len(packed)  # numbers of one KV head
    witness(seen.largest >= keys)
    if seen.largest >= keys:
        raise Wrong(
            f"a sum or a product of {seen.largest:,} floats; the keys of one KV head are {keys:,}",
            "each number of each key is multiplied or added to, once per token",
            "q . (low + scale code) is a sum over channels: which parts of it need no token?",
        )


# ── 10.5 A fork that shares scales ────────────────────────────────────────────

# A program is a text: "w3*5" writes a token of numbers around 5 to slot 3, "c0>2" copies block 0
# to block 2. The memory has 4 blocks of 2 slots, and 2 KV heads unless it begins with "h3": then 3.


PLACE = "[block, head, slot, channel]"


def blocks_of_int8(mine, program, log: Log) -> None:
    words, heads = program.split(), 2
    if words[0][0] == "h":
        heads = int(words.pop(0)[1:])
    log(f"blocks of 2 slots, {heads} KV heads")
    blocks = mine.Int8Blocks(4, 2, heads, 4)
    for step, word in enumerate(words):
        if word[0] == "w":
            slot, size = word[1:].split("*")
            x = [float(size) * drawn(2 * step + i, heads, 4) for i in range(2)]
            blocks.write(int(slot), *x)
            large = "" if size == "1" else f" {size} times as large"
            text = f"a token{large} is written to slot {slot}"
        else:
            source, target = map(int, word[1:].split(">"))
            log.call(f"copy({source}, {target})", blocks.copy, source, target, see=False)
            text = ""
        k, v = (torch.stack(x) for x in zip(*map(blocks.read, range(4)), strict=True))
        log(text, {f"K that is read, {PLACE}:": k, f"V that is read, {PLACE}:": v})
    stored = [*blocks.codes.values(), *(x for one in blocks.scales.values() for x in one)]
    log("", {"the dtypes of codes and scales are": sorted(set(map(kind, stored)))})


scenario("10.5", blocks_of_int8,
    Group("the copy reads like the original",
          ["w0*1 c0>1", "w0*1 w1*9 c0>3", "w2*4 w3*1 c1>0", "w3*2 c1>2", "h3 w0*1 w1*5 c0>1"],
          "what `copy` does to codes, and what to scales"),
    Group("a write to the copy does not change the original",
          ["w0*1 w1*1 c0>1 w3*9", "w0*1 c0>2 w5*0.1", "w0*3 w1*1 c0>1 w2*7 w3*7"],
          "what do both blocks hold after the copy?"),
    Group("a write to the original does not change the copy",
          ["w0*1 w1*1 c0>1 w1*9", "w0*5 c0>3 w1*0.2 w0*0.2"],
          "what do both blocks hold after the copy?"),
    Group("several copies of one block, and copies of copies",
          ["w0*1 c0>1 c0>2 w3*9 w5*4", "w0*1 c0>1 c1>2 w3*9 w5*0.3 w1*3",
          "w0*2 c0>1 w3*5 c1>0 w1*9"], "what do all of them hold after the copies?"),
    Group("a block that was used before", ["w4*8 w5*8 w0*1 c0>2 w0*3 w5*2",
          "w2*6 c1>3 w6*2 c3>1 w3*1", "w0*1 c0>1 w2*3 w0*5 c0>1"],
          "what `target` held before is lost"),
)  # fmt: skip

SAMPLES = minikv.SamplingParams(n=3, max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
PROMPT = "class Queue:\n    def push(self, item):\n        self."


@check(
    "10.5",
    "tinypy: three samples write what each would write alone",
    look="which block do two samples share, and who writes to it first?",
)
def _(mine):
    lm = tinypy()
    found = sample_together(lm, lm.encode(PROMPT), SAMPLES, make=mine.Int8Blocks)
    witness(found)
    for index, tokens in enumerate(found):
        expected = sample_naively(lm, lm.encode(PROMPT), SAMPLES, index)
        if tokens != expected:
            raise Wrong(
                f"sample {index} of {SAMPLES.n} continues with {lm.decode(tokens)!r}, expected "
                f"{lm.decode(expected)!r}",
                "some sample does not read what was written for it",
            )


# ── tinypy on the reader's parts ──────────────────────────────────────────────


@runs_model("10.1", "10.3", "10.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    class Blocks(mine.Int8Blocks):
        """The reader's blocks, whose codes the reader's function makes."""

        def write(self, slot, k, v):
            block_id, offset = divmod(slot, self.block_size)
            for name, x in (("k", k), ("v", v)):
                codes, scale = mine.quantise_int8(x)
                self.codes[name][block_id, :, offset] = codes
                self.scales[name][block_id][:, offset] = scale

    prompt = lm.encode(PROMPT)
    found = sample_together(lm, prompt, SAMPLES, make=Blocks, attend=mine.attend_int8)
    witness(found)
    for index, tokens in enumerate(found):
        expected = sample_naively(lm, prompt, SAMPLES, index)
        if tokens != expected:
            raise AssertionError(f"sample {index}: {tokens}, the oracle: {expected}")
    return (
        f"{SAMPLES.n} samples of {SAMPLES.max_tokens} tokens as forks of one int8 cache, with "
        "those of 10.1, 10.3 and 10.5 that you have passed: the same tokens as naive attention "
        "over K and V that were stored in int8 and read back."
    )


@runs_model("10.2", "10.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    k, _ = keys_and_values(lm, lm.encode(PROMPT * 3)[:32])
    squares = k.unfold(3, 32, 32).movedim(3, 2).unflatten(2, (-1,))  # blocks of 32 × 32
    chosen = [mine.better_axis(one) for one in squares.flatten(0, 2)]
    form, found = Int4ByChannel(32), []
    for keys in k:
        q, pieces = keys[:, -1].repeat_interleave(lm.config.group_size, 0), form.encode(keys)
        found.append(mine.scores_by_channel(q, pieces["codes"], pieces["scale"], pieces["low"]))
        read = form.decode(pieces).repeat_interleave(lm.config.group_size, 0)  # (H, T, D)
        expected = (read @ q[:, :, None])[..., 0] * lm.config.head_dim**-0.5
        if not torch.allclose(found[-1], expected, rtol=1e-3, atol=1e-3):
            raise AssertionError("scores of codes are not those of the keys that are read back")
    witness(chosen, found)
    return (
        f"K of tinypy in {len(chosen)} squares of 32 tokens and 32 channels: by channel is closer "
        f"in {chosen.count(-2)}, by token in {chosen.count(-1)}; the scores of its last key with "
        f"{len(found)} blocks of codes are those of the keys that are read back."
    )
