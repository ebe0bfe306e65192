"""Checks of chapter 06: chunks, admission, the step's loop, preemption, and who gives way."""

import random
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

import minikv
from minikv import BlockPool, RadixCache, Request, SamplingParams
from minikv.course.harness.checking import (
    Suspect,
    Wrong,
    check,
    check_numbers,
    equal,
    plain,
    runs_model,
    tinypy,
)
from minikv.course.pictures.style import letter
from minikv.scheduler import Plan
from minikv.sequence import Sequence

TEXTS = (
    "class Stack:\n    def push(self, item):\n",
    "import os\n\ndef fib(n):",
    "for i in range(",
    "while True:\n    line = ",
)


# ── A scheduler without a model ───────────────────────────────────────────────


LIMIT = 600  # steps


class Job(NamedTuple):
    prompt: int  # tokens
    new: int
    arrives: int = 0  # before this step


def name(sequence: Sequence) -> str:
    return letter(sequence.request.request_id)


def words(counts: Iterable[tuple[str, int]]) -> str:
    """What a step computes: "A 1, B 14"."""
    return ", ".join(f"{who} {count}" for who, count in counts) or "nothing"


class Bench:
    """A scheduler, and what an engine does between its plans: count, append, finish.

    The requests are A, B, C, … and no two prompts are alike. `step` looks at each plan first.
    """

    def __init__(self, scheduler: type, *, cached: bool = False, policy=None, **config):
        values = dict(num_blocks=64, block_size=4, max_num_seqs=8, max_batch_tokens=32)
        values |= dict(min_prefix_tokens=0) | config
        if "swap_blocks" in config:
            values["preemption"] = "swap"
        self.config = minikv.EngineConfig(**values)
        self.pool = BlockPool(self.config.num_blocks)
        self.cache = RadixCache(self.pool, self.config.block_size) if cached else None
        parts = {} if policy is None else {"policy": policy}
        self.scheduler = scheduler(self.config, self.pool, self.cache, **parts)
        self._add_decodes = self.scheduler._add_decodes
        self.scheduler._add_decodes = self.add_decodes
        self.count = 0  # of requests so far
        self.finished: list[str] = []
        self.admitted: list[str] = []  # in the order of their first step

    def sequence(self, prompt: int, new: int = 4, n: int = 1, tokens=None) -> Sequence:
        """The next request's sequence, not yet given to the scheduler."""
        ids = [1000 * self.count + i for i in range(prompt)] if tokens is None else list(tokens)
        request = Request(self.count, ids, SamplingParams(max_tokens=new, n=n))
        self.count += 1
        return request.sequences[0]

    def add(self, prompt: int, new: int = 4, n: int = 1, tokens=None) -> Sequence:
        sequence = self.sequence(prompt, new, n, tokens)
        self.scheduler.add(sequence)
        return sequence

    def run_one(self, prompt: int, computed: int | None = None, new: int = 30, **more) -> Sequence:
        """A sequence that runs already: `computed` of its prompt's tokens have K and V, or all
        and it has written one token."""
        sequence = self.sequence(prompt, new, **more)
        sequence.table = minikv.BlockTable(self.pool, self.config.block_size)
        sequence.table.grow(prompt)
        sequence.num_computed = prompt if computed is None else computed
        if computed is None:
            sequence.token_ids.append(7)
        self.scheduler.add_running(sequence)
        return sequence

    def hold(self, num_blocks: int) -> list[int]:
        """Blocks that are somebody else's."""
        return [self.pool.allocate() for _ in range(num_blocks)]

    def cache_prefix(self, tokens: list[int]) -> list[int]:
        """Put the full blocks of `tokens` into the prefix cache; nobody stands on them."""
        blocks = self.hold(len(tokens) // self.config.block_size)
        self.cache.insert(tokens, blocks)
        for block_id in blocks:
            self.pool.release(block_id)
        return blocks

    def pool_state(self) -> tuple:
        """What a refused request must leave alone."""
        counts = [self.pool.ref_count(block_id) for block_id in range(self.pool.num_blocks)]
        cached = self.cache and (self.cache.num_cached_blocks, self.cache.num_evictable_blocks)
        return counts, cached

    def add_decodes(self, decoding: list[Sequence], prefilling: list[Sequence], plan: Plan) -> bool:
        if plan.slots:
            raise Wrong(
                f"{len(plan.slots)} sequences are planned when `_add_decodes` is called",
                "chunks come before decodes: whoever writes is held up by whoever reads",
                "the order: decodes, chunks of running prefills, admissions",
            )
        return self._add_decodes(decoding, prefilling, plan)

    def plan(self, strict: bool = True) -> Plan:
        """The next step's plan, looked through if `strict`."""
        scheduler = self.scheduler
        before = list(scheduler.running)
        computed = {sequence: sequence.num_computed for sequence in scheduler}
        plan = scheduler.schedule()
        if not isinstance(plan, Plan):
            raise Wrong(
                f"schedule() returns {plan!r}", "a Plan is expected", "what stands after `return`?"
            )
        if strict:
            for one in plan.sequences if self.cache is None else ():  # a hit counts as computed
                if one.num_computed > computed.get(one, 0):
                    what = f"{name(one)}'s num_computed is {one.num_computed} when its step"
                    raise Wrong(f"{what} is planned, and was {computed.get(one, 0)}", *COUNTED)
            look_through(plan, scheduler, self.config)
            idle = [
                name(s) for s in scheduler.running if s not in before and s not in plan.sequences
            ]
            if idle:
                used = sum(plan.num_tokens)
                raise Wrong(
                    f"{', '.join(idle)} is admitted and computes nothing; {used} of "
                    f"{self.config.max_batch_tokens} tokens of the budget are used",
                    "who is admitted gets no tokens in that step"
                    if used < self.config.max_batch_tokens
                    else "admission goes on when the budget is used up, or comes before those that "
                    "run have had theirs; its blocks lie idle",
                    "what does an admitted sequence need besides its seat, and what if there is "
                    "none of it left?",
                )
        for who in map(name, plan.sequences):
            if who not in self.admitted:
                self.admitted.append(who)
        return plan

    def run(self, plan: Plan) -> list[tuple[str, int]]:
        """What the engine does with a plan; returns (who, tokens) of each."""
        done = [(name(s), n) for s, n in zip(plan.sequences, plan.num_tokens, strict=True)]
        for sequence, count in zip(plan.sequences, plan.num_tokens, strict=True):
            sequence.num_computed += count
            self.scheduler.share_full_blocks(sequence)
            if sequence.num_computed == len(sequence.token_ids):
                sequence.must_fork = False
                sequence.token_ids.append(7)
                if len(sequence.token_ids) == sequence.request.max_length:
                    self.scheduler.remove(sequence)
                    self.finished.append(name(sequence))
        return done

    def step(self, strict: bool = True) -> list[tuple[str, int]]:
        return self.run(self.plan(strict))

    def serve(
        self, jobs: list[Job], limit: int = LIMIT, strict: bool = True
    ) -> list[list[tuple[str, int]]]:
        """All steps until `jobs` are done. If `strict`, raises Wrong if that takes more than
        `limit` steps, or if a step does nothing while somebody waits."""
        steps, coming = [], list(jobs)
        while coming or list(self.scheduler):
            while coming and coming[0].arrives <= len(steps):
                job = coming.pop(0)
                self.add(job.prompt, job.new)
            steps.append(self.step(strict))
            waiting = [name(s) for s in self.scheduler]
            if not strict:
                if len(steps) > limit:
                    break
                continue
            if not steps[-1] and waiting:
                raise Wrong(
                    f"step {len(steps)} does nothing, and {', '.join(waiting)} are not done",
                    "everybody waits for somebody else: the engine would stand still",
                    "who could have been given a token in this step?",
                )
            if len(steps) > limit:
                raise Wrong(
                    f"after {limit} steps {', '.join(waiting)} are still not done; "
                    f"{self.scheduler.num_preemptions} preemptions so far",
                    "work is thrown away as fast as it is done, or somebody is forgotten",
                    "who gets no token, and why?",
                )
        return steps


COUNTED = (
    "the engine counts what was computed, once it is; counted here as well, tokens are left out",
    "is anything computed yet?",
)


def look_through(plan: Plan, scheduler, config: minikv.EngineConfig) -> None:
    """Raise Wrong for a plan that an engine could not run."""
    sequences, counts, size = plan.sequences, plain(plan.num_tokens), config.block_size
    if not len(sequences) == len(counts) == len(plan.slots):
        raise Wrong(
            f"the plan has {len(sequences)} sequences, {len(counts)} numbers of tokens and "
            f"{len(plan.slots)} slots",
            "a sequence is planned without its number of tokens or its slot",
            "the three lists get one entry each for every sequence",
        )
    text = words((name(s), n) for s, n in zip(sequences, counts, strict=True))
    if len(set(sequences)) < len(sequences):
        raise Wrong(
            f"a step computes {text}: one of them twice",
            "a sequence is given tokens at two places of the loop",
            "who has had its share of this step already?",
        )
    gone = [name(s) for s in sequences if s not in scheduler.running or s.table is None]
    if gone:
        raise Wrong(
            f"a step computes {text}, but {', '.join(gone)} is not running: it has no blocks",
            "a sequence that was preempted in this very step, or never admitted, is in the plan",
            "when is it decided who is in the plan, and when who gives way?",
        )
    both = [name(s) for s in scheduler.running if s in scheduler.waiting]
    if both:
        raise Wrong(
            f"{', '.join(both)} is in `running` and in `waiting`",
            "it was put into one of the lists and never taken out of the other",
            "who moves a sequence from one list to the other?",
        )
    if any(not isinstance(n, int) or n < 1 for n in counts):
        raise Wrong(
            f"a step computes {text}",
            "a sequence is planned with nothing to compute",
            "what happens when the budget is used up?",
        )
    for sequence, count, slot in zip(sequences, counts, plan.slots, strict=True):
        left = len(sequence.token_ids) - sequence.num_computed
        if count > left:
            raise Wrong(
                f"a step computes {text}, but {name(sequence)} has only {left} tokens left",
                "a chunk is as long as the budget, not as the prompt",
                "the smaller of which two numbers?",
            )
        start, block_ids = sequence.num_computed, sequence.table.block_ids
        index, offset = divmod(start, size)
        if -(-(start + count) // size) > len(block_ids):
            raise Wrong(
                f"{name(sequence)} computes positions {start} to {start + count - 1} in blocks "
                f"of {size}, and has {len(block_ids)} of them",
                "a sequence is planned before it has blocks for its tokens",
                "who reserves blocks, and for how many tokens?",
            )
        expected = block_ids[index] * size + offset
        if slot != expected:
            owners = [
                name(s)
                for s in sequences
                if s is not sequence and isinstance(slot, int) and slot // size in s.table.block_ids
            ]
            whose = f", in a block of {owners[0]}" if owners else ""
            raise Wrong(
                f"{name(sequence)}'s next token, position {start}, goes to slot {slot!r}{whose}; "
                f"it should go to slot {expected}"
            )
    if sum(counts) > config.max_batch_tokens:
        raise Wrong(
            f"a step computes {text}: {sum(counts)} tokens, the budget is "
            f"{config.max_batch_tokens}",
            "somebody's tokens are not taken off the budget",
            "by how much does the budget shrink after decodes, chunks and admissions?",
        )
    seats = sum(s.request.params.n if s.must_fork else 1 for s in scheduler.running)
    if seats > config.max_num_seqs:
        raise Wrong(
            f"{seats} seats are taken, max_num_seqs is {config.max_num_seqs}",
            "a request is admitted without a seat for each of its samples",
            "who counts seats, and when?",
        )


# ── In the engine ─────────────────────────────────────────────────────────────


@cache
def oracle(text: str, num_tokens: int) -> list[int]:
    lm = tinypy()
    return lm.generate_naively(lm.encode(text), num_tokens)


def serve_texts(
    scheduler: type, texts=TEXTS[:3], new: int = 12, limit: int = 400, checked=True, **config
) -> minikv.Engine:
    """tinypy with this scheduler, if `checked` with a look at every invariant after each step.
    Raises Wrong if the tokens are not the oracle's, or not all are there after `limit` steps."""
    lm = tinypy()
    values = dict(num_blocks=64, block_size=4, max_num_seqs=8, max_batch_tokens=32)
    values |= dict(prefix_cache=False, min_prefix_tokens=0) | config
    if "swap_blocks" in config:
        values["preemption"] = "swap"
    engine = minikv.Engine(lm, minikv.EngineConfig(**values), scheduler=scheduler)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    ids = [engine.add_request(lm.encode(text), params) for text in texts]
    outputs, steps = {}, 0
    while engine.has_unfinished:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
        try:
            engine.check() if checked else None
        except AssertionError as error:
            raise Wrong(
                f"after step {steps + 1}: {error}",
                "blocks and their counts no longer agree with what the sequences hold",
                "which line takes blocks, or gives them back, and for whom?",
            ) from error
        steps += 1
        if steps == limit:
            raise Wrong(f"{len(texts)} requests of {new} tokens are not done after {limit} steps")
    for text, request_id in zip(texts, ids, strict=True):
        expected = oracle(text, new)
        if outputs[request_id] != expected:
            raise Wrong(
                f"{text!r} goes on with {lm.decode(outputs[request_id])!r}, "
                f"expected {lm.decode(expected)!r}"
            )
    return engine


# ── 06.1 A chunk of a prompt ──────────────────────────────────────────────────


CHUNK = {  # how much of a prompt a chunk takes, under mistakes that are easily made
    "the rest": (
        lambda total, prompt, start, budget: total - start,
        "the chunk is all that is left, whatever the budget",
        "what is the second number that limits a chunk?",
    ),
    "the budget": (
        lambda total, prompt, start, budget: budget,
        "the chunk is as long as the budget, also where less is left",
        "what is the second number that limits a chunk?",
    ),
    "the prompt": (
        lambda total, prompt, start, budget: min(prompt - start, budget),
        "only the prompt's tokens are counted; after a preemption the tokens written so far have "
        "to be computed again, too",
        "which list of the sequence holds prompt and output?",
    ),
    "from the start": (
        lambda total, prompt, start, budget: min(total, budget),
        "what is computed already is counted again",
        "how much of the sequence is left?",
    ),
    "all or nothing": (
        lambda total, prompt, start, budget: total - start if total - start <= budget else 0,
        "a prompt that does not fit into the budget as a whole gets nothing, and will never begin",
        "a part of the prompt is welcome",
    ),
    "what is left over": (
        lambda total, prompt, start, budget: budget - min(total - start, budget),
        "what is returned is the budget that is left over, not what was used",
        "what does `schedule` do with the number?",
    ),
}


def add_chunk(mine, prompt: int, start: int, budget: int, outputs: int = 0, block_size: int = 4):
    """(what `_add_chunk` returned, the plan, the sequence), for one sequence alone."""
    bench = Bench(mine.Scheduler, block_size=block_size, num_blocks=128)
    held = bench.hold(7)
    for block_id in (5, 0, 6, 2):  # given out next: 2, 6, 0, 5, so that no block is where it was
        bench.pool.release(held[block_id])
    sequence = bench.sequence(prompt)
    sequence.token_ids += [7] * outputs
    sequence.table = minikv.BlockTable(bench.pool, block_size)
    sequence.table.grow(prompt + outputs)
    sequence.num_computed = start
    bench.scheduler.add_running(sequence)
    plan = Plan()
    return bench.scheduler._add_chunk(sequence, budget, plan), plan, sequence


def check_chunk(mine, prompt, start, budget, outputs=0, block_size=4) -> None:
    used, plan, sequence = add_chunk(mine, prompt, start, budget, outputs, block_size)
    total = prompt + outputs
    expected = min(total - start, budget)
    written = f" and {outputs} tokens of output" if outputs else ""
    what = f"a prompt of {prompt}{written}, {start} computed, a budget of {budget}"
    if used is None:
        raise Wrong(
            f"{what}: nothing is returned",
            "the budget cannot shrink if nobody knows what was used",
            "what stands after `return`?",
        )
    suspects = [
        Suspect(partial(rule, total, prompt, start, budget), cause, look)
        for rule, cause, look in CHUNK.values()
    ]
    equal(used, expected, f"{what}: tokens used", *suspects)
    if expected == 0:
        equal(
            (list(map(name, plan.sequences)), plan.num_tokens, plan.slots),
            ([], [], []),
            f"{what}: (sequences, num_tokens, slots) of the plan",
            Suspect(
                lambda: (["A"], [0], list(plan.slots)),
                "a chunk of no tokens is planned",
                "what should be planned when the budget is used up?",
            ),
        )
        return
    planned = list(map(name, plan.sequences)), plan.num_tokens
    equal(planned, (["A"], [expected]), f"{what}: (sequences, num_tokens) of the plan")
    slots = [
        block * block_size + offset
        for block in sequence.table.block_ids
        for offset in range(block_size)
    ]
    equal(
        plan.slots,
        [slots[start]],
        f"{what}, in blocks of {block_size}: the slot",
        Suspect([], "no slot is planned", "the plan has three lists; see `Plan`"),
        Suspect(
            [slots[0]],
            "the slot is that of position 0, not of the first one to be computed",
            "which position does this chunk begin with?",
        ),
        Suspect(
            [start],
            "the position is taken for a slot",
            "who knows the slot of a position? `writable_slot`",
        ),
        Suspect(
            [(slots[start], None)],
            "`writable_slot` returns a pair, the slot and a copy",
            "which of the two goes into the plan?",
        ),
        Suspect(
            [slots[start + expected - 1]],
            "the slot is that of the chunk's last token",
            "`Plan.slots`: where each one's first token goes",
        ),
    )
    if sequence.num_computed != start:
        raise Wrong(
            f"{what}: num_computed is {sequence.num_computed} when the chunk is planned", *COUNTED
        )
    if plan.num_decodes:
        raise Wrong(
            f"{what}: num_decodes of the plan is {plan.num_decodes}, expected 0",
            "a chunk is counted as a decode; those come first in the plan, and each of them is one "
            "token of a sequence that `_add_decodes` has served",
            "which three lists of the plan does a chunk go to?",
        )


@check("06.1", "a prompt within the budget is computed at once", look="what is left to compute")
def _(mine):
    check_chunk(mine, prompt=7, start=0, budget=16)
    check_chunk(mine, prompt=16, start=0, budget=16)
    check_chunk(mine, prompt=1, start=0, budget=16)


@check("06.1", "a longer one is cut", look="the smaller of two numbers")
def _(mine):
    for start, budget in ((3, 60), (0, 16), (16, 16), (32, 16), (48, 16), (3, 5), (49, 1)):
        check_chunk(mine, prompt=50, start=start, budget=budget)


@check("06.1", "no budget, no chunk", look="what is planned when the budget is 0")
def _(mine):
    check_chunk(mine, prompt=50, start=16, budget=0)


@check("06.1", "output counts as well when it is computed again", look="prompt and output")
def _(mine):
    check_chunk(mine, prompt=6, start=0, budget=32, outputs=5)
    check_chunk(mine, prompt=6, start=8, budget=2, outputs=5)


@check("06.1", "the slot of the first token, at any block size", look="where the chunk begins")
def _(mine):
    draw = random.Random(6)
    for block_size in (1, 3, 4, 16):
        for _ in range(12):
            prompt = draw.randrange(1, 60)
            start = draw.randrange(prompt)
            check_chunk(mine, prompt, start, draw.randrange(1, 40), block_size=block_size)


@check(
    "06.1",
    "two prompts share a budget of 10, step by step",
    look="what `_add_chunk` returns, and what it plans",
)
def _(mine):
    bench = Bench(mine.Scheduler, max_batch_tokens=10)
    found = [words(step) for step in bench.serve([Job(12, 2), Job(12, 2), Job(3, 2)])]
    equal(
        found,
        ["A 10", "A 2, B 8", "A 1, B 4, C 3", "B 1, C 1"],
        "steps for A and B of 12 prompt tokens and C of 3",
    )


@check(
    "06.1",
    "tinypy writes the same, whatever the budget",
    cause="a token of a prompt is left out, or computed at another's place",
    look="the checks above: which of them fails?",
)
def _(mine):
    for budget in (1, 3, 10):
        serve_texts(
            mine.Scheduler, new=6, max_num_seqs=1 if budget == 1 else 3, max_batch_tokens=budget
        )


# ── 06.2 Admission ────────────────────────────────────────────────────────────


def admit(bench: Bench, sequence: Sequence, what: str, plan: Plan | None = None) -> bool:
    """`_admit`, and that it says yes or no, and nothing but that."""
    scheduler = bench.scheduler
    before = list(scheduler.waiting), list(scheduler.running)
    try:
        said = bench.scheduler._admit(sequence, Plan() if plan is None else plan)
    except minikv.OutOfBlocks as error:
        raise Wrong(
            f"{what}: OutOfBlocks ({error})",
            "nobody asks whether the pool has the blocks before they are taken",
            "what does `_make_free` say?",
        ) from error
    if not isinstance(said, bool):
        raise Wrong(
            f"{what}: `_admit` returns {said!r}, expected True or False",
            "`schedule` has to know whether the request is in",
            "what stands after `return`, on every way out?",
        )
    if (list(scheduler.waiting), list(scheduler.running)) != before:
        raise Wrong(
            f"{what}: `_admit` has changed `waiting` or `running`",
            "the lists belong to `schedule`, which moves the request once `_admit` has said yes: "
            "it would be moved twice",
            "what is `_admit` asked for, and what not?",
        )
    return said


def expect_yes(bench: Bench, sequence: Sequence, what: str, *why: str) -> None:
    if not admit(bench, sequence, what):
        raise Wrong(f"{what}: refused, expected to be admitted", *why)
    if sequence.table is None:
        raise Wrong(
            f"{what}: admitted, but it has no block table",
            "nobody tells the sequence what it has: that is what `_begin` does",
            "the last lines of `_admit`, and `_begin` below it",
        )


def expect_no(bench: Bench, sequence: Sequence, what: str, *why: str) -> None:
    """Refused, and nothing has changed."""
    before = bench.pool_state()
    if admit(bench, sequence, what):
        raise Wrong(f"{what}: admitted, expected to be refused", *why)
    after = bench.pool_state()
    if after[0] != before[0]:
        changed = [
            i for i, pair in enumerate(zip(before[0], after[0], strict=True)) if pair[0] != pair[1]
        ]
        raise Wrong(
            f"{what}: refused, but the reference counts of blocks {changed} have changed, from "
            f"{[before[0][i] for i in changed]} to {[after[0][i] for i in changed]}",
            "a no keeps blocks: what was taken before it was clear is not given back, or what "
            "was cached is evicted for nothing",
            "all that happens before `return False`, and how it is undone",
        )
    if after[1] != before[1]:
        raise Wrong(
            f"{what}: refused, but (cached, evictable) blocks were {before[1]} and are {after[1]}",
            "the prefix cache is not as it was: a lock was not undone",
            "`lock` needs an `unlock` on every way that ends in a no",
        )
    if sequence.table is not None or sequence.node is not None or sequence.num_computed:
        raise Wrong(
            f"{what}: refused, but the sequence has a table, a node or computed tokens",
            "the sequence is changed before it is clear that it can come in",
            "the order: decide first",
        )


def check_table(bench: Bench, sequence: Sequence, what: str, look: str) -> None:
    """It has exactly the blocks for all of its tokens, each of them held."""
    size, total = bench.config.block_size, len(sequence.token_ids)
    prompt = len(sequence.request.prompt_ids)
    chunk = min(total, bench.config.max_batch_tokens)
    equal(
        len(sequence.table.block_ids),
        -(-total // size),
        f"{what}: blocks of {size} for {total} tokens",
        Suspect(
            0,
            "the table is never grown: the sequence is in without a single block",
            "who takes blocks for the table? `grow`",
        ),
        Suspect(
            -(-prompt // size),
            "blocks for the prompt only; what it wrote before it was preempted has to go "
            "somewhere, too",
            "which list of the sequence holds prompt and output?",
        ),
        Suspect(
            -(-chunk // size),
            "blocks for the first chunk only: the next chunks may find none, and preempt "
            "somebody who has just come in",
            "all of its tokens, or none",
        ),
    )
    if sequence.table.num_tokens < total:
        raise Wrong(
            f"{what}: the table has room for {sequence.table.num_tokens} of {total} tokens",
            "the table is grown by less than what is missing",
            look,
        )
    if any(bench.pool.ref_count(block_id) < 1 for block_id in sequence.table.block_ids):
        raise Wrong(f"{what}: the table names a free block", None, look)


ALL_TOKENS = "how many tokens the table grows by"


TOO_MUCH = (
    "more is kept back than one block for each that runs; who is alone needs none",
    "for whom is a block kept back?",
)
ONE_MORE = (
    "one block too many is asked for when a prompt fills its blocks to the last slot",
    "a division that is rounded up: 16 tokens are 4 blocks of 4, and 17 are 5",
)


@check("06.2", "blocks for all of its tokens, at any block size", look=ALL_TOKENS)
def _(mine):
    sizes = [(size, prompt) for size in (1, 3, 4, 16) for prompt in (1, 4, 16, 37)]
    sizes.sort(key=lambda pair: pair[1] % pair[0] == 0)
    for block_size, prompt in sizes:  # those that fill their blocks exactly come last
        needed = -(-prompt // block_size)
        bench = Bench(mine.Scheduler, block_size=block_size, num_blocks=needed)
        sequence = bench.add(prompt)
        what = f"a prompt of {prompt} in blocks of {block_size}, {needed} in all and free"
        expect_yes(bench, sequence, what, *(TOO_MUCH if prompt % block_size else ONE_MORE))
        check_table(bench, sequence, what, ALL_TOKENS)
        equal(sequence.num_computed, 0, f"{what}: num_computed")


@check("06.2", "also for what it wrote before it was preempted", look=ALL_TOKENS)
def _(mine):
    bench = Bench(mine.Scheduler)
    sequence = bench.add(6)
    sequence.token_ids += [7] * 7
    sequence.num_preemptions = 1
    what = "a prompt of 6 with 7 tokens of output"
    expect_yes(bench, sequence, what, None, "the conditions for a no")
    check_table(bench, sequence, what, ALL_TOKENS)
    for free in (1, 2, 3):  # too few for its prompt, enough for its prompt, enough for all
        bench = Bench(mine.Scheduler, num_blocks=3)
        bench.hold(3 - free)
        sequence = bench.add(6)
        sequence.token_ids += [7] * 5
        sequence.num_preemptions = 1
        what = f"blocks of 4, {free} free, a prompt of 6 with 5 tokens of output"
        if free == 3:
            expect_yes(bench, sequence, what, *TOO_MUCH)
            continue
        try:
            expect_no(bench, sequence, what, "the pool is not asked", "what `_make_free` says")
        except Wrong as wrong:
            if free == 2:
                raise Wrong(wrong.what, *PROMPT_ALONE) from wrong
            raise


PROMPT_ALONE = (
    "blocks are counted for the prompt, and the table grows for all tokens",
    "which list of the sequence holds prompt and output?",
)
SEATS = (
    "nobody counts seats",
    "what does `max_num_seqs` limit? `_seats` says what a sequence takes",
)
SAMPLES = (
    "a request of several samples is counted as one: it forks when its prompt is computed",
    "what does `_seats` say about it?",
)


@check("06.2", "a seat for each sample, or no admission", look="who counts, and against what")
def _(mine):
    for running, n, fits in (
        ([1, 1, 1], 1, True), ([1, 1, 1, 1], 1, False), ([1, 1], 2, True), ([1, 1], 3, False),
        ([3], 1, True), ([3], 2, False), ([], 4, True),
    ):  # fmt: skip
        bench = Bench(mine.Scheduler, max_num_seqs=4)
        for samples in running:
            bench.run_one(4, computed=2, n=samples)
        sequence = bench.add(5, n=n)
        taken = f"{len(running)} running with {sum(running)} samples" if running else "none running"
        what = f"4 seats, {taken}, a request of {n}"
        why = SAMPLES if len(running) < 4 else SEATS
        if fits:
            expect_yes(bench, sequence, what, "a free seat is refused", "the comparison: > or >=?")
        else:
            expect_no(bench, sequence, what, *why)


HEADROOM = (
    "no block is left over for those that run: the next of them to open one would find none, and "
    "somebody is preempted",
    "what does the second argument of `_make_free` do?",
)


@check("06.2", "a block to spare for each that runs", look="the second argument of `_make_free`")
def _(mine):
    for running, prompt, num_blocks, fits in (
        (0, 13, 3, False), (2, 11, 7, True), (2, 11, 6, False), (1, 9, 5, True), (1, 9, 4, False),
        (0, 11, 3, True), (3, 1, 7, True), (3, 1, 6, False),
    ):  # fmt: skip
        bench = Bench(mine.Scheduler, num_blocks=num_blocks)
        for _ in range(running):
            bench.run_one(3)
        sequence = bench.add(prompt)
        free = bench.pool.num_free
        what = f"{running} running, {free} blocks of 4 free, a prompt of {prompt}"
        if fits:
            expect_yes(bench, sequence, what, *TOO_MUCH)
            check_table(bench, sequence, what, ALL_TOKENS)
        else:
            expect_no(bench, sequence, what, *HEADROOM)
    bench = Bench(mine.Scheduler, num_blocks=5)
    bench.run_one(3, computed=2, n=3)
    expect_yes(
        bench,
        bench.add(11),
        "1 running that has yet to fork into 3 samples, 4 blocks of 4 free, a prompt of 11",
        "a block is kept back for each seat; a request counts once, however many samples",
        "`_seats` is for the seats; how many sequences run?",
    )


def prefix(num_tokens: int) -> list[int]:
    return [900_000 + i for i in range(num_tokens)]


@check("06.2", "what nobody uses is evicted, and no more than that", look="who makes room?")
def _(mine):
    bench = Bench(mine.Scheduler, cached=True, num_blocks=6)
    bench.cache_prefix(prefix(16))
    sequence = bench.add(13)
    what = "2 of 6 blocks free, 4 cached and unused, a prompt of 13"
    why = (
        "cached blocks that nobody uses are treated as if they were taken",
        "`_make_free` evicts them; does anything say no before it is asked?",
    )
    expect_yes(bench, sequence, what, *why)
    check_table(bench, sequence, what, ALL_TOKENS)
    equal(bench.cache.num_cached_blocks, 2, f"{what}: blocks that stay cached")
    bench = Bench(mine.Scheduler, cached=True, num_blocks=6)
    bench.cache_prefix(prefix(8))
    bench.hold(2)
    expect_no(
        bench,
        bench.add(17),
        "2 blocks free, 2 cached and unused, a prompt of 17",
        None,
        "what does `_make_free` say?",
    )


IGNORED = (
    "the blocks of the hit are not counted as there already",
    "what `look_up` returns, and what the table has before it grows",
)


@check("06.2", "a hit: stand on what is cached, take blocks for the rest", look=IGNORED[1])
def _(mine):
    # The second has no room to count them again, the third none to spare.
    for num_blocks, why in ((8, IGNORED), (6, IGNORED), (4, TOO_MUCH)):
        check_hit(mine, num_blocks, *why)


def check_hit(mine, num_blocks: int, *why: str) -> None:
    bench = Bench(mine.Scheduler, cached=True, num_blocks=num_blocks)
    blocks = bench.cache_prefix(prefix(12))
    sequence = bench.add(14, tokens=[*prefix(12), 1, 2])
    what = f"12 of 14 prompt tokens are cached in 3 of {num_blocks} blocks"
    expect_yes(bench, sequence, what, *why)
    equal(
        sequence.table.block_ids[:3],
        blocks,
        f"{what}: the first 3 blocks of its table",
        Suspect(
            lambda: [b for b in sequence.table.block_ids[:3] if b not in blocks],
            "the prefix cache is not asked, and all is computed again",
            "who looks for a cached prefix? `look_up`",
        ),
    )
    check_table(bench, sequence, what, ALL_TOKENS)
    found = [bench.pool.ref_count(block_id) for block_id in blocks]
    equal(found, [2, 2, 2], f"{what}: their reference counts, the cache and this table")
    equal(sequence.num_computed, 12, f"{what}: num_computed")
    equal(
        bench.cache.num_evictable_blocks,
        0,
        f"{what}: cached blocks that may be evicted while it runs",
        Suspect(
            3,
            "the hit is not locked: it may be evicted from under a running sequence",
            "`self.cache.lock`, and when",
        ),
    )
    bench.scheduler.waiting.remove(sequence)
    bench.scheduler.add_running(sequence)
    bench.scheduler.remove(sequence)
    equal(bench.cache.num_evictable_blocks, 3, f"{what}: evictable once it has left")


UNLOCKED = (
    "room is made before the hit is locked, so the hit itself is counted as room, and evicted",
    "the order of `lock` and `_make_free`",
)


@check("06.2", "the hit is locked before anything is evicted", look=UNLOCKED[1])
def _(mine):
    for share, num_blocks, more in ((12, 5, 12), (8, 4, 12), (4, 4, 8)):
        bench = Bench(mine.Scheduler, cached=True, num_blocks=num_blocks)
        bench.cache_prefix(prefix(share))
        bench.hold(num_blocks - share // 4 - 1)
        sequence = bench.add(share + more, tokens=prefix(share) + list(range(more)))
        what = (
            f"1 block free, and {share // 4} cached that hold this prompt's own first {share} "
            f"tokens; {more // 4} more are needed"
        )
        try:
            expect_no(bench, sequence, what, *UNLOCKED)
        except Wrong as wrong:
            if bench.cache.num_cached_blocks == share // 4:
                raise
            raise Wrong(wrong.what, *UNLOCKED) from wrong
        except ValueError as error:
            raise Wrong(f"{what}: {type(error).__name__} ({error})", *UNLOCKED) from error


@check("06.2", "too few blocks: a no changes nothing", look="what was done before it was clear")
def _(mine):
    bench = Bench(mine.Scheduler, num_blocks=6)
    bench.hold(2)
    expect_no(
        bench,
        bench.add(17),
        "4 blocks free, a prompt of 17",
        "the pool is not asked",
        "what does `_make_free` say?",
    )
    bench = Bench(mine.Scheduler, cached=True, num_blocks=8)
    bench.cache_prefix(prefix(12))
    bench.hold(3)
    sequence = bench.add(24, tokens=prefix(12) + list(range(12)))
    what = "3 blocks cached for it, 2 free, 3 more are needed"
    expect_no(bench, sequence, what, "the pool is not asked", "what does `_make_free` say?")


@check("06.2", "who was swapped out comes back to its tokens", look="`_begin` does this: read it")
def _(mine):
    bench = Bench(mine.Scheduler, swap_blocks=8, cached=True)
    bench.cache_prefix(prefix(8))
    sequence = bench.add(14, tokens=prefix(14))
    sequence.num_computed, sequence.num_preemptions = 10, 1
    sequence.host_block_ids = [bench.scheduler.host_pool.allocate() for _ in range(3)]
    plan, host = Plan(), list(sequence.host_block_ids)
    what = "14 tokens, 10 of them on the host in 3 blocks"
    if not admit(bench, sequence, what, plan):
        raise Wrong(f"{what}: refused, with the pool empty", None, "the conditions for a no")
    check_table(bench, sequence, what, ALL_TOKENS)
    pairs = list(zip(host, sequence.table.block_ids[:3], strict=True))
    equal([*map(list, plan.swap_in)], [*map(list, pairs)], f"{what}: (host, device) to move back")
    equal(sequence.num_computed, 10, f"{what}: num_computed")


@check(
    "06.2",
    "tinypy, short of blocks: the oracle's tokens, and no more preemptions than need be",
    cause="requests are let in for whom there is no room, or kept out for whom there is",
    look="the checks above: which of them fails?",
)
def _(mine):
    engine = serve_texts(mine.Scheduler, num_blocks=15, new=16)
    other = serve_texts(minikv.Scheduler, num_blocks=15, new=16)
    equal(engine.stats().preemptions, other.stats().preemptions, "preemptions, 15 blocks of 4")
    serve_texts(mine.Scheduler, (TEXTS[0], TEXTS[0], TEXTS[1]), num_blocks=18, prefix_cache=True)


# ── 06.3 The loop ─────────────────────────────────────────────────────────────


def by_rule(jobs: list[Job], budget: int, seats: int, rule: str = "right") -> list:
    """Who computes how many tokens in each step, from integers alone: blocks are no concern."""
    todo, written, waiting, running, steps = {}, {}, [], [], []
    while len(written) < len(jobs) or waiting or running:
        if len(steps) > LIMIT:
            break
        for i, job in enumerate(jobs):
            if job.arrives <= len(steps) and i not in written:
                todo[i], written[i] = job.prompt, 0
                waiting.append(i)
        was_idle, step, room = not running, [], budget

        def give(i, most):
            count = min(todo[i], most)
            if count > 0:
                step.append((i, count))  # noqa: B023
            return count

        decoding = [i for i in running if todo[i] == 1]
        prefilling = [i for i in running if todo[i] > 1]
        if rule == "decode by output":
            decoding = [i for i in running if written[i]]
            prefilling = [i for i in running if not written[i]]
        free = {"decodes are free": decoding, "chunks are free": prefilling}.get(rule, [])
        for i in decoding + prefilling:
            if rule == "no second chunk" and i in prefilling:
                continue
            count = give(i, room if i in prefilling else 1)
            if i not in free:
                room -= count
        while waiting and room > 0 and len(running) < seats:
            if rule == "static" and not was_idle:
                break
            i = waiting.pop(0)
            running.append(i)
            if rule != "a step late":
                count = give(i, room)
                if rule != "admissions are free":
                    room -= count
            if rule == "one at a time":
                break
        for i, count in step:
            todo[i] -= count
            if todo[i] == 0:
                todo[i], written[i] = 1, written[i] + 1
                if written[i] == jobs[i].new:
                    running.remove(i)
        steps.append([(letter(i), count) for i, count in step])
    return steps


RULES = {
    "decodes are free": (
        "decodes are not taken off the budget",
        "one token each: how much budget do they leave?",
    ),
    "chunks are free": (
        "chunks of running prefills are not taken off the budget",
        "what does `_add_chunk` return?",
    ),
    "admissions are free": (
        "what the newcomers compute is not taken off the budget",
        "what does `_add_chunk` return?",
    ),
    "static": (
        "nobody is admitted while anybody runs: these are static batches",
        "when may a request join?",
    ),
    "one at a time": (
        "only one request is admitted in a step, whatever the budget",
        "until when does the admission go on?",
    ),
    "a step late": (
        "who is admitted gets no tokens in that step",
        "what does an admitted sequence need besides its seat?",
    ),
    "no second chunk": (
        "a prefill gets tokens when it is admitted and then never again",
        "who continues prompts that are half computed?",
    ),
    "decode by output": (
        "a decode is taken to be a sequence that has written something; what counts is how many "
        "tokens are left to compute",
        "which sequences go to `_add_decodes`?",
    ),
}


def check_plans(mine, jobs: list[Job], budget: int, seats: int) -> None:
    seats = min(seats, budget)
    sizes = dict(num_blocks=512, max_batch_tokens=budget, max_num_seqs=seats)
    bench = Bench(mine.Scheduler, **sizes)
    expected = by_rule(jobs, budget, seats)
    suspects = [
        Suspect(lambda rule=rule: list(map(words, by_rule(jobs, budget, seats, rule))), *why)
        for rule, why in RULES.items()
    ]
    what = f"{len(jobs)} requests, a budget of {budget}, {seats} seats: steps"
    try:
        found = list(map(words, bench.serve(jobs)))
    except Wrong:  # no engine could run this; perhaps it is known which rule makes such plans
        bench = Bench(mine.Scheduler, **sizes)
        found = list(map(words, bench.serve(jobs, strict=False)))
        if found not in [suspect.value() for suspect in suspects]:
            raise
    equal(found, list(map(words, expected)), what, *suspects)


@check("06.3", "one prompt, and then one token a step", look="what the plan is made of")
def _(mine):
    bench = Bench(mine.Scheduler)
    sequence = bench.add(5, new=3)
    plan = bench.plan()
    equal([plan.num_decodes, plan.num_tokens], [0, [5]], "(num_decodes, num_tokens) of step 1")
    if sequence not in bench.scheduler.running or sequence in bench.scheduler.waiting:
        raise Wrong(
            "an admitted sequence is not in `running`, or still in `waiting`",
            "nobody moves it from one list to the other",
            "`_admit` gives blocks; the lists are yours",
        )
    bench.run(plan)
    plan = bench.plan()
    equal([plan.num_decodes, plan.num_tokens], [1, [1]], "(num_decodes, num_tokens) of step 2")
    bench.run(plan)
    bench.step()
    equal(bench.finished, ["A"], "finished after 3 steps")
    equal(bench.plan().sequences, [], "sequences in the plan when nobody is there")


@check("06.3", "decodes first, then chunks, then whoever waits", look="the three parts of a step")
def _(mine):
    check_plans(mine, [Job(3, 8), Job(2, 8), Job(40, 3, 1), Job(5, 3, 1)], budget=16, seats=8)


@check("06.3", "a step never computes more than the budget", look="what is taken off, and when")
def _(mine):
    check_plans(mine, [Job(12, 4), Job(12, 4), Job(3, 4), Job(9, 2)], budget=10, seats=8)
    check_plans(mine, [Job(1, 3), Job(1, 5), Job(4, 2, 1)], budget=2, seats=2)
    check_plans(mine, [Job(7, 3), Job(7, 3)], budget=1, seats=1)


@check("06.3", "what is computed again comes in chunks", look="which of the running are decodes?")
def _(mine):
    bench = Bench(mine.Scheduler, max_batch_tokens=8)
    sequence = bench.add(6, new=30)
    sequence.token_ids += [7] * 13
    sequence.num_preemptions = 1
    found = [words(bench.step(strict=False)) for _ in range(4)]
    equal(
        found,
        ["A 8", "A 8", "A 3", "A 1"],
        "steps of a request that was preempted: 6 tokens of prompt, 13 of output, a budget of 8",
        Suspect(["A 8", "A 1", "A 1", "A 1"], *RULES["decode by output"]),
    )


@check("06.3", "a free seat is taken in the very next step", look="who is admitted, and when")
def _(mine):
    jobs = [Job(2, n) for n in (8, 2, 3, 3, 6, 1, 5, 7)]
    check_plans(mine, jobs, budget=32, seats=4)


@check("06.3", "any load, any budget, any number of seats", look="the checks above")
def _(mine):
    draw = random.Random(6)
    for _ in range(25):
        arrives, jobs = 0, []
        for _ in range(draw.randrange(2, 10)):
            arrives += draw.choice((0, 0, 1, 3))
            jobs.append(Job(draw.randrange(1, 40), draw.randrange(1, 9), arrives))
        check_plans(mine, jobs, budget=draw.randrange(4, 40), seats=draw.randrange(1, 7))


OVERTAKES = (
    "a request that does not fit is skipped, and one behind it comes in: a large one may wait for "
    "ever while small ones pass",
    "what happens after the first no?",
)


@check("06.3", "nobody overtakes whoever waits for blocks", look=OVERTAKES[1])
def _(mine):
    bench = Bench(mine.Scheduler, num_blocks=8)
    bench.add(16, new=4)  # A: 4 of 8 blocks
    bench.step()
    bench.add(20, new=4)  # B: 5 blocks, has to wait
    bench.add(1, new=1)  # C would fit at once
    found = [words(bench.step()) for _ in range(4)]
    equal(
        found,
        ["A 1", "A 1", "A 1", "B 20, C 1"],
        "steps, when A holds half of the pool, B does not fit, and C behind it would",
        Suspect(["A 1, C 1", "A 1", "A 1", "B 20"], *OVERTAKES),
    )


AGAIN = (
    "somebody is admitted in a step that has preempted, and takes blocks that were freed for "
    "those that run",
    "what does `_add_decodes` return?",
)


def shortest_first(sequence: Sequence) -> tuple:
    return len(sequence.request.prompt_ids), sequence.order


@check("06.3", "nobody is admitted in a step that preempts", look=AGAIN[1])
def _(mine):
    # In order of arrival the victim would be the first in the queue, and not fit.
    def until_preempted(late_in: int | None) -> tuple[int, str]:
        bench = Bench(mine.Scheduler, num_blocks=6, policy=shortest_first)
        bench.add(7, new=13)
        bench.add(6, new=10)
        for step in range(20):
            if step == late_in:
                bench.add(1, new=1)
            done = words(bench.step())
            if bench.scheduler.num_preemptions:
                return step, done
        raise Wrong("6 blocks of 4, two requests that need 9: nobody was preempted in 20 steps")

    step, alone = until_preempted(None)
    equal(
        until_preempted(step),
        (step, alone),
        "(step that preempts, what it computes), shortest prompt first: A has 7, B 6, and C, "
        "who comes in just that step, 1",
        Suspect(lambda: (step, f"{alone}, C 1"), *AGAIN),
    )


GAVE_WAY = (
    "the budget shrinks by a token for somebody who gave way: it is taken off before it is clear "
    "who decodes",
    "what does `_add_decodes` do to the list, and when is its length what you need?",
)


@check("06.3", "who gives way costs no budget", look=GAVE_WAY[1])
def _(mine):
    bench = Bench(mine.Scheduler, num_blocks=14, max_num_seqs=4, max_batch_tokens=6)
    bench.run_one(8), bench.run_one(40, computed=8), bench.run_one(5)
    equal(
        words(bench.step()),
        "A 1, B 5",
        "a budget of 6, no block free: A needs one, B reads a long prompt, C gives way; the step",
        Suspect("A 1, B 4", *GAVE_WAY),
    )


@check(
    "06.3",
    "samples that are still to fork are not decodes yet",
    cause="a request of several samples forks when its last prompt token is computed as a chunk",
    look="`must_fork`",
)
def _(mine):
    bench = Bench(mine.Scheduler, max_batch_tokens=4, max_num_seqs=4)
    bench.add(5, new=3, n=3)
    bench.step()
    plan = bench.plan()  # one token of the prompt is left
    equal(
        (
            plan.num_decodes,
            words((name(s), n) for s, n in zip(plan.sequences, plan.num_tokens, strict=True)),
        ),
        (0, "A 1"),
        "(num_decodes, what is computed): one prompt token is left of a request of 3 samples",
    )
    lm = tinypy()
    engine = minikv.Engine(
        lm, minikv.EngineConfig(max_num_seqs=4, max_batch_tokens=4), scheduler=mine.Scheduler
    )
    prompt = lm.encode(TEXTS[0])[:9]
    params = SamplingParams(max_tokens=4, ignore_eos=True, n=3)
    [output] = engine.generate([prompt], params)
    expected = [lm.generate_naively(prompt, 4)] * 3
    equal([sample.token_ids for sample in output.samples], expected, "3 samples of tinypy, greedy")


@check("06.3", "`running` stays in the policy's order", look="where in `running` a sequence goes")
def _(mine):
    bench = Bench(mine.Scheduler, policy=shortest_first)
    for prompt in (9, 6):
        bench.add(prompt, new=6)
    bench.step()
    bench.add(3, new=6)
    bench.step()
    equal(
        words(bench.step()),
        "C 1, B 1, A 1",
        "decodes when the policy is shortest prompt first: A has 9, B 6 and C, the last, 3",
        Suspect(
            "B 1, A 1, C 1",
            "who is admitted is put at the end of `running`",
            "the list is in the policy's order; how does `add` keep it so?",
        ),
        Suspect(
            "A 1, B 1, C 1",
            "`running` is in order of arrival, whatever the policy",
            "the list is in the policy's order; how does `add` keep it so?",
        ),
    )


@check(
    "06.3",
    "short of blocks: all are served, in order",
    look="who is admitted, and who gets tokens",
)
def _(mine):
    draw = random.Random(7)
    for block_size in (1, 3, 4):
        for _ in range(6):
            jobs = [
                Job(draw.randrange(1, 25), draw.randrange(1, 12), draw.randrange(3))
                for _ in range(draw.randrange(3, 8))
            ]
            jobs.sort(key=lambda job: job.arrives)
            largest = max(-(-(job.prompt + job.new) // block_size) for job in jobs)
            bench = Bench(
                mine.Scheduler,
                block_size=block_size,
                num_blocks=largest + draw.randrange(6),
                max_batch_tokens=draw.randrange(4, 30),
                max_num_seqs=4,
            )
            bench.serve(jobs)
            what = f"{len(jobs)} requests, {bench.pool.num_blocks} blocks of {block_size}"
            equal(bench.pool.num_free, bench.pool.num_blocks, f"{what}: free blocks at the end")
            equal(
                bench.admitted,
                sorted(bench.admitted),
                f"{what}: in order of admission",
                Suspect(list(bench.admitted), *OVERTAKES),
            )


@check(
    "06.3",
    "tinypy, roomy and short of blocks: the oracle's tokens",
    cause="a token is computed twice, or not at all",
    look="the checks above: which of them fails?",
)
def _(mine):
    serve_texts(mine.Scheduler, TEXTS, new=8, max_batch_tokens=7, max_num_seqs=3)
    serve_texts(mine.Scheduler, num_blocks=15, new=16)


# ── 06.4 Preemption ───────────────────────────────────────────────────────────


def preempted(bench: Bench, sequence: Sequence, with_plan: bool = True) -> Plan:
    plan = Plan()
    bench.scheduler.preempt(sequence, plan) if with_plan else bench.scheduler.preempt(sequence)
    return plan


def check_gone(bench: Bench, sequence: Sequence, what: str, held: list[int]) -> None:
    """It waits, and its blocks are free."""
    scheduler = bench.scheduler
    if sequence in scheduler.running:
        raise Wrong(
            f"{what}: it is still in `running`",
            "it would be given tokens in the next step, without a block",
            "which list does it leave, and which does it join?",
        )
    if sequence not in scheduler.waiting:
        raise Wrong(
            f"{what}: it is not in `waiting`",
            "nobody would ever hear of it again",
            "which list does it leave, and which does it join?",
        )
    counts = [bench.pool.ref_count(block_id) for block_id in held]
    if any(counts):
        raise Wrong(
            f"{what}: of its {len(held)} blocks, {sum(map(bool, counts))} are still held",
            "its blocks are not given back, and that was what it was preempted for",
            "`_release` gives back all that a running sequence holds",
        )
    if sequence.table is not None:
        raise Wrong(
            f"{what}: it still has a block table",
            "the table outlives its blocks",
            "`_release`: what does it do with the table?",
        )


@check("06.4", "recompute: it gives its blocks back and waits", look="what `_release` does")
def _(mine):
    for block_size in (1, 3, 4, 16):
        for prompt, computed in ((9, None), (20, 8)):
            bench = Bench(mine.Scheduler, block_size=block_size)
            sequence = bench.run_one(prompt, computed)
            tokens, held = list(sequence.token_ids), list(sequence.table.block_ids)
            plan = preempted(bench, sequence)
            what = f"a prompt of {prompt} in blocks of {block_size}"
            check_gone(bench, sequence, what, held)
            equal(
                sequence.token_ids,
                tokens,
                f"{what}: its tokens",
                Suspect(
                    tokens[:prompt],
                    "what it has written so far is thrown away; only K and V are lost",
                    "prompt and output are both computed again",
                ),
            )
            equal(
                sequence.num_computed,
                0,
                f"{what}: num_computed, when no K and V is left",
                Suspect(
                    prompt if computed is None else computed,
                    "tokens count as computed whose K and V are gone",
                    "what is left of its K and V?",
                ),
            )
            equal([*map(list, plan.swap_out)], [], f"{what}: blocks to be moved")


@check("06.4", "it is counted", look="three counters: its own, and two of the scheduler's")
def _(mine):
    bench = Bench(mine.Scheduler)
    sequence = bench.run_one(9)
    preempted(bench, sequence)
    found = [
        sequence.num_preemptions,
        bench.scheduler.num_preemptions,
        bench.scheduler.num_swaps_out,
    ]
    equal(
        found,
        [1, 1, 0],
        "num_preemptions of the sequence and of the scheduler, num_swaps_out, after one recompute",
    )


QUEUE = (
    "it goes to the end of the queue, behind those that came after it",
    "`waiting` is in the policy's order; how does `add` keep it so?",
)


@check("06.4", "it waits at its old place in the queue", look=QUEUE[1])
def _(mine):
    bench = Bench(mine.Scheduler)
    early, late = bench.run_one(5), bench.run_one(5)
    for _ in range(2):
        bench.add(5)
    preempted(bench, late)
    preempted(bench, early)
    equal(
        "".join(map(name, bench.scheduler.waiting)),
        "ABCD",
        "`waiting`, after B and A were preempted, in this order, and C and D wait",
        Suspect("CDBA", *QUEUE),
        Suspect("BACD", "it goes to the front of the queue, whatever its turn", QUEUE[1]),
    )
    bench = Bench(mine.Scheduler, policy=shortest_first)
    victim = bench.run_one(7)
    for prompt in (5, 9):
        bench.add(prompt)
    preempted(bench, victim)
    equal(
        "".join(map(name, bench.scheduler.waiting)),
        "BAC",
        "`waiting`, shortest prompt first: A, preempted, has 7, B 5 and C 9",
        Suspect("BCA", *QUEUE),
        Suspect("ABC", "it goes to the front of the queue, whatever its turn", QUEUE[1]),
    )


@check("06.4", "it lets go of the prefix that it stood on", look="`_release`")
def _(mine):
    bench = Bench(mine.Scheduler, cached=True)
    blocks = bench.cache_prefix(prefix(8))
    sequence = bench.add(11, tokens=prefix(11))
    bench.step()
    own = sequence.table.block_ids[2:]
    preempted(bench, sequence)
    found = [bench.pool.ref_count(block_id) for block_id in blocks]
    equal(found, [1, 1], "reference counts of 2 cached blocks when it is gone")
    check_gone(bench, sequence, "a sequence on a cached prefix", own)
    equal(
        bench.cache.num_evictable_blocks,
        2,
        "cached blocks that may be evicted when it is gone",
        Suspect(
            0,
            "its lock stays for ever, and those blocks can never be evicted",
            "what does `_release` do besides releasing the table?",
        ),
    )


SWAPPED = {
    "all": (
        "blocks that hold nothing yet are moved as well",
        "how many blocks do the computed tokens fill?",
    ),
    "down": (
        "the last block, filled in part, is left behind, and its K and V are lost",
        "9 tokens are in 3 blocks of 4",
    ),
}


def check_swap(mine, prompt, computed, block_size, host=40) -> None:
    """Swap with enough room."""
    bench = Bench(mine.Scheduler, block_size=block_size, swap_blocks=host, num_blocks=80)
    bench.hold(37)  # so that no block of the device has the number of one of the host
    sequence = bench.run_one(prompt, computed)
    computed, held = sequence.num_computed, list(sequence.table.block_ids)
    used = -(-computed // block_size)
    plan = preempted(bench, sequence)
    what = f"{computed} of {len(sequence.token_ids)} tokens computed, blocks of {block_size}"
    moves = [list(pair) for pair in plan.swap_out]
    equal(
        len(moves),
        used,
        f"{what}: blocks to be moved to the host",
        Suspect(
            0,
            "nothing is moved to the host, though there is room",
            "when is it a swap? the mode, and room on the host",
        ),
        *[Suspect(len(held), *SWAPPED["all"])] * (len(held) > used),
        Suspect(computed // block_size, *SWAPPED["down"]),
    )
    equal(
        [device for device, _ in moves],
        held[:used],
        f"{what}: blocks to be moved, in order",
        Suspect(
            lambda: list(sequence.host_block_ids or []),
            "the pairs are the wrong way round",
            "`Plan.swap_out`: (device block, host block)",
        ),
    )
    check_gone(bench, sequence, what, held)
    equal(
        sequence.host_block_ids,
        [host for _, host in moves],
        f"{what}: its host_block_ids",
        Suspect(
            None,
            "it does not know where on the host its blocks are, so they are lost",
            "`sequence.host_block_ids`",
        ),
    )
    free = bench.scheduler.host_pool.num_free
    equal(
        free,
        host - used,
        f"{what}: free blocks on the host",
        Suspect(
            host,
            "host blocks are named without being taken from the host's pool",
            "who knows which of them are free? `self.host_pool`",
        ),
    )
    equal(
        sequence.num_computed,
        computed,
        f"{what}: num_computed, when its K and V are on the host",
        Suspect(
            0,
            "its K and V are kept, and then computed again anyway",
            "what is left to compute when it comes back?",
        ),
    )
    found = [bench.scheduler.num_preemptions, bench.scheduler.num_swaps_out]
    equal(found, [1, 1], f"{what}: (num_preemptions, num_swaps_out)")


@check("06.4", "swap: its computed blocks move to the host", look="the lines for swap")
def _(mine):
    check_swap(mine, prompt=9, computed=None, block_size=4)
    for block_size in (1, 3, 4, 16):
        for prompt, computed in ((8, None), (5, None), (20, 8), (20, 9), (33, 32)):
            check_swap(mine, prompt, computed, block_size)


@check("06.4", "no room on the host: recompute", look="when is it a swap, and when not?")
def _(mine):
    for host, swaps in ((2, False), (3, True), (1, False)):
        bench = Bench(mine.Scheduler, swap_blocks=host)
        sequence = bench.run_one(9)
        held = list(sequence.table.block_ids)
        what = f"3 blocks in use, {host} free on the host"
        try:
            plan = preempted(bench, sequence)
        except minikv.OutOfBlocks as error:
            raise Wrong(
                f"{what}: OutOfBlocks ({error})",
                "nobody asks whether the host has room",
                "`self.host_pool.num_free`",
            ) from error
        check_gone(bench, sequence, what, held)
        if swaps:
            equal(
                len(plan.swap_out),
                3,
                f"{what}: blocks moved",
                Suspect(
                    0,
                    "exactly as many as are needed, and that is treated as too few",
                    "the comparison: < or <=?",
                ),
            )
            continue
        found = [
            len(plan.swap_out),
            sequence.host_block_ids,
            sequence.num_computed,
            bench.scheduler.host_pool.num_free,
            bench.scheduler.num_swaps_out,
        ]
        equal(
            found,
            [0, None, 0, host, 0],
            f"{what}: [blocks moved, host_block_ids, num_computed, free on the host, "
            "num_swaps_out]",
            Suspect(
                lambda sequence=sequence, host=host: [host, sequence.host_block_ids, 9, 0, 1],
                "what fits is moved, and the tokens of the block that is left behind still count "
                "as computed",
                "all of the blocks in use, or none",
            ),
        )


@check("06.4", "nothing computed yet: nothing to move", look="the smallest number that is moved")
def _(mine):
    bench = Bench(mine.Scheduler, swap_blocks=8)
    sequence = bench.run_one(9, computed=0)
    preempted(bench, sequence)
    equal(
        [sequence.host_block_ids, bench.scheduler.num_swaps_out],
        [None, 0],
        "[host_block_ids, num_swaps_out] of a sequence without a single computed token",
        Suspect(
            [[], 1],
            "a swap of no blocks: it would come back as if it had been swapped",
            "what if no block is in use?",
        ),
    )


@check("06.4", "without a plan there is nobody to move blocks", look="`plan` may be None")
def _(mine):
    bench = Bench(mine.Scheduler, swap_blocks=8)
    sequence = bench.run_one(9)
    held = list(sequence.table.block_ids)
    try:
        preempted(bench, sequence, with_plan=False)
    except AttributeError as error:
        raise Wrong(
            f"preempt(sequence) without a plan: AttributeError ({error})",
            "`recompute_all` preempts without a plan, after a failed step",
            "the default of `plan`",
        ) from error
    check_gone(bench, sequence, "preempt(sequence) without a plan", held)
    equal(
        [sequence.host_block_ids, sequence.num_computed],
        [None, 0],
        "[host_block_ids, num_computed] after preempt(sequence) without a plan",
    )


@check(
    "06.4",
    "tinypy, short of blocks, by recompute and by swap",
    cause="K and V of a preempted request are not what they were",
    look="the checks above: which of them fails?",
)
def _(mine):
    for swap in ({}, {"swap_blocks": 8}, {"swap_blocks": 3}):
        engine = serve_texts(mine.Scheduler, num_blocks=14, new=16, **swap)
        if engine.scheduler.host_pool is not None:
            host = engine.scheduler.host_pool
            equal(host.num_free, host.num_blocks, "free host blocks when all are done")


# ── 06.5 The largest gives way ────────────────────────────────────────────────


@check(
    "06.5",
    "tinypy, short of blocks: the oracle's tokens",
    look="the plan of a step that preempts: whose slot is whose?",
)
def _(mine):
    for num_blocks, swap in ((14, {}), (17, {}), (14, {"swap_blocks": 8})):
        for checked in (False, True):  # the text first: it is what a reader would notice
            serve_texts(mine.FreesTheMost, num_blocks=num_blocks, new=16, checked=checked, **swap)


def crowd(mine, prompts: list[int]) -> tuple[Bench, str]:
    """Sequences in decode that fill a pool, and that in words."""
    bench = Bench(mine.FreesTheMost, num_blocks=sum(-(-prompt // 4) for prompt in prompts))
    for prompt in prompts:
        bench.run_one(prompt)
    who = ", ".join(letter(i) for i in range(len(prompts)))
    return bench, f"{who} run with {prompts} tokens in blocks of 4, none free"


def crowded_plan(bench: Bench, what: str, strict: bool = True) -> Plan:
    try:
        return bench.plan(strict)
    except AttributeError as error:
        raise Wrong(
            f"{what}: AttributeError ({error})",
            "whoever gave way has no table any more, and is still among those who get a token",
            "which list does the victim leave?",
        ) from error
    except ValueError as error:
        raise Wrong(
            f"{what}: ValueError ({error})",
            "nobody is left to choose from: whoever asks may be the only one that can give way",
            "who is in the list that the victim is taken from?",
        ) from error


SHIFTED = "who has a slot, and whose slot is it, when somebody leaves the list?"


@check("06.5", "every token of the step goes to a block of its own sequence", look=SHIFTED)
def _(mine):
    # A and B have room for their next token. C has none, and A holds the most.
    for prompts in ([14, 5, 8], [14, 6, 8]):
        bench, what = crowd(mine, prompts)
        a, b, c = bench.scheduler.running
        first, second = (
            s.table.block_ids[s.num_computed // 4] * 4 + s.num_computed % 4 for s in (a, b)
        )
        plan = crowded_plan(bench, what, strict=False)
        if a in plan.sequences and c in plan.sequences:
            continue  # nobody gave way: the next check
        right = [
            s.table.block_ids[s.num_computed // 4] * 4 + s.num_computed % 4
            if s.num_computed // 4 < len(s.table.block_ids)
            else "no block"
            for s in plan.sequences
        ]
        equal(
            plan.slots,
            right,
            f"{what}: slots of {' and '.join(map(name, plan.sequences))}",
            Suspect(
                [first, second],
                "the slot of whoever gave way stays in the plan, so each of the others gets "
                "the slot of the one before it",
                SHIFTED,
            ),
            Suspect(
                [first, right[-1]],
                "a slot is taken back, but not that of whoever gave way",
                SHIFTED,
            ),
        )


@check("06.5", "nobody is left out", look="who has a slot when the loop ends?")
def _(mine):
    for prompts in ([14, 5, 8], [14, 6, 5, 8], [6, 14, 8], [13, 9, 4, 4], [5, 6, 8]):
        bench, what = crowd(mine, prompts)
        plan = crowded_plan(bench, what)
        missing = [name(s) for s in bench.scheduler.running if s not in plan.sequences]
        if missing:
            raise Wrong(
                f"{what}: {', '.join(missing)} is running and gets no token",
                "whoever finds no block is passed over, and nobody gives way",
                "what should happen when `_reserve_one` returns None?",
            )
        equal(plan.num_decodes, len(plan.sequences), f"{what}: num_decodes")


@check("06.5", "whoever holds the most blocks gives way", look="how the victim is chosen")
def _(mine):
    promise = "what this class promises in its docstring"
    for prompts, victim in (([8, 14, 4, 6], "B"), ([8, 6, 14, 5], "C"), ([8, 5, 6, 14], "D")):
        bench, what = crowd(mine, prompts)
        crowded_plan(bench, what)
        found = "".join(name(s) for s in bench.scheduler.waiting)
        equal(
            found,
            victim,
            f"{what}, and A needs one: who waits now",
            Suspect("D", "the last to come gives way, not whoever holds the most blocks", promise),
            Suspect("A", "whoever asks gives way itself", promise),
            *[Suspect("C", "whoever holds the fewest blocks gives way", promise)] * (victim == "B"),
        )
    bench = Bench(mine.FreesTheMost, num_blocks=11)
    bench.run_one(8), bench.run_one(6)
    bench.run_one(14, computed=4), bench.run_one(12, computed=9)
    what = (
        "A and B have 2 blocks each; of their prompts C has computed 4 tokens and holds 4 blocks, "
        "D 9 tokens and 3 blocks; none is free and A needs one"
    )
    crowded_plan(bench, what)
    equal(
        "".join(name(s) for s in bench.scheduler.waiting),
        "C",
        f"{what}: who waits now",
        Suspect(
            "D",
            "the most computed tokens decide, or the last to come, not the most blocks",
            "a prefill's blocks are reserved before its tokens are computed",
        ),
        Suspect("B", "only decodes are asked to give way", "the lists of those who run"),
        Suspect("A", "only decodes are asked to give way", "the lists of those who run"),
    )


@check("06.5", "any load, short of blocks: all are served", look="who is preempted, and how often")
def _(mine):
    draw = random.Random(5)
    for block_size in (1, 3, 4):
        for swap in ({}, {"swap_blocks": 6}):
            for _ in range(4):
                jobs = [Job(draw.randrange(1, 20), draw.randrange(1, 14)) for _ in range(5)]
                largest = max(-(-(job.prompt + job.new) // block_size) for job in jobs)
                bench = Bench(
                    mine.FreesTheMost,
                    block_size=block_size,
                    max_batch_tokens=9,
                    num_blocks=largest + draw.randrange(4),
                    **swap,
                )
                bench.serve(jobs)
                what = f"5 requests, {bench.pool.num_blocks} blocks of {block_size}"
                equal(bench.pool.num_free, bench.pool.num_blocks, f"{what}: free at the end")


# ── 06.6 Before the race ──────────────────────────────────────────────────────


RACE = {  # key: (what it is, the answer, where to look), suspects
    "static steps": (
        ("steps of static batches", 15, "the longest of A to D, then the longest of E to H"),
        Suspect(8, "that is the first batch; E to H come after it", "the second batch"),
        Suspect(14, "the longest of E to H wants 7, H does", "E to H: 6, 1, 5 and 7"),
        Suspect(35, "35 is the sum of all tokens: one request at a time", "four at a time"),
        Suspect(9, "35 tokens over four seats, if none were ever empty", "who waits for whom?"),
    ),
    "static empty": (
        ("empty seats in static batches", 25, "4 seats in each of the steps, less 35 tokens"),
        Suspect(35, "35 is how often a seat is not empty", "all seats of all steps, less those"),
        Suspect(60, "60 is all seats of all steps", "how often does somebody sit there?"),
    ),
    "continuous steps": (
        ("steps of continuous batches", 11, "write down, step by step, who sits in which seat"),
        Suspect(9, "35 tokens over four seats; but H begins late and is long", "when does H start, "
                "and how many tokens does it want?"),
        Suspect(8, "A is done after 8; is everybody?", "when does H start?"),
        Suspect(12, "a seat that becomes free is taken in the very next step", "B is done after "
                "step 2: when does E begin?"),
        Suspect(15, "that is the static schedule", "who takes B's seat, and when?"),
    ),
    "continuous empty": (
        ("empty seats in continuous batches", 9, "4 seats in each of the steps, less 35 tokens"),
        Suspect(0, "no seat is empty while somebody waits; what when nobody waits any more?",
                "the last steps"),
        Suspect(35, "35 is how often a seat is not empty", "all seats of all steps, less those"),
        Suspect(25, "that is the static schedule", "who takes B's seat, and when?"),
    ),
    "equal steps": (
        ("steps when all want 5 tokens", 10, "who waits for whom, when all are of one length?"),
        Suspect(5, "only four can sit at a time", "eight requests, four seats"),
        Suspect(40, "40 tokens, four a step", "eight requests, four seats"),
    ),
    "break-even": (
        ("the link at which both take the same time (GB/s)", 5.24288, "bytes a token, tokens a "
         "second, and how often each byte moves"),
        Suspect(2.62144, "the blocks go out and come back: every byte moves twice",
                "what is swapped out must be swapped in"),
        Suspect(5242.88, "these are MB/s", "10^9 bytes are a GB"),
        Suspect(5242880000, "these are bytes a second", "10^9 bytes are a GB"),
        Suspect(10.48576, "every byte moves twice, not four times; 131,072 bytes hold K and V",
                "bytes a token times tokens a second, times two"),
        Suspect(4.8828125, "these are GiB/s", "10^9 bytes are a GB"),
    ),
}  # fmt: skip


check_numbers("06.6", "before_the_race", RACE, near=0.01)  # rounded as you like


# ── The reader's parts in the engine ──────────────────────────────────────────


@runs_model("06.1", "06.2", "06.3", "06.4", "06.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on the reader's scheduler, short of blocks: by recompute, by swap, and with the
    other choice of victim."""
    runs: dict[str, tuple[Callable, dict]] = {
        "recompute": (mine.Scheduler, {}),
        "swap": (mine.Scheduler, {"swap_blocks": 12}),
        "the largest gives way": (mine.FreesTheMost, {}),
    }
    found = {}
    for how, (scheduler, more) in runs.items():
        try:
            engine = serve_texts(
                scheduler, TEXTS, new=16, num_blocks=14, max_batch_tokens=12, **more
            )
        except Wrong as wrong:
            raise AssertionError(f"{how}: {wrong.what}") from wrong
        found[how] = engine.stats()
    swap = found["swap"]
    return (
        f"{len(TEXTS)} requests of 16 new tokens in a pool of 14 blocks of 4 and a budget of 12 "
        f"tokens a step, the oracle's tokens: {found['recompute'].preemptions} preemptions by "
        f"recompute; {swap.preemptions} with swap, {swap.swaps_out} to the host and "
        f"{swap.swaps_in} back; {found['the largest gives way'].preemptions} where the largest "
        "gives way."
    )
