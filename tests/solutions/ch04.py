"""Chapter 04: right solutions written otherwise, and wrong ones."""

from four_ways import Edit, Rewrite

DIFFERENT = {
    "04.1": {  # looks at the counts instead of the free list, and takes the lowest block
        "BlockPool.allocate": """
def allocate(self) -> int:
    for block_id, count in enumerate(self._ref_counts):
        if not count:
            self._free.remove(block_id)
            self._ref_counts[block_id] += 1
            return block_id
    raise OutOfBlocks(free=0, needed=1)
""",
        "BlockPool.release": """
def release(self, block_id: int) -> None:
    if block_id in self._free or block_id not in range(self.num_blocks):
        raise ValueError(f"nobody holds block {block_id}")
    self._ref_counts[block_id] -= 1
    if not self._ref_counts[block_id]:
        self._free.insert(0, block_id)
""",
    },
    "04.2": {  # token by token, and everything back if the pool runs dry
        "BlockTable.grow": """
def grow(self, num_tokens: int) -> None:
    if num_tokens < 0:
        raise ValueError("a table does not shrink")
    before = len(self.block_ids)
    try:
        for position in range(self.num_tokens, self.num_tokens + num_tokens):
            if position // self.block_size == len(self.block_ids):
                self.block_ids.append(self.pool.allocate())
    except OutOfBlocks:
        while len(self.block_ids) > before:
            self.pool.release(self.block_ids.pop())
        raise
    self.num_tokens += num_tokens
""",
    },
    "04.3": {  # all at once, and a tensor instead of a list
        "": "import torch as t",
        "slot_mapping": """
def slot_mapping(block_ids, block_size, start, end):
    first_slots = t.tensor(block_ids) * block_size
    every = first_slots[:, None] + t.arange(block_size)
    return every.flatten()[start:end]
""",
    },
    "04.4": {  # a softmax for each block, merged by the logarithms of their sums, head by head
        "blockwise_attention": """
def blockwise_attention(q, kv, block_ids, context_len):
    heads, size = q.shape[0], kv.shape[1]
    rows = []
    for head in range(heads):
        kv_head = head * kv.shape[3] // heads
        outs, logs = [], []
        for i in range(0, context_len, size):
            block = kv[block_ids[i // size], : context_len - i, :, kv_head]
            scores = block[:, 0] @ q[head] / q.shape[1] ** 0.5
            outs.append(scores.softmax(0) @ block[:, 1])
            logs.append(scores.logsumexp(0))
        rows.append(torch.stack(logs).softmax(0) @ torch.stack(outs))
    return torch.stack(rows)
""",
    },
    "04.5": {  # no padding at all: row by row
        "batched_attention": """
def batched_attention(q, kv, block_tables, context_lens):
    out = torch.zeros(q.shape)
    group = q.shape[1] // kv.shape[3]
    for row, length in enumerate(context_lens.tolist()):
        k, v = kv[block_tables[row]].flatten(0, 1)[:length].unbind(1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.einsum("hd,lhd->hl", q[row], k).div(q.shape[2] ** 0.5).softmax(-1)
        out[row] = torch.einsum("hl,lhd->hd", weights, v)
    return out
""",
    },
    "04.6": {
        "before_the_sweep": """
def before_the_sweep():
    return {
        "blocks of 16": 82.0, "empty slots": 12, "entries at 1": 1300, "average at 16": 7.5,
        "largest under 4 %": 64,
    }
""",
    },
}


def answers(**other):
    """before_the_sweep with some of its five numbers exchanged."""
    names = {
        "blocks": "blocks of 16", "empty": "empty slots", "entries": "entries at 1",
        "average": "average at 16", "largest": "largest under 4 %",
    }  # fmt: skip
    right = {"blocks": 82, "empty": 12, "entries": 1300, "average": 7.5, "largest": 64}
    numbers = {names[key]: value for key, value in (right | other).items()}
    return {"before_the_sweep": f"def before_the_sweep():\n    return {numbers}\n"}


WRONG = {
    "04.1": (
        Edit(
            "looks at the top of the list and leaves it there",
            {"BlockPool.allocate": (("self._free.pop()", "self._free[-1]"),)},
            says="the block stays in the free list, so it is given out again",
        ),
        Edit(
            "takes the block, returns nothing",
            {"BlockPool.allocate": (("    return block_id\n", ""),)},
            says="the block is taken, and not returned",
        ),
        Edit(
            "never sets the count",
            {"BlockPool.allocate": (("    self._ref_counts[block_id] = 1\n", ""),)},
            says="the count of a block is not set when it is handed out",
        ),
        Edit(
            "does not ask whether a block is free",
            {"BlockPool.allocate": (("    if not self._free:\n", "    if False:\n"),)},
            says="nothing asks whether a block is free before one is taken",
        ),
        Edit(
            "frees a block that others hold",
            {"BlockPool.release": (("    if count == 1:\n", "    if True:\n"),)},
            says="every release puts the block into the free list, though others still hold it",
        ),
        Edit(
            "counts down and keeps the block",
            {"BlockPool.release": (("        self._free.append(block_id)", "        pass"),)},
            says="counted down to 0 and never comes back: the pool leaks",
        ),
        Edit(
            "lets go of all holders at once",
            {"BlockPool.release": (
                ("= count - 1", "= 0"),
                ("    if count == 1:\n", "    if True:\n"),
            )},
            says="the first release ends the block for all its holders",
        ),
        Edit(
            "frees it with one holder left",
            {"BlockPool.release": (("    if count == 1:\n", "    if count == 2:\n"),)},
            says="the block is freed one holder too early",
        ),
        Rewrite(
            "accepts a second release",
            {"BlockPool.release": '''
def release(self, block_id):
    if self.ref_count(block_id) > 0:
        self._ref_counts[block_id] -= 1
    if self._ref_counts[block_id] == 0:
        self._free.append(block_id)
'''},
            says="a block that is free already goes into the free list a second time",
        ),
        Edit(
            "uses the id as an index",
            {"BlockPool.release": (
                ("self.ref_count(block_id)", "self._ref_counts[block_id]"),
            )},
            says="-1 is the last element of a Python list, somebody's block",
        ),
        Rewrite(
            "changes first, looks later",
            {"BlockPool.release": '''
def release(self, block_id):
    count = self.ref_count(block_id)
    self._ref_counts[block_id] = count - 1
    if count <= 1:
        self._free.append(block_id)
    if count == 0:
        raise ValueError("released once too often")
'''},
            says="something is changed before the error is raised",
        ),
    ),
    "04.2": (
        Edit(
            "rounds down",
            {"BlockTable.grow": (("-(-total // self.block_size)", "total // self.block_size"),)},
            says="the number of blocks is rounded down",
        ),
        Edit(
            "adds one where it should round up",
            {"BlockTable.grow": (
                ("-(-total // self.block_size)", "total // self.block_size + 1"),
            )},
            says="one block is added even where the tokens end exactly with a block",
        ),
        Edit(
            "rounds each growth up by itself",
            {"BlockTable.grow": (
                (
                    "-(-total // self.block_size) - len(self.block_ids)",
                    "-(-num_tokens // self.block_size)",
                ),
            )},
            says="each growth is rounded up by itself",
        ),
        Edit(
            "forgets the blocks it has",
            {"BlockTable.grow": ((" - len(self.block_ids)", ""),)},
            says="the blocks that the table has already are not counted",
        ),
        Edit(
            "replaces the list",
            {"BlockTable.grow": (("self.block_ids += [", "self.block_ids = ["),)},
            says="the new blocks take the place of the old ones",
        ),
        Edit(
            "puts new blocks in front",
            {"BlockTable.grow": (
                (
                    "self.block_ids += [self.pool.allocate() for _ in range(needed)]",
                    "for _ in range(needed):\n"
                    "            self.block_ids.insert(0, self.pool.allocate())",
                ),
            )},
            says="a new block is put before the old ones",
        ),
        Edit(
            "makes up the ids",
            {"BlockTable.grow": (
                ("[self.pool.allocate() for _ in range(needed)]",
                 "range(len(self.block_ids), len(self.block_ids) + needed)"),
            )},
            says="0, 1, 2, … are logical blocks, and the pool was not asked",
        ),
        Edit(
            "never counts the tokens",
            {"BlockTable.grow": (("    self.num_tokens = total", "    pass"),)},
            says="num_tokens is never changed",
        ),
        Edit(
            "counts only the last growth",
            {"BlockTable.grow": (
                ("    self.num_tokens = total", "    self.num_tokens = num_tokens"),
            )},
            says="num_tokens is the last growth, not the sum of all",
        ),
        Edit(
            "promises the rest of the block",
            {"BlockTable.grow": (
                (
                    "    self.num_tokens = total",
                    "    self.num_tokens = len(self.block_ids) * self.block_size",
                ),
            )},
            says="num_tokens is what the blocks can take, not what was asked for",
        ),
        Edit(
            "keeps what it got before the pool ran dry",
            {"BlockTable.grow": (
                ("if needed > self.pool.num_free:", "if False:"),
                (
                    "self.block_ids += [self.pool.allocate() for _ in range(needed)]",
                    "for _ in range(needed):\n"
                    "            self.block_ids.append(self.pool.allocate())",
                ),
            )},
            says="the table keeps the blocks that it got before the pool ran dry",
        ),
        Edit(
            "loses what it got before the pool ran dry",
            {"BlockTable.grow": (("if needed > self.pool.num_free:", "if False:"),)},
            says="blocks were taken, and then neither kept nor given back",
        ),
        Edit(
            "counts before it knows",
            {"BlockTable.grow": (
                (
                    "    needed = -(",
                    "    had, self.num_tokens = self.num_tokens, total\n    needed = -(",
                ),
            )},
            says="num_tokens is changed before it is known that the blocks can be had",
        ),
        Edit(
            "says nothing",
            {"BlockTable.grow": (
                ("raise OutOfBlocks(needed, self.pool.num_free)",
                 "needed = self.pool.num_free"),
            )},
            says="the table takes what there is and says nothing",
        ),
        Edit(
            "never uses the last free block",
            {"BlockTable.grow": (
                ("if needed > self.pool.num_free:", "if needed >= self.pool.num_free:"),
            )},
            says="as many blocks as are needed, and that is treated as too few",
        ),
        Edit(
            "forgets the empty slots when it asks the pool",
            {"BlockTable.grow": (
                ("if needed > self", "asked = -(-num_tokens // self.block_size)\n"
                 "        if asked > self"),
                ("OutOfBlocks(needed", "OutOfBlocks(asked"),
            )},
            says="6 to 12 tokens need 1 more block, 2 were asked for",
        ),
        Edit(
            "shrinks",
            {"BlockTable.grow": (("if num_tokens < 0:", "if False:"),)},
            says="nothing looks at the sign",
        ),
    ),
    "04.3": (
        Edit(
            "ignores the table",
            {"slot_mapping": (("block_ids[index] *", "index *"),)},
            says="the slots are the positions themselves",
        ),
        Edit(
            "counts from the chunk",
            {"slot_mapping": (("in range(start, end)", "in range(end - start)"),)},
            says="positions are counted from the start of the chunk",
        ),
        Edit(
            "counts the place in the block from the chunk",
            {"slot_mapping": (("+ offset)", "+ (position - start) % block_size)"),)},
            says="its place in the block is counted from the chunk's start",
        ),
        Edit(
            "takes a block for a slot",
            {"slot_mapping": (("block_ids[index] * block_size", "block_ids[index]"),)},
            says="a block is taken for a slot",
        ),
        Edit(
            "runs on from the first block",
            {"slot_mapping": (("block_ids[index] * block_size + offset",
                               "block_ids[0] * block_size + position"),)},
            says="the slots run on from the first block",
        ),
        Rewrite(
            "runs on from the chunk's first slot",
            {"slot_mapping": '''
def slot_mapping(block_ids, block_size, start, end):
    first = block_ids[start // block_size] * block_size + start % block_size
    return list(range(first, first + end - start))
'''},
            says="over the end of its block",
        ),
        Edit(
            "does not stop in time",
            {"slot_mapping": (
                ("in range(start, end)", "in range(start, end + 1)"),
                ("block_ids[index]", "block_ids[min(index, len(block_ids) - 1)]"),
            )},
            says="one slot too many: position `end` is not part of the range",
        ),
        Edit(
            "forgets the place in the block",
            {"slot_mapping": ((" + offset", ""),)},
            says="every token of a block goes to the block's first slot",
        ),
    ),
    "04.4": (
        Edit(
            "forgets to rescale the output",
            {"blockwise_attention": (("out = out * shrink +", "out = out +"),)},
            says="the output so far is not rescaled when the maximum moves",
        ),
        Edit(
            "forgets to rescale the sum",
            {"blockwise_attention": (("total = total * shrink +", "total = total +"),)},
            says="the sum of the weights so far is not rescaled when the maximum moves",
        ),
        Edit(
            "rescales nothing",
            {"blockwise_attention": (
                ("total = total * shrink +", "total = total +"),
                ("out = out * shrink +", "out = out +"),
            )},
            says="nothing is rescaled when the maximum moves",
        ),
        Edit(
            "forgets the scale",
            {"blockwise_attention": ((" * dim**-0.5", ""),)},
            says="the scores are not divided by sqrt(head_dim)",
        ),
        Edit(
            "ignores the table",
            {"blockwise_attention": (("kv[block_id, :filled]", "kv[i, :filled]"),)},
            says="logical block i is read from physical block i",
        ),
        Edit(
            "reads the last block to its end",
            {"blockwise_attention": (
                ("min(block_size, context_len - i * block_size)", "block_size"),
            )},
            says="the last block is read to its end",
        ),
        Edit(
            "goes through the whole table",
            {"blockwise_attention": (("block_ids[: -(-context_len // block_size)]", "block_ids"),)},
            says="beyond the context the number of filled slots goes below 0",
        ),
        Rewrite(
            "reads the whole table, and hides only the end of the last block",
            {"blockwise_attention": '''
def blockwise_attention(q, kv, block_ids, context_len):
    size, group = kv.shape[1], q.shape[0] // kv.shape[3]
    k, v = kv[block_ids].flatten(0, 1).repeat_interleave(group, 2).unbind(1)
    if context_len % size and len(block_ids) * size - context_len < size:
        k, v = k[:context_len], v[:context_len]
    scores = torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)
'''},
            says="every block that the table names is read, also those beyond the context",
        ),
        Edit(
            "reads only full blocks",
            {"blockwise_attention": (
                ("-(-context_len // block_size)", "context_len // block_size"),
            )},
            says="only full blocks are read, so the newest tokens are missing",
        ),
        Edit(
            "deals the KV heads out in turns",
            {"blockwise_attention": (
                ("q.float().view(kv_heads, group, dim)",
                 "q.float().view(group, kv_heads, dim).transpose(0, 1)"),
                ("(out / total).view(heads, dim)",
                 "(out / total).transpose(0, 1).reshape(heads, dim)"),
            )},
            says="query heads take turns over the KV heads",
        ),
        Edit(
            "does not divide",
            {"blockwise_attention": (("(out / total)", "out"),)},
            says="the weighted sum of V is never divided by the sum of the weights",
        ),
        Edit(
            "averages the blocks",
            {"blockwise_attention": (
                ("weights = torch.exp(scores - new_top)", "weights = scores.softmax(-1)"),
                ("total = total * shrink +", "total = total +"),
                ("out = out * shrink +", "out = out +"),
            )},
            says="every block gets a softmax of its own, and the blocks are averaged",
        ),
        Edit(
            "keeps only the last block",
            {"blockwise_attention": (
                ("total = total * shrink +", "total ="),
                ("out = out * shrink +", "out ="),
            )},
            says="each block overwrites what the blocks before it gave",
        ),
        Edit(
            "subtracts nothing",
            {"blockwise_attention": (
                ("torch.maximum(top, scores.amax(-1, keepdim=True))", "torch.zeros_like(top)"),
                ("torch.full((kv_heads, group, 1), -torch.inf)", "torch.zeros(kv_heads, group, 1)"),
            )},
            says="exp of a large number overflows",
        ),
        Edit(
            "begins with a maximum of 0",
            {"blockwise_attention": (
                ("torch.full((kv_heads, group, 1), -torch.inf)", "torch.zeros(kv_heads, group, 1)"),
            )},
            says="the largest score is taken to be 0 at least",
        ),
        Edit(
            "takes the maximum of the new block alone",
            {"blockwise_attention": (
                ("torch.maximum(top, scores.amax(-1, keepdim=True))",
                 "scores.amax(-1, keepdim=True)"),
            )},
            says="the maximum is that of the new block alone",
        ),
        Edit(
            "takes one maximum for all heads",
            {"blockwise_attention": (("scores.amax(-1, keepdim=True)", "scores.max()"),)},
            says="one maximum serves all heads",
        ),
        Rewrite(
            "hides unfilled slots after the maximum",
            {"blockwise_attention": '''
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
'''},
            says="the largest score is sought in unfilled slots, too",
        ),
        Edit(
            "turns the factor round",
            {"blockwise_attention": (("torch.exp(top - new_top)", "torch.exp(new_top - top)"),)},
            says="inf * 0: is the factor e^(old - new)?",
        ),
        Edit(
            "turns the factor round, and spares the first block",
            {"blockwise_attention": (
                ("torch.exp(top - new_top)", "torch.exp(new_top - top) if i else total"),
            )},
            says="the factor is upside down",
        ),
        Edit(
            "exchanges K and V",
            {"blockwise_attention": (("k, v = kv[", "v, k = kv["),)},
            says="keys and values have changed places",
        ),
        Edit(
            "stops a token early",
            {"blockwise_attention": (
                ("    heads, dim = q.shape\n", "    heads, dim = q.shape\n    context_len -= 1\n"),
            )},
            says="the last token is not seen",
        ),
        Rewrite(
            "gathers all blocks first",
            {"blockwise_attention": '''
def blockwise_attention(q, kv, block_ids, context_len):
    blocks = kv[block_ids[: -(-context_len // kv.shape[1])]]
    k, v = blocks.flatten(0, 1)[:context_len].repeat_interleave(
        q.shape[0] // kv.shape[3], 2
    ).unbind(1)
    weights = (torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)
'''},
            says="all blocks are gathered first",
        ),
    ),
    "04.5": (
        Edit(
            "hides one too many",
            {"batched_attention": (("keys < context_lens[:, None]",
                                    "keys < context_lens[:, None] - 1"),)},
            says="each sequence no longer sees its own newest token",
        ),
        Edit(
            "is still one too far",
            {"batched_attention": (("keys < context_lens[:, None]",
                                    "keys - 1 < context_lens[:, None]"),)},
            says="each sequence still sees the slot after its newest token",
        ),
        Edit(
            "rounds up to a block",
            {"batched_attention": (
                ("keys < context_lens[:, None]",
                 "keys // kv.shape[1] <= (context_lens[:, None] - 1) // kv.shape[1]"),
            )},
            says="a sequence sees its last block to the end",
        ),
        Edit(
            "one border for all: the longest",
            {"batched_attention": (
                ("keys < context_lens[:, None]",
                 "(keys < context_lens.max()).expand(rows, -1)"),
            )},
            says="all sequences see as far as the longest of the batch",
        ),
        Edit(
            "one border for all: the first row's",
            {"batched_attention": (
                ("keys < context_lens[:, None]",
                 "(keys < context_lens[0]).expand(rows, -1)"),
            )},
            says="all sequences see as far as the first of the batch",
        ),
        Edit(
            "hides nothing",
            {"batched_attention": (
                ("keys < context_lens[:, None]",
                 "(keys >= 0).expand(rows, -1)"),
            )},
            says="nothing is hidden any more: the padding of the tables is read",
        ),
        Edit(
            "hides with 0",
            {"batched_attention": (("-torch.inf", "0.0"),)},
            says="what is hidden gets a score of 0",
        ),
        Edit(
            "empties what is hidden",
            {"batched_attention": (
                ("scores = q @ k.transpose(2, 3)",
                 "k, v = (x * visible[:, None, :, None] for x in (k, v))\n"
                 "    scores = q @ k.transpose(2, 3)"),
                ("    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)\n", ""),
            )},
            says="K and V of what is not visible are 0, but it still has a weight",
        ),
        Edit(
            "hides after the softmax",
            {"batched_attention": (
                ("    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)\n", ""),
                ("scores.softmax(-1) @ v", "(scores.softmax(-1) * visible[:, None, None]) @ v"),
            )},
            says="what is not visible still has a weight in the softmax",
        ),
    ),
    "04.6": (
        Rewrite("rounds down", answers(blocks=81), says="the last 4 tokens have no block"),
        Rewrite("does not round", answers(blocks=81.25), says="there is no quarter of a block"),
        Rewrite("tells what is filled", answers(empty=4), says="4 is how many slots"),
        Rewrite("one block, one entry", answers(entries=82), says="the table for blocks of 16"),
        Rewrite("half a block", answers(average=8), says="it is opened for a token"),
        Rewrite("the worst case", answers(average=15), says="15 is the worst case"),
        Rewrite("the filled ones", answers(average=8.5), says="8.5 is the average number of slots"),
        Rewrite("the worst case again", answers(largest=32), says="even the worst case under 4 %"),
        Rewrite("one step too far", answers(largest=128), says="more than 4 % of 1,363.5"),
        Rewrite(
            "leaves a number out",
            {"before_the_sweep": 'def before_the_sweep():\n    return {"blocks of 16": 82}\n'},
            says="a dictionary with the 5 keys of the docstring is expected",
        ),
        Rewrite("leaves the dots", answers(largest=None), says="a number is expected"),
    ),
}  # fmt: skip
