"""Chapter 05 as programs: forks, copies on first write, beams, branches."""

import random
from itertools import count, product
from typing import Any

import torch

import minikv
from minikv import BlockPool, beam
from minikv.course.chapters.ch05_copy_on_write.answers import copy_prefix
from minikv.course.chapters.ch05_copy_on_write.given import go_on, sample_naively
from minikv.course.judge.checking import Wrong, check, plain, runs_model, tinypy, witness
from minikv.course.judge.programs import scramble
from minikv.course.judge.scenarios import Group, Log, Words, scenario
from minikv.course.pictures.snapshot import counted
from minikv.sequence import Request, Sequence

PROMPT = "class Queue:\n    def push(self, item):\n        self."
SAMPLES = minikv.SamplingParams(n=4, max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)


class Memory:
    """What lies in the slots of a pool, a letter per token."""

    def __init__(self, block_size: int):
        self.size = block_size
        self.slots: dict[int, str] = {}

    def copy(self, pair) -> None:
        source, target = pair
        for offset in range(self.size):
            self.slots[target * self.size + offset] = self.slots.get(
                source * self.size + offset, "?"
            )

    def fill(self, table, text: str) -> None:
        for position, letter in enumerate(text):
            self.slots[
                table.block_ids[position // self.size] * self.size + position % self.size
            ] = letter

    def read(self, table, num_tokens: int) -> str:
        """What is stored at positions 0 … num_tokens - 1; "?" where nothing was ever written."""
        ids, size = table.block_ids, self.size
        room = range(min(num_tokens, len(ids) * size))
        found = [self.slots.get(ids[p // size] * size + p % size, "?") for p in room]
        return "".join(found).ljust(num_tokens, "?")


# ── 05.1 A fork, 05.2 Copy on first write ─────────────────────────────────────

# A program is (block size, blocks in the pool, steps, what is looked at). Steps, table by letter:
#     A+7   grows by 7 tokens        A>B   B is a fork of A       A@6   writes position 6
#     A-    is released              A#1   a holder that is no table acquires logical block 1


def tables(mine, program, log: Log) -> None:
    size, num_blocks, steps, looks = program
    pool, memory = scramble(BlockPool(num_blocks)), Memory(size)
    live: dict = {"A": mine.BlockTable(pool, size)}
    log(f"blocks of {size}" + (f", {num_blocks} in the pool" if num_blocks < 10 else ""))
    for step in steps.split():
        name, action, rest = step[0], step[1], step[2:]
        table = live.get(name)
        if table is None:
            continue
        if action == "+":
            log.call(f"{name} grows by {rest}", table.grow, int(rest))
        elif action == ">":
            twin = log.call(f"{rest} = {name}.fork()", table.fork, see=False)
            kind = kind_of(twin, table)
            if "kind" in looks or kind != "a second table":
                log(f"{rest} = {name}.fork()", {"the fork is": Words(kind)})
            if kind != "a second table":
                return
            live[rest] = twin
        elif action == "#":
            block_id = table.block_ids[int(rest)]
            pool.acquire(block_id)
            log(f"the prefix cache holds block {block_id}, too")
        elif action == "-":
            log.call(f"{name} ends", table.release)
            del live[name]
        else:
            position = int(rest)
            before, alone = list(table.block_ids), None
            if 0 <= position < len(before) * size:
                alone = pool.ref_count(before[position // size]) == 1
            text = f"{name} writes position {position}"
            if alone is not None:
                text += f", in a block of {'its own' if alone else 'several'}, table {before}"
            found = log.call(text, table.writable_slot, position, see=False)
            pair = plain(found)
            if isinstance(pair, list) and len(pair) == 2:
                if "write" in looks:
                    log(
                        text,
                        {"its table is now": table.block_ids, "copy": pair[1], "slot": pair[0]},
                    )
                if isinstance(pair[1], list) and len(pair[1]) == 2:
                    memory.copy(pair[1])
                memory.slots[pair[0]] = name.lower()
            elif found is not None:
                log(text, {"what comes back": pair})
                return
        seen: dict[str, Any] = {}
        if "ids" in looks:
            seen |= {f"block_ids of {n}": t.block_ids for n, t in live.items()}
            seen |= {f"num_tokens of {n}": t.num_tokens for n, t in live.items()}
        if "counts" in looks:
            held = sorted({block_id for t in live.values() for block_id in t.block_ids})
            seen[f"counts of blocks {held}:"] = [pool.ref_count(block_id) for block_id in held]
        if "free" in looks:
            seen["free blocks:"] = pool.num_free
        if "reads" in looks:
            seen |= {f"{n} reads": memory.read(t, t.num_tokens) for n, t in live.items()}
        log("", seen)


def kind_of(twin, table) -> str:
    """What a fork is, in words."""
    if twin is None:
        return "nothing"
    if twin is table:
        return "the same table"
    if not isinstance(twin, type(table)):
        return f"a {type(twin).__name__} of another class"
    if twin.pool is not table.pool:
        return "a table with a pool of its own"
    if not isinstance(twin.block_ids, list):
        return f"a table whose block_ids is a {type(twin.block_ids).__name__}"
    return "a second table"


LENGTHS = ((4, 3), (4, 7), (4, 8), (3, 5), (1, 2), (16, 20), (4, 0))


def each(steps: str, looks: str, lengths=LENGTHS, num_blocks: int = 24) -> list:
    """The same steps at several block sizes; N stands for the number of tokens, L for the last
    position."""
    return [
        (size, num_blocks, steps.replace("N", str(n)).replace("L", str(n - 1)), looks)
        for size, n in lengths
    ]


def random_steps(seed: int, length: int, size: int) -> str:
    """Tables that grow, fork, write and end, at random."""
    draw, tokens, steps = random.Random(seed), {"A": 0}, []
    for _ in range(length):
        if not tokens:
            break
        name = draw.choice(sorted(tokens))
        kind = draw.choice("++@@@@@>>-")
        if kind == "+" or (kind == "@" and tokens[name] == 0):
            count = draw.randrange(1, 2 * size + 1)
            tokens[name] += count
            steps.append(f"{name}+{count}")
        elif kind == "@":
            steps.append(f"{name}@{draw.randrange(tokens[name])}")
        elif kind == ">" and len(tokens) < 5:
            twin = next(letter for letter in "ABCDEFGHIJ" if letter not in tokens)
            tokens[twin] = tokens[name]
            steps.append(f"{name}>{twin}")
        elif kind == "-" and len(tokens) > 1:
            del tokens[name]
            steps.append(f"{name}-")
    return " ".join(steps)


RANDOM = [
    (size, 12 + 8 * (seed % 2), random_steps(seed, 6 + seed // 2, size), "ids counts free reads")
    for seed, size in zip(range(90), (1, 3, 4) * 30, strict=True)
]

scenario("05.1", tables,
    Group("the same tokens, in the same blocks", each("A+N A>B", "kind ids"),
          "the fields of the new table"),
    Group("every block gains a holder", each("A+N A>B", "counts"),
          "how often `acquire` of the pool is called"),
    Group("nothing is taken from the pool", each("A+N A>B", "free"),
          "a fork never calls `allocate`: which blocks should it name?"),
    Group("each grows on its own", [*each("A+N A>B A+2", "ids", [(4, 3)]),
          *each("A+N A>B B+1 A+1 A+9", "ids")], "do the tables share a list?"),
    Group("the first to end leaves the other its blocks",
          [*each("A+N A>B A- B-", "counts free"), *each("A+N A>B B- A-", "counts free")],
          "how many holders each block has, after each step"),
    Group("a fork of a fork, and of an empty table",
          [*each("A+N A>B B>C C- A- B-", "ids counts free"), *each("A>B B+2", "ids", [(3, 0)])],
          "every fork counts each block once more"),
    Group("90 random traces", RANDOM,
          "at the step that differs: which tables name the block, and does its count say so?"),
)  # fmt: skip

scenario("05.2", tables,
    Group("one holder: written in place", [*each("A+8 A@7", "write", [(4, 8), (3, 8), (16, 8)]),
          *each("A+8 A@4 A@2 A@0", "write free", [(4, 8), (3, 8), (1, 8)])],
          "the case in which the count is 1"),
    Group("two holders: the first writer copies",
          [*each("A+7 A>B A+1 B+1 A@7", "write ids", [(4, 7)]), *each("A+N A>B B@L", "write ids")],
          "what is returned for a shared block"),
    Group("reference counts after the copy",
          [*each("A+7 A>B A+1 B+1 A@7", "counts", [(4, 7)]), *each("A+N A>B B@L", "counts")],
          "which tables hold the old block, and which the new one?"),
    Group("the second writer writes in place",
          [*each("A+7 A>B A+1 B+1 A@7 B@7 A@7", "write", [(4, 7)]),
          *each("A+N A>B B@L A@L B@L", "write")], "the counts after the first writer's copy"),
    Group("each reads what it wrote, and the prompt",
          [(size, 24, " ".join([f"A+{n}", *(f"A@{p}" for p in range(n)), "A>B", *turns]), "reads")
          for size, n in ((4, 7), (4, 5), (3, 7), (1, 3), (16, 15), (4, 4))
          for turns in [[f"{t}{do}" for p in range(n, n + 5) for t in "AB"
          for do in ("+1", f"@{p}")]]], "what A reads and what B reads, position by position"),
    Group("any block, not only the last", each("A+11 A>B A@8", "write ids", [(4, 11)])
          + [(4, 24, f"A+11 A>B A@{p}", "write ids counts") for p in (0, 5, 2, 9)]
          + [(3, 24, f"A+11 A>B B@{p} A@{p}", "write ids counts") for p in (0, 4, 10)],
          "which block is the position in, and whose count do you look at?"),
    Group("three holders, and a fork of a fork",
          [*each("A+3 A>B B>C B@2 C@2 A@2", "write counts free", [(4, 3), (3, 3), (1, 3)]),
          *each("A+9 A>B A>C A>D D@8 C@8 A@8 B@8", "write counts free", [(4, 9)])],
          "for which counts is a copy due: for 2 alone?"),
    Group("a holder that is no table counts, too",
          each("A+7 A#1 A@6 A@6", "write counts", [(4, 7), (3, 7)]),
          "ask the pool, not the tables"),
    Group("an empty pool: OutOfBlocks, and nothing has changed",
          [(size, blocks, "A+8 A>B A@7 B- A@7", "ids counts free write")
          for size, blocks in ((4, 2), (8, 1), (3, 3))],
          "which of your lines can fail, and what has happened before it"),
    Group("a position without a token is refused",
          [(4, 24, f"A+6 A>B {name}@{position}", "ids counts")
          for position, name in product((-1, 6, 7, 8, -4, 100), "AB")],
          "0 up to, not including, `self.num_tokens`"),
    Group("all blocks come back when all have finished",
          [(size, 24, f"A+{n} A>B A>C C>D A+1 B+1 C+1 D+1 A@{n} B@{n} C@{n} D@{n} A- B- C- D-",
          "free") for size, n in ((4, 7), (3, 3), (1, 2), (16, 9))], "the counts after each copy"),
    Group("90 random traces", RANDOM,
          "at the step that differs: how many tables name the block before it, and after?"),
)  # fmt: skip


# ── 05.3 How many blocks? ─────────────────────────────────────────────────────


def counts(mine, program, log: Log) -> None:
    n, num_prompt, num_new, size = program
    text = (
        f"{counted(n, 'sample')}, a prompt of {num_prompt}, "
        f"{counted(num_new, 'new token')} each, blocks of {size}"
    )
    found = plain(log.call(text, mine.blocks_for_samples, *program, see=False))
    if isinstance(found, list) and len(found) == 2:
        log(text, {"copied:": found[1], "shared:": found[0]})
    else:
        log(text, {"what comes back:": found})


DRAW = "draw the blocks of two samples, full ones and the last"

scenario("05.3", counts,
    Group("the walk-through", [(2, 7, 1, 4), (2, 7, 2, 4), (2, 7, 0, 4)], DRAW),
    Group("before any sample has written", [(8, 100, 0, 16), (3, 8, 0, 4), (5, 1, 0, 16)], DRAW),
    Group("one token each", [(8, 100, 1, 16), (4, 3, 1, 4), (3, 6, 1, 3)], DRAW),
    Group("a prompt that ends with a block",
          [(4, 48, 1, 16), (4, 48, 16, 16), (4, 48, 17, 16), (2, 4, 1, 4)], DRAW),
    Group("long answers", [(4, 50, 500, 16), (16, 7, 99, 4), (2, 5, 6, 1)], DRAW),
    Group("one sample", [(1, 50, 0, 16), (1, 50, 20, 16), (1, 48, 1, 16)], DRAW),
    Group("every other number", [(n, num_prompt, num_new, size) for size in (1, 3, 4, 16)
          for num_prompt in (1, 2, size, size + 1, 3 * size - 1, 3 * size)
          for num_new in (0, 1, 2, size, 2 * size + 1) for n in (1, 2, 5)], DRAW),
)  # fmt: skip


# ── 05.4 Beams fork and end ───────────────────────────────────────────────────

# A program is (block size, blocks in the pool, prompt, steps). A step names the children in
# order, each as the number of its parent and its token: "0P 0Q" are two children of beam 0.


def beams(mine, program, log: Log) -> None:
    size, num_blocks, prompt, *steps = program
    pool, memory = scramble(BlockPool(num_blocks)), Memory(size)
    root = Request(-1, [ord(letter) for letter in prompt], minikv.SamplingParams()).sequences[0]
    root.table = minikv.BlockTable(pool, size)
    live = [root]
    numbers: dict[int, int] = {}  # of blocks, as they come: which one is taken is left open
    given = count(1)

    def blocks_of(beam: Sequence) -> list[int]:
        return [numbers.get(b) or numbers.setdefault(b, next(given)) for b in beam.table.block_ids]

    compute(live, memory)
    log(f"a beam of {len(prompt)} tokens, blocks of {size}")
    for step in steps:
        chosen = [(int(child[0]), ord(child[1])) for child in step.split()]
        text = f"{counted(len(live), 'beam')}, children {step or 'none'}"
        children = log.call(text, mine.next_beams, list(live), list(chosen), see=False)
        kind = kind_of_beams(children, pool)
        log(text, {"what comes back is": Words(kind)})
        if kind != "sequences":
            return
        texts = ["".join(map(chr, child.token_ids)) for child in children]
        log(text, {"tokens of the new beams": texts})
        for block_id in [b for b in numbers if not pool.ref_count(b)]:
            del numbers[block_id]
        log(text, {"blocks of the new beams": [blocks_of(child) for child in children]})
        held = list(dict.fromkeys(b for child in children for b in child.table.block_ids))
        log(
            text,
            {
                f"counts of blocks {[numbers[b] for b in held]}": [
                    pool.ref_count(block_id) for block_id in held
                ],
                "free blocks:": pool.num_free,
            },
        )
        log(text, {"num_computed of the new beams": [child.num_computed for child in children]})
        live = list(children)
        compute(live, memory)
        reads = [memory.read(one.table, len(one.token_ids)) for one in live]
        log("each writes its token", {"the beams read": reads})


def kind_of_beams(children, pool) -> str:
    if not isinstance(children, list | tuple):
        return "nothing" if children is None else f"a {type(children).__name__}"
    if not all(isinstance(child, Sequence) for child in children):
        return "a list of something other than sequences"
    if len(set(map(id, children))) < len(children):
        return "the same object twice"
    tables = [child.table for child in children]
    if any(table is None for table in tables):
        return "sequences without a block table"
    if len(set(map(id, tables))) < len(tables):
        return "sequences that share one table"
    if any(table.pool is not pool for table in tables):
        return "sequences whose blocks are counted in another pool"
    return "sequences"


def compute(live: list[Sequence], memory: Memory) -> None:
    """As a step does: K and V of the tokens that have none yet are written."""
    for one in live:
        one.table.grow(len(one.token_ids) - one.table.num_tokens)
        for position in range(one.num_computed, len(one.token_ids)):
            slot, copy = one.table.writable_slot(position)
            if copy is not None:
                memory.copy(copy)
            memory.slots[slot] = chr(one.token_ids[position])
        one.num_computed = len(one.token_ids)


def random_beams(seed: int, size: int, length: int):
    draw, width, steps = random.Random(seed), 1, []
    for _ in range(length):
        children = draw.randrange(1, 5)
        steps.append(
            " ".join(f"{draw.randrange(width)}{draw.choice('UVWXYZ')}" for _ in range(children))
        )
        width = children
    return size, 200, "abcde", *steps


LOOK_BEAMS = "the two rounds: what the children get, what the parents give back"

scenario("05.4", beams,
    Group("one parent, four children", [(4, 60, "abcdefg", "0P"), (4, 60, "abcdefg", "0P 0Q 0R 0S"),
          (4, 60, "abcd", "0P 0Q")], LOOK_BEAMS),
    Group("one child each, in any order", [(4, 60, "abcdefg", "0P 0Q", "1X 0Y"),
          (4, 60, "abcdefg", "0P 0Q 0R", "2X 0Y 1Z"),
          (3, 60, "abcdefg", "0P 0Q 0R", "1X 2Y 0Z", "2X 1Y 0Z")], LOOK_BEAMS),
    Group("a beam without children is given back at once",
          [(4, 60, "abcdefg", "0P 0Q", "1X"), (4, 60, "abcdefg", "0P 0Q 0R", "1X 1Y 1Z"),
          (4, 60, "abcdefg", "0P 0Q 0R", "2X 2Y", "0Z")],
          "which of `beams` are released: also those without children?"),
    Group("children first, then the parents' release",
          [(4, 4, "abcde", "0P 0Q", "0X 1Y", "1X 0Y 1Z")], LOOK_BEAMS),
    Group("nothing is chosen: everything is given back",
          [(4, 60, "abcdefg", ""), (4, 60, "abcdefg", "0P 0Q", "")],
          "`chosen` may be empty, `beams` never is"),
    Group("random steps, at several block sizes",
          [random_beams(seed, (1, 3, 4, 16)[seed % 4], 2 + seed // 4) for seed in range(60)],
          "at the step that differs: which parents have several children, and which none?"),
)  # fmt: skip


# ── 05.5 A branch in the middle ───────────────────────────────────────────────

# A program is (block size, blocks in the pool, tokens of the conversation, tokens of the branch,
# what happens then).
TEXT = "abcdefghijklmnopqrst"


def branches(mine, program, log: Log) -> None:
    size, num_blocks, length, num_tokens, then = program
    pool, memory = scramble(BlockPool(num_blocks)), Memory(size)
    table = minikv.BlockTable(pool, size)
    table.grow(length)
    memory.fill(table, TEXT[:length])
    log(f"a table of {length} tokens, blocks of {size}")
    text = f"copy_prefix(table, {num_tokens})"
    branch = log.call(text, mine.copy_prefix, table, num_tokens, see=False)
    kind = kind_of(branch, table)
    log(text, {"what comes back is": Words(kind)})
    if kind != "a second table":
        held = [pool.ref_count(block_id) for block_id in table.block_ids]
        log("", {"free blocks:": pool.num_free, "counts of the table's blocks:": held})
        return
    log(
        text,
        {
            "the branch reads": memory.read(branch, num_tokens),
            "num_tokens of the branch:": branch.num_tokens,
            "block_ids of the branch:": branch.block_ids,
            "block_ids of the table:": table.block_ids,
        },
    )
    holders = [pool.ref_count(block_id) for block_id in table.block_ids]
    log(text, {f"counts of the table's {table.block_ids}:": holders})
    if then == "go on":
        for name, one, letter in (("the branch", branch, "B"), ("the table", table, "A")):
            for _ in range(5):
                one.grow(1)
                slot, copy = one.writable_slot(one.num_tokens - 1)
                if copy is not None:
                    memory.copy(copy)
                memory.slots[slot] = letter
            log(f"{name} grows by 5 tokens", reads(memory, table, branch))
    elif then:
        log.call("the table ends", table.release)
        stranger = minikv.BlockTable(pool, size)
        stranger.grow(size * pool.num_free)
        memory.fill(stranger, "x" * stranger.num_tokens)
        log(
            "another table takes the free blocks",
            {"the branch reads": memory.read(branch, num_tokens)},
        )
        stranger.release()
        log.call("it ends, and so does the branch", branch.release)
        log("", {"free blocks:": pool.num_free})


def reads(memory: Memory, table, branch) -> dict[str, str]:
    return {
        "the branch reads": memory.read(branch, branch.num_tokens),
        "the table reads": memory.read(table, table.num_tokens),
    }


scenario("05.5", branches,
    Group("a prefix that ends with a block",
          [(size, 20, length, num_tokens, "") for size, length, num_tokens in ((4, 11, 8),
          (4, 11, 4), (3, 11, 6), (1, 5, 3), (3, 11, 9))], "the full blocks of the prefix"),
    Group("a prefix that ends inside a block",
          [(size, 20, 11, num_tokens, "") for size, num_tokens in ((4, 6), (4, 5), (4, 9), (3, 7),
          (16, 10))], "the block in which the prefix ends"),
    Group("nothing is taken from the pool", [(4, 3, 11, 6, ""), (4, 3, 12, 4, "")],
          "which line of `copy_prefix` takes a block?"),
    Group("the two are independent", [(4, 20, 11, n, "go on") for n in (4, 5, 6, 8, 11)]
          + [(3, 20, 7, 4, "go on")], "which tables hold the block in which the prefix ends?"),
    Group("the conversation ends, the branch continues",
          [(4, 20, 11, n, "end") for n in (5, 8, 11)] + [(3, 20, 7, 4, "end")],
          "every block of the branch must be counted"),
    Group("no tokens, all tokens, too many",
          [(4, 20, 11, n, "end") for n in (0, 11, 12, -1)] + [(4, 20, 0, n, "") for n in (0, 1)],
          "the first lines of `copy_prefix`"),
)  # fmt: skip


def branch_on_tinypy(mine, lm, cut: int, block_size: int = 4) -> tuple[list[int], list[int]]:
    """A conversation of tinypy branches off after `cut` tokens: (its tokens, the oracle's)."""
    prompt = lm.encode(PROMPT)
    engine = minikv.Engine(
        lm, minikv.EngineConfig(num_blocks=64, block_size=block_size, prefix_cache=False)
    )
    first = Request(-1, prompt, minikv.SamplingParams()).sequences[0]
    first.table = mine.BlockTable(engine.pool, block_size)
    go_on(engine, first, 10)
    tokens = first.token_ids[:cut] + lm.encode("return")
    other = Request(-2, tokens, minikv.SamplingParams()).sequences[0]
    other.table, other.num_computed = mine.copy_prefix(first.table, cut), cut
    return go_on(engine, other, 8), lm.generate_naively(tokens, 8)


@check(
    "05.5",
    "tinypy: a branch writes what it would write alone",
    cause="the branch attends to a block that does not hold its tokens",
    look="which block of the branch does not hold its tokens: the last one that was copied?",
)
def _(mine):
    lm = tinypy()
    for cut in (20, 24, 22, 19):
        found, expected = branch_on_tinypy(mine, lm, cut)
        witness(found)
        if found != expected:
            raise Wrong(
                f"branched off after {cut} tokens, blocks of 4, it continues with "
                f"{lm.decode(found)!r}, expected {lm.decode(expected)!r}"
            )


# ── The reader's parts in the engine ──────────────────────────────────────────


def engine_on(mine, lm, block_size: int = 4) -> minikv.Engine:
    """An engine on the reader's tables."""
    config = minikv.EngineConfig(num_blocks=128, block_size=block_size, prefix_cache=False)
    return minikv.Engine(lm, config, block_table=mine.BlockTable)


class Watch:
    """Keeps the most blocks that an engine holds while the model runs."""

    def __init__(self, engine: minikv.Engine):
        runner: Any = engine.runner  # runs through this object's `forward` from here on
        self.engine, self.most, self._forward = engine, 0, runner.forward
        runner.forward = self.forward

    def forward(self, *arguments):
        self.most = max(self.most, self.engine.stats().blocks_used)
        return self._forward(*arguments)


def sample(mine, lm, prompt: list[int], params) -> tuple[list[list[int]], int]:
    """Tokens of all samples of one request, and the most blocks held at any time."""
    engine = engine_on(mine, lm)
    watch = Watch(engine)
    engine.add_request(prompt, params)
    while engine.has_unfinished:
        [output] = engine.step()
        engine.check()
    return [one.token_ids for one in output.samples], watch.most


def search(engine: minikv.Engine, prompt: list[int], width: int, num_tokens: int, next_beams):
    """(beams, the most blocks held) of a beam search that forks and releases by `next_beams`."""
    watch, original = Watch(engine), beam.next_beams
    beam.next_beams = next_beams
    try:
        return engine.beam_search(prompt, width, num_tokens), watch.most
    finally:
        beam.next_beams = original


@runs_model("05.1", "05.2", "05.4", "05.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on the reader's table, beams and branch, in blocks of 4."""
    prompt, width = lm.encode(PROMPT), SAMPLES.n
    total = len(prompt) + SAMPLES.max_tokens - 1  # the last token is never stored
    tokens, held = sample(mine, lm, prompt, SAMPLES)
    witness(tokens)
    for index, one in enumerate(tokens):
        expected = sample_naively(lm, prompt, SAMPLES, index)
        if one != expected:
            raise AssertionError(f"sample {index}: {one}, the oracle: {expected}")
    found, most = search(engine_on(mine, lm), prompt, width, SAMPLES.max_tokens, mine.next_beams)
    witness([one.token_ids for one in found])
    for place, one in enumerate(found):
        naive = naive_score(lm, prompt, one.token_ids)
        if abs(naive - one.score) > 1e-3:
            raise AssertionError(f"beam {place} has score {one.score}, the oracle: {naive}")
    expected, _ = search(minikv.Engine(lm), prompt, width, SAMPLES.max_tokens, beam.next_beams)
    if [one.token_ids for one in found] != [one.token_ids for one in expected]:
        raise AssertionError("the beams are not the reference's")
    branch, alone = branch_on_tinypy(mine, lm, 22)
    witness(branch)
    if branch != alone:
        raise AssertionError(f"a branch after 22 tokens: {branch}, the oracle: {alone}")
    copied = width * -(-total // 4)
    parts = {
        "fork": mine.BlockTable.fork is not minikv.BlockTable.fork,
        "write": mine.BlockTable.writable_slot is not minikv.BlockTable.writable_slot,
        "beams": mine.next_beams is not beam.next_beams,
        "branch": mine.copy_prefix is not copy_prefix,
    }
    own = ", ".join(f"your {name}" for name, is_own in parts.items() if is_own)
    rest = "" if all(parts.values()) else " (the rest is the reference's)"
    return (
        f"tinypy ran on {own}{rest}: "
        f"{width} samples of {SAMPLES.max_tokens} tokens, same tokens as the oracle, {held} blocks "
        f"({copied} without sharing); {width} beams of {SAMPLES.max_tokens} tokens, the oracle's "
        f"scores, {most} blocks ({copied} without sharing); a branch in the middle, same tokens "
        "as the oracle."
    )


def naive_score(lm: minikv.LanguageModel, prompt: list[int], tokens: list[int]) -> float:
    """Log probability of `tokens` after the prompt, by naive attention, a token."""
    log_probs = lm.logits(prompt + tokens).log_softmax(-1)[len(prompt) - 1 : -1]
    return float(log_probs[torch.arange(len(tokens)), tokens].mean())
