"""Chapter 05: right solutions that are written otherwise than the reference."""

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
