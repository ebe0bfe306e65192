"""Chapter 07: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake

SHARES = (  # `Engine.append`
    "        if filled and sequence.table is not None:\n"
    "            self.scheduler.share_full_blocks(sequence)\n"
)
BY_LENGTH = '            self._finish(sequence, "length")\n'
OR_A_STRING = (
    " or (\n            request.longest_stop > 0 and hits_stop_string(sequence, self.lm.decode)\n"
    "        )"
)

MISTAKES = {
    "07.1": (
        Mistake(
            "nothing, if anything is missing",
            edits={"BlockTrie.match": (("            break\n", "            return []\n"),)},
            cause="the first block that is missing makes the whole answer empty",
            look="what does a system prompt still have in common with this one?",
        ),
        Mistake(
            "takes a branch for an end",
            sources={"BlockTrie.match": '''
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
            cause="where several prompts go on in different ways the walk is forgotten",
            look="a node with many children is a node that many prompts share",
        ),
        Mistake(
            "only what is missing is passed over",
            edits={"BlockTrie.match": (("            break\n", "            continue\n"),)},
            cause="the walk goes on after a block that is missing, and finds one that stands "
            "elsewhere",
            look="K and V depend on everything before them: can a later block be right?",
        ),
        Mistake(
            "leaves the last one out",
            edits={"BlockTrie.match": (("return block_ids", "return block_ids[:-1]"),)},
            cause="the last block that was found is left out",
            look="which block belongs to the last key that matched?",
        ),
        Mistake(
            "returns only the last",
            edits={"BlockTrie.match": (("return block_ids", "return block_ids[-1:]"),)},
            cause="only the last block is returned",
            look="a prefix is all of its blocks",
        ),
        Mistake(
            "still asks for an end",
            edits={"BlockTrie.match": (
                ("return block_ids", "return block_ids if not children else []"),
            )},
            cause="it still answers only where a stored prompt ends",
            look="what has the walk in hand when it finds no next block?",
        ),
    ),
    "07.2": (
        Mistake(
            "compares the first key alone",
            edits={"RadixCache._walk": (
                (" and child.keys[length] == keys[depth + length]", ""),
            )},
            cause="a node is taken whole as soon as its first block agrees, and with it another "
            "prompt's blocks",
            look="every key of a node has to be compared, one after the other",
        ),
        Mistake(
            "compares beyond the end of the prompt",
            edits={"RadixCache._walk": (
                ("min(len(child.keys), len(keys) - depth)", "len(child.keys)"),
            )},
            cause="it reads beyond the end of a list: the prompt or the node is shorter than that",
            look="of what is left of the prompt and the node's keys, which is shorter?",
        ),
        Mistake(
            "leaves out a node that agrees in part",
            edits={"RadixCache._walk": (
                ("            child = self._split(child, length)\n", "            break\n"),
            )},
            cause="a node that agrees only in part is left out altogether",
            look="how many of its keys agree? So many blocks are a hit",
        ),
        Mistake(
            "does not cut",
            edits={"RadixCache._walk": (
                ("            child = self._split(child, length)\n        node = child",
                 "            return child, depth + length, block_ids + child.block_ids[:length]\n"
                 "        node = child"),
            )},
            cause="the node goes on behind the match, so a lock on it would hold too much",
            look="where does the match end inside a node? There the node has to be cut",
        ),
        Mistake(
            "stops after one node",
            edits={"RadixCache._walk": (("    while depth", "    if depth"),)},
            cause="the walk stops after one node",
            look="what must hold for another turn of the loop?",
        ),
        Mistake(
            "returns the node above",
            edits={"RadixCache._walk": (
                ("return node, depth", "return node.parent or node, depth"),
            )},
            cause="the node is one above the end of the match, or the root",
            look="the first result: where does the walk stand when it stops?",
        ),
        Mistake(
            "counts one block a node",
            edits={"RadixCache._walk": (("return node, depth", "return node, min(depth, 1)"),)},
            cause="only one block a node is counted",
            look="by how many blocks is the walk deeper after a node?",
        ),
        Mistake(
            "walks on in the lower half",
            edits={"RadixCache._walk": (
                ("child = self._split(child, length)", "self._split(child, length)"),
            )},
            cause="after the cut the walk stands on the lower half, which does not agree",
            look="what `_split` returns",
        ),
        Mistake(
            "hangs the upper half nowhere",
            edits={"RadixCache._split": (
                ("    upper.parent.children[upper.keys[0]] = upper\n", ""),
            )},
            cause="the node above still has the old node under its key, now the lower half",
            look="whose `children` must name the upper half?",
        ),
        Mistake(
            "loses the lower half",
            edits={"RadixCache._split": (("    upper.children[lower.keys[0]] = lower\n", ""),)},
            cause="what follows the cut is lost",
            look="the children of the upper half",
        ),
        Mistake(
            "leaves all keys in the lower half",
            edits={"RadixCache._split": (
                ("    lower.keys, lower.block_ids = lower.keys[length:], "
                 "lower.block_ids[length:]\n", ""),
                ("upper.children[lower.keys[0]]", "upper.children[lower.keys[length]]"),
            )},
            cause="the lower half keeps all keys, also those of the upper one",
            look="`keys` and `block_ids` of the lower half",
        ),
        Mistake(
            "hands out the node's own list",
            edits={"RadixCache._walk": (
                ("        block_ids += child.block_ids",
                 "        block_ids = block_ids + child.block_ids if block_ids"
                 " else child.block_ids"),
            )},
            cause="the list is the node's own, and grows with the node",
            look="is a new list made, or is a node's list handed out?",
        ),
        Mistake(
            "forgets the lock, and looks at the lower half's",
            edits={"RadixCache._split": (
                ("    upper.lock_count = lower.lock_count\n", ""),
                ("if upper.lock_count == 0", "if lower.lock_count == 0"),
            )},
            cause="the upper half has no lock: what a sequence stands on could be evicted",
            look="the lock count of a new node above a locked one",
        ),
        Mistake(
            "cuts the keys, not the blocks",
            edits={"RadixCache._split": (
                ("lower.keys[length:], lower.block_ids[length:]",
                 "lower.keys[length:], lower.block_ids"),
            )},
            cause="a block is named by two nodes",
            look="which blocks does each half keep after a split?",
        ),
        Mistake(
            "leaves the lower half's parent",
            edits={"RadixCache._split": (("    lower.parent = upper\n", ""),)},
            cause="a child's `parent` is not the node that it hangs from",
            look="both directions: `children` of one, `parent` of the other",
        ),
        Mistake(
            "gives the children to the upper half",
            edits={"RadixCache._split": (
                ("upper.children[lower.keys[0]] = lower",
                 "upper.children = lower.children | {lower.keys[0]: lower}\n"
                 "    lower.children = {}"),
            )},
            cause="the children stay with the upper half, but they follow the lower one",
            look="to which half do they belong?",
        ),
        Mistake(
            "forgets the lock",
            edits={"RadixCache._split": (("    upper.lock_count = lower.lock_count\n", ""),)},
            cause="the upper half has no lock: what a sequence stands on could be evicted",
            look="the lock count of a new node above a locked one",
        ),
        Mistake(
            "forgets that the upper half can be evicted",
            edits={"RadixCache._split": (("        self.unlocked[upper] = None", "        pass"),)},
            cause="a node is looked for where it is not: in `unlocked`, or in `children`",
            look="who is in `unlocked`? Under which key does a node stand?",
        ),
        Mistake(
            "makes the old node the upper half",
            sources={"RadixCache._split": '''
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
            cause="the node that was there became the upper half: who locked it now stands on less",
            look="which half keeps its identity? See the docstring",
        ),
    ),
    "07.3": (
        Mistake(
            "holds nothing",
            edits={"RadixCache.insert": (("self.pool.acquire(block_id)", "pass"),)},
            cause="the tree names blocks that it does not hold: once the sequence lets go they "
            "are free, and still in the tree",
            look="one more holder for each block that is new in the tree",
        ),
        Mistake(
            "holds what it does not keep",
            edits={"RadixCache.insert": (
                ("    if new_blocks:\n        for block_id in new_blocks:\n"
                 "            self.pool.acquire(block_id)\n",
                 "    for block_id in block_ids[: len(keys)]:\n"
                 "        self.pool.acquire(block_id)\n    if new_blocks:\n"),
            )},
            cause="the tree acquires blocks that it does not keep: they are never free again",
            look="which of the caller's blocks get into the tree?",
        ),
        Mistake(
            "returns the caller's blocks",
            edits={"RadixCache.insert": (
                ("tree_blocks + new_blocks", "list(block_ids[: len(keys)])"),
            )},
            cause="these are the caller's own blocks, also where the tree has others: the caller "
            "is to give up its copies for the tree's",
            look="what was known already, and under which block?",
        ),
        Mistake(
            "returns the new blocks alone",
            edits={"RadixCache.insert": (("tree_blocks + new_blocks", "new_blocks"),)},
            cause="the blocks that were there are missing",
            look="the whole prefix",
        ),
        Mistake(
            "counts the new ones as those that were there",
            edits={"RadixCache.insert": (
                ("tree_blocks + new_blocks, depth", "tree_blocks + new_blocks, len(new_blocks)"),
            )},
            cause="that is how many are new, not how many were there",
            look="the third result",
        ),
        Mistake(
            "does not count what is cached",
            edits={"RadixCache.insert": (
                ("        self.num_cached_blocks += len(new_blocks)\n", ""),
            )},
            cause="new blocks are not counted",
            look="who changes num_cached_blocks?",
        ),
        Mistake(
            "does not make younger",
            edits={"RadixCache.insert": (("    self._touch(node)\n", ""),)},
            cause="an insert does not make its prefix the most recently used",
            look="`_touch`: when is it called?",
        ),
        Mistake(
            "takes more blocks than there are keys",
            edits={"RadixCache.insert": (("block_ids[depth : len(keys)]", "block_ids[depth:]"),)},
            cause="blocks without whole blocks of tokens get into the tree as well",
            look="how many keys are there?",
        ),
        Mistake(
            "appends all keys once more",
            edits={"RadixCache.insert": (("keys[depth:], new_blocks", "keys, new_blocks"),)},
            cause="a node with no block left stays in the tree",
            look="what becomes of a leaf whose last block is gone?",
        ),
        Mistake(
            "accepts too few blocks",
            edits={"RadixCache.insert": (("if len(block_ids) < len(keys):", "if False:"),)},
            cause="nothing compares the number of blocks with that of the keys",
            look="the first lines of `insert`",
        ),
        Mistake(
            "begins at one root for all",
            edits={"RadixCache.insert": (
                ("self._roots.get(salt)", "self._roots.get(None)"),
                ("self._roots[salt] = Root(salt)", "self._roots[None] = Root(None)"),
            )},
            cause="the salt is ignored: one tenant finds what another has stored",
            look="`self._roots` is a dictionary",
        ),
        Mistake(
            "takes an empty salt for none",
            edits={"RadixCache.insert": (
                ("    root = self._roots.get(salt)\n",
                 "    salt = salt or None\n    root = self._roots.get(salt)\n"),
            )},
            cause="a salt that counts as false, as '' and 0 do, is taken for no salt: tenants meet",
            look="`if salt` and `salt or …`: for which salts?",
        ),
        Mistake(
            "keeps the caller's list",
            edits={"RadixCache.insert": (
                ("list(block_ids[depth : len(keys)])",
                 "block_ids[depth : len(keys)] if depth or block_ids[len(keys) :] else block_ids"),
            )},
            cause="the tree keeps the list that it was given: what the caller does to it later "
            "happens to the tree",
            look="is a new list made, or is the caller's put into a node?",
        ),
        Mistake(
            "evicts from the front",
            edits={"RadixCache.evict": (
                ("leaf.block_ids.pop()", "leaf.block_ids.pop(0)"),
                ("leaf.keys.pop()", "leaf.keys.pop(0)"),
            )},
            cause="the beginning of a prompt goes first: what is left stands on nothing",
            look="which end of the node's lists?",
        ),
        Mistake(
            "evicts whole nodes",
            edits={"RadixCache.evict": (
                ("while leaf.block_ids and gone < num_blocks:", "while leaf.block_ids:"),
            )},
            cause="a whole node goes, where 2 blocks were asked for",
            look="when does the inner loop stop?",
        ),
        Mistake(
            "looks at the number of blocks too late",
            edits={"RadixCache.insert": (
                ("if len(block_ids) < len(keys):", "if False:"),
                ("    new_blocks = list", "    if len(block_ids) < len(keys):\n"
                 "        raise ValueError(len(block_ids))\n    new_blocks = list"),
            )},
            cause="something is changed before the error is raised: a root is made, a node cut, "
            "or used",
            look="what has to be looked at first?",
        ),
        Mistake(
            "counts what is evictable as well",
            edits={"RadixCache.insert": (
                ("+= len(new_blocks)\n",
                 "+= len(new_blocks)\n        self.num_evictable_blocks += len(new_blocks)\n"),
            )},
            cause="they are counted twice: `_append` has counted them already",
            look="which counter is left to `insert`?",
        ),
        Mistake(
            "makes a root for nothing",
            edits={"RadixCache.insert": (
                ("    if not keys:\n", "    if not keys:\n"
                 "        self._roots.setdefault(salt, Root(salt))\n"),
            )},
            cause="a root is made though there is nothing to insert",
            look="when is a root made?",
        ),
        Mistake(
            "evicts the youngest",
            edits={"RadixCache.evict": (
                ("next(iter(self.unlocked))",
                 "next(n for n in reversed(self.unlocked) if not n.children)"),
            )},
            cause="the most recently used goes first",
            look="which end of `unlocked` has the oldest?",
        ),
        Mistake(
            "does not tell the pool",
            edits={"RadixCache.evict": (
                ("self.pool.release(leaf.block_ids.pop())", "leaf.block_ids.pop()"),
            )},
            cause="the tree lets go of blocks, and the pool does not hear of it: they are lost",
            look="who tells the pool?",
        ),
        Mistake(
            "keeps the emptied leaf",
            edits={"RadixCache.evict": (
                ("            self._remove(leaf, key)", "            del self.unlocked[leaf]"),
            )},
            cause="a leaf without blocks stays in the tree",
            look="`_remove` is there for that",
        ),
        Mistake(
            "never stops",
            edits={"RadixCache.evict": (
                ("gone < num_blocks and self.unlocked", "gone < num_blocks"),
            )},
            cause="the loop goes on when nothing unlocked is left",
            look="when must it stop, besides when enough is freed?",
        ),
        Mistake(
            "returns what was asked for",
            edits={"RadixCache.evict": (("return gone", "return num_blocks"),)},
            cause="that is what was asked for, not what went",
            look="what is counted?",
        ),
        Mistake(
            "counts nothing",
            edits={"RadixCache.evict": (
                ("    self.num_cached_blocks -= gone\n", ""),
                ("    self.num_evictable_blocks -= gone\n", ""),
            )},
            cause="the two counters are not told",
            look="the last lines of `evict`",
        ),
        Mistake(
            "forgets what is evictable",
            edits={"RadixCache.evict": (("    self.num_evictable_blocks -= gone\n", ""),)},
            cause="num_evictable_blocks is not told",
            look="the last lines of `evict`",
        ),
        Mistake(
            "frees less than nothing",
            edits={"RadixCache.evict": (("if num_blocks < 0:", "if False:"),)},
            cause="nothing looks at the sign",
            look="the first lines of `evict`",
        ),
        Mistake(
            "takes any unlocked node that was not used for long, and forgets its children",
            sources={"RadixCache.evict": '''
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
            cause="a node goes before what hangs from it: its children stay, and nobody can find "
            "them",
            look="which entry of `unlocked` is always a leaf?",
        ),
    ),
    "07.4": (
        Mistake(
            "hashes each block by itself",
            edits={"chained_hashes": (("sha256(before + repr", "sha256(repr"),)},
            cause="a name is made of its own block's tokens alone: the same block behind another "
            "beginning has other K and V",
            look="what of the block before goes into the hash?",
        ),
        Mistake(
            "hashes a block and the tokens of the one before",
            sources={"chained_hashes": '''
def chained_hashes(token_ids, block_size, salt=None):
    names, before = [], None
    for place, key in enumerate(keys_of(token_ids, block_size)):
        names.append((salt, place, sha256(repr((before, key)).encode()).digest()))
        before = key
    return names
'''},
            cause="only the block before is in a name, not all that came before it",
            look="is it the tokens of the block before that you hash, or its name?",
        ),
        Mistake(
            "leaves the salt out",
            edits={"chained_hashes": (("names.append((salt, before))", "names.append(before)"),)},
            cause="the salt does not reach the names: one tenant's block is found by another",
            look="where does the salt go? Is it handed to `chained_hashes`?",
        ),
        Mistake(
            "takes Python's hash",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()", "hash((before, key))"),
            )},
            cause="Python's hash() of two prompts can be equal; whoever looks for such a pair "
            "finds one, and gets another's blocks",
            look="a name that is made by sha256, or one that has the tokens themselves in it",
        ),
        Mistake(
            "puts the salt into Python's hash, too",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()", "hash((salt, before, key))"),
                ("names.append((salt, before))", "names.append(before)"),
            )},
            cause="Python's hash() of the two is the same",
            look="a name that has the salt itself in it",
        ),
        Mistake(
            "takes two bytes of the hash",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()",
                 "sha256(before + repr(key).encode()).digest()[:2]"),
            )},
            cause="the names are too short: some collide by chance, and whoever looks for two that "
            "do finds them in a second",
            look="how many bytes has a name? sha256 makes 32 of them",
        ),
        Mistake(
            "takes crc32",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()",
                 "__import__('zlib').crc32(repr(key).encode(), before)"),
                ('before = [], b""', "before = [], 0"),
            )},
            cause="the names are too short: some collide by chance, and whoever looks for two that "
            "do finds them in a second",
            look="how many bytes has a name? sha256 makes 32 of them",
        ),
        Mistake(
            "takes the salt's text",
            edits={"chained_hashes": (("names.append((salt, before))",
                                 "names.append((str(salt), before))"),)},
            cause="the salt's text is in the names, and two salts may have the same text",
            look="what has to go into a name, if any two salts are to differ in it?",
        ),
        Mistake(
            "stores before it refuses",
            edits={"ChainedCache.insert": (
                ("if len(block_ids) < len(names):", "if False:"),
                ("zip(names, block_ids, strict=False)",
                 "zip(names, list(block_ids)[:max(len(names), 1)], strict=True)"),
            )},
            cause="blocks are stored before the error is raised",
            look="what has to be looked at first?",
        ),
        Mistake(
            "refuses more blocks than names",
            edits={"ChainedCache.insert": (("len(block_ids) < len(names)",
                                      "len(block_ids) != len(names)"),)},
            cause="more blocks than names are refused, and should be left alone",
            look="what does a sequence hold whose last block is not full?",
        ),
        Mistake(
            "stops at the first block in use",
            edits={"ChainedCache.evict": (
                ("        if self.pool.ref_count(block_id) == 1:\n"
                 "            unused.append(name)\n",
                 "        if self.pool.ref_count(block_id) != 1:\n            break\n"
                 "        unused.append(name)\n"),
            )},
            cause="it stops at the first block that is in use",
            look="who may come behind that one?",
        ),
        Mistake(
            "evicts less than nothing",
            edits={"ChainedCache.evict": (("if num_blocks < 0:", "if False:"),)},
            cause="nothing looks at the sign",
            look="the first lines of `evict`",
        ),
        Mistake(
            "lets tokens run into each other",
            edits={"chained_hashes": (
                ("repr(key).encode()", "''.join(map(str, key)).encode()"),
            )},
            cause="tokens run into each other on the way into the hash",
            look="how are the tokens of a block turned into bytes?",
        ),
        Mistake(
            "names a rest of a block, too",
            sources={"chained_hashes": '''
def chained_hashes(token_ids, block_size, salt=None):
    ends = range(block_size, len(token_ids) + block_size, block_size)
    return [(salt, tuple(token_ids[:end])) for end in ends]
'''},
            cause="a rest of less than a block gets a name, too",
            look="`keys_of` is there",
        ),
        Mistake(
            "walks on behind a gap",
            edits={"ChainedCache.match": (
                ("            break\n", "            continue\n"),
                ("names[: len(block_ids)]", "[n for n in names if n in self.blocks]"),
            )},
            cause="the walk goes on behind a block that is missing: a prefix with a hole is none",
            look="when does `match` stop?",
        ),
        Mistake(
            "makes the beginning the oldest",
            edits={"ChainedCache.match": (("in reversed(names[: len(block_ids)])",
                                     "in names[: len(block_ids)]"),),
             "ChainedCache.insert": (("in reversed(names)", "in names"),)},
            cause="a block goes before those that follow it: they stay, and nobody can find them",
            look="in which order are the blocks of one prompt made the most recently used?",
        ),
        Mistake(
            "does not make younger by a match",
            edits={"ChainedCache.match": (("self.blocks.move_to_end(name)", "pass"),)},
            cause="a match does not make younger",
            look="what `match` changes",
        ),
        Mistake(
            "does not make younger by an insert",
            edits={"ChainedCache.insert": (
                ("in reversed(names):", "in reversed(names[num_existing:]):"),
            )},
            cause="an insert does not make younger",
            look="what `insert` changes",
        ),
        Mistake(
            "exchanges what is known",
            edits={"ChainedCache.insert": (
                ("            num_existing += 1\n",
                 "            num_existing += 1\n            self.pool.acquire(block_id)\n"
                 "            self.pool.release(self.blocks[name])\n"
                 "            self.blocks[name] = block_id\n"),
            )},
            cause="what was known is exchanged for the caller's blocks: others still stand on the"
            " old ones, and the caller was to give up its copies",
            look="whose block stays under a name that is known?",
        ),
        Mistake(
            "holds nothing",
            edits={"ChainedCache.insert": (("            self.pool.acquire(block_id)\n", ""),)},
            cause="the cache names a block that it does not hold, or holds one twice",
            look="who acquires, who releases, and which block has which name?",
        ),
        Mistake(
            "accepts too few blocks",
            edits={"ChainedCache.insert": (("if len(block_ids) < len(names):", "if False:"),)},
            cause="nothing compares the number of blocks with that of the names",
            look="the first lines of `insert`",
        ),
        Mistake(
            "evicts what is in use",
            edits={"ChainedCache.evict": (("self.pool.ref_count(block_id) == 1", "True"),)},
            cause="a block that a running sequence uses is evicted: nothing becomes free, and the"
            " prefix is lost",
            look="the pool knows how many hold a block",
        ),
        Mistake(
            "evicts the youngest",
            edits={"ChainedCache.evict": (
                ("in self.blocks.items()", "in reversed(self.blocks.items())"),
            )},
            cause="a block goes before those that follow it: they stay, and nobody can find them",
            look="in which order are the blocks of one prompt made the most recently used?",
        ),
        Mistake(
            "says nothing",
            edits={"ChainedCache.evict": (("    return len(unused)\n", ""),)},
            cause="nothing is returned",
            look="the last line of `evict`",
        ),
    ),
    "07.5": (
        Mistake(
            "mends only the lock",
            edits={"RadixCache.unlock": (
                ('that is not locked."""\n',
                 'that is not locked."""\n    node = node.parent or node\n'),
            )},
            cause="`unlock` leaves the matched node locked: it can never be evicted again",
            look="with which node does the loop of `unlock` begin?",
        ),
        Mistake(
            "mends only the unlock",
            edits={"RadixCache.lock": (
                ('may be nested."""\n', 'may be nested."""\n    node = node.parent or node\n'),
            )},
            cause="`lock` does not cover the node that was matched, where the sequence stands",
            look="with which node does the loop of `lock` begin?",
        ),
        Mistake(
            "locks the node alone",
            edits={"RadixCache.lock": (("    while node.parent", "    if node.parent"),
                                 ("        node = node.parent\n", "")),
             "RadixCache.unlock": (("    while node.parent", "    if node.parent"),
                                   ("        node = node.parent\n", ""))},
            cause="only the node itself is locked, not what it stands on",
            look="does the loop of `lock` go through all nodes, up to the child of the root?",
        ),
        Mistake(
            "unlocks the node alone",
            edits={"RadixCache.unlock": (("    while node.parent", "    if node.parent"),
                                   ("        node = node.parent\n", ""))},
            cause="`unlock` does not go up: what the node stands on is locked for ever",
            look="does the loop of `unlock` go up to the root?",
        ),
        Mistake(
            "does not count locks",
            edits={"RadixCache.lock": (("node.lock_count += 1", "node.lock_count = 1"),),
             "RadixCache.unlock": (("node.lock_count -= 1", "node.lock_count = 0"),
                                   ("if node.parent is not None and node.lock_count == 0:",
                                    "if node.parent is not None and node.lock_count < 0:"))},
            cause="locks are not counted: the first unlock ends all of them",
            look="two requests may stand on one node",
        ),
        Mistake(
            "does not keep the number",
            edits={"RadixCache.lock": (
                ("            self.num_evictable_blocks -= len(node.block_ids)\n", ""),
             ),
             "RadixCache.unlock": (
                ("            self.num_evictable_blocks += len(node.block_ids)\n", ""),
             )},
            cause="the number is not kept",
            look="what `lock` does with the counter",
        ),
        Mistake(
            "subtracts with every lock",
            edits={"RadixCache.lock": (
                ("            del self.unlocked[node]\n"
                 "            self.num_evictable_blocks -= len(node.block_ids)\n",
                 "            del self.unlocked[node]\n"
                 "        self.num_evictable_blocks -= len(node.block_ids)\n"),
            )},
            cause="blocks that two requests stand on are subtracted twice",
            look="when does a node stop being evictable?",
        ),
        Mistake(
            "gives nothing back",
            edits={"RadixCache.unlock": (
                ("            self.unlocked[node] = None\n"
                 "            self.num_evictable_blocks += len(node.block_ids)\n",
                 "            pass\n"),
            )},
            cause="`unlock` gives nothing back",
            look="when does a node become evictable again?",
        ),
        Mistake(
            "unlocks from the root down",
            sources={"RadixCache.unlock": '''
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
            cause="nodes are unlocked from the root down, so eviction would take a parent first",
            look="in which order do the node and its ancestors get into `unlocked`?",
        ),
        Mistake(
            "locks the root",
            edits={"RadixCache.lock": (
                ("while node.parent is not None:", "while node is not None:"),
            )},
            cause="the root is never locked, nor unlocked",
            look="where does the loop stop?",
        ),
        Mistake(
            "accepts one unlock too many",
            edits={"RadixCache.unlock": (
                ("if node.parent is not None and node.lock_count == 0:", "if False:"),
            )},
            cause="nothing refuses to unlock a node that is not locked",
            look="which node's lock_count is compared with 0?",
        ),
    ),
    "07.6": (
        Mistake(
            "still gives its copies away",
            edits={"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.release(table.block_ids[index])"),
            )},
            cause="our own copies are given back, and the table goes on naming them",
            look="`share_full_blocks`: the loop over the blocks that are new in the tree",
        ),
        Mistake(
            "keeps its copies",
            edits={"Scheduler.share_full_blocks": (
                ("            table.replace(index, result.block_ids[index])\n", ""),
            )},
            cause="a table goes on with its own copies, though the tree has the same blocks",
            look="`share_full_blocks`: the loop over the blocks that are new in the tree",
        ),
        Mistake(
            "never releases its copies",
            edits={"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.acquire(result.block_ids[index])\n"
                 "            table.block_ids[index] = result.block_ids[index]"),
            )},
            cause="the copies that were replaced are never released",
            look="`replace` acquires and releases by itself",
        ),
        Mistake(
            "does not hold what it takes over",
            edits={"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.release(table.block_ids[index])\n"
                 "            table.block_ids[index] = result.block_ids[index]"),
            )},
            cause="a block lost a holder that is still there",
            look="`replace` acquires and releases by itself",
        ),
        Mistake(
            "does not say that the table has changed",
            edits={"Scheduler.share_full_blocks": (
                ("            sequence.table_version += 1\n", ""),
            )},
            cause="the next step still reads the blocks that were given back: nobody told the "
            "batch builder that the table has changed",
            look="`sequence.table_version`",
        ),
        Mistake(
            "asks for the prompt alone",
            edits={"Scheduler.look_up": (("sequence.token_ids[:-1]",
                                    "sequence.request.prompt_ids[:-1]"),)},
            cause="only the prompt is looked up, and what it has said itself is computed again",
            look="`request.prompt_ids` or `sequence.token_ids`?",
        ),
        Mistake(
            "cuts the hit, and not its node",
            edits={"Scheduler.look_up": (
                ("sequence.token_ids[:-1]", "sequence.token_ids"),
                ("    return match if", "    if match.num_tokens == len(sequence.token_ids):\n"
                 "        size = self.config.block_size\n"
                 "        match = MatchResult(\n"
                 "            match.node, match.block_ids[:-1], match.num_tokens - size)\n"
                 "    return match if"),
            )},
            cause="the hit is cut and its node is not: the lock holds more than the hit",
            look="can the cache be asked for what you want?",
        ),
        Mistake(
            "leaves nothing to compute",
            edits={"Scheduler.look_up": (("sequence.token_ids[:-1]", "sequence.token_ids"),)},
            cause="with a hit on every token there is nothing left to compute, so no logits, and "
            "no first token",
            look="`look_up`: what it asks the cache for, and when",
        ),
        Mistake(
            "leaves a whole block to compute, always",
            edits={"Scheduler.look_up": (
                ("sequence.token_ids[:-1]", "sequence.token_ids[: -self.config.block_size]"),
            )},
            cause="a whole block is left to compute, though the hit ends before the last token",
            look="how many tokens must be left?",
        ),
        Mistake(
            "refuses full hits",
            edits={"Scheduler.look_up": (
                ("match = self.cache.match(sequence.token_ids[:-1],",
                 "match = self.cache.match(sequence.token_ids,"),
                ("return match if", "if match.num_tokens == len(sequence.token_ids):\n"
                 "        return None\n    return match if"),
            )},
            cause="a full hit is no hit at all any more",
            look="one token must be left",
        ),
        Mistake(
            "remembers what it found",
            edits={"Scheduler.look_up": (
                ("    match = self.cache.match(sequence.token_ids[:-1], "
                 "sequence.request.params.cache_salt)\n",
                 "    found = vars(self).setdefault('found', {})\n"
                 "    if sequence not in found:\n"
                 "        found[sequence] = self.cache.match(\n"
                 "            sequence.token_ids[:-1], sequence.request.params.cache_salt)\n"
                 "    match = found[sequence]\n"),
            )},
            cause="what was found at an earlier attempt is used again: its blocks were evicted "
            "since, and may be somebody else's by now",
            look="`look_up`: what it asks the cache for, and when",
        ),
        Mistake(
            "remembers what it found for the same tokens",
            edits={"Scheduler.look_up": (
                ("    match = self.cache.match(sequence.token_ids[:-1], "
                 "sequence.request.params.cache_salt)\n",
                 "    found = vars(self).setdefault('found', {})\n"
                 "    asked = tuple(sequence.token_ids[:-1]), sequence.request.params.cache_salt\n"
                 "    match = found[asked] = found.get(asked) or self.cache.match(*asked)\n"),
            )},
            cause="what was found at an earlier attempt is used again: its blocks were evicted "
            "since, and may be somebody else's by now",
            look="`look_up`: what it asks the cache for, and when",
        ),
        Mistake(
            "forgets the salt",
            edits={"Scheduler.look_up": ((", sequence.request.params.cache_salt", ""),)},
            cause="the salt is left out: what a tenant stored under its salt it does not find",
            look="`sequence.request.params.cache_salt`",
        ),
        Mistake(
            "forgets the threshold",
            edits={"Scheduler.look_up": (("max(1, self.config.min_prefix_tokens)", "1"),)},
            cause="the threshold is gone: every hit is used",
            look="`min_prefix_tokens`",
        ),
        Mistake(
            "looks up what is on the host",
            edits={"Scheduler.look_up": ((" or sequence.host_block_ids is not None", ""),)},
            cause="its keys and values come back from the host, all of them, into blocks of its "
            "own; a hit would have them written to blocks that others read",
            look="the first lines of `look_up`",
        ),
    ),
    "07.7": (
        Mistake(
            "never shares what decodes fill",
            edits={"Engine.append": ((SHARES, ""),)},
            cause="blocks that a decode fills are never shared: the next turn of a chat computes "
            "the last answer again",
            look="`share_full_blocks`",
        ),
        Mistake(
            "shares after finishing",
            edits={"Engine.append": (
                (SHARES, ""),
                (BY_LENGTH, BY_LENGTH + SHARES.replace(" and sequence.table is not None", "")),
            )},
            cause="a finished sequence has no table left when its last block is shared",
            look="the order of sharing and finishing",
        ),
        Mistake(
            "never stops before all tokens are there",
            edits={"Engine.append": (
                (f"token_id in request.stop_ids{OR_A_STRING}", "False"),
            )},
            cause="nothing stops a sequence but its length",
            look="`stop_ids` and `hits_stop_string`",
        ),
        Mistake(
            "knows stop tokens alone",
            edits={"Engine.append": ((OR_A_STRING, ""),)},
            cause="a stop string is not looked for",
            look="`hits_stop_string`",
        ),
        Mistake(
            "knows stop strings alone",
            edits={"Engine.append": (
                ("token_id in request.stop_ids or (", "("),
            )},
            cause="a stop token is not looked for; the end token of the model is one, too",
            look="`stop_ids`",
        ),
        Mistake(
            "measures the new tokens alone",
            edits={"Engine.append": (
                ("len(sequence.token_ids) == request.max_length",
                 "sequence.num_output == request.max_length"),
            )},
            cause="a sequence that has `max_length` tokens, prompt included, goes on",
            look="the comparison with `max_length`, and what it counts",
        ),
        Mistake(
            "one token too many",
            edits={"Engine.append": (
                ("len(sequence.token_ids) == request.max_length",
                 "len(sequence.token_ids) > request.max_length"),
            )},
            cause="a sequence that has `max_length` tokens, prompt included, goes on",
            look="the comparison with `max_length`, and what it counts",
        ),
        Mistake(
            "finishes twice",
            edits={"Engine.append": (("elif len(", "if len("),)},
            cause="a sequence whose last token is a stop token, too, is finished twice",
            look="can both reasons be true?",
        ),
        Mistake(
            "an output for each token",
            edits={"Engine.append": (("for request in moved]",
                                      "for request in [one.request for one in sequences]]"),)},
            cause="a request with several samples comes back once for each of them",
            look="what `append` returns",
        ),
        Mistake(
            "counts a step as one token",
            edits={"Engine.append": (("+= len(sequences)", "+= 1"),)},
            cause="`_generated` counts steps and not tokens",
            look="`self._generated`",
        ),
        Mistake(
            "commits before it runs",
            edits={"Loop.step": (
                ("    token_ids = engine.runner.run(plan)\n"
                 "    return engine.append(engine.scheduler.commit(plan), token_ids)",
                 "    ready = engine.scheduler.commit(plan)\n"
                 "    return engine.append(ready, engine.runner.run(plan))"),
            )},
            cause="the plan is counted as computed before it is: the runner begins too late in "
            "every sequence",
            look="the order of `run` and `commit`",
        ),
        Mistake(
            "never commits",
            edits={"Loop.step": (("engine.scheduler.commit(plan)", "plan.sequences"),)},
            cause="nothing is counted as computed, so the next step computes the same again",
            look="`commit`: what does it count, and what does it return?",
        ),
        Mistake(
            "gives the tokens to the whole plan",
            edits={"Loop.step": (
                ("engine.append(engine.scheduler.commit(plan), token_ids)",
                 "(engine.scheduler.commit(plan), engine.append(plan.sequences, token_ids))[1]"),
            )},
            cause="not every sequence of a plan gets a token: a chunk in the middle of a prompt "
            "gets none, and samples that fork get one each",
            look="what `commit` returns",
        ),
        Mistake(
            "an empty plan is a step like any other",
            edits={"Loop.step": (("        raise RuntimeError(why_stuck(engine.scheduler))",
                                  "        return []"),)},
            cause="nothing can run, and nobody is told: `generate` asks forever",
            look="a plan without sequences",
        ),
        Mistake(
            "keeps its blocks",
            edits={"Engine._finish": (("    self.scheduler.remove(sequence)\n", ""),)},
            cause="a finished sequence stays in the scheduler, with its blocks",
            look="`_finish`: who frees the blocks?",
        ),
        Mistake(
            "done with the first sample",
            edits={"Engine._finish": (("if all(", "if any("),)},
            cause="a request leaves with its first finished sample, though others still run",
            look="`_finish`: when is a request done?",
        ),
        Mistake(
            "the request stays",
            edits={"Engine._finish": (
                ("    if all(sequence.finish_reason for sequence in request.sequences):\n"
                 "        del self._requests[request.request_id]\n", ""),
            )},
            cause="a request whose sequences are all finished is still among the unfinished",
            look="`self._requests`",
        ),
        Mistake(
            "forgets the reason",
            edits={"Engine._finish": (("    sequence.finish_reason = reason\n", ""),)},
            cause="a finished sequence has no `finish_reason`, so its request is never done",
            look="`finish_reason`",
        ),
    ),
}  # fmt: skip
