"""Chapter 05: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake


def counts(shared: str, copied: str = "n * each") -> dict[str, str]:
    """blocks_for_samples with one of its two lines replaced."""
    return {
        "blocks_for_samples": f"""
def blocks_for_samples(n, num_prompt, num_new, block_size):
    up = lambda tokens: -(-tokens // block_size)
    each, full = up(num_prompt + num_new), num_prompt // block_size
    shared = {shared}
    return shared, {copied}
"""
    }


RIGHT = "full + n * (each - full) if num_new else each"

MISTAKES = {
    "05.1": (
        Mistake(
            "shares the list",
            edits={"BlockTable.fork": (("self.block_ids.copy()", "self.block_ids"),)},
            cause="both tables have the same list of block ids",
            look="`=` does not copy a list",
        ),
        Mistake(
            "never tells the pool",
            sources={"BlockTable.fork": '''
def fork(self):
    twin = BlockTable(self.pool, self.block_size)
    twin.block_ids, twin.num_tokens = list(self.block_ids), self.num_tokens
    return twin
'''},
            cause="the pool is not told of the new holder: the first sample to end frees the "
            "other's blocks",
            look="which method of the pool adds a holder?",
        ),
        Mistake(
            "counts the last block only",
            edits={"BlockTable.fork": (("in self.block_ids:", "in self.block_ids[-1:]:"),)},
            cause="only the last block is counted: the full ones are freed with the first sample",
            look="a block that is never written to can still be freed",
        ),
        Mistake(
            "counts the full blocks only",
            edits={"BlockTable.fork": (("in self.block_ids:", "in self.block_ids[:-1]:"),)},
            cause="the last block is not counted, and it is the one that will be written to",
            look="which blocks does the fork name?",
        ),
        Mistake(
            "counts everything twice",
            edits={"BlockTable.fork": (
                ("self.pool.acquire(block_id)",
                 "self.pool.acquire(block_id), self.pool.acquire(block_id)"),
            )},
            cause="every block is counted twice: it will never be free again",
            look="one fork is one more holder",
        ),
        Mistake(
            "forgets the number of tokens",
            edits={"BlockTable.fork": (("    twin.num_tokens = self.num_tokens\n", ""),)},
            cause="num_tokens of the fork is never set",
            look="the fields of the new table",
        ),
        Mistake(
            "promises what the blocks can take",
            edits={"BlockTable.fork": (
                ("twin.num_tokens = self.num_tokens",
                 "twin.num_tokens = len(self.block_ids) * self.block_size"),
            )},
            cause="num_tokens is what the blocks have room for, not what was asked for",
            look="the `num_tokens` of the table that is forked",
        ),
        Mistake(
            "returns itself",
            sources={"BlockTable.fork": '''
def fork(self):
    for block_id in self.block_ids:
        self.pool.acquire(block_id)
    return self
'''},
            cause="both samples would write their tokens into one table",
            look="make a new table in `fork`",
        ),
        Mistake(
            "returns nothing",
            edits={"BlockTable.fork": (("    return twin\n", ""),)},
            cause="nothing is returned",
            look="the last line of `fork`",
        ),
        Mistake(
            "copies the pool, too",
            sources={"BlockTable.fork": '''
def fork(self):
    import copy
    return copy.deepcopy(self)
'''},
            cause="the pool was copied, too: its counts no longer say how many hold a block",
            look="give the pool itself to the new table",
        ),
        Mistake(
            "takes new blocks",
            sources={"BlockTable.fork": '''
def fork(self):
    twin = BlockTable(self.pool, self.block_size)
    twin.grow(self.num_tokens)
    twin.block_ids, spare = list(self.block_ids), twin.block_ids
    for block_id in self.block_ids:
        self.pool.acquire(block_id)
    return twin
'''},
            cause="the fork takes blocks of its own: that is a copy, and K and V are not in them",
            look="which blocks should the fork name?",
        ),
        Mistake(
            "makes chapter 04's table",
            sources={"BlockTable.fork": '''
def fork(self):
    twin = blocks.BlockTable(self.pool, self.block_size)
    twin.share(self.block_ids)
    twin.num_tokens = self.num_tokens
    return twin
'''},
            cause="the fork is of chapter 04's class, with its methods instead of yours",
            look="use `type(self)` or `BlockTable`",
        ),
        Mistake(
            "acquires the list",
            edits={"BlockTable.fork": (
                ("    for block_id in self.block_ids:\n        self.pool.acquire(block_id)\n",
                 "    self.pool.acquire(self.block_ids)\n"),
            )},
            cause="`acquire` takes one block id, not a list of them",
            look="a loop over `self.block_ids`",
        ),
        Mistake(
            "freezes the list",
            edits={"BlockTable.fork": (("self.block_ids.copy()", "tuple(self.block_ids)"),)},
            cause="block_ids must be a list: the fork grows at its end",
            look="which call makes a second list of a list?",
        ),
        Mistake(
            "shares full blocks only",
            edits={"BlockTable.fork": (
                ("in self.block_ids:", "in self.block_ids[: self.num_tokens // self.block_size]:"),
                ("self.block_ids.copy()", "self.block_ids[: self.num_tokens // self.block_size]"),
            )},
            cause="only full blocks are shared: the last 3 tokens have none",
            look="which blocks hold tokens that both have?",
        ),
    ),
    "05.2": (
        Mistake(
            "never copies",
            edits={"BlockTable.writable_slot": (
                ("if self.pool.ref_count(block_id) == 1:", "if True:"),
            )},
            cause="the block is written in place, though others hold it: their tokens are "
            "overwritten",
            look="the pool's count of this block",
        ),
        Mistake(
            "always copies",
            edits={"BlockTable.writable_slot": (
                ("if self.pool.ref_count(block_id) == 1:", "if False:"),
            )},
            cause="a block with a single holder is copied, though no other table reads it",
            look="for which count may you write in place?",
        ),
        Mistake(
            "copies, and keeps the old count",
            edits={"BlockTable.writable_slot": (("    self.pool.release(block_id)\n", ""),)},
            cause="the old block was never released, so B will copy, too, and the block leaks "
            "when both finish",
            look="what happens to the old block after you take the new one?",
        ),
        Mistake(
            "releases before it has a new block",
            edits={"BlockTable.writable_slot": (
                ("    new_block = self.pool.allocate()\n",
                 "    self.pool.release(block_id)\n    new_block = self.pool.allocate()\n"),
                ("= new_block\n    self.pool.release(block_id)\n", "= new_block\n"),
            )},
            cause="the old block is released before the new one is there: the table names a block "
            "that it does not hold",
            look="`allocate` can fail, so it comes first",
        ),
        Mistake(
            "copies the first block",
            edits={"BlockTable.writable_slot": (
                ("block_id = self.block_ids[index]", "index = 0; block_id = self.block_ids[0]"),
            )},
            cause="the slot is in the first block, whatever the position",
            look="position / block_size says which block",
        ),
        Mistake(
            "copies the last block, wherever it writes",
            edits={"BlockTable.writable_slot": (
                ("block_id = self.block_ids[index]", "block_id = self.block_ids[-1]"),
                ("self.block_ids[index] = new_block", "self.block_ids[-1] = new_block"),
            )},
            cause="the slot is in the last block, whatever the position",
            look="position / block_size says which block",
        ),
        Mistake(
            "looks at the last block alone",
            edits={"BlockTable.writable_slot": (
                ("if self.pool.ref_count(block_id) == 1:",
                 "if index < len(self.block_ids) - 1 or self.pool.ref_count(block_id) == 1:"),
            )},
            cause="only the last block's count is looked at, and this block is shared as well",
            look="which block's count do you look at?",
        ),
        Mistake(
            "swallows OutOfBlocks",
            edits={"BlockTable.writable_slot": (
                ("new_block = self.pool.allocate()",
                 "try:\n        new_block = self.pool.allocate()\n"
                 "    except Exception:\n        new_block = block_id"),
            )},
            cause="the error is swallowed, and the shared block is written to",
            look="let OutOfBlocks through: the caller frees blocks and calls again",
        ),
        Mistake(
            "writes to the old block",
            edits={"BlockTable.writable_slot": (
                ("return new_block * self.block_size + offset",
                 "return block_id * self.block_size + offset"),
            )},
            cause="the slot is in the old block: a copy is made, and the shared one is written to",
            look="which block is the slot computed from?",
        ),
        Mistake(
            "does not enter the new block",
            edits={"BlockTable.writable_slot": (("    self.block_ids[index] = new_block\n", ""),)},
            cause="the copy is asked for, and the table still names the old block",
            look="the new value of `self.block_ids[index]`",
        ),
        Mistake(
            "turns the copy round",
            edits={"BlockTable.writable_slot": (
                ("(block_id, new_block)", "(new_block, block_id)"),
            )},
            cause="the pair is reversed: an empty block would be copied over the others' tokens",
            look="(from_block, to_block)",
        ),
        Mistake(
            "counts the new block twice",
            edits={"BlockTable.writable_slot": (
                ("new_block = self.pool.allocate()",
                 "new_block = self.pool.allocate()\n    self.pool.acquire(new_block)"),
            )},
            cause="the new block is counted twice: once by `allocate`, once more by you",
            look="`allocate` has already counted its holder",
        ),
        Mistake(
            "releases the old block twice",
            edits={"BlockTable.writable_slot": (
                ("    self.pool.release(block_id)\n",
                 "    self.pool.release(block_id)\n    self.pool.release(block_id)\n"),
            )},
            cause="the old block was released twice: B still reads it, and it is free",
            look="only one holder has left",
        ),
        Mistake(
            "copies for two holders, not for three",
            edits={"BlockTable.writable_slot": (("== 1:", "!= 2:"),)},
            cause="a block with three holders is written in place, though the other two read it",
            look="for which counts is a copy due?",
        ),
        Mistake(
            "returns the slot alone",
            edits={"BlockTable.writable_slot": (
                ("+ offset, None", "+ offset"), ("+ offset, (block_id, new_block)", "+ offset"),
            )},
            cause="writable_slot returns two things: a slot, and the copy or None",
            look="what comes after `return`?",
        ),
        Mistake(
            "accepts any position",
            edits={"BlockTable.writable_slot": (
                ("if not 0 <= position < self.num_tokens:", "if False:"),
            )},
            cause="nothing checks whether the table has this position: -1 is the last block of a "
            "Python list, and a slot after `num_tokens` was not asked for",
            look="0 up to, not including, `self.num_tokens`",
        ),
        Mistake(
            "accepts the position after the last",
            edits={"BlockTable.writable_slot": (("< self.num_tokens:", "<= self.num_tokens:"),)},
            cause="one position too many: the last one is num_tokens - 1",
            look="0 up to, not including, `self.num_tokens`",
        ),
        Mistake(
            "accepts what the blocks can take",
            edits={"BlockTable.writable_slot": (
                ("< self.num_tokens:", "< len(self.block_ids) * self.block_size:"),
            )},
            cause="positions up to the end of the blocks are accepted: the last one is "
            "num_tokens - 1",
            look="0 up to, not including, `self.num_tokens`",
        ),
        Mistake(
            "accepts positions from the end",
            edits={"BlockTable.writable_slot": (("if not 0 <= position <", "if not position <"),)},
            cause="a position below 0 is accepted: -1 is the last block of a Python list",
            look="0 up to, not including, `self.num_tokens`",
        ),
        Mistake(
            "says slots for blocks",
            edits={"BlockTable.writable_slot": (
                ("(block_id, new_block)",
                 "(block_id * self.block_size + offset, new_block * self.block_size + offset)"),
            )},
            cause="the copy is a pair of slots, not of block ids",
            look="(from_block, to_block)",
        ),
        Mistake(
            "takes its block out of the table first",
            sources={"BlockTable.writable_slot": '''
def writable_slot(self, position):
    if not 0 <= position < self.num_tokens:
        raise ValueError
    index, offset = divmod(position, self.block_size)
    old = self.block_ids[index]
    if self.pool.ref_count(old) == 1:
        return old * self.block_size + offset, None
    del self.block_ids[index]
    new = self.pool.allocate()
    self.block_ids.insert(index, new)
    self.pool.release(old)
    return new * self.block_size + offset, (old, new)
'''},
            cause="the table has lost its block before the new one is there",
            look="`allocate` can fail, so it comes first",
        ),
        Mistake(
            "copies the whole table",
            sources={"BlockTable.writable_slot": '''
def writable_slot(self, position):
    if not 0 <= position < self.num_tokens:
        raise ValueError
    index, offset = divmod(position, self.block_size)
    old, copy = self.block_ids[index], None
    if self.pool.ref_count(old) > 1:
        ids = [self.pool.allocate() for _ in self.block_ids]
        for one in self.block_ids:
            self.pool.release(one)
        self.block_ids[:], copy = ids, (old, ids[index])
    return self.block_ids[index] * self.block_size + offset, copy
'''},
            cause="the first block is copied instead of the one that is written to",
            look="position / block_size says which block",
        ),
    ),
    "05.3": (
        Mistake(
            "shares nothing",
            sources=counts("n * each"),
            cause="nothing is shared",
            look="which blocks are never written to again?",
        ),
        Mistake(
            "forgets the beginning",
            sources=counts("full + n * (each - full)"),
            cause="before any sample has written, the block in which the prompt ends is shared, "
            "too",
            look="what if num_new is 0?",
        ),
        Mistake(
            "never copies",
            sources=counts("each"),
            cause="all samples write into the same blocks",
            look="what happens at the first write to a shared block?",
        ),
        Mistake(
            "never copies the last block",
            sources=counts("up(num_prompt) + n * (each - up(num_prompt))"),
            cause="the block in which the prompt ends is counted once, but every sample writes to "
            "it",
            look="what happens at the first write to a shared block?",
        ),
        Mistake(
            "begins a block for the new tokens",
            sources=counts("up(num_prompt) + n * up(num_new)"),
            cause="each sample begins a new block for its new tokens, though its last one has room",
            look="how many tokens does one sample have altogether?",
        ),
        Mistake(
            "counts the original, too",
            sources=counts(
                "full + n * (each - full) + (num_prompt % block_size > 0) if num_new else each"
            ),
            cause="the original is counted in addition to the copies, but the last writer keeps it",
            look="n samples: how many copies are made?",
        ),
        Mistake(
            "forgets the full blocks",
            sources=counts("n * (each - full) if num_new else each"),
            cause="the full blocks of the prompt are left out",
            look="they are stored once for all samples",
        ),
        Mistake(
            "rounds down",
            sources=counts(RIGHT, "n * ((num_prompt + num_new) // block_size)"),
            cause="the number of blocks is rounded down, so the last tokens have none",
            look="7 tokens in blocks of 4 need 2 blocks",
        ),
        Mistake(
            "always one block more",
            sources={"blocks_for_samples": """
def blocks_for_samples(n, num_prompt, num_new, block_size):
    each, full = (num_prompt + num_new) // block_size + 1, num_prompt // block_size
    return full + n * (each - full) if num_new else each, n * each
"""},
            cause="one block too many where the tokens end with a block",
            look="8 tokens in blocks of 4 need 2 blocks",
        ),
        Mistake(
            "shares the first token after a full prompt",
            sources=counts(
                "full + (num_prompt % block_size == 0) + n * (each - full - "
                "(num_prompt % block_size == 0)) if num_new else each"
            ),
            cause="a prompt that ends with a block: the next block is counted once, but each "
            "sample opens one",
            look="the first token after a full block opens a new one: whose?",
        ),
        Mistake(
            "rounds up twice",
            sources=counts(RIGHT, "n * (up(num_prompt) + up(num_new))"),
            cause="prompt and new tokens are rounded up separately: the empty slots of the "
            "prompt's last block are not used",
            look="how many tokens does one sample have altogether?",
        ),
        Mistake(
            "copies for one",
            sources=counts(RIGHT, "each"),
            cause="`copied` counts one sample only",
            look="how many samples are there?",
        ),
        Mistake(
            "swaps the two",
            sources=counts("n * each", RIGHT),
            cause="the two numbers are swapped",
            look="(shared, copied)",
        ),
        Mistake(
            "returns one number",
            sources={
                "blocks_for_samples": "def blocks_for_samples(n, p, m, b):\n    return n * p // b\n"
            },
            cause="two numbers are expected",
            look="return shared, copied: a pair",
        ),
    ),
    "05.4": (
        Mistake(
            "releases the parents first",
            sources={"next_beams": '''
def next_beams(beams, chosen):
    for parent in beams:
        parent.table.release()
    children = []
    for index, (parent, token_id) in enumerate(chosen):
        child = beams[parent].fork(index)
        child.token_ids.append(token_id)
        children.append(child)
    return children
'''},
            cause="the parent's table was released before the fork, so nothing was left in it",
            look="when is the last child of a parent forked, and when is the parent released?",
        ),
        Mistake(
            "releases a parent with its first child",
            edits={"next_beams": (
                ("        children.append(child)\n",
                 "        children.append(child)\n        beams[row].table.release()\n"),
            )},
            cause="the parent's table was released before the fork, so nothing was left in it",
            look="when is the last child of a parent forked, and when is the parent released?",
        ),
        Mistake(
            "never releases",
            edits={"next_beams": (("        parent.table.release()\n", "        pass\n"),)},
            cause="no parent is released: its blocks are never free again",
            look="every child is a fork, and every parent is released once",
        ),
        Mistake(
            "releases only parents with children",
            edits={"next_beams": (
                ("    for parent in beams:\n",
                 "    for parent in [beams[i] for i in {i for i, _ in chosen}]:\n"),
            )},
            cause="a beam without children is never released: it is pruned, and its blocks leak",
            look="which of `beams` are released?",
        ),
        Mistake(
            "releases only parents without children",
            edits={"next_beams": (
                ("    for parent in beams:\n",
                 "    for parent in [b for i, b in enumerate(beams) if i not in dict(chosen)]:\n"),
            )},
            cause="a parent with children is not released: its blocks are never free again",
            look="each child's fork is counted separately; what releases the parent's share?",
        ),
        Mistake(
            "shares the table",
            sources={"next_beams": '''
def next_beams(beams, chosen):
    children = []
    for index, (parent, token_id) in enumerate(chosen):
        old = beams[parent]
        child = Sequence(old.request, index, [*old.token_ids, token_id])
        child.num_computed, child.table = old.num_computed, old.table
        children.append(child)
    return children
'''},
            cause="the children share their parent's table instead of forking it: what one of them "
            "writes, all of them see",
            look="which method of a sequence gives a second one over the same blocks?",
        ),
        Mistake(
            "gives released blocks to the children",
            sources={"next_beams": '''
def next_beams(beams, chosen):
    saved = [list(beam.table.block_ids) for beam in beams]
    for beam in beams:
        beam.table.release()
    children = []
    for index, (parent, token_id) in enumerate(chosen):
        child = beams[parent].fork(index)
        child.token_ids.append(token_id)
        child.table.block_ids = list(saved[parent])
        child.table.num_tokens = beams[parent].num_computed
        children.append(child)
    return children
'''},
            cause="a child is given blocks that have been released: the pool may give them to "
            "another table",
            look="what holds a block between the parent's release and the child's write?",
        ),
        Mistake(
            "forgets the token",
            edits={"next_beams": (("        child.token_ids.append(token_id)\n", ""),)},
            cause="the new token is missing in the children",
            look="what is appended to a child's `token_ids`?",
        ),
        Mistake(
            "extends the parent",
            sources={"next_beams": '''
def next_beams(beams, chosen):
    children = []
    for index, (parent, token_id) in enumerate(chosen):
        beams[parent].token_ids.append(token_id)
        children.append(beams[parent].fork(index))
    for parent in beams:
        parent.table.release()
    return children
'''},
            cause="a child has its sibling's token, too: the parent was extended before the fork",
            look="whose `token_ids` gets the new token?",
        ),
        Mistake(
            "keeps the order of the parents",
            sources={"next_beams": '''
def next_beams(beams, chosen):
    children = []
    for number, parent in enumerate(beams):
        for index, token_id in chosen:
            if index == number:
                child = parent.fork(len(children))
                child.token_ids.append(token_id)
                children.append(child)
    for parent in beams:
        parent.table.release()
    return children
'''},
            cause="the new beams are in the order of their parents, not of `chosen`",
            look="the order of `chosen`",
        ),
        Mistake(
            "forks beam i for child i",
            edits={"next_beams": (
                ("beams[row].fork(index)", "beams[min(index, len(beams) - 1)].fork(index)"),
            )},
            cause="child i is a fork of beam i, not of its parent",
            look="the first number of each pair says which beam",
        ),
        Mistake(
            "counts the token as computed",
            edits={"next_beams": (
                ("        children.append(child)\n",
                 "        child.num_computed += 1\n        children.append(child)\n"),
            )},
            cause="the new token is counted as computed, but its K and V are not written yet",
            look="`num_computed` of a child is that of its parent",
        ),
        Mistake(
            "one object for two children",
            sources={"next_beams": '''
def next_beams(beams, chosen):
    forks = {parent: beams[parent].fork(parent) for parent, _ in chosen}
    for parent, token_id in chosen:
        forks[parent].token_ids.append(token_id)
    for parent in beams:
        parent.table.release()
    return [forks[parent] for parent, _ in chosen]
'''},
            cause="two children of a parent are one object: each token is written to both",
            look="one fork for each entry of `chosen`",
        ),
        Mistake(
            "returns nothing",
            edits={"next_beams": (("    return children\n", ""),)},
            cause="a list of sequences is expected, one for each entry of `chosen`",
            look="what comes after `return`?",
        ),
    ),
    "05.5": (
        Mistake(
            "opens a block for the rest, one way or another",
            sources={"copy_prefix": '''
def copy_prefix(table, num_tokens):
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError
    branch = BlockTable(table.pool, table.block_size)
    branch.share(table.block_ids[: num_tokens // table.block_size])
    branch.grow(num_tokens - branch.num_tokens)
    return branch
'''},
            cause="the last tokens of the prefix are looked for in a new block that holds no K "
            "and V",
            look="which block of the table holds the last of these tokens?",
        ),
        Mistake(
            "cuts the rest off",
            edits={"copy_prefix": (
                ("[: -(-num_tokens // table.block_size)]", "[: num_tokens // table.block_size]"),
                ("branch.num_tokens = num_tokens",
                 "branch.num_tokens = len(branch.block_ids) * table.block_size"),
            )},
            cause="the tokens after the last full block are cut off",
            look="they were computed, too, and lie in a block of the table",
        ),
        Mistake(
            "leaves the last block out",
            edits={"copy_prefix": (
                ("[: -(-num_tokens // table.block_size)]", "[: num_tokens // table.block_size]"),
            )},
            cause="the block in which the prefix ends is left out",
            look="how many blocks hold the first tokens? Rounded up or down?",
        ),
        Mistake(
            "always takes one more",
            edits={"copy_prefix": (
                ("-(-num_tokens // table.block_size)", "num_tokens // table.block_size + 1"),
            )},
            cause="one block too many if the prefix ends with a block",
            look="how many blocks do 8 tokens in blocks of 4 need?",
        ),
        Mistake(
            "takes all blocks",
            edits={"copy_prefix": (("[: -(-num_tokens // table.block_size)]", "[:]"),)},
            cause="the branch holds all blocks of the table, also those after the prefix",
            look="how many blocks hold the first tokens?",
        ),
        Mistake(
            "does not count the last block",
            edits={"copy_prefix": (
                ("in branch.block_ids:", "in branch.block_ids[: num_tokens // table.block_size]:"),
            )},
            cause="the block in which the prefix ends is in both tables and counted once",
            look="every block of the branch gains a holder, the last one, too",
        ),
        Mistake(
            "counts nothing",
            edits={"copy_prefix": (("table.pool.acquire(block_id)", "pass"),)},
            cause="the pool is never told that the blocks have another holder",
            look="every block of the branch gains a holder",
        ),
        Mistake(
            "promises the whole block",
            edits={"copy_prefix": (
                ("branch.num_tokens = num_tokens",
                 "branch.num_tokens = len(branch.block_ids) * table.block_size"),
            )},
            cause="num_tokens is what the blocks have room for: the next token would leave a gap",
            look="the last lines: the number of tokens, not of slots",
        ),
        Mistake(
            "has the table's number of tokens",
            edits={"copy_prefix": (
                ("branch.num_tokens = num_tokens", "branch.num_tokens = table.num_tokens"),
            )},
            cause="the branch has all tokens of the table, not the first few",
            look="how many tokens were asked for?",
        ),
        Mistake(
            "checks nothing",
            edits={"copy_prefix": (("if not 0 <= num_tokens <= table.num_tokens:", "if False:"),)},
            cause="nothing checks whether the table has that many tokens",
            look="the first lines of `copy_prefix`",
        ),
        Mistake(
            "forks and forgets the rest",
            sources={"copy_prefix": '''
def copy_prefix(table, num_tokens):
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError
    branch = table.fork()
    branch.block_ids = branch.block_ids[: -(-num_tokens // table.block_size)]
    branch.num_tokens = num_tokens
    return branch
'''},
            cause="the blocks after the prefix are still counted for the branch, which does not "
            "name them",
            look="blocks that were forked and are not kept have to be released",
        ),
        Mistake(
            "holds a block for no tokens",
            edits={"copy_prefix": (
                ("[: -(-num_tokens // table.block_size)]",
                 "[: max(1, -(-num_tokens // table.block_size))]"),
            )},
            cause="a branch of no tokens holds a block, but needs none",
            look="how many blocks do 0 tokens need?",
        ),
        Mistake(
            "forks the whole table",
            sources={"copy_prefix": '''
def copy_prefix(table, num_tokens):
    return table
'''},
            cause="a second table is expected",
            look="what comes after `return`?",
        ),
    ),
    "05.6": (
        Mistake(
            "keeps the first target",
            edits={"copy_blocks": (
                ("targets.setdefault(source, []).append(target)",
                 "targets.setdefault(source, [target])"),
            )},
            cause="not all targets of a source are filled",
            look="how many targets can one source have, and how many do you keep?",
        ),
        Mistake(
            "copies the wrong way round",
            edits={"copy_blocks": (
                ("    for source, target in copies:\n", "    for target, source in copies:\n"),
            )},
            cause="the copy goes the wrong way: over the block that others still read",
            look="(from_block, to_block)",
        ),
        Mistake(
            "copies the first layer",
            sources={"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[0, target] = blocks[0, source]
'''},
            cause="only the first layer is copied: all others read what was there before",
            look="the first dimension of `blocks`",
        ),
        Mistake(
            "copies keys",
            sources={"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[:, target, :, 0] = blocks[:, source, :, 0]
'''},
            cause="keys are copied and values are not",
            look="the fourth dimension of `blocks`",
        ),
        Mistake(
            "copies a slot",
            sources={"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[:, target, 0] = blocks[:, source, 0]
'''},
            cause="not all slots of a block are copied",
            look="the third dimension of `blocks`",
        ),
        Mistake(
            "copies backwards",
            edits={"copy_blocks": (("in copies:", "in reversed(copies):"),)},
            cause="the copies are not made in the order in which they were asked for: a source is "
            "overwritten before it is read",
            look="the order of `copies`",
        ),
        Mistake(
            "sorts the copies",
            sources={"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in sorted(set(copies)):
        blocks[:, target] = blocks[:, source]
'''},
            cause="the copies are made in the order of the block ids: a source is overwritten "
            "before it is read",
            look="the order of `copies`",
        ),
        Mistake(
            "has no dimension for the targets",
            edits={"copy_blocks": (
                ("        for target in wanted:\n            blocks[:, target] = blocks[:, source]",
                 "        blocks[:, wanted] = blocks[:, source]"),
            )},
            cause="`blocks[:, source]` has no dimension for the targets: `blocks[:, [source]]` "
            "keeps one",
            look="the shapes on both sides of `=`; or copy one target after the other",
        ),
        Mistake(
            "needs a copy",
            sources={"copy_blocks": '''
def copy_blocks(blocks, copies):
    sources, targets = zip(*copies)
    blocks[:, list(targets)] = blocks[:, list(sources)]
'''},
            cause="most steps ask for no copy: the list is empty",
            look="what does your code do with an empty list?",
        ),
        Mistake(
            "copies a copy",
            sources={"copy_blocks": '''
def copy_blocks(blocks, copies):
    blocks = blocks.clone()
    for source, target in copies:
        blocks[:, target] = blocks[:, source]
'''},
            cause="nothing is copied",
            look="is anything written to `blocks` itself?",
        ),
        Mistake(
            "empties the source",
            sources={"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[:, target] = blocks[:, source]
        blocks[:, source] = 0
'''},
            cause="a block that is only read was changed",
            look="which index is written to?",
        ),
    ),
}  # fmt: skip
