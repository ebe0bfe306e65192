"""Chapter 07 as programs: tree, chained hashes, locks, hits in the engine, turns, pins."""

import inspect
import random
import re
import struct
from collections import Counter
from contextlib import suppress
from functools import cache, partial, total_ordering
from itertools import combinations
from string import ascii_letters
from types import SimpleNamespace
from typing import Any

import minikv
from minikv.course.chapters.ch04_paged_blocks import together
from minikv.course.chapters.ch07_radix_prefix_cache import retention
from minikv.course.chapters.ch07_radix_prefix_cache.append_only import two_turns
from minikv.course.judge.checking import Wrong, check, runs_model, same_as_oracle, tinypy, witness
from minikv.course.judge.programs import at_most, under
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.course.judge.stand_ins import LoggingPool
from minikv.course.reader.mine import PassedParts
from minikv.engine import Loop
from minikv.radix import Node

SIZES = (4, 1, 3, 16)
SALTS = {"": None, "x": "x", "y": "y", "empty": "", "zero": 0, "None": "None", "X": "X",
         "tuple": ("x",), "text": "('x',)", "blank": "x ", "minus": -1, "bytes": b"x"}  # fmt: skip


# ── Prompts as words, blocks called by the prefix that they end ───────────────


def tokens_of(word: str, size: int) -> list[int]:
    """A block for each letter. Capitals differ in the last token of their block alone, small
    letters in the first: "a" has the tokens of "A" in another order, where a block has several.
    "+" is the beginning of one more block, all but its last token."""
    token_ids = []
    for letter in written_out(word):
        rest = [7] * (size - 1)
        last = [] if letter == "+" else [ord(letter.upper() if rest else letter)]
        token_ids += last + rest if letter.islower() else rest + last
    return token_ids


def spelled(keys) -> str:
    """The letters of some blocks."""
    return "".join(chr(key[-1] if key[-1] != 7 else key[0]) for key in keys)


def written_out(word: str) -> str:
    """ "A*3" is "AAA"."""
    letters, _, times = word.partition("*")
    return letters * int(times or 1)


def beginnings(word: str) -> list[str]:
    """What the blocks of a prompt are called: "ABC" has A, AB and ABC."""
    word = written_out(word).rstrip("+")
    return [word[:end] for end in range(1, len(word) + 1)]


def called(names: dict[int, str], block_ids) -> list | str:
    """Blocks by their names."""
    if not isinstance(block_ids, list | tuple):
        return "nothing" if block_ids is None else f"a {type(block_ids).__name__}"
    return [names.get(block_id, f"block {block_id}") for block_id in block_ids]


# ── 07.1, 07.2, 07.4 The radix tree; 07.3 the cache without one ───────────────

# A program is (block size, prompts that are there already, steps, what is looked at). Steps:
#     insert ABC     by a request that ends then      insert ABC:x     of salt x
#     keep ABC       by a request that goes on        end ABC          that one ends
#     tail ABC       it keeps its last block alone    give ABC 2       an insert with two blocks
#     empty ABC      the caller empties its lists     match ABC, lock ABC, unlock ABC
#     evict 2        two blocks                       evict all        one by one


def steps_on(cache: str, mine, program, log: Log) -> None:
    steps = Steps(getattr(mine, cache), program, log)
    for step in program[2].split("; "):
        steps.do(*step.split())
    for text, block_ids in steps.found if "later" in program[3] else ():
        log("at the end", {f"what {text} had returned:": called(steps.names, block_ids)})


class Steps:
    """A reader's cache, and what is done to it."""

    def __init__(self, kind: type, program, log: Log):
        self.size, stored, _, self.looks = program
        # "A*1100" has a block for each letter.
        self.log, self.pool = log, LoggingPool(2400 if "*" in stored else 64)
        self.cache: Any = None  # a tree, or what can take its place
        self.names: dict[int, str] = {}
        self.held: dict[str, list[int]] = {}  # by requests
        self.given: dict[str, tuple[list[int], list[int]]] = {}  # the callers' own lists
        self.nodes: dict[str, list] = {}  # that are locked
        self.found: list[tuple[str, list]] = []  # what was returned
        log(f"blocks of {self.size}" + (f"; cached: {', '.join(stored.split())}" if stored else ""))
        self.cache = kind(self.pool, self.size)
        tree = isinstance(self.cache, minikv.RadixCache)
        first = minikv.RadixCache(self.pool, self.size) if tree else self.cache
        for word in stored.split():
            own = self.allocate(word, len(beginnings(word)))
            first.insert(tokens_of(word, self.size), own)
            for block_id in own:
                self.pool.release(block_id)
        if tree:  # it was put there by the reference
            vars(self.cache).update(vars(first))

    def do(self, verb: str, prompt: str, *more: str) -> None:
        getattr(self, verb)(prompt, *more)
        if seen := self.seen():
            self.log(self.log.events[-1].text, seen)

    def allocate(self, prompt: str, count: int) -> list[int]:
        """Blocks of a request, called by the prefixes that they will hold."""
        word, _, salt = prompt.partition(":")
        self.names = {b: name for b, name in self.names.items() if self.pool.ref_count(b)}
        own = [self.pool.allocate() for _ in range(count)]
        whole, taken = len(beginnings(word)), set(self.names.values())
        for place, block_id in enumerate(own, 1):
            name = word[:place] if place <= whole else f"block {place}"
            name = f"{salt}:{name}" if salt else name
            self.names[block_id] = f"the caller's {name}" if name in taken else name
            taken.add(self.names[block_id])
        return own

    def asked(self, prompt: str) -> tuple[list[int], tuple, str]:
        """(tokens, (salt,) or (), in words)."""
        word, _, salt = prompt.partition(":")
        more: tuple = (SALTS[salt],) if salt else ()
        return tokens_of(word, self.size), more, word + (f" of salt {more[0]!r}" if salt else "")

    def call(self, text: str, function, *arguments, see: bool = False):
        """As `log.call`. A node in an error's message is called by its letters, and a call that
        is refused must change nothing."""

        def tidy(*arguments):
            try:
                return function(*arguments)
            except KeyError as error:
                if isinstance(error.args[0], Node):
                    error.args = (f"the node {spelled(error.args[0].keys)}".strip(),)
                raise

        before = self.everything()
        result = self.log.call(text, tidy, *arguments, see=see)
        if self.log.events[-1].error is not None:
            changed = self.everything() != before
            self.log(text, {"it is refused, and something has changed:": changed})
        return result

    def insert(self, prompt: str) -> None:
        self.put(prompt, "insert of {}")
        self.release(prompt)

    def give(self, prompt: str, count: str) -> None:
        self.put(prompt, f"insert of {{}} with {count} block{'s' * (count != '1')}", int(count))
        self.release(prompt)

    def keep(self, prompt: str) -> None:
        self.put(prompt, "insert of {} by a request that continues")

    def end(self, prompt: str) -> None:
        self.release(prompt)
        self.log(f"the request of {prompt} ends")

    def tail(self, prompt: str) -> None:
        self.release(prompt, keep=1)
        self.log(f"of {prompt} only the last block is still in use")

    def empty(self, prompt: str) -> None:
        for one in self.given[prompt]:
            one.clear()
        self.log("the caller empties the lists that it had handed in")

    def put(self, prompt: str, text: str, count: int | None = None) -> None:
        token_ids, more, words = self.asked(prompt)
        text = text.format(words)
        count = len(beginnings(prompt.partition(":")[0])) if count is None else count
        own = self.allocate(prompt, count)
        self.held.setdefault(prompt, []).extend(own)
        self.given[prompt] = token_ids, list(own)
        arguments = *self.given[prompt], *more
        result = self.call(text, self.cache.insert, *arguments)
        counts = [self.pool.ref_count(block_id) for block_id in own]
        holders = {"reference counts of the caller's blocks:": counts}
        self.result(text, result, "block_ids of the result:", "num_existing", holders)

    def release(self, prompt: str, keep: int = 0) -> None:
        held = self.held.pop(prompt, [])
        for block_id in held[: len(held) - keep]:
            with suppress(ValueError):  # it is free already: the counts have told so
                self.pool.release(block_id)
        if keep:
            self.held[prompt] = held[-keep:]

    def match(self, prompt: str):
        token_ids, more, words = self.asked(prompt)
        text = f"match of {words}"
        result = self.call(text, self.cache.match, token_ids, *more)
        self.result(text, result, "finds", "num_tokens", {})
        return result and result.node

    def result(self, text: str, result, blocks: str, number: str, more: dict) -> None:
        if result is None:
            self.log(text, {"what comes back:": None})
            return
        self.found.append((f"the {text}", result.block_ids))
        if "result" in self.looks:
            found = called(self.names, result.block_ids)
            self.log(text, {blocks: found, f"{number}:": getattr(result, number)} | more)
        if "node" in self.looks:
            path = called(self.names, on_path(result.node))
            self.log(text, {"blocks from the root to the end of its node:": path})

    def lock(self, prompt: str) -> None:
        node = self.match(prompt)
        self.nodes.setdefault(prompt, []).append(node)
        self.call(f"lock of {self.asked(prompt)[2]}", self.cache.lock, node)

    def unlock(self, prompt: str) -> None:
        locked = self.nodes.get(prompt)
        text = f"unlock of {self.asked(prompt)[2]}"
        node, see = (locked.pop(), False) if locked else (self.match(prompt), True)
        self.call(text, self.cache.unlock, node, see=see)

    def evict(self, count: str) -> None:
        self.pool.freed.clear()
        text = "evict(1) until nothing goes" if count == "all" else f"evict({count})"
        call = self.one_by_one if count == "all" else partial(self.cache.evict, int(count))
        gone = self.call(text, call, see=count == "-1")
        freed = called(self.names, list(self.pool.freed))
        self.log(text, {"frees, in order,": freed, "returns": gone})

    def one_by_one(self) -> int:
        gone = 0
        while gone < self.pool.num_blocks and (count := self.cache.evict(1)):
            gone += count
        return gone

    def seen(self) -> dict:
        cache, looks, seen = self.cache, self.looks, {}
        if "shape" in looks:
            seen["the nodes are"] = readable(lambda: sorted(name for name, _ in locks_of(cache)))
        if "locks" in looks:
            seen["lock counts:"] = readable(lambda: dict(sorted(locks_of(cache))))
        if "counts" in looks:
            seen["cached blocks:"] = cache.num_cached_blocks
            seen["evictable blocks:"] = cache.num_evictable_blocks
            seen["free blocks:"] = self.pool.num_free
        if "sound" in looks:
            seen["check() says"] = readable(cache.check) or "nothing"
        return seen

    def everything(self) -> tuple:
        """What a call that is refused must leave as it was."""
        cache, counts = self.cache, list(map(self.pool.ref_count, range(self.pool.num_blocks)))
        if not isinstance(cache, minikv.RadixCache):
            return counts, list(cache.blocks.items())
        tree = readable(lambda: list(locks_of(cache)))
        order = [list(node.block_ids) for node in cache.unlocked]
        return counts, tree, order, cache.num_cached_blocks, cache.num_evictable_blocks


def readable(look):
    """What is seen of a tree, or what `check` says of it, or that it cannot be read."""
    try:
        return look()
    except AssertionError as error:
        return re.sub(r"^.*?cache: ", "", str(error))
    except Exception as error:
        return f"the tree cannot be read ({type(error).__name__})"


def locks_of(cache):
    """(name, lock count) of every node: "AB", and "AB.C" behind it. Not for ever: of a broken tree
    a node may be its own descendant."""
    level = [
        ("" if salt is None else f"{salt!r}:", child)
        for salt, root in cache._roots.items()
        for child in root.children.values()
    ]
    for _ in range(9):
        named = [(before + spelled(node.keys), node) for before, node in level]
        yield from ((name, node.lock_count) for name, node in named)
        level = [(f"{name}.", child) for name, node in named for child in node.children.values()]


def on_path(node) -> list[int]:
    """All blocks from the root to the end of a node; of a broken tree, of 50 nodes."""
    block_ids: list[int] = []
    for _ in range(50):
        if node is None:
            break
        block_ids, node = [*node.block_ids, *block_ids], node.parent
    return block_ids


def random_steps(seed: int, verbs: str, length: int) -> str:
    """Steps by their first letters, drawn with equal chances; all is undone and evicted at last."""
    draw = random.Random(seed)
    steps: list[str] = []
    locked: list[str] = []
    running: list[str] = []
    for _ in range(length):
        salt = draw.choice(["", "", ":x"])
        word = "".join(draw.choices("AAB", k=draw.randint(1, 5))) + draw.choice(["", "+"]) + salt
        verb = draw.choice(verbs)
        if verb == "u" and locked:
            steps.append(f"unlock {locked.pop(draw.randrange(len(locked)))}")
        elif verb == "k" and running and draw.random() < 0.5:
            steps.append(f"end {running.pop(draw.randrange(len(running)))}")
        elif verb == "k" and word not in running:
            running.append(word)
            steps.append(f"keep {word}")
        elif verb == "l":
            locked.append(word)
            steps.append(f"lock {word}")
        elif verb == "e":
            steps.append(f"evict {draw.randint(0, 4)}")
        elif verb in "im":
            steps.append(f"{'insert' if verb == 'i' else 'match'} {word}")
    steps += [f"unlock {word}" for word in reversed(locked)] + [f"end {word}" for word in running]
    return "; ".join([*steps, "evict all"])


def traces(verbs: str, first: int, looks: str) -> list[tuple]:
    each = ((SIZES[n % 4], random_steps(first + n, verbs, 4 + n // 4)) for n in range(80))
    return [(size, "", steps, looks) for size, steps in each]


def after(name: str, looks: str, programs: dict[str, list[str]], look: str) -> Group:
    """Steps after prompts that are there already, in blocks of several sizes."""
    each = [(there, steps) for there, many in programs.items() for steps in many]
    return Group(name, [(size, *one, looks) for one in each for size in SIZES], look)


ALL = "result node counts sound later"
DEEP = Group(
    "a prompt of 1,100 blocks",
    [(1, "A*1100", steps, "counts") for steps in (
        "match A*1100; insert A*1050; lock A*1100; evict 5; unlock A*1100; evict 1200",
        "lock A*1100; insert A*1101; match A*2; unlock A*1100; evict 1200")],
    look="how deep may a function call itself, and how often does each of your lines look?",
)  # fmt: skip
radix = partial(steps_on, "RadixCache")

scenario(
    "07.1", radix, after("a prompt that is one node", "result node",
    {"A": ["match A", "match A+"], "ABC": ["match ABC", "match ABCD+", "match ABC; match ABC"]},
    look="what does `_walk` return? All three results"),
    after("down several nodes", "result node",
    {"ABCD ABEFG ABEFH": ["match ABEFH", "match ABEFHXY", "match ABCDX+"]},
    look="what changes when the walk reaches the next node?"),
    after("the walk stops where the tokens differ", "result node",
    {"ABC": ["match ADC", "match X", "match ABX"], "ABCD ABE": ["match ABCX", "match AXCD"],
    "ABCB": ["match AXCB"], "ABC B": ["match CAB"], "Aba": ["match Acb", "match AbA", "match ABa"]},
    look="what is compared, and how far?"),
    after("the walk stops where the prompt ends", "result node",
    {"ABC": ["match AB", "match A+", "match +"], "ABCDE ABX": ["match ABC", "match AB"]},
    look="how many keys are left to compare?"),
    after("a node that is split in two", "shape counts sound result node",
    {"ABCD ABCE": ["match A", "match AB", "match AX; match ABY",
    "match A; match ABCD; match ABCE; match AB"], "ABCDE X": ["match ABC; match A; match ABCD"]},
    look="what does each half have: keys, blocks, parent, children?"),
    after("a lock survives the split", "locks counts sound",
    {"ABC X": ["lock ABC; lock ABC; match A", "lock ABC; match A; evict 9; unlock ABC; evict all",
    "lock ABC; lock ABC; match AB; match A; unlock ABC; evict 9; unlock ABC; evict all",
    "lock ABC; insert AD; lock AD; match AB; unlock ABC; evict 9; unlock AD; evict all"]},
    look="`lock_count` of both halves; and which half is the old node?"),
    after("what a match has found stays as it is", "later",
    {"AB": ["match AB; insert ABCD", "match AB; evict 1", "match AB; match A"]},
    look="what is the list in the third result of `_walk`?"),
    after("a shorter match makes only its part the most recently used", "sound",
    {"ABC XY": ["match A; evict all", "match AB; match X; evict all"]},
    look="what is in `unlocked`?"),
    Group("80 random traces", traces("iimmlluke", 200, ALL),
          "which nodes were split, locked or evicted before the step that differs?"),
    DEEP,
)  # fmt: skip

scenario(
    "07.2", radix, after("a new prompt: the tree holds its blocks", ALL,
    {"": ["keep ABC+", "keep ABC; end ABC", "insert A", "insert AB; insert CD"]},
    look="what does `insert` do for new blocks?"),
    after("where a prefix is known, the tree's own blocks stay", ALL,
    {"AB": ["insert ABCD", "insert AB", "insert ABC+; match ABC"],
    "ABC ABD": ["insert ABC", "insert ABDE; match ABDE"],
    "ABC": ["insert AX; match AX", "insert A", "lock ABC; insert ABCD; insert AX"]},
    look="which blocks are new?"), after("too few blocks are refused, surplus ones ignored", ALL,
    {"AB C": ["give XYZ 1", "give XYZ:x 1", "give AXY 1", "give ABC 1", "give C 0"],
    "AB": ["give ABC 5", "give ABC+ 5", "give AB 3", "give + 0", "give +:x 0", "give + 1"]},
    look="how many blocks are needed?"), after("a salt is a tree of its own", ALL,
    {"": ["insert ABC; insert ABC:x; insert ABC:y",
    "insert ABC; insert ABC:x; match AX; match AX:x; match AX:y",
    "insert ABC:x; match ABC; insert AB; match AB:x", "insert AB; insert ABC:empty",
    "insert AB:empty; insert AB; insert AB:zero; insert AB:None"]},
    look="at which root does the walk begin?"),
    after("evict takes leaves from their end", ALL,
    {"ABCD": ["evict 2; match ABCD", "evict 1; evict 1", "evict 4", "evict 2; insert ABCD"]},
    look="which block of which node goes first?"),
    after("the least recently used goes first, parents last", "sound",
    {"A B C": ["match A; evict all", "match B; match A; evict 2; evict 1"],
    "ABCD ABE": ["evict all", "match ABCD; evict all", "evict 4"],
    "ABCD XY": ["insert ABE; evict all", "match A; evict all"]},
    look="at which end of `unlocked` is the oldest?"),
    after("an insert makes its prefix the most recently used", "sound",
    {"AB C": ["insert AB; evict all", "insert ABX; evict all"],
    "ABC ABD X": ["insert ABC; evict all", "insert AB; evict all"]},
    look="what does `insert` do at its end?"),
    after("a leaf that is empty leaves the tree", ALL,
    {"AB AC": ["evict 1; evict 5", "evict all; insert AB:x; match AB:x"],
    "": ["insert AB:x; insert C; evict 2; evict all; insert AB"]},
    look="what happens when its last block goes?"),
    after("what is locked stays, and evict returns how many blocks went", ALL,
    {"ABC ABD X": ["lock ABC; evict 10; evict 0; unlock ABC; evict 10",
    "lock ABC; lock ABD; lock X; evict 1", "evict 10; evict 1", "evict -1",
    "lock AB; evict 10; insert ABC; evict 1"]}, look="when does the loop stop?"),
    after("a block in use is released, not freed", ALL,
    {"": ["keep AB; evict 1; end AB", "keep AB; insert C; evict 2; match AB; end AB"]},
    look="what does `evict` do in the pool?"),
    after("the caller's lists stay the caller's", ALL,
    {"": ["insert AB; empty AB; match AB", "insert AB; insert ABCD; empty ABCD; evict 1"]},
    look="does the tree keep a list that belongs to the caller?"),
    Group("80 random traces", traces("iiimlukke", 300, ALL),
          "before the step that differs: what was split, and which leaf is the oldest?"),
)  # fmt: skip

scenario(
    "07.4", radix, after("what a request uses stays", "result",
    {"ABC X": ["lock ABC; evict 9; match ABC"], "A XY": ["lock A; evict 9; match A"],
    "ABC ABX": ["lock ABC; evict 9; match ABC", "lock AB; evict 9; match ABC"]},
    look="which nodes does `lock` visit?"),
    after("evictable is what no request uses", "counts sound",
    {"ABCD ABE X": ["lock ABCD; lock ABE", "lock AB; lock ABE; lock ABE"]},
    look="`num_evictable_blocks`, node by node"),
    after("locks nest, and all of them can be undone", "locks counts sound",
    {"ABCD ABE X": ["lock ABCD; unlock ABCD; evict all",
    "lock ABCD; lock ABCD; lock ABE; unlock ABCD; unlock ABCD; unlock ABE; evict all",
    "lock ABCD; lock AB; unlock ABCD; evict 9; unlock AB; evict all",
    "lock ABE; lock X; unlock ABE; match ABCD; unlock X; evict all"]},
    look="`lock` and `unlock` line by line"),
    after("a node that is split while it is locked", "locks counts sound",
    {"ABC": ["lock ABC; match A; unlock ABC; evict all",
    "lock ABC; match A; lock A; unlock ABC; evict 9; unlock A; evict all"]},
    look="with which node do both methods begin?"),
    after("one unlock too many is refused, and a miss may be locked", "locks counts sound",
    {"AB AC": ["unlock AB", "lock AB; unlock AB; unlock AB", "lock AC; unlock AB",
    "lock X; unlock X", "lock X:x; unlock X:x; evict all"]},
    look="which node's `lock_count` must be compared with 0, and where?"),
    Group("80 random traces", traces("iimlluue", 500, ALL),
          "at the step that differs: how many locks has each node of the path?"),
)  # fmt: skip


# ── 07.3 Chained hashes ───────────────────────────────────────────────────────

# A program is (block size, prompts as "ABC" or "ABC:x"): its names are called by the first block
# that has them.


def names(mine, program, log: Log) -> None:
    size, prompts = program
    known: dict = {}
    log(f"blocks of {size}")
    for prompt in prompts.split():
        word, _, salt = prompt.partition(":")
        text = f"names of {word}" + (f" of salt {SALTS[salt]!r}" if salt else "")
        more = (SALTS[salt],) if salt else ()
        found = log.call(text, mine.chained_hashes, tokens_of(word, size), size, *more, see=False)
        if not isinstance(found, list | tuple):
            log(text, {"what comes back is": f"a {type(found).__name__}"})
            return
        blocks = [f"{salt}:{one}" if salt else one for one in beginnings(word)] + ["a part of one"]
        log(
            text,
            {
                "are those of": [
                    known.setdefault(*pair) for pair in zip(found, blocks, strict=False)
                ]
            },
        )


def pairs(mine, program, log: Log) -> None:
    """Two prompts that a name must tell apart, or random ones in great number."""
    size, *prompts = program
    if isinstance(prompts[0], list):
        log(f"blocks of {size}; the prompts {prompts[0]} and {prompts[1]}")
        one, other = [], []
        with suppress(OverflowError, struct.error):  # no model has so large token ids
            one, other = (mine.chained_hashes(token_ids, size) for token_ids in prompts)
        log("", {"their last names are equal:": one[-1:] == other[-1:] != []})
        return
    num_blocks, draw, seen = prompts[0], random.Random(7), 0
    known: set = set()
    while seen < num_blocks and len(known) == seen:
        found = mine.chained_hashes(draw.choices(range(50_000), k=100 * size), size)
        if len(repr(found[-1])) > 40:  # as long as sha256's, or with the tokens in it
            break
        seen += len(found)
        known.update(found)
    log(f"{num_blocks:,} random blocks", {"two of them have the same name:": len(known) < seen})


BIG = 2**61 - 1  # hash(BIG) == hash(0)
SALTED = [f":{key}" if key else "" for key in reversed(SALTS)]

scenario("07.3", names,
    Group("a name for each whole block", [(size, some) for some in ("A ABC", "ABC ABC+ ABC", "A +")
          for size in SIZES], "which tokens belong to a whole block?"),
    Group("a name stands for everything up to its block",
          [(size, some) for some in ("ABCD AXCD", "AAAA", "AB BA", "abcd axcd", "ABCA aBcA")
          for size in SIZES], "what goes into a block's hash?"),
    Group("another salt, other names", [(size, f"ABC{one} ABC{other} AB{one}")
          for one, other in combinations(SALTED, 2) for size in (4, 1)], "where does the salt go?"),
)  # fmt: skip

scenario("07.3", pairs,
    Group("no two beginnings share a name",
          [(1, [0], [BIG]), (2, [1, 2], [1, 2 + BIG]), (1, [1, 2], [1, 2 + BIG]),
          (2, [1, 23], [12, 3]), (2, [1, 11], [11, 1]), (2, [1, 2], [1, 258]), (1, [1], [65_537]),
          (2, [0, 5], [5, 0]), (1, [3, 1], [2, 2]), (2, 3_000), (2, 200_000)],
          "what does the docstring say about `hash` and checksums?"),
)  # fmt: skip

FOUND = "result counts sound later"

scenario(
    "07.3", partial(steps_on, "ChainedCache"),
    after("insert: new blocks are held, known ones stay", FOUND,
    {"": ["keep ABC+", "keep ABC; end ABC", "insert AB; insert ABCD", "keep AB; insert AB"],
    "ABC ABD": ["insert ABC", "insert ABE; match ABE"]}, look="which blocks are acquired?"),
    after("match: as far as the chain goes", "result",
    {"ABC": ["match ABC", "match ABCDE+", "match AB", "match AXC", "match BC"],
    "ABC ABX": ["match ABX", "match +", "match ABXC; match ABX; match ABC"]},
    look="what happens at the first missing name?"),
    after("too few blocks are refused, surplus ones ignored", FOUND,
    {"AB": ["give ABCD 3", "give XY 1", "give AB 1", "give XY:x 0", "give ABC 5", "give ABC+ 5",
    "give + 0", "give + 1"]}, look="how many blocks are needed?"),
    after("customers do not share blocks", FOUND,
    {"ABC": ["match ABC:x", "insert ABC:x; match AB:x; match AB:y; match ABC",
    "match ABC:empty; insert ABC:empty; match AB:zero"]}, look="where does the salt go?"),
    after("the least recently used goes first, the end of a prompt before its beginning", "",
    {"ABC": ["evict all", "evict 2; evict 1"],
    "AB X": ["match AB; evict all", "insert AB; evict all"],
    "ABC X": ["match A; evict all", "insert AD; evict all", "match ABX+; evict 2"]},
    look="the order in `self.blocks`"), after("what a sequence holds is not evicted", FOUND,
    {"": ["keep AB; insert X; evict 3; match AB; end AB; evict 3",
    "insert X; keep AB; insert Y; evict 1; evict 9", "insert AB; evict 0; evict -1; evict 1"]},
    look="does anything else hold the block?"),
    after("a block whose predecessor is gone", FOUND,
    {"": ["keep ABC; tail ABC; evict 2; match ABC; insert ABC; match ABC",
    "keep ABC; tail ABC; evict 2; insert AB; match ABC; end ABC; evict all"]},
    look="what does `match` do at a gap in the chain?"),
    Group("80 random traces", traces("iimmke", 400, FOUND),
          "at the step that differs: which block of the chain has lost its name?"),
)  # fmt: skip


# ── In the engine ─────────────────────────────────────────────────────────────

TEXTS = {
    "s": "class Stack:\n    def push(self, item):\n        self.items.append(item)\n",
    "q": "class Queue:\n    def push(self, item):\n        self.items.append(item)\n",
    "i": "import os\n",
    "d": "def fib(n):\n    return",
    "m": "if __name__ == '__main__':",
}


class KeepsLogits(minikv.Sampler):
    """Remembers the logits of the last step that had some."""

    logits = None

    def __call__(self, logits, params, draws):
        self.logits = logits.clone()
        return super().__call__(logits, params, draws)


@cache
def prompt_of(name: str) -> list[int]:
    """ "s12q3": the first 12 tokens of text s, and 3 of text q; a text that is too short begins
    again."""
    token_ids = []
    for text, count in re.findall(r"(\w)(\d+)", name):
        token_ids += (tinypy().encode(TEXTS[text]) * 3)[: int(count)]
    return token_ids


def params_of(num_tokens: int, salt: str = "") -> minikv.SamplingParams:
    return minikv.SamplingParams(max_tokens=num_tokens, ignore_eos=True, cache_salt=SALTS[salt])


def engine_on(parts: dict, config: dict, kind: type = minikv.Engine) -> minikv.Engine:
    values = dict(num_blocks=128, block_size=4, max_num_seqs=8, min_prefix_tokens=0) | config
    return kind(tinypy(), minikv.EngineConfig(**values), sampler=KeepsLogits(), **parts)


# A program is (config, steps). Steps:
#     add s12q3 5 x    a request of 15 tokens for 5 more, of salt x     step 2    two steps
#     look             is the first that waits looked up now            finish    all there are
#     hold 2, free     another owner takes two blocks, gives them back
#     preempt, evict 3, and spoil: what is free is written to


HITS = "tokens found in the cache so far:"


class Serving:
    """An engine on some of the reader's parts, and what happens to it."""

    def __init__(self, parts, mine, program, log: Log):
        config, steps = program
        self.engine, self.log = self.made(parts, mine, config), log
        self.cache: Any = self.engine.cache  # None for programs that ask nothing of it
        self.outputs: dict[int, list[int]] = {}
        self.held: list[int] = []
        log(f"blocks of {self.engine.config.block_size}")
        for step in steps.split("; "):
            verb, *more = step.split()
            getattr(self, verb)(*more)
            if log.events[-1].error is not None:
                return

    def made(self, parts, mine, config) -> minikv.Engine:
        return engine_on(parts(mine), config)

    def add(self, name: str, num_tokens: str, salt: str = "") -> None:
        prompt = list(prompt_of(name))
        number = self.engine.add_request(prompt, params_of(int(num_tokens), salt))
        text = f"request {number} of {len(prompt)} tokens"
        self.log(text + (f" of salt {SALTS[salt]!r}" if salt else ""))

    def run(self) -> None:
        self.outputs |= {one.request_id: one.token_ids for one in self.engine.step()}

    def step(self, count: str = "1") -> None:
        text = "a step" if count == "1" else f"{count} steps"
        self.log.call(text, self.run_for, int(count), see=False)
        if self.log.events[-1].error is not None:
            return
        sampler: Any = inspect.unwrap(self.engine.runner.sampler)
        self.log(text, self.tables() | {"logits": sampler.logits})
        if not self.held:
            self.log.call("the engine's own check", self.engine.check, see=False)

    def run_for(self, count: int) -> None:
        for left in range(count, 0, -1):
            self.run()
            if left > 1 and not self.held:
                self.engine.check()

    def finish(self) -> None:
        self.log.call("all finish", self.run_on, see=False)
        if self.log.events[-1].error is None:
            hits = self.engine.stats().hit_tokens
            self.log("all finish", {HITS: hits, "new tokens, by request:": self.outputs})

    def run_on(self) -> None:
        for _ in range(200):
            if not self.engine.has_unfinished:
                self.engine.check()
                return
            self.run()
        raise RuntimeError("some have not finished after 200 steps")

    def tables(self) -> dict:
        """Block tables of those that run, blocks numbered as they are met."""
        pool = self.engine.pool
        number: dict[int, int] = {}
        tables = [one.table.block_ids for one in self.engine.scheduler.running]
        counts = [list(map(pool.ref_count, table)) for table in tables]
        for table in tables:
            for block_id in table:
                number.setdefault(block_id, len(number))
        return {
            "free blocks that a block table names:": sum(table.count(0) for table in counts),
            HITS: self.engine.stats().hit_tokens,
            "block tables:": [[number[block_id] for block_id in table] for table in tables],
            "reference counts, table by table:": counts,
            "blocks in use:": pool.num_blocks - pool.num_free,
        }

    def look(self) -> None:
        sequence, text = self.engine.scheduler.waiting[0], "it is looked up"
        match = self.log.call(text, self.engine.scheduler.look_up, sequence, see=False)
        if match is None:
            self.log(text, {"tokens found:": None})
            return
        down = len(on_path(match.node))
        self.log(text, {"tokens found:": match.num_tokens, "blocks:": len(match.block_ids)})
        self.log(text, {"blocks down to the end of its node:": down})

    def evict(self, count: str) -> None:
        self.log.call(f"evict({count})", self.cache.evict, int(count))
        self.log(f"evict({count})", {"free blocks:": self.engine.pool.num_free})

    def preempt(self) -> None:
        self.log("the last to arrive is preempted")
        self.engine.scheduler.preempt(self.engine.scheduler.running[-1], minikv.Plan())

    def store(self, name: str) -> None:
        """Others compute a prompt, and are done."""
        prompt, table = prompt_of(name), minikv.BlockTable(self.engine.pool, 4)
        table.grow(len(prompt))
        self.cache.insert(prompt, table.block_ids)
        table.release()
        self.log(f"others put {len(prompt)} tokens into the cache")

    def hold(self, count: str | int) -> None:
        self.held += [self.engine.pool.allocate() for _ in range(int(count))]

    def free(self) -> None:
        while self.held:
            self.engine.pool.release(self.held.pop())

    def spoil(self) -> None:
        self.hold(self.engine.pool.num_free)
        self.engine.store.blocks[:, self.held] = 9.0
        self.free()
        self.log("the blocks that are free are written to")


def serve(parts, mine, program, log: Log) -> None:
    Serving(parts, mine, program, log)


PROMPTS = (
    "add s24 2; step; finish; add s24q24 2; step; finish; add s24q24 2; step; finish",
    "add s24q24 2; step; finish; add s48 2; step; finish; add s24q8 2; step; finish",
    "add q24 2; step; finish; add s24 2; step; finish; add q24 9; step 4; finish; evict 128",
)
for exercise, part, look in (
    ("07.1", "RadixCache", "which blocks does the hit name?"),
    ("07.2", "RadixCache", "which blocks are in the tree?"),
    ("07.3", "ChainedCache", "which blocks have which names?"),
):
    scenario(
        exercise,
        partial(serve, lambda mine, part=part: {"prefix_cache": getattr(mine, part)}),
        Group("tinypy: a hit has the logits of a miss", [({}, steps) for steps in PROMPTS], look),
    )

scenario("07.4", partial(serve, lambda mine: {"prefix_cache": mine.RadixCache}),
    Group("tinypy: later requests find what is in use",
          [({"num_blocks": 32},
          "add s24 1; finish; add s24i4 9; step; evict 32; add s24d6 9; step; finish; evict 32")],
          "when is the lock of a hit taken, and by whom is it given back, once?"),
)  # fmt: skip


# ── 07.5 Three hits that went wrong ───────────────────────────────────────────


def scheduler_of(mine) -> dict:
    return {"prefix_cache": minikv.RadixCache, "scheduler": mine.Scheduler}


LOOKUP = "`look_up`: does it ask for all tokens, and anew each time?"

scenario("07.5", partial(serve, scheduler_of),
    Group("two equal prompts in one step", [({}, "add s13 2; add s13 2; step; finish; evict 128"),
          ({}, "add s13 3; add s13 3; step; spoil; finish"),
          ({"block_size": 3}, "add s13 3; add s13 3; step 3; evict 128"),
          ({}, "add s13 5; add s9q6 5; step 4; finish; evict 128"),
          ({}, "add s13 5; add s13 5 x; add s13 5 x; step 4"),
          ({"max_batch_tokens": 8}, "add s15 3; add s15 3; step 5; evict 128"),
          ({"prefix_cache": False}, "add s13 2; add s13 2; step; finish")],
          "`share_full_blocks`: the loop over the blocks that are new in the tree"),
)  # fmt: skip

scenario("07.5", partial(serve, scheduler_of),
    Group("a prompt that is cached to its last token",
          [*(({"block_size": n}, "add s12 2; finish; add s12 2; look; finish") for n in (4, 1, 3)),
          ({}, "add s14 1; finish; add s14 1; look; finish"),
          ({}, "add s13 1; finish; add s13 1; look; finish; add s12q8 1; look; finish"),
          ({}, "add s4 1; finish; add s4 1; look; finish; add s5 1; look; finish")], LOOKUP),
    Group("a hit that is gone when its turn comes",
          [({"num_blocks": 8},
          "add s12 1; finish; add i3q4 9; step; hold 2; add s12q9 3; step; evict 3; free; finish"),
          ({}, "store s12; add s12q9 2; look; evict 3; store q12; look; store s12; look; finish"),
          ({}, "add s12q9 2; look; store s12; look; store s12q4; look; finish")], LOOKUP),
    Group("a hit that is gone after a preemption",
          [({}, "add s8 9; step 7; preempt; look; finish"),
          ({}, "add s8 1; finish; add s8 9; step 5; preempt; look; evict 9; look; finish"),
          ({}, "add s8 9; look; step 2; preempt; look; step 4; preempt; look; finish")], LOOKUP),
    Group("salt, threshold and swap are as they were",
          [({"prefix_cache": False}, "add s21 2; look; finish"),
          ({}, "add s9 1 x; finish; add s9 1 y; look; finish; add s9 1 x; look; finish"),
          ({}, "add s9 1; finish; add s9 1 x; look; finish; add s9 1; look; finish"),
          ({}, "add s9 1; finish; add s9 1 empty; look; finish; add s9 1 zero; look"),
          ({"min_prefix_tokens": 8}, "add s9 1; finish; add s9 1; look; finish"),
          ({"min_prefix_tokens": 9}, "add s9 1; finish; add s9 1; look; finish"),
          ({"preemption": "swap", "host_blocks": 16}, "add s21 9; step; preempt; look")], LOOKUP),
)  # fmt: skip


# ── 07.6 A turn that nobody repeats ───────────────────────────────────────────

# A program is (block size, a turn, a letter per token). In parentheses is what the next prompt
# leaves out.


def turn_ends(mine, program, log: Log) -> None:
    size, turn = program
    parts = [(word.strip("()"), not word.startswith("(")) for word in turn.split()]
    text = "".join(word for word, _ in parts)
    pool = LoggingPool(64)
    cache, table = minikv.RadixCache(pool, size), minikv.BlockTable(pool, size)
    table.grow(len(text))
    held = {one: text[i * size : (i + 1) * size] for i, one in enumerate(table.block_ids)}
    given = [(list(map(ord, word)), again) for word, again in parts]
    log(f"blocks of {size}")
    told = f"the turn is {turn}"
    arguments = cache, given, list(table.block_ids)
    dead = log.call(told, mine.insert_turn, *arguments, see=False)
    later = "".join(word for word, again in parts if again)
    hit = cache.match(list(map(ord, later + "?" * size)))
    found = [held.get(block_id, "nothing of it") for block_id in hit.block_ids]
    text = f"{told}, the next prompt {later}?…"
    log(text, {"it finds blocks that hold": found})
    log(text, {"dead blocks:": dead, "blocks in the cache:": cache.num_cached_blocks})
    changed = given != [(list(map(ord, word)), again) for word, again in parts]
    log(text, {"what was handed in has changed:": changed})
    table.release()
    log("the turn's own table is released", {"free blocks:": pool.num_free})


def any_turns() -> list[tuple]:
    draw, programs = random.Random(6), []
    for seed in range(80):
        letters, words = iter(ascii_letters), []
        for _ in range(draw.randint(1, 5)):
            word = "".join(next(letters) for _ in range(draw.randint(1, 8)))
            words.append(draw.choice([word, word, f"({word})", "()"]))
        programs.append((SIZES[seed % 4], " ".join(words)))
    return programs


AGREE = "up to which token do the turn and the next prompt agree?"

scenario("07.6", turn_ends,
    Group("nothing is left out: everything can be found",
          [(4, "abcdefgh"), (4, "abcdef ghij"), (3, "abcd () efgh"), (4, "abcd () efgh ()")],
          "which parts come before the first token that is left out?"),
    Group("reasoning at the end", [(4, "abcdefgh (rrrr)"), (4, "abcdef (rrrrrr)"),
          (3, "abcd ef (rrrrr)"), (1, "ab (rr)")], AGREE),
    Group("an answer behind the reasoning",
          [(4, "abcd (rrrr) efgh"), (4, "abcdef (rrrr) ghijkl"), (3, "abcd (rr) efghijk"),
          (4, "abcdef (rr) ghij"), (1, "ab (r) cd")],
          "where does the first token stand that `insert` takes and that does not return?"),
    Group("several pieces of reasoning", [(4, "abcd (rrrr) efgh (ssss) ijkl"),
          (3, "abcd (r) ef (sssss) ghi"), (4, "abcd () ef (rr) gh")], AGREE),
    Group("it begins with what is left out", [(4, "(rrrr) abcdefgh"), (4, "(rr) abcd")], AGREE),
    Group("any turns", any_turns(),
          "how many tokens from the first on return, and how many whole blocks are these?"),
)  # fmt: skip


@check(
    "07.6",
    "tinypy: the next turn has the oracle's tokens",
    cause="the next turn reads keys and values of other tokens",
    look="which of the tokens that are kept does the next prompt not repeat?",
)
def _(mine):
    _, found, tokens, expected = two_turns(tinypy(), mine.insert_turn)
    witness(tokens)
    if tokens != expected:
        lm = tinypy()
        raise Wrong(
            f"{found} tokens found, and it continues with {lm.decode(tokens)!r}, expected "
            f"{lm.decode(expected)!r}"
        )


# ── 07.7 The step of your engine ──────────────────────────────────────────────

# What a request asks for besides tokens: its name in a program, in words, as parameters.
ASKS: dict[str, tuple[str, dict]] = {
    "": ("", {}),
    "colon": (", to stop at '):'", {"stop": (293,)}),
    "self": (", to stop at 'self.'", {"stop": ("self.",)}),
    "either": (", to stop at '):' or at 'push('", {"stop": (293, "push(")}),
    "end": (", to stop at the end token", {"ignore_eos": False}),
    "three": (
        ", 3 samples, to stop at '):'",
        {"n": 3, "temperature": 0.9, "seed": 1, "stop": (293,)},
    ),
    "two": (", 2 samples", {"n": 2, "temperature": 0.9, "seed": 2}),
}


class Stepping(Serving):
    """The reader's engine and its loop, seen after every step."""

    number: int  # of the last request
    prompt: list[int]  # its prompt
    outputs: dict[int, list[int]]

    def made(self, parts, mine, config) -> minikv.Engine:
        engine = engine_on({}, config, mine.Engine)
        engine.loop = mine.Loop()
        return engine

    def add(self, name: str, num_tokens: str, kind: str = "") -> None:
        self.ask(list(prompt_of(name)), int(num_tokens), kind)

    def again(self, num_tokens: str) -> None:
        """The last prompt and its answer, and a token more."""
        answer = self.outputs.get(self.number, [])
        self.ask([*self.prompt, *answer, 199], int(num_tokens), "")

    def ask(self, prompt: list[int], num_tokens: int, kind: str) -> None:
        self.prompt, (words, more) = prompt, ASKS[kind]
        params = minikv.SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True} | more)
        self.number = self.engine.add_request(prompt, params)
        self.log(f"request {self.number} of {len(prompt)} tokens for {num_tokens} more{words}")

    def step(self, count: str = "1") -> None:
        for _ in range(int(count)):
            outputs = self.log.call("a step", self.engine.step, see=False)
            if self.log.events[-1].error is not None:
                return
            self.see(outputs)

    def see(self, outputs) -> None:
        stats, pool = self.engine.stats(), self.engine.pool
        self.outputs |= {one.request_id: one.token_ids for one in outputs}
        self.log("a step", {
            "requests that got tokens:": [one.request_id for one in outputs],
            "new tokens, by request and sample:":
                [[sample.token_ids for sample in one.samples] for one in outputs],
            "why the samples finished:":
                [[sample.finish_reason for sample in one.samples] for one in outputs],
            "(running, waiting):": [stats.running, stats.waiting],
            "are there unfinished requests:": self.engine.has_unfinished,
            "blocks in use:": pool.num_blocks - pool.num_free,
            HITS: stats.hit_tokens,
            "new tokens counted:": stats.generated_tokens,
        })  # fmt: skip
        if not self.held:
            self.log.call("a step", self.engine.check, see=False)

    def finish(self) -> None:
        for _ in range(60):
            if self.log.events[-1].error is not None or not self.engine.has_unfinished:
                return
            self.step()


def stepping(mine, program, log: Log) -> None:
    Stepping(lambda mine: {}, mine, program, log)


ALL = "`append`: what happens to each pair of a sequence and a token, and in which order"

scenario("07.7", stepping,
    Group("one request: a token per step, until it has all",
          [({}, "add s5 1; step"), ({}, "add s5 3; finish"),
          ({"prefix_cache": False}, "add q9 4; finish")], ALL),
    Group("several requests: one output each",
          [({}, "add s5 2; add q9 3; finish"),
          ({}, "add s13 1; add i3 4; step 2; add q9 2; finish")],
          "`append`: the requests that got a token"),
    Group("a prompt in chunks gets its token after the last one",
          [({"max_batch_tokens": 8}, "add s13 2; finish"),
          ({"max_batch_tokens": 8}, "add i3 6; step; add s20 2; finish")],
          "`step`: which sequences the token ids belong to"),
    Group("a stop token, a stop string, the end token",
          [({}, "add s13 9 colon; step"), ({}, "add q9 9 colon; finish"),
          ({}, "add s13 9 self; finish"), ({}, "add s24 9 either; finish"),
          ({}, "add q9 9 either; finish"), ({}, "add q9 4 colon; finish"),
          ({}, "add m9 9 end; finish")], "`_finishes`: when is a sequence finished, and why?"),
    Group("samples of a request finish one by one",
          [({}, "add q9 2 two; finish"), ({}, "add q9 8 three; finish"),
          ({}, "add q9 8 three; add s13 6; finish")], "`append`: when is a request done?"),
    Group("what was written is found by the next turn",
          [({}, "add s7 6; finish; again 2; finish"), ({}, "add s8 5; finish; again 2; finish"),
          ({"block_size": 1}, "add i3 3; finish; again 3; finish")],
          "`append`: the blocks that a decode fills"),
    Group("short of blocks: some wait, some are preempted",
          [({"num_blocks": 8}, "add s13 9; add q9 9; finish"),
          ({"num_blocks": 8, "preemption": "swap", "host_blocks": 8},
          "add s13 9; add q9 9; finish"), ({"num_blocks": 8, "max_num_seqs": 1},
          "add s13 2; add q9 2; add i3 2; finish")], ALL),
    Group("where nothing can run, the engine says so",
          [({"num_blocks": 8}, "hold 7; add s13 2; step"),
          ({"num_blocks": 8}, "hold 7; add s13 2; step; free; finish")],
          "`step`: what it returns for a plan without sequences"),
)  # fmt: skip


# ── 07.8 The clock tells ──────────────────────────────────────────────────────


class Server:
    """A shared prefix cache in blocks of 16, seen by its clock alone: 1 ms per token computed, a
    quarter more or less."""

    def __init__(self, seed: int):
        self.clock = random.Random(seed)
        self.cached: set[tuple] = set()
        self.sent: list[tuple] = []

    def first_token_ms(self, token_ids, salt: str | None = None) -> float:
        prompt = tuple(token_ids)
        found = max(
            (end for end in range(0, len(prompt), 16) if (salt, prompt[:end]) in self.cached),
            default=0,
        )
        self.cached |= {(salt, prompt[:end]) for end in range(16, len(prompt) + 1, 16)}
        self.sent.append(prompt)
        return (len(prompt) - found) * self.clock.uniform(0.75, 1.25)


def attack(mine, program, log: Log) -> None:
    """How many guesses, which of them another customer has sent, and under which salt."""
    num_guesses, secret, salt, seed = program
    *guesses, decoy = ([name] + [7] * 127 for name in range(num_guesses + 1))
    server = Server(seed)
    victim = "nobody has sent any" if secret is None else f"guess {secret} was sent"
    log(f"{num_guesses} guesses, {victim}" + (", under another salt" if salt else ""))
    if secret is not None:
        server.first_token_ms(guesses[secret], salt)
    server.sent.clear()
    log.call("guess_prompt(…)", mine.guess_prompt, server.first_token_ms, guesses, decoy)
    times = [server.sent.count(tuple(one)) for one in (*guesses, decoy)]
    log(
        "afterwards",
        {
            "guesses that were sent more than once:": sum(n > 1 for n in times[:-1]),
            "the decoy was sent more than once:": times[-1] > 1,
        },
    )


def any_attacks() -> list[tuple]:
    draw, programs = random.Random(8), []
    for seed in range(60):
        num_guesses = draw.randint(1, 8)
        secret = draw.choice([None, *range(num_guesses)])
        programs.append((num_guesses, secret, draw.choice([None, "another"]), seed))
    return programs


scenario("07.8", attack,
    Group("another customer has sent one of the guesses",
          [(4, secret, None, seed) for seed, secret in enumerate((0, 2, 3, 1))],
          "which of the times is a hit's?"),
    Group("nobody has sent any: None", [(4, None, None, seed) for seed in range(6)],
          "what the decoy is for"),
    Group("under a salt there is nothing to see: None",
          [(4, secret, "another", 10 + secret) for secret in range(4)], "what the decoy is for"),
    Group("any number of guesses", any_attacks(), "the smallest time, and the decoy's"),
)  # fmt: skip


# ── 07.9 Retention on a trace ─────────────────────────────────────────────────

# A program is (blocks of the pool, block size, steps). A prompt is a word, a block for each letter:
#     +ab     it is computed           [ab ]ab  a request locks it, unlocks it     !ab  both at once
#     ^ab:9   it is pinned for 9 s     @9       9 seconds pass                     -2   evict(2)


def retaining(mine, program, log: Log) -> None:
    num_blocks, size, steps = program
    clock = SimpleNamespace(now=1000.0)
    pool, names = LoggingPool(num_blocks), {}
    cache = mine.RetainingCache(pool, size, mine.pinned, lambda: clock.now)
    nodes: dict[str, list] = {}
    asked: dict[str, str] = {}  # pins, in words: the report may have left out the call
    log(f"a pool of {num_blocks} blocks of {size}")

    def find(word: str):
        return cache.match([ord(one) for one in word for _ in range(size)]).node

    for step in steps.split():
        what, word = step[0], step[1:]
        if what == "+":
            new = [pool.allocate() for _ in word]
            result = cache.insert([ord(one) for one in word for _ in range(size)], new)
            for place, block_id in enumerate(result.block_ids):
                names[block_id] = word[: place + 1]
            for block_id in new:
                pool.release(block_id)
            log(f"{word} is computed")
        elif what == "^":
            word, _, seconds = word.partition(":")
            log.call(f"pin({word}, {seconds})", cache.pin, find(word), int(seconds))
            asked[word] = f"{word} at {clock.now - 1000:g} s for {seconds} s"
        elif what == "@":
            clock.now += float(word)
            log(f"{word} s pass")
        elif what == "-":
            pool.freed.clear()
            pins = f"; pins asked for: {'; '.join(asked.values())}" if asked else ""
            log.call(f"evict({word}) at {clock.now - 1000:g} s{pins}", cache.evict, int(word))
            log("", {"it frees, in order:": [names[block_id] for block_id in pool.freed]})
            counts = [cache.num_cached_blocks, cache.num_evictable_blocks]
            log("", {"cached and evictable blocks:": counts})
        else:
            if what in "[!":
                nodes.setdefault(word, []).append(find(word))
                cache.lock(nodes[word][-1])
            if what in "]!":
                cache.unlock(nodes[word].pop())
            log({"[": f"{word} is locked", "]": f"{word} is unlocked"}.get(what, f"{word} is used"))


def random_retention(seed: int) -> tuple[int, int, str]:
    """Of words of two letters, at most 30 prefixes can be cached."""
    draw, steps = random.Random(seed), []
    for _ in range(4 + seed // 3):
        word = "".join(draw.choice("aab") for _ in range(draw.randint(1, 4)))
        steps += [f"+{word}", f"@{draw.choice((0.5, 1, 3))}"]
        if draw.random() < 0.5:
            steps.append(f"^{word}:{draw.choice((1, 5, 20))}")
        if draw.random() < 0.6:
            steps.append(f"-{draw.randint(1, 3)}")
    return 40, draw.choice((1, 2)), " ".join([*steps, "-9", "@30", "-99"])


small = under(16, 1)
scenario("07.9", retaining,
    Group("without a pin, by age", small("+a @1 +b @1 +c -2 -9", "+a @1 +b !a -1 -9",
          "+ab @1 +x @1 !ab -1 -9", "+a @1 +b @1 !a @1 !b -1"),
          "`pinned`: what is compared if neither leaf is pinned?"),
    Group("leaves first, each from its end",
          [*small("+abc -1 -1 -9", "+ab +ac -1 -9", "+abc +abd -9 -1", "+ab +ac +ad -9"),
          (16, 3, "+abc +abd -1 -9")], "when can a parent go?"),
    Group("what a pin holds goes last, with all above it",
          small("+a @1 +b ^a:20 -1 -9", "+ab @1 +ac @1 +x ^ab:20 -2 -9", "+abc +x ^abc:20 @1 +y -3",
          "+ab @1 +x ^ab:20 ^x:20 @1 +y @1 +z -2 -9", "+ab [ab ^ab:20 ]ab @1 +x -1"),
          "`pinned`: what is `until` of a leaf without a pin?"),
    Group("a pin ends at its deadline", small("+a @1 +b ^a:10 @9 -1 -9", "+a ^a:10 @1 +b @9 -1",
          "+a ^a:10 @1 +b @12 -1", "+a ^a:20 @1 +b ^a:5 @1 +c @5 -2", "+a ^a:9 +b ^b:3 @1 +c @9 -2",
          "+a ^a:10 @1 +b @1 +c -1 @8 -1", "+a ^a:10 @1 +b @1 +c -1 @9 -1"),
          "`first_leaf`: at the deadline itself, is the pin over?"),
    Group("pins yield if nothing else is left",
          small("+ab ^ab:20 -1 -9", "+a ^a:9 @1 +b ^b:9 -1 -1", "+ab ^ab:9 [ab -9 ]ab -9",
          "+a [a +ab ]a ^ab:9 -1 @1 +x -1 -9"), "a pin is a wish: what is in `order`?"),
    Group("what is locked stays", small("+ab +x [ab -9 ]ab -9", "+abc @1 [a -9 ]a -9",
          "+abc +abd [ab -9 ]ab -1"), "which nodes are in `unlocked`?"),
    Group("a parent takes over what its child had",
          small("+a [a +ab ]a @1 +z @1 !ab ^z:1 -1 @5 -1", "+a [a +ab ]a ^ab:50 -1 @1 +z -1",
          "+a [a +abc ]a ^abc:50 ^a:3 -2 @9 +z -1", "+a [a +ab ]a ^ab:3 ^a:50 -1 @9 +z -1",
          "+ab +ac @1 ^ab:3 ^ac:50 @1 -2 @9 +z -1"),
          "`first_leaf`: which leaf stands where a child of it stood?"),
    Group("pins hold a share of the pool", under(8, 1)("+abcd ^abcd:9 -1",
          "+abcde ^abcde:9 @1 +x -1", "+abc ^abc:9 +abd ^abd:9 -9",
          "+abc +x ^abc:9 ^x:9 +y ^y:9 @1 +z -1", "+abc ^abc:9 @9 +xyz ^xyz:9",
          "+ab [ab +abcd ]ab ^abcd:9 +x ^x:9", "+ab [ab +abcde ]ab ^abcde:9",
          "+ab ^ab:9 +abcde ^abcde:9 @1 +x -1", "+a ^b:9",
          "+a @1 ^a:500 @1 +z @1 +y @1 -1 +abcde @1 ^abcde:500 @1 +x @1 -1 -1"),
          "`pin`: which blocks does it keep, and which pins count?"),
    Group("and for a limited time", small("+a ^a:99999 @1 +b @598 -1", "+a ^a:99999 @1 +b @599 -1"),
          "`pin`: what is LONGEST for?"),
    Group("how many were released", small("+ab -0 -1 -9 -1", "+ab -5", "+ab ^ab:9 --1",
          "+ab [ab -2"), "`first_leaf`: which leaf is left?"),
    Group("60 random programs", [random_retention(seed) for seed in range(60)],
          "before the step that differs: who has pinned what, and until when?"),
)  # fmt: skip


@total_ordering
class Counted:
    """An age that counts how often it is compared."""

    def __init__(self, age, work: Counter):
        self.age, self.work = age, work

    def __lt__(self, other) -> bool:
        self.work["compared"] += 1
        return self.age < other.age

    def __eq__(self, other) -> bool:
        self.work["compared"] += 1
        return self.age == other.age


class CountedNodes(dict):
    """`unlocked`, which counts the nodes that somebody goes through."""

    def __init__(self, nodes, work: Counter):
        super().__init__(nodes)
        self.work = work

    def __iter__(self):
        for node in super().__iter__():
            self.work["looked at"] += 1
            yield node


def among_many(mine, program, log: Log) -> None:
    """What it takes to find a leaf: nodes, entries and ages that are looked at."""
    num_leaves, seconds = program
    clock = SimpleNamespace(now=1000.0)
    work: Counter[str] = Counter()

    def policy(cache, leaf):
        work["looked at"] += 1
        rank = mine.pinned(cache, leaf)
        return rank._replace(age=Counted(rank.age, work))

    pool = LoggingPool(num_leaves)
    cache = mine.RetainingCache(pool, 1, policy, lambda: clock.now)
    for token in range(num_leaves):
        new = [pool.allocate()]
        node = cache.insert([token], new).node
        pool.release(new[0])
        if seconds and token % 3 == 0:
            cache.pin(node, seconds)
    cache.unlocked = CountedNodes(cache.unlocked, work)
    pins = f", every third one pinned for {seconds} s" if seconds else ""
    log(f"{num_leaves:,} leaves{pins}")
    for _ in range(3):
        work.clear()
        log.call("evict(1)", cache.evict, 1)
        seen = work.total()
        log("", {"nodes, entries and ages that are looked at:": at_most(num_leaves // 3, seen)})


scenario("07.9", among_many,
    Group("among a thousand leaves, without looking at each", [(1000, 0), (1000, 60)],
          "`first_leaf`: which leaf does `order` name first, and what may be wrong with it?"),
)  # fmt: skip


@cache
def short_load(seed: int) -> list:
    return retention.agent_load(seed, agents=3, singles_per_s=0.3, chats_per_s=0.02)


def on_a_trace(mine, program, log: Log) -> None:
    """Tokens that are computed again, in the simulator."""
    seed, num_blocks, seconds = program
    load = [turn._replace(retain_s=turn.retain_s and seconds) for turn in short_load(seed)]

    def make(pool, clock):
        return mine.RetainingCache(pool, 1, mine.pinned, clock)

    log(f"trace {seed}, {len(load)} requests, {num_blocks} blocks, pins of {seconds} s")
    log("", {"tokens that are computed again:": retention.serve(load, num_blocks, make)[0]})


scenario("07.9", on_a_trace,
    Group("a trace of agents, chats and single requests",
          [(1, 512, 600), (2, 768, 600), (3, 512, 10)],
          "what was evicted, and is asked for again: which rule should have kept it?"),
)  # fmt: skip


# ── The reader's parts in the engine ──────────────────────────────────────────


def busy(kind: type = minikv.Engine, loop: type = Loop, **parts) -> str:
    """Shared prompts, equal prompts, two tenants and a chat that grows, in a pool that is too
    small for all of them. Raises AssertionError for other tokens than the oracle's."""
    lm, system = tinypy(), prompt_of("s24")
    engine = engine_on(parts, {"num_blocks": 15, "min_prefix_tokens": 4}, kind)
    engine.loop = loop()
    asked = [
        system + lm.encode(f"    def {name}(self):\n") for name in ("pop", "top", "size", "top")
    ]
    jobs = [(prompt, params_of(6)) for prompt in asked]
    jobs += [(asked[0], params_of(6, "x")), (system[:20], params_of(16))]
    outputs = engine.generate(*zip(*jobs, strict=True))
    chat = system
    for text in ("    def push(", "    def pop(", "    def top("):
        chat = chat + lm.encode(text)
        jobs.append((chat, params_of(5)))
        outputs += engine.generate([chat], params_of(5))
        chat = chat + outputs[-1].token_ids
    witness([output.token_ids for output in outputs])
    for output, (prompt, params) in zip(outputs, jobs, strict=True):
        if output.token_ids != lm.generate_naively(prompt, params.max_tokens):
            raise AssertionError(f"a prompt of {len(prompt)} tokens: not the oracle's tokens")
    engine.check()
    assert engine.cache is not None
    engine.cache.evict(15)
    if engine.pool.num_free != 15:
        raise AssertionError(f"{15 - engine.pool.num_free} blocks are lost")
    stats = engine.stats()
    return (
        f"{len(jobs)} requests in {engine.config.num_blocks} blocks of 4, same tokens as the "
        f"oracle; {stats.hit_tokens} of {stats.looked_up_tokens} prompt tokens found in the cache, "
        f"{stats.preemptions} preemptions"
    )


@runs_model("07.1", "07.2", "07.4", "07.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    """On a radix tree and a scheduler of which some is the reader's."""
    return f"{busy(prefix_cache=mine.RadixCache, scheduler=mine.Scheduler)}."


@runs_model("07.3")
def _(mine, lm: minikv.LanguageModel) -> str:
    """The same without a tree."""
    return f"{busy(prefix_cache=mine.ChainedCache)}, on your chained hashes."


@runs_model("07.7")
def _(mine, lm: minikv.LanguageModel) -> str:
    """The reader's engine, on all parts of chapters 04 to 07 that are passed."""
    parts = PassedParts({"07"})
    with parts.installed():
        in_place = together.parts_in_place()
        served = busy(mine.Engine, mine.Loop, **in_place)
        engine = mine.Engine(lm, **in_place)
        engine.loop = mine.Loop()
        params = minikv.SamplingParams(max_tokens=together.TEXT_TOKENS, ignore_eos=True)
        [output] = engine.generate(together.TEXT, params)
    witness(output.token_ids)
    if output.token_ids != lm.generate_naively(output.prompt_ids, params.max_tokens):
        raise AssertionError(f"{output.text!r} is not what the oracle writes")
    line = output.text.splitlines()[0]
    return (
        f"tinypy ran on your engine ({parts.whose_engine(together.PARTS)}): {served}. "
        f"After {together.TEXT.splitlines()[-1].strip()!r} it writes {line!r}."
    )


@runs_model("07.9")
def _(mine, lm: minikv.LanguageModel) -> str:
    """An agent whose tool runs while others use the pool."""
    engine = minikv.Engine(
        lm, minikv.EngineConfig(num_blocks=24, attention="torch"),
        prefix_cache=lambda pool, size: mine.RetainingCache(pool, size, mine.pinned),
    )  # fmt: skip
    text = lm.encode("def area(width, height):\n    return width * height\n\n\n" * 2)
    prompt = text[:80]
    for visit in range(3):
        before = engine.stats().hit_tokens
        params = minikv.SamplingParams(max_tokens=8, ignore_eos=True, retain_s=60)
        [output] = engine.generate([prompt], params)
        same_as_oracle(lm, prompt, output.token_ids)
        found = engine.stats().hit_tokens - before
        for other in range(3):
            engine.generate([[5 + visit, 7 + other] * 60], minikv.SamplingParams(max_tokens=4))
        engine.check()
        last, prompt = prompt, prompt + output.token_ids + text[:4]
    return f"an agent's third turn found {found} of {len(last)} tokens while others filled the pool"
