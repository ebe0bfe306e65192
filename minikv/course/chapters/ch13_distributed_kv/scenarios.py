"""Chapter 13 as programs: pairs of prompts, stores that lie, routed requests, hand-overs."""

import random
import threading
from enum import IntEnum
from itertools import pairwise, product
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import minikv
from minikv.course.chapters.ch12_tiers_and_sessions.given import prefixes
from minikv.course.chapters.ch13_distributed_kv.given import Clock, calls_to_the_dead, in_process
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle
from minikv.course.judge.programs import blocks_of, go_on, under
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.tiers import tiers_of

PROMPT = "class Queue:\n    def push(self, item):\n        self."


# ── 13.1 Block names that cannot collide ──────────────────────────────────────

FACTS = {"model": "9f0c", "dtype": "float32", "block size": "4", "layout": "1"}


def two_identities(mine, program, log: Log) -> None:
    words, one, two = program
    shown = "" if len(one) > 9 else f"{one}, and "
    log(f"the facts {shown}{words}" + f": {two}" * bool(shown))
    first = log.call("identity_of", mine.identity_of, one, see=False)
    second = log.call("identity_of", mine.identity_of, two, see=False)
    log("", {"32 bytes?": isinstance(first, bytes) and len(first) == 32})
    log("", {"is the identity the same?": first == second})


def two_salts(mine, program, log: Log) -> None:
    one, two = program
    log(f"the salts {one!r} and {two!r}")
    first = log.call("spell", mine.spell, one, see=False)
    second = log.call("spell", mine.spell, two, see=False)
    log("", {"are they texts?": [isinstance(first, str), isinstance(second, str)]})
    log("", {"are the spellings equal?": first == second})


class Tenant:
    """A salt that prints its address, as objects do."""


class Named:
    """A salt that prints a name, which any object may."""

    def __repr__(self) -> str:
        return "'a'"


class Level(IntEnum):
    """A salt that is an integer, and prints what its class decides."""

    LOW = 1


class Text(str):
    """A salt that is a string, and prints as another one."""

    __repr__ = Named.__repr__


NO_SALTS = {
    "an object": Tenant(),
    "an object that prints as 'a'": Named(),
    "a member of an enum of integers": Level.LOW,
    "a string of a subclass, which prints as 'a'": Text("b"),
    "a frozenset": frozenset("abc"),
    "a tuple with an object in it": ("a", Tenant()),
    "a tuple in a tuple with a frozenset in it": ("a", (frozenset("ab"),)),
}


def no_spelling(mine, program, log: Log) -> None:
    log(f"the salt is {program}")
    found = log.call("spell", mine.spell, NO_SALTS[program], see=False)
    salt = NO_SALTS[program]
    if isinstance(salt, tuple):
        rest = log.call("spell", mine.spell, salt[:1], see=False)
        log("", {"is it the spelling of a part of the tuple?": found == rest})
    log("", {"is there a spelling?": found is not None})


def two_blocks(mine, program, log: Log) -> None:
    """Tokens as blocks: [[1, 2], [3]] is a block of two, then a block of one."""
    one, two = program
    log(f"the tokens {one} and {two}, a list for each block")
    names = []
    for blocks in (one, two):
        name = b"r" * 32
        for tokens in blocks:
            name = log.call("block_name", mine.block_name, name, tokens, see=False)
        names.append(name)
    log("", {"32 bytes?": all(isinstance(one, bytes) and len(one) == 32 for one in names)})
    log("", {"are the last names equal?": names[0] == names[1]})


def other_process(mine, program, log: Log) -> None:
    what, argument = program
    log(f"{what} of {argument!r}, in two processes")
    found = []
    for seed in (1, 2):
        with in_process(mine, seed):
            if what == "block_name":
                found.append(log.call("", mine.block_name, b"r" * 32, argument, see=False))
            else:
                found.append(log.call("", getattr(mine, what), argument, see=False))
    log("", {"are they equal?": found[0] == found[1]})


# Salts with a text in them, whatever text it is: may it be spelled as a tuple of several is?
IMITATES = {
    "a text": (("a", "b"), lambda text: text),
    "a tuple of one text": (("a", "b"), lambda text: (text,)),
    "a tuple of 'a' and a text": (("a", "b", "c"), lambda text: ("a", text)),
    "a tuple of a text and 'c'": (("a", "b", "c"), lambda text: (text, "c")),
    "a tuple in a tuple": ((("a", "b"), "c"), lambda text: ((text,), "c")),
}


def imitated(mine, program, log: Log) -> None:
    """Which text imitates depends on what the reader's function writes between two parts."""
    salt, around = IMITATES[program]
    log(f"the salts {salt!r} and {program}")
    spelled = log.call("spell", mine.spell, salt, see=False)
    like = log.call("spell", mine.spell, around("xyz"), see=False)
    if log.events[-1].error is not None:
        return
    text = None
    if isinstance(spelled, str) and isinstance(like, str):
        start, _, end = like.partition("xyz")
        if len(spelled) > len(start + end) and spelled.startswith(start) and spelled.endswith(end):
            text = spelled[len(start) : len(spelled) - len(end)]
    same = text is not None and mine.spell(around(text)) == spelled
    log(f"with the text {text!r}" if same else "", {"can one imitate the other?": same})


SPELLED = [None, "None", "", "a", "b", 1, "1", 1.0, True, b"1", b"a", (), ("a",), ("a", "b"),
           ("a,b",), "a,b", ("a', 'b",), (("a",), "b"), (("a", "b"),), ("a", ("b",)), ("ab",),
           ("a", "b"), ("a,str:b",), ("a", "b"), ("a, b",), -1, -2, 2**61 - 1, 0,
           ("str:'a'", "b"), "(str:'a')", (None,), ("None",), ("", ""), ("",),
           ("a", "", "b"), ("a,str:'b'",), ("a',str:'b",), 100 * "a", 100 * "a" + "b", 2**70,
           2**70 + 1, 0.3, 0.1 + 0.2, 1e16, 1e16 + 2, 10**16, False, 0, 0.0, "", b"", "A", "a",
           "a ", " a", "'", '"', b"'", b'"', "b'", "b''", b"\n", "\n", "\\n", (0,), (False,), 0,
           ((),), (), "salt:a", ("salt", "a"), ("adapter", "a"), "adapter:a"]  # fmt: skip


def pairs_of_salts() -> list:
    draw = random.Random(13)
    some = [tuple(draw.sample(SPELLED, 2)) for _ in range(60)]
    return list(pairwise(SPELLED)) + some


LONGER = {"model": "9f0c", "dtype": "float16"}
scenario("13.1", two_identities,
    Group("facts: the same, and others", [("the same", FACTS, dict(FACTS)),
          ("the same, listed in another order", FACTS, dict(reversed(FACTS.items()))),
          ("another model", FACTS, FACTS | {"model": "77aa"}),
          ("another block size", FACTS, FACTS | {"block size": "16"}),
          ("another layout", FACTS, FACTS | {"layout": "2"}),
          ("one fact fewer", FACTS, {k: v for k, v in FACTS.items() if k != "layout"}),
          ("one fact more", FACTS, FACTS | {"salted": ""}),
          ("two values swapped", LONGER, {"model": "float16", "dtype": "9f0c"}),
          ("a capital", FACTS, FACTS | {"model": "9F0C"}),
          ("a capital in a name", FACTS, {"Layout" if k == "layout" else k: v
          for k, v in FACTS.items()}), ("a blank at the end", FACTS, FACTS | {"model": "9f0c "}),
          ("a number with a point", FACTS, FACTS | {"block size": "4.0"}),
          ("an empty value", {"a": "", "b": "c"}, {"b": "c"}),
          ("another name for an equal value", {"a": "x", "b": "x"}, {"a": "x", "c": "x"}),
          ("two facts of one value, and one", {"a": "x", "b": "x"}, {"a": "x"}),
          ("an adapter named as another's salt", {"salt": "x"}, {"adapter": "x"}),
          ("another quote", {"a": "it's"}, {"a": 'it"s'}),
          ("a letter, and how it is escaped", {"a": "\xe9"}, {"a": "\\u00e9"}),
          ("one fact of 1,000", dict.fromkeys(map(str, range(1000)), "x"),
          dict.fromkeys(map(str, range(1000)), "x") | {"999": "y"})],
          "names and values, sorted, each of them in the hash"),
    Group("letters that move from one fact to the next",
          [("a letter moves to the name", {"ab": "c"}, {"a": "bc"}),
          ("a letter moves on", {"a": "bc", "d": "e"}, {"a": "b", "cd": "e"}),
          ("one fact that looks like two", {"a": "b", "c": "d"}, {"a": "b', 'c': 'd"}),
          *((f"the same with {one!r} between", {"a": "b", "c": "d"}, {"a": f"b{one}c{two}d"})
          for one in (*"\n \0\x1f\t|&,;/", ", ", "; ") for two in (one, "=", ":", ": "))],
          "where does a name end, and where does a value end?"),
)  # fmt: skip
scenario("13.1", two_blocks,
    Group("the same tokens", [([[1, 2, 3]], [[1, 2, 3]]), ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
          ([[1, 2]], [(1, 2)])], "what does the name depend on besides parent and tokens?"),
    Group("other tokens, or another beginning",
          [([[1, 2]], [[2, 1]]), ([[1, 2]], [[1, 3]]), ([[0]], [[0, 0]]), ([[1], [9]], [[2], [9]]),
          ([[1], [2], [9]], [[2], [1], [9]]), ([[7], [7]], [[7], [7], [7]]), ([[3, 3]], [[4, 2]]),
          ([[5, 6, 7]], [[6, 5, 7]]), ([[2, 36]], [[3, 5]])],
          "every token in its place, and the parent"),
    Group("blocks of any length", [([[1], []], [[1]]), ([[]], [[], []]),
          ([[1] * 600], [[1] * 599 + [2]])], "how many tokens may a block have?"),
    Group("tokens that run together, and large ones",
          [([[1, 23]], [[12, 3]]), ([[1, 2, 3]], [[1, 23]]), ([[11, 1]], [[1, 11]]),
          ([[256]], [[0]]), ([[256]], [[1, 0]]), ([[300]], [[44]]), ([[65_536]], [[0]]),
          ([[65_537]], [[1, 1]]), ([[65_538, 5]], [[2, 5]]), ([[1, 65_536]], [[1, 0, 1]]),
          ([[2_000_000]], [[2_000_000 % 65_536]]), ([[2**24 + 5]], [[5]]),
          ([[2**31 - 1]], [[2**31 - 2]])], "how many bytes does a token get?"),
)  # fmt: skip
scenario("13.1", two_salts,
    Group("salts: equal ones and others", [("a", "a"), (("a", 1), ("a", 1)), (None, None),
          (1.5, 1.5), (1, True), *pairs_of_salts()], "type, and where each part of a tuple ends"),
)  # fmt: skip
scenario("13.1", imitated,
    Group("a text that imitates the parts of a tuple", list(IMITATES),
          "where does a text end if it contains what stands between two parts?"),
)  # fmt: skip
scenario("13.1", no_spelling,
    Group("what has no spelling", list(NO_SALTS), "what does this salt print in another process?"),
)  # fmt: skip
scenario("13.1", other_process,
    Group("the same name in every process",
          [("identity_of", FACTS), ("block_name", [1, 2, 3]), ("spell", "a"), ("spell", ("a", 1))],
          "`hash` of a string is a different number in each process"),
)  # fmt: skip


# ── 13.2 Route by prefix, with a bound ────────────────────────────────────────

# A program is (workers, block size, bound, steps). Steps: "+AB9" routes a prompt of 9 tokens, whose
# whole blocks are A and AB; "-0" has the first ticket computed; "/1:A,AB" evicts from worker 1,
# which "x1" loses and "o1" brings back, empty.


def routed(mine, program, log: Log) -> None:
    workers, size, bound, steps = program
    router = mine.ByPrefix(workers, size, bound)
    log(f"{workers} workers, blocks of {size}, bound {bound}")
    tickets = []
    for step in steps.split():
        kind, rest = step[0], step[1:]
        if kind == "+":
            prompt = rest.rstrip("0123456789")
            names, num_tokens = prefixes(prompt), int(rest[len(prompt) :])
            text = f"a prompt of {num_tokens} tokens, blocks {', '.join(names) or 'none'}"
            ticket = log.call(text, router.route, names, num_tokens, see=False)
            tickets.append(ticket)
            if ticket is not None:
                log("", {"goes to worker": ticket.worker, "tokens to compute:": ticket.num_tokens})
            log("", {"hits:": log.call("hits", router.hits, names, see=False)})
        elif kind == "-":
            log(f"prompt {rest} is computed")
            if tickets[int(rest)] is not None:
                router.computed(tickets[int(rest)])
        elif kind in "xo":
            (router.lost if kind == "x" else router.back)(int(rest))
            log(f"worker {rest} is {'lost' if kind == 'x' else 'back'}")
        else:
            worker, _, names = rest.partition(":")
            log(f"worker {worker} evicts {', '.join(names.split(','))}")
            router.removed(int(worker), names.split(","))


def held(mine, program, log: Log) -> None:
    """Who holds what is given; what are the hits of some names?"""
    holders, names = program
    router = mine.ByPrefix(3, 4)
    router.holders = {name: set(workers) for name, workers in holders.items()}
    log(f"holders {holders}")
    log.call(f"hits {', '.join(names) or 'of no block'}", router.hits, names)
    log("", {"holders afterwards:": {name: set(one) for name, one in router.holders.items()}})


def chosen(mine, program, log: Log) -> None:
    """One choice, with all that it depends on given."""
    loads, sent, holders, bound, text, tokens, *own = program
    router = (corrected(mine) if own else mine.ByPrefix)(len(loads), 4, bound)
    router.loads, router.sent = list(loads), list(sent)
    router.holders = {name: set(workers) for name, workers in holders.items()}
    log(f"WAITING {router.WAITING:g}, loads {loads}, sent {sent}, bound {bound}, holders {holders}")
    names = prefixes(text)
    said = f"choose for {tokens} tokens, blocks {', '.join(names) or 'none'}"
    log.call(said, router.choose, names, tokens, None)
    if text:
        log("", {"hits afterwards:": log.call("", router.hits, names, see=False)})


def corrected(mine):
    """The router of `serve`: the class with both corrections."""
    return type("ByOwnPrefix", (mine.ByPrefix,), {"WAITING": 0.5, "SHARED": 0.25})


def noted(mine, program, log: Log) -> None:
    """Who counts as a holder of a block after some have stored it? A number stores, "x1" goes."""
    workers, own, steps = program
    router = (corrected(mine) if own else mine.ByPrefix)(workers, 4)
    log(f"{workers} workers, SHARED {router.SHARED:g}")
    for step in steps.split():
        if step[0] == "x":
            router.lost(int(step[1:]))
            log(f"worker {step[1:]} is lost")
        else:
            log.call(f"worker {step} has stored A and AB", router.stored, int(step), ["A", "AB"])
    log("", {"holders:": {name: sorted(one) for name, one in router.holders.items()}})


two = under(2, 4, 100)
OVER = "`sent` of a worker against bound times the mean of all, with this prompt"
LONG = {"A": [0, 1], "AB": [0, 1], "ABC": [0], "ABCD": [0]}


def random_route(seed: int):
    draw = random.Random(seed)
    texts = ["ABCD", "ABCE", "ABF", "GHI", "GHJK", "L"]
    steps: list[str] = []
    waiting: list[int] = []
    count, down = 0, set[int]()
    for _ in range(6 + seed // 2):
        if waiting and draw.random() < 0.45:
            steps.append(f"-{waiting.pop(draw.randrange(len(waiting)))}")
        elif seed % 3 == 0 and draw.random() < 0.15:
            down = set() if down else {draw.randrange(2)}
            steps += [f"x{one}" for one in down] or ["o0", "o1"]
        elif count and draw.random() < 0.12:
            text = draw.choice(texts)
            worker, first = draw.randrange(2), draw.randrange(len(text))
            steps.append(f"/{worker}:{','.join(prefixes(text)[first:])}")
        else:
            text = draw.choice(texts)
            text = text[: draw.randrange(1, len(text) + 1)]
            steps.append(f"+{text}{4 * len(text) + draw.randrange(3)}")
            waiting.append(count)
            count += 1
    return 2 + seed % 4, 4, draw.choice([1.2, 1.5, 3.0, 100.0]), " ".join(steps)


scenario("13.2", held,
    Group("hits", [({}, []), ({"A": [1]}, ["A"]), ({"A": [0, 1], "AB": [1]}, ["A", "AB"]),
          ({"A": [0], "AB": [0, 1]}, ["A", "AB"]), ({"AB": [1]}, ["A", "AB"]),
          ({"A": [0, 2], "AB": [0], "ABC": [0, 2]}, ["A", "AB", "ABC"]),
          ({"A": [0, 1], "AB": [2], "ABC": [0, 1]}, ["A", "AB", "ABC"]),
          ({"A": [2]}, ["A", "AB", "ABC"])],
          "a worker that lacks a block is out for all that follow"),
)  # fmt: skip
scenario("13.2", chosen,
    Group("one choice", [([0, 0], [0, 0], {}, 9, "A", 5), ([0, 0], [7, 0], {}, 9, "A", 5),
          ([3, 0], [3, 3], {"A": [0]}, 9, "A", 5), ([5, 0], [5, 5], {"A": [0]}, 9, "A", 5),
          ([20, 9, 8], [20, 9, 8], LONG, 9, "ABCD", 17),
          ([22, 9, 8], [22, 9, 8], LONG, 9, "ABCD", 17),
          ([22, 9, 0], [22, 9, 5], LONG, 9, "ABCD", 17), ([0, 1], [9, 9], LONG, 9, "ABCD", 17)],
          "candidates: those that hold a beginning, and the least loaded one"),
    Group("ties", [([4, 0], [4, 5], {"A": [0]}, 9, "A", 5), ([4, 0], [5, 4], {"A": [0]}, 9, "A", 5),
          ([0, 0], [0, 0], {"A": [0, 1]}, 9, "A", 5), ([0, 4], [5, 5], {"A": [1]}, 9, "A", 5),
          ([3, 3, 3], [2, 2, 2], {"A": [1, 2]}, 9, "A", 5),
          ([4, 8, 0], [3, 9, 5], {"A": [0, 1], "AB": [1]}, 9, "AB", 9),
          ([8, 4, 0], [9, 3, 5], {"A": [0, 1], "AB": [0]}, 9, "AB", 9),
          ([8, 4, 0], [5, 5, 3], {"A": [0, 1], "AB": [0]}, 9, "AB", 9)],
          "of workers with equal differences, the least `sent`, and then the lowest number"),
    Group("a prompt that is held whole", [([0, 0], [5, 5], {"A": [1]}, 9, "A", 4),
          ([4, 0], [3, 9], {"A": [0]}, 9, "A", 4),
          ([6, 0], [9, 9], {"A": [0], "AB": [0]}, 9, "AB", 8),
          ([8, 0], [8, 9], {"A": [0], "AB": [0]}, 9, "AB", 8)],
          "which of the two numbers has a limit: the one compared, or the one returned?"),
    Group("one choice, with a bound", [([0, 0], [40, 0], {"A": [0]}, 1.5, "A", 5),
          ([0, 0], [40, 0], {"A": [0]}, 0.5, "A", 5), ([0, 0], [40, 30], {"A": [0]}, 1.2, "A", 5),
          ([0, 0, 0], [30, 10, 10], {"A": [0]}, 1.5, "A", 5),
          ([19, 0, 0], [9, 9, 9], {name: [0] for name in prefixes("ABCDE")}, 1.0, "ABCDE", 21),
          ([0, 0, 0], [30, 10, 10], {"A": [0]}, 1.5, "A", 13),
          ([2, 5], [40, 8], {"A": [0]}, 1.2, "A", 5), ([30, 28], [40, 60], {"A": [0]}, 1.0, "A", 5),
          ([0, 0], [0, 0], {"A": [0, 1]}, 0.5, "A", 5), ([0, 0], [5, 0], {"A": [0]}, 1.0, "A", 5),
          ([0, 0], [10, 10], {"A": [0]}, 1.2, "A", 13),
          ([0, 3, 3], [60, 9, 9], {"A": [0], "AB": [0]}, 1.5, "AB", 13),
          ([1, 3], [60, 9], {"A": [0, 1], "AB": [0]}, 1.2, "AB", 13)], OVER),
)  # fmt: skip
OWN = True
scenario("13.2", chosen,
    Group("waiting tokens that count half",
          [([6, 0], [6, 6], {"A": [0]}, 9, "A", 5, OWN),
          ([8, 0], [8, 9], {"A": [0]}, 9, "A", 5, OWN),
          ([10, 0], [5, 9], {"A": [0]}, 9, "A", 5, OWN),
          ([34, 6, 0], [34, 9, 8], LONG, 9, "ABCD", 17, OWN),
          ([30, 6, 0], [34, 9, 8], LONG, 9, "ABCD", 17, OWN)],
          "what does a waiting token count, and what one that is held?"),
)  # fmt: skip
scenario("13.2", noted,
    Group("who holds a block", [(2, False, "0"), (2, False, "0 1"), (4, False, "2 0 2"),
          (5, False, "0 1 2 3")], "`holders`: a set of workers for each name"),
    Group("a block that many hold", [*under(4, OWN)("0 1", "0 1 2", "0 1 2 0", "0 0 0"),
          *under(3, OWN)("0 1", "1 2", "0 1 2"), *under(16, OWN)("0 1 2", "0 1 2 3", "0 1 2 3 4"),
          *under(20, OWN)("0 1 2 3", "0 1 2 3 4"),
          *under(16, OWN)("x5 x6 0 1 2 3", "x5 x6 x7 x8 0 1 2"), (4, False, "0 1 2")],
          "at least three workers, and SHARED times the number of all: then all that are up"),
)  # fmt: skip
scenario("13.2", routed,
    Group("the first prompts", [*two("+A5", "+A4"), (3, 4, 100, "+A5 +B6 +C5"),
          *two("+AB9 +C5 +D5 +E5", "+3 +3")], "the least loaded worker is a candidate, too"),
    Group("a prefix attracts requests", [*two("+AB9 -0 +ABC13", "+AB8 -0 +AB8",
          "+ABCD17 -0 +E5 -1 +ABCDF21"), (3, 4, 100, "+A5 +BC9 -0 -1 +BCD13")],
          "tokens held, against tokens that wait; one token at least is computed"),
    Group("until the queue is longer than what it saves",
          [*two("+AB9 +ABC13", "+AB9 -0 +ABC13 +ABD13 +ABE13 +ABF13"),
          *two("+ABCD17 -0 +AX30 +ABCD17")], "load minus tokens held: both are tokens"),
    Group("the bound", [(2, 4, 1.2, "+AB9 -0 +ABC13"), (2, 4, 1.5, "+AB20 -0 +AB9 -1 +AB9"),
          (3, 4, 1.5, "+A30 -0 +AB9 -1 +AC9 -2 +AD9"), (2, 4, 1.0, "+A5 +A5 -0 -1 +A5 +A5"),
          (1, 4, 0.5, "+A9 -0 +AB9")], "`sent` of a worker, and the mean of all with this prompt"),
    Group("what was evicted", two("+AB9 -0 /0:AB +ABC13", "+AB9 -0 /0:A +ABC13"),
          "`hits`, after an eviction"),
    Group("a worker is down", [*two("+AB9 -0 x0 +AB9 +C5", "x1 +A5 +B5 +C5",
          "+AB9 -0 x0 o0 +ABC13 +D5 +E5"), (3, 4, 1.2, "+A5 x1 +B5 +C5 -1 -2 o1 +D5"),
          (3, 4, 1.0, "+ABCDE20 +F5 -0 x2 +ABCDEF25"),
          *two("x0 x1 +A5")],
          "which workers may get a prompt, and which of them does the mean count?"),
    Group("60 random traces", [random_route(seed) for seed in range(60)],
          "before the choice that differs: what has each worker to do, and what does it hold?"),
)  # fmt: skip


# ── 13.3 A hand-over that survives failures ───────────────────────────────────

# Steps: "+A2p" begins the transfer A of 2 blocks from sender p; "wA" lets its sender write one more
# block, as its network card does; "sA" has it say that it stopped; "xA" cancels; "!p" kills a
# sender; "?A" takes the blocks and reads them; "-A" releases what was taken.


SENDERS = {"p": "node-1", "q": "node-12", "r": "node"}


def handed_over(mine, program, log: Log) -> None:
    num_blocks, steps = program
    receiver = mine.Receiver(num_blocks)
    log(f"a pool of {num_blocks} blocks")
    told: dict[str, SimpleNamespace] = {}
    for step in steps.split():
        kind, name = step[0], step[1]
        one = told.get(name)
        if kind == "+":
            count, sender = int(step[2:-1]), step[-1]
            text = f"{name} begins: {count} blocks from {sender}"
            begun = log.call(text, receiver.begin, SENDERS[sender], count, see=False)
            if begun is not None:
                number, blocks = begun
                told[name] = SimpleNamespace(number=number, blocks=blocks, at=0, taken=None)
        elif kind == "!":
            log.call(f"{name} is dead", receiver.died, SENDERS[name])
        elif one is None:
            continue
        elif kind == "w":
            log(f"block {one.at} of {name} arrives")
            receiver.memory[one.blocks[one.at]] = f"{name}{one.at}"
            one.at += 1
        elif kind == "s":
            text = f"the sender of {name} has stopped, {one.at} of {len(one.blocks)} written"
            log.call(text, receiver.stopped, one.number, one.at)
        elif kind == "x":
            log.call(f"{name} is cancelled", receiver.cancel, one.number)
        elif kind == "?":
            one.taken = log.call(f"take {name}", receiver.take, one.number, see=False)
            read = None if one.taken is None else [receiver.memory[b] for b in one.taken]
            log("", {f"the request reads, as {name}:": read})
        elif one.taken is not None:
            log(f"the request of {name} has ended")
            for block in one.taken:
                receiver.pool.release(block)
            one.taken = None
        if kind != "s":  # first whether the request may read, then what is free
            log("", {"free blocks:": receiver.pool.num_free})
    log("at the end", {"free blocks:": receiver.pool.num_free})


def random_hand_over(seed: int) -> tuple[int, str]:
    """Any order that a cluster may give: what a dead sender has begun goes on no more. A new one
    may take its name."""
    draw = random.Random(seed)
    steps: list[str] = []
    state: dict[str, list] = {}  # by transfer: sender, blocks, written, stopped, taken
    dead: set[str] = set()  # transfers
    for name in "ABCDEFGH"[: 3 + seed // 10]:
        for _ in range(draw.randrange(1, 8)):
            options: list[tuple[str, str]] = []
            for other, (_, count, at, stopped, _) in state.items():
                if other not in dead and not stopped:
                    options += [("s", other)] + 3 * [("w", other)] * (at < count)
                options += [("x", other), ("?", other)]
            if options:
                kind, other = draw.choice(options)
                steps.append(kind + other)
                state[other][2] += kind == "w"
                state[other][3] |= kind == "s"
        count, sender = draw.randrange(1, 4), draw.choice("pqr")
        steps.append(f"+{name}{count}{sender}")
        state[name] = [sender, count, 0, False, False]
        if draw.random() < 0.15:
            gone = draw.choice("pqr")
            dead |= {other for other, one in state.items() if one[0] == gone}
            steps.append(f"!{gone}")
    for name, (_, count, at, stopped, _) in state.items():
        if name not in dead and not stopped:
            steps += [f"w{name}"] * (count - at) + [f"s{name}"]
        steps += [f"?{name}", f"-{name}"]
    return 24, " ".join(steps)


in_4 = under(4)
scenario("13.3", handed_over,
    Group("K and V arrive", [*in_4("+A2p wA wA sA ?A -A", "+A2p ?A wA ?A wA ?A sA ?A ?A"),
          *in_4("+A2p +B2q wB wA wB wA sB sA ?A ?B -A -B"), (3, "+A2p +B2p")],
          "when may the request read?"),
    Group("cancelled while K and V arrive",
          [*in_4("+A2p wA xA", "+A2p wA xA wA sA"), (2, "+A2p xA +B2q"),
          (3, "+A2p wA xA +B1q wB sB wA ?B"), *in_4("+A2p wA xA +B2q wB wB sB wA sA ?B -B",
          "+A2p xA sA ?A", "+A2p xA wA wA sA ?A")], "who may still write into the blocks?"),
    Group("cancelled afterwards", [*in_4("+A2p wA wA sA xA", "+A2p wA wA sA xA ?A",
          "+A2p wA wA sA ?A xA -A"), *in_4("+A2p wA xA xA wA sA sA xA")],
          "which call will say that it is over?"),
    Group("the sender gives up", [*in_4("+A2p wA sA ?A", "+A2p sA ?A",
          "+A2p wA sA +B3q wB wB wB sB ?A ?B"), *in_4("+A3p wA wA sA sA ?A")],
          "how many blocks were written, and how many were begun?"),
    Group("the sender dies", [*in_4("+A2p wA !p ?A", "+A2p wA !p +B4q wB wB wB wB sB ?B"),
          *in_4("+A2p wA wA sA !p ?A -A", "+A1p +B1q wA wB !p sB ?B", "+A2p wA xA !p"),
          *in_4("+A1p +B1p +C1p wA xA wB sB !p ?B ?C", "+A2p wA !p xA sA !p"),
          *in_4("+A2p wA !p +B2p wB wB sB ?B -B", "+A2p !p +B2p wB !p ?B", "+A1q wA !p sA ?A"),
          *in_4("+A1r wA !p !q sA ?A", "+A1p +B1q !q wA sA ?A ?B")],
          "for which transfers will `stopped` never be called?"),
    Group("60 random traces", [random_hand_over(seed) for seed in range(60)],
          "the transfer that differs: who may still write to its blocks, and who has been told?"),
)  # fmt: skip


# ── 13.4 A circuit breaker for the store ──────────────────────────────────────

# Steps of a program: "?" asks whether to call, "+" reports that a call worked, "-" that it failed,
# and a number lets so many seconds pass. Times are multiples of 1/4, which floats hold exactly.


def broken(mine, program, log: Log) -> None:
    first, most, steps = program
    clock = Clock()
    breaker = mine.Breaker(first, most, clock)
    log(f"first {first} s, most {most} s")
    for step in steps.split():
        at, asked, was_open = f"at {clock.now:g} s: ", clock.asked, breaker.is_open
        if step == "?":
            log.call(f"{at}allows", breaker.allows)
        elif step == "+":
            log.call(f"{at}a call worked; was it open?", breaker.worked)
        elif step == "-":
            log.call(f"{at}a call failed; was it closed?", breaker.failed)
        else:
            clock.now += float(step)
            continue
        log("", {"is open:": breaker.is_open})
        if step == "-" or (step == "?" and was_open):
            log("", {"has it asked the clock that it was given?": clock.asked > asked})


def both_at_once(mine, program, log: Log) -> None:
    """A second caller comes while the first one's call is about to change something."""
    seconds, *both = program
    clock, due = Clock(), False
    others: list[threading.Thread] = []
    found: list[bool] = []

    def second() -> None:
        found.append(getattr(breaker, both[1])())

    class Interrupted(mine.Breaker):
        def __setattr__(self, name: str, value: object) -> None:
            if due and not others:
                others.append(threading.Thread(target=second))
                others[0].start()
                others[0].join(0.03)  # it ends, or it waits for the first one
            super().__setattr__(name, value)

    breaker = Interrupted(0.5, 4.0, clock)
    after = "a new breaker" if seconds is None else f"a failure, and {seconds} s later"
    log(f"{after}: one thread calls {both[0]}, and another one {both[1]} at the same time")
    if seconds is not None:
        breaker.failed()
        clock.now += seconds
    due = True
    first = getattr(breaker, both[0])()
    for other in others:
        other.join()
    if not others:
        second()
    if both == ["allows", "allows"]:
        log("", {"callers that go through:": [first, *found].count(True)})
    log("", {"what the two calls return:": [first, *found]})
    due, began = False, clock.now
    while not breaker.allows() and clock.now < began + 8:
        clock.now += 0.25
    log("", {"seconds until the next call goes through:": clock.now - began})


def outage(mine, program, log: Log) -> None:
    """A store that is down, comes back, and is down once more."""
    first, most, down, limit, pause = program
    clock = Clock()
    breaker = mine.Breaker(first, most, clock)
    log(f"first {first} s, most {most} s; down for {down} s, a call waits {limit} s")
    for times in ("first", "second"):
        calls = log.call("", calls_to_the_dead, breaker, clock, down, limit, pause, see=False)
        log(f"the {times} outage", {"calls:": calls})
        back = clock.now
        while not breaker.allows() and clock.now < back + 4 * most:
            clock.now += 0.25
        log("the store is back", {"seconds until it is asked again:": clock.now - back})
        log.call("", breaker.worked, see=False)


def random_breaker(seed: int) -> tuple[float, float, str]:
    """Callers that report late, or never."""
    draw = random.Random(seed)
    steps: list[str] = []
    for _ in range(8 + seed // 2):
        steps.append(draw.choice(["?"] * 4 + list("--+") + ["0.25", "0.5", "0.5", "1", "2"]))
    return draw.choice([0.5, 1.0]), draw.choice([2.0, 4.0]), " ".join(steps)


quick = under(0.5, 4.0)
TWICE = "each wait is twice the one before, and at most `most`"
scenario("13.4", broken,
    Group("closed, then open", [*quick("?", "? + ?", "? -", "? - ?", "? - 0.25 ? ?"),
          (1.0, 4.0, "2 ? - 0.75 ?")], "what does one failure change, and for how long?"),
    Group("half-open: one trial", quick("? - 0.5 ?", "? - 0.75 ? ?", "? - 3 ? ? 0.25 ?"),
          "which other calls go through while the trial runs?"),
    Group("the trial works", quick("? - 0.5 ? +", "? - 0.5 ? + ? ?",
          "? - 0.5 ? + ? - 0.25 ? 0.25 ?", "? - 0.5 ? 0.25 - 1 ? + ? - 0.5 ?"),
          "after that it starts from the beginning"),
    Group("the trial fails", [*quick("? - 0.5 ? - ?", "? - 0.5 ? - 0.75 ? 0.25 ?"),
          *quick("? - 0.5 ? 0.5 - 0.75 ? 0.25 ?", "? - 0.5 ? - 1 ? - 1.75 ? 0.25 ?"),
          (0.5, 2.0, "? - 0.5 ? - 1 ? - 2 ? - 1.75 ? 0.25 ?"),
          (1.0, 1.0, "? - 1 ? - 0.75 ? 0.25 ?"),
          (0.5, 1e9, "? - " + "1000000 ? - " * 40 + "1000000 ?")], TWICE),
    Group("the trial says nothing", quick("? - 0.5 ? 0.75 ? 0.25 ?", "? - 0.5 ? 1 ? 1.75 ? 0.25 ?"),
          "when does the next caller go through, if no report comes?"),
    Group("reports that are late", [*quick("? ? - -", "? ? - 0.25 - 0.25 ? 0.25 ?", "? ? - +"),
          *quick("? ? - 0.5 ? - 0.5 - 0.75 ? 0.25 ?")],
          "calls that began while it was closed, and report afterwards"),
    Group("60 random traces", [random_breaker(seed) for seed in range(60)],
          "before the answer that differs: in which of its three states is it, and since when?"),
)  # fmt: skip
scenario("13.4", both_at_once,
    Group("two threads at once", [(0.5, "allows", "allows"), (3.0, "allows", "allows"),
          (None, "failed", "failed"), *((0.5, *pair)
          for pair in product(("failed", "worked", "allows"), repeat=2))],
          "what may another thread change between your comparison and your assignment? `_lock`"),
)  # fmt: skip
scenario("13.4", outage,
    Group("what an outage costs", [(0.5, 4.0, 2.0, 0.25, 0.25), (0.5, 4.0, 60.0, 0.25, 0.25),
          (0.5, 32.0, 600.0, 1.0, 0.25)], "how many calls wait for the time limit?"),
)  # fmt: skip


# ── tinypy on the reader's parts ──────────────────────────────────────────────

SIZE = 8


@runs_model("13.1")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Two engines with a folder between them; the second finds what the first has written."""
    prompt = lm.encode(PROMPT * 4)
    params = minikv.SamplingParams(max_tokens=8, ignore_eos=True)
    found = []
    names = "minikv.tiers.names"
    with (
        TemporaryDirectory() as folder,
        in_place_of(f"{names}:spell", mine.spell),
        in_place_of(f"{names}:block_name", mine.block_name),
        in_place_of("minikv.tiers.tiers:identity_of", mine.identity_of),
    ):
        for _ in range(2):
            config = minikv.EngineConfig(
                num_blocks=12, host_blocks=24, disk_path=folder, max_batch_tokens=128,
                max_num_seqs=4, attention="torch",
            )  # fmt: skip
            engine = minikv.Engine(lm, config)
            [output] = engine.generate([prompt], params)
            same_as_oracle(lm, prompt, output.token_ids)
            found.append(engine.stats().tiers["disk"].hits)
            assert engine.cache is not None
            engine.cache.evict(engine.config.num_blocks)
            tiers_of(engine).flush()
    return f"two engines, one folder: the second knew {found[1]} blocks by your names."


@runs_model("13.2")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Two engines behind the reader's router."""
    config = minikv.EngineConfig(
        num_blocks=48, max_batch_tokens=128, max_num_seqs=4, attention="torch"
    )
    engines = [minikv.Engine(lm, config) for _ in range(2)]
    router = mine.ByPrefix(2, config.block_size, 100.0)
    params = minikv.SamplingParams(max_tokens=4, ignore_eos=True)
    for text in ("def first(", "class Second:\n", "def first(", "class Second:\n"):
        prompt = lm.encode(text + PROMPT * 3)
        ends = range(config.block_size, len(prompt) + 1, config.block_size)
        ticket = router.route([tuple(prompt[:end]) for end in ends], len(prompt))
        [output] = engines[ticket.worker].generate([prompt], params)
        router.computed(ticket)
        same_as_oracle(lm, prompt, output.token_ids)
    hits = sum(engine.stats().hit_tokens for engine in engines)
    return f"four prompts through your router to two engines; {hits} tokens were found there."


@runs_model("13.3")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Real K and V, handed over while an earlier transfer is cancelled and writes on."""
    prompts = [lm.encode(text + PROMPT * 3) for text in ("def other(", "class Second:\n")]
    receiver = mine.Receiver(64)
    contents = [blocks_of(lm, prompt, SIZE) for prompt in prompts]
    first, first_blocks = receiver.begin("p", len(contents[0]))
    receiver.cancel(first)
    second, second_blocks = receiver.begin("q", len(contents[1]))
    for block, content in zip(second_blocks, contents[1], strict=True):
        receiver.memory[block] = content
    receiver.stopped(second, len(contents[1]))
    for block, content in zip(first_blocks, contents[0], strict=True):
        receiver.memory[block] = content  # late, but it was under way
    taken = receiver.take(second)
    same_as_oracle(lm, prompts[1], go_on(lm, prompts[1], [receiver.memory[b] for b in taken]))
    receiver.stopped(first, len(contents[0]))
    for block in taken:
        receiver.pool.release(block)
    if receiver.pool.num_free != 64:
        raise AssertionError(f"{64 - receiver.pool.num_free} blocks are missing")
    return f"{len(taken)} blocks handed over during a cancelled transfer: the oracle's 8 tokens."


@runs_model("13.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    """Blocks of a real prompt, from a store that is down for a while."""
    prompt = lm.encode(PROMPT * 4)
    blocks = blocks_of(lm, prompt, SIZE)
    clock, found, calls = Clock(), [], 0
    breaker = mine.Breaker(0.5, 4.0, clock)
    for second in range(20):
        contents: list = []
        if breaker.allows():
            calls += 1
            if 4 <= second < 12:  # it is down
                breaker.failed()
            else:
                contents = blocks
                breaker.worked()
        found.append(len(contents))
        clock.now += 1
        if second in (0, 5, 19):  # before, during and after
            same_as_oracle(lm, prompt, go_on(lm, prompt, contents))
    if not found[0] or found[5] or not found[19]:
        raise AssertionError(f"blocks found per second: {found}")
    return (
        f"20 prompts, {calls} asked the store, {found.count(0)} had no blocks: the oracle's tokens."
    )
