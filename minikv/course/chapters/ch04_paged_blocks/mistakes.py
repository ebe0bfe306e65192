"""Chapter 04: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake


def answers(**other):
    """before_the_sweep with some of its five numbers exchanged."""
    names = {
        "blocks": "blocks of 16", "empty": "empty slots", "entries": "entries at 1",
        "average": "average at 16", "largest": "largest under 4 %",
    }  # fmt: skip
    right = {"blocks": 82, "empty": 12, "entries": 1300, "average": 7.5, "largest": 64}
    numbers = {names[key]: value for key, value in (right | other).items()}
    return {"before_the_sweep": f"def before_the_sweep():\n    return {numbers}\n"}


MISTAKES = {
    "04.1": (
        Mistake(
            "looks at the top of the list and leaves it there",
            edits={"BlockPool.allocate": (("self._free.pop()", "self._free[-1]"),)},
            cause="the block stays in the free list, so it is given out again",
            look="does `allocate` take the block off the list, or only look at it?",
        ),
        Mistake(
            "takes the block, returns nothing",
            edits={"BlockPool.allocate": (("    return block_id\n", ""),)},
            cause="the block is taken, and not returned",
            look="what stands after `return`?",
        ),
        Mistake(
            "never sets the count",
            edits={"BlockPool.allocate": (("    self._ref_counts[block_id] = 1\n", ""),)},
            cause="the count of a block is not set when it is handed out, so it still counts as "
            "free",
            look="who writes `_ref_counts` in `allocate`?",
        ),
        Mistake(
            "does not ask whether a block is free",
            edits={"BlockPool.allocate": (("    if not self._free:\n", "    if False:\n"),)},
            cause="nothing asks whether a block is free before one is taken",
            look="the first lines of `allocate`",
        ),
        Mistake(
            "frees a block that others hold",
            edits={"BlockPool.release": (("    if count == 1:\n", "    if True:\n"),)},
            cause="every release puts the block into the free list, though others still hold it",
            look="for which count does the block become free?",
        ),
        Mistake(
            "counts down and keeps the block",
            edits={"BlockPool.release": (("        self._free.append(block_id)", "        pass"),)},
            cause="the block is counted down to 0 and never comes back: the pool leaks",
            look="who puts it back into the free list?",
        ),
        Mistake(
            "lets go of all holders at once",
            edits={"BlockPool.release": (
                ("= count - 1", "= 0"),
                ("    if count == 1:\n", "    if True:\n"),
            )},
            cause="the first release ends the block for all its holders",
            look="by how much does `release` lower the count?",
        ),
        Mistake(
            "frees it with one holder left",
            edits={"BlockPool.release": (("    if count == 1:\n", "    if count == 2:\n"),)},
            cause="the block is freed one holder too early: it is compared after the count was "
            "lowered",
            look="is it the count before or after this release that you compare?",
        ),
        Mistake(
            "accepts a second release",
            sources={"BlockPool.release": '''
def release(self, block_id):
    if self.ref_count(block_id) > 0:
        self._ref_counts[block_id] -= 1
    if self._ref_counts[block_id] == 0:
        self._free.append(block_id)
'''},
            cause="a block that is free already goes into the free list a second time: two "
            "requests will get it",
            look="what does `release` do when the count is 0?",
        ),
        Mistake(
            "uses the id as an index",
            edits={"BlockPool.release": (
                ("self.ref_count(block_id)", "self._ref_counts[block_id]"),
            )},
            cause="the id is used as an index without a look: -1 is the last element of a Python "
            "list, somebody's block",
            look="which method of the pool knows the ids that exist?",
        ),
        Mistake(
            "changes first, looks later",
            sources={"BlockPool.release": '''
def release(self, block_id):
    count = self.ref_count(block_id)
    self._ref_counts[block_id] = count - 1
    if count <= 1:
        self._free.append(block_id)
    if count == 0:
        raise ValueError("released once too often")
'''},
            cause="something is changed before the error is raised",
            look="the order of the lines in `release`: first look, then change",
        ),
    ),
    "04.2": (
        Mistake(
            "rounds down",
            edits={"BlockTable.grow": (("-(-total // self.block_size)", "total // self.block_size"),)},
            cause="the number of blocks is rounded down, so the last tokens have no block",
            look="the division: 7 tokens in blocks of 4 need 2 blocks",
        ),
        Mistake(
            "adds one where it should round up",
            edits={"BlockTable.grow": (
                ("-(-total // self.block_size)", "total // self.block_size + 1"),
            )},
            cause="one block is added even where the tokens end exactly with a block",
            look="the rounding: 8 tokens in blocks of 4 need 2 blocks, not 3",
        ),
        Mistake(
            "rounds each growth up by itself",
            edits={"BlockTable.grow": (
                (
                    "-(-total // self.block_size) - len(self.block_ids)",
                    "-(-num_tokens // self.block_size)",
                ),
            )},
            cause="each growth is rounded up by itself: the last block's empty slots are never "
            "used",
            look="what do you divide: the tokens that are added, or all there will be?",
        ),
        Mistake(
            "forgets the blocks it has",
            edits={"BlockTable.grow": ((" - len(self.block_ids)", ""),)},
            cause="the blocks that the table has already are not counted, and taken once more",
            look="what do you subtract from the blocks that all tokens need?",
        ),
        Mistake(
            "replaces the list",
            edits={"BlockTable.grow": (("self.block_ids += [", "self.block_ids = ["),)},
            cause="the new blocks take the place of the old ones",
            look="where do new ids go in `block_ids`? The list is in logical order",
        ),
        Mistake(
            "puts new blocks in front",
            edits={"BlockTable.grow": (
                (
                    "self.block_ids += [self.pool.allocate() for _ in range(needed)]",
                    "for _ in range(needed):\n"
                    "            self.block_ids.insert(0, self.pool.allocate())",
                ),
            )},
            cause="a new block is put before the old ones",
            look="where do new ids go in `block_ids`? The list is in logical order",
        ),
        Mistake(
            "makes up the ids",
            edits={"BlockTable.grow": (
                ("[self.pool.allocate() for _ in range(needed)]",
                 "range(len(self.block_ids), len(self.block_ids) + needed)"),
            )},
            cause="the ids are made up: 0, 1, 2, … are logical blocks, and the pool was not asked",
            look="who knows which physical blocks are free?",
        ),
        Mistake(
            "never counts the tokens",
            edits={"BlockTable.grow": (("    self.num_tokens = total", "    pass"),)},
            cause="num_tokens is never changed",
            look="the last line of `grow`",
        ),
        Mistake(
            "counts only the last growth",
            edits={"BlockTable.grow": (
                ("    self.num_tokens = total", "    self.num_tokens = num_tokens"),
            )},
            cause="num_tokens is the last growth, not the sum of all",
            look="the line that sets `self.num_tokens`: = or +=?",
        ),
        Mistake(
            "promises the rest of the block",
            edits={"BlockTable.grow": (
                (
                    "    self.num_tokens = total",
                    "    self.num_tokens = len(self.block_ids) * self.block_size",
                ),
            )},
            cause="num_tokens is what the blocks can take, not what was asked for",
            look="the class's docstring says what is promised",
        ),
        Mistake(
            "keeps what it got before the pool ran dry",
            edits={"BlockTable.grow": (
                ("if needed > self.pool.num_free:", "if False:"),
                (
                    "self.block_ids += [self.pool.allocate() for _ in range(needed)]",
                    "for _ in range(needed):\n"
                    "            self.block_ids.append(self.pool.allocate())",
                ),
            )},
            cause="the table keeps the blocks that it got before the pool ran dry",
            look="ask the pool how many are free before you take the first",
        ),
        Mistake(
            "loses what it got before the pool ran dry",
            edits={"BlockTable.grow": (("if needed > self.pool.num_free:", "if False:"),)},
            cause="blocks were taken, and then neither kept nor given back: the pool leaks",
            look="what becomes of the blocks you have when the next one cannot be had?",
        ),
        Mistake(
            "counts before it knows",
            edits={"BlockTable.grow": (
                (
                    "    needed = -(",
                    "    had, self.num_tokens = self.num_tokens, total\n    needed = -(",
                ),
            )},
            cause="num_tokens is changed before it is known that the blocks can be had",
            look="which line of `grow` should be the last?",
        ),
        Mistake(
            "says nothing",
            edits={"BlockTable.grow": (
                ("raise OutOfBlocks(needed, self.pool.num_free)",
                 "needed = self.pool.num_free"),
            )},
            cause="the table takes what there is and says nothing, so its last tokens have no "
            "block",
            look="what happens when the pool has fewer blocks than are needed?",
        ),
        Mistake(
            "never uses the last free block",
            edits={"BlockTable.grow": (
                ("if needed > self.pool.num_free:", "if needed >= self.pool.num_free:"),
            )},
            cause="the pool has as many blocks as are needed, and that is treated as too few: > "
            "or >=?",
            look="what is compared with `num_free`?",
        ),
        Mistake(
            "forgets the empty slots when it asks the pool",
            edits={"BlockTable.grow": (
                ("if needed > self", "asked = -(-num_tokens // self.block_size)\n"
                 "        if asked > self"),
                ("OutOfBlocks(needed", "OutOfBlocks(asked"),
            )},
            cause="6 to 12 tokens need 1 more block, 2 were asked for",
            look="what is compared with `num_free`?",
        ),
        Mistake(
            "shrinks",
            edits={"BlockTable.grow": (("if num_tokens < 0:", "if False:"),)},
            cause="nothing looks at the sign: the table would promise fewer tokens than are stored",
            look="the first lines of `grow`",
        ),
    ),
    "04.3": (
        Mistake(
            "ignores the table",
            edits={"slot_mapping": (("block_ids[index] *", "index *"),)},
            cause="the slots are the positions themselves: the block table is never read",
            look="which physical block does logical block 0 lie on?",
        ),
        Mistake(
            "counts from the chunk",
            edits={"slot_mapping": (("in range(start, end)", "in range(end - start)"),)},
            cause="positions are counted from the start of the chunk, not of the sequence",
            look="what is the first position of this call?",
        ),
        Mistake(
            "counts the place in the block from the chunk",
            edits={"slot_mapping": (("+ offset)", "+ (position - start) % block_size)"),)},
            cause="the block is right, but its place in the block is counted from the chunk's "
            "start",
            look="what do you divide to get the remainder?",
        ),
        Mistake(
            "takes a block for a slot",
            edits={"slot_mapping": (("block_ids[index] * block_size", "block_ids[index]"),)},
            cause="a block is taken for a slot: block b begins at slot b * block_size",
            look="how many slots lie before block 7?",
        ),
        Mistake(
            "runs on from the first block",
            edits={"slot_mapping": (("block_ids[index] * block_size + offset",
                               "block_ids[0] * block_size + position"),)},
            cause="the slots run on from the first block, as if the blocks lay side by side",
            look="where does the second logical block lie?",
        ),
        Mistake(
            "runs on from the chunk's first slot",
            sources={"slot_mapping": '''
def slot_mapping(block_ids, block_size, start, end):
    first = block_ids[start // block_size] * block_size + start % block_size
    return list(range(first, first + end - start))
'''},
            cause="the slots run on from the first one, over the end of its block",
            look="where does the next logical block lie?",
        ),
        Mistake(
            "does not stop in time",
            edits={"slot_mapping": (
                ("in range(start, end)", "in range(start, end + 1)"),
                ("block_ids[index]", "block_ids[min(index, len(block_ids) - 1)]"),
            )},
            cause="one slot too many: position `end` is not part of the range",
            look="where does your loop stop?",
        ),
        Mistake(
            "forgets the place in the block",
            edits={"slot_mapping": ((" + offset", ""),)},
            cause="every token of a block goes to the block's first slot",
            look="what is the remainder of position / block_size for?",
        ),
    ),
    "04.4": (
        Mistake(
            "forgets to rescale the output",
            edits={"blockwise_attention": (("out = out * shrink +", "out = out +"),)},
            cause="the output so far is not rescaled when the maximum moves",
            look="which sums were made relative to the old maximum? All of them need the factor",
        ),
        Mistake(
            "forgets to rescale the sum",
            edits={"blockwise_attention": (("total = total * shrink +", "total = total +"),)},
            cause="the sum of the weights so far is not rescaled when the maximum moves",
            look="which sums were made relative to the old maximum? All of them need the factor",
        ),
        Mistake(
            "rescales nothing",
            edits={"blockwise_attention": (
                ("total = total * shrink +", "total = total +"),
                ("out = out * shrink +", "out = out +"),
            )},
            cause="nothing is rescaled when the maximum moves: there are two scales",
            look="which sums were made relative to the old maximum? All of them need the factor",
        ),
        Mistake(
            "forgets the scale",
            edits={"blockwise_attention": ((" * dim**-0.5", ""),)},
            cause="the scores are not divided by sqrt(head_dim)",
            look="the formula of attention: softmax(q k / sqrt(D)) v",
        ),
        Mistake(
            "ignores the table",
            edits={"blockwise_attention": (("kv[block_id, :filled]", "kv[i, :filled]"),)},
            cause="logical block i is read from physical block i: the block table is never used",
            look="what do you index `kv` with?",
        ),
        Mistake(
            "reads the last block to its end",
            edits={"blockwise_attention": (
                ("min(block_size, context_len - i * block_size)", "block_size"),
            )},
            cause="the last block is read to its end, also where nothing was written",
            look="how many slots of the last block are filled?",
        ),
        Mistake(
            "goes through the whole table",
            edits={"blockwise_attention": (("block_ids[: -(-context_len // block_size)]", "block_ids"),)},
            cause="beyond the context the number of filled slots goes below 0, and [:-2] is not "
            "empty",
            look="how many blocks does the context need? Stop there",
        ),
        Mistake(
            "reads the whole table, and hides only the end of the last block",
            sources={"blockwise_attention": '''
def blockwise_attention(q, kv, block_ids, context_len):
    size, group = kv.shape[1], q.shape[0] // kv.shape[3]
    k, v = kv[block_ids].flatten(0, 1).repeat_interleave(group, 2).unbind(1)
    if context_len % size and len(block_ids) * size - context_len < size:
        k, v = k[:context_len], v[:context_len]
    scores = torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)
'''},
            cause="every block that the table names is read, also those beyond the context",
            look="how many blocks does the context need? Stop there",
        ),
        Mistake(
            "reads only full blocks",
            edits={"blockwise_attention": (
                ("-(-context_len // block_size)", "context_len // block_size"),
            )},
            cause="only full blocks are read, so the newest tokens are missing",
            look="how many blocks do 7 tokens in blocks of 4 have?",
        ),
        Mistake(
            "deals the KV heads out in turns",
            edits={"blockwise_attention": (
                ("q.float().view(kv_heads, group, dim)",
                 "q.float().view(group, kv_heads, dim).transpose(0, 1)"),
                ("(out / total).view(heads, dim)",
                 "(out / total).transpose(0, 1).reshape(heads, dim)"),
            )},
            cause="query heads take turns over the KV heads; those of a group should lie side by "
            "side",
            look="with 4 query heads and 2 KV heads, heads 0 and 1 share KV head 0",
        ),
        Mistake(
            "does not divide",
            edits={"blockwise_attention": (("(out / total)", "out"),)},
            cause="the weighted sum of V is never divided by the sum of the weights",
            look="the last line: what do the weights add up to?",
        ),
        Mistake(
            "averages the blocks",
            edits={"blockwise_attention": (
                ("weights = torch.exp(scores - new_top)", "weights = scores.softmax(-1)"),
                ("total = total * shrink +", "total = total +"),
                ("out = out * shrink +", "out = out +"),
            )},
            cause="every block gets a softmax of its own, and the blocks are averaged",
            look="a block with larger scores has to count for more than another",
        ),
        Mistake(
            "keeps only the last block",
            edits={"blockwise_attention": (
                ("total = total * shrink +", "total ="),
                ("out = out * shrink +", "out ="),
            )},
            cause="each block overwrites what the blocks before it gave: only the last one counts",
            look="what has to be carried from one block to the next?",
        ),
        Mistake(
            "subtracts nothing",
            edits={"blockwise_attention": (
                ("torch.maximum(top, scores.amax(-1, keepdim=True))", "torch.zeros_like(top)"),
                ("torch.full((kv_heads, group, 1), -torch.inf)", "torch.zeros(kv_heads, group, 1)"),
            )},
            cause="exp of a large number overflows: it is taken before the largest is subtracted",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        Mistake(
            "begins with a maximum of 0",
            edits={"blockwise_attention": (
                ("torch.full((kv_heads, group, 1), -torch.inf)", "torch.zeros(kv_heads, group, 1)"),
            )},
            cause="the largest score is taken to be 0 at least, so that every weight is 0, and 0 "
            "/ 0",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        Mistake(
            "takes the maximum of the new block alone",
            edits={"blockwise_attention": (
                ("torch.maximum(top, scores.amax(-1, keepdim=True))",
                 "scores.amax(-1, keepdim=True)"),
            )},
            cause="the maximum is that of the new block alone, so that e^(old - new) overflows",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        Mistake(
            "takes one maximum for all heads",
            edits={"blockwise_attention": (("scores.amax(-1, keepdim=True)", "scores.max()"),)},
            cause="one maximum serves all heads: where scores are far below it every weight is 0",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        Mistake(
            "hides unfilled slots after the maximum",
            sources={"blockwise_attention": '''
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
            cause="the largest score is sought in unfilled slots, too",
            look="what is subtracted from a score, and the largest argument that `exp` gets",
        ),
        Mistake(
            "turns the factor round",
            edits={"blockwise_attention": (("torch.exp(top - new_top)", "torch.exp(new_top - top)"),)},
            cause="inf * 0: is the factor e^(old - new)? Or 0 / 0: is any token seen at all?",
            look="the factor at the first block, when the largest score so far is -inf",
        ),
        Mistake(
            "turns the factor round, and spares the first block",
            edits={"blockwise_attention": (
                ("torch.exp(top - new_top)", "torch.exp(new_top - top) if i else total"),
            )},
            cause="the factor is upside down: e^(new - old) where e^(old - new) is meant",
            look="the factor when the maximum rises: is it below 1?",
        ),
        Mistake(
            "exchanges K and V",
            edits={"blockwise_attention": (("k, v = kv[", "v, k = kv["),)},
            cause="keys and values have changed places",
            look="`kv[b, i, 0]` is the key, `[b, i, 1]` the value",
        ),
        Mistake(
            "stops a token early",
            edits={"blockwise_attention": (
                ("    heads, dim = q.shape\n", "    heads, dim = q.shape\n    context_len -= 1\n"),
            )},
            cause="the last token is not seen",
            look="how many slots of the last block are filled?",
        ),
        Mistake(
            "gathers all blocks first",
            sources={"blockwise_attention": '''
def blockwise_attention(q, kv, block_ids, context_len):
    blocks = kv[block_ids[: -(-context_len // kv.shape[1])]]
    k, v = blocks.flatten(0, 1)[:context_len].repeat_interleave(
        q.shape[0] // kv.shape[3], 2
    ).unbind(1)
    weights = (torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)
'''},
            cause="all blocks are gathered first, and then attended to like contiguous memory",
            look="which line reads `kv`, and how much of it at once?",
        ),
    ),
    "04.5": (
        Mistake(
            "hides one too many",
            edits={"batched_attention": (("keys < context_lens[:, None]",
                                    "keys < context_lens[:, None] - 1"),)},
            cause="each sequence no longer sees its own newest token",
            look="the border: n tokens stand at positions 0 … n - 1",
        ),
        Mistake(
            "is still one too far",
            edits={"batched_attention": (("keys < context_lens[:, None]",
                                    "keys - 1 < context_lens[:, None]"),)},
            cause="each sequence still sees the slot after its newest token, one too many",
            look="the border: n tokens stand at positions 0 … n - 1",
        ),
        Mistake(
            "rounds up to a block",
            edits={"batched_attention": (
                ("keys < context_lens[:, None]",
                 "keys // kv.shape[1] <= (context_lens[:, None] - 1) // kv.shape[1]"),
            )},
            cause="a sequence sees its last block to the end, also the slots that hold no token",
            look="the border is a number of tokens, not of blocks",
        ),
        Mistake(
            "one border for all: the longest",
            edits={"batched_attention": (
                ("keys < context_lens[:, None]",
                 "(keys < context_lens.max()).expand(rows, -1)"),
            )},
            cause="all sequences see as far as the longest of the batch",
            look="each row has a border of its own",
        ),
        Mistake(
            "one border for all: the first row's",
            edits={"batched_attention": (
                ("keys < context_lens[:, None]",
                 "(keys < context_lens[0]).expand(rows, -1)"),
            )},
            cause="all sequences see as far as the first of the batch",
            look="each row has a border of its own",
        ),
        Mistake(
            "hides nothing",
            edits={"batched_attention": (
                ("keys < context_lens[:, None]",
                 "(keys >= 0).expand(rows, -1)"),
            )},
            cause="nothing is hidden any more: the padding of the tables is read",
            look="what do the zeros at the end of a shorter table name?",
        ),
        Mistake(
            "hides with 0",
            edits={"batched_attention": (("-torch.inf", "0.0"),)},
            cause="what is hidden gets a score of 0, and e^0 is a weight of 1",
            look="which score gives a weight of 0?",
        ),
        Mistake(
            "empties what is hidden",
            edits={"batched_attention": (
                ("scores = q @ k.transpose(2, 3)",
                 "k, v = (x * visible[:, None, :, None] for x in (k, v))\n"
                 "    scores = q @ k.transpose(2, 3)"),
                ("    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)\n", ""),
            )},
            cause="K and V of what is not visible are 0, but it still has a weight: e^0",
            look="-inf before the softmax",
        ),
        Mistake(
            "hides after the softmax",
            edits={"batched_attention": (
                ("    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)\n", ""),
                ("scores.softmax(-1) @ v", "(scores.softmax(-1) * visible[:, None, None]) @ v"),
            )},
            cause="what is not visible still has a weight in the softmax, and is taken out too "
            "late",
            look="-inf before the softmax",
        ),
    ),
    "04.6": (
        Mistake("rounds down", sources=answers(blocks=81), cause="the last 4 tokens have no block", look="the rounding: up or down?"),
        Mistake("does not round", sources=answers(blocks=81.25), cause="there is no quarter of a block", look="the rounding: up or down?"),
        Mistake("tells what is filled", sources=answers(empty=4), cause="4 is how many slots of the last block are filled", look="and how many are not?"),
        Mistake("one block, one entry", sources=answers(entries=82), cause="that is the table for blocks of 16", look="how many blocks of one token?"),
        Mistake("half a block", sources=answers(average=8), cause="half a block would be right if the last block could be all empty, but it is opened for a token", look="the list 15, 14, … 0: does it have 16 in it?"),
        Mistake("the worst case", sources=answers(average=15), cause="15 is the worst case", look="the average over 1, 2, … 16 filled slots"),
        Mistake("the filled ones", sources=answers(average=8.5), cause="8.5 is the average number of slots that are filled", look="how many are empty?"),
        Mistake("the worst case again", sources=answers(largest=32), cause="32 keeps even the worst case under 4 %", look="the average is asked for"),
        Mistake("one step too far", sources=answers(largest=128), cause="63.5 empty slots are more than 4 % of 1,363.5", look="empty slots / slots held"),
        Mistake(
            "leaves a number out",
            sources={"before_the_sweep": 'def before_the_sweep():\n    return {"blocks of 16": 82}\n'},
            cause="a dictionary with the 5 keys of the docstring is expected",
            look="how the key is written",
        ),
        Mistake("leaves the dots", sources=answers(largest=None), cause="a number is expected", look="what the key stands for"),
    ),
}  # fmt: skip
