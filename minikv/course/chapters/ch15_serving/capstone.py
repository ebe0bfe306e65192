"""`python -m minikv capstone`: an engine of your own, under a mixed load.

    python -m minikv capstone --begin mine.py    # a file to start from
    python -m minikv capstone mine.py            # its report on seed 1
    python -m minikv capstone mine.py --seed 7 --report ada.json

Agents pause for tools, chats pause for people, and long documents come in
between. The pool has 2,560 token slots. An answer is in time if its first
token comes within 0.12 s (of an agent), 0.15 s (of a chat) or 1 s (of a
document), and its others every 60 ms on average. Nobody may wait longer than
3 s: an engine that lets somebody wait longer, or writes a wrong token, has no
place in the ranking.

Time is simulated: a step costs 8 ms and 0.7 ms per token computed, whatever the
machine, so that a class can compare. The tokens are tinypy's own, and are
compared with those of naive attention. Your file runs in this process, without
a sandbox.
"""

import argparse
import heapq
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import minikv
from minikv.course.workloads.workload import write_code
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams

BUDGET = 2560  # token slots of the pool, whatever the size of a block
STEP, PER_TOKEN = 0.008, 0.0007  # seconds
FIRST = {"agent": 0.12, "chat": 0.15, "document": 1.0}  # seconds until the first token
BETWEEN = 0.060  # seconds from token to token
LONGEST_WAIT = 3.0  # seconds until anybody's first token
NEAR = 1e-3  # logits that are nearer to each other count as equal
MOST_STEPS = 200_000  # after these an engine counts as stuck

START = '''"""My engine for the capstone. It may hold K and V of at most `num_tokens` tokens.

Change what you like: sizes, the policy, the parts. A part of your own inherits from minikv's.
"""

from minikv import Engine, EngineConfig
from minikv.radix import RadixCache
from minikv.scheduler import Scheduler, first_come_first_served

BLOCK_SIZE = 16


def make_engine(lm, num_tokens):
    config = EngineConfig(
        num_blocks=num_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=16,  # sequences in a step
        max_batch_tokens=512,  # tokens in a step: how long is the longest pause of the others?
        attention="cpu",
        speculative="off",  # or "ngram", "suffix", a Drafter of your own
    )
    return Engine(
        lm,
        config,
        policy=first_come_first_served,  # who is next, and who is preempted first
        prefix_cache=RadixCache,  # what is evicted: `evict`
        scheduler=Scheduler,
    )
'''


class Turn(NamedTuple):
    """What is said next: so many seconds after the last answer, these tokens, and the answer."""

    pause: float
    new_ids: list[int]
    num_new: int


@dataclass
class Talk:
    """A client: when it comes, and its turns. Each prompt holds all that was said before."""

    kind: str  # "agent", "chat" or "document"
    begins: float
    turns: list[Turn]
    said: list[int] = field(default_factory=list)


@dataclass
class Asked:
    """One request as it went, in simulated seconds."""

    kind: str
    came: float
    prompt_ids: list[int]
    num_new: int
    first: float = 0.0
    last: float = 0.0
    token_ids: list[int] = field(default_factory=list)

    @property
    def waited(self) -> float:
        return self.first - self.came

    @property
    def late(self) -> str:
        """By what it is late first of all, "" if it is in time."""
        if self.waited > FIRST[self.kind]:
            return "first"
        between = (self.last - self.first) / max(1, self.num_new - 1)
        return "between" if between > BETWEEN else ""


def load_of(lm: LanguageModel, seed: int) -> list[Talk]:
    """The clients of one seed, in the order in which they come."""
    draw = random.Random(f"capstone {seed}")
    tools, manners = write_code(lm, 128, f"{seed} tools"), write_code(lm, 48, f"{seed} manners")
    numbers = iter(range(10_000))

    def text(low: int, high: int) -> list[int]:
        return write_code(lm, draw.randint(low, high), f"{seed} {next(numbers)}")

    def turns(count: int, pause: float, new: tuple[int, int], answer: tuple[int, int]):
        return [
            Turn(draw.expovariate(1 / pause), text(*new), draw.randint(*answer))
            for _ in range(count)
        ]

    talks = []
    for _ in range(5):
        talk = Talk("agent", draw.uniform(0, 8), turns(10, 2.5, (24, 64), (8, 24)), list(tools))
        talks.append(talk)
    for _ in range(3):
        talk = Talk("chat", draw.uniform(0, 21), turns(6, 4.0, (12, 40), (24, 48)), list(manners))
        talks.append(talk)
    for _ in range(30):
        talks.append(Talk("document", draw.uniform(0, 36), turns(1, 0.1, (350, 550), (8, 16))))
    return sorted(talks, key=lambda talk: talk.begins)


def play(
    engine: Engine, talks: Sequence[Talk], tell: Callable[[str], object] = bool
) -> tuple[list[Asked], float]:
    """Let the clients talk to an engine: all requests, and when the last answer was complete.
    `tell` hears how far it is. Raises RuntimeError if it never is complete."""
    coming = [(talk.begins, place, 0) for place, talk in enumerate(talks)]
    heapq.heapify(coming)
    under_way: dict[int, tuple[Asked, int, int]] = {}
    done: list[Asked] = []
    now, number_of_all = 0.0, sum(len(talk.turns) for talk in talks)
    for _ in range(MOST_STEPS):
        while coming and coming[0][0] <= now:
            came, place, number = heapq.heappop(coming)
            talk = talks[place]
            turn = talk.turns[number]
            talk.said += turn.new_ids
            asked = Asked(talk.kind, came, list(talk.said), turn.num_new)
            params = SamplingParams(max_tokens=turn.num_new, ignore_eos=True)
            under_way[engine.add_request(asked.prompt_ids, params)] = asked, place, number
        if not under_way:
            if not coming:
                return done, now
            now = coming[0][0]
            continue
        before = engine.stats().computed_tokens
        outputs = engine.step()
        now += STEP + PER_TOKEN * (engine.stats().computed_tokens - before)
        for output in outputs:
            asked, place, number = under_way[output.request_id]
            asked.first = asked.first or now
            if output.finish_reason is None:
                continue
            del under_way[output.request_id]
            asked.last, asked.token_ids = now, output.token_ids
            done.append(asked)
            tell(f"{len(done)} of {number_of_all} answered, {now:.1f} simulated seconds")
            talk = talks[place]
            talk.said += output.token_ids
            if number + 1 < len(talk.turns):
                heapq.heappush(coming, (now + talk.turns[number + 1].pause, place, number + 1))
    raise RuntimeError(f"{len(under_way)} requests are not answered after {MOST_STEPS} steps")


def wrong_tokens(lm: LanguageModel, asked: Sequence[Asked]) -> list[str]:
    """What is not the oracle's, in words: the shortest prompts by naive attention itself, the
    others by an engine that keeps nothing from one request to the next."""
    config = minikv.EngineConfig(1024, prefix_cache=False, attention="torch")
    params = [SamplingParams(max_tokens=one.num_new, ignore_eos=True) for one in asked]
    outputs = Engine(lm, config).generate([one.prompt_ids for one in asked], params)
    expected = [output.token_ids for output in outputs]
    shortest = sorted(range(len(asked)), key=lambda i: len(asked[i].prompt_ids))[:3]
    for i in shortest:
        expected[i] = lm.generate_naively(asked[i].prompt_ids, asked[i].num_new)
    told = []
    for one, right in zip(asked, expected, strict=True):
        if one.token_ids == right:
            continue
        pairs = enumerate(zip(one.token_ids, right, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is not None:
            logits = lm.logits([*one.prompt_ids, *right[:at]])[-1]
            if logits.max() - logits[one.token_ids[at]] < NEAR:
                continue  # a tie: sums in another order may choose the other token
        told.append(f"{one.kind} at {one.came:.2f} s: token {at} is not the oracle's")
    return told


def count_evictions(engine: Engine) -> list[int]:
    """Blocks of each eviction from now on."""
    evicted: list[int] = []
    if engine.cache is not None:
        evict = engine.cache.evict

        def counting(num_blocks: int) -> int:
            evicted.append(evict(num_blocks))
            return evicted[-1]

        engine.cache.evict = counting  # type: ignore[method-assign]
    return evicted


def measure(
    lm: LanguageModel, make_engine: Callable, seed: int, tell: Callable[[str], object] = bool
) -> dict:
    """The report of one engine on one seed; `tell` hears how far it is. Raises ValueError for an
    engine that breaks the budget."""
    engine = make_engine(lm, BUDGET)
    config = engine.config
    slots = config.num_blocks * config.block_size
    if slots > BUDGET or config.host_blocks or config.kv_dtype != "auto":
        raise ValueError(
            f"make_engine: at most {BUDGET} token slots, no host blocks and K and V as computed, "
            f"were {slots} slots, {config.host_blocks} host blocks, {config.kv_dtype!r}"
        )
    evicted = count_evictions(engine)
    asked, seconds = play(engine, load_of(lm, seed), tell)
    tell("comparing all tokens with the oracle's")
    good = [one for one in asked if not one.late]
    waits, stats = sorted(one.waited for one in asked), engine.stats()
    wrong, ranked = wrong_tokens(lm, asked), "yes"
    if wrong or waits[-1] > LONGEST_WAIT:
        why = "wrong tokens" if wrong else f"somebody waited longer than {LONGEST_WAIT:g} s"
        ranked = f"no: {why}"
    return {
        "seed": seed,
        "goodput": round(len(good) / seconds, 3),
        "ranked": ranked,
        "in time": len(good),
        "of": len(asked),
        "by kind": {
            kind: f"{sum(one.kind == kind for one in good)} of "
            f"{sum(one.kind == kind for one in asked)}"
            for kind in ("agent", "chat", "document")
        },
        "late by the first token": sum(one.late == "first" for one in asked),
        "late between tokens": sum(one.late == "between" for one in asked),
        "seconds": round(seconds, 2),
        "steps": stats.steps,
        "tokens per step": round(stats.computed_tokens / stats.steps, 1),
        "first token, median": round(waits[len(waits) // 2], 3),
        "first token, longest": round(waits[-1], 3),
        "prompt tokens": sum(len(one.prompt_ids) for one in asked),
        "tokens computed": stats.computed_tokens,
        "hit rate": round(stats.hit_rate, 3),
        "preemptions": stats.preemptions,
        "evicted blocks": sum(evicted),
        "wrong": wrong,
        "slo": {"first": FIRST, "between": BETWEEN, "longest wait": LONGEST_WAIT},
    }


def load_file(path: Path) -> Callable:
    """`make_engine` of a reader's file. Raises ValueError, saying what is missing."""
    space: dict = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), space)
    if not callable(space.get("make_engine")):
        raise ValueError(f"{path}: has no function make_engine(lm, num_tokens)")
    return space["make_engine"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", type=Path, help="yours; without, the file of --begin")
    parser.add_argument("--begin", type=Path, metavar="FILE", help="write a file to start from")
    parser.add_argument("--seed", type=int, default=1, help="of the load (default: %(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write it as JSON")


def run(args: argparse.Namespace) -> int:
    """0; 1 if the engine is not ranked; 2 for a file that cannot be used."""
    told = 0

    def tell(text: str) -> None:
        nonlocal told
        print(f"\r{text:{told}}", end="\r", file=sys.stderr, flush=True)
        told = len(text)

    if args.begin is not None:
        if args.begin.exists():
            print(f"{args.begin} exists already, and is left as it is", file=sys.stderr)
            return 2
        args.begin.write_text(START, encoding="utf-8")
        print(f"Change it, then:  python -m minikv capstone {args.begin}")
        return 0
    try:
        if args.file is None:
            space: dict = {}
            exec(START, space)
            make_engine = space["make_engine"]
        else:
            make_engine = load_file(args.file)
        report = measure(minikv.load("tinypy"), make_engine, args.seed, tell)
        tell("")
    except (OSError, RuntimeError, SyntaxError, ValueError) as error:
        tell("")
        print(error, file=sys.stderr)
        return 2
    for name, value in report.items():
        print(f"{name:24}{value}")
    if args.report is not None:
        text = json.dumps({"file": str(args.file), **report}, indent=2)
        args.report.write_text(text + "\n", encoding="utf-8")
    return 0 if report["ranked"] == "yes" else 1
