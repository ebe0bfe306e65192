"""One workload on the real engine, served in several ways, with everything recorded.

    config = EngineConfig(max_num_seqs=12)
    rate = 3 * static_rate(lm, workload.shared_prompts(lm, 48), config)  # more than any way serves
    jobs = workload.shared_prompts(lm, 48, rate=rate)
    comparison = compare(lm, jobs, config)
    comparison                                   # in a notebook: the table
    run = comparison.runs["continuous"][0]       # one `Run`: every request, every step
    run = serve(lm, jobs, config, scheduler=Mine)  # or one way alone, also with your parts

`serve` works from outside the engine: it adds a request when its time has come, calls `step`,
and reads the clock before and after.
"""

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from tqdm import tqdm

from minikv.blocks import BlockPool
from minikv.cluster.simulate import percentile
from minikv.config import EngineConfig
from minikv.course.pictures.table import Table
from minikv.course.workloads.running_table import machine
from minikv.course.workloads.timing import no_gc
from minikv.course.workloads.workload import Job, write_code
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.paged import KVStore
from minikv.radix import RadixCache
from minikv.sampling import SamplingParams
from minikv.scheduler import Plan, Scheduler
from minikv.sequence import Sequence


class StaticBatches(Scheduler):
    """Admits only while nothing runs: a batch of all that wait, then none until its longest
    request is done. All prompts of a batch are prefilled in one step, whatever the budget.

    Kinder than many real servers: a finished request costs nothing more, and its answer is
    returned at once; only its seat stays empty.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, cache: RadixCache | None, **parts):
        whole = max(config.max_batch_tokens, config.num_blocks * config.block_size)
        super().__init__(replace(config, max_batch_tokens=whole), pool, cache, **parts)

    def schedule(self) -> Plan:
        self.is_open = not self.running
        return super().schedule()

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        return self.is_open and super()._admit(sequence, plan)


# By name, what is set: fields of EngineConfig, and parts of the Engine.
WAYS: dict[str, dict[str, Any]] = {
    "static batches": {"scheduler": StaticBatches, "prefix_cache": False},
    "continuous": {"prefix_cache": False},
    "continuous + prefix cache": {"prefix_cache": True},
}


# ── What is recorded ─────────────────────────────────────────────────────────────


class Entry(NamedTuple):
    """What a request computed in a step."""

    request_id: int
    kind: str  # "prefill" or "decode"
    num_tokens: int


@dataclass(frozen=True)
class Step:
    """One `engine.step()`. Times are in seconds on the run's clock."""

    start: float
    end: float
    host_seconds: float  # of it, outside the model: scheduling and bookkeeping
    entries: tuple[Entry, ...]  # in the order of the batch
    preempted: tuple[int, ...]  # request ids, before the batch was made
    running: int  # sequences, once the batch was made
    waiting: int
    blocks_held: int  # by running sequences, each counted once; some the prefix cache holds too
    blocks_cached: int  # by the prefix cache alone: could be evicted

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Served:
    """One request of a run. Times are in seconds on the run's clock."""

    job: Job
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)  # when each token was there
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    preemptions: int = 0

    @property
    def first_token(self) -> float:
        return self.token_times[0]

    @property
    def finish(self) -> float:
        return self.token_times[-1]

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.job.arrival

    @property
    def latency(self) -> float:
        """From arrival to the last token."""
        return self.finish - self.job.arrival


@dataclass
class Run:
    """One workload served one way."""

    config: EngineConfig
    served: list[Served]  # by request id, which is the order of arrival
    steps: list[Step]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.steps[-1].end - self.served[0].job.arrival

    @property
    def requests_per_second(self) -> float:
        return len(self.served) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return sum(len(one.token_ids) for one in self.served) / self.seconds

    @property
    def latencies(self) -> list[float]:
        return [one.latency for one in self.served]

    @property
    def times_to_first_token(self) -> list[float]:
        return [one.time_to_first_token for one in self.served]

    @property
    def times_between_tokens(self) -> list[float]:
        """Of all requests, from each token to the next."""
        return [
            later - earlier
            for one in self.served
            for earlier, later in zip(one.token_times, one.token_times[1:], strict=False)
        ]

    @property
    def seats_filled(self) -> float:
        """Share of `max_num_seqs` that computed something, mean over the time of all steps."""
        return self._mean(len(step.entries) for step in self.steps) / self.config.max_num_seqs

    @property
    def holes(self) -> float:
        """Share of `max_num_seqs` that computed nothing while a request waited, likewise."""
        seats = self.config.max_num_seqs
        empty = ((seats - len(step.entries)) * (step.waiting > 0) for step in self.steps)
        return self._mean(empty) / seats

    @property
    def blocks_filled(self) -> float:
        """Share of the pool that running sequences held, likewise."""
        return self._mean(step.blocks_held for step in self.steps) / self.config.num_blocks

    def _mean(self, amounts: Iterable[int]) -> float:
        seconds = [step.seconds for step in self.steps]
        weighed = (a * b for a, b in zip(amounts, seconds, strict=True))
        return sum(weighed) / sum(seconds)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(entry.num_tokens for step in self.steps for entry in step.entries)

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the prefix cache."""
        prompts = sum(len(one.job.prompt_ids) for one in self.served)
        return sum(one.cached_tokens for one in self.served) / prompts

    @property
    def preemptions(self) -> int:
        return sum(one.preemptions for one in self.served)


# ── Serving ───────────────────────────────────────────────────────────────────


def serve(
    lm: LanguageModel,
    jobs: Seq[Job],
    config: EngineConfig | None = None,
    progress: tqdm | None = None,
    **parts,
) -> Run:
    """Serve every job greedily, each up to its `max_tokens`; returns what happened.

    A job is added before the first step that begins after its arrival. The run's clock is real
    time, without idle time (it jumps to the next arrival) and without the time between steps,
    which is the recorder's own. `parts` go to `Engine`: scheduler=, policy=, …
    `progress` advances by 1 with each finished request. Raises ValueError if there are no jobs,
    or for one that the engine refuses.
    """
    if not jobs:
        raise ValueError("jobs: is empty; give at least one")
    jobs = sorted(jobs, key=lambda job: job.arrival)
    engine = Engine(lm, config, **parts)
    watch = Watch(engine)
    coming, served, steps = deque(jobs), [Served(job) for job in jobs], []
    clock = jobs[0].arrival
    with no_gc():
        while coming or engine.has_unfinished:
            if not engine.has_unfinished:
                clock = max(clock, coming[0].arrival)
            while coming and coming[0].arrival <= clock:
                job = coming.popleft()
                params = SamplingParams(
                    max_tokens=job.max_tokens, ignore_eos=True, cache_salt=job.salt
                )
                engine.add_request(job.prompt_ids, params)
            before = engine.stats().host_seconds
            started = perf_counter()
            outputs = engine.step()
            start, clock = clock, clock + perf_counter() - started
            steps.append(watch.step(start, clock, engine.stats().host_seconds - before))
            for output in outputs:
                one = served[output.request_id]
                one.token_times.append(clock)
                if output.finish_reason is not None:
                    one.token_ids = output.token_ids
                    if progress is not None:
                        progress.update()
    for request_id, sequence in watch.sequences.items():
        served[request_id].cached_tokens = sequence.num_cached
        served[request_id].preemptions = sequence.num_preemptions
    return Run(engine.config, served, steps)


class Watch:
    """Looks at an engine's scheduler: what it planned, and what it preempted."""

    def __init__(self, engine: Engine):
        self.pool, self.cache = engine.pool, engine.cache
        self.scheduler = cast(Any, engine.scheduler)  # two of its methods are replaced
        self.sequences: dict[int, Sequence] = {}  # by request id
        self._schedule, self._preempt = self.scheduler.schedule, self.scheduler.preempt
        self.scheduler.schedule, self.scheduler.preempt = self.schedule, self.preempt

    def schedule(self) -> Plan:
        self.preempted: list[int] = []
        self.plan = self._schedule()
        self.queues = len(self.scheduler.running), len(self.scheduler.waiting)
        evictable = self.cache.num_evictable_blocks if self.cache is not None else 0
        self.blocks = self.pool.num_blocks - self.pool.num_free - evictable, evictable
        return self.plan

    def preempt(self, sequence: Sequence, plan: Plan | None = None) -> None:
        self.preempted.append(sequence.request.request_id)
        self._preempt(sequence, plan)

    def step(self, start: float, end: float, host_seconds: float) -> Step:
        """The step that was just made."""
        plan = self.plan
        ids = [sequence.request.request_id for sequence in plan.sequences]
        self.sequences.update(zip(ids, plan.sequences, strict=True))
        kinds = ["decode"] * plan.num_decodes + ["prefill"] * (len(ids) - plan.num_decodes)
        entries = tuple(map(Entry, ids, kinds, plan.num_tokens))
        preempted = tuple(self.preempted)
        return Step(start, end, host_seconds, entries, preempted, *self.queues, *self.blocks)


# ── Comparing ─────────────────────────────────────────────────────────────────


class Comparison(Table):
    """The same jobs, served in several ways. Shows itself as a table.

    `runs`: by way, one per repeat. Raises AssertionError if two runs give different tokens.
    """

    def __init__(self, lm: LanguageModel, runs: Mapping[str, list[Run]]):
        self.runs = dict(runs)
        everything = [(way, run) for way, runs in self.runs.items() for run in runs]
        first_way, first = everything[0]
        for way, run in everything:
            for request_id, one in enumerate(run.served):
                if one.token_ids != first.served[request_id].token_ids:
                    raise AssertionError(
                        f"request {request_id} has other tokens with {way} than with {first_way}"
                    )

        def each(name: str) -> str:
            return " or ".join(
                map(str, sorted({getattr(run.config, name) for _, run in everything}))
            )

        prompt = sum(len(one.job.prompt_ids) for one in first.served)
        output = sum(len(one.token_ids) for one in first.served)
        repeats = len(self.runs[first_way])
        times = f"median of {repeats} runs each (least to greatest)" if repeats > 1 else "one run"
        self.caption = (
            f"{len(first.served)} requests, {prompt:,} prompt and {output:,} output tokens, "
            f"greedy; {each('max_num_seqs')} seats, {each('num_blocks')} blocks of "
            f"{each('block_size')}; {times}. {lm.name}, {machine(lm)}."
        )

    def typical(self, way: str) -> Run:
        """Of the repeats of one way, the one with the median duration (the lower of two)."""
        runs = sorted(self.runs[way], key=lambda run: run.seconds)
        return runs[(len(runs) - 1) // 2]

    def rows(self) -> list[tuple[str, ...]]:
        """The table's text, with its header. A column that is 0 everywhere is left out."""
        columns = {
            "requests per second": lambda runs: _spread(
                [r.requests_per_second for r in runs], ".1f"
            ),
            "output tokens per second": lambda runs: _spread(
                [r.tokens_per_second for r in runs], ",.0f"
            ),
            "latency P50 / P99": lambda runs: _p50_p99([r.latencies for r in runs]),
            "time to first token P50 / P99": lambda runs: _p50_p99(
                [r.times_to_first_token for r in runs]
            ),
            "seats filled": lambda runs: f"{median(r.seats_filled for r in runs):.0%}",
        }
        all_runs = [run for runs in self.runs.values() for run in runs]
        if any(run.hit_rate for run in all_runs):
            columns["prompt tokens from the cache"] = lambda runs: (
                f"{median(r.hit_rate for r in runs):.0%}"
            )
        if any(run.preemptions for run in all_runs):
            columns["preemptions"] = lambda runs: f"{median(r.preemptions for r in runs):.0f}"
            columns["computed tokens"] = lambda runs: (
                f"{median(r.computed_tokens for r in runs):,.0f}"
            )
        cells = [
            (way, *(cell(runs) for cell in columns.values())) for way, runs in self.runs.items()
        ]
        return [("way", *columns), *cells]


def _spread(values: list[float], form: str) -> str:
    """The median, and behind it the least and the greatest, if there are several."""
    text = format(median(values), form)
    if len(values) > 1:
        text += f" ({min(values):{form}} to {max(values):{form}})"
    return text


def _p50_p99(lists: list[list[float]]) -> str:
    halves = (median(percentile(values, percent) for values in lists) for percent in (50, 99))
    return " / ".join(f"{seconds:.2f}" for seconds in halves) + " s"


def static_rate(lm: LanguageModel, jobs: Seq[Job], config: EngineConfig) -> float:
    """Requests per second that static batches serve on this machine if all `jobs` wait at the
    start: a load that is a multiple of it means the same on a slow machine and on a fast one."""
    waiting = [job._replace(arrival=0.0) for job in jobs]
    warm_up(lm, waiting, config)
    config = replace(config, prefix_cache=False)
    return serve(lm, waiting, config, scheduler=StaticBatches).requests_per_second


def warm_up(lm: LanguageModel, jobs: Seq[Job], config: EngineConfig) -> None:
    """The first steps of a process are slower, and compile what is to be compiled."""
    serve(lm, [job._replace(max_tokens=2, arrival=0.0) for job in jobs[:4]], config)


def compare(
    lm: LanguageModel,
    jobs: Seq[Job],
    config: EngineConfig | None = None,
    ways: Mapping[str, Mapping[str, Any]] = WAYS,
    repeats: int = 1,
    oracle: int = 2,
    progress: bool = False,
) -> Comparison:
    """Serve the same jobs in each of `ways`, in turns if there are `repeats`.

    `ways`: by name, settings that differ from `config`, and parts for `Engine`, as in WAYS.
    Raises AssertionError if two runs give different tokens, or if one of the `oracle` shortest
    requests has other tokens than naive attention. `progress`: show a bar.
    """
    config = config or EngineConfig()
    known = {one.name for one in fields(EngineConfig)}
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    warm_up(lm, jobs, config)
    total = len(jobs) * repeats * len(ways)
    with tqdm(total=total, desc="requests", leave=False, disable=not progress) as bar:
        for _ in range(repeats):
            for way, settings in ways.items():
                ours = {name: value for name, value in settings.items() if name in known}
                parts = {name: value for name, value in settings.items() if name not in known}
                runs[way].append(serve(lm, jobs, replace(config, **ours), bar, **parts))
    comparison = Comparison(lm, runs)
    served = next(iter(runs.values()))[0].served
    by_length = sorted(
        range(len(served)), key=lambda id_: len(served[id_].job.prompt_ids + served[id_].token_ids)
    )
    for request_id in by_length[:oracle]:
        one = served[request_id]
        if one.token_ids != lm.generate_naively(one.job.prompt_ids, one.job.max_tokens):
            raise AssertionError(f"request {request_id} has other tokens than the oracle's")
    return comparison


# ── Preemption: compute again, or swap ────────────────────────────────────────


class PreemptionCost(NamedTuple):
    """What a preemption costs a sequence with `num_tokens` in its blocks, one value per repeat."""

    num_tokens: int
    recompute: list[float]  # s, to compute their K and V again: one prefill
    swap: list[float]  # s, to copy their blocks to the host and back


def preemption_costs(
    lm: LanguageModel,
    lengths: Seq[int] = (32, 64, 128, 256, 512, 896),
    block_size: int = 16,
    repeats: int = 5,
) -> list[PreemptionCost]:
    """Measure both on the real model, all lengths in turn; the first round is not counted.

    With the model on a CPU, "host" is a second piece of the same memory, and the swap a copy.
    """
    num_blocks = -(-max(lengths) // block_size)
    config = EngineConfig(
        num_blocks=2 * num_blocks, block_size=block_size, max_num_seqs=1,
        max_batch_tokens=max(lengths), prefix_cache=False, attention="torch",
    )  # fmt: skip
    engine = Engine(lm, config)
    host = KVStore(lm.config, num_blocks, block_size, torch.device("cpu"), lm.dtype)
    text, draw = write_code(lm, max(lengths)), random.Random(0)
    costs = [PreemptionCost(length, [], []) for length in lengths]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with no_gc():
        for turn in range(repeats + 1):
            for cost in costs:
                engine.add_request(text[: cost.num_tokens], params)
                started = perf_counter()
                engine.step()
                recomputed = perf_counter()
                blocks = draw.sample(range(2 * num_blocks), -(-cost.num_tokens // block_size))
                pairs = list(zip(blocks, range(num_blocks), strict=False))
                swapping = perf_counter()
                engine.store.copy_to(host, pairs)
                host.copy_to(engine.store, [(at, block) for block, at in pairs])
                if lm.device.type == "cuda":
                    torch.cuda.synchronize()
                swapped = perf_counter()
                if turn > 0:
                    cost.recompute.append(recomputed - started)
                    cost.swap.append(swapped - swapping)
    return costs
