"""Chapter 07: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "07.1": {  # calls itself for what follows the first block
        "BlockTrie.match": """
def match(self, token_ids):
    keys = keys_of(token_ids, self.block_size)

    def below(children, depth):
        if depth == len(keys) or keys[depth] not in children:
            return []
        block_id, following = children[keys[depth]]
        return [block_id, *below(following, depth + 1)]

    return below(self.root, 0)
""",
    },
    "07.2": {  # calls itself, counts the keys that agree in one line, and moves lists in place
        "RadixCache._walk": """
def _walk(self, node, keys):
    child = node.children.get(keys[0]) if keys else None
    if child is None:
        return node, 0, []
    pairs = zip(child.keys, keys)
    agree = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(child.keys), len(keys)))
    if agree != len(child.keys):
        upper = self._split(child, agree)
        return upper, agree, list(upper.block_ids)
    end, depth, block_ids = self._walk(child, keys[agree:])
    return end, agree + depth, child.block_ids + block_ids
""",
        "RadixCache._split": """
def _split(self, lower, length):
    above = lower.parent
    upper = Node(above, [], [])
    while len(upper.keys) < length:
        upper.keys.append(lower.keys.pop(0))
        upper.block_ids.append(lower.block_ids.pop(0))
    above.children.update({upper.keys[0]: upper})
    upper.children.update({lower.keys[0]: lower})
    lower.parent, upper.lock_count = upper, lower.lock_count
    if not upper.lock_count:
        self.unlocked.setdefault(upper)
    return upper
""",
    },
    "07.3": {  # one block at a time, both of them
        "RadixCache.insert": """
def insert(self, token_ids, block_ids, salt=None):
    keys = self._keys(token_ids)
    if len(keys) > len(block_ids):
        raise ValueError("too few blocks")
    if len(keys) == 0:
        return InsertResult(Root(salt), [], 0)
    node, existing, found = self._walk(self._roots.setdefault(salt, Root(salt)), keys)
    for i in range(existing, len(keys)):
        self.pool.acquire(block_ids[i])
        node = self._append(node, [keys[i]], [block_ids[i]])
        found.append(block_ids[i])
        self.num_cached_blocks += 1
    self._touch(node)
    return InsertResult(node, found, existing)
""",
        "RadixCache.evict": """
def evict(self, num_blocks):
    if num_blocks < 0:
        raise ValueError(num_blocks)
    for done in range(num_blocks):
        oldest = next((node for node in self.unlocked if not node.children), None)
        if oldest is None:
            return done
        first = oldest.keys[0]
        del oldest.keys[-1]
        block_id = oldest.block_ids.pop()
        if not oldest.keys:
            self._remove(oldest, first)
        self.num_cached_blocks -= 1
        self.num_evictable_blocks -= 1
        self.pool.release(block_id)
    return num_blocks
""",
    },
    "07.4": {  # no hashes: a number for each pair of (number of the block before, its tokens)
        "": "NUMBERS = {}",
        "chained_hashes": """
def chained_hashes(token_ids, block_size, salt=None):
    names, before = [], ("salt", salt)
    for key in keys_of(token_ids, block_size):
        before = NUMBERS.setdefault((before, key), len(NUMBERS))
        names.append(before)
    return names
""",
        "ChainedCache.match": """
def match(self, token_ids, salt=None):
    found = {}
    for name in chained_hashes(token_ids, self.block_size, salt):
        if self.blocks.get(name) is None:
            break
        found[name] = self.blocks[name]
    for name in list(found)[::-1]:
        self.blocks[name] = self.blocks.pop(name)
    return MatchResult(None, list(found.values()), len(found) * self.block_size)
""",
        "ChainedCache.insert": """
def insert(self, token_ids, block_ids, salt=None):
    names = chained_hashes(token_ids, self.block_size, salt)
    if len(names) > len(block_ids):
        raise ValueError("too few blocks")
    there = [name for name in names if name in self.blocks]
    for name, block_id in list(zip(names, block_ids))[::-1]:
        if name not in there:
            self.pool.acquire(block_id)
        self.blocks[name] = self.blocks.pop(name, block_id)
    return InsertResult(None, list(map(self.blocks.get, names)), len(there))
""",
        "ChainedCache.evict": """
def evict(self, num_blocks):
    if num_blocks < 0:
        raise ValueError(num_blocks)
    done = 0
    for name in list(self.blocks):
        if done < num_blocks and self.pool.ref_count(self.blocks[name]) < 2:
            done += 1
            self.pool.release(self.blocks.pop(name))
    return done
""",
    },
    "07.5": {  # the path first, then what is done to it; and the other way up
        "RadixCache.lock": """
def lock(self, node):
    path = []
    while node.parent:
        path.insert(0, node)
        node = node.parent
    for each in path:
        each.lock_count += 1
        if each.lock_count == 1:
            self.unlocked.pop(each)
            self.num_evictable_blocks -= len(each.keys)
""",
        "RadixCache.unlock": """
def unlock(self, node):
    if node.parent is None:
        return
    if node.lock_count < 1:
        raise ValueError("not locked")
    node.lock_count -= 1
    if not node.lock_count:
        self.unlocked[node] = None
        self.num_evictable_blocks += len(node.block_ids)
    self.unlock(node.parent)
""",
    },
    "07.6": {  # cuts the hit instead of the question; puts all blocks of the tree into the table
        "Scheduler.look_up": """
def look_up(self, sequence):
    if self.cache is not None and sequence.host_block_ids is None:
        tokens, params = sequence.token_ids, sequence.request.params
        match = self.cache.match(tokens, params.cache_salt)
        if match.num_tokens >= len(tokens):
            match = self.cache.match(tokens[: len(tokens) - 1], params.cache_salt)
        if match.num_tokens and match.num_tokens >= self.config.min_prefix_tokens:
            return match
    return None
""",
        "Scheduler.share_full_blocks": """
def share_full_blocks(self, sequence):
    full = sequence.num_computed // self.config.block_size
    if self.cache is None or full == sequence.num_inserted:
        return
    table, salt = sequence.table, sequence.request.params.cache_salt
    tokens = sequence.token_ids[: full * self.config.block_size]
    if sequence.node is not None:
        self.cache.unlock(sequence.node)
    node, block_ids, _ = self.cache.insert(tokens, table.block_ids[:full], salt)
    self.cache.lock(node)
    for block_id in block_ids:
        self.pool.acquire(block_id)
    own, table.block_ids[:full] = table.block_ids[:full], block_ids
    for block_id in own:
        self.pool.release(block_id)
    sequence.table_version += 1
    sequence.node, sequence.num_inserted = node, full
""",
    },
    "07.7": {  # all tokens first, then all blocks, then who is finished; an empty plan is not run
        "Loop.step": """
def step(self, engine):
    scheduler, runner = engine.scheduler, engine.runner
    plan = scheduler.schedule()
    new = runner.run(plan)
    engine.append(scheduler.commit(plan), new)
    return bool(plan.sequences)
""",
        "Engine.append": """
def append(self, sequences, token_ids):
    for sequence, token_id in zip(sequences, token_ids):
        sequence.token_ids += [token_id]
        self._moved.setdefault(sequence.request.request_id, sequence.request)
    self._generated += len(token_ids)
    for sequence in sequences:
        self.scheduler.share_full_blocks(sequence)
    for sequence in sequences:
        if self._finishes(sequence):
            self.scheduler.remove(sequence)
            if None not in [one.finish_reason for one in sequence.request.sequences]:
                self._requests.pop(sequence.request.request_id)
""",
        "Engine._finishes": """
def _finishes(self, sequence):
    request, new = sequence.request, sequence.token_ids[len(sequence.request.prompt_ids) :]
    reason = None
    if len(new) >= request.params.max_tokens:
        reason = "length"
    if new[-1] in request.stop_ids:
        reason = "stop"
    elif request.longest_stop and hits_stop_string(sequence, self.lm.decode):
        reason = "stop"
    sequence.finish_reason = reason
    return reason is not None
""",
    },
    "07.8": {  # the limit falls with each hit, so the last one found is the fastest
        "guess_prompt": """
def guess_prompt(first_token_ms, guesses, decoy):
    limit, found = first_token_ms(decoy) * 0.5, None
    for index, guess in enumerate(guesses):
        took = first_token_ms(guess)
        if took < limit:
            limit, found = took, index
    return found
""",
    },
}
