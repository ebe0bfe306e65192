"""Chapter 04: mistakes that a reader may make, each as a wrong solution."""

from collections.abc import Callable
from typing import cast

from minikv.course.exercises.mistakes import Mistake


def place(path: str) -> Callable[..., Mistake]:
    """Makes the mistakes of one place: the name, then (old, new) pairs or the whole definition."""

    def mistake(name: str, *wrong: tuple[str, str] | str, cause: str, look: str) -> Mistake:
        if isinstance(wrong[0], str):
            return Mistake(name, cause, look, sources={path: wrong[0]})
        return Mistake(name, cause, look, edits={path: cast(tuple[tuple[str, str], ...], wrong)})

    return mistake


allocate, release = place("BlockPool.allocate"), place("BlockPool.release")
grow, slots = place("BlockTable.grow"), place("slot_mapping")
blockwise, batched = place("blockwise_attention"), place("batched_attention")

SWEEP = {  # key: the right number, and (a wrong one, its name, the cause, where to look) …
    "blocks of 16": (82, (
        (81, "rounds down", "the last 4 tokens have no block", "the rounding: up or down?"),
        (81.25, "does not round", "there is no quarter of a block", "the rounding: up or down?"),
        (20800, "multiplies", "1,300 blocks of 16 are too many", "do you divide or multiply?"),
    )),
    "empty slots": (12, (
        (4, "counts the filled slots", "4 is how many slots of the last block are filled",
         "and how many are not?"),
        (0, "none", "1,300 is not a multiple of 16", "how full is the last block?"),
    )),
    "entries at 1": (1300, (
        (82, "the table at 16", "that is the number of entries for blocks of 16",
         "how many blocks of one token?"),
        (1, "one block", "every block has an entry", "how many blocks of one token?"),
    )),
    "average at 16": (7.5, (
        (8, "half a block", "half a block would be right if the last block could be empty, but it "
         "is opened for a token", "the list 15, 14, … 0: does it have 16 in it?"),
        (15, "the worst case", "15 is the worst case", "the average over 1, 2, … 16 filled slots"),
        (8.5, "the filled ones", "8.5 is the average number of slots that are filled",
         "how many are empty?"),
        (7, "a whole number", "an average need not be a whole number",
         "the sum over 1, 2, … 16, divided"),
    )),
    "largest under 4 %": (64, (
        (32, "the worst case again", "32 keeps even the worst case under 4 %",
         "the average is asked for"),
        (128, "one step too far", "63.5 empty slots are more than 4 % of 1,363.5",
         "empty slots / slots held"),
        (104, "no power of two", "104 is close to the border, but not a power of two",
         "the powers of two below it"),
        (52, "4 % of the tokens", "52 is 4 % of the tokens, and not a block size",
         "blocks with fewer empty slots on average"),
        (None, "leaves the dots", "a number is expected", "the meaning of the key"),
    )),
}  # fmt: skip
RIGHT = {key: right for key, (right, _) in SWEEP.items()}


def sweep(name: str, numbers: dict, cause: str, look: str) -> Mistake:
    text = f"def before_the_sweep():\n    return {numbers}\n"
    return Mistake(name, cause, look, sources={"before_the_sweep": text})


MISTAKES = {
    "04.1": (
        allocate(
            "looks at the top of the list and leaves it there",
            ("self._free.pop()", "self._free[-1]"),
            cause="the block stays in the free list, so it is given out again",
            look="does `allocate` remove the block from the list, or only read it?",
        ),
        allocate(
            "takes the block, returns nothing", ("    return block_id\n", ""),
            cause="the block is taken, and not returned", look="what comes after `return`?",
        ),
        allocate(
            "never sets the count", ("    self._ref_counts[block_id] = 1\n", ""),
            cause="the count of a block is not set when it is handed out, so it still counts as "
            "free",
            look="which line of `allocate` writes `_ref_counts`?",
        ),
        allocate(
            "swaps the two numbers", ("OutOfBlocks(1, 0)", "OutOfBlocks(0, 1)"),
            cause="the two numbers of OutOfBlocks are swapped",
            look="its signature: OutOfBlocks(needed, free)",
        ),
        allocate(
            "checks nothing first", ("    if not self._free:\n", "    if False:\n"),
            cause="nothing checks whether a block is free before one is taken",
            look="the first lines of `allocate`",
        ),
        release(
            "frees a block that others hold", ("    if count == 1:\n", "    if True:\n"),
            cause="every release puts the block into the free list, though others still hold it",
            look="for which count does the block become free?",
        ),
        release(
            "counts down and keeps the block",
            ("        self._free.append(block_id)", "        pass"),
            cause="the block is counted down to 0 and never comes back: the pool leaks",
            look="which line puts it back into the free list?",
        ),
        release(
            "frees the block and never lowers its count",
            ("    self._ref_counts[block_id] = count - 1\n", ""), ("if count == 1:", "if True:"),
            cause="the block goes back to the free list, and its count is never lowered",
            look="which line of `release` writes `_ref_counts`?",
        ),
        release(
            "removes all holders at once",
            ("= count - 1", "= 0"),
            ("    if count == 1:\n", "    if True:\n"),
            cause="the first release frees the block for all its holders",
            look="by how much does `release` lower the count?",
        ),
        release(
            "frees it with one holder left", ("    if count == 1:\n", "    if count == 2:\n"),
            cause="the block is freed one holder too early",
            look="do you compare the count before this release, or after it?",
        ),
        release(
            "accepts a second release",
            '''
def release(self, block_id):
    if self.ref_count(block_id) > 0:
        self._ref_counts[block_id] -= 1
    if self._ref_counts[block_id] == 0:
        self._free.append(block_id)
''',
            cause="a block that is already free goes into the free list a second time: two "
            "requests will get it",
            look="what does `release` do when the count is 0?",
        ),
        release(
            "ignores a second release", ("raise ValueError(f", "return print(f"),
            cause="the release of a free block is ignored, so the caller's mistake stays hidden",
            look="the case in which the count is 0: it must be refused",
        ),
        release(
            "counts below 0", ("if count == 0:", "if False:"),
            cause="nothing checks whether the block has a holder: its count goes below 0",
            look="what does `release` do when the count is 0?",
        ),
        release(
            "uses the id as an index", ("self.ref_count(block_id)", "self._ref_counts[block_id]"),
            cause="the id is used as an index without a check: -1 is the last element of a Python "
            "list",
            look="which method of the pool knows the ids that exist?",
        ),
        release(
            "changes first, checks later",
            '''
def release(self, block_id):
    count = self.ref_count(block_id)
    self._ref_counts[block_id] = count - 1
    if count <= 1:
        self._free.append(block_id)
    if count == 0:
        raise ValueError("released once too often")
''',
            cause="something is changed before the error is raised",
            look="the order of the lines in `release`: first check, then change",
        ),
    ),
    "04.2": (
        grow(
            "rounds down", ("-(-total // self.block_size)", "total // self.block_size"),
            cause="the number of blocks is rounded down, so the last tokens have no block",
            look="the division: 7 tokens in blocks of 4 need 2 blocks",
        ),
        grow(
            "adds one where it should round up",
            ("-(-total // self.block_size)", "total // self.block_size + 1"),
            cause="a block is added even if the tokens end exactly with a block",
            look="the rounding: 8 tokens in blocks of 4 need 2 blocks, not 3",
        ),
        grow(
            "rounds up each growth separately",
            ("-(-total // self.block_size) - len(self.block_ids)",
             "-(-num_tokens // self.block_size)"),
            cause="each growth is rounded up separately: the last block's empty slots are never "
            "used",
            look="what do you divide: the tokens that are added, or all tokens?",
        ),
        grow(
            "opens one block only",
            ("-(-total // self.block_size) - len(self.block_ids)",
             "int(total > len(self.block_ids) * self.block_size)"),
            cause="at most one block is added, however many the new tokens need",
            look="a prompt of 7 tokens in blocks of 4: how many blocks does it need at once?",
        ),
        grow(
            "forgets the blocks it has", (" - len(self.block_ids)", ""),
            cause="the blocks that the table already has are taken once more",
            look="what do you subtract from the number of blocks that all tokens need?",
        ),
        grow(
            "replaces the list", ("self.block_ids += [", "self.block_ids = ["),
            cause="the new blocks replace the old ones",
            look="where do new ids go in `block_ids`? The list is in logical order",
        ),
        grow(
            "puts new blocks in front",
            ("self.block_ids += [self.pool.allocate() for _ in range(needed)]",
             "for _ in range(needed):\n            self.block_ids.insert(0, self.pool.allocate())"),
            cause="a new block is put before the old ones",
            look="where do new ids go in `block_ids`? The list is in logical order",
        ),
        grow(
            "sorts the ids",
            ("self.num_tokens = total", "self.block_ids.sort()\n    self.num_tokens = total"),
            cause="the ids are sorted: then positions are looked up in the wrong blocks",
            look="where do new ids go in `block_ids`? The list is in logical order",
        ),
        grow(
            "makes up the ids",
            ("[self.pool.allocate() for _ in range(needed)]",
             "range(len(self.block_ids), len(self.block_ids) + needed)"),
            cause="the ids are made up: 0, 1, 2, … are logical blocks, and the pool was not asked",
            look="where do you learn which physical blocks are free?",
        ),
        grow(
            "never counts the tokens", ("    self.num_tokens = total", "    pass"),
            cause="num_tokens is never changed", look="the last line of `grow`",
        ),
        grow(
            "counts only the last growth",
            ("    self.num_tokens = total", "    self.num_tokens = num_tokens"),
            cause="num_tokens is the last growth, not the sum of all",
            look="the line that sets `self.num_tokens`: = or +=?",
        ),
        grow(
            "counts the rest of the block",
            ("    self.num_tokens = total",
             "    self.num_tokens = len(self.block_ids) * self.block_size"),
            cause="num_tokens is what the blocks have room for, not what was asked for",
            look="what the class's docstring says of `num_tokens`",
        ),
        grow(
            "keeps what it got before the pool ran dry",
            ("if needed > self.pool.num_free:", "if False:"),
            ("self.block_ids += [self.pool.allocate() for _ in range(needed)]",
             "for _ in range(needed):\n            self.block_ids.append(self.pool.allocate())"),
            cause="the table keeps the blocks that it got before the pool ran dry",
            look="how many blocks are free, before you take the first?",
        ),
        grow(
            "loses what it got before the pool ran dry",
            ("if needed > self.pool.num_free:", "if False:"),
            cause="blocks were taken, and then neither kept nor given back: the pool leaks",
            look="what happens to the blocks you have taken when `allocate` raises?",
        ),
        grow(
            "gives back all it has",
            ("raise OutOfBlocks(needed, self.pool.num_free)",
             "self.release()\n            raise OutOfBlocks(needed, self.pool.num_free)"),
            cause="the table gives back all its blocks, also those it held before",
            look="give back only what this growth has taken, or check before you take",
        ),
        grow(
            "counts before it checks",
            ("    needed = -(",
             "    had, self.num_tokens = self.num_tokens, total\n    needed = -("),
            cause="num_tokens is changed before the blocks are there",
            look="which line of `grow` should be the last?",
        ),
        grow(
            "says nothing",
            ("raise OutOfBlocks(needed, self.pool.num_free)", "needed = self.pool.num_free"),
            cause="the table takes the blocks there are and raises no error, so its last tokens "
            "have no block",
            look="what happens when the pool has fewer blocks than are needed?",
        ),
        grow(
            "never uses the last free block",
            ("if needed > self.pool.num_free:", "if needed >= self.pool.num_free:"),
            cause="exactly as many free blocks as needed are treated as too few",
            look="what is compared with `num_free`, by > or by >=?",
        ),
        grow(
            "forgets the empty slots when it asks the pool",
            ("if needed > self",
             "asked = -(-num_tokens // self.block_size)\n        if asked > self"),
            ("OutOfBlocks(needed", "OutOfBlocks(asked"),
            cause="the number of blocks needed ignores the empty slots of the last block",
            look="what is compared with `num_free`?",
        ),
        grow(
            "asks for the blocks that it has, too",
            ("if needed > self", "asked = needed + len(self.block_ids)\n        if asked > self"),
            cause="the number of blocks needed includes those that the table already has",
            look="what is compared with `num_free`?",
        ),
        grow(
            "shrinks", ('require_int("num_tokens", num_tokens, 0)', "pass"),
            cause="a negative number is accepted: the table would have fewer tokens than are "
            "stored",
            look="the first lines of `grow`",
        ),
    ),
    "04.3": (
        slots(
            "ignores the table", ("block_ids[index] *", "index *"),
            cause="the slots are the positions themselves: the block table is never read",
            look="which physical block is logical block 0?",
        ),
        slots(
            "counts from the chunk", ("in range(start, end)", "in range(end - start)"),
            cause="positions are counted from the start of the chunk, not of the sequence",
            look="what is the first position of this call?",
        ),
        slots(
            "counts the place in the block from the chunk",
            ("+ offset)", "+ (position - start) % block_size)"),
            cause="the block is right, but its place in the block is counted from the chunk's "
            "start",
            look="the remainder of which number do you take?",
        ),
        slots(
            "uses a block id as a slot", ("block_ids[index] * block_size", "block_ids[index]"),
            cause="a block id is used as a slot: block b begins at slot b * block_size",
            look="how many slots lie before block 7?",
        ),
        slots(
            "runs on from the first block",
            ("block_ids[index] * block_size + offset", "block_ids[0] * block_size + position"),
            cause="the slots continue after the first block, as if the blocks lay side by side",
            look="where does the second logical block lie?",
        ),
        slots(
            "runs on from the chunk's first slot",
            '''
def slot_mapping(block_ids, block_size, start, end):
    first = block_ids[start // block_size] * block_size + start % block_size
    return list(range(first, first + end - start))
''',
            cause="the slots continue after the first one, past the end of its block",
            look="where does the next logical block lie?",
        ),
        slots(
            "does not stop in time",
            ("in range(start, end)", "in range(start, end + 1)"),
            ("block_ids[index]", "block_ids[min(index, len(block_ids) - 1)]"),
            cause="one slot too many: position `end` is not part of the range",
            look="where does your loop stop?",
        ),
        slots(
            "forgets the place in the block", (" + offset", ""),
            cause="every token of a block goes to the block's first slot",
            look="what is the remainder of position / block_size for?",
        ),
    ),
    "04.4": (
        blockwise(
            "forgets to rescale the output", ("out = out * shrink +", "out = out +"),
            cause="the output so far is not rescaled when the maximum moves",
            look="which sums are relative to the old maximum? All of them need the factor",
        ),
        blockwise(
            "forgets to rescale the sum", ("total = total * shrink +", "total = total +"),
            cause="the sum of the weights so far is not rescaled when the maximum moves",
            look="which sums are relative to the old maximum? All of them need the factor",
        ),
        blockwise(
            "rescales nothing",
            ("total = total * shrink +", "total = total +"),
            ("out = out * shrink +", "out = out +"),
            cause="neither sum is rescaled when the maximum moves",
            look="which sums are relative to the old maximum? All of them need the factor",
        ),
        blockwise(
            "forgets the scale", (" * dim**-0.5", ""),
            cause="the scores are not divided by sqrt(head_dim)",
            look="the formula of attention: softmax(q k / sqrt(D)) v",
        ),
        blockwise(
            "ignores the table", ("kv[block_id, :filled]", "kv[i, :filled]"),
            cause="logical block i is read from physical block i: the block table is never used",
            look="what do you index `kv` with?",
        ),
        blockwise(
            "reads the last block to its end",
            ("min(block_size, context_len - i * block_size)", "block_size"),
            cause="the last block is read to its end, also where nothing was written",
            look="how many slots of the last block are filled?",
        ),
        blockwise(
            "reads the whole table",
            ("block_ids[: -(-context_len // block_size)]", "block_ids"),
            cause="after the context the number of filled slots is negative, and [:-2] is not "
            "empty",
            look="how many blocks does the context need? Stop there",
        ),
        blockwise(
            "reads the whole table, and hides only the end of the last block",
            '''
def blockwise_attention(q, kv, block_ids, context_len):
    size, group = kv.shape[1], q.shape[0] // kv.shape[3]
    k, v = kv[block_ids].flatten(0, 1).repeat_interleave(group, 2).unbind(1)
    if context_len % size and len(block_ids) * size - context_len < size:
        k, v = k[:context_len], v[:context_len]
    scores = torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)
''',
            cause="every block of the table is read, also those after the context",
            look="how many blocks does the context need? Stop there",
        ),
        blockwise(
            "reads only full blocks",
            ("-(-context_len // block_size)", "context_len // block_size"),
            cause="only full blocks are read, so the newest tokens are missing",
            look="how many blocks do 7 tokens in blocks of 4 have?",
        ),
        blockwise(
            "assigns the KV heads in turn",
            ("q.float().view(kv_heads, group, dim)",
             "q.float().view(group, kv_heads, dim).transpose(0, 1)"),
            ("(out / total).view(heads, dim)", "(out / total).transpose(0, 1).reshape(heads, dim)"),
            cause="the query heads of a group do not lie side by side",
            look="with 4 query heads and 2 KV heads, heads 0 and 1 share KV head 0",
        ),
        blockwise(
            "does not divide", ("(out / total)", "out"),
            cause="the weighted sum of V is never divided by the sum of the weights",
            look="the last line: what is the sum of the weights?",
        ),
        blockwise(
            "averages the blocks",
            ("weights = torch.exp(scores - new_top)", "weights = scores.softmax(-1)"),
            ("total = total * shrink +", "total = total +"),
            ("out = out * shrink +", "out = out +"),
            cause="every block gets a softmax of its own, and the blocks are averaged",
            look="a block with larger scores has to count for more than another",
        ),
        blockwise(
            "keeps only the last block",
            ("total = total * shrink +", "total ="),
            ("out = out * shrink +", "out ="),
            cause="each block overwrites the result of the blocks before it: only the last counts",
            look="what has to be carried from one block to the next?",
        ),
        blockwise(
            "subtracts nothing",
            ("torch.maximum(top, scores.amax(-1, keepdim=True))", "torch.zeros_like(top)"),
            ("torch.full((kv_heads, group, 1), -torch.inf)", "torch.zeros(kv_heads, group, 1)"),
            cause="exp of a large number overflows: it is taken before the largest is subtracted",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        blockwise(
            "begins with a maximum of 0",
            ("torch.full((kv_heads, group, 1), -torch.inf)", "torch.zeros(kv_heads, group, 1)"),
            cause="the largest score so far does not begin at -inf: if all scores are far below "
            "its start, every weight is 0, and 0 / 0 is NaN",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        blockwise(
            "takes the maximum of the new block alone",
            ("torch.maximum(top, scores.amax(-1, keepdim=True))", "scores.amax(-1, keepdim=True)"),
            cause="the maximum is that of the new block alone, so that e^(old - new) overflows",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        blockwise(
            "takes one maximum for all heads", ("scores.amax(-1, keepdim=True)", "scores.max()"),
            cause="one maximum serves several heads: if a head's scores are far below it, every "
            "weight is 0, and 0 / 0 is NaN",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        blockwise(
            "hides unfilled slots after the maximum",
            '''
def blockwise_attention(q, kv, block_ids, context_len):
    size, group = kv.shape[1], q.shape[0] // kv.shape[3]
    top, total, out = torch.tensor(-torch.inf), 0, 0
    for i in range(0, context_len, size):
        k, v = kv[block_ids[i // size]].repeat_interleave(group, 2).unbind(1)
        scores = torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5
        new_top = torch.maximum(top, scores.amax(1, keepdim=True))
        weights = (scores - new_top).exp() * (torch.arange(i, i + size) < context_len)
        total = total * (top - new_top).exp() + weights.sum(1, keepdim=True)
        out = out * (top - new_top).exp() + torch.einsum("ht,thd->hd", weights, v)
        top = new_top
    return out / total
''',
            cause="the largest score is taken over unfilled slots, too",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        blockwise(
            "inverts the factor", ("torch.exp(top - new_top)", "torch.exp(new_top - top)"),
            cause="the factor is e^(new - old): at the first block that is inf, and inf * 0 is NaN",
            look="the factor at the first block, where the largest score so far is -inf: is it 0?",
        ),
        blockwise(
            "inverts the factor, except at the first block",
            ("torch.exp(top - new_top)", "torch.exp(new_top - top) if i else total"),
            cause="the factor is inverted: e^(new - old) instead of e^(old - new)",
            look="the factor when the maximum rises: is it below 1?",
        ),
        blockwise(
            "swaps K and V", ("k, v = kv[", "v, k = kv["),
            cause="keys and values are swapped",
            look="`kv[b, i, 0]` is the key, `[b, i, 1]` the value",
        ),
        blockwise(
            "stops a token early",
            ("    heads, dim = q.shape\n", "    heads, dim = q.shape\n    context_len -= 1\n"),
            cause="the last token is not seen", look="how many slots of the last block are filled?",
        ),
        blockwise(
            "reads the whole last block, and hides what is not filled",
            ("kv[block_id, :filled]", "kv[block_id]"),
            ("    new_top =", "    scores[..., filled:] = -torch.inf\n        new_top ="),
            cause="unfilled slots are read, and hidden only afterwards: their weight is 0, and 0 "
            "times NaN is NaN",
            look="cut the block to its filled slots before anything is computed",
        ),
        blockwise(
            "gathers all blocks first",
            '''
def blockwise_attention(q, kv, block_ids, context_len):
    blocks = kv[block_ids[: -(-context_len // kv.shape[1])]]
    k, v = blocks.flatten(0, 1)[:context_len].repeat_interleave(
        q.shape[0] // kv.shape[3], 2
    ).unbind(1)
    weights = (torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)
''',
            cause="all blocks are gathered first, and then read like contiguous memory",
            look="which line reads `kv`, and how much of it at once?",
        ),
    ),
    "04.5": (
        batched(
            "hides one too many",
            ("keys < context_lens[:, None]", "keys < context_lens[:, None] - 1"),
            cause="each sequence no longer sees its own newest token",
            look="the border: n tokens have positions 0 … n - 1",
        ),
        batched(
            "is still one too far",
            ("keys < context_lens[:, None]", "keys - 1 < context_lens[:, None]"),
            cause="each sequence still sees the slot after its newest token, one too many",
            look="the border: n tokens have positions 0 … n - 1",
        ),
        batched(
            "rounds up to a block",
            ("keys < context_lens[:, None]",
             "keys // kv.shape[1] <= (context_lens[:, None] - 1) // kv.shape[1]"),
            cause="a sequence sees its last block to the end, also the slots that hold no token",
            look="the border is a number of tokens, not of blocks",
        ),
        batched(
            "one border for all: the longest",
            ("keys < context_lens[:, None]", "(keys < context_lens.max()).expand(rows, -1)"),
            cause="all sequences see as far as the longest of the batch",
            look="each row has a border of its own",
        ),
        batched(
            "one border for all: the first row's",
            ("keys < context_lens[:, None]", "(keys < context_lens[0]).expand(rows, -1)"),
            cause="all sequences see as far as the first of the batch",
            look="each row has a border of its own",
        ),
        batched(
            "hides nothing", ("keys < context_lens[:, None]", "(keys >= 0).expand(rows, -1)"),
            cause="nothing is hidden any more: the padding of the tables is read",
            look="what do the zeros at the end of a shorter table name?",
        ),
        batched(
            "takes block 0 for padding",
            ("    scores = scores.masked_fill",
             "    visible &= (block_tables != 0).repeat_interleave(kv.shape[1], 1)\n"
             "    scores = scores.masked_fill"),
            cause="block 0 is treated as padding, but it is a block like any other and may hold "
            "tokens",
            look="the length says what is visible, not the ids in the table",
        ),
        batched(
            "hides with 0", ("-torch.inf", "0.0"),
            cause="what is hidden gets a score of 0, and e^0 is a weight of 1",
            look="which score gives a weight of 0?",
        ),
        batched(
            "sets hidden K and V to 0",
            ("scores = q @ k.transpose(2, 3)",
             "k, v = (x * visible[:, None, :, None] for x in (k, v))\n"
             "    scores = q @ k.transpose(2, 3)"),
            ("    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)\n", ""),
            cause="K and V of hidden slots are set to 0, but these slots still have a weight, e^0",
            look="-inf before the softmax",
        ),
        batched(
            "hides after the softmax",
            ("    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)\n", ""),
            ("scores.softmax(-1) @ v", "(scores.softmax(-1) * visible[:, None, None]) @ v"),
            cause="hidden slots still count in the sum of the softmax: they are removed too late",
            look="-inf before the softmax",
        ),
    ),
    "04.6": (
        *(
            sweep(name, RIGHT | {key: wrong}, cause, look)
            for key, (_, mistakes) in SWEEP.items()
            for wrong, name, cause, look in mistakes
        ),
        sweep(
            "leaves a number out", {"blocks of 16": 82},
            cause="a dictionary with the 5 keys of the docstring is expected",
            look="the spelling of the key",
        ),
    ),
}  # fmt: skip
