"""Chapter 06 as programs: chunks, admission, the loop of a step, preemption, another victim."""

import random
import re
from collections import Counter
from functools import cache
from itertools import zip_longest
from typing import Any

import minikv
from minikv import Plan, SamplingParams, Sequence
from minikv.course.judge.checking import Wrong, check, plain, runs_model, tinypy, witness
from minikv.course.judge.programs import scramble
from minikv.course.judge.scenarios import Group, Log, Words, scenario
from minikv.course.judge.stand_ins import SchedulerBench
from minikv.course.pictures.style import letter

TEXTS = (
    "class Stack:\n    def push(self, item):\n",
    "import os\n\ndef fib(n):",
    "for i in range(",
    "while True:\n    line = ",
)


# ── A scheduler without a model ───────────────────────────────────────────────

# A program is (settings, ops). Requests are A, B, C … in the order of arrival. Ops:
#     add 12+5>9x3~8  one waits: 12 tokens of prompt, of which 8 begin the cached text, 5 written
#                     already, 9 wanted, 3 samples. All but the 12 may be left out.
#     run 12/8        one runs: 8 of 12 tokens computed; without /8 all, and one is written
#     cache 12        12 tokens are in the prefix cache, and no sequence uses them
#     hold 3, free 3  other owners take blocks, and give them back
#     admit           the first in the queue is considered for admission
#     preempt A       with a plan; "preempt A alone": without one
#     leave A         it is aborted
#     step, steps     one step; all steps until no request is left

SMALL = dict(num_blocks=64, block_size=4, max_num_seqs=8, max_batch_tokens=32, min_prefix_tokens=0)
REQUEST = re.compile(r"(\d+)(?:\+(\d+))?(/\d+)?(?:>(\d+))?(?:x(\d+))?(?:~(\d+))?$")
TEXT = [900_000 + i for i in range(200)]  # what `cache` caches
MOST = 80  # steps


def shortest_first(sequence: Sequence) -> tuple:
    return len(sequence.request.prompt_ids), sequence.order


def latest_first(sequence: Sequence) -> tuple:
    return -sequence.request.request_id, sequence.index


POLICIES = {
    "in order of arrival": minikv.first_come_first_served,
    "shortest prompt first": shortest_first,
    "the latest first": latest_first,
}


class Table(minikv.BlockTable):
    """As a reader's table may be handed to the engine."""

    __slots__ = ()


class Stop(Exception):
    """The reader's code has raised an error, and that is noted already."""


class Desk:
    """A bench, and what a program does there."""

    def __init__(self, mine, settings: dict, log: Log, kind: str = "Scheduler"):
        values = SMALL | settings
        cached, policy = values.pop("cached", False), values.pop("policy", "in order of arrival")
        if "host_blocks" in values:
            values["preemption"] = "swap"
        config = minikv.EngineConfig(**values)
        self.log, self.last = log, (Plan(), "nothing")
        self.held: list[int] = []  # blocks
        self.bench = SchedulerBench(
            config, getattr(mine, kind), cache=cached, policy=POLICIES[policy]
        )
        self.scheduler = self.bench.scheduler
        self.scheduler.block_table = Table
        scramble(self.bench.pool, 6)
        if self.scheduler.host_pool is not None:
            scramble(self.scheduler.host_pool, 60)
        told = {
            "num_blocks": "",
            "max_batch_tokens": ", a budget of {}",
            "max_num_seqs": ", {} seats",
            "host_blocks": ", swap to {} blocks on the host",
            "policy": ", {}",
        }
        many = f"{settings['num_blocks']} " if "num_blocks" in settings else ""
        text = f"{many}block{'s' * (many != '1 ')} of {config.block_size}"
        log(text + "".join(told[key].format(settings[key]) for key in told if key in settings))

    def there(self) -> dict[str, Sequence]:
        return {name(one): one for one in self.scheduler}

    def state(self) -> dict:
        """All that can be seen between two calls."""
        bench, scheduler = self.bench, self.scheduler
        seen: dict[str, Any] = {
            "running:": Words(" ".join(map(name, scheduler.running)) or "none"),
            "waiting:": Words(" ".join(map(name, scheduler.waiting)) or "none"),
        }
        cached = set(bench.cache.block_ids()) if bench.cache is not None else set()
        for who, one in self.there().items():
            blocks, host = one.table and one.table.block_ids, one.host_block_ids
            seen |= {
                f"num_computed of {who}:": one.num_computed,
                f"blocks of {who}:": blocks and len(blocks),
                f"{who} has written": text_of(one.token_ids[len(one.request.prompt_ids) :]),
                f"host_block_ids of {who}:": host and f"{len(set(host))} blocks",
                f"num_preemptions of {who}:": one.num_preemptions,
                f"cached blocks that {who} shares:": sum(b in cached for b in blocks or ()),
            }
        counts = Counter(bench.pool.ref_count(b) for b in range(bench.pool.num_blocks))
        seen["free blocks:"] = bench.pool.num_free
        seen["blocks, by number of holders:"] = {n: counts[n] for n in sorted(counts) if n}
        if bench.cache is not None:
            seen["cached blocks:"] = bench.cache.num_cached_blocks
            seen["cached blocks that may be evicted:"] = bench.cache.num_evictable_blocks
        if scheduler.host_pool is not None:
            seen["free blocks on the host:"] = scheduler.host_pool.num_free
        seen["the scheduler's num_preemptions:"] = scheduler.num_preemptions
        seen["its num_swaps_out and num_swaps_in:"] = [
            scheduler.num_swaps_out,
            scheduler.num_swaps_in,
        ]
        return seen

    def set_up(self, op: str) -> str | None:
        """Do what needs nothing of the reader's; returns it in words, None if it does."""
        bench, (verb, _, rest) = self.bench, op.partition(" ")
        if verb == "hold":
            self.held += bench.hold(int(rest))
            return f"other owners take {rest}"
        if verb == "free":
            for _ in range(int(rest)):
                bench.pool.release(self.held.pop())
            return f"they give {rest} back"
        if verb == "cache":
            bench.cache_prefix(TEXT[: int(rest)])
            return f"{rest} tokens are cached"
        if verb not in ("add", "run"):
            return None
        request = REQUEST.match(rest)
        if request is None:
            raise ValueError(f"op: {op!r} is no request")
        prompt, given = int(request[1]), request.groups()[1:]
        written, computed, wanted, n, shared = [
            int(one.strip("/")) if one else None for one in given
        ]
        sequence = bench.sequence(prompt, wanted or 4, n=n or 1, prefix=TEXT[: shared or 0])
        who, samples = name(sequence), f", {n} samples" if n else ""
        if verb == "run":
            bench.start(sequence, prompt if computed is None else computed)
            if computed is None:  # the block for it is taken when it is computed
                sequence.token_ids += bench.alone(sequence)[:1]
                return f"{who} decodes, {prompt} tokens computed"
            return f"{who} runs, {computed} of {prompt} tokens computed{samples}"
        if written:
            sequence.token_ids += bench.alone(sequence)[:written]
            sequence.num_preemptions = 1
        self.scheduler.add(sequence)
        more = f" and {written} of output" if written else ""
        more += f", {shared} of them as in the cache" if shared else ""
        return f"{who} arrives with a prompt of {prompt}{more}{samples}"

    def do(self, op: str) -> None:
        """Do it, and note what can be seen then."""
        log, scheduler, text = self.log, self.scheduler, self.set_up(op)
        if text is not None:
            return log(text)
        verb, *names = op.split()
        if verb.startswith("step"):
            while list(scheduler) or verb == "step":
                if not self.step().sequences or verb == "step" or self.bench.num_steps == MOST:
                    return None
            return None
        plan, alone = Plan(), "alone" in names
        if verb == "admit":
            sequence = scheduler.waiting[0]
            text = f"admission of {name(sequence)}"
            said = self.call(text, scheduler._admit, sequence, plan)
            kind = sequence.table and type(sequence.table).__name__
            told = {"the answer is": plain(said), "its table is a": kind, "planned:": planned(plan)}
            log(text, told | self.state())
            if said and sequence in scheduler.waiting:
                scheduler.waiting.remove(sequence)
                scheduler.add_running(sequence)
        for sequence in [one for who, one in self.there().items() if who in names]:
            text = f"{name(sequence)} is preempted" + ", without a plan" * alone
            if verb == "leave":
                scheduler.remove(sequence)
                log(f"{name(sequence)} is aborted", self.state())
                continue
            table, before = list(sequence.table.block_ids), len(plan.swap_out)
            self.call(text, scheduler.preempt, sequence, *[plan] * (not alone))
            moves = [self.move(pair, table, sequence) for pair in plan.swap_out[before:]]
            log(text, {"blocks to be moved:": len(plan.swap_out), "moves:": moves, **self.state()})
        return self.bench.run(plan)

    def call(self, text: str, function, *arguments):
        """What it returns; an error is noted and ends the program."""
        result = self.log.call(text, function, *arguments, see=False)
        if self.log.events[-1].error is not None:
            raise Stop
        self.log.events.pop()  # what comes of it is noted by the caller
        return result

    def move(self, pair, table: list[int], sequence: Sequence) -> str:
        """A pair of `swap_out`, by places in the table and in `host_block_ids`."""
        places = zip((table, sequence.host_block_ids or []), pair, strict=True)
        told = [str(ids.index(b)) if b in ids else f"no block ({b})" for ids, b in places]
        return "{} of its table to {} of host_block_ids".format(*told)

    def step(self) -> Plan:
        """Plan, note, run."""
        log, bench, number = self.log, self.bench, f"step {self.bench.num_steps + 1}"
        plan = self.call(number, bench.scheduler.schedule)
        if not isinstance(plan, Plan):
            log(number, {"computes": Words("nothing, because no Plan is returned")})
            raise Stop
        last, told = self.last
        seen: dict[str, Any] = {"computes": planned(plan)}
        seen["wrong first slots:"] = wrong_slots(plan)
        seen["num_decodes:"] = plan.num_decodes
        seen["the plan of the step before:"] = "as it was" if planned(last) == told else "changed"
        log(f"{number}: {planned(plan)}", seen | self.state())
        self.last = plan, planned(plan)
        bench.run(plan)
        return plan


def name(sequence: Sequence) -> str:
    """A, B, C … by request; B0, B1 … when it has forked."""
    forked = sequence.request.params.n > 1 and not sequence.must_fork
    return letter(sequence.request.request_id) + (str(sequence.index) if forked else "")


def text_of(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def rows(plan: Plan) -> list[tuple]:
    return list(zip_longest(plan.sequences, plan.num_tokens, plan.slots))


def planned(plan: Plan) -> str:
    """What a step computes: "A 1, B 14"."""
    told = [f"{name(one) if one else 'none'} {count}" for one, count, _ in rows(plan)]
    return Words(", ".join(told) or "nothing")


def wrong_slots(plan: Plan) -> dict[str, str]:
    """First tokens that do not go where the table says."""
    found = {
        name(one) if one else "none": whose_slot(one, slot, plan) for one, _, slot in rows(plan)
    }
    return {who: slot for who, slot in found.items() if slot != "right"}


def whose_slot(one: Sequence | None, slot, plan: Plan) -> str:
    table = one.table if one else None
    if not one or not table or one.num_computed >= len(table.block_ids) * table.block_size:
        return f"{slot}, and it has no block for it"
    size = table.block_size
    index, offset = divmod(one.num_computed, size)
    right = table.block_ids[index] * size + offset
    for other in plan.sequences if isinstance(slot, int) and slot != right else ():
        if other is not one and other.table and slot // size in other.table.block_ids:
            return f"{slot}, in a block of {name(other)}"
    return "right" if slot == right else f"{slot}, not {right}"


def desk(mine, program, log: Log) -> None:
    settings, ops = program
    at = Desk(mine, settings, log)
    try:
        for op in ops.split(", "):
            at.do(op)
    except Stop:
        pass


def then(first: str, *others: str) -> str:
    """Ops with one verb, and what follows: then("run 8 6", "step") is "run 8, run 6, step"."""
    verb, *rest = first.split()
    return ", ".join([*(f"{verb} {one}" for one in rest), *others])


def random_load(seed: int, spare: int = 40, **settings) -> tuple[dict, str]:
    """Requests that come, step by step, and some that leave; `spare` blocks more than any needs."""
    draw, cached = random.Random(seed), "cached" in settings
    size = settings.setdefault("block_size", draw.choice((1, 3, 4)))
    seats = settings.setdefault("max_num_seqs", draw.randrange(1, 6))
    settings.setdefault("max_batch_tokens", seats + draw.choice((0, 1, 4, 20)))
    settings.setdefault("policy", draw.choice(list(POLICIES)))
    program, largest = ["cache 12"] * cached, 1
    for index in range(draw.randrange(2, 6)):
        prompt, wanted = draw.randrange(1, 20), draw.randrange(1, 9)
        n, shared = draw.choice((1, 1, 2, 3)), min(prompt, draw.choice((0, 8, 12)))
        more = f"x{min(n, seats)}" * (n > 1) + f"~{shared}" * (cached and shared > 0)
        program += [f"add {prompt}>{wanted}{more}", *["step"] * draw.choice((0, 0, 1, 3))]
        largest = max(largest, -(-(prompt + wanted) // size))
        if draw.random() < 0.15:
            program.append(f"leave {letter(draw.randrange(index + 1))}")
    settings["num_blocks"] = max(largest, 12 * cached) + draw.randrange(spare + 1)
    return settings, ", ".join([*program, "steps"])


def blocks(num_blocks: int, **more) -> dict:
    return dict(num_blocks=num_blocks, **more)


CACHED, SWAP, SEATS = dict(cached=True), dict(host_blocks=8), dict(max_num_seqs=4)
SHORTEST = dict(policy="shortest prompt first")
KINDS: tuple[dict[str, Any], ...] = (
    {},
    dict(host_blocks=2),
    dict(host_blocks=9),
    dict(cached=True, max_num_seqs=8),
)
TIGHT = [random_load(seed, spare=3, **KINDS[seed % 4]) for seed in range(80)]
WHO = "who gave way in the step that differs or before it, and what did it keep?"
LOADS = Group("80 random loads, short of blocks", TIGHT, WHO)


# ── 06.1 A chunk of a prompt ──────────────────────────────────────────────────

# A program is (block size, budget, requests); each asks in turn, with the budget that is left,
# for a place in one plan. A request is (prompt, output, computed), and samples if they are many.


def chunks(mine, program, log: Log) -> None:
    size, budget, *requests = program
    config = minikv.EngineConfig(num_blocks=160, block_size=size)
    bench, plan = SchedulerBench(config, mine.Scheduler), Plan()
    scramble(bench.pool, 6)
    log(f"blocks of {size}")
    for prompt, written, computed, *n in requests:
        sequence = bench.sequence(prompt, written + 4, n=n[0] if n else 1)
        sequence.token_ids += bench.alone(sequence)[:written]
        bench.start(sequence, computed)
        sequence.table.grow(3)  # more room than it has tokens
        more = f" and {written} tokens of output" if written else ""
        more += f", {n[0]} samples" if n else ""
        text = f"a prompt of {prompt}{more}, {computed} computed, a budget of {budget}"
        used = log.call(text, bench.scheduler._add_chunk, sequence, budget, plan, see=False)
        log(text, {"tokens used:": plain(used)})
        told: dict[str, Any] = {"planned:": planned(plan), "first slots:": plan.slots}
        told["num_computed:"] = sequence.num_computed
        told["num_decodes of the plan:"] = plan.num_decodes
        told["its tokens:"] = len(sequence.token_ids)
        told["its blocks:"] = len(sequence.table.block_ids)
        told["moves in the plan:"] = len(plan.swap_out + plan.copies + plan.swap_in)
        log(text, told)
        budget -= used if isinstance(used, int) else 0


def random_chunk(seed: int) -> tuple:
    draw = random.Random(seed)
    prompt = draw.randrange(1, 60)
    return (1, 3, 4, 16)[seed % 4], draw.randrange(1, 40), (prompt, 0, draw.randrange(prompt))


scenario("06.1", chunks,
    Group("a prompt within the budget is computed at once",
          [(4, 16, (7, 0, 0)), (4, 16, (16, 0, 0)), (4, 16, (1, 0, 0)), (4, 16, (1, 0, 0, 3))],
          "how much is left to compute?"),
    Group("a longer one is cut", [(4, 16, (50, 0, start)) for start in (0, 16, 32, 48)]
          + [(4, 60, (50, 0, 3)), (4, 5, (50, 0, 3)), (4, 1, (50, 0, 49)), (4, 1, (50, 0, 0))],
          "a chunk is the smaller of two numbers: which two?"),
    Group("no budget, no chunk", [(4, 0, (50, 0, 16)), (4, 0, (1, 0, 0)),
          (4, 7, (7, 0, 0), (5, 0, 0))], "what should be planned when the budget is used up?"),
    Group("output counts, too, when it is computed again",
          [(4, 32, (6, 5, 0)), (4, 2, (6, 5, 8)), (4, 9, (6, 5, 0)), (4, 9, (1, 20, 2))],
          "which list of the sequence holds prompt and output?"),
    Group("the slot of the first token, at any block size",
          [random_chunk(seed) for seed in range(48)], "at which position does the chunk begin?"),
    Group("several in one plan", [(4, 10, (4, 0, 0), (12, 0, 3)),
          (4, 30, (5, 0, 1), (9, 3, 0), (2, 0, 1), (40, 0, 8)),
          (3, 3, (1, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0))],
          "the entries that are already in the plan must stay"),
)  # fmt: skip
scenario("06.1", desk,
    Group("two prompts share a budget of 10, step by step",
          [(dict(max_batch_tokens=10), then("add 12>2 12>2 3>2", "steps"))],
          look="what does `_add_chunk` return, and what does it plan?"),
    LOADS,
)  # fmt: skip


# ── 06.2 Admission ────────────────────────────────────────────────────────────

SIZES = [(size, prompt) for size in (4, 3, 16, 1) for prompt in (7, 37, 1, 4, 16)]
SIZES.sort(key=lambda pair: pair[1] % pair[0] == 0)  # those that fill their blocks come last

scenario("06.2", desk,
    Group("blocks for all of its tokens, at any block size",
          [(blocks(-(-n // size), block_size=size), f"add {n}, admit") for size, n in SIZES],
          "by how many tokens does the table grow?"),
    Group("also for what it wrote before a preemption",
          [({}, "add 6+7>9, admit, steps")] + [(blocks(3), f"hold {held}, add 6+5>7, admit")
          for held in (0, 1, 2)], "by how many tokens does the table grow?"),
    Group("a seat for each sample, or no admission",
          [(SEATS, then(f"run {running}", f"add {asks}", "admit"))
          for running, asks in (("4/2 4/2 4/2", "5"), ("4/2 4/2 4/2 4/2", "5"), ("4 4", "5x2"),
          ("4/2 4/2", "5x3"), ("4/2x3", "5"), ("4/2x3", "5x2"), ("", "5x4"), ("4 4/2x2", "5"),
          ("4 4/2x2", "5x2"))] + [(SEATS, then("add 4x3 4", "step", "add 4", "admit", "steps")),
          (SEATS, then("add 4x2 4x2", "step", "preempt A1", "add 5", "admit", "admit"))],
          "what is counted, and what is it compared with?"),
    Group("a block to spare for each running sequence",
          [(blocks(num_blocks), then(f"run {running}", f"add {prompt}", "admit"))
          for running, prompt, num_blocks in (("", 13, 3), ("3/2 3/2", 11, 6), ("3/2 3/2", 11, 7),
          ("3/2", 9, 5), ("3/2", 9, 4), ("", 11, 3), ("3/2 3/2 3/2", 1, 7), ("3/2 3/2 3/2", 1, 6),
          ("3/2x3", 11, 5))], "the second argument of `_make_free`"),
    Group("what no sequence uses is evicted, and no more than needed",
          [(blocks(6, **CACHED), "cache 16, add 13, admit, steps"),
          (blocks(6, **CACHED), "cache 8, hold 2, add 17, admit"),
          (blocks(6, **CACHED), "cache 8, run 3/2, add 9, admit")],
          "what makes room, and is there a refusal before it is asked?"),
    Group("a hit: share what is cached, allocate blocks for the rest",
          # The second has no room to count them again, the third none to spare.
          [
            (blocks(n, **CACHED), f"cache 12, add {prompt}~12, admit, leave A")
            for n, prompt in ((8, 14), (6, 14), (4, 14), (8, 12), (8, 13))
          ]
          + [(blocks(8, **CACHED), "cache 12, run 12/4, add 14~8, admit, steps")]
          + [(blocks(4, **CACHED), "cache 16, add 13~12, admit")]
          + [(CACHED | dict(min_prefix_tokens=n), "cache 8, add 14~8, admit") for n in (8, 9)],
          look="what does `look_up` return, and how many blocks does the table have before it "
               "grows?"),
    Group("the hit is locked before anything is evicted",
          [(blocks(n, **CACHED), f"cache {hit}, hold {n - hit // 4 - 1}, add {n_all}~{hit}, admit")
          for hit, n, n_all in ((12, 5, 24), (8, 4, 20), (4, 4, 12))],
          "the order of `lock` and `_make_free`"),
    Group("a refusal changes nothing, however often",
          [(blocks(6), "hold 2, add 17, admit, admit, free 2, admit"),
          (blocks(8, **CACHED), "cache 12, hold 3, add 24~12, admit, admit, free 2, admit"),
          (CACHED | dict(max_num_seqs=2), then("run 4/2 4/2", "cache 12", "add 14~12",
          "admit, admit, leave A, admit, leave C")),
          (CACHED | dict(max_num_seqs=2), "cache 12, run 4/2, add 14x2~12, admit, admit"),
          (blocks(6, max_num_seqs=1, **CACHED), "cache 16, run 4/2, add 13, admit, admit")],
          "what happens before each `return False`, and how is it undone?"),
    Group("a swapped-out request comes back to its tokens",
          [(SWAP, "run 14/10, preempt A, admit, steps"),
          (SWAP | CACHED, "cache 8, run 14/10~8, preempt A, admit, steps"),
          (SWAP | blocks(5), "run 14/10, preempt A, hold 2, admit, admit, free 1, admit, steps")],
          "`_begin` does this: read it"),
    LOADS,
)  # fmt: skip


# ── 06.3 The loop ─────────────────────────────────────────────────────────────


def budget(tokens: int, **more) -> dict:
    return dict(max_batch_tokens=tokens, **more)


scenario("06.3", desk,
    Group("one prompt, and then one token per step",
          [({}, "add 5>3, steps"), ({}, "step"), ({}, "add 1>1, step, step")],
          "what is in the plan?"),
    Group("decodes first, then chunks, then admissions",
          [(budget(16), then("add 3>8 2>8", "step", "add 40>3", "add 5>3", "steps")),
          (budget(16), then("run 8 20/8 30/20 9/1", "add 5", "steps"))],
          "each decode takes a token: who may use all that is left, and who comes after?"),
    Group("what is computed again comes in chunks",
          [(budget(8), "add 6+13>30, step, step, step, step, step")],
          "which of the running are decodes?"),
    Group("a step never computes more than the budget",
          [(budget(10), then("add 12>4 12>4 3>4 9>2", "steps")),
          (budget(2, max_num_seqs=2), then("add 1>3 1>5", "step", "add 4", "steps")),
          (budget(1, max_num_seqs=1), then("add 7>3 7>3", "steps")),
          (budget(10), then("add 10>2 3>2", "steps"))],
          "what is subtracted from the budget, and when?"),
    Group("a free seat is taken in the very next step",
          [(SEATS, then("add 2>8 2>2 2>3 2>3 2>6 2>1 2>5 2>7", "steps"))],
          "which request is admitted, and when?"),
    Group("a request that waits is not overtaken",
          [(blocks(8), then("add 16>4", "step", "add 20", "add 1>1", "steps")),
          (dict(max_num_seqs=2), then("add 4>4", "step", "add 4x2", "add 1>1", "steps")),
          (blocks(8), then("run 4 4 4", "add 26", "add 4>2", "step", "add 4>2", "steps"))],
          "what happens after the first refusal?"),
    Group("no request is admitted in a step that preempts",
          # In order of arrival the victim would be the first in the queue, and not fit.
          [
            (blocks(5, **SHORTEST), then("run 8 12", "add 1>1", "step")),
            (blocks(7, **SHORTEST), then("run 8 8/2 12", "add 1>1", "step")),
          ],
          look="what does `_add_decodes` return if it has preempted?"),
    Group("a victim costs no budget", [(blocks(14, **budget(6, **SEATS)),
          then("run 8 40/8 5", "step"))],
          "`_add_decodes` may shorten the list: when is its length the number you need?"),
    Group("a request that has yet to fork is not a decode",
          [(budget(4, **SEATS), "add 5>3x3, steps"), (budget(4, **SEATS), "add 1>3x3, steps"),
          (budget(4, **SEATS), "run 4>3, add 5>3x2, steps"), (SEATS, "run 1/0x3, steps")],
          "`must_fork`: what is planned when one token of its prompt is left?"),
    Group("`running` stays in the policy's order",
          [(dict(policy=policy), then("add 9 6", "step", "add 3", "add 7", "steps"))
          for policy in ("shortest prompt first", "the latest first")],
          "at which place does a sequence join `running`?"),
    Group("any load, any budget, any number of seats",
          [random_load(seed, policy="in order of arrival") for seed in range(100, 140)],
          WHO),
    LOADS,
)  # fmt: skip


# ── 06.4 Preemption ───────────────────────────────────────────────────────────

HOST = dict(num_blocks=80, host_blocks=40)

scenario("06.4", desk,
    Group("recompute: it gives its blocks back and waits",
          [(dict(block_size=size), f"run {request}, preempt A, steps") for size in (4, 1, 3, 16)
          for request in ("9", "20/8", "5/0")], "what does `_release` give back?"),
    Group("it waits at its place in the policy's order",
          [({}, then("run 5 5", "add 5", "add 5", "preempt B", "preempt A", "steps")),
          (SHORTEST, then("run 7", "add 5", "add 9", "preempt A")),
          (dict(policy="the latest first"), then("run 7 7 7", "add 5", "preempt B", "preempt A"))],
          "`waiting` is in the policy's order"),
    Group("it unlocks its cached prefix", [(CACHED, "cache 8, add 11~8, step, preempt A, steps"),
          (CACHED | budget(8), "add 11, step, preempt A, steps")],
          "what does `_release` do besides releasing the table?"),
    Group("swap: its computed blocks move to the host",
          [(HOST | dict(block_size=size), f"run {request}, preempt A, steps")
          for size in (4, 1, 3, 16) for request in ("9", "8", "20/8", "20/9", "33/32")]
          + [(CACHED | SWAP, "cache 8, add 11~8, step, preempt A, steps")]
          + [(SWAP, then("run 9 5 6", "preempt A C", "steps"))],
          "what does a swap plan, and what does it note in the sequence?"),
    Group("no room on the host: recompute",
          [(dict(host_blocks=room), "run 9, preempt A, steps") for room in (2, 3, 1)]
          + [(dict(host_blocks=3), f"run {one}, preempt A, steps") for one in ("20/9", "20/13")]
          + [(dict(host_blocks=5), then("run 9 9", f"preempt {one}", f"preempt {other}", "steps"))
          for one, other in ("AB", "BA")], "when is it a swap, and when not?"),
    Group("nothing computed yet: nothing to move",
          [(SWAP, "run 9/0, preempt A"), (SWAP, "run 9/0, preempt A, admit, step")],
          "at least how many blocks must be in use for a swap?"),
    Group("without a plan nothing can be moved",
          [(SWAP, "run 9, preempt A alone, steps"), ({}, "run 9, preempt A alone, steps"),
          (SWAP, then("run 9 5", "preempt A alone", "preempt B", "steps"))],
          "`plan` may be None: who would make the moves?"),
    Group("a request of several samples", [(SEATS | more, program) for more in ({}, SWAP)
          for program in (then("add 6>6x3", "step", "step", "preempt A1", "steps"),
          then("add 6>6x3", "step", "step", "preempt A0 A2", "steps"),
          "run 6/4x3, preempt A, steps")],
          "what does the sample hold, and what do its siblings hold?"),
    LOADS,
)  # fmt: skip


# ── 06.5 The largest gives way ────────────────────────────────────────────────

SHIFTED = "when the victim leaves the list, which sequences have a slot, and which slot is whose?"
UNDONE = "what did this step do for the victim before?"
GOOD = Words("each request gets its own tokens")


@check("06.5", "tinypy, short of blocks: the oracle's tokens", look=SHIFTED)
def _(mine):
    for num_blocks, swap in ((14, {}), (17, {}), (14, SWAP)):
        try:
            serve_texts(mine.FreesTheMost, num_blocks=num_blocks, **swap)
        except (LookupError, RuntimeError, AttributeError, TypeError, ValueError) as error:
            raise Wrong(f"{num_blocks} blocks: {type(error).__name__} ({error})") from error


def full(prompts: str, *more: str, **settings) -> tuple[dict, str]:
    """Sequences that fill a pool of blocks of 4 to the last block."""
    used = sum(-(-int(one.partition("/")[0]) // 4) for one in prompts.split())
    return blocks(used, **settings), then(f"run {prompts}", *more)


def crowd(mine, program, log: Log) -> None:
    """One step of sequences that fill the pool. Two victims may be right: that is not noted."""
    settings, ops = program
    at = Desk(mine, settings, log, "FreesTheMost")
    for op in ops.split(", "):
        at.do(op)
    running, size = list(at.scheduler.running), at.bench.config.block_size
    decoding = [one for one in running if len(one.token_ids) - one.num_computed == 1]
    asks = next(i for i, one in enumerate(decoding) if one.num_computed % size == 0)
    to_come = decoding[asks:] + [one for one in running if one not in decoding]
    held = {one: len(one.table.block_ids) for one in running}
    largest = {
        name(one)
        for group in (running, to_come)
        for one in group
        if held[one] == max(held[other] for other in group)
    }
    text = f"{name(decoding[asks])} needs a block, and none is free"
    try:
        plan = at.call(text, at.scheduler.schedule)
    except Stop:
        return
    left = at.scheduler.running
    gone, right = [name(one) for one in running if one not in left], sorted(largest)
    found = " or ".join(right) if len(gone) == 1 and gone[0] in right else " and ".join(gone)
    log(text, {"gives way:": Words(found or "none")})
    told: dict[str, Any] = {"wrong slots:": wrong_slots(plan)}
    told["runs, and gets no token:"] = [name(one) for one in left if one not in plan.sequences]
    told["is admitted:"] = [name(one) for one in left if one not in running]
    told["swap:"] = bool(plan.swap_out)
    decodes = [one for one in plan.sequences if one in decoding]
    told["num_decodes, less the decodes:"] = plan.num_decodes - len(decodes)
    log(f"{' and '.join(gone)} gives way, the step computes {planned(plan)}", told)


def served(mine, program, log: Log) -> None:
    """A load from beginning to end. Its steps depend on the victim: noted is what goes wrong."""
    settings, ops = program
    at = Desk(mine, settings, log, "FreesTheMost")
    started: list[Sequence] = []
    for op in [*ops.split(", ")[:-1], *["step"] * MOST]:
        text = at.set_up(op)
        if text is not None:
            log(text, {"result": GOOD})
        elif op == "step" and list(at.scheduler):
            text = f"step {at.bench.num_steps + 1}"
            try:
                plan = at.call(text, at.bench.plan)
            except Stop:
                return
            wrong = wrong_in(plan, at.scheduler)
            if wrong is None:
                started += [one for one in plan.sequences if one not in started]
                at.bench.run(plan)
                wrong = next(filter(None, (wrong_text(at.bench, one) for one in started)), None)
            if wrong is not None:
                log(f"{text} computes {planned(plan)}", {"result": Words(wrong)})
                return
    text, pool = "at the end", at.bench.pool
    if list(at.scheduler):
        log(text, {"result": Words(f"{' '.join(at.there())}: not done after {MOST} steps")})
    else:
        lost = pool.num_blocks - pool.num_free
        log(text, {"result": Words(f"{lost} blocks are still held") if lost else GOOD})


def wrong_in(plan: Plan, scheduler) -> str | None:
    """What an engine could not do with this plan."""
    for who, slot in wrong_slots(plan).items():
        return f"the token of {who} goes to slot {slot}"
    for one in scheduler.running:
        decodes = len(one.token_ids) - one.num_computed == 1 and not one.must_fork
        if decodes and one not in plan.sequences:
            return f"{name(one)} runs, and gets no token"
    return None if plan.sequences else "no sequence gets a token"


def wrong_text(bench: SchedulerBench, one: Sequence) -> str | None:
    found, right = one.output_ids, bench.alone(one)[: one.num_output]
    if found == right:
        return None
    return f"{name(one)} writes {text_of(found)}, alone it would write {text_of(right)}"


scenario("06.5", crowd,
    Group("every token of the step goes to a block of its own sequence",
          # In the first, A and B have room for their next token. C has none, and A holds the most.
          [full("14 5 8"), full("14 6 8"), full("6 14 8"), full("14 6 5 8"), full("13 9 4 4"),
           full("5 6 8"), full("9 5 14 6 8 7"), full("14 5 8", host_blocks=8),
           full("6 8 22", "add 1", **SHORTEST), full("14 5 8", "add 3"),
           full("8 6 22", "add 2", "add 6", **SHORTEST), full("22 6 8", "add 9", **SHORTEST),
           full("6 22 8", "add 5", "add 3", host_blocks=12)],
          look=SHIFTED),
    Group("the sequence that holds the most blocks gives way",
          [full("8 14 4 6"), full("8 6 14 5"), full("8 5 6 14"), full("8 6 14/4 12/9"),
           full("8 6 5/1 14/4"), full("8 14 18/2"), full("8 14 5/1 6/2"), full("16 17/2 4")],
          look="how is the victim chosen?"),
)  # fmt: skip
HOSTS: tuple[dict[str, Any], ...] = ({}, dict(host_blocks=3), dict(host_blocks=12))
scenario("06.5", served,
    Group("short of blocks: each request gets its own tokens",
          [random_load(seed, spare=3, policy="in order of arrival", **HOSTS[seed % 3])
          for seed in range(60)], UNDONE),
    Group("samples, a small pool, and swap",
          [random_load(seed, spare=2, max_num_seqs=6, policy="in order of arrival", **HOSTS[2])
          for seed in range(200, 290)], UNDONE),
)  # fmt: skip


# ── The reader's parts in the engine ──────────────────────────────────────────


@cache
def oracle(text: str, num_tokens: int) -> list[int]:
    lm = tinypy()
    return lm.generate_naively(lm.encode(text), num_tokens)


def serve_texts(scheduler: type, texts=TEXTS[:3], new: int = 16, **config) -> minikv.Engine:
    """tinypy with this scheduler. Raises Wrong if the tokens are not the oracle's, if not all are
    there after 400 steps, or if an invariant is broken after one of them."""
    lm, values = tinypy(), SMALL | dict(prefix_cache=False) | config
    values["preemption"] = "swap" if "host_blocks" in config else "recompute"
    engine = minikv.Engine(lm, minikv.EngineConfig(**values), scheduler=scheduler)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    ids = [engine.add_request(lm.encode(text), params) for text in texts]
    outputs: dict[int, list[int]] = {}
    steps, broken = 0, None
    while engine.has_unfinished:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
        steps += 1
        try:
            engine.check()
        except AssertionError as error:
            broken = broken or f"after step {steps}: {error}"
        if steps == 400:
            raise Wrong(f"{len(texts)} requests of {new} tokens are not done after {steps} steps")
    for text, request_id in zip(texts, ids, strict=True):
        found, right = outputs[request_id], oracle(text, new)
        witness(found)
        if found != right:
            raise Wrong(
                f"{text!r} continues with {lm.decode(found)!r}, expected {lm.decode(right)!r}"
            )
    if broken:
        raise Wrong(broken)
    return engine


@runs_model("06.1", "06.2", "06.3", "06.4", "06.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on the reader's scheduler, short of blocks: by recompute, by swap, and with the
    other choice of victim."""
    found = []
    for how, scheduler, more in (
        ("recompute", mine.Scheduler, {}),
        ("swap", mine.Scheduler, dict(host_blocks=12)),
        ("the largest gives way", mine.FreesTheMost, {}),
    ):
        try:
            engine = serve_texts(scheduler, TEXTS, num_blocks=14, max_batch_tokens=12, **more)
        except Wrong as wrong:
            raise AssertionError(f"{how}: {wrong.what}") from wrong
        found.append(engine.stats())
    recompute, swap, largest = found
    return (
        f"{len(TEXTS)} requests of 16 new tokens in a pool of 14 blocks of 4 and a budget of 12 "
        f"tokens a step, the oracle's tokens: {recompute.preemptions} preemptions by recompute; "
        f"{swap.preemptions} with swap, {swap.swaps_out} to the host and {swap.swaps_in} back; "
        f"{largest.preemptions} where the largest gives way."
    )
