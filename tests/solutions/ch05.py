"""Chapter 05: right solutions written otherwise, and wrong ones."""

from four_ways import Edit, Rewrite

DIFFERENT = {
    "05.1": {  # as a prefix-cache hit does it
        "BlockTable.fork": """
def fork(self):
    second = BlockTable(block_size=self.block_size, pool=self.pool)
    second.share(self.block_ids)
    second.num_tokens = self.num_tokens
    return second
""",
    },
    "05.2": {  # makes the new table first, and puts it in place at the end; an array of two
        "BlockTable.writable_slot": """
def writable_slot(self, position):
    if position not in range(self.num_tokens):
        raise ValueError("no such token")
    at, copy = position // self.block_size, None
    ids = list(self.block_ids)
    if self.pool.ref_count(ids[at]) != 1:
        ids[at] = self.pool.allocate()
        copy = [self.block_ids[at], ids[at]]
        self.pool.release(self.block_ids[at])
    self.block_ids = ids
    return ids[at] * self.block_size + position - at * self.block_size, copy
""",
    },
    "05.3": {  # writes it out, block by block
        "blocks_for_samples": """
def blocks_for_samples(n, num_prompt, num_new, block_size):
    blocks = set()
    for sample in range(n):
        for position in range(num_prompt + num_new):
            first = position // block_size * block_size
            touched = num_new > 0 and first + block_size > num_prompt
            blocks.add((first, sample if touched else None))
    return [len(blocks), n * len({p // block_size for p in range(num_prompt + num_new)})]
""",
    },
    "05.4": {  # the parent itself becomes its last child, as in vLLM's first engine
        "next_beams": """
def next_beams(beams, chosen):
    children = [None] * len(chosen)
    for number, parent in enumerate(beams):
        mine = [place for place, (index, _) in enumerate(chosen) if index == number]
        for place in mine[:-1]:
            children[place] = parent.fork(place)
        if mine:
            children[mine[-1]] = parent
        else:
            parent.table.release()
    for child, (_, token_id) in zip(children, chosen, strict=True):
        child.token_ids += [token_id]
    return children
""",
    },
    "05.5": {  # forks everything and lets go of what comes after
        "copy_prefix": """
def copy_prefix(table, num_tokens):
    if num_tokens < 0 or num_tokens > table.num_tokens:
        raise ValueError("not so many tokens")
    branch = table.fork()
    while (len(branch.block_ids) - 1) * branch.block_size >= num_tokens:
        if not branch.block_ids:
            break
        branch.pool.release(branch.block_ids.pop())
    branch.num_tokens = num_tokens
    return branch
""",
    },
    "05.6": {  # pair by pair
        "copy_blocks": """
def copy_blocks(blocks, copies):
    for pair in copies:
        blocks.select(1, pair[1]).copy_(blocks.select(1, pair[0]))
""",
    },
}


def counts(shared: str, copied: str = "n * each") -> dict[str, str]:
    """blocks_for_samples with one of its two lines exchanged."""
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

WRONG = {
    "05.1": (
        Edit(
            "hands over the list",
            {"BlockTable.fork": (("self.block_ids.copy()", "self.block_ids"),)},
            says="both have one and the same list of block ids",
        ),
        Rewrite(
            "never tells the pool",
            {"BlockTable.fork": '''
def fork(self):
    twin = BlockTable(self.pool, self.block_size)
    twin.block_ids, twin.num_tokens = list(self.block_ids), self.num_tokens
    return twin
'''},
            says="the pool is never told",
        ),
        Edit(
            "counts the last block only",
            {"BlockTable.fork": (("in self.block_ids:", "in self.block_ids[-1:]:"),)},
            says="only the last block is counted",
        ),
        Edit(
            "counts the full blocks only",
            {"BlockTable.fork": (("in self.block_ids:", "in self.block_ids[:-1]:"),)},
            says="the last block is not counted",
        ),
        Edit(
            "counts everything twice",
            {"BlockTable.fork": (
                ("self.pool.acquire(block_id)",
                 "self.pool.acquire(block_id), self.pool.acquire(block_id)"),
            )},
            says="every block is counted twice",
        ),
        Edit(
            "forgets the number of tokens",
            {"BlockTable.fork": (("    twin.num_tokens = self.num_tokens\n", ""),)},
            says="num_tokens of the fork is never set",
        ),
        Edit(
            "promises what the blocks can take",
            {"BlockTable.fork": (
                ("twin.num_tokens = self.num_tokens",
                 "twin.num_tokens = len(self.block_ids) * self.block_size"),
            )},
            says="num_tokens is what the blocks can take",
        ),
        Rewrite(
            "returns itself",
            {"BlockTable.fork": '''
def fork(self):
    for block_id in self.block_ids:
        self.pool.acquire(block_id)
    return self
'''},
            says="fork() gives the same table",
        ),
        Edit(
            "returns nothing",
            {"BlockTable.fork": (("    return twin\n", ""),)},
            says="nothing is returned",
        ),
        Rewrite(
            "copies the pool, too",
            {"BlockTable.fork": '''
def fork(self):
    import copy
    return copy.deepcopy(self)
'''},
            says="the fork has a pool of its own",
        ),
        Rewrite(
            "takes new blocks",
            {"BlockTable.fork": '''
def fork(self):
    twin = BlockTable(self.pool, self.block_size)
    twin.grow(self.num_tokens)
    twin.block_ids, spare = list(self.block_ids), twin.block_ids
    for block_id in self.block_ids:
        self.pool.acquire(block_id)
    return twin
'''},
            says="the fork takes blocks of its own",
        ),
        Rewrite(
            "makes chapter 04's table",
            {"BlockTable.fork": '''
def fork(self):
    twin = blocks.BlockTable(self.pool, self.block_size)
    twin.share(self.block_ids)
    twin.num_tokens = self.num_tokens
    return twin
'''},
            says="the fork is chapter 04's class",
        ),
        Edit(
            "acquires the list",
            {"BlockTable.fork": (
                ("    for block_id in self.block_ids:\n        self.pool.acquire(block_id)\n",
                 "    self.pool.acquire(self.block_ids)\n"),
            )},
            says="`acquire` takes one block id",
        ),
        Edit(
            "freezes the list",
            {"BlockTable.fork": (("self.block_ids.copy()", "tuple(self.block_ids)"),)},
            says="block_ids must be a list",
        ),
        Edit(
            "shares full blocks only",
            {"BlockTable.fork": (
                ("in self.block_ids:", "in self.block_ids[: self.num_tokens // self.block_size]:"),
                ("self.block_ids.copy()", "self.block_ids[: self.num_tokens // self.block_size]"),
            )},
            says="only the full block is shared",
        ),
    ),
    "05.2": (
        Edit(
            "never copies",
            {"BlockTable.writable_slot": (
                ("if self.pool.ref_count(block_id) == 1:", "if True:"),
            )},
            says="no copy is asked for",
        ),
        Edit(
            "always copies",
            {"BlockTable.writable_slot": (
                ("if self.pool.ref_count(block_id) == 1:", "if False:"),
            )},
            says="a block with a single owner is copied",
        ),
        Edit(
            "copies, and keeps the old count",
            {"BlockTable.writable_slot": (("    self.pool.release(block_id)\n", ""),)},
            says="the old block was never released, so B will copy, too",
        ),
        Edit(
            "releases before it has a new block",
            {"BlockTable.writable_slot": (
                ("    new_block = self.pool.allocate()\n",
                 "    self.pool.release(block_id)\n    new_block = self.pool.allocate()\n"),
                ("= new_block\n    self.pool.release(block_id)\n", "= new_block\n"),
            )},
            says="the old block is released before the new one is there",
        ),
        Edit(
            "copies the first block",
            {"BlockTable.writable_slot": (
                ("block_id = self.block_ids[index]", "index = 0; block_id = self.block_ids[0]"),
            )},
            says="the slot is in the first block, whatever the position",
        ),
        Edit(
            "copies the last block, wherever it writes",
            {"BlockTable.writable_slot": (
                ("block_id = self.block_ids[index]", "block_id = self.block_ids[-1]"),
                ("self.block_ids[index] = new_block", "self.block_ids[-1] = new_block"),
            )},
            says="the slot is in the last block, whatever the position",
        ),
        Edit(
            "looks at the last block alone",
            {"BlockTable.writable_slot": (
                ("if self.pool.ref_count(block_id) == 1:",
                 "if index < len(self.block_ids) - 1 or self.pool.ref_count(block_id) == 1:"),
            )},
            says="only the last block is looked at",
        ),
        Edit(
            "swallows OutOfBlocks",
            {"BlockTable.writable_slot": (
                ("new_block = self.pool.allocate()",
                 "try:\n        new_block = self.pool.allocate()\n"
                 "    except Exception:\n        new_block = block_id"),
            )},
            says="the error is swallowed",
        ),
        Edit(
            "writes to the old block",
            {"BlockTable.writable_slot": (
                ("return new_block * self.block_size + offset",
                 "return block_id * self.block_size + offset"),
            )},
            says="the slot is in the old block",
        ),
        Edit(
            "does not enter the new block",
            {"BlockTable.writable_slot": (("    self.block_ids[index] = new_block\n", ""),)},
            says="the table still names the old block",
        ),
        Edit(
            "turns the copy round",
            {"BlockTable.writable_slot": (("(block_id, new_block)", "(new_block, block_id)"),)},
            says="the pair is turned round",
        ),
        Edit(
            "counts the new block twice",
            {"BlockTable.writable_slot": (
                ("new_block = self.pool.allocate()",
                 "new_block = self.pool.allocate()\n    self.pool.acquire(new_block)"),
            )},
            says="the new block is counted twice",
        ),
        Edit(
            "releases the old block twice",
            {"BlockTable.writable_slot": (
                ("    self.pool.release(block_id)\n",
                 "    self.pool.release(block_id)\n    self.pool.release(block_id)\n"),
            )},
            says="the old block was released twice",
        ),
        Edit(
            "copies for two holders, not for three",
            {"BlockTable.writable_slot": (("== 1:", "!= 2:"),)},
            says="a block with three holders is written in place",
        ),
        Edit(
            "returns the slot alone",
            {"BlockTable.writable_slot": (
                ("+ offset, None", "+ offset"), ("+ offset, (block_id, new_block)", "+ offset"),
            )},
            says="writable_slot returns two things",
        ),
        Edit(
            "accepts any position",
            {"BlockTable.writable_slot": (
                ("if not 0 <= position < self.num_tokens:", "if False:"),
            )},
            says="nobody asks whether the table has this position",
        ),
        Edit(
            "accepts the position after the last",
            {"BlockTable.writable_slot": (("< self.num_tokens:", "<= self.num_tokens:"),)},
            says="one position too many",
        ),
        Edit(
            "accepts what the blocks can take",
            {"BlockTable.writable_slot": (
                ("< self.num_tokens:", "< len(self.block_ids) * self.block_size:"),
            )},
            says="what the blocks can take is no promise",
        ),
        Edit(
            "accepts positions from the end",
            {"BlockTable.writable_slot": (("if not 0 <= position <", "if not position <"),)},
            says="a position below 0 is accepted",
        ),
        Edit(
            "says slots for blocks",
            {"BlockTable.writable_slot": (
                ("(block_id, new_block)",
                 "(block_id * self.block_size + offset, new_block * self.block_size + offset)"),
            )},
            says="these are slots",
        ),
        Rewrite(
            "takes its block out of the table first",
            {"BlockTable.writable_slot": '''
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
            says="the table has lost its block before the new one is there",
        ),
        Rewrite(
            "copies the whole table",
            {"BlockTable.writable_slot": '''
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
            says="the first block is copied instead of the one that is written to",
        ),
    ),
    "05.3": (
        Rewrite("shares nothing", counts("n * each"), says="nothing is shared"),
        Rewrite(
            "forgets the beginning",
            counts("full + n * (each - full)"),
            says="before anybody has written",
        ),
        Rewrite(
            "never copies", counts("each"), says="all samples write into the same blocks"
        ),
        Rewrite(
            "never copies the last block",
            counts("up(num_prompt) + n * (each - up(num_prompt))"),
            says="counted once, but everybody writes to it",
        ),
        Rewrite(
            "begins a block for the new tokens",
            counts("up(num_prompt) + n * up(num_new)"),
            says="though its last one has room",
        ),
        Rewrite(
            "counts the original, too",
            counts("full + n * (each - full) + (num_prompt % block_size > 0) if num_new else each"),
            says="the last writer keeps it",
        ),
        Rewrite(
            "forgets the full blocks",
            counts("n * (each - full) if num_new else each"),
            says="the full blocks of the prompt are left out",
        ),
        Rewrite(
            "rounds down",
            counts(RIGHT, "n * ((num_prompt + num_new) // block_size)"),
            says="rounded down, so the last tokens have none",
        ),
        Rewrite(
            "always one block more",
            {"blocks_for_samples": """
def blocks_for_samples(n, num_prompt, num_new, block_size):
    each, full = (num_prompt + num_new) // block_size + 1, num_prompt // block_size
    return full + n * (each - full) if num_new else each, n * each
"""},
            says="one block too many where the tokens end with a block",
        ),
        Rewrite(
            "shares the first token after a full prompt",
            counts(
                "full + (num_prompt % block_size == 0) + n * (each - full - "
                "(num_prompt % block_size == 0)) if num_new else each"
            ),
            says="a prompt that ends with a block: the next one is counted once",
        ),
        Rewrite(
            "rounds up twice",
            counts(RIGHT, "n * (up(num_prompt) + up(num_new))"),
            says="prompt and new tokens are rounded up apart",
        ),
        Rewrite("copies for one", counts(RIGHT, "each"), says="that is one sample's"),
        Rewrite(
            "exchanges the two",
            counts("n * each", RIGHT),
            says="the two numbers have changed places",
        ),
        Rewrite(
            "returns one number",
            {"blocks_for_samples": "def blocks_for_samples(n, p, m, b):\n    return n * p // b\n"},
            says="two numbers are expected",
        ),
    ),
    "05.4": (
        Rewrite(
            "releases the parents first",
            {"next_beams": '''
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
            says="its parent's table was released before the fork",
        ),
        Edit(
            "releases a parent with its first child",
            {"next_beams": (
                ("        children.append(child)\n",
                 "        children.append(child)\n        beams[parent].table.release()\n"),
            )},
            says="a new beam has an empty table",
        ),
        Edit(
            "never releases",
            {"next_beams": (("        parent.table.release()\n", "        pass\n"),)},
            says="no parent is released",
        ),
        Edit(
            "releases only who has children",
            {"next_beams": (
                ("    for parent in beams:\n",
                 "    for parent in [beams[i] for i in {i for i, _ in chosen}]:\n"),
            )},
            says="a beam without children never gives its blocks back",
        ),
        Edit(
            "releases only who has no children",
            {"next_beams": (
                ("    for parent in beams:\n",
                 "    for parent in [b for i, b in enumerate(beams) if i not in dict(chosen)]:\n"),
            )},
            says="a parent that has children is not released",
        ),
        Rewrite(
            "hands the table over",
            {"next_beams": '''
def next_beams(beams, chosen):
    children = []
    for index, (parent, token_id) in enumerate(chosen):
        old = beams[parent]
        child = Sequence(old.request, index, [*old.token_ids, token_id])
        child.num_computed, child.table = old.num_computed, old.table
        children.append(child)
    return children
'''},
            says="the table is handed over, not forked",
        ),
        Rewrite(
            "hands released blocks over",
            {"next_beams": '''
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
            says="a released block is handed over",
        ),
        Edit(
            "forgets the token",
            {"next_beams": (("        child.token_ids.append(token_id)\n", ""),)},
            says="the new token is in none of them",
        ),
        Rewrite(
            "extends the parent",
            {"next_beams": '''
def next_beams(beams, chosen):
    children = []
    for index, (parent, token_id) in enumerate(chosen):
        beams[parent].token_ids.append(token_id)
        children.append(beams[parent].fork(index))
    for parent in beams:
        parent.table.release()
    return children
'''},
            says="a child has the tokens of its sibling, too",
        ),
        Rewrite(
            "keeps the order of the parents",
            {"next_beams": '''
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
            says="the new beams are in the order of their parents",
        ),
        Edit(
            "forks beam i for child i",
            {"next_beams": (
                ("beams[parent].fork(index)", "beams[min(index, len(beams) - 1)].fork(index)"),
            )},
            says="child i is a fork of beam i",
        ),
        Edit(
            "counts the token as computed",
            {"next_beams": (
                ("        children.append(child)\n",
                 "        child.num_computed += 1\n        children.append(child)\n"),
            )},
            says="the new token is counted as computed",
        ),
        Rewrite(
            "one object for two children",
            {"next_beams": '''
def next_beams(beams, chosen):
    forks = {parent: beams[parent].fork(parent) for parent, _ in chosen}
    for parent, token_id in chosen:
        forks[parent].token_ids.append(token_id)
    for parent in beams:
        parent.table.release()
    return [forks[parent] for parent, _ in chosen]
'''},
            says="are one and the same object",
        ),
        Edit(
            "returns nothing",
            {"next_beams": (("    return children\n", ""),)},
            says="a list of sequences is expected",
        ),
    ),
    "05.5": (
        Rewrite(
            "opens a block for the rest, one way or another",
            {"copy_prefix": '''
def copy_prefix(table, num_tokens):
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError
    branch = BlockTable(table.pool, table.block_size)
    branch.share(table.block_ids[: num_tokens // table.block_size])
    branch.grow(num_tokens - branch.num_tokens)
    return branch
'''},
            says="in a block that nobody has written to",
        ),
        Edit(
            "cuts the rest off",
            {"copy_prefix": (
                ("[: -(-num_tokens // table.block_size)]", "[: num_tokens // table.block_size]"),
                ("branch.num_tokens = num_tokens",
                 "branch.num_tokens = len(branch.block_ids) * table.block_size"),
            )},
            says="the tokens after the last full block are cut off",
        ),
        Edit(
            "leaves the last block out",
            {"copy_prefix": (
                ("[: -(-num_tokens // table.block_size)]", "[: num_tokens // table.block_size]"),
            )},
            says="the block in which the prefix ends is left out",
        ),
        Edit(
            "always takes one more",
            {"copy_prefix": (
                ("-(-num_tokens // table.block_size)", "num_tokens // table.block_size + 1"),
            )},
            says="one block too many where the prefix ends with a block",
        ),
        Edit(
            "takes all blocks",
            {"copy_prefix": (("[: -(-num_tokens // table.block_size)]", "[:]"),)},
            says="the branch holds all blocks of the table",
        ),
        Edit(
            "does not count the last block",
            {"copy_prefix": (
                ("in branch.block_ids:", "in branch.block_ids[: num_tokens // table.block_size]:"),
            )},
            says="in both tables and counted once",
        ),
        Edit(
            "counts nothing",
            {"copy_prefix": (("table.pool.acquire(block_id)", "pass"),)},
            says="the pool is never told",
        ),
        Edit(
            "promises the whole block",
            {"copy_prefix": (
                ("branch.num_tokens = num_tokens",
                 "branch.num_tokens = len(branch.block_ids) * table.block_size"),
            )},
            says="num_tokens is what its blocks can take",
        ),
        Edit(
            "has the table's number of tokens",
            {"copy_prefix": (
                ("branch.num_tokens = num_tokens", "branch.num_tokens = table.num_tokens"),
            )},
            says="the branch has all tokens of the table",
        ),
        Edit(
            "asks nothing",
            {"copy_prefix": (("if not 0 <= num_tokens <= table.num_tokens:", "if False:"),)},
            says="nothing asks whether the table has so many tokens",
        ),
        Rewrite(
            "forks and forgets the rest",
            {"copy_prefix": '''
def copy_prefix(table, num_tokens):
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError
    branch = table.fork()
    branch.block_ids = branch.block_ids[: -(-num_tokens // table.block_size)]
    branch.num_tokens = num_tokens
    return branch
'''},
            says="a holder that no longer names them",
        ),
        Edit(
            "holds a block for no tokens",
            {"copy_prefix": (
                ("[: -(-num_tokens // table.block_size)]",
                 "[: max(1, -(-num_tokens // table.block_size))]"),
            )},
            says="a branch of no tokens holds a block",
        ),
        Rewrite(
            "forks the whole table",
            {"copy_prefix": '''
def copy_prefix(table, num_tokens):
    return table
'''},
            says="a second table is expected",
        ),
    ),
    "05.6": (
        Edit(
            "keeps the first target",
            {"copy_blocks": (
                ("targets.setdefault(source, []).append(target)",
                 "targets.setdefault(source, [target])"),
            )},
            says="of several targets of one source not all are filled",
        ),
        Edit(
            "copies the wrong way round",
            {"copy_blocks": (
                ("    for source, target in copies:\n", "    for target, source in copies:\n"),
            )},
            says="copied the wrong way round",
        ),
        Rewrite(
            "copies the first layer",
            {"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[0, target] = blocks[0, source]
'''},
            says="only the first layer is copied",
        ),
        Rewrite(
            "copies keys",
            {"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[:, target, :, 0] = blocks[:, source, :, 0]
'''},
            says="keys are copied and values are not",
        ),
        Rewrite(
            "copies a slot",
            {"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[:, target, 0] = blocks[:, source, 0]
'''},
            says="not all slots of a block are copied",
        ),
        Edit(
            "copies backwards",
            {"copy_blocks": (("in copies:", "in reversed(copies):"),)},
            says="in another order than they were asked for",
        ),
        Rewrite(
            "sorts the copies",
            {"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in sorted(set(copies)):
        blocks[:, target] = blocks[:, source]
'''},
            says="in the order of the blocks' numbers",
        ),
        Edit(
            "has no dimension for the targets",
            {"copy_blocks": (
                ("        for target in wanted:\n            blocks[:, target] = blocks[:, source]",
                 "        blocks[:, wanted] = blocks[:, source]"),
            )},
            says="has no dimension for the targets",
        ),
        Rewrite(
            "needs a copy",
            {"copy_blocks": '''
def copy_blocks(blocks, copies):
    sources, targets = zip(*copies)
    blocks[:, list(targets)] = blocks[:, list(sources)]
'''},
            says="most steps ask for no copy",
        ),
        Rewrite(
            "copies a copy",
            {"copy_blocks": '''
def copy_blocks(blocks, copies):
    blocks = blocks.clone()
    for source, target in copies:
        blocks[:, target] = blocks[:, source]
'''},
            says="nothing is copied",
        ),
        Rewrite(
            "empties the source",
            {"copy_blocks": '''
def copy_blocks(blocks, copies):
    for source, target in copies:
        blocks[:, target] = blocks[:, source]
        blocks[:, source] = 0
'''},
            says="a block that is only read was changed",
        ),
    ),
}  # fmt: skip
