"""Checks of chapter 07: a trie of blocks, the radix tree, chained hashes, locks, and the scheduler
that uses them."""

import random
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations

import minikv
from minikv.course.chapters.ch07_radix_prefix_cache.answers import keys_of
from minikv.course.harness.checking import Suspect, Wrong, check, equal, raises, runs_model, tinypy
from minikv.radix import Root

SIZES = (4, 1, 3, 16)
SALTS = (None, None, "x")


# ── Prompts as words, blocks called by the prefix that they end ───────────────


def tokens_of(word: str, size: int) -> list[int]:
    """A block for each letter; they differ in their last token alone. "+" is the beginning of one
    more block, all but its last token."""
    token_ids = []
    for letter in word:
        token_ids += [7] * (size - 1) + ([] if letter == "+" else [ord(letter)])
    return token_ids


def beginnings(word: str) -> list[str]:
    """What the blocks of a prompt are called: "ABC" has A, AB and ABC."""
    word = word.rstrip("+")
    return [word[:end] for end in range(1, len(word) + 1)]


class LoggingPool(minikv.BlockPool):
    """Remembers in which order blocks became free."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.freed: list[int] = []

    def release(self, block_id: int) -> None:
        super().release(block_id)
        if self.ref_count(block_id) == 0:
            self.freed.append(block_id)


# ── The engine ────────────────────────────────────────────────────────────────


class KeepsLogits(minikv.Sampler):
    """Remembers the logits of the last step in which a prompt was computed."""

    def __call__(self, logits, params, draws):
        self.logits = logits
        return super().__call__(logits, params, draws)


def engine_on(prefix_cache, scheduler=minikv.Scheduler, **config) -> minikv.Engine:
    values = dict(num_blocks=128, block_size=4, max_num_seqs=8, min_prefix_tokens=0) | config
    return minikv.Engine(
        tinypy(),
        minikv.EngineConfig(**values),
        prefix_cache=prefix_cache,
        scheduler=scheduler,
        sampler=KeepsLogits(),
    )


def step(engine: minikv.Engine, outputs: dict[int, list[int]]) -> None:
    """One step, and every invariant after it."""
    outputs |= {output.request_id: output.token_ids for output in engine.step()}
    try:
        engine.check()
    except AssertionError as error:
        raise Wrong(f"after step {engine.stats().steps}, engine.check() says: {error}") from error


def add(engine: minikv.Engine, prompt: list[int], num_tokens: int, **more) -> int:
    params = minikv.SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)
    return engine.add_request(prompt, params)


def finish(engine: minikv.Engine, outputs: dict[int, list[int]] | None = None, limit: int = 1000):
    """Tokens by request id, once all are finished."""
    outputs = {} if outputs is None else outputs
    for _ in range(limit):
        if not engine.has_unfinished:
            return outputs
        step(engine, outputs)
    raise Wrong(f"after {limit} steps there are requests that have not finished")


@cache
def prompt_of(text: str) -> list[int]:
    return tinypy().encode(text)


@cache
def oracle(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return tinypy().generate_naively(list(prompt), num_tokens)


STACK = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n"
QUEUE = "class Queue:\n    def push(self, item):\n        self.items.append(item)\n"


def check_hits(prefix_cache) -> None:
    """Behind a prefix from the cache, logits and tokens are those of naive attention."""
    lm, (stack, queue) = tinypy(), (prompt_of(STACK), prompt_of(QUEUE))
    for prompts in ([stack, stack + queue], [stack + queue, stack + stack], [queue, stack, queue]):
        engine, served = engine_on(prefix_cache), []
        for prompt in prompts:
            hits, before = expected_hit(served, prompt, 4), engine.stats().hit_tokens
            outputs: dict[int, list[int]] = {}
            request_id = add(engine, prompt, 2)
            step(engine, outputs)
            found = engine.stats().hit_tokens - before
            what = f"tinypy, blocks of 4, a prompt of {len(prompt)} tokens"
            equal(found, hits, f"{what}: of these, found in the cache")
            logits, expected = engine.runner.sampler.logits[0], lm.logits(prompt)[-1]
            if not logits.allclose(expected, rtol=1e-3, atol=1e-3):
                raise Wrong(
                    f"{what}, {hits} of them found: logits differ by "
                    f"{float((logits - expected).abs().max()):.2f} from those of naive attention",
                    "the blocks of the hit hold other tokens than the prompt has there",
                )
            new = finish(engine, outputs)[request_id]
            equal(new, oracle(tuple(prompt), 2), f"{what}, {hits} of them found: new tokens")
            served.append(prompt + new[:-1])


def expected_hit(served: list[list[int]], prompt: list[int], size: int) -> int:
    """Tokens of the longest prefix in whole blocks, short of the last token, that was served."""
    known = {tuple(one[:end]) for one in served for end in range(0, len(one) + 1, size)}
    hits = [end for end in range(0, len(prompt), size) if tuple(prompt[:end]) in known]
    return max(hits, default=0)


# ── 07.1 A tree that only knows whole prompts ─────────────────────────────────


def known_by_mistake(trie, token_ids: list[int], mistake: str) -> list[int]:
    """BlockTrie.match with another idea of what is found."""
    children, found, known = trie.root, [], 0
    for key in keys_of(token_ids, trie.block_size):
        if key not in children:
            if mistake == "passes over what is missing":
                continue
            if mistake == "all or nothing":
                return []
            break
        block_id, children = children[key]
        found.append(block_id)
        if not children or (mistake == "up to a branch" and len(children) == 1):
            known = len(found)
    return {
        "whole prompts": found[:known],
        "up to a branch": found[:known],
        "not the last": found[:-1],
        "only the last": found[-1:],
    }.get(mistake, found)


TRIE_MISTAKES = {
    "whole prompts": (
        "it still answers only where a stored prompt ends",
        "what has the walk in hand when it finds no next block?",
    ),
    "all or nothing": (
        "the first block that is missing makes the whole answer empty",
        "what does a system prompt still have in common with this one?",
    ),
    "up to a branch": (
        "where several prompts go on in different ways the walk is forgotten",
        "a node with many children is a node that many prompts share",
    ),
    "not the last": (
        "the last block that was found is left out",
        "which block belongs to the last key that matched?",
    ),
    "only the last": ("only the last block is returned", "a prefix is all of its blocks"),
    "passes over what is missing": (
        "the walk goes on after a block that is missing, and finds one that stands elsewhere",
        "K and V depend on everything before them: can a later block be right?",
    ),
}


def check_trie(mine, size: int, stored: list[str], asked: str) -> None:
    trie, count, names = mine.BlockTrie(size), 0, {}
    for word in stored:
        blocks = list(range(count, count + len(word)))
        count += len(word)
        trie.insert(tokens_of(word, size), blocks)
        for name, block_id in zip(beginnings(word), blocks, strict=True):
            names.setdefault(name, block_id)
    token_ids = tokens_of(asked, size)
    called = {block_id: name for name, block_id in names.items()}
    expected = [name for name in beginnings(asked) if name in names]
    equal(
        [called.get(block_id, block_id) for block_id in trie.match(token_ids)],
        expected,
        f"blocks of {size}; stored are {', '.join(stored)}; found of {asked}",
        *[
            Suspect([called[b] for b in known_by_mistake(trie, token_ids, mistake)], *why)
            for mistake, why in TRIE_MISTAKES.items()
            if explains_the_same_again(mine, mistake)
        ],
    )


def explains_the_same_again(mine, mistake: str) -> bool:
    """Whether a mistake also gives what is found of a prompt that is stored as it is."""
    trie, token_ids = mine.BlockTrie(1), [1, 2, 3]
    trie.insert(token_ids, [0, 1, 2])
    return list(trie.match(token_ids)) == known_by_mistake(trie, token_ids, mistake)


@check("07.1", "the same prompt again", look="what `match` returns, and when")
def _(mine):
    for size in SIZES:
        check_trie(mine, size, ["ABC"], "ABC")
        check_trie(mine, size, ["ABC", "DE"], "DE+")


@check("07.1", "a chat that grows", look="what `match` returns, and when")
def _(mine):
    for size in SIZES:
        check_trie(mine, size, ["AB"], "ABCD")
        check_trie(mine, size, ["AB", "ABCD"], "ABCDEF+")


@check("07.1", "one system prompt, many questions", look="what is known when the walk stops?")
def _(mine):
    size, system = 4, "SYSTEM"
    trie, hits, looked_up = mine.BlockTrie(size), 0, 0
    for number, question in enumerate("abcdefghij"):
        token_ids = tokens_of(system + 2 * question, size)
        hits += len(trie.match(token_ids))
        looked_up += len(token_ids) // size
        trie.insert(token_ids, range(8 * number, 8 * number + 8))
    if hits == 0:
        raise Wrong(f"10 questions, one system prompt: 0 hits of {looked_up} blocks looked up")
    equal(hits, 9 * len(system), f"10 questions, one system prompt: hits of {looked_up} blocks")
    for size in SIZES:
        check_trie(mine, size, ["SYa", "SYb"], "SYc")


@check("07.1", "a prompt that ends where others go on", look="the last block before the end")
def _(mine):
    for size in SIZES:
        check_trie(mine, size, ["ABCD"], "AB")
        check_trie(mine, size, ["ABC", "ABD"], "AB+")


@check("07.1", "a block counts only behind the same beginning", look="where the walk has to stop")
def _(mine):
    for size in SIZES:
        check_trie(mine, size, ["ABC"], "AXBC")
        check_trie(mine, size, ["ABC", "BCD"], "CD")
        check_trie(mine, size, ["ABC", "B"], "XB")


@check("07.1", "any prompts, any block size", look="what `match` returns, and when")
def _(mine):
    draw = random.Random(7)
    for size in SIZES:
        for _ in range(40):
            words = ["".join(draw.choices("AB", k=draw.randint(1, 5))) for _ in range(5)]
            check_trie(mine, size, words[1:], words[0])


# ── The radix tree, and a dictionary of prefixes beside it ────────────────────


def spelled(node) -> str:
    """The letters of a node's own blocks."""
    return "".join(chr(key[-1]) for key in node.keys)


def shape_of(cache) -> dict:
    """{letters of a node: the same of its children}, all salts together."""

    def of(children) -> dict:
        return {spelled(child): of(child.children.values()) for child in children}

    return of([child for root in cache._roots.values() for child in root.children.values()])


def on_path(node) -> list[int]:
    """All blocks from the root to the end of a node."""
    block_ids = []
    while node is not None:
        block_ids = list(node.block_ids) + block_ids
        node = node.parent
    return block_ids


UNSOUND = {  # what `check` says: what may have brought it about, where to look
    "a block is in the tree twice": (
        "a block is named by two nodes",
        "which blocks does each half keep after a split?",
    ),
    "num_cached_blocks is off": (
        "a node or a block got lost or doubled, or num_cached_blocks was not told",
        "every line after which the tree has more or fewer blocks",
    ),
    "num_evictable_blocks is off": (
        "the number of evictable blocks is not that of the unlocked nodes",
        "which nodes are locked now, and how many blocks do they have?",
    ),
    "unlocked list is off": (
        "`unlocked` must have every node without a lock, and no other",
        "who is put into it, and who is taken out?",
    ),
    "a node without blocks": (
        "a node with no block left stays in the tree",
        "what becomes of a leaf whose last block is gone?",
    ),
    "a child under a wrong key": (
        "a node is not found under its own first key",
        "which dictionary has a node for a value, and under which key?",
    ),
    "is free": (
        "the tree names a block that it does not hold",
        "who acquires it, who releases it?",
    ),
    "a child of two nodes": (
        "a child's `parent` is not the node that it hangs from",
        "both directions: `children` of one, `parent` of the other",
    ),
    "a lock does not cover an ancestor": (
        "a node is locked, and the node above it is less so",
        "what is the lock count of a node that is new above a locked one?",
    ),
    "a node is younger than its parent": (
        "a node was used later than the node above it, so eviction would take the parent first",
        "`_touch` is there for that",
    ),
    "an empty or misplaced root": (
        "the root of a salt stays when nothing hangs from it",
        "`_remove` takes a leaf out, and its root with the last one",
    ),
}


FROM_THE_ROOT = (
    "nodes are unlocked from the root down, so eviction would take a parent first",
    "in which order do the node and its ancestors get into `unlocked`?",
)


class Tree:
    """A reader's RadixCache. Prompts are words; a block is called by the prefix that it ends.

    The prompts it begins with are put there by the reference.
    """

    def __init__(self, mine, size: int, *words: str, num_blocks: int = 64):
        self.size, self.pool = size, LoggingPool(num_blocks)
        self.called: dict[int, str] = {}  # the blocks' names
        self.cache = minikv.RadixCache(self.pool, size)
        for word in words:
            self.insert(word)
        built, self.cache = self.cache, mine.RadixCache(self.pool, size)
        vars(self.cache).update(vars(built))
        self.before = f"in the tree: {', '.join(words)}; " if words else ""

    def words(self, text: str) -> str:
        return f"blocks of {self.size}; {self.before}{text}"

    def names(self, block_ids) -> list[str]:
        return [self.called.get(block_id, f"block {block_id}") for block_id in block_ids]

    def call(self, do: Callable, what: str):
        """What `do` returns; errors that a mistake in the tree leads to get their words."""
        try:
            return do()
        except IndexError as error:
            raise Wrong(
                f"{self.words(what)}: IndexError ({error})",
                "it reads beyond the end of a list: the prompt or the node is shorter than that",
                "of what is left of the prompt and the node's keys, which is shorter?",
            ) from error
        except KeyError as error:
            why = (
                "a node is looked for where it is not: in `unlocked`, or in `children`",
                "who is in `unlocked`? Under which key does a node stand?",
            )
            if error.args and isinstance(error.args[0], Root):
                why = "the root is never locked, nor unlocked", "where does the loop stop?"
            raise Wrong(f"{self.words(what)}: KeyError", *why) from error
        except (TypeError, AttributeError) as error:
            if "NoneType" not in str(error):
                raise
            raise Wrong(
                f"{self.words(what)}: {type(error).__name__} ({error})",
                "None where a result is expected: one of your methods does not return what it "
                "should",
                "the return values, and what the docstrings promise",
            ) from error

    def match(self, word: str, salt=None):
        token_ids = tokens_of(word, self.size)
        return self.call(lambda: self.cache.match(token_ids, salt), f"match of {word}")

    def insert(self, word: str, salt=None, keep: bool = False):
        """As a sequence that ends: its own hold on its blocks ends after the insert."""
        own = [self.pool.allocate() for _ in beginnings(word)]
        token_ids = tokens_of(word, self.size)
        result = self.call(lambda: self.cache.insert(token_ids, own, salt), f"insert of {word}")
        name = f"{salt}:" if salt is not None else ""
        for block_id, prefix in zip(own, beginnings(word), strict=True):
            if block_id in result.block_ids:
                self.called[block_id] = name + prefix
            if not keep or block_id not in result.block_ids:
                self.pool.release(block_id)
        return result

    def evict(self, num_blocks: int) -> list[str]:
        """What became free, in order."""
        self.pool.freed.clear()
        self.call(lambda: self.cache.evict(num_blocks), f"evict({num_blocks})")
        return self.names(self.pool.freed)

    def evict_one_by_one(self) -> list[str]:
        found = []
        for _ in range(self.pool.num_blocks):
            freed = self.evict(1)
            if not freed:
                break
            found += freed
        return found

    def sound(self, what: str, **better: tuple[str, str]) -> None:
        """Every invariant holds, or else Wrong that says which does not. `better`: a cause and a
        look for what `check` says, by a word of it."""
        try:
            self.cache.check()
        except AssertionError as error:
            said = str(error).removeprefix("prefix cache: ")
            known = better | UNSOUND
            why = next((why for key, why in known.items() if key in said), (None, None))
            raise Wrong(f"{self.words(what)}: check() says: {said}", *why) from error
        except (AttributeError, KeyError) as error:
            raise Wrong(
                f"{self.words(what)}: check() cannot read the tree: {type(error).__name__}",
                "a node that hangs in the tree has no parent, or an emptied list of keys",
                "`parent`, `children` and `keys` of the nodes that were changed",
            ) from error


class Model:
    """The same with a dictionary of prefixes, and nothing clever: a name is (salt, prefix)."""

    def __init__(self):
        self.block: dict[tuple, int] = {}
        self.age: dict[tuple, tuple[int, int]] = {}  # (last use, -depth): the least is the oldest
        self.locks: Counter[tuple] = Counter()
        self.clock = 0

    def cached(self, word: str, salt) -> list[tuple]:
        names = [(salt, prefix) for prefix in beginnings(word)]
        missing = (i for i, name in enumerate(names) if name not in self.block)
        return names[: next(missing, len(names))]

    def touch(self, names: list[tuple]) -> None:
        self.clock += 1
        for name in names:
            self.age[name] = (self.clock, -len(name[1]))

    def evict(self, num_blocks: int) -> list[int]:
        gone = []
        while len(gone) < num_blocks:
            inner = {(salt, prefix[:-1]) for salt, prefix in self.block}
            leaves = [n for n in self.block if n not in inner and not self.locks[n]]
            if not leaves:
                break
            gone.append(self.block.pop(min(leaves, key=self.age.__getitem__)))
        return gone


def play(mine, size: int, seed: int, steps: int, kinds: str) -> None:
    """Random operations on a reader's tree and on the dictionary, compared after each.

    `kinds`, drawn with equal chances: i(nsert), m(atch), l(ock), u(nlock), e(vict).
    """
    draw, tree, model = random.Random(seed), Tree(mine, size, num_blocks=40), Model()
    held: list[int] = []  # blocks of sequences that still run
    locked: list[tuple] = []  # (node, names)
    for step in range(steps):
        word = "".join(draw.choices("AB", k=draw.randint(1, 5))) + draw.choice(["", "+"])
        salt, kind = draw.choice(SALTS), draw.choice(kinds)
        of = f"{word}{f' of salt {salt}' if salt else ''}"
        if kind == "i" and len(word) <= tree.pool.num_free:
            what = f"step {step}, insert of {of}"
            there, keep = model.cached(word, salt), draw.random() < 0.3
            result = tree.insert(word, salt, keep)
            names = [(salt, prefix) for prefix in beginnings(word)]
            for name, block_id in zip(names, result.block_ids, strict=False):
                if name not in model.block:
                    model.block[name] = block_id
                    held += [block_id] * keep
                elif block_id != model.block[name]:
                    tree.called[block_id] = f"the caller's {name[1]}"
            _same(tree, result.block_ids, [model.block.get(name) for name in names], what)
            equal(result.num_existing, len(there), tree.words(f"{what}: num_existing"))
            _same(tree, on_path(result.node), result.block_ids, f"{what}: down to its node")
            model.touch(names)
        elif kind in "ml":
            what = f"step {step}, match of {of}"
            names = model.cached(word, salt)
            result = tree.match(word, salt)
            _same(tree, result.block_ids, [model.block[name] for name in names], what)
            equal(result.num_tokens, len(names) * size, tree.words(f"{what}: num_tokens"))
            _same(tree, on_path(result.node), result.block_ids, f"{what}: down to its node")
            model.touch(names)
            if kind == "l":
                what = f"step {step}, lock of {of}"
                tree.call(partial(tree.cache.lock, result.node), what)
                model.locks.update(names)
                locked.append((result.node, names))
        elif kind == "u" and locked:
            node, names = locked.pop(draw.randrange(len(locked)))
            what = f"step {step}, unlock of {names[-1][1] if names else 'a miss'}"
            tree.call(partial(tree.cache.unlock, node), what)
            model.locks.subtract(names)
            model.touch([name for name in names if not model.locks[name]])
        elif kind == "e":
            count = draw.randint(0, 5)
            what = f"step {step}, evict({count})"
            tree.pool.freed.clear()
            found = tree.call(partial(tree.cache.evict, count), what)
            gone = model.evict(count)
            equal(found, len(gone), tree.words(f"{what}: what it returns"))
            free = [block_id for block_id in gone if block_id not in held]
            _same(tree, tree.pool.freed, free, f"{what}: what became free, in order")
            if held and draw.random() < 0.7:
                tree.pool.release(held.pop(draw.randrange(len(held))))
        else:
            continue
        tree.sound(what, **({"younger": FROM_THE_ROOT} if kind == "u" else {}))
        equal(
            (tree.cache.num_cached_blocks, tree.cache.num_evictable_blocks),
            (len(model.block), sum(not model.locks[name] for name in model.block)),
            tree.words(f"{what}: cached and evictable blocks"),
        )
        used = len({*held, *model.block.values()})
        equal(tree.pool.num_free, tree.pool.num_blocks - used, tree.words(f"{what}: free blocks"))
    for node, _ in locked:
        tree.cache.unlock(node)
    for block_id in held:
        tree.pool.release(block_id)
    tree.cache.evict(tree.pool.num_blocks)
    tree.sound("all unlocked and evicted")
    equal(tree.pool.num_free, tree.pool.num_blocks, tree.words("all unlocked and evicted: free"))


def _same(tree: Tree, found: list[int], expected: list[int], what: str) -> None:
    if list(found) != list(expected):
        raise Wrong(
            f"{tree.words(what)}: {_list(tree.names(found))}, expected "
            f"{_list(tree.names(expected))}"
        )


def _list(names: list[str]) -> str:
    return ", ".join(names) if names else "nothing"


# ── 07.2 Walk down, and split ─────────────────────────────────────────────────


def check_match(
    mine, stored: list[str], asked: str, *suspects: Suspect, sizes: tuple[int, ...] = SIZES
) -> None:
    """What a match finds, called by prefixes; `suspects` for what is found instead."""
    for size in sizes:
        tree = Tree(mine, size, *stored)
        what = tree.words(f"match of {asked}")
        known = {prefix for word in stored for prefix in beginnings(word)}
        expected = [prefix for prefix in beginnings(asked) if prefix in known]
        result = tree.match(asked)
        equal(tree.names(result.block_ids), expected, f"{what} finds", *suspects)
        equal(
            result.num_tokens,
            size * len(expected),
            f"{what}: num_tokens",
            Suspect(
                0, "the depth that is returned does not grow with the walk", "the second result"
            ),
            Suspect(
                size,
                "only one block a node is counted",
                "by how many blocks is the walk deeper after a node?",
            ),
        )
        down = tree.names(on_path(result.node))
        what = f"{what}: blocks from the root to the end of its node"
        if down != expected and down[: len(expected)] == expected:
            raise Wrong(
                f"{what}: {_list(down)}, expected {_list(expected)}",
                "the node goes on behind the match, so a lock on it would hold too much",
                "where does the match end inside a node? There the node has to be cut",
            )
        equal(
            down,
            expected,
            what,
            Suspect(
                expected[: len(down)],
                "the node is one above the end of the match, or the root",
                "the first result: where does the walk stand when it stops?",
            ),
        )


WHOLE = (
    "a node is taken whole as soon as its first block agrees, and with it another prompt's blocks",
    "every key of a node has to be compared, one after the other",
)
NOT_PART = (
    "a node that agrees only in part is left out altogether",
    "how many of its keys agree? So many blocks are a hit",
)


@check("07.2", "a prompt that is one node", look="what `_walk` returns, all three")
def _(mine):
    check_match(mine, ["ABC"], "ABC", Suspect([], "nothing is found of what is there", "the loop"))
    check_match(mine, ["ABC"], "ABCDE+", Suspect(["A"], "only one block a node", "its keys"))
    check_match(mine, ["A"], "A+")


@check("07.2", "down several nodes", look="what changes when the walk is one node further")
def _(mine):
    stored = ["ABCD", "ABEFG", "ABEFH"]  # AB, then CD or EF, then G or H
    twice = "the blocks of a node are collected more than once, or in another order"
    suspects = (
        Suspect(["AB"], *WHOLE),
        Suspect(
            ["A", "AB"],
            "the walk stops after one node",
            "what must hold for another turn of the loop?",
        ),
        Suspect(["ABEFH"], "only the last node's blocks are returned", "the third result"),
        Suspect(["A", "AB", "A", "AB", "ABE", "ABEF"], twice, "which blocks are new in each turn?"),
    )
    check_match(mine, stored, "ABEFH", *suspects)
    check_match(mine, stored, "ABEFHXY", *suspects)
    check_match(mine, stored, "ABCDX+")


@check("07.2", "the walk stops where the tokens differ", look="what is compared, and how far")
def _(mine):
    check_match(
        mine,
        ["ABC"],
        "ADC",
        Suspect(["A", "AB", "ABC"], *WHOLE),
        Suspect([], *NOT_PART),
        Suspect(
            ["AB", "ABC"],
            "after the cut the walk stands on the lower half, which does not agree",
            "what `_split` returns",
        ),
    )
    check_match(
        mine,
        ["ABCD", "ABE"],
        "ABCX",
        Suspect(["A", "AB", "ABC", "ABCD"], *WHOLE),
        Suspect(["A", "AB"], *NOT_PART),
    )
    check_match(mine, ["ABCB"], "AXCB", Suspect(["A", "ABC", "ABCB"], *WHOLE))
    check_match(mine, ["ABC"], "X")
    check_match(mine, ["ABC", "B"], "CAB")


@check("07.2", "the walk stops where the prompt ends", look="how many keys are left to compare")
def _(mine):
    over = (
        "blocks are found that the prompt does not have",
        "of what is left of the prompt and the node's keys, which is shorter?",
    )
    check_match(mine, ["ABC"], "AB", Suspect(["A", "AB", "ABC"], *over), Suspect([], *NOT_PART))
    check_match(mine, ["ABC"], "A+", Suspect(["A", "AB", "ABC"], *over), Suspect([], *NOT_PART))
    check_match(mine, ["ABCDE", "ABX"], "ABC", Suspect(["A", "AB", "ABC", "ABCD", "ABCDE"], *over))
    check_match(mine, ["ABC"], "+")


@check(
    "07.2", "a node that is cut in two", look="what each half has: keys, blocks, parent, children"
)
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABCD", "ABCE")  # ABC, then D or E
        tree.match("A")
        what = "after a match of A"
        try:
            found = shape_of(tree.cache)
        except (AttributeError, IndexError):
            tree.sound(what)
            raise
        equal(
            found,
            {"A": {"BC": {"D": {}, "E": {}}}},
            tree.words(f"{what}, the tree is"),
            Suspect(
                {"ABC": {"D": {}, "E": {}}},
                "the node is not cut",
                "what does a match that ends inside a node leave behind?",
            ),
            Suspect(
                {"BC": {"D": {}, "E": {}}},
                "the node above still has the old node under its key, now the lower half",
                "whose `children` must name the upper half?",
            ),
            Suspect(
                {"A": {"ABC": {"D": {}, "E": {}}}},
                "the lower half keeps all keys, also those of the upper one",
                "`keys` and `block_ids` of the lower half",
            ),
            Suspect(
                {"A": {"D": {}, "E": {}}},
                "the lower half is lost: the upper one has its children instead",
                "the upper half has one child, the lower half",
            ),
            Suspect({"A": {}}, "what follows the cut is lost", "the children of the upper half"),
            Suspect(
                {"A": {"BC": {}}},
                "the children of the node are lost",
                "to which half do they belong?",
            ),
            Suspect(
                {"A": {"BC": {}, "D": {}, "E": {}}},
                "the children stay with the upper half, but they follow the lower one",
                "to which half do they belong?",
            ),
            Suspect(
                {"AB": {"C": {"D": {}, "E": {}}}},
                "the cut is one block too far down",
                "`length` blocks go to the upper half",
            ),
        )
        tree.sound(what)
        for word in ("ABCD", "ABCE", "A", "AB"):
            equal(
                tree.names(tree.match(word).block_ids),
                beginnings(word),
                tree.words(f"{what}, a match of {word} finds"),
            )
            tree.sound(f"{what}, then of {word}")


@check("07.2", "a lock survives the cut", look="`lock_count` of both halves, and who is who")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABC", "X")
        node = tree.match("ABC").node
        tree.cache.lock(node)
        tree.cache.lock(node)
        no_lock = (
            "the upper half has no lock: what a sequence stands on could be evicted",
            "the lock count of a new node above a locked one",
        )
        try:
            tree.match("A")
        except Wrong as error:
            if node.lock_count == 2 and node.parent.lock_count == 0:
                raise Wrong(error.what, *no_lock) from error
            raise
        what = "ABC locked twice, then a match of A"
        locks = dict(sorted((spelled(one), one.lock_count) for one in tree.cache.nodes()))
        equal(
            locks,
            {"A": 2, "BC": 2, "X": 0},
            tree.words(f"{what}: lock counts of the nodes"),
            Suspect({"A": 0, "BC": 2, "X": 0}, *no_lock),
            Suspect(
                {"A": 1, "BC": 2, "X": 0},
                "the upper half has one lock, whatever the node had",
                "the lock count of a new node above a locked one",
            ),
            Suspect(
                {"A": 2, "BC": 0, "X": 0},
                "the lower half has lost its lock",
                "which half is the node that others have in hand?",
            ),
        )
        if spelled(node) != "BC":
            raise Wrong(
                f"{tree.words(what)}: the node that was locked is {spelled(node)} now, expected BC",
                "the node that was there became the upper half: who locked it now stands on less",
                "which half keeps its identity? See the docstring",
            )
        tree.sound(what)
        equal(tree.evict(10), ["X"], tree.words(f"{what}: evict(10) frees"))
        tree.cache.unlock(node)
        tree.cache.unlock(node)
        tree.sound(f"{what}, unlocked twice")
        equal(
            tree.evict_one_by_one(),
            ["ABC", "AB", "A"],
            tree.words(f"{what}, unlocked twice, and evicted one by one"),
        )


@check("07.2", "what a match has found stays as it is", look="the third result of `_walk`")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "AB")
        found = tree.match("AB").block_ids
        tree.insert("ABCD")
        equal(
            tree.names(found),
            ["A", "AB"],
            tree.words("match of AB, then insert of ABCD; the list that the match has returned"),
            Suspect(
                ["A", "AB", "ABC", "ABCD"],
                "the list is the node's own, and grows with the node",
                "is a new list made, or is a node's list handed out?",
            ),
        )


@check("07.2", "a shorter match makes only its part younger", look="what is in `unlocked`")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABC", "XY")
        tree.match("A")
        tree.sound("after a match of A")
        equal(
            tree.evict_one_by_one(),
            ["ABC", "AB", "XY", "X", "A"],
            tree.words("after a match of A, evicted one by one"),
        )


@check("07.2", "like a dictionary of prefixes, in random traces", look="the checks above")
def _(mine):
    for size in SIZES:
        for seed in (1, 2):
            play(mine, size, seed, 150, "iimmluue")


@check("07.2", "tinypy: a hit has the logits of a miss", look="which blocks does the hit name?")
def _(mine):
    check_hits(mine.RadixCache)


# ── 07.3 Insert and evict ─────────────────────────────────────────────────────


@check("07.3", "a new prompt: the tree holds its blocks", look="what `insert` does for new blocks")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, num_blocks=8)
        own = [tree.pool.allocate() for _ in range(3)]
        tree.called.update(zip(own, beginnings("ABC"), strict=True))
        insert = partial(tree.cache.insert, tokens_of("ABC+", size), own)
        result = tree.call(insert, "insert of ABC+")
        what = tree.words("insert of ABC+ with 3 blocks of a sequence")
        equal(
            [tree.pool.ref_count(block_id) for block_id in own],
            [2, 2, 2],
            f"{what}: reference counts",
            Suspect(
                [1, 1, 1],
                "the tree names blocks that it does not hold: once the sequence lets go they are "
                "free, and still in the tree",
                "one more holder for each block that is new in the tree",
            ),
        )
        equal(
            tree.names(result.block_ids),
            beginnings("ABC"),
            f"{what}: block_ids of the result",
            Suspect([], "the new blocks are missing from the result", "the second result"),
        )
        equal(
            tree.names(on_path(result.node)),
            beginnings("ABC"),
            f"{what}: blocks down to its node",
            Suspect([], "it is not the node that was made", "what `_append` returns"),
        )
        equal(result.num_existing, 0, f"{what}: num_existing")
        equal(
            tree.cache.num_cached_blocks,
            3,
            f"{what}: num_cached_blocks",
            Suspect(0, "new blocks are not counted", "who changes num_cached_blocks?"),
        )
        equal(
            tree.cache.num_evictable_blocks,
            3,
            f"{what}: num_evictable_blocks",
            Suspect(6, "they are counted twice: `_append` has counted them already",
                    "which counter is left to `insert`?"),
        )  # fmt: skip
        tree.sound("insert of ABC+")
        for block_id in own:
            tree.pool.release(block_id)
        equal(tree.pool.num_free, 5, f"{what}, which then ends: free blocks of 8")


@check("07.3", "where a prefix is known, the tree's own blocks stay", look="which blocks are new?")
def _(mine):
    for size in SIZES:
        for stored, word, there in (
            (["AB"], "ABCD", 2),
            (["ABC", "ABD"], "ABC", 3),
            (["ABC"], "AX", 1),
        ):
            tree = Tree(mine, size, *stored)
            old = {name: block_id for block_id, name in tree.called.items()}
            own = [tree.pool.allocate() for _ in word]
            result = tree.call(
                partial(tree.cache.insert, tokens_of(word, size), own), f"insert of {word}"
            )
            what = tree.words(f"insert of {word}")
            names = beginnings(word)
            equal(
                result.num_existing,
                there,
                f"{what}: num_existing",
                Suspect(
                    len(word) - there,
                    "that is how many are new, not how many were there",
                    "the third result",
                ),
                Suspect(len(word), "that is how many there are now", "the third result"),
            )
            tree.called.update(zip(own, (f"the caller's {name}" for name in names), strict=True))
            expected = [tree.called[b] for b in own]
            expected[:there] = names[:there]
            equal(
                tree.names(result.block_ids),
                expected,
                f"{what}: block_ids of the result",
                Suspect(
                    tree.names(own),
                    "these are the caller's own blocks, also where the tree has others: the caller "
                    "is to give up its copies for the tree's",
                    "what was known already, and under which block?",
                ),
                Suspect(
                    expected[there:], "the blocks that were there are missing", "the whole prefix"
                ),
            )
            equal(
                [tree.pool.ref_count(block_id) for block_id in own],
                [1] * there + [2] * (len(word) - there),
                f"{what}: reference counts of the caller's blocks",
                Suspect(
                    [2] * len(word),
                    "the tree acquires blocks that it does not keep: they are never free again",
                    "which of the caller's blocks get into the tree?",
                ),
                Suspect(
                    [2] * there + [1] * (len(word) - there),
                    "the wrong part is acquired: what the tree had already",
                    "which of the caller's blocks get into the tree?",
                ),
            )
            equal(
                [tree.pool.ref_count(old[name]) for name in names[:there]],
                [1] * there,
                f"{what}: reference counts of the blocks that were there",
            )
            tree.sound(f"insert of {word}")
            equal(tree.names(tree.match(word).block_ids), expected, f"{what}, then a match finds")


def state(tree: Tree) -> tuple:
    """All that a call that is refused must leave as it was."""
    return (
        shape_of(tree.cache),
        list(tree.cache._roots),
        [spelled(node) for node in tree.cache.unlocked],
        (tree.cache.num_cached_blocks, tree.cache.num_evictable_blocks, tree.pool.num_free),
    )


@check("07.3", "too few blocks are refused, too many left alone", look="how many blocks are needed")
def _(mine):
    for word, salt in (("XYZ", None), ("XYZ", "new"), ("AXY", None), ("ABC", None)):
        tree = Tree(mine, 4, "AB", "C")
        own, before = [tree.pool.allocate()], state(tree)
        what = tree.words(f"insert of {word} of salt {salt} with 1 block")
        raises(
            ValueError,
            partial(tree.cache.insert, tokens_of(word, 4), own, salt),
            what,
            "nothing compares the number of blocks with that of the keys",
            "the first lines of `insert`",
        )
        if state(tree) != before:
            raise Wrong(
                f"{what} is refused, and the tree is not what it was",
                "something is changed before the error is raised: a root is made, a node cut, or "
                "used",
                "what has to be looked at first?",
            )
    for size in (4, 3, 16):
        tree = Tree(mine, size, "AB")
        own = [tree.pool.allocate() for _ in range(5)]
        tree.call(partial(tree.cache.insert, tokens_of("ABC+", size), own), "insert of ABC+")
        equal(
            [tree.pool.ref_count(block_id) for block_id in own],
            [1, 1, 2, 1, 1],
            tree.words("insert of ABC+ with 5 blocks: their reference counts"),
            Suspect(
                [1, 1, 2, 2, 2],
                "blocks without whole blocks of tokens get into the tree as well",
                "how many keys are there?",
            ),
        )
        tree.sound("insert of ABC+ with 5 blocks")
    tree = Tree(mine, 4)
    result = tree.call(lambda: tree.cache.insert([1, 2, 3], []), "insert of 3 tokens")
    equal((list(result.block_ids), result.num_existing), ([], 0), "insert of 3 tokens, blocks of 4")
    tree.sound(
        "insert of 3 tokens",
        root=("a root is made though there is nothing to insert", "when is a root made?"),
    )


@check("07.3", "a salt is a tree of its own", look="which root the walk begins at")
def _(mine):
    tree = Tree(mine, 4)
    for salt in (None, "one", "two"):
        result = tree.insert("ABC", salt)
        equal(
            result.num_existing,
            0,
            f"insert of ABC of salt {salt} into a tree without it: num_existing",
            Suspect(
                3,
                "the salt is ignored: one tenant finds what another has stored",
                "`self._roots` is a dictionary",
            ),
        )
        tree.sound(f"insert of ABC of salt {salt}")
    for salt, expected in ((None, ["A"]), ("one", ["one:A"]), ("three", [])):
        equal(
            tree.names(tree.match("AX", salt).block_ids),
            expected,
            f"stored is ABC of salts None, one and two; a match of AX of salt {salt} finds",
        )


@check("07.3", "evict takes leaves from their end", look="which block of which node goes first")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABCD")
        what = tree.words("evict(2)")
        count = tree.call(partial(tree.cache.evict, 2), "evict(2)")
        gone = tree.names(tree.pool.freed)
        equal(
            gone,
            ["ABCD", "ABC"],
            f"{what} frees",
            Suspect(
                ["A", "AB"],
                "the beginning of a prompt goes first: what is left stands on nothing",
                "which end of the node's lists?",
            ),
            Suspect(
                ["ABCD", "ABC", "AB", "A"],
                "a whole node goes, where 2 blocks were asked for",
                "when does the inner loop stop?",
            ),
            Suspect(
                [],
                "the tree lets go of blocks, and the pool does not hear of it: they are lost",
                "who tells the pool?",
            ),
        )
        equal(count, 2, f"{what} returns", Suspect(None, "nothing is returned", "the last line"))
        equal(
            (tree.cache.num_cached_blocks, tree.cache.num_evictable_blocks),
            (2, 2),
            f"{what}: cached and evictable blocks left",
            Suspect((4, 4), "the two counters are not told", "the last lines of `evict`"),
            Suspect((2, 4), "num_evictable_blocks is not told", "the last lines of `evict`"),
            Suspect((4, 2), "num_cached_blocks is not told", "the last lines of `evict`"),
        )
        tree.sound("evict(2)")
        equal(tree.names(tree.match("ABCD").block_ids), ["A", "AB"], f"{what}, then a match finds")


@check("07.3", "the least recently used goes first, parents last", look="the order of `unlocked`")
def _(mine):
    youngest = (
        "the most recently used goes first",
        "which end of `unlocked` has the oldest?",
    )
    for size in SIZES:
        tree = Tree(mine, size, "A", "B", "C")
        tree.match("A")
        tree.before += "A matched once more; "
        found, what = tree.evict_one_by_one(), tree.words("evicted one by one")
        equal(
            found,
            ["B", "C", "A"],
            what,
            Suspect(["A", "C", "B"], *youngest),
            Suspect([], "nothing is freed", "what `evict` does with a leaf"),
        )
        tree.sound("all evicted")
        tree = Tree(mine, size, "ABCD", "ABE")  # AB, then CD or E
        equal(
            tree.evict_one_by_one(),
            ["ABCD", "ABC", "ABE", "AB", "A"],
            tree.words("evicted one by one"),
        )
        tree.sound("all evicted")
        tree = Tree(mine, size, "ABCD", "XY")
        tree.insert("ABE")
        equal(
            tree.evict_one_by_one(),
            ["ABCD", "ABC", "XY", "X", "ABE", "AB", "A"],
            tree.words("then insert of ABE, evicted one by one"),
            Suspect(
                ["XY", "X", "ABCD", "ABC", "ABE", "AB", "A"],
                "a part that was not inserted got younger",
                "who is touched?",
            ),
        )


@check("07.3", "an insert makes its prefix the most recently used", look="the end of `insert`")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "AB", "C")
        tree.insert("AB")
        equal(
            tree.evict_one_by_one(),
            ["C", "AB", "A"],
            tree.words("then insert of AB again, evicted one by one"),
            Suspect(
                ["AB", "A", "C"],
                "an insert of what is known already does not make it younger",
                "`_touch`: when is it called?",
            ),
        )
        tree.sound("all evicted")


@check("07.3", "a leaf that is empty leaves the tree", look="what happens when its last block goes")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "AB", "AC")
        equal(tree.evict(1), ["AB"], tree.words("evict(1) frees"))
        equal(
            shape_of_sound(tree, "evict(1)"),
            {"A": {"C": {}}},
            tree.words("evict(1): the tree is"),
            Suspect(
                {"A": {"": {}, "C": {}}},
                "a leaf without blocks stays in the tree",
                "`_remove` is there for that",
            ),
        )
        equal(tree.evict(5), ["AC", "A"], tree.words("then evict(5) frees"))
        tree.sound("all evicted")
        tree.insert("AB", "x")
        tree.sound("all evicted, then insert of AB of salt x")
        equal(tree.names(tree.match("AB", "x").block_ids), ["x:A", "x:AB"], "then a match finds")


def shape_of_sound(tree: Tree, what: str) -> dict:
    try:
        return shape_of(tree.cache)
    except IndexError:
        tree.sound(what)
        raise


@check("07.3", "what is locked stays, and evict says how many went", look="when the loop stops")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABC", "ABD", "X")
        node = tree.match("ABC").node
        tree.cache.lock(node)
        tree.before += "ABC locked; "
        tree.pool.freed.clear()
        try:
            count = tree.call(partial(tree.cache.evict, 10), "evict(10)")
        except (StopIteration, RuntimeError) as error:
            raise Wrong(
                f"{tree.words('evict(10)')}: {type(error).__name__}",
                "the loop goes on when nothing unlocked is left",
                "when must it stop, besides when enough is freed?",
            ) from error
        gone = tree.names(tree.pool.freed)
        equal(gone, ["ABD", "X"], tree.words("evict(10) frees"))
        equal(
            count,
            2,
            tree.words("evict(10) returns"),
            Suspect(10, "that is what was asked for, not what went", "what is counted?"),
        )
        tree.sound("evict(10)")
        equal(tree.cache.evict(0), 0, tree.words("evict(0) returns"))
        tree.cache.unlock(node)
        equal(tree.cache.evict(10), 3, tree.words("unlocked again; evict(10) returns"))
    raises(
        ValueError,
        lambda: Tree(mine, 4, "A").cache.evict(-1),
        "evict(-1)",
        "nothing looks at the sign",
        "the first lines of `evict`",
    )


@check("07.3", "a block in use is let go of, not freed", look="what `evict` tells the pool")
def _(mine):
    tree = Tree(mine, 4, "AB")
    block_id = tree.match("AB").block_ids[1]
    tree.pool.acquire(block_id)
    found = tree.call(lambda: tree.cache.evict(1), "evict(1)")
    equal(
        (found, tree.pool.ref_count(block_id)),
        (1, 1),
        "a sequence holds block AB as well; evict(1) returns, and its reference count is then",
    )
    equal(tree.names(tree.match("AB").block_ids), ["A"], "then a match of AB finds")


@check("07.3", "like a dictionary of prefixes, in random traces", look="the checks above")
def _(mine):
    for size in SIZES:
        for seed in (3, 4):
            play(mine, size, seed, 150, "iiimlue")


@check("07.3", "tinypy: a hit has the logits of a miss", look="which blocks are in the tree?")
def _(mine):
    check_hits(mine.RadixCache)


# ── 07.4 Chained hashes ───────────────────────────────────────────────────────


def named(mine, word: str, size: int, salt=None) -> list:
    found = mine.chained_hashes(tokens_of(word, size), size, salt)
    if not isinstance(found, list | tuple):
        raise Wrong(
            f"chained_hashes returns a {type(found).__name__}",
            "a list of names is expected, one for each whole block",
            "what stands after `return`?",
        )
    return list(found)


@check("07.4", "a name for each whole block", look="which tokens belong to a whole block?")
def _(mine):
    for size in SIZES:
        for word in ("ABC", "ABC+", "A", "+", ""):
            if size == 1 and "+" in word:
                continue
            equal(
                len(named(mine, word, size)),
                len(beginnings(word)),
                f"blocks of {size}: names for {word or 'no tokens'}",
                Suspect(
                    len(word), "a rest of less than a block gets a name, too", "`keys_of` is there"
                ),
            )
        equal(
            named(mine, "ABC", size) == named(mine, "ABC", size),
            True,
            f"blocks of {size}: the same prompt twice has the same names",
        )


@check("07.4", "a name stands for everything before it", look="what goes into a block's hash?")
def _(mine):
    for size in SIZES:
        one, other = named(mine, "ABCD", size), named(mine, "AXCD", size)
        equal(
            [a == b for a, b in zip(one, other, strict=True)],
            [True, False, False, False],
            f"blocks of {size}: ABCD and AXCD, which names are equal",
            Suspect(
                [True, False, True, True],
                "a name is made of its own block's tokens alone: the same block behind another "
                "beginning has other K and V",
                "what of the block before goes into the hash?",
            ),
            Suspect(
                [True, False, False, True],
                "only the block before is in a name, not all that came before it",
                "is it the tokens of the block before that you hash, or its name?",
            ),
            Suspect(
                [False] * 4,
                "a name knows of tokens that come later, or of something else that differs",
                "a name stands for the beginning up to the end of its block",
            ),
            Suspect([True] * 4, "the tokens are not in the names", "what goes into the hash?"),
        )
        names = named(mine, "AAAA", size)
        if len(set(names)) < 4:
            raise Wrong(
                f"blocks of {size}: AAAA, the same block four times, has {len(set(names))} "
                "different names, expected 4",
                "where a block stands is not in its name",
                "what of the block before goes into the hash?",
            )


@check("07.4", "another salt, other names", look="where does the salt go?")
def _(mine):
    salts = ("one", "two", None, "None", 1, "1", ("one",), "", 0)
    for size in SIZES:
        for one, other in combinations(salts, 2):
            same = set(named(mine, "ABC", size, one)) & set(named(mine, "ABC", size, other))
            if not same:
                continue
            why = (
                "the salt is not in every name: one tenant's block is found by another",
                "where does the salt go, and does it reach the second block?",
            )
            if str(one) == str(other):
                why = (
                    "the salt's text is in the names, and two salts may have the same text",
                    "what has to go into a name, if any two salts are to differ in it?",
                )
            elif hash(one) == hash(other):
                why = (
                    "Python's hash() of the two is the same",
                    "a name that has the salt itself in it",
                )
            raise Wrong(
                f"blocks of {size}: ABC of salt {one!r} and of salt {other!r} have {len(same)} "
                "names in common, expected 0",
                *why,
            )
        equal(named(mine, "AB", size, "one"), named(mine, "ABC", size, "one")[:2], "the same salt")


@check("07.4", "no two beginnings share a name", look="the docstring names two equal hashes")
def _(mine):
    twins = ([0], [2**61 - 1]), ([1, 2], [1, 2 + 2**61 - 1])  # equal to Python's hash()
    for one, other in twins:
        for size in (1, len(one)):
            if mine.chained_hashes(one, size)[-1] == mine.chained_hashes(other, size)[-1]:
                raise Wrong(
                    f"blocks of {size}: the prompts {one} and {other} have the same name",
                    "Python's hash() of two prompts can be equal; whoever looks for such a pair "
                    "finds one, and gets another's blocks",
                    "a name that is made by sha256, or one that has the tokens themselves in it",
                )
    for one, other in (([1, 23], [12, 3]), ([1, 11], [11, 1]), ([1, 2], [1, 2 + 256])):
        if mine.chained_hashes(one, 2) == mine.chained_hashes(other, 2):
            raise Wrong(
                f"the prompts {one} and {other} have the same name",
                "tokens run into each other on the way into the hash",
                "how are the tokens of a block turned into bytes?",
            )
    different = len({mine.chained_hashes([token], 1)[0] for token in range(5000)})
    equal(
        different,
        5000,
        "5,000 prompts of one token, blocks of 1: different names",
        Suspect(different, "the names are so short that they collide by chance",
                "how many bytes of the hash are in a name?"),
    )  # fmt: skip


class Chain:
    """A reader's ChainedCache; a block is called by the prefix that it ends."""

    def __init__(self, mine, size: int, *words: str, num_blocks: int = 32):
        self.size, self.pool, self.called = size, LoggingPool(num_blocks), {}
        self.cache = mine.ChainedCache(self.pool, size)
        for word in words:
            self.insert(word)
        self.before = f"blocks of {size}; stored: {', '.join(words)}; "

    def insert(self, word: str, salt=None, keep: bool = False):
        """As a sequence that ends; with `keep` it goes on holding what was taken of it."""
        own = [self.pool.allocate() for _ in beginnings(word)]
        result = self.cache.insert(tokens_of(word, self.size), own, salt)
        if result is None:
            raise Wrong("`insert` returns None", "nothing is returned", "the last line")
        for block_id, prefix in zip(own, beginnings(word), strict=True):
            if block_id in result.block_ids:
                self.called[block_id] = f"{salt}:{prefix}" if salt is not None else prefix
            if not keep or block_id not in result.block_ids:
                self.pool.release(block_id)
        return result

    def match(self, word: str, salt=None) -> list[str]:
        result = self.cache.match(tokens_of(word, self.size), salt)
        if result is None:
            raise Wrong("`match` returns None", "nothing is returned", "the last line")
        equal(
            result.num_tokens,
            self.size * len(result.block_ids),
            f"{self.before}match of {word}: num_tokens for {len(result.block_ids)} blocks",
        )
        return self.names(result.block_ids)

    def names(self, block_ids) -> list[str]:
        return [self.called.get(block_id, f"block {block_id}") for block_id in block_ids]

    def evict(self, num_blocks: int) -> list[str]:
        self.pool.freed.clear()
        found = self.cache.evict(num_blocks)
        gone = self.names(self.pool.freed)
        equal(
            found,
            len(gone),
            f"{self.before}evict({num_blocks}) freed {len(gone)} and returns",
            Suspect(None, "nothing is returned", "the last line of `evict`"),
        )
        return gone

    def evict_one_by_one(self) -> list[str]:
        found = []
        while (gone := self.evict(1)) and len(found) < self.pool.num_blocks:
            found += gone
        return found

    def sound(self, what: str) -> None:
        try:
            self.cache.check()
        except AssertionError as error:
            raise Wrong(
                f"{self.before}{what}: check() says: {error}",
                "the cache names a block that it does not hold, or holds one twice",
                "who acquires, who releases, and which block has which name?",
            ) from error


@check("07.4", "match: as far as the chain holds", look="the first name that is not there")
def _(mine):
    for size in SIZES:
        for stored, asked, expected in (
            (["ABC"], "ABC", ["A", "AB", "ABC"]),
            (["ABC"], "ABCDE+", ["A", "AB", "ABC"]),
            (["ABC"], "AB", ["A", "AB"]),
            (["ABC", "ABX"], "ABX", ["A", "AB", "ABX"]),
            (["ABC"], "AXC", ["A"]),
            (["ABC"], "BC", []),
            (["ABC"], "+", []),
        ):
            chain = Chain(mine, size, *stored)
            equal(
                chain.match(asked),
                expected,
                f"{chain.before}match of {asked} finds",
                Suspect([], "nothing is found of what is there", "which names does it look for?"),
                Suspect(
                    expected[:-1], "the last block that is there is left out", "when does it stop?"
                ),
            )


@check("07.4", "insert: new blocks are held, known ones stay", look="which blocks are acquired")
def _(mine):
    for size in SIZES:
        chain = Chain(mine, size, "AB")
        own = [chain.pool.allocate() for _ in range(4)]
        result = chain.cache.insert(tokens_of("ABCD", size), own)
        what = f"{chain.before}insert of ABCD"
        chain.called.update(zip(own, ("own A", "own AB", "ABC", "ABCD"), strict=True))
        equal(
            chain.names(result.block_ids),
            ["A", "AB", "ABC", "ABCD"],
            f"{what}: block_ids of the result",
            Suspect(
                ["own A", "own AB", "ABC", "ABCD"],
                "what was known is exchanged for the caller's blocks: others still stand on the "
                "old ones, and the caller was to give up its copies",
                "whose block stays under a name that is known?",
            ),
            Suspect(["ABC", "ABCD"], "the blocks that were there are missing", "the whole prefix"),
        )
        equal(
            [chain.pool.ref_count(block_id) for block_id in own],
            [1, 1, 2, 2],
            f"{what}: reference counts of the caller's blocks",
            Suspect(
                [1, 1, 1, 1],
                "the cache names blocks that it does not hold",
                "one more holder for each block that is new",
            ),
            Suspect(
                [2, 2, 2, 2],
                "blocks are acquired that the cache does not keep",
                "which of the caller's blocks are new?",
            ),
        )
        equal(result.num_existing, 2, f"{what}: num_existing")
        chain.sound("insert of ABCD")


@check("07.4", "too few blocks are refused, too many left alone", look="how many blocks are needed")
def _(mine):
    for size in (4, 3, 16):
        chain = Chain(mine, size, "AB")
        own = [chain.pool.allocate() for _ in range(3)]
        what = f"{chain.before}insert of ABCD with 3 blocks"
        raises(
            ValueError,
            partial(chain.cache.insert, tokens_of("ABCD", size), own),
            what,
            "nothing compares the number of blocks with that of the names",
            "the first lines of `insert`",
        )
        counts = [chain.pool.ref_count(block_id) for block_id in own]
        if counts != [1, 1, 1] or chain.cache.num_cached_blocks != 2:
            raise Wrong(
                f"{what} is refused; the reference counts of these are {counts} then, expected "
                f"[1, 1, 1], and {chain.cache.num_cached_blocks} blocks are cached, expected 2",
                "blocks are stored before the error is raised",
                "what has to be looked at first?",
            )
        own += [chain.pool.allocate() for _ in range(2)]
        what = f"{chain.before}insert of ABC+ with 5 blocks"
        try:
            chain.cache.insert(tokens_of("ABC+", size), own)
        except ValueError as error:
            raise Wrong(
                f"{what}: ValueError ({error})",
                "more blocks than names are refused, and should be left alone",
                "what does a sequence hold whose last block is not full?",
            ) from error
        equal(
            [chain.pool.ref_count(block_id) for block_id in own],
            [1, 1, 2, 1, 1],
            f"{what}: their reference counts",
            Suspect([1, 1, 2, 2, 2], "blocks without a name are acquired", "how many names?"),
        )
        chain.sound("insert of ABC+ with 5 blocks")


@check("07.4", "tenants do not meet", look="where does the salt go?")
def _(mine):
    for size in SIZES:
        chain = Chain(mine, size, "ABC")
        ignored = ("the salt does not reach the names", "what is handed to chained_hashes?")
        equal(chain.match("ABC", "one"), [], f"{chain.before}match of salt one finds",
              Suspect(["A", "AB", "ABC"], *ignored))  # fmt: skip
        result = chain.insert("ABC", "one")
        equal(result.num_existing, 0, f"{chain.before}insert of salt one: num_existing",
              Suspect(3, *ignored))  # fmt: skip
        equal(chain.match("AB", "one"), ["one:A", "one:AB"], f"{chain.before}the same salt finds")
        equal(chain.match("AB", "two"), [], f"{chain.before}a third one finds")


@check("07.4", "the least recently used goes first, the end of a prompt before its beginning",
       look="the order in `self.blocks`")  # fmt: skip
def _(mine):
    front = (
        "a block goes before those that follow it: they stay, and nobody can find them",
        "in which order are the blocks of one prompt made the most recently used?",
    )
    for size in SIZES:
        chain = Chain(mine, size, "ABC")
        equal(
            chain.evict_one_by_one(),
            ["ABC", "AB", "A"],
            f"{chain.before}evicted one by one",
            Suspect(["A", "AB", "ABC"], *front),
        )
        chain = Chain(mine, size, "AB", "X")
        chain.match("AB")
        chain.before += "AB matched again; "
        equal(
            chain.evict_one_by_one(),
            ["X", "AB", "A"],
            f"{chain.before}evicted one by one",
            Suspect(["AB", "A", "X"], "a match does not make younger", "what `match` changes"),
            Suspect(["X", "A", "AB"], *front),
            Suspect(
                ["A", "AB", "X"], "the most recently used goes first", "which end is the oldest?"
            ),
        )
        chain = Chain(mine, size, "AB", "X")
        chain.insert("AB")
        chain.before += "AB again; "
        equal(
            chain.evict_one_by_one(),
            ["X", "AB", "A"],
            f"{chain.before}evicted one by one",
            Suspect(["AB", "A", "X"], "an insert does not make younger", "what `insert` changes"),
            Suspect(["X", "A", "AB"], *front),
        )
        chain = Chain(mine, size, "ABC", "X")
        chain.match("A")
        chain.before += "A matched again; "
        equal(
            chain.evict_one_by_one(),
            ["ABC", "AB", "X", "A"],
            f"{chain.before}evicted one by one",
            Suspect(
                ["X", "ABC", "AB", "A"],
                "a match makes the whole stored prompt younger, not only what it found",
                "which names does `match` touch?",
            ),
        )


@check("07.4", "what a sequence holds is not evicted", look="who else holds the block?")
def _(mine):
    for size in SIZES:
        chain = Chain(mine, size)
        chain.insert("AB", keep=True)
        chain.insert("X")
        equal(
            (chain.cache.num_cached_blocks, chain.cache.num_evictable_blocks),
            (3, 1),
            f"blocks of {size}; AB of a sequence that runs, X of none: cached and evictable",
        )
        chain.before = f"blocks of {size}; AB of a sequence that runs, X of none; "
        used = (
            "a block that a running sequence uses is evicted: nothing becomes free, and the "
            "prefix is lost",
            "the pool knows how many hold a block",
        )
        chain.pool.freed.clear()
        found, gone = chain.cache.evict(3), chain.names(chain.pool.freed)
        if chain.cache.num_cached_blocks == 3:
            used = "it stops at the first block that is in use", "who may come behind that one?"
        equal(gone, ["X"], f"{chain.before}evict(3) frees", Suspect([], *used))
        equal(
            (found, chain.match("AB")),
            (1, ["A", "AB"]),
            f"{chain.before}evict(3) returns, and a match of AB finds then",
            Suspect((3, []), *used),
            Suspect((3, ["A", "AB"]), "that is what was asked for", "what is counted?"),
        )
        chain.sound("evict(3)")
    raises(
        ValueError,
        lambda: Chain(mine, 4, "A").cache.evict(-1),
        "evict(-1)",
        "nothing looks at the sign",
        "the first lines of `evict`",
    )


@check("07.4", "a block whose parent is gone", look="what a match makes of a gap in the chain")
def _(mine):
    for size in SIZES:
        chain = Chain(mine, size)
        own = [chain.pool.allocate() for _ in "ABC"]
        chain.cache.insert(tokens_of("ABC", size), own)
        chain.called.update(zip(own, beginnings("ABC"), strict=True))
        for block_id in own[:2]:
            chain.pool.release(block_id)
        chain.evict(2)  # the last is in use, so its ancestors go
        chain.before = f"blocks of {size}; A and AB evicted, ABC in use; "
        equal(
            chain.match("ABC"),
            [],
            f"{chain.before}match of ABC finds",
            Suspect(
                ["ABC"],
                "the walk goes on behind a block that is missing: a prefix with a hole is none",
                "when does `match` stop?",
            ),
        )
        chain.insert("ABC")
        chain.sound("insert of ABC")
        equal(chain.match("ABC"), beginnings("ABC"), f"{chain.before}insert of ABC; match finds")
        chain.pool.release(own[2])
        chain.cache.evict(10)
        equal(chain.pool.num_free, chain.pool.num_blocks, f"{chain.before}all let go: free blocks")


@check("07.4", "the radix tree finds and evicts the same", look="the checks above")
def _(mine):
    for size in SIZES:
        draw, chain = random.Random(size), Chain(mine, size, num_blocks=24)
        tree = Tree(minikv, size, num_blocks=24)
        for step_ in range(150):
            word = "".join(draw.choices("AB", k=draw.randint(1, 5)))
            salt, kind = draw.choice(SALTS), draw.choice("iimme")
            if kind == "i" and len(word) > chain.pool.num_free:
                kind = "e"
            if kind == "e":
                count = draw.randint(0, 4)
                what, found, wanted = f"evict({count})", chain.evict(count), tree.evict(count)
            elif kind == "i":
                result, other = chain.insert(word, salt), tree.insert(word, salt)
                what = f"insert of {word} of salt {salt}"
                found = [result.num_existing, *chain.names(result.block_ids)]
                wanted = [other.num_existing, *tree.names(other.block_ids)]
            else:
                what, found = f"match of {word} of salt {salt}", chain.match(word, salt)
                wanted = tree.names(tree.match(word, salt).block_ids)
            equal(found, wanted, f"blocks of {size}, step {step_}, {what}")
            chain.sound(what)


@check("07.4", "tinypy: a hit has the logits of a miss", look="which blocks have which names?")
def _(mine):
    check_hits(mine.ChainedCache)


# ── 07.5 A prefix that vanished ───────────────────────────────────────────────

EVICTED = (
    "`lock` does not cover the node that was matched, where the sequence stands",
    "with which node does the loop of `lock` begin?",
)
NO_ANCESTORS = (
    "only the node itself is locked, not what it stands on",
    "does the loop of `lock` go through all nodes, up to the child of the root?",
)


@check("07.5", "what a request stands on stays", look="which nodes does `lock` go through?")
def _(mine):
    for size in SIZES:
        for stored, word in ((["ABC", "X"], "ABC"), (["ABC", "ABX"], "ABC"), (["A", "XY"], "A")):
            tree = Tree(mine, size, *stored)
            node = tree.match(word).node
            tree.call(lambda tree=tree, node=node: tree.cache.lock(node), f"lock of {word}")
            tree.cache.evict(100)
            what = tree.words(f"{word} locked, evict(100); a match of {word} finds")
            found = tree.match(word).block_ids
            own = len(spelled(node)) if node.keys else len(word)
            equal(
                tree.names(found),
                beginnings(word),
                what,
                Suspect(beginnings(word)[: len(word) - own], *EVICTED),
                Suspect([], "nothing is locked, or not all the way up", "both ends of the loop"),
            )


@check("07.5", "evictable is what nobody stands on", look="num_evictable_blocks, node by node")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABCD", "ABE", "X")  # AB, then CD or E
        found = [tree.cache.num_evictable_blocks]
        nodes = [tree.match(word).node for word in ("ABCD", "ABE")]
        for node in nodes:
            tree.call(lambda tree=tree, node=node: tree.cache.lock(node), "lock")
            found.append(tree.cache.num_evictable_blocks)
        equal(
            found,
            [6, 2, 1],
            tree.words("evictable blocks, then with ABCD locked, then with ABE, too"),
            Suspect([6, 4, 4], *EVICTED),
            Suspect([6, 4, 3], *NO_ANCESTORS),
            Suspect([6, 2, -1], "blocks that two requests stand on are subtracted twice",
                    "when does a node stop being evictable?"),
            Suspect([6, 6, 6], "the number is not kept", "what `lock` does with the counter"),
        )  # fmt: skip
        tree.sound("ABCD and ABE locked")


@check("07.5", "locks nest, and all of them can be undone", look="`lock` and `unlock` line by line")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABCD", "ABE", "X")
        nodes = [tree.match(word).node for word in ("ABCD", "ABCD", "ABE")]
        for node in nodes:
            tree.call(partial(tree.cache.lock, node), "lock")
        locks = dict(sorted((spelled(node), node.lock_count) for node in tree.cache.nodes()))
        equal(
            locks,
            {"AB": 3, "CD": 2, "E": 1, "X": 0},
            tree.words("ABCD locked twice and ABE once: lock counts of the nodes"),
            Suspect({"AB": 3, "CD": 0, "E": 0, "X": 0}, *EVICTED),
            Suspect({"AB": 0, "CD": 2, "E": 1, "X": 0}, *NO_ANCESTORS),
            Suspect({"AB": 1, "CD": 1, "E": 1, "X": 0}, "locks are not counted: the first unlock "
                    "ends all of them", "two requests may stand on one node"),
        )  # fmt: skip
        found = []
        for node in nodes:
            try:
                tree.call(partial(tree.cache.unlock, node), "unlock")
            except ValueError as error:
                raise Wrong(
                    f"{tree.words('unlock of what was locked')}: ValueError ({error})",
                    "`unlock` does not go through the nodes that `lock` went through",
                    "with which node does each of the two begin?",
                ) from error
            found.append(tree.cache.num_evictable_blocks)
        equal(
            found,
            [1, 3, 6],
            tree.words("ABCD locked twice and ABE once, unlocked in that order: evictable blocks"),
            Suspect(
                [1, 1, 3],
                "`unlock` leaves the matched node locked: it can never be evicted again",
                "with which node does the loop of `unlock` begin?",
            ),
            Suspect(
                [1, 3, 4],
                "`unlock` does not go up: what the node stands on is locked for ever",
                "does the loop of `unlock` go up to the root?",
            ),
            Suspect(
                [1, 1, 1],
                "`unlock` gives nothing back",
                "when does a node become evictable again?",
            ),
        )
        tree.sound("all unlocked", younger=FROM_THE_ROOT)
        equal(len(tree.evict_one_by_one()), 6, tree.words("all unlocked: blocks that can be freed"))


@check(
    "07.5",
    "a node that is cut while it is locked",
    look="with which node do both begin?",
)
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "ABC")
        node = tree.match("ABC").node
        tree.cache.lock(node)
        tree.match("A")  # cuts the node in two
        equal(
            tree.cache.num_evictable_blocks,
            0,
            tree.words("ABC locked, then a match of A: evictable blocks"),
            Suspect(3, *EVICTED),
        )
        try:
            tree.cache.unlock(node)
        except ValueError as error:
            raise Wrong(
                f"{tree.words('ABC locked, a match of A, then unlock')}: ValueError ({error})",
                "`unlock` does not go through the nodes that `lock` went through",
                "with which node does each of the two begin?",
            ) from error
        equal(tree.cache.num_evictable_blocks, 3, tree.words("and unlocked: evictable blocks"))
        tree.sound("ABC locked, a match of A, then unlock", younger=FROM_THE_ROOT)


@check("07.5", "one unlock too many is refused, and a miss may be locked", look="the first lines")
def _(mine):
    for size in SIZES:
        tree = Tree(mine, size, "AB", "AC")
        node = tree.match("AB").node
        raises(
            ValueError,
            lambda tree=tree, node=node: tree.cache.unlock(node),
            tree.words("unlock of AB, which is not locked"),
            "`unlock` looks at another node than the one it is given",
            "which node's lock_count is compared with 0?",
        )
        tree.sound("unlock of AB was refused")
        for salt in (None, "new"):
            miss = tree.match("X", salt).node
            tree.call(lambda tree=tree, miss=miss: tree.cache.lock(miss), "lock of a miss")
            tree.call(lambda tree=tree, miss=miss: tree.cache.unlock(miss), "unlock of a miss")
        equal(tree.cache.num_evictable_blocks, 3, tree.words("a miss locked: evictable blocks"))


@check("07.5", "like a dictionary of prefixes, in random traces", look="the checks above")
def _(mine):
    for size in SIZES:
        for seed in (5, 6):
            play(mine, size, seed, 150, "iimlluue")


@check("07.5", "tinypy: who comes later finds what is in use", look="the checks above")
def _(mine):
    system, one, other = prompt_of(STACK), prompt_of("import os\n"), prompt_of("def fib(n):")
    engine, outputs = engine_on(mine.RadixCache, num_blocks=32), {}
    add(engine, system, 1)
    finish(engine)
    first = add(engine, system + one, 12)
    step(engine, outputs)
    engine.cache.evict(32)  # as if others had needed all that can be had
    before = engine.stats().hit_tokens
    second = add(engine, system + other, 12)
    step(engine, outputs)
    wanted = len(system) // 4 * 4
    equal(
        engine.stats().hit_tokens - before,
        wanted,
        f"a request runs on a prefix of {wanted} tokens; all that is evictable is evicted; of the "
        "same prefix the next request finds",
        Suspect(0, *EVICTED),
    )
    finish(engine, outputs)
    for request_id, rest in ((first, one), (second, other)):
        equal(outputs[request_id], oracle(tuple(system + rest), 12), "new tokens")
    engine.cache.evict(32)
    equal(engine.pool.num_free, 32, "all requests are done, all is evicted: free blocks of 32")


# ── 07.6 Three hits that went wrong ───────────────────────────────────────────

LOOKUP = "`look_up`: what it asks the cache for, and when"
SHARING = "`share_full_blocks`: the loop over the blocks that are new in the tree"


def only(mine, method: str) -> type:
    """The reader's scheduler with nothing but `method` of what is to be mended: the other one is
    the reference's."""
    [other] = {"look_up", "share_full_blocks"} - {method}
    return type("Scheduler", (mine.Scheduler,), {other: vars(minikv.Scheduler)[other]})


@check("07.6", "two equal prompts in one step", look=SHARING)
def _(mine):
    scheduler = only(mine, "share_full_blocks")
    prompt = (prompt_of(STACK) * 2)[:13]
    for size, count in ((4, 2), (4, 3), (1, 2), (3, 2)):
        engine = engine_on(minikv.RadixCache, scheduler, block_size=size, num_blocks=64)
        ids = [add(engine, prompt, 9) for _ in range(count)]
        engine.step()
        tables = [list(sequence.table.block_ids) for sequence in engine.scheduler]
        full = 13 // size
        what = (
            f"{count} requests with the same {len(prompt)} tokens, blocks of {size}, after step 1"
        )
        counts = [engine.pool.ref_count(block_id) for table in tables for block_id in table[:full]]
        if 0 in counts:
            raise Wrong(
                f"{what}: the block table of a running request names {counts.count(0)} blocks "
                "that are free: whoever allocates next writes over them",
                "our own copies are given back, and the table goes on naming them",
                SHARING,
            )
        if any(table[:full] != tables[0][:full] for table in tables):
            raise Wrong(
                f"{what}: the tables name {len({tuple(t[:full]) for t in tables})} copies of the "
                "same prefix, expected 1",
                "a table goes on with its own copies, though the tree has the same blocks",
                SHARING,
            )
        equal(
            counts,
            [count + 1] * (count * full),
            f"{what}: reference counts of the {full} shared blocks, table by table",
            Suspect(
                [count] * (count * full),
                "a block lost a holder that is still there",
                "`replace` acquires and releases by itself",
            ),
        )
        equal(
            engine.pool.num_blocks - engine.pool.num_free,
            full + count * (13 % size > 0),
            f"{what}: blocks in use",
            Suspect(
                count * -(-13 // size),
                "the copies that were replaced are never released",
                "`replace` acquires and releases by itself",
            ),
        )
        outputs = finish(engine)
        for request_id in ids:
            equal(outputs[request_id], oracle(tuple(prompt), 9), f"{what}, to the end: new tokens")
    engine, outputs = engine_on(minikv.RadixCache, scheduler), {}
    ids = [add(engine, prompt, 3) for _ in range(2)]
    step(engine, outputs)
    free = [engine.pool.allocate() for _ in range(engine.pool.num_free)]
    engine.store.blocks[:, free] = 9.0  # as if somebody used what is free
    for block_id in free:
        engine.pool.release(block_id)
    finish(engine, outputs)
    for request_id in ids:
        if outputs[request_id] != oracle(tuple(prompt), 3):
            raise Wrong(
                "two equal prompts in one step; the blocks that are free then are written to: "
                f"new tokens {outputs[request_id]}, expected {oracle(tuple(prompt), 3)}",
                "the next step still reads the blocks that were given back: nobody told the batch "
                "builder that the table has changed",
                "`sequence.table_version`",
            )


@check("07.6", "a prompt that is cached to its last token", look=LOOKUP)
def _(mine):
    scheduler = only(mine, "look_up")
    for size in (4, 1, 3):
        prompt = (prompt_of(STACK) * 2)[:12]
        engine = engine_on(minikv.RadixCache, scheduler, block_size=size)
        add(engine, prompt, 5)
        finish(engine)
        before = engine.stats()
        what = f"12 tokens, all of them cached, blocks of {size}"
        request_id = add(engine, prompt, 5)
        try:
            outputs = finish(engine)
        except (RuntimeError, LookupError) as error:
            raise Wrong(
                f"{what}: {type(error).__name__} ({error})",
                "with a hit on every token there is nothing left to compute, so no logits, and "
                "no first token",
                LOOKUP,
            ) from error
        equal(
            engine.stats().hit_tokens - before.hit_tokens,
            12 - size,
            f"{what}: tokens found",
            Suspect(
                12 - 2 * size,
                "more is given away than has to be: one token must be left, and its block",
                "how many tokens short of the prompt may the longest hit end?",
            ),
            Suspect(0, "a full hit is no hit at all any more", "one token must be left"),
        )
        equal(outputs[request_id], oracle(tuple(prompt), 5), f"{what}: new tokens")
        add(engine, prompt, 5)
        [waiting] = engine.scheduler.waiting
        match = engine.scheduler.look_up(waiting)
        if match is not None and on_path(match.node) != list(match.block_ids):
            raise Wrong(
                f"{what}: {len(match.block_ids)} blocks in the result, and its node ends with "
                f"block {len(on_path(match.node))}",
                "the hit is cut and its node is not: the lock holds more than the hit",
                "can the cache be asked for what you want?",
            )
    prompt = (prompt_of(STACK) * 2)[:14]  # a hit of 12, and two tokens behind it
    engine = engine_on(minikv.RadixCache, scheduler)
    finish(engine, {add(engine, prompt, 1): []})
    add(engine, prompt, 1)
    finish(engine)
    equal(
        engine.stats().hit_tokens,
        12,
        "14 tokens, 12 of them in whole blocks of 4 and cached: tokens found",
        Suspect(
            8,
            "a whole block is left to compute, though the hit ends before the last token",
            "how many tokens must be left?",
        ),
    )


STALE = (
    "what was found at an earlier attempt is used again: its blocks were evicted since, and may "
    "be somebody else's by now",
    LOOKUP,
)


@check("07.6", "a hit that is gone when its turn comes", look=LOOKUP)
def _(mine):
    prefix, rest = prompt_of(STACK)[:12], prompt_of(QUEUE)[:9]
    other = prompt_of("import os\n")[:3] + prompt_of(QUEUE)[9:13]
    engine = engine_on(minikv.RadixCache, only(mine, "look_up"), num_blocks=8)
    add(engine, prefix, 1)
    finish(engine)  # 3 blocks stay cached
    outputs: dict[int, list[int]] = {}
    first = add(engine, other, 9)
    step(engine, outputs)
    held = [engine.pool.allocate() for _ in range(2)]
    second = add(engine, prefix + rest, 3)
    engine.step()  # it finds its 12 tokens, and no room for the rest
    engine.cache.evict(3)
    for block_id in held:
        engine.pool.release(block_id)
    what = "a request finds 12 tokens and has to wait; they are evicted; then its turn comes"
    finish_stale(engine, outputs, what)
    if engine.stats().hit_tokens:
        raise Wrong(f"{what}: {engine.stats().hit_tokens} tokens found, expected 0", *STALE)
    equal(outputs[first], oracle(tuple(other), 9), f"{what}: the other's new tokens")
    equal(outputs[second], oracle(tuple(prefix + rest), 3), f"{what}: its new tokens")


def finish_stale(engine: minikv.Engine, outputs: dict[int, list[int]], what: str) -> None:
    try:
        finish(engine, outputs)
    except (ValueError, KeyError, RuntimeError, Wrong) as error:
        raise Wrong(f"{what}: {type(error).__name__} ({error})", *STALE) from error


@check("07.6", "a hit that is gone after a preemption", look=LOOKUP)
def _(mine):
    prefix, rest = prompt_of(STACK)[:8], prompt_of(QUEUE)[:6]
    other = prompt_of("import os\n")[:3] + prompt_of(QUEUE)[9:17]
    engine = engine_on(minikv.RadixCache, only(mine, "look_up"), num_blocks=8)
    add(engine, prefix, 1)
    finish(engine)
    jobs, outputs = [(other, 17), (prefix + rest, 15)], {}
    ids = [add(engine, *job) for job in jobs]
    while not engine.stats().preemptions:
        step(engine, outputs)
    engine.cache.evict(100)
    what = "a request is preempted; what it had found is evicted; then it comes back"
    finish_stale(engine, outputs, what)
    for request_id, (prompt, count) in zip(ids, jobs, strict=True):
        if outputs[request_id] != oracle(tuple(prompt), count):
            raise Wrong(f"{what}: other tokens than the oracle's", *STALE)
    engine = engine_on(minikv.RadixCache, only(mine, "look_up"))
    request_id = add(engine, prefix, 12)
    for _ in range(7):
        step(engine, {})
    [sequence] = engine.scheduler.running
    engine.scheduler.preempt(sequence, minikv.Plan())
    match, length = engine.scheduler.look_up(sequence), len(sequence.token_ids)
    equal(
        match.num_tokens if match is not None else 0,
        (length - 1) // 4 * 4,
        f"preempted with {len(prefix)} tokens of the prompt and {length - len(prefix)} new ones, "
        "nothing evicted, blocks of 4: tokens that it finds",
        Suspect(
            (len(prefix) - 1) // 4 * 4,
            "only the prompt is looked up, and what it has said itself is computed again",
            "`request.prompt_ids` or `sequence.token_ids`?",
        ),
        Suspect(0, *STALE),
    )
    equal(finish(engine)[request_id], oracle(tuple(prefix), 12), "preempted: new tokens")


@check("07.6", "salt, threshold and swap are as they were", look=LOOKUP)
def _(mine):
    scheduler = only(mine, "look_up")
    prompt = (prompt_of(STACK) * 2)[:21]
    engine, found = engine_on(minikv.RadixCache, scheduler), []
    for salt in ("one", "two", "one", None, None):
        before = engine.stats().hit_tokens
        add(engine, prompt, 1, cache_salt=salt)
        finish(engine)
        found.append(engine.stats().hit_tokens - before)
    equal(
        found,
        [0, 0, 20, 0, 20],
        "21 tokens of salts one, two, one, none and none: tokens found",
        Suspect(
            [0, 20, 20, 20, 20],
            "the salt is left out: tenants find each other's prefixes",
            "`sequence.request.params.cache_salt`",
        ),
        Suspect(
            [0, 0, 0, 0, 20],
            "the salt is left out: what a tenant stored under its salt it does not find",
            "`sequence.request.params.cache_salt`",
        ),
    )
    found = []
    for least in (20, 21):
        engine = engine_on(minikv.RadixCache, scheduler, min_prefix_tokens=least)
        for _ in range(2):
            add(engine, prompt, 1)
            finish(engine)
        found.append(engine.stats().hit_tokens)
    equal(
        found,
        [20, 0],
        "20 tokens of 21 are cached; min_prefix_tokens=20 and 21: tokens found",
        Suspect([20, 20], "the threshold is gone: every hit is used", "`min_prefix_tokens`"),
        Suspect([0, 0], "a hit as long as the threshold is refused", "`min_prefix_tokens`"),
    )
    engine = engine_on(minikv.RadixCache, scheduler, preemption="swap", swap_blocks=16)
    add(engine, prompt, 16)
    step(engine, {})
    [sequence] = engine.scheduler.running
    plan = minikv.Plan()
    engine.scheduler.preempt(sequence, plan)
    if engine.scheduler.look_up(sequence) is not None:
        raise Wrong(
            "a request that is swapped out finds its prompt in the cache",
            "its keys and values come back from the host, all of them, into blocks of its own; a "
            "hit would have them written to blocks that others read",
            "the first lines of `look_up`",
        )
    engine = minikv.Engine(tinypy(), minikv.EngineConfig(prefix_cache=False), scheduler=scheduler)
    add(engine, prompt, 2)
    equal(finish(engine), {0: oracle(tuple(prompt), 2)}, "without a prefix cache: new tokens")


# ── The reader's parts in the engine ──────────────────────────────────────────


def busy(prefix_cache, scheduler=minikv.Scheduler) -> str:
    """Shared prompts, equal prompts, two tenants and a chat that grows, in a pool that is too
    small for all of them. Raises AssertionError for other tokens than the oracle's."""
    system = prompt_of(STACK)
    asked = [
        system + prompt_of(f"    def {name}(self):\n") for name in ("pop", "top", "size", "top")
    ]
    engine = engine_on(prefix_cache, scheduler, num_blocks=15, min_prefix_tokens=4)
    jobs = [(prompt, 6, {}) for prompt in asked]
    jobs += [(asked[0], 6, {"cache_salt": "tenant"}), (system[:20], 16, {})]
    ids = [add(engine, prompt, count, **more) for prompt, count, more in jobs]
    outputs = finish(engine)
    chat = system
    for text in ("    def push(", "    def pop(", "    def top("):
        chat = chat + prompt_of(text)
        jobs.append((chat, 5, {}))
        ids.append(add(engine, chat, 5))
        outputs |= finish(engine)
        chat = chat + outputs[ids[-1]]
    for request_id, (prompt, count, _) in zip(ids, jobs, strict=True):
        if outputs[request_id] != oracle(tuple(prompt), count):
            raise AssertionError(f"a prompt of {len(prompt)} tokens: not the oracle's tokens")
    engine.cache.evict(15)
    if engine.pool.num_free != 15:
        raise AssertionError(f"{15 - engine.pool.num_free} blocks are lost")
    stats = engine.stats()
    return (
        f"{len(jobs)} requests in {engine.config.num_blocks} blocks of 4, same tokens as the "
        f"oracle; {stats.hit_tokens} of {stats.looked_up_tokens} prompt tokens found in the cache, "
        f"{stats.preemptions} preemptions"
    )


@runs_model("07.2", "07.3", "07.5", "07.6")
def _(mine, lm: minikv.LanguageModel) -> str:
    """On a radix tree and a scheduler of which some is the reader's."""
    return f"{busy(mine.RadixCache, mine.Scheduler)}."


@runs_model("07.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    """The same without a tree."""
    return f"{busy(mine.ChainedCache)}, on your chained hashes."
