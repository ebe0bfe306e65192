"""Chapter 14 as programs: what is kept, what is given back, what is published, what pays."""

import random
from functools import partial
from string import ascii_lowercase
from types import SimpleNamespace
from typing import Any

import torch

import minikv
from minikv import BlockPool, RadixCache
from minikv.course.chapters.ch14_speculative_decoding.trees import tree_logits
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle, witness
from minikv.course.judge.programs import scramble, under
from minikv.course.judge.scenarios import Group, Log, numbers, scenario
from minikv.course.pictures.snapshot import counted
from minikv.speculative import Drafter, Proposal

PROMPT = "class A:\n    def first(self):\n        return self.items[0]\n\n    def last(self):\n"

# ── 14.1 What is kept ─────────────────────────────────────────────────────────

# A program is (drafts, the target's own tokens), as letters.


def verification(mine, program, log: Log) -> None:
    drafts, own = ([ascii_lowercase.index(letter) for letter in text] for text in program)
    text = f"keep_equal({drafts}, {own})"
    written = log.call(text, mine.keep_equal, list(drafts), list(own), see=False)
    if log.events[-1].error is None:
        log(text, {"written": list(written)})


def random_drafts(seed: int) -> tuple[str, str]:
    draw = random.Random(seed)
    own = "".join(draw.choice("abc") for _ in range(1 + seed % 7))
    drafts = "".join(one if draw.random() < 0.7 else draw.choice("abc") for one in own[:-1])
    return drafts, own


scenario("14.1", verification,
    Group("no drafts", [("", "a"), ("", "z")], "what is written if nothing was guessed?"),
    Group("the first draft is wrong", [("b", "ac"), ("bc", "acd"), ("bbd", "abde"),
          ("zab", "cabd")], "which draft is compared first, and with what?"),
    Group("a draft in the middle is wrong",
          [("ax", "abc"), ("axc", "abcd"), ("abxde", "abcdef"), ("abx", "abcd"), ("axb", "abcd")],
          "which token is written in place of the wrong draft?"),
    Group("all drafts are right", [("a", "ab"), ("ab", "abc"), ("abcd", "abcde"), ("aaa", "aaaa")],
          "how many tokens does a step give if all k drafts are right?"),
    Group("any drafts", [random_drafts(seed) for seed in range(40)],
          "which is the first draft that is not the target's token?"),
)  # fmt: skip

# ── 14.2 A table that shrinks ─────────────────────────────────────────────────

# A program is (block size, steps): "+5" grows, "-3" shrinks, "&" lets somebody else hold every
# block, as the prefix cache does.


def shrinking(mine, program, log: Log) -> None:
    size, steps = program
    pool = scramble(BlockPool(16))
    table = mine.BlockTable(pool, size)
    log(f"blocks of {size}")
    for step in steps.split():
        if step == "&":
            for block_id in table.block_ids:
                pool.acquire(block_id)
            log("all blocks gain another holder")
            continue
        count = int(step)
        before = list(table.block_ids)
        if step[0] == "+":
            table.grow(count)
            log(f"grow({count})")
        else:
            log.call(f"shrink({-count})", table.shrink, -count)
            if log.events[-1].error is not None:
                log("it is refused")
        seen = {"num_tokens:": table.num_tokens, "blocks:": len(table.block_ids)}
        log("", seen | {"free blocks:": pool.num_free})
        kept = before[: len(table.block_ids)] == list(table.block_ids)[: len(before)]
        log("", {"the first blocks are the same:": kept})
        ever = dict.fromkeys([*before, *table.block_ids])  # also those that were given back
        log("", {"counts:": [pool.ref_count(block_id) for block_id in ever]})


def random_sizes(seed: int) -> tuple[int, str]:
    draw, have, steps = random.Random(seed), 0, []
    size = (1, 2, 3, 4, 17)[seed % 5]
    for _ in range(3 + seed // 4):
        count = draw.randrange(0, 9)
        if draw.random() < 0.5 and have:
            count = min(have, count)
            have -= count
            steps.append(f"-{count}")
        elif have + count <= min(16 * size, 60):
            have += count
            steps.append(f"+{count}")
    return size, " ".join(steps)


scenario("14.2", shrinking,
    Group("within a block: nothing is given back",
          under(4)("+7 -1", "+7 -2", "+8 -3", "+4 -1 +1", "+7 -2 +2"),
          "how many blocks do the tokens that stay need?"),
    Group("back over the edge of a block", under(4)("+5 -1", "+9 -1", "+9 -2", "+9 -5", "+12 -11"),
          "is the block of a token that stays given back, or one without a token kept?"),
    Group("to an edge, and to nothing", [(4, "+12 -4"), (4, "+8 -8"), (3, "+6 -3 +1"), (1, "+5 -2"),
          (4, "+6 -6 +6")], "num_tokens // block_size, or rounded up?"),
    Group("other holders keep their blocks", under(4)("+9 & -1", "+9 & -6", "+4 & +4 -5"),
          "who else may hold a block that the table gives back?"),
    Group("more than there is: refused, and nothing is changed",
          [(4, "+5 -6"), (4, "-1"), (3, "+7 -8 -7"), (1, "+3 -4 +1")],
          "what is checked before anything is released?"),
    Group("random steps, several sizes", [random_sizes(i) for i in range(40)],
          "at the step that differs: how many blocks hold `num_tokens`, and who else has them?"),
)  # fmt: skip

# ── 14.3 What came after, the last time ───────────────────────────────────────

# A program is (text as letters, width, most).


def proposals(mine, program, log: Log) -> None:
    text, width, most = program
    token_ids = [ascii_lowercase.index(letter) for letter in text]
    words = f"propose_ngram({token_ids}, {width}, {most})"
    found = log.call(words, mine.propose_ngram, token_ids, width, most, see=False)
    if log.events[-1].error is None:
        log(words, {"drafts": list(found)})


def random_text(seed: int) -> tuple[str, int, int]:
    draw = random.Random(seed)
    text = "".join(draw.choice("abc") for _ in range(draw.randrange(0, 14)))
    return text, 1 + seed % 3, draw.randrange(0, 6)


scenario("14.3", proposals,
    Group("an earlier occurrence", [("abcxyzab", 2, 3), ("abcdqabc", 3, 1), ("mnopmn", 2, 2),
          ("xay", 1, 3), ("xyzx", 1, 2)],
          "where does the copy begin, and how many tokens does it have?"),
    Group("none, or too little text", [("abcdef", 2, 4), ("ab", 2, 4), ("a", 2, 4), ("", 1, 4),
          ("ab", 3, 4), ("abab", 2, 0)], "the last tokens are no earlier occurrence of themselves"),
    Group("of several occurrences the last",
          [("abcabdab", 2, 1), ("axaya", 1, 2), ("abxabyabzab", 2, 3)],
          "in which order are the places tried?"),
    Group("the copy reaches the end of the text",
          [("xaba", 1, 5), ("abcabc", 3, 7), ("aaa", 2, 4), ("qabab", 2, 6)],
          "what comes after the last token of the text?"),
    Group("any text", [random_text(seed) for seed in range(60)],
          "where in the text does the longest match end, and what follows it there?"),
)  # fmt: skip

# ── 14.4 What may be published ────────────────────────────────────────────────

# A program is (block size, prompt and first new token, steps): each step "drafts/own", as letters;
# it computes the newest token and the drafts.


def publishing(mine, program, log: Log) -> None:
    size, prompt, steps = program
    pool = scramble(BlockPool(24))
    table, cache = minikv.BlockTable(pool, size), RadixCache(pool, size)
    slots: dict[int, int] = {}
    tokens = [ascii_lowercase.index(letter) for letter in prompt[:-1]]
    computed = 0
    log(f"blocks of {size}, a prompt of {len(tokens)} tokens")
    for step in ("/" + prompt[-1], *steps.split()):
        drafts, own = ([ascii_lowercase.index(one) for one in part] for part in step.split("/"))
        row = [*tokens[computed:], *drafts]
        table.grow(computed + len(row) - table.num_tokens)
        for position, token in enumerate(row, computed):
            slot, copy = table.writable_slot(position)
            if copy is not None:
                for at in range(size):
                    slots[copy[1] * size + at] = slots.get(copy[0] * size + at, -1)
            slots[slot] = token
        written = minikv.speculative.keep_equal(drafts, own)
        computed = len(tokens) + len(written) - 1
        tokens += written
        log(f"{counted(len(drafts), 'draft')}, {counted(len(written), 'new token')}")
        text = f"settle(table, cache, {tokens}, {computed})"
        log.call(text, mine.settle, table, cache, tokens, computed)
        log("", {"tokens in the table:": table.num_tokens, "free blocks:": pool.num_free})
        probe = [*tokens, *drafts[len(written) - 1 :], 25]
        for words, asked in (("the text", tokens), ("the text with its wrong drafts", probe)):
            found = cache.match(asked)
            held = [slots.get(b * size + at, -1) for b in found.block_ids for at in range(size)]
            log(f"what the cache has of {words}", {"tokens:": found.num_tokens})
            right = held == asked[: found.num_tokens]
            log("", {"its K and V are those of these tokens:": right})


scenario("14.4", publishing,
    Group("no drafts", [(4, "abcde", ""), (4, "abcde", "/b /c /d"), (3, "ab", "/c /d /e /f"),
          (1, "ab", "/c")], "of which tokens are K and V in the blocks?"),
    Group("drafts that are right", [(4, "abcde", "fg/fgh"), (4, "abc", "defg/defgh ijk/ijkl"),
          (2, "abc", "de/def")], "the newest token: is it in a block yet?"),
    Group("drafts that are wrong", [(4, "abc", "xyzw/defgh"), (4, "abcd", "exxx/efghi"),
          (2, "ab", "xyz/cdef /g")],
          "which blocks hold wrong drafts, and does a later reader see them?"),
    Group("a block that the drafts fill", [(4, "ab", "x/cd"), (4, "abcdef", "ghij/ghxyz"),
          (3, "abcd", "ef/exy /b /c")], "a block is full of verified tokens, or only full"),
)  # fmt: skip

# ── 14.5 Rejection sampling ───────────────────────────────────────────────────

# A program is (p, q, draft), in eighths. All numbers come from a grid that all borders are on, so
# the shares of what is written are exact. A right solution may draw all its numbers in advance.

GRID = [(2 * place + 1) / 24 for place in range(12)]
COARSE = [(2 * place + 1) / 8 for place in range(4)]  # for two drafts, borders at quarters


def shares_of(mine, p, q, drafts, grid) -> dict[tuple[int, ...], float]:
    """How often each text is written, over all numbers of the grid that are drawn: as many as the
    solution asks for, up to two per draft and one more."""
    given_p, given_q, most = torch.tensor(p) / 8, torch.tensor(q) / 8, 2 * len(drafts) + 1
    shares: dict[tuple[int, ...], float] = {}
    ways: list[tuple[float, ...]] = [()]  # how the numbers begin
    while ways:
        begin = ways.pop()
        drawn: list[float] = []

        def uniform(begin=begin, drawn=drawn) -> float:
            place = len(drawn)
            drawn.append((*begin, grid[0])[min(place, len(begin))] if place < most else 0.5)
            return drawn[-1]

        found = mine.rejection_sample(given_p, given_q, list(drafts), uniform)
        written, count = tuple(int(one) for one in found), min(len(drawn), most)
        shares[written] = shares.get(written, 0) + len(grid) ** -count
        for place in range(len(begin), count):
            ways += [(*drawn[:place], other) for other in grid[1:]]
    return shares


def rejections(mine, program, log: Log) -> None:
    p, q, draft = program
    log(f"p = {p} / 8, q = {q} / 8, the draft is {draft}")
    shares = log.call("rejection_sample", partial(shares_of, mine, p, q, [draft], GRID), see=False)
    if log.events[-1].error is not None:
        return
    kept = sum(share for written, share in shares.items() if len(written) == 2)
    log("", {"share of drafts that are kept": round(kept, 4)})
    size = len(p[0])
    first = [sum(s for w, s in shares.items() if w and w[0] == one) for one in range(size)]
    log("", {"shares of the first token": [round(one, 4) for one in first]})
    second = [sum(s for w, s in shares.items() if len(w) > 1 and w[1] == t) for t in range(size)]
    log("", {"shares of the second token": [round(one, 4) for one in second]})


def together(mine, program, log: Log) -> None:
    """Two drafts: whether one is kept says nothing about the other."""
    p, q, drafts = program
    log(f"p = {p} / 8, q = {q} / 8, drafts {drafts}")
    shares = log.call("rejection_sample", partial(shares_of, mine, p, q, drafts, COARSE), see=False)
    if log.events[-1].error is None:
        kept = [sum(s for w, s in shares.items() if len(w) == 1 + count) for count in range(3)]
        log("", {"shares of 0, 1 and 2 drafts kept": [round(one, 4) for one in kept]})


def fixed(mine, program, log: Log) -> None:
    """All drafts at once, with numbers that leave no choice."""
    p, q, drafts, number = program
    given = torch.tensor(p) / 8, torch.tensor(q) / 8
    text = f"p = {p} / 8, q = {q} / 8, drafts {drafts}, every number is {number}"
    found = log.call(text, mine.rejection_sample, *given, drafts, lambda: number, see=False)
    if log.events[-1].error is None:
        log("", {"tokens written:": len(found), "the drafts of these:": list(found)[:-1]})


scenario("14.5", rejections,
    Group("q is too high: the draft is kept in part",
          [([[2, 6], [8, 0]], [[4, 4]], 0), ([[2, 2, 4], [4, 4, 0]], [[8, 0, 0]], 0),
          ([[1, 2, 3, 2], [2, 2, 2, 2]], [[4, 2, 1, 1]], 0)],
          "with which probability, and what is written in its place?"),
    Group("p and q are equal: every draft is kept",
          [([[4, 4], [8, 0]], [[4, 4]], 0), ([[2, 6], [0, 8]], [[2, 6]], 1)],
          "p / q is 1: which numbers in [0, 1) are below it?"),
    Group("p is higher: the draft is always kept",
          [([[6, 2], [0, 8]], [[4, 4]], 0), ([[1, 2, 3, 2], [2, 2, 2, 2]], [[4, 2, 1, 1]], 2)],
          "p / q above 1"),
    Group("a draft that the target never writes",
          [([[0, 8], [8, 0]], [[4, 4]], 0), ([[0, 2, 6], [8, 0, 0]], [[6, 2, 0]], 0)],
          "p is 0 there"),
)  # fmt: skip

scenario("14.5", together,
    Group("two drafts are kept or not independently of each other",
          [([[2, 6], [2, 6], [8, 0]], [[4, 4], [4, 4]], [0, 0]),
          ([[4, 4], [2, 6], [0, 8]], [[4, 4], [4, 4]], [1, 0])],
          "how often is each number from `uniform` used?"),
)  # fmt: skip

TWO = [[4, 4], [0, 8], [8, 0]]
scenario("14.5", fixed,
    Group("the number 0, and a draft that the target never writes",
          [([[0, 8], [8, 0]], [[4, 4]], [0], 0.0), ([[0, 2, 6], [8, 0, 0]], [[6, 2, 0]], [0], 0.0)],
          "p / q is 0: which numbers in [0, 1) are below it?"),
    Group("several drafts, up to the first that is not kept",
          [(TWO, [[4, 4], [4, 4]], [0, 1], 0.3), (TWO, [[4, 4], [4, 4]], [0, 0], 0.3),
          ([[0, 8], [0, 8], [8, 0]], [[4, 4], [4, 4]], [0, 1], 0.3), (TWO, [[4, 4]], [1], 0.9),
          ([[8, 0]], [], [], 0.5)],
          "what happens after a draft that is not kept, and after the last one?"),
)  # fmt: skip

# ── 14.6 Two bug reports ──────────────────────────────────────────────────────

BOTH = "the rule, for each of the three drafts that may come"
numbers(
    "14.6",
    "two_reports",
    {
        "matched": ("how likely engine 1 keeps a draft", BOTH),
        "matched distance": ("how far engine 1 is from p", "which distribution is it drawn from?"),
        "top": ("how likely engine 2 keeps a draft", "which draft does it keep?"),
        "top distance": ("how far engine 2 is from p", "what does it write, and how often?"),
        "rejection": ("how likely rejection sampling keeps a draft", "q min(1, p / q), over all x"),
        "right report": ("which report is right", "which distance is 0?"),
    },
    near=0.002,
)

# ── 14.7 When to stop drafting ────────────────────────────────────────────────

# A program is (cost, acceptance).


def expectations(mine, program, log: Log) -> None:
    log.call(f"expected_tokens{program}", mine.expected_tokens, *program)


def choices(mine, program, log: Log) -> None:
    cost, acceptance = program
    text = f"drafts_that_pay({cost}, {acceptance})"
    log.call(text, mine.drafts_that_pay, list(cost), acceptance)


def line(first: float, more: float, count: int) -> list[float]:
    return [round(first + more * place, 3) for place in range(count)]


scenario("14.7", expectations,
    Group("tokens of a step", [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.9), (5, 0.0), (4, 1.0)],
          "the draft at place i counts if it and all before it are right"),
)  # fmt: skip
scenario("14.7", choices,
    Group("a step costs the same for any number of tokens",
          [(line(1, 0, 5), 0.5), (line(2, 0, 3), 0.9), ([1.0], 0.9)],
          "how many drafts can there be at most?"),
    Group("each token costs as much as a step",
          [(line(1, 1, 5), 0.5), (line(1, 1, 6), 0.99), (line(1, 0, 4), 0.0)],
          "0 drafts are an answer"),
    Group("something in between", [(line(1, 0.2, 3), 0.6), (line(1, 0.2, 9), 0.7),
          (line(1, 0.1, 16), 0.9), ([1, 2, 2.05, 2.1, 2.15], 0.9), ([1, 1.6, 1.7, 3, 3.1], 0.8)],
          "tokens per second of each number, not only up to the first that is worse"),
    Group("any table", [(line(1 + seed % 3, 0.053 * (1 + seed % 7), 2 + seed % 9),
          round(0.11 + 0.021 * seed, 3)) for seed in range(40)],
          "work out tokens per second for your number and for the expected one: which is larger?"),
)  # fmt: skip


# ── 14.8 A mask for a tree ────────────────────────────────────────────────────

# A program is (parents as text, tokens before the tree).


def trees(mine, program, log: Log) -> None:
    text, num_context = program
    parents = [int(one) for one in text.split()]
    log(f"parents {text}, after {counted(num_context, 'token')}")
    for name, see in (("tree_positions", list), ("tree_mask", lines_of)):
        found = log.call(name, getattr(mine, name), list(parents), num_context, see=False)
        if log.events[-1].error is None:
            log("", {f"{name}:": see(found)})


def lines_of(mask) -> list[str]:
    return ["".join("01"[bool(one)] for one in line) for line in mask]


def random_tree(seed: int) -> tuple[str, int]:
    draw = random.Random(seed)
    parents = [-1, *(draw.randrange(row) for row in range(1, 1 + seed % 8))]
    return " ".join(map(str, parents)), draw.randrange(4)


scenario("14.8", trees,
    Group("no drafts, and a chain", [("-1", 2), ("-1", 0), ("-1 0", 1), ("-1 0 1", 0),
          ("-1 0 1 2", 3)], "a chain is ordinary causal attention"),
    Group("two guesses at one place", [("-1 0 0", 1), ("-1 0 0 0", 2), ("-1 0 1 1", 1)],
          "at which position do they stand, and does one see the other?"),
    Group("branches that go on", [("-1 0 0 1 2", 1), ("-1 0 1 0 3", 0), ("-1 0 0 1 1 2 2", 2)],
          "follow the parents up to row 0"),
    Group("any tree", [random_tree(seed) for seed in range(40)],
          "the first row that differs: which parents has it, up to row 0?"),
)  # fmt: skip


@runs_model("14.8")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy over a tree of five rows, in one pass."""
    context = lm.encode(PROMPT)
    own = lm.generate_naively(context, 3)
    tokens, parents = [own[0], own[1], own[1] + 1, own[2], own[2]], [-1, 0, 0, 1, 2]
    cache = minikv.PreallocatedCache(lm.config, len(context) + len(tokens))
    lm.logits(context, cache)
    found = tree_logits(lm, cache, tokens, parents, mine.tree_mask, mine.tree_positions)
    for row in range(len(tokens)):
        path: list[int] = []
        at = row
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        alone = lm.logits([*context, *path])[-1]
        if not torch.allclose(found[row], alone, atol=1e-3):
            raise AssertionError(f"row {row} of the tree is not what tinypy computes for its path")
    witness([int(one) for one in found.argmax(-1)])
    return "tinypy computed five rows of a tree in one pass, each as if its path stood alone."


# ── The reader's parts in the engine ──────────────────────────────────────────


class Own(Drafter):
    """The reader's drafter; says how many drafts pay by the reader's function."""

    def __init__(self, mine):
        self.mine = mine

    def propose(self, sequence, most):
        found = self.mine.propose_ngram(sequence.token_ids, 2, most)
        count = self.mine.drafts_that_pay([1 + 0.1 * place for place in range(9)], 0.7)
        return Proposal(list(found)[:count]) if found else None


@runs_model("14.1", "14.2", "14.3", "14.7")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on the reader's drafter, rule and table, in blocks of 4."""
    prompt = lm.encode(PROMPT)
    config = minikv.EngineConfig(num_blocks=64, block_size=4, speculative=Own(mine))
    engine = minikv.Engine(lm, config, block_table=mine.BlockTable)
    # As if each step took a second: then all drafts pay, on a busy machine too.
    loop: Any = engine.loop
    loop.costs = SimpleNamespace(of=lambda num_tokens: 1.0, row=0.0, note=lambda *_: 1.0)
    params = minikv.SamplingParams(max_tokens=32, ignore_eos=True)
    engine.add_request(prompt, params)
    with in_place_of("minikv.speculative.loop:keep_equal", mine.keep_equal):
        while engine.has_unfinished:
            [output] = engine.step()
            engine.check()
    same_as_oracle(lm, prompt, output.token_ids)
    return "tinypy ran on your drafts, your rule and your table: 32 tokens, those of the oracle."
