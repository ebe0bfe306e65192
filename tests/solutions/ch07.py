"""Chapter 07: right solutions written otherwise, and wrong ones."""

from four_ways import Edit, Rewrite

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
}

WRONG = {
    "07.1": (
        Edit(
            "nothing, if anything is missing",
            {"BlockTrie.match": (("            break\n", "            return []\n"),)},
            says="the first block that is missing makes the whole answer empty",
        ),
        Rewrite(
            "takes a branch for an end",
            {"BlockTrie.match": '''
def match(self, token_ids):
    children, block_ids, known = self.root, [], 0
    for key in keys_of(token_ids, self.block_size):
        if key not in children:
            break
        block_id, children = children[key]
        block_ids.append(block_id)
        if len(children) <= 1:
            known = len(block_ids)
    return block_ids[:known]
'''},
            says="where several prompts go on in different ways the walk is forgotten",
        ),
        Edit(
            "only what is missing is passed over",
            {"BlockTrie.match": (("            break\n", "            continue\n"),)},
            says="the walk goes on after a block that is missing",
        ),
        Edit(
            "leaves the last one out",
            {"BlockTrie.match": (("return block_ids", "return block_ids[:-1]"),)},
            says="the last block that was found is left out",
        ),
        Edit(
            "returns only the last",
            {"BlockTrie.match": (("return block_ids", "return block_ids[-1:]"),)},
            says="only the last block is returned",
        ),
        Edit(
            "still asks for an end",
            {"BlockTrie.match": (
                ("return block_ids", "return block_ids if not children else []"),
            )},
            says="it still answers only where a stored prompt ends",
        ),
    ),
    "07.2": (
        Edit(
            "compares the first key alone",
            {"RadixCache._walk": (
                (" and child.keys[length] == keys[depth + length]", ""),
            )},
            says="a node is taken whole as soon as its first block agrees",
        ),
        Edit(
            "compares beyond the end of the prompt",
            {"RadixCache._walk": (
                ("min(len(child.keys), len(keys) - depth)", "len(child.keys)"),
            )},
            says="it reads beyond the end of a list",
        ),
        Edit(
            "leaves out a node that agrees in part",
            {"RadixCache._walk": (
                ("            child = self._split(child, length)\n", "            break\n"),
            )},
            says="a node that agrees only in part is left out altogether",
        ),
        Edit(
            "does not cut",
            {"RadixCache._walk": (
                ("            child = self._split(child, length)\n        node = child",
                 "            return child, depth + length, block_ids + child.block_ids[:length]\n"
                 "        node = child"),
            )},
            says="the node goes on behind the match, so a lock on it would hold too much",
        ),
        Edit(
            "stops after one node",
            {"RadixCache._walk": (("    while depth", "    if depth"),)},
            says="the walk stops after one node",
        ),
        Edit(
            "returns the node above",
            {"RadixCache._walk": (("return node, depth", "return node.parent or node, depth"),)},
            says="the node is one above the end of the match, or the root",
        ),
        Edit(
            "counts one block a node",
            {"RadixCache._walk": (("return node, depth", "return node, min(depth, 1)"),)},
            says="only one block a node is counted",
        ),
        Edit(
            "walks on in the lower half",
            {"RadixCache._walk": (
                ("child = self._split(child, length)", "self._split(child, length)"),
            )},
            says="after the cut the walk stands on the lower half, which does not agree",
        ),
        Edit(
            "hangs the upper half nowhere",
            {"RadixCache._split": (
                ("    upper.parent.children[upper.keys[0]] = upper\n", ""),
            )},
            says="the node above still has the old node under its key",
        ),
        Edit(
            "loses the lower half",
            {"RadixCache._split": (("    upper.children[lower.keys[0]] = lower\n", ""),)},
            says="what follows the cut is lost",
        ),
        Edit(
            "leaves all keys in the lower half",
            {"RadixCache._split": (
                ("    lower.keys, lower.block_ids = lower.keys[length:], "
                 "lower.block_ids[length:]\n", ""),
                ("upper.children[lower.keys[0]]", "upper.children[lower.keys[length]]"),
            )},
            says="the lower half keeps all keys, also those of the upper one",
        ),
        Edit(
            "hands out the node's own list",
            {"RadixCache._walk": (
                ("        block_ids += child.block_ids",
                 "        block_ids = block_ids + child.block_ids if block_ids"
                 " else child.block_ids"),
            )},
            says="the list is the node's own, and grows with the node",
        ),
        Edit(
            "forgets the lock, and looks at the lower half's",
            {"RadixCache._split": (
                ("    upper.lock_count = lower.lock_count\n", ""),
                ("if upper.lock_count == 0", "if lower.lock_count == 0"),
            )},
            says="the upper half has no lock",
        ),
        Edit(
            "cuts the keys, not the blocks",
            {"RadixCache._split": (
                ("lower.keys[length:], lower.block_ids[length:]",
                 "lower.keys[length:], lower.block_ids"),
            )},
            says="a block is named by two nodes",
        ),
        Edit(
            "leaves the lower half's parent",
            {"RadixCache._split": (("    lower.parent = upper\n", ""),)},
            says="a child's `parent` is not the node that it hangs from",
        ),
        Edit(
            "gives the children to the upper half",
            {"RadixCache._split": (
                ("upper.children[lower.keys[0]] = lower",
                 "upper.children = lower.children | {lower.keys[0]: lower}\n"
                 "    lower.children = {}"),
            )},
            says="the children stay with the upper half, but they follow the lower one",
        ),
        Edit(
            "forgets the lock",
            {"RadixCache._split": (("    upper.lock_count = lower.lock_count\n", ""),)},
            says="the upper half has no lock: what a sequence stands on could be evicted",
        ),
        Edit(
            "forgets that the upper half can be evicted",
            {"RadixCache._split": (("        self.unlocked[upper] = None", "        pass"),)},
            says="a node is looked for where it is not: in `unlocked`",
        ),
        Rewrite(
            "makes the old node the upper half",
            {"RadixCache._split": '''
def _split(self, upper, length):
    lower = Node(upper, upper.keys[length:], upper.block_ids[length:])
    lower.children, lower.lock_count = upper.children, upper.lock_count
    for child in lower.children.values():
        child.parent = lower
    upper.keys, upper.block_ids = upper.keys[:length], upper.block_ids[:length]
    upper.children = {lower.keys[0]: lower}
    if upper.lock_count == 0:
        self.unlocked[lower] = None
        self.unlocked.move_to_end(upper)
    return upper
'''},
            says="the node that was there became the upper half",
        ),
    ),
    "07.3": (
        Edit(
            "holds nothing",
            {"RadixCache.insert": (("self.pool.acquire(block_id)", "pass"),)},
            says="the tree names blocks that it does not hold",
        ),
        Edit(
            "holds what it does not keep",
            {"RadixCache.insert": (
                ("    if new_blocks:\n        for block_id in new_blocks:\n"
                 "            self.pool.acquire(block_id)\n",
                 "    for block_id in block_ids[: len(keys)]:\n"
                 "        self.pool.acquire(block_id)\n    if new_blocks:\n"),
            )},
            says="the tree acquires blocks that it does not keep",
        ),
        Edit(
            "returns the caller's blocks",
            {"RadixCache.insert": (
                ("tree_blocks + new_blocks", "list(block_ids[: len(keys)])"),
            )},
            says="these are the caller's own blocks, also where the tree has others",
        ),
        Edit(
            "returns the new blocks alone",
            {"RadixCache.insert": (("tree_blocks + new_blocks", "new_blocks"),)},
            says="the blocks that were there are missing",
        ),
        Edit(
            "counts the new ones as those that were there",
            {"RadixCache.insert": (
                ("tree_blocks + new_blocks, depth", "tree_blocks + new_blocks, len(new_blocks)"),
            )},
            says="that is how many",
        ),
        Edit(
            "does not count what is cached",
            {"RadixCache.insert": (
                ("        self.num_cached_blocks += len(new_blocks)\n", ""),
            )},
            says="new blocks are not counted",
        ),
        Edit(
            "does not make younger",
            {"RadixCache.insert": (("    self._touch(node)\n", ""),)},
            says="an insert of what is known already does not make it younger",
        ),
        Edit(
            "takes more blocks than there are keys",
            {"RadixCache.insert": (("block_ids[depth : len(keys)]", "block_ids[depth:]"),)},
            says="blocks without whole blocks of tokens get into the tree as well",
        ),
        Edit(
            "appends all keys once more",
            {"RadixCache.insert": (("keys[depth:], new_blocks", "keys, new_blocks"),)},
            says="a node without blocks",
        ),
        Edit(
            "accepts too few blocks",
            {"RadixCache.insert": (("if len(block_ids) < len(keys):", "if False:"),)},
            says="nothing compares the number of blocks with that of the keys",
        ),
        Edit(
            "begins at one root for all",
            {"RadixCache.insert": (
                ("self._roots.get(salt)", "self._roots.get(None)"),
                ("self._roots[salt] = Root(salt)", "self._roots[None] = Root(None)"),
            )},
            says="the salt is ignored: one tenant finds what another has stored",
        ),
        Edit(
            "evicts from the front",
            {"RadixCache.evict": (
                ("leaf.block_ids.pop()", "leaf.block_ids.pop(0)"),
                ("leaf.keys.pop()", "leaf.keys.pop(0)"),
            )},
            says="the beginning of a prompt goes first",
        ),
        Edit(
            "evicts whole nodes",
            {"RadixCache.evict": (
                ("while leaf.block_ids and gone < num_blocks:", "while leaf.block_ids:"),
            )},
            says="a whole node goes, where 2 blocks were asked for",
        ),
        Edit(
            "looks at the number of blocks too late",
            {"RadixCache.insert": (
                ("if len(block_ids) < len(keys):", "if False:"),
                ("    new_blocks = list", "    if len(block_ids) < len(keys):\n"
                 "        raise ValueError(len(block_ids))\n    new_blocks = list"),
            )},
            says="something is changed before the error is raised",
        ),
        Edit(
            "counts what is evictable as well",
            {"RadixCache.insert": (
                ("+= len(new_blocks)\n",
                 "+= len(new_blocks)\n        self.num_evictable_blocks += len(new_blocks)\n"),
            )},
            says="`_append` has counted them already",
        ),
        Edit(
            "makes a root for nothing",
            {"RadixCache.insert": (
                ("    if not keys:\n", "    if not keys:\n"
                 "        self._roots.setdefault(salt, Root(salt))\n"),
            )},
            says="a root is made though there is nothing to insert",
        ),
        Edit(
            "evicts the youngest",
            {"RadixCache.evict": (
                ("next(iter(self.unlocked))",
                 "next(n for n in reversed(self.unlocked) if not n.children)"),
            )},
            says="the most recently used goes first",
        ),
        Edit(
            "does not tell the pool",
            {"RadixCache.evict": (
                ("self.pool.release(leaf.block_ids.pop())", "leaf.block_ids.pop()"),
            )},
            says="the tree lets go of blocks, and the pool does not hear of it",
        ),
        Edit(
            "keeps the emptied leaf",
            {"RadixCache.evict": (
                ("            self._remove(leaf, key)", "            del self.unlocked[leaf]"),
            )},
            says="a leaf without blocks stays in the tree",
        ),
        Edit(
            "never stops",
            {"RadixCache.evict": (("gone < num_blocks and self.unlocked", "gone < num_blocks"),)},
            says="the loop goes on when nothing unlocked is left",
        ),
        Edit(
            "returns what was asked for",
            {"RadixCache.evict": (("return gone", "return num_blocks"),)},
            says="that is what was asked for, not what went",
        ),
        Edit(
            "counts nothing",
            {"RadixCache.evict": (
                ("    self.num_cached_blocks -= gone\n", ""),
                ("    self.num_evictable_blocks -= gone\n", ""),
            )},
            says="the two counters are not told",
        ),
        Edit(
            "forgets what is evictable",
            {"RadixCache.evict": (("    self.num_evictable_blocks -= gone\n", ""),)},
            says="num_evictable_blocks is not told",
        ),
        Edit(
            "frees less than nothing",
            {"RadixCache.evict": (("if num_blocks < 0:", "if False:"),)},
            says="nothing looks at the sign",
        ),
        Rewrite(
            "takes any unlocked node that was not used for long, and forgets its children",
            {"RadixCache.evict": '''
def evict(self, num_blocks):
    if num_blocks < 0:
        raise ValueError(num_blocks)
    freed = 0
    while freed < num_blocks and self.unlocked:
        node = max(self.unlocked, key=lambda n: len(n.children))
        self.pool.release(node.block_ids.pop())
        key = node.keys.pop()
        freed += 1
        if not node.block_ids:
            self._remove(node, key)
    self.num_cached_blocks -= freed
    self.num_evictable_blocks -= freed
    return freed
'''},
            says="evicted one by one",
        ),
    ),
    "07.4": (
        Edit(
            "hashes each block by itself",
            {"chained_hashes": (("sha256(before + repr", "sha256(repr"),)},
            says="a name is made of its own block's tokens alone",
        ),
        Rewrite(
            "hashes a block and the tokens of the one before",
            {"chained_hashes": '''
def chained_hashes(token_ids, block_size, salt=None):
    names, before = [], None
    for place, key in enumerate(keys_of(token_ids, block_size)):
        names.append((salt, place, sha256(repr((before, key)).encode()).digest()))
        before = key
    return names
'''},
            says="only the block before is in a name, not all that came before it",
        ),
        Edit(
            "leaves the salt out",
            {"chained_hashes": (("names.append((salt, before))", "names.append(before)"),)},
            says="the salt is not in every name",
        ),
        Edit(
            "takes Python's hash",
            {"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()", "hash((before, key))"),
            )},
            says="Python's hash() of two prompts can be equal",
        ),
        Edit(
            "puts the salt into Python's hash, too",
            {"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()", "hash((salt, before, key))"),
                ("names.append((salt, before))", "names.append(before)"),
            )},
            says="Python's hash() of the two is the same",
        ),
        Edit(
            "takes two bytes of the hash",
            {"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()",
                 "sha256(before + repr(key).encode()).digest()[:2]"),
            )},
            says="the names are so short that they collide by chance",
        ),
        Edit(
            "takes the salt's text",
            {"chained_hashes": (("names.append((salt, before))",
                                 "names.append((str(salt), before))"),)},
            says="the salt's text is in the names, and two salts may have the same text",
        ),
        Edit(
            "stores before it refuses",
            {"ChainedCache.insert": (
                ("if len(block_ids) < len(names):", "if False:"),
                ("zip(names, block_ids, strict=False)",
                 "zip(names, list(block_ids)[:max(len(names), 1)], strict=True)"),
            )},
            says="blocks are stored before the error is raised",
        ),
        Edit(
            "refuses more blocks than names",
            {"ChainedCache.insert": (("len(block_ids) < len(names)",
                                      "len(block_ids) != len(names)"),)},
            says="more blocks than names are refused, and should be left alone",
        ),
        Edit(
            "stops at the first block in use",
            {"ChainedCache.evict": (
                ("        if self.pool.ref_count(block_id) == 1:\n"
                 "            unused.append(name)\n",
                 "        if self.pool.ref_count(block_id) != 1:\n            break\n"
                 "        unused.append(name)\n"),
            )},
            says="it stops at the first block that is in use",
        ),
        Edit(
            "evicts less than nothing",
            {"ChainedCache.evict": (("if num_blocks < 0:", "if False:"),)},
            says="nothing looks at the sign",
        ),
        Edit(
            "lets tokens run into each other",
            {"chained_hashes": (
                ("repr(key).encode()", "''.join(map(str, key)).encode()"),
            )},
            says="tokens run into each other on the way into the hash",
        ),
        Rewrite(
            "names a rest of a block, too",
            {"chained_hashes": '''
def chained_hashes(token_ids, block_size, salt=None):
    ends = range(block_size, len(token_ids) + block_size, block_size)
    return [(salt, tuple(token_ids[:end])) for end in ends]
'''},
            says="a rest of less than a block gets a name, too",
        ),
        Edit(
            "walks on behind a gap",
            {"ChainedCache.match": (
                ("            break\n", "            continue\n"),
                ("names[: len(block_ids)]", "[n for n in names if n in self.blocks]"),
            )},
            says="the walk goes on behind a block that is missing",
        ),
        Edit(
            "makes the beginning the oldest",
            {"ChainedCache.match": (("in reversed(names[: len(block_ids)])",
                                     "in names[: len(block_ids)]"),),
             "ChainedCache.insert": (("in reversed(names)", "in names"),)},
            says="a block goes before those that follow it",
        ),
        Edit(
            "does not make younger by a match",
            {"ChainedCache.match": (("self.blocks.move_to_end(name)", "pass"),)},
            says="a match does not make younger",
        ),
        Edit(
            "does not make younger by an insert",
            {"ChainedCache.insert": (
                ("in reversed(names):", "in reversed(names[num_existing:]):"),
            )},
            says="an insert does not make younger",
        ),
        Edit(
            "exchanges what is known",
            {"ChainedCache.insert": (
                ("            num_existing += 1\n",
                 "            num_existing += 1\n            self.pool.acquire(block_id)\n"
                 "            self.pool.release(self.blocks[name])\n"
                 "            self.blocks[name] = block_id\n"),
            )},
            says="what was known is exchanged for the caller's blocks",
        ),
        Edit(
            "holds nothing",
            {"ChainedCache.insert": (("            self.pool.acquire(block_id)\n", ""),)},
            says="that it does not hold",
        ),
        Edit(
            "accepts too few blocks",
            {"ChainedCache.insert": (("if len(block_ids) < len(names):", "if False:"),)},
            says="nothing compares the number of blocks with that of the names",
        ),
        Edit(
            "evicts what is in use",
            {"ChainedCache.evict": (("self.pool.ref_count(block_id) == 1", "True"),)},
            says="a block that a running sequence uses is evicted",
        ),
        Edit(
            "evicts the youngest",
            {"ChainedCache.evict": (
                ("in self.blocks.items()", "in reversed(self.blocks.items())"),
            )},
            says="evicted one by one",
        ),
        Edit(
            "says nothing",
            {"ChainedCache.evict": (("    return len(unused)\n", ""),)},
            says="and returns: None",
        ),
    ),
    "07.5": (
        Edit(
            "mends only the lock",
            {"RadixCache.unlock": (
                ('that is not locked."""\n',
                 'that is not locked."""\n    node = node.parent or node\n'),
            )},
            says="`unlock` leaves the matched node locked: it can never be evicted again",
        ),
        Edit(
            "mends only the unlock",
            {"RadixCache.lock": (
                ('may be nested."""\n', 'may be nested."""\n    node = node.parent or node\n'),
            )},
            says="`lock` does not cover the node that was matched, where the sequence stands",
        ),
        Edit(
            "locks the node alone",
            {"RadixCache.lock": (("    while node.parent", "    if node.parent"),
                                 ("        node = node.parent\n", "")),
             "RadixCache.unlock": (("    while node.parent", "    if node.parent"),
                                   ("        node = node.parent\n", ""))},
            says="only the node itself is locked, not what it stands on",
        ),
        Edit(
            "unlocks the node alone",
            {"RadixCache.unlock": (("    while node.parent", "    if node.parent"),
                                   ("        node = node.parent\n", ""))},
            says="`unlock` does not go up: what the node stands on is locked for ever",
        ),
        Edit(
            "does not count locks",
            {"RadixCache.lock": (("node.lock_count += 1", "node.lock_count = 1"),),
             "RadixCache.unlock": (("node.lock_count -= 1", "node.lock_count = 0"),
                                   ("if node.parent is not None and node.lock_count == 0:",
                                    "if node.parent is not None and node.lock_count < 0:"))},
            says="locks are not counted: the first unlock ends all of them",
        ),
        Edit(
            "does not keep the number",
            {"RadixCache.lock": (
                ("            self.num_evictable_blocks -= len(node.block_ids)\n", ""),
             ),
             "RadixCache.unlock": (
                ("            self.num_evictable_blocks += len(node.block_ids)\n", ""),
             )},
            says="the number is not kept",
        ),
        Edit(
            "subtracts with every lock",
            {"RadixCache.lock": (
                ("            del self.unlocked[node]\n"
                 "            self.num_evictable_blocks -= len(node.block_ids)\n",
                 "            del self.unlocked[node]\n"
                 "        self.num_evictable_blocks -= len(node.block_ids)\n"),
            )},
            says="blocks that two requests stand on are subtracted twice",
        ),
        Edit(
            "gives nothing back",
            {"RadixCache.unlock": (
                ("            self.unlocked[node] = None\n"
                 "            self.num_evictable_blocks += len(node.block_ids)\n",
                 "            pass\n"),
            )},
            says="`unlock` gives nothing back",
        ),
        Rewrite(
            "unlocks from the root down",
            {"RadixCache.unlock": '''
def unlock(self, node):
    if node.parent is not None and node.lock_count == 0:
        raise ValueError("not locked")
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    for node in reversed(path):
        node.lock_count -= 1
        if node.lock_count == 0:
            self.unlocked[node] = None
            self.num_evictable_blocks += len(node.block_ids)
'''},
            says="nodes are unlocked from the root down",
        ),
        Edit(
            "locks the root",
            {"RadixCache.lock": (("while node.parent is not None:", "while node is not None:"),)},
            says="the root is never locked",
        ),
        Edit(
            "accepts one unlock too many",
            {"RadixCache.unlock": (
                ("if node.parent is not None and node.lock_count == 0:", "if False:"),
            )},
            says="`unlock` looks at another node than the one it is given",
        ),
    ),
    "07.6": (
        Edit(
            "still gives its copies away",
            {"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.release(table.block_ids[index])"),
            )},
            says="our own copies are given back, and the table goes on naming them",
        ),
        Edit(
            "keeps its copies",
            {"Scheduler.share_full_blocks": (
                ("            table.replace(index, result.block_ids[index])\n", ""),
            )},
            says="a table goes on with its own copies, though the tree has the same blocks",
        ),
        Edit(
            "never releases its copies",
            {"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.acquire(result.block_ids[index])\n"
                 "            table.block_ids[index] = result.block_ids[index]"),
            )},
            says="the copies that were replaced are never released",
        ),
        Edit(
            "does not hold what it takes over",
            {"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.release(table.block_ids[index])\n"
                 "            table.block_ids[index] = result.block_ids[index]"),
            )},
            says="a block lost a holder that is still there",
        ),
        Edit(
            "does not say that the table has changed",
            {"Scheduler.share_full_blocks": (
                ("            sequence.table_version += 1\n", ""),
            )},
            says="the next step still reads the blocks that were given back",
        ),
        Edit(
            "asks for the prompt alone",
            {"Scheduler.look_up": (("sequence.token_ids[:-1]",
                                    "sequence.request.prompt_ids[:-1]"),)},
            says="only the prompt is looked up",
        ),
        Edit(
            "cuts the hit, and not its node",
            {"Scheduler.look_up": (
                ("sequence.token_ids[:-1]", "sequence.token_ids"),
                ("    return match if", "    if match.num_tokens == len(sequence.token_ids):\n"
                 "        size = self.config.block_size\n"
                 "        match = MatchResult(\n"
                 "            match.node, match.block_ids[:-1], match.num_tokens - size)\n"
                 "    return match if"),
            )},
            says="the hit is cut and its node is not",
        ),
        Edit(
            "leaves nothing to compute",
            {"Scheduler.look_up": (("sequence.token_ids[:-1]", "sequence.token_ids"),)},
            says="with a hit on every token there is nothing left to compute",
        ),
        Edit(
            "leaves a whole block to compute, always",
            {"Scheduler.look_up": (
                ("sequence.token_ids[:-1]", "sequence.token_ids[: -self.config.block_size]"),
            )},
            says="a whole block is left to compute, though the hit ends before the last token",
        ),
        Edit(
            "refuses full hits",
            {"Scheduler.look_up": (
                ("match = self.cache.match(sequence.token_ids[:-1],",
                 "match = self.cache.match(sequence.token_ids,"),
                ("return match if", "if match.num_tokens == len(sequence.token_ids):\n"
                 "        return None\n    return match if"),
            )},
            says="a full hit is no hit at all any more",
        ),
        Edit(
            "remembers what it found",
            {"Scheduler.look_up": (
                ("    match = self.cache.match(sequence.token_ids[:-1], "
                 "sequence.request.params.cache_salt)\n",
                 "    found = vars(self).setdefault('found', {})\n"
                 "    if sequence not in found:\n"
                 "        found[sequence] = self.cache.match(\n"
                 "            sequence.token_ids[:-1], sequence.request.params.cache_salt)\n"
                 "    match = found[sequence]\n"),
            )},
            says="what was found at an earlier attempt is used again",
        ),
        Edit(
            "forgets the salt",
            {"Scheduler.look_up": ((", sequence.request.params.cache_salt", ""),)},
            says="the salt is left out: what a tenant stored under its salt it does not find",
        ),
        Edit(
            "forgets the threshold",
            {"Scheduler.look_up": (("max(1, self.config.min_prefix_tokens)", "1"),)},
            says="the threshold is gone: every hit is used",
        ),
        Edit(
            "looks up what is on the host",
            {"Scheduler.look_up": ((" or sequence.host_block_ids is not None", ""),)},
            says="a request that is swapped out finds its prompt in the cache",
        ),
    ),
}  # fmt: skip
