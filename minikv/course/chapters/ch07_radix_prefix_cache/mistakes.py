"""Chapter 07: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake

SHARES = (
    "        if filled and sequence.table is not None:\n"
    "            self.scheduler.share_full_blocks(sequence)\n"
)
REMOVES = (
    "            self.scheduler.remove(sequence)\n"
    "            if all(sequence.finish_reason for sequence in request.sequences):\n"
    "                del self._requests[request.request_id]\n"
)
OR_A_STRING = (
    " or (\n        request.longest_stop > 0 and hits_stop_string(sequence, self.lm.decode)\n    )"
)

MISTAKES = {
    "07.1": (
        Mistake(
            "nothing, if anything is missing",
            edits={"BlockTrie.match": (("            break\n", "            return []\n"),)},
            cause="one missing block makes the whole answer empty",
            look="if the first blocks were found, what is the answer when the next one is missing?",
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
            cause="where several prompts continue differently, the walk so far is forgotten",
            look="a node with many children is a node that many prompts share",
        ),
        Mistake(
            "skips only what is missing",
            edits={"BlockTrie.match": (("            break\n", "            continue\n"),)},
            cause="the walk continues after a missing block, and finds a block from another place",
            look="K and V depend on everything before them: can a later block still be right?",
        ),
        Mistake(
            "leaves the last one out",
            edits={"BlockTrie.match": (("return block_ids", "return block_ids[:-1]"),)},
            cause="the last matched block is left out",
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
            look="what has been found when there is no next block?",
        ),
    ),
    "07.2": (
        Mistake(
            "compares the first key alone",
            edits={"RadixCache._walk": (
                (" and child.keys[length] == keys[depth + length]", ""),
            )},
            cause="a node counts as matched as soon as its first block agrees, so the hit "
                  "contains another prompt's blocks",
            look="every key of a node has to be compared, one after the other",
        ),
        Mistake(
            "compares beyond the end of the prompt",
            edits={"RadixCache._walk": (
                ("min(len(child.keys), len(keys) - depth)", "len(child.keys)"),
            )},
            cause="it reads beyond the end of a list: the prompt is shorter than the node",
            look="which is shorter, the rest of the prompt or the node's keys?",
        ),
        Mistake(
            "leaves out a node that agrees in part",
            edits={"RadixCache._walk": (
                ("            child = self._split(child, length)\n", "            break\n"),
            )},
            cause="a node that agrees only in part is left out",
            look="how many of its keys agree? These blocks are part of the hit",
        ),
        Mistake(
            "does not split",
            edits={"RadixCache._walk": (
                ("            child = self._split(child, length)\n        node = child",
                 "            return child, depth + length, block_ids + child.block_ids[:length]\n"
                 "        node = child"),
            )},
            cause="the node continues after the match, so a lock on it would hold too much",
            look="if a match ends inside a node, the node has to be split there",
        ),
        Mistake(
            "stops after one node",
            edits={"RadixCache._walk": (("    while depth", "    if depth"),)},
            cause="the walk stops after one node",
            look="when must the loop continue?",
        ),
        Mistake(
            "returns the node above",
            edits={"RadixCache._walk": (
                ("return node, depth", "return node.parent or node, depth"),
            )},
            cause="the node is one above the end of the match, or the root",
            look="the first result: at which node does the walk stop?",
        ),
        Mistake(
            "counts one block per node",
            edits={"RadixCache._walk": (("return node, depth", "return node, min(depth, 1)"),)},
            cause="only one block per node is counted",
            look="by how many blocks does the depth grow with each node?",
        ),
        Mistake(
            "walks on in the lower half",
            edits={"RadixCache._walk": (
                ("child = self._split(child, length)", "self._split(child, length)"),
            )},
            cause="after the split the walk continues with the lower half, which does not agree",
            look="what does `_split` return?",
        ),
        Mistake(
            "attaches the upper half nowhere",
            edits={"RadixCache._split": (
                ("    upper.parent.children[upper.keys[0]] = upper\n", ""),
            )},
            cause="the parent's `children` still lead to the old node, which is now the lower half",
            look="which node's `children` must contain the upper half?",
        ),
        Mistake(
            "loses the lower half",
            edits={"RadixCache._split": (("    upper.children[lower.keys[0]] = lower\n", ""),)},
            cause="everything below the split is lost",
            look="what are the children of the upper half?",
        ),
        Mistake(
            "leaves all keys in the lower half",
            edits={"RadixCache._split": (
                ("    lower.keys, lower.block_ids = lower.keys[length:], "
                 "lower.block_ids[length:]\n", ""),
                ("upper.children[lower.keys[0]]", "upper.children[lower.keys[length]]"),
            )},
            cause="the lower half keeps all keys, including those of the upper half",
            look="`keys` and `block_ids` of the lower half",
        ),
        Mistake(
            "hands out the node's own list",
            edits={"RadixCache._walk": (
                ("        block_ids += child.block_ids",
                 "        block_ids = block_ids + child.block_ids if block_ids"
                 " else child.block_ids"),
            )},
            cause="the returned list is the node's own, and changes with the node",
            look="does it return a new list, or a node's own list?",
        ),
        Mistake(
            "forgets the lock, and looks at the lower half's",
            edits={"RadixCache._split": (
                ("    upper.lock_count = lower.lock_count\n", ""),
                ("if upper.lock_count == 0", "if lower.lock_count == 0"),
            )},
            cause="the upper half is not locked, so blocks in use could be evicted",
            look="what is the lock count of a new node above a locked one?",
        ),
        Mistake(
            "splits the keys, not the blocks",
            edits={"RadixCache._split": (
                ("lower.keys[length:], lower.block_ids[length:]",
                 "lower.keys[length:], lower.block_ids"),
            )},
            cause="one block is in two nodes",
            look="which blocks does each half keep after a split?",
        ),
        Mistake(
            "leaves the lower half's parent",
            edits={"RadixCache._split": (("    lower.parent = upper\n", ""),)},
            cause="a child's `parent` is not the node whose child it is",
            look="check both directions: `children` of one, `parent` of the other",
        ),
        Mistake(
            "gives the children to the upper half",
            edits={"RadixCache._split": (
                ("upper.children[lower.keys[0]] = lower",
                 "upper.children = lower.children | {lower.keys[0]: lower}\n"
                 "    lower.children = {}"),
            )},
            cause="the children stay with the upper half, but they belong below the lower one",
            look="which half's tokens come directly before the children's?",
        ),
        Mistake(
            "forgets the lock",
            edits={"RadixCache._split": (("    upper.lock_count = lower.lock_count\n", ""),)},
            cause="the upper half is not locked, so blocks in use could be evicted",
            look="what is the lock count of a new node above a locked one?",
        ),
        Mistake(
            "forgets that the upper half can be evicted",
            edits={"RadixCache._split": (("        self.unlocked[upper] = None", "        pass"),)},
            cause="a node is missing in `unlocked`, or is in `children` under another key",
            look="which nodes belong in `unlocked`? Under which key is a node in `children`?",
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
            cause="the old node became the upper half, so the locks that requests have on it now "
                  "cover less",
            look="which half keeps its identity? See the docstring",
        ),
    ),
    "07.3": (
        Mistake(
            "holds nothing",
            edits={"RadixCache.insert": (("self.pool.acquire(block_id)", "pass"),)},
            cause="the tree names blocks that it does not hold: when the sequence releases them, "
                  "they are free and still in the tree",
            look="each new block in the tree needs one more holder",
        ),
        Mistake(
            "holds what it does not keep",
            edits={"RadixCache.insert": (
                ("    if new_blocks:\n        for block_id in new_blocks:\n"
                 "            self.pool.acquire(block_id)\n",
                 "    for block_id in block_ids[: len(keys)]:\n"
                 "        self.pool.acquire(block_id)\n    if new_blocks:\n"),
            )},
            cause="the tree acquires blocks that it does not keep, so they are never free again",
            look="which of the caller's blocks become part of the tree?",
        ),
        Mistake(
            "returns the caller's blocks",
            edits={"RadixCache.insert": (
                ("tree_blocks + new_blocks", "list(block_ids[: len(keys)])"),
            )},
            cause="the result names the caller's own blocks, even where the tree has others; the "
                  "caller must replace its copies with the tree's",
            look="which part was known already, and in which blocks?",
        ),
        Mistake(
            "returns the new blocks alone",
            edits={"RadixCache.insert": (("tree_blocks + new_blocks", "new_blocks"),)},
            cause="the blocks that existed before are missing in the result",
            look="the result describes the whole prefix",
        ),
        Mistake(
            "counts the new ones as those that were there",
            edits={"RadixCache.insert": (
                ("tree_blocks + new_blocks, depth", "tree_blocks + new_blocks, len(new_blocks)"),
            )},
            cause="that is the number of new blocks, not of existing ones",
            look="the third result",
        ),
        Mistake(
            "does not count what is cached",
            edits={"RadixCache.insert": (
                ("        self.num_cached_blocks += len(new_blocks)\n", ""),
            )},
            cause="new blocks are not counted",
            look="where does `num_cached_blocks` change?",
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
            cause="blocks for which there is no whole block of tokens get into the tree",
            look="how many keys are there?",
        ),
        Mistake(
            "appends all keys once more",
            edits={"RadixCache.insert": (("keys[depth:], new_blocks", "keys, new_blocks"),)},
            cause="keys and blocks of a node do not have the same length, so a node without "
                  "blocks stays in the tree",
            look="which keys belong to the new blocks?",
        ),
        Mistake(
            "accepts too few blocks",
            edits={"RadixCache.insert": (("if len(block_ids) < len(keys):", "if False:"),)},
            cause="the number of blocks is never compared with the number of keys",
            look="the first lines of `insert`",
        ),
        Mistake(
            "begins at one root for all",
            edits={"RadixCache.insert": (
                ("self._roots.get(salt)", "self._roots.get(None)"),
                ("self._roots[salt] = Root(salt)", "self._roots[None] = Root(None)"),
            )},
            cause="the salt is ignored: one customer finds what another has stored",
            look="`self._roots` is a dictionary",
        ),
        Mistake(
            "takes an empty salt for none",
            edits={"RadixCache.insert": (
                ("    root = self._roots.get(salt)\n",
                 "    salt = salt or None\n    root = self._roots.get(salt)\n"),
            )},
            cause="a salt that counts as false, such as '' or 0, is treated as no salt, so "
                  "customers share a tree",
            look="`if salt` and `salt or …`: for which salts are they false?",
        ),
        Mistake(
            "keeps the caller's list",
            edits={"RadixCache.insert": (
                ("list(block_ids[depth : len(keys)])",
                 "block_ids[depth : len(keys)] if depth or block_ids[len(keys) :] else block_ids"),
            )},
            cause="the tree keeps the caller's list: when the caller changes it, the tree changes "
                  "as well",
            look="does the node get a new list, or the caller's?",
        ),
        Mistake(
            "evicts from the front",
            edits={"RadixCache.evict": (
                ("leaf.block_ids.pop()", "leaf.block_ids.pop(0)"),
                ("leaf.keys.pop()", "leaf.keys.pop(0)"),
            )},
            cause="the beginning of a prompt is evicted first, and what is left can't be found",
            look="from which end of the node's lists?",
        ),
        Mistake(
            "evicts whole nodes",
            edits={"RadixCache.evict": (
                ("while leaf.block_ids and gone < num_blocks:", "while leaf.block_ids:"),
            )},
            cause="a whole node is evicted, though fewer blocks were asked for",
            look="when does the inner loop stop?",
        ),
        Mistake(
            "looks at the number of blocks too late",
            edits={"RadixCache.insert": (
                ("if len(block_ids) < len(keys):", "if False:"),
                ("    new_blocks = list", "    if len(block_ids) < len(keys):\n"
                 "        raise ValueError(len(block_ids))\n    new_blocks = list"),
            )},
            cause="something changes before the error is raised: a root is made, a node is split "
                  "or touched",
            look="what has to be checked first?",
        ),
        Mistake(
            "counts what is evictable as well",
            edits={"RadixCache.insert": (
                ("+= len(new_blocks)\n",
                 "+= len(new_blocks)\n        self.num_evictable_blocks += len(new_blocks)\n"),
            )},
            cause="the new blocks are counted as evictable twice: `_append` has counted them "
                  "already",
            look="which counter does `insert` have to change?",
        ),
        Mistake(
            "makes a root for nothing",
            edits={"RadixCache.insert": (
                ("    if not keys:\n", "    if not keys:\n"
                 "        self._roots.setdefault(salt, Root(salt))\n"),
            )},
            cause="a root is made although there is nothing to insert",
            look="when is a root made?",
        ),
        Mistake(
            "evicts the youngest",
            edits={"RadixCache.evict": (
                ("next(iter(self.unlocked))",
                 "next(n for n in reversed(self.unlocked) if not n.children)"),
            )},
            cause="the most recently used leaf goes first",
            look="at which end of `unlocked` is the oldest?",
        ),
        Mistake(
            "does not tell the pool",
            edits={"RadixCache.evict": (
                ("self.pool.release(leaf.block_ids.pop())", "leaf.block_ids.pop()"),
            )},
            cause="the tree drops blocks without releasing them in the pool, so they are lost",
            look="which call releases a block in the pool?",
        ),
        Mistake(
            "keeps the emptied leaf",
            edits={"RadixCache.evict": (
                ("            self._remove(leaf, key)", "            del self.unlocked[leaf]"),
            )},
            cause="a leaf without blocks stays in the tree",
            look="`_remove` does that",
        ),
        Mistake(
            "never stops",
            edits={"RadixCache.evict": (
                ("gone < num_blocks and self.unlocked", "gone < num_blocks"),
            )},
            cause="the loop continues when nothing unlocked is left",
            look="when must it stop, besides when enough is released?",
        ),
        Mistake(
            "returns what was asked for",
            edits={"RadixCache.evict": (("return gone", "return num_blocks"),)},
            cause="the number asked for is returned, not the number released",
            look="which number is counted?",
        ),
        Mistake(
            "counts nothing",
            edits={"RadixCache.evict": (
                ("    self.num_cached_blocks -= gone\n", ""),
                ("    self.num_evictable_blocks -= gone\n", ""),
            )},
            cause="the two counters are not updated",
            look="the last lines of `evict`",
        ),
        Mistake(
            "forgets what is evictable",
            edits={"RadixCache.evict": (("    self.num_evictable_blocks -= gone\n", ""),)},
            cause="`num_evictable_blocks` is not updated",
            look="the last lines of `evict`",
        ),
        Mistake(
            "frees less than nothing",
            edits={"RadixCache.evict": (('require_int("num_blocks", num_blocks, 0)', "pass"),)},
            cause="negative numbers are not refused",
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
            cause="a node is evicted before its children, which stay and can't be found any more",
            look="which entry of `unlocked` is always a leaf?",
        ),
    ),
    "07.4": (
        Mistake(
            "hashes each block by itself",
            edits={"chained_hashes": (("sha256(before + repr", "sha256(repr"),)},
            cause="a name depends only on its own block's tokens, but after another beginning the "
                  "same block has other K and V",
            look="what must go into the hash besides the block's own tokens?",
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
            cause="a name depends only on the block before, not on everything before it",
            look="do you hash the tokens of the block before, or its name?",
        ),
        Mistake(
            "leaves the salt out",
            edits={"chained_hashes": (("names.append((salt, before))", "names.append(before)"),)},
            cause="the salt is not part of the names: one customer finds another's blocks",
            look="where does the salt go? Is it passed to `chained_hashes`?",
        ),
        Mistake(
            "takes Python's hash",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()", "hash((before, key))"),
            )},
            cause="Python's hash() of two prompts can be equal; an attacker can find such a pair, "
                  "and gets another request's blocks",
            look="use a name made by sha256, or one that contains the tokens themselves",
        ),
        Mistake(
            "puts the salt into Python's hash as well",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()", "hash((salt, before, key))"),
                ("names.append((salt, before))", "names.append(before)"),
            )},
            cause="Python's hash() of two different salts or prompts can be the same",
            look="use a name that contains the salt itself",
        ),
        Mistake(
            "takes two bytes of the hash",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()",
                 "sha256(before + repr(key).encode()).digest()[:2]"),
            )},
            cause="the names are too short: some collide by chance, and a collision can be found "
                  "within seconds",
            look="how many bytes does a name have? sha256 makes 32",
        ),
        Mistake(
            "takes crc32",
            edits={"chained_hashes": (
                ("sha256(before + repr(key).encode()).digest()",
                 "__import__('zlib').crc32(repr(key).encode(), before)"),
                ('before = [], b""', "before = [], 0"),
            )},
            cause="the names are too short: some collide by chance, and a collision can be found "
                  "within seconds",
            look="how many bytes does a name have? sha256 makes 32",
        ),
        Mistake(
            "takes the salt's text",
            edits={"chained_hashes": (("names.append((salt, before))",
                                 "names.append((str(salt), before))"),)},
            cause="the names contain only the salt's text, and two salts may have the same text",
            look="what must a name contain, so that any two salts give different names?",
        ),
        Mistake(
            "stores before it refuses",
            edits={"ChainedCache.insert": (
                ("if len(block_ids) < len(names):", "if False:"),
                ("zip(names, block_ids, strict=False)",
                 "zip(names, list(block_ids)[:max(len(names), 1)], strict=True)"),
            )},
            cause="blocks are stored before the error is raised",
            look="what has to be checked first?",
        ),
        Mistake(
            "refuses more blocks than names",
            edits={"ChainedCache.insert": (("len(block_ids) < len(names)",
                                      "len(block_ids) != len(names)"),)},
            cause="more blocks than names are refused, but the surplus should be ignored",
            look="how many blocks does a sequence hold if its last one is not full?",
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
            look="which blocks may come after that one?",
        ),
        Mistake(
            "evicts less than nothing",
            edits={"ChainedCache.evict": (("if num_blocks < 0:", "if False:"),)},
            cause="negative numbers are not refused",
            look="the first lines of `evict`",
        ),
        Mistake(
            "lets tokens run into each other",
            edits={"chained_hashes": (
                ("repr(key).encode()", "''.join(map(str, key)).encode()"),
            )},
            cause="the tokens are joined without a separator: 1, 23 and 12, 3 look the same",
            look="how are the tokens of a block turned into bytes?",
        ),
        Mistake(
            "names an incomplete block, too",
            sources={"chained_hashes": '''
def chained_hashes(token_ids, block_size, salt=None):
    ends = range(block_size, len(token_ids) + block_size, block_size)
    return [(salt, tuple(token_ids[:end])) for end in ends]
'''},
            cause="an incomplete block gets a name, too",
            look="`keys_of` gives the whole blocks",
        ),
        Mistake(
            "continues after a gap",
            edits={"ChainedCache.match": (
                ("            break\n", "            continue\n"),
                ("names[: len(block_ids)]", "[n for n in names if n in self.blocks]"),
            )},
            cause="the lookup continues after a missing block, but a prefix has no gaps",
            look="when does `match` stop?",
        ),
        Mistake(
            "makes the beginning the oldest",
            edits={"ChainedCache.match": (("in reversed(names[: len(block_ids)])",
                                     "in names[: len(block_ids)]"),),
             "ChainedCache.insert": (("in reversed(names)", "in names"),)},
            cause="a block is evicted before those that follow it, which stay and can't be found "
                  "any more",
            look="in which order do the blocks of one prompt become the most recently used?",
        ),
        Mistake(
            "a match does not count as a use",
            edits={"ChainedCache.match": (("self.blocks.move_to_end(name)", "pass"),)},
            cause="a match does not make its blocks the most recently used",
            look="what must `match` change?",
        ),
        Mistake(
            "an insert does not count as a use",
            edits={"ChainedCache.insert": (
                ("in reversed(names):", "in reversed(names[num_existing:]):"),
            )},
            cause="an insert does not make its known blocks the most recently used",
            look="what must `insert` change?",
        ),
        Mistake(
            "replaces what is known",
            edits={"ChainedCache.insert": (
                ("            num_existing += 1\n",
                 "            num_existing += 1\n            self.pool.acquire(block_id)\n"
                 "            self.pool.release(self.blocks[name])\n"
                 "            self.blocks[name] = block_id\n"),
            )},
            cause="known blocks are replaced by the caller's, though others still use the old "
                  "ones; the caller should give up its copies instead",
            look="which block stays under a known name?",
        ),
        Mistake(
            "holds nothing",
            edits={"ChainedCache.insert": (("            self.pool.acquire(block_id)\n", ""),)},
            cause="the cache names a block that it does not hold, or holds one twice",
            look="for each new name: which block is acquired, and which one is stored?",
        ),
        Mistake(
            "accepts too few blocks",
            edits={"ChainedCache.insert": (("if len(block_ids) < len(names):", "if False:"),)},
            cause="the number of blocks is never compared with the number of names",
            look="the first lines of `insert`",
        ),
        Mistake(
            "evicts what is in use",
            edits={"ChainedCache.evict": (("self.pool.ref_count(block_id) == 1", "True"),)},
            cause="a block is evicted that a running sequence uses: nothing becomes free, and the "
                  "prefix is lost",
            look="the pool knows how many holders a block has",
        ),
        Mistake(
            "evicts the youngest",
            edits={"ChainedCache.evict": (
                ("in self.blocks.items()", "in reversed(self.blocks.items())"),
            )},
            cause="a block is evicted before those that follow it, which stay and can't be found "
                  "any more",
            look="in which order do the blocks of one prompt become the most recently used?",
        ),
        Mistake(
            "returns nothing",
            edits={"ChainedCache.evict": (("    return len(unused)\n", ""),)},
            cause="nothing is returned",
            look="the last line of `evict`",
        ),
    ),
    "07.5": (
        Mistake(
            "fixes only the lock",
            edits={"RadixCache.unlock": (
                ('that is not locked."""\n',
                 'that is not locked."""\n    node = node.parent or node\n'),
            )},
            cause="`unlock` leaves the matched node locked: it can never be evicted again",
            look="with which node does the loop of `unlock` begin?",
        ),
        Mistake(
            "fixes only the unlock",
            edits={"RadixCache.lock": (
                ('may be nested."""\n', 'may be nested."""\n    node = node.parent or node\n'),
            )},
            cause="`lock` does not cover the matched node itself",
            look="with which node does the loop of `lock` begin?",
        ),
        Mistake(
            "locks the node alone",
            edits={"RadixCache.lock": (("    while node.parent", "    if node.parent"),
                                 ("        node = node.parent\n", "")),
             "RadixCache.unlock": (("    while node.parent", "    if node.parent"),
                                   ("        node = node.parent\n", ""))},
            cause="only the node itself is locked, not its ancestors",
            look="does the loop of `lock` visit all nodes up to the child of the root?",
        ),
        Mistake(
            "unlocks the node alone",
            edits={"RadixCache.unlock": (("    while node.parent", "    if node.parent"),
                                   ("        node = node.parent\n", ""))},
            cause="`unlock` does not go up, so the node's ancestors stay locked for ever",
            look="does the loop of `unlock` go up to the root?",
        ),
        Mistake(
            "does not count locks",
            edits={"RadixCache.lock": (("node.lock_count += 1", "node.lock_count = 1"),),
             "RadixCache.unlock": (("node.lock_count -= 1", "node.lock_count = 0"),
                                   ("if node.parent is not None and node.lock_count == 0:",
                                    "if node.parent is not None and node.lock_count < 0:"))},
            cause="locks are not counted: the first unlock undoes all of them",
            look="two requests may use one node",
        ),
        Mistake(
            "does not keep the number",
            edits={"RadixCache.lock": (
                ("            self.num_evictable_blocks -= len(node.block_ids)\n", ""),
             ),
             "RadixCache.unlock": (
                ("            self.num_evictable_blocks += len(node.block_ids)\n", ""),
             )},
            cause="`num_evictable_blocks` is not updated",
            look="what must `lock` do with the counter?",
        ),
        Mistake(
            "subtracts with every lock",
            edits={"RadixCache.lock": (
                ("            del self.unlocked[node]\n"
                 "            self.num_evictable_blocks -= len(node.block_ids)\n",
                 "            del self.unlocked[node]\n"
                 "        self.num_evictable_blocks -= len(node.block_ids)\n"),
            )},
            cause="blocks that two requests use are subtracted twice",
            look="when does a node stop being evictable?",
        ),
        Mistake(
            "gives nothing back",
            edits={"RadixCache.unlock": (
                ("            self.unlocked[node] = None\n"
                 "            self.num_evictable_blocks += len(node.block_ids)\n",
                 "            pass\n"),
            )},
            cause="after `unlock`, the node does not become evictable again",
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
            cause="nodes are unlocked from the root down, so a parent would be evicted before its "
                  "children",
            look="in which order must a node and its ancestors join `unlocked`?",
        ),
        Mistake(
            "locks the root",
            edits={"RadixCache.lock": (
                ("while node.parent is not None:", "while node is not None:"),
            )},
            cause="the root is locked, but it has no blocks and no place in `unlocked`",
            look="where does the loop stop?",
        ),
        Mistake(
            "accepts one unlock too many",
            edits={"RadixCache.unlock": (
                ("if node.parent is not None and node.lock_count == 0:", "if False:"),
            )},
            cause="unlocking a node that is not locked is not refused",
            look="which node's `lock_count` must be compared with 0?",
        ),
    ),
    "07.6": (
        Mistake(
            "still releases its copies too early",
            edits={"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.release(table.block_ids[index])"),
            )},
            cause="our own copies are released, and the table still names them",
            look="`share_full_blocks`: the loop over the blocks that are new in the tree",
        ),
        Mistake(
            "keeps its copies",
            edits={"Scheduler.share_full_blocks": (
                ("            table.replace(index, result.block_ids[index])\n", ""),
            )},
            cause="the table keeps its own copies, though the tree has the same content",
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
            look="`replace` acquires and releases itself",
        ),
        Mistake(
            "does not hold what it takes over",
            edits={"Scheduler.share_full_blocks": (
                ("table.replace(index, result.block_ids[index])",
                 "self.pool.release(table.block_ids[index])\n"
                 "            table.block_ids[index] = result.block_ids[index]"),
            )},
            cause="a block is in a table that does not hold it",
            look="`replace` acquires and releases itself",
        ),
        Mistake(
            "does not say that the table has changed",
            edits={"Scheduler.share_full_blocks": (
                ("            sequence.table_version += 1\n", ""),
            )},
            cause="the next step still reads the released blocks, because the table's change was "
                  "not announced",
            look="`sequence.table_version`",
        ),
        Mistake(
            "asks for the prompt alone",
            edits={"Scheduler.look_up": (("sequence.token_ids[:-1]",
                                    "sequence.request.prompt_ids[:-1]"),)},
            cause="only the prompt is looked up, and the tokens written since are computed again",
            look="`request.prompt_ids` or `sequence.token_ids`?",
        ),
        Mistake(
            "shortens the hit, and not its node",
            edits={"Scheduler.look_up": (
                ("sequence.token_ids[:-1]", "sequence.token_ids"),
                ("    return match if", "    if match.num_tokens == len(sequence.token_ids):\n"
                 "        size = self.config.block_size\n"
                 "        match = MatchResult(\n"
                 "            match.node, match.block_ids[:-1], match.num_tokens - size)\n"
                 "    return match if"),
            )},
            cause="the hit is shortened, but its node is not, so the lock holds more than the hit",
            look="can you ask the cache for exactly what you need?",
        ),
        Mistake(
            "leaves nothing to compute",
            edits={"Scheduler.look_up": (("sequence.token_ids[:-1]", "sequence.token_ids"),)},
            cause="if every token is a hit, nothing is left to compute: no logits, and no next "
                  "token",
            look="`look_up`: what does it ask the cache for, and when?",
        ),
        Mistake(
            "leaves a whole block to compute, always",
            edits={"Scheduler.look_up": (
                ("sequence.token_ids[:-1]", "sequence.token_ids[: -self.config.block_size]"),
            )},
            cause="a whole block is left to compute, though one token would be enough",
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
            cause="a full hit no longer counts as a hit",
            look="one token must be left to compute",
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
            cause="the result of an earlier attempt is used again; its blocks may have been "
                  "evicted since, and may belong to another request",
            look="`look_up`: what does it ask the cache for, and when?",
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
            cause="the result of an earlier attempt is used again; its blocks may have been "
                  "evicted since, and may belong to another request",
            look="`look_up`: what does it ask the cache for, and when?",
        ),
        Mistake(
            "forgets the salt",
            edits={"Scheduler.look_up": ((", sequence.request.params.cache_salt", ""),)},
            cause="the salt is left out, so a customer does not find what was stored under its "
                  "own salt",
            look="`sequence.request.params.cache_salt`",
        ),
        Mistake(
            "forgets the threshold",
            edits={"Scheduler.look_up": (("max(1, self.config.min_prefix_tokens)", "1"),)},
            cause="the threshold is gone, so every hit is used",
            look="`min_prefix_tokens`",
        ),
        Mistake(
            "looks up what is on the host",
            edits={"Scheduler.look_up": ((" or sequence.host_block_ids is not None", ""),)},
            cause="its keys and values return from the host; with a hit, they would be written to "
                  "blocks that others read",
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
                (REMOVES, REMOVES + SHARES.replace(" and sequence.table is not None", "")),
            )},
            cause="a finished sequence has no table left when its last block is shared",
            look="the order of sharing and finishing",
        ),
        Mistake(
            "never stops before all tokens are there",
            edits={"Engine._finishes": (
                (f"sequence.token_ids[-1] in request.stop_ids{OR_A_STRING}", "False"),
            )},
            cause="nothing stops a sequence but its length",
            look="`stop_ids` and `hits_stop_string`",
        ),
        Mistake(
            "knows stop tokens alone",
            edits={"Engine._finishes": ((OR_A_STRING, ""),)},
            cause="a stop string is not looked for",
            look="`hits_stop_string`",
        ),
        Mistake(
            "knows stop strings alone",
            edits={"Engine._finishes": (
                ("sequence.token_ids[-1] in request.stop_ids or (", "("),
            )},
            cause="a stop token is not looked for; the end token of the model is one, too",
            look="`stop_ids`",
        ),
        Mistake(
            "measures the new tokens alone",
            edits={"Engine._finishes": (
                ("len(sequence.token_ids) == request.max_length",
                 "sequence.num_output == request.max_length"),
            )},
            cause="a sequence that has `max_length` tokens, prompt included, continues",
            look="the comparison with `max_length`, and what it counts",
        ),
        Mistake(
            "one token too many",
            edits={"Engine._finishes": (
                ("len(sequence.token_ids) == request.max_length",
                 "len(sequence.token_ids) > request.max_length"),
            )},
            cause="a sequence that has `max_length` tokens, prompt included, continues",
            look="the comparison with `max_length`, and what it counts",
        ),
        Mistake(
            "length above stop",
            edits={"Engine._finishes": (("elif len(", "if len("),)},
            cause="where both reasons are true, \"length\" replaces \"stop\"",
            look="can both reasons be true?",
        ),
        Mistake(
            "nobody hears of it",
            edits={"Engine.append": (
                ("        self._moved[request.request_id] = request\n", ""),
            )},
            cause="a request that got a token is not noted in `_moved`, so no step returns it",
            look="`self._moved`",
        ),
        Mistake(
            "counts no tokens",
            edits={"Engine.append": (("        self._generated += 1\n", ""),)},
            cause="`_generated` does not count the new tokens",
            look="`self._generated`",
        ),
        Mistake(
            "commits before it runs",
            edits={"Loop.step": (
                ("    token_ids = engine.runner.run(plan)\n"
                 "    engine.append(engine.scheduler.commit(plan), token_ids)",
                 "    ready = engine.scheduler.commit(plan)\n"
                 "    engine.append(ready, engine.runner.run(plan))"),
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
                 "(engine.scheduler.commit(plan), engine.append(plan.sequences, token_ids))"),
            )},
            cause="not every sequence of a plan gets a token: a chunk in the middle of a prompt "
            "gets none, and samples that fork get one each",
            look="what `commit` returns",
        ),
        Mistake(
            "an empty plan is a step like any other",
            edits={"Loop.step": (("return len(plan.sequences) > 0", "return True"),)},
            cause="nothing can run, and the step does not say so: `generate` never ends",
            look="a plan without sequences",
        ),
        Mistake(
            "keeps its blocks",
            edits={"Engine.append": (("            self.scheduler.remove(sequence)\n", ""),)},
            cause="a finished sequence stays in the scheduler, with its blocks",
            look="`append`: what frees the blocks of a finished sequence?",
        ),
        Mistake(
            "done with the first sample",
            edits={"Engine.append": (("if all(", "if any("),)},
            cause="a request leaves with its first finished sample, though others still run",
            look="`append`: when is a request done?",
        ),
        Mistake(
            "the request stays",
            edits={"Engine.append": ((REMOVES, REMOVES.partition("\n")[0] + "\n"),)},
            cause="a request whose sequences are all finished is still among the unfinished",
            look="`self._requests`",
        ),
        Mistake(
            "forgets the reason",
            edits={"Engine._finishes": (
                ('        sequence.finish_reason = "length"\n', "        return True\n"),
            )},
            cause="a finished sequence has no `finish_reason`, so its request is never done",
            look="`finish_reason`",
        ),
    ),
    "07.8": (
        Mistake(
            "sends each guess twice",
            edits={"guess_prompt": (
                ("[first_token_ms(guess) for guess in guesses]",
                 "[min(first_token_ms(guess), first_token_ms(guess)) for guess in guesses]"),
            )},
            cause="a guess that is sent twice is a hit the second time, whoever sent it first",
            look="how often each guess is sent",
        ),
        Mistake(
            "sends the decoy twice",
            edits={"guess_prompt": (
                ("miss = first_token_ms(decoy)",
                 "miss = (first_token_ms(decoy) + first_token_ms(decoy)) / 2"),
            )},
            cause="the decoy is a hit the second time, so its mean is not what a miss takes",
            look="how often the decoy is sent",
        ),
        Mistake(
            "always names one",
            edits={"guess_prompt": (
                ("return fastest if times[fastest] < miss / 2 else None", "return fastest"),
            )},
            cause="one of the guesses is always the fastest, even if none of them was sent",
            look="what the decoy is for",
        ),
        Mistake(
            "a little faster is a hit",
            edits={"guess_prompt": (("< miss / 2", "< miss"),)},
            cause="a miss may be faster than the decoy: the clock varies by a quarter",
            look="how much less than the decoy's time is a hit?",
        ),
        Mistake(
            "takes the slowest",
            edits={"guess_prompt": (("fastest = min(", "fastest = max("),)},
            cause="the slowest guess is a miss; a hit is fast",
            look="which of the times is a hit's?",
        ),
        Mistake(
            "stops at the first that is faster",
            edits={"guess_prompt": (
                ("    fastest = min(range(len(guesses)), key=times.__getitem__)\n"
                 "    return fastest if times[fastest] < miss / 2 else None\n",
                 "    return next((i for i, time in enumerate(times) if time < miss), None)\n"),
            )},
            cause="the first guess that is faster than the decoy is named: most are misses that "
            "were a little faster by chance",
            look="how much less than the decoy's time is a hit?",
        ),
        Mistake(
            "returns the prompt",
            edits={"guess_prompt": (("return fastest if", "return guesses[fastest] if"),)},
            cause="the guess is returned, not its index",
            look="what should be returned",
        ),
    ),
}  # fmt: skip
