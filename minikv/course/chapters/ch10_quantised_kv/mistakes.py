"""Chapter 10: mistakes that readers make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake, made

# Where to look, if several mistakes are to be seen in one place.
MARKS = "how far apart are two marks, and which mark is nearest?"
STORED = "`round_up`, and which scale the codes are computed with"
OWN = "which dimension do the numbers that share a scale lie along?"
READ = "x^ = scale * code: in which dtype, and along which dimension?"
LOGIT = "each product is off by at most |q| times its error; what is a logit divided by?"
SWAP = "which dimension has to be last for `quantise_int4`, and how does it come back?"
ERRORS = "the mean of the squared errors, for each of the two"
HALF = "which bits does each of the two take?"
PAIRS = "channel i shares a byte with channel i + D / 2"
SCALES = "where are the scales of K and of V multiplied?"
RUNNING = "M = max(m, m'), and what shrinks when it grows"
EMPTY = "which slots of the last block hold tokens?"
STILL = "both blocks still share one tensor of scales: a slice, `detach` or a new list is no copy"
BOTH = "what do both blocks hold after the copy?"

SCALE = "scale = round_up(x.float().abs().amax(-1) / 127)"
CODES = "(x / step).nan_to_num(0, 0, 0).round().to(torch.int8)"
K_SCALE = "        scores = scores * k_scale[block_id, :, None, :filled].float()\n"
V_SCALE = "scaled = weights * v_scale[block_id, :, None, :filled].float()"
COPIED = "self.scales[name][target] = self.scales[name][source].clone()"
CODES_COPIED = "        self.codes[name][target] = self.codes[name][source]\n"

RIGHT = {
    "int8 bytes": 1320, "crossover": 500.0, "crossover at 8": 445 / 1.52,
    "times at 4,096": 1848.576 / 1165.336, "times at most": 5120 / 1320, "slowest reading": 5.15625,
}  # fmt: skip


def crossed(key: str, number: float, name: str, cause: str, look: str, **others) -> Mistake:
    """A wrong answer to exercise 10.6, and wrong ones that go with it."""
    answers = RIGHT | {key: number} | others
    text = f"def before_the_crossover():\n    return {answers!r}\n"
    return Mistake(name, cause, look, sources={"before_the_crossover": text})


AT_ONCE = (
    "floats of many blocks are held at once, whether codes or scores, so a step writes and reads "
    "more bytes than int8 saves"
)
BLOCK_BY_BLOCK = (
    "a loop over `block_ids` that converts one block at a time, and keeps a maximum and two sums"
)

MISTAKES = {
    "10.1": (
        *made(
            "quantise_int8",
            ("rounds the scale to the nearest", (SCALE,
             "scale = (x.float().abs().amax(-1) / 127).bfloat16()"),
             "the scale may be rounded down, and then the largest number lies beyond mark 127",
             STORED),
            ("keeps the exact scale", (SCALE, "scale = x.float().abs().amax(-1) / 127"),
             "the scale is not stored in bfloat16", STORED),
            ("measures with the exact scale", ("step = scale.float()",
             "step = (x.float().abs().amax(-1) / 127)"),
             "the codes are computed with a scale that is not the one that is stored", STORED),
            ("one scale for all", ("abs().amax(-1) / 127)",
             "abs().amax().expand(x.shape[:-1]) / 127)"),
             "all vectors share one scale: that of the largest number of all", OWN),
            ("one scale, without dimensions", (
             SCALE, "scale = round_up(x.float().abs().max() / 127)", "[..., None]", ""),
             "there is one scale in all, but each vector has a scale of its own", OWN),
            ("divides 0 by 0", ("scale.float().clamp_min(TINY)", "scale.float()",
             ".nan_to_num(0, 0, 0)", ""),
             "0 / 0 is NaN, and no integer stands for NaN",
             "what is divided by if the scale is 0?"),
            ("stores the divisor", (SCALE,
             "scale = round_up((x.float().abs().amax(-1) / 127).clamp_min(TINY))"),
             "a vector of zeros gets TINY as its scale, but the table says 0: TINY is only the "
             "divisor", "which scale is returned?"),
            ("along the wrong dimension", (SCALE,
             "scale = round_up(x.float().abs().amax(0) / 127)", ".clamp_min(TINY)[..., None]",
             ".clamp_min(TINY)"),
             "there is one scale per channel, over all vectors, and not one per vector", OWN),
            ("forgets the sign", ("x.float().abs().amax(-1)", "x.float().amax(-1)"),
             "the largest number is taken with its sign, so a larger negative one has no mark",
             MARKS),
            ("255 marks", ("/ 127)", "/ 255)"),
             "the marks are too close together: 127 of them on each side reach only half of the "
             "largest number", MARKS),
            ("128 marks", ("/ 127)", "/ 128)"),
             "the largest number would get code 128, which int8 does not have", MARKS),
            ("half the marks", ("abs().amax(-1) / 127)", "abs().amax(-1) / 63)"),
             "half of the codes are never used", MARKS),
            ("cuts off", (".nan_to_num(0, 0, 0).round()", ".nan_to_num(0, 0, 0)"),
             "numbers are truncated toward 0, not rounded to the nearest mark", MARKS),
            ("rounds down", (".nan_to_num(0, 0, 0).round()", ".nan_to_num(0, 0, 0).floor()"),
             "numbers are rounded down, not to the nearest mark", MARKS),
            ("stores floats", (".round().to(torch.int8)", ".round()"),
             "the codes are whole numbers, but they are stored as floats",
             "`.to(torch.int8)`"),
            ("asymmetric codes", ("torch.int8", "torch.uint8"),
             "uint8 has no negative codes", "the dtype of the codes"),
            ("keeps the dimension", (", scale\n", ", scale[..., None]\n"),
             "the scale has one dimension too many", "the shape of the scale in the contract"),
            ("swaps the results", ("return " + CODES + ", scale", "return scale, " + CODES),
             "codes and scale are returned in the wrong order", "the order in the contract"),
        ),
        *made(
            "dequantise_int8",
            ("stays in bfloat16", ("codes.float() * scale.float()", "codes * scale"),
             "codes and scale are multiplied in bfloat16, which keeps 8 bits of the product",
             READ),
            ("forgets the scale", (" * scale.float()[..., None]", ""),
             "codes are returned as they are, without their scale", READ),
            ("divides by the scale", ("* scale", "/ scale"),
             "codes are divided by the scale: x was divided by it, so codes are multiplied", READ),
            ("scale along the last dimension", ("scale.float()[..., None]", "scale.float()"),
             "the scales are lined up with the channels, not with the vectors", READ),
        ),
        *made(
            "logit_bound",
            ("signs cancel", ("q.abs() * k_error", "q * k_error"),
             "negative numbers in q make the bound smaller, but an error can have either sign",
             LOGIT),
            ("not divided", (" * q.shape[-1] ** -0.5", ""),
             "a logit is q . k divided by the root of D, and so is its error", LOGIT),
            ("divided by D", ("** -0.5", "** -1.0"),
             "the bound is divided by D, not by its root", LOGIT),
            ("the largest product", (".sum(-1)", ".amax(-1)"),
             "only the largest product counts, but all D of them can be off", LOGIT),
            ("the mean", (".sum(-1)", ".mean(-1)"),
             "the mean of the products' errors is taken, not their sum", LOGIT),
            ("a matrix product", ("(q.abs() * k_error).sum(-1)", "(q.abs() @ k_error)"),
             "`@` with a table of errors multiplies matrices, but each query has errors of its own",
             "multiply channel by channel, then add up the last dimension"),
            ("halved again", (".sum(-1)", ".sum(-1) / 2"),
             "the error is halved, but `k_error` is the bound already", LOGIT),
        ),
    ),
    "10.2": (
        *made(
            "int4_along",
            ("by token, always", ("x.transpose(dim, -1)", "x", ".transpose(dim, -1)\n", "\n"),
             "the numbers of a token share a scale, whatever `dim` is", SWAP),
            ("by channel, always", ("lines = x.transpose(dim, -1)", "lines = x.mT",
             ".transpose(dim, -1)\n", ".mT\n"),
             "the numbers of a channel share a scale, whatever `dim` is", SWAP),
            ("the other way round", ("lines = x.transpose(dim, -1)",
             "dim = -3 - dim\n    lines = x.transpose(dim, -1)"),
             "by token and by channel are swapped", SWAP),
            ("does not come back", ("(lines)).transpose(dim, -1)", "(lines))"),
             "the result is still transposed", SWAP),
            ("comes back reshaped", ("dequantise_int4(*quantise_int4(lines)).transpose(dim, -1)",
             "dequantise_int4(*quantise_int4(lines)).reshape(x.shape)"),
             "reshape does not undo a transpose: the numbers are in other places", SWAP),
            ("one ruler for all", (
             "dequantise_int4(*quantise_int4(lines)).transpose(dim, -1)",
             "dequantise_int4(*quantise_int4(x.flatten())).view(x.shape)"),
             "all numbers share one scale and one zero point", SWAP),
            ("forgets where the ruler begins", ("dequantise_int4(*quantise_int4(lines))",
             "(lambda c, s, low: c * s.float()[..., None])(*quantise_int4(lines))"),
             "codes are read without `low`, so every line begins at 0",
             "what does `dequantise_int4` take?"),
            ("the first two dimensions", ("lines = x.transpose(dim, -1)",
             "lines = x if dim == -1 else x.transpose(0, 1)", ".transpose(dim, -1)\n",
             "\n    # as it was\n"),
             "the first two dimensions are swapped, or nothing is swapped back", SWAP),
            ("all dimensions", ("lines = x.transpose(dim, -1)",
             "turn = lambda x: x if dim == -1 else x.permute(*range(x.dim())[::-1])\n"
             "    lines = turn(x)", "dequantise_int4(*quantise_int4(lines)).transpose(dim, -1)",
             "turn(dequantise_int4(*quantise_int4(lines)))"),
             "the dimensions in front are swapped, too: `.T` reverses all of them",
             "swap dimension `dim` and the last, and no other"),
        ),
        *made(
            "better_axis",
            ("the worse one", ("errors[-2] < errors[-1]", "errors[-2] > errors[-1]"),
             "the axis with the larger error is chosen", ERRORS),
            ("by channel if equal", ("errors[-2] < errors[-1]", "errors[-2] <= errors[-1]"),
             "if both errors are equal, by channel is chosen, but a token can be stored at once",
             "the last sentence of the contract"),
            ("errors cancel", (".square().mean()", ".mean().abs()"),
             "positive and negative errors cancel in this mean", ERRORS),
            ("not squared", (".square().mean()", ".abs().mean()"),
             "the errors are not squared: a few large ones count too little", ERRORS),
            ("the largest error", (".square().mean()", ".abs().max()"),
             "only the largest error counts, not the mean of the squares", ERRORS),
            ("the signed mean", (".square().mean()", ".mean()"),
             "the mean of the errors with their signs is compared", ERRORS),
            ("measures the result", ("(int4_along(x, dim) - x).square()",
             "int4_along(x, dim).square()"),
             "what is read back is measured, not its difference from x", ERRORS),
            ("looks at the first 16 tokens",
             ("    errors =", "    x = x[..., :16, :]\n    errors ="),
             "only the first tokens decide, but a later one may be the largest",
             "the mean of the squared errors, over all of x"),
            ("always by channel", "def better_axis(x):\n    return -2\n",
             "by channel is always chosen, whatever x holds", ERRORS),
            ("counts from the front", ("return -2 if", "return 0 if", "else -1", "else 1"),
             "0 and 1 are returned where -2 and -1 are asked for",
             "the first line of the contract"),
        ),
    ),
    "10.3": (
        *made(
            "pack",
            ("neighbours share a byte", ("codes.chunk(2, -1)",
             "(codes[..., ::2], codes[..., 1::2])"),
             "neighbouring channels share a byte, not channel i and i + D / 2", PAIRS),
            ("the first half on top", ("low | high << 4", "high | low << 4"),
             "the first half of the channels is in the upper bits", HALF),
            ("no shift", ("high << 4", "high"),
             "both codes are in the same four bits", HALF),
            ("shifts by 8", ("high << 4", "high << 8"),
             "a shift by 8 moves a code out of its byte", HALF),
            ("shifts by 2", ("high << 4", "high << 2"),
             "the two codes overlap: one code needs four bits", HALF),
            ("shifts both", ("low | high << 4", "(low | high) << 4"),
             "both codes are in the upper four bits", HALF),
            ("and, not or", ("low | high << 4", "low & high << 4"),
             "`&` keeps only the bits that both have: here, none", HALF),
            ("times 16 with floats", ("low | high << 4", "low + high * 16.0"),
             "the packed codes are floats, but bytes are whole numbers", "the dtype of the result"),
            ("splits another dimension", ("chunk(2, -1)", "chunk(2, 0)"),
             "the first dimension is split, not the channels", PAIRS),
            ("whole numbers of 64 bits", ("low | high << 4", "low.long() | high.long() << 4"),
             "the packed codes are not uint8, so nothing is saved", "the dtype of the result"),
        ),
        *made(
            "unpack",
            ("interleaved", ("torch.cat([packed & 15, packed >> 4], -1)",
             "torch.stack([packed & 15, packed >> 4], -1).flatten(-2)"),
             "the codes of a byte become neighbours, not channel i and i + D / 2", PAIRS),
            ("upper halves first", ("[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]"),
             "the upper bits come first", HALF),
            ("no mask", ("packed & 15", "packed"),
             "the lower code still has the upper code in its upper bits", HALF),
            ("masks one bit too few", ("packed & 15", "packed & 7"),
             "only three bits of the lower code are kept: 15 is 1111", HALF),
            ("masks too much", ("packed & 15", "packed & 16"),
             "`& 16` keeps a single bit, and not one of the lower four", HALF),
            ("does not move down", ("packed >> 4", "packed & 240"),
             "the upper code is not shifted down, so it is sixteen times too large", HALF),
            ("divides with floats", ("packed >> 4", "packed / 16"),
             "`/` gives floats, with the lower code behind the point; codes are whole numbers: "
             "`>> 4` or `// 16`", HALF),
            ("signed", ("packed >> 4", "(packed.view(torch.int8) >> 4).view(torch.uint8)"),
             "a shift of int8 copies the sign: codes from 8 on come back wrong", HALF),
            ("joins another dimension", ("], -1)", "], 0)"),
             "the halves are joined along the first dimension", PAIRS),
        ),
    ),
    "10.4": made(
        "attend_int8",
        ("no scale for keys", (K_SCALE, ""),
         "the scores are those of codes: the keys' scales are missing", SCALES),
        ("no scale for values", (V_SCALE, "scaled = weights"),
         "codes of values are added up without their scales", SCALES),
        ("the keys' scales for values", ("* v_scale[", "* k_scale["),
         "values are read with the scales of keys", SCALES),
        ("scales in the sum of weights", (
         "        weights = torch.exp(scores - new_top)\n",
         "        weights = torch.exp(scores - new_top)\n"
         "        weights = weights * v_scale[block_id, :, None, :filled].float()\n",
         "        " + V_SCALE + "\n", "        scaled = weights\n"),
         "the values' scales are in the sum of the weights, but they are not part of the softmax",
         SCALES),
        ("the scale after the softmax", (K_SCALE, "", "weights = torch.exp(scores - new_top)",
         "weights = torch.exp(scores - new_top) * k_scale[block_id, :, None, :filled].float()"),
         "the keys' scales are multiplied after the exponential, not before", SCALES),
        ("one scale for a block", ("k_scale[block_id, :, None, :filled]",
         "k_scale[block_id, :, None, :1]"),
         "all keys of a block get the scale of its first token", SCALES),
        ("one scale for both heads", ("k_scale[block_id, :, None, :filled]",
         "k_scale[block_id, :1, None, :filled]"),
         "all KV heads get the scales of the first", SCALES),
        ("the largest of the block", (K_SCALE, K_SCALE.replace(":filled].float()",
         ":filled].float().amax(-1, keepdim=True)")),
         "all keys of a block get its largest scale", SCALES),
        ("reads empty slots", ("filled = min(block_size, context_len - i * block_size)",
         "filled = block_size"),
         "slots that hold no token are read", EMPTY),
        ("reads blocks after the context", ("block_ids[: -(-context_len // block_size)]",
         "block_ids", "filled = min(block_size, context_len - i * block_size)",
         "filled = min(block_size, max(1, context_len - i * block_size))"),
         "blocks after the last token are read, too", "how many blocks hold tokens?"),
        ("forgets the last block", ("-(-context_len // block_size)", "context_len // block_size"),
         "a last block that is not full is left out", EMPTY),
        ("a full last block is empty", (
         "filled = min(block_size, context_len - i * block_size)",
         "last = (i + 1) * block_size >= context_len\n"
         "        filled = context_len % block_size if last else block_size"),
         "a last block that is full is read as empty: `context_len % block_size` is 0 then", EMPTY),
        ("a full last block is masked", (
         "filled = min(block_size, context_len - i * block_size)",
         "last = (i + 1) * block_size >= context_len\n"
         "        keep = context_len % block_size if last else block_size\n"
         "        filled = block_size",
         K_SCALE, K_SCALE + "        scores[..., keep:] = -torch.inf\n"),
         "a last block that is full is read as empty: `context_len % block_size` is 0 then", EMPTY),
        ("masks the scores alone", (
         "filled = min(block_size, context_len - i * block_size)",
         "keep = context_len - i * block_size\n        filled = block_size",
         K_SCALE, K_SCALE + "        scores[..., max(0, keep):] = -torch.inf\n"),
         "the weight 0 of a slot without a token is multiplied by what is stored there, and 0 "
         "times NaN is NaN", EMPTY),
        ("takes blocks in order of memory", (
         "enumerate(block_ids[: -(-context_len // block_size)])",
         "enumerate(sorted(block_ids[: -(-context_len // block_size)]))"),
         "blocks are read in the order of their ids, so the wrong one counts as the last",
         "in which order do the tokens come?"),
        ("numbers of blocks for their ids", (
         "in enumerate(block_ids[: -(-context_len // block_size)])",
         "in enumerate(range(-(-context_len // block_size)))"),
         "logical blocks are taken for physical ones: `block_ids` is not used",
         "which block of the memory is logical block i?"),
        ("the sum does not shrink", ("total = total * shrink", "total = total"),
         "the sum is not corrected when the maximum grows", RUNNING),
        ("the output does not shrink", ("out = out * shrink", "out = out"),
         "the output is not corrected when the maximum grows", RUNNING),
        ("the maximum never moves", ("        top = new_top\n", ""),
         "the new maximum is never stored: the next block starts again from -inf", RUNNING),
        ("no root of D", (" * dim**-0.5", ""),
         "the scores are not divided by the root of the head dim", "D^-0.5"),
        ("groups the wrong way", ("q = q.float().view(kv_heads, -1, dim) * dim**-0.5",
         "q = q.float().view(-1, kv_heads, dim).transpose(0, 1) * dim**-0.5"),
         "query heads are dealt to the KV heads in turn, not in groups",
         "query head h belongs to KV head h // (H / K)"),
        ("does not divide", ("(out / total)", "out"),
         "the output is never divided by the sum of the weights", RUNNING),
        ("everything in float at once", """
def attend_int8(q, k_codes, k_scale, v_codes, v_scale, block_ids, context_len):
    k, v = ((codes[block_ids].float() * scale[block_ids].float()[..., None])
            .transpose(1, 2).flatten(0, 1)[:context_len]
            for codes, scale in ((k_codes, k_scale), (v_codes, v_scale)))
    group = q.shape[0] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,lhd->hl", q.float(), k) * q.shape[1] ** -0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
""", AT_ONCE, BLOCK_BY_BLOCK),
        ("keeps all scores", """
def attend_int8(q, k_codes, k_scale, v_codes, v_scale, block_ids, context_len):
    heads, dim = q.shape
    _, kv_heads, size, _ = k_codes.shape
    q = q.float().view(kv_heads, -1, dim) * dim**-0.5
    scores, out = [], torch.zeros_like(q)
    filled = [min(size, context_len - i) for i in range(0, context_len, size)]
    for block, end in zip(block_ids, filled):
        found = q @ k_codes[block, :, :end].float().mT
        scores.append(found * k_scale[block, :, None, :end].float())
    weights = torch.cat(scores, -1).softmax(-1).split(filled, -1)
    for block, end, some in zip(block_ids, filled, weights):
        some = some * v_scale[block, :, None, :end].float()
        out += some @ v_codes[block, :, :end].float()
    return out.view(heads, dim)
""", AT_ONCE, BLOCK_BY_BLOCK),
    ),
    "10.5": made(
        "Int8Blocks.copy",
        ("a view is no copy", (COPIED,
         "self.scales[name][target] = self.scales[name][source][:]"),
         STILL, BOTH),
        ("detached, and still the same", (COPIED,
         "self.scales[name][target] = self.scales[name][source].detach()"),
         STILL, BOTH),
        ("K alone", (COPIED,
         "scale = self.scales[name][source]\n"
         '        self.scales[name][target] = scale.clone() if name == "k" else scale'),
         "K has scales of its own now, V still shares them", "the loop over K and V"),
        ("V alone", (COPIED,
         "scale = self.scales[name][source]\n"
         '        self.scales[name][target] = scale.clone() if name == "v" else scale'),
         "V has scales of its own now, K still shares them", "the loop over K and V"),
        ("new scales", (COPIED,
         "self.scales[name][target] = torch.zeros_like(self.scales[name][source])"),
         "the copy has scales of its own, but with zeros in them",
         "the copy reads like the original"),
        ("no scales", ("        " + COPIED + "\n", ""),
         "the scales are not copied at all: codes are read with what was there before",
         "the copy reads like the original"),
        ("all scales are one", (COPIED,
         "self.scales[name][target] = self.scales[name][source].amax().expand_as("
         "self.scales[name][source]).clone()"),
         "all tokens of the copy get the largest scale, but each token has its own",
         "how many scales does a block have?"),
        ("the original gets the new tensor", (COPIED,
         "self.scales[name][target] = self.scales[name][source]\n"
         "        self.scales[name][source] = torch.zeros_like(self.scales[name][source])"),
         "the scales move to the copy, and the original loses them", BOTH),
        ("the wrong direction", (COPIED,
         "self.scales[name][source] = self.scales[name][target].clone()"),
         "scales are copied from the target to the source", "the two indices"),
        ("codes in the wrong direction", (CODES_COPIED,
         "        self.codes[name] = self.codes[name].clone()\n"
         "        self.codes[name][source] = self.codes[name][target]\n"),
         "codes are copied from the target to the source", "the two indices"),
        ("K's scales for V", (COPIED,
         'self.scales[name][target] = self.scales["k"][source].clone()'),
         "V gets a copy of K's scales", "the loop over K and V"),
        ("a copy of the list", (COPIED,
         "self.scales[name] = list(self.scales[name])\n"
         "        self.scales[name][target] = self.scales[name][source]"),
         STILL, BOTH),
        ("slots along the heads", (COPIED,
         "for slot in range(self.block_size):\n"
         "            self.scales[name][target][slot] = self.scales[name][source][slot]"),
         "only some of the KV heads get their scales: the first dimension of a block's scales is "
         "its heads, not its slots", "how many KV heads does a block have?"),
        ("as many slots as are written", (COPIED,
         "count = int((self.scales[name][source][0] != 0).sum())\n"
         "        self.scales[name][target] = self.scales[name][target].clone()\n"
         "        self.scales[name][target][:, :count] = self.scales[name][source][:, :count]"),
         "the slots that are written need not be the first ones: the scales of some are missing",
         "which slots of a block can be written?"),
        ("scales in float32", (COPIED,
         "self.scales[name][target] = torch.tensor(self.scales[name][source].tolist())"),
         "the scales of the copy are in float32, and take twice the memory",
         "which dtype does the class give its scales?"),
        ("reads and writes again", """
def copy(self, source, target):
    k, v = self.read(source)
    for offset in range(self.block_size):
        self.write(target * self.block_size + offset, k[:, offset], v[:, offset])
""",
         "what is read back is quantised again, and may get other codes",
         "codes and scales can be copied as they are"),
        ("scales behind the loop", ("        " + COPIED, "    " + COPIED),
         "the scales of K are not copied: the line stands behind the loop, and sees V alone",
         "the loop over K and V"),
        ("codes behind the loop", (CODES_COPIED, "", COPIED,
         COPIED + "\n    self.codes[name][target] = self.codes[name][source]"),
         "the codes of K are not copied: the line stands behind the loop, and sees V alone",
         "the loop over K and V"),
        ("leaves the loop", (COPIED, COPIED + "\n        return"),
         "V is not copied: the loop ends after K", "the loop over K and V"),
        ("all in the wrong direction", (
         CODES_COPIED, "        self.codes[name][source] = self.codes[name][target]\n",
         COPIED, "self.scales[name][source] = self.scales[name][target].clone()"),
         "the target is copied to the source, codes and scales", "the two indices"),
        ("the first copy again", (COPIED,
         'first = self.__dict__.setdefault("first", {})\n'
         "        scale = first.setdefault((name, source), self.scales[name][source].clone())\n"
         "        self.scales[name][target] = scale.clone()"),
         "a later copy of a block gets the scales that the first copy got",
         "what does `source` read as now?"),
        ("from slot 1 on", (COPIED,
         "for slot in range(1, self.block_size):\n"
         "            self.scales[name][target][:, slot] = self.scales[name][source][:, slot]"),
         "the scales of slot 0 are not copied", "which slots does a block have?"),
        ("all slots but the last", (COPIED,
         "for slot in range(self.block_size - 1):\n"
         "            self.scales[name][target][:, slot] = self.scales[name][source][:, slot]"),
         "the scales of the last slot are not copied", "which slots does a block have?"),
        ("copies nothing", """
def copy(self, source, target):
    pass
""", "nothing is copied", "the copy reads like the original"),
        ("block 0 is no block", ('    for name in ("k", "v"):\n',
         "    if not source or not target:\n        return\n"
         '    for name in ("k", "v"):\n'),
         "block 0 is a block like the others, but nothing is copied from it or to it",
         "which numbers can blocks have?"),
    ),
    "10.6": (
        crossed("int8 bytes", 1280, "no scales", "the scales are left out",
                "how many vectors of 64 numbers does a token have, in all layers?"),
        crossed("int8 bytes", 1290, "scales of one layer in two",
                "some scales are missing: every layer has K and V of two heads",
                "how many vectors of 64 numbers does a token have, in all layers?"),
        crossed("int8 bytes", 1300, "scales of K alone",
                "half of the scales are missing: K and V both have them",
                "how many vectors of 64 numbers does a token have, in all layers?"),
        crossed("int8 bytes", 1360, "scales in float32",
                "the scales are counted with 4 bytes each", "how many bytes does a scale take?"),
        crossed("int8 bytes", 2560, "two bytes", "two bytes per number are float16, not int8",
                "1 byte per number, and how many scales?"),
        crossed("crossover", 95 / 0.192, "a crossover without scales",
                "the scales are left out of what is saved", "bytes saved = 5,120 - int8 bytes"),
        crossed("crossover", 45 / 0.19, "forgets the sequence",
                "the 50 µs of the one sequence are missing", "45 µs, and 50 µs for each sequence"),
        crossed("crossover", 50 / 0.19, "forgets the step",
                "the 45 µs of the step are missing", "45 µs, and 50 µs for each sequence"),
        crossed("crossover", 895 / 0.19, "the weights' time is extra",
                "the time of the weights is counted as extra, but both formats read them",
                "what does int8 cost that float32 does not?"),
        crossed("crossover", 95 / 0.256, "all bytes are saved",
                "int8 is counted as if it read nothing", "bytes saved = 5,120 - int8 bytes"),
        crossed("crossover", 95 / 0.066, "the bytes of int8",
                "the extra time is divided by what int8 reads, not by what it saves",
                "bytes saved = 5,120 - int8 bytes"),
        crossed("crossover at 8", 445 / 1.536, "a crossover of 8 without scales",
                "the scales are left out of what is saved", "bytes saved = 5,120 - int8 bytes"),
        crossed("crossover at 8", 500.0, "the batch changes nothing",
                "the crossover of one sequence is given: the 45 µs are shared by 8 now",
                "which part of the extra time is per sequence?"),
        crossed("crossover at 8", 62.5, "shares everything",
                "all extra time is shared, but 50 µs of it come with each sequence",
                "which part of the extra time is per sequence?"),
        crossed("crossover at 8", 445 / 0.19, "one sequence saves",
                "the extra time of 8 sequences is divided by what one of them saves, or this is "
                "the number of tokens of all 8 together",
                "which sequences save bytes? The answer is the context of each of them"),
        crossed("times at 4,096", 5120 / 1320, "only the bytes of K and V",
                "weights and extra time are left out: they are part of a step",
                "weights, extra time, K and V: all of a step"),
        crossed("times at 4,096", 1048.576 / 365.336, "without weights",
                "the weights are left out: they are part of both steps",
                "weights, extra time, K and V: all of a step"),
        crossed("times at 4,096", 1848.576 / 1070.336, "without the extra time",
                "the extra time of int8 is left out",
                "weights, extra time, K and V: all of a step"),
        crossed("times at 4,096", 1848.576 / 1157.144, "a step without scales",
                "the scales are left out: int8 reads them, too",
                "the bytes of int8, scales included"),
        crossed("times at 4,096", 1165.336 / 1848.576, "upside down",
                "int8 is divided by float32: the quotient is upside down",
                "float32 over int8"),
        crossed("times at most", 4.0, "exactly four",
                "the scales are left out: int8 takes more than a quarter of the bytes",
                "5,120 over the bytes of int8"),
        crossed("times at most", 1848.576 / 1165.336, "it does not grow",
                "this is the quotient at 4,096 tokens; it grows with the context",
                "what is left of a step if K and V are all?"),
        crossed("slowest reading", 20.0, "as fast as memory",
                "this is the speed of memory: int8 has fewer bytes, so a lower speed is enough",
                "both take equally long per token: bytes over speed"),
        crossed("slowest reading", 20 * 5120 / 1320, "upside down, too",
                "the quotient of the bytes is upside down: fewer bytes may be read more slowly",
                "both take equally long per token: bytes over speed"),
        crossed("slowest reading", 5.0, "a quarter",
                "the scales are left out: a quarter of the speed is for a quarter of the bytes",
                "both take equally long per token: bytes over speed"),
    ),
}  # fmt: skip
