"""Real workers beside the simulator: the same conversations, at the same times.

Each worker is an engine in a process with one core, as `serve --replicas` starts them. Three
figures come out: how far the simulator is off, what is lost when two workers share the work of one,
and the hit rate with a store behind workers whose requests come in turns. A worker fetches only
what it would compute more slowly, and tinypy computes quickly: so the store finds little for it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from minikv import EngineConfig, SamplingParams
from minikv.cluster.actors import ray_workers
from minikv.cluster.front import Front, Stream
from minikv.cluster.local_server import local_server
from minikv.cluster.routing import ByPrefix, RoundRobin, Router
from minikv.cluster.simulate import Arrival, StepSeconds, percentile, simulate
from minikv.course.bench.harness import Aim, BenchTable
from minikv.course.workloads.workload import Job, conversations, write_code
from minikv.language_model import LanguageModel

CONFIG = EngineConfig(num_blocks=4096)
TALKS, TURNS = 6, 4  # conversations per worker, and their length
LOAD = 0.5  # of what a worker can compute, by the simulator's costs
EFFICIENCY = 0.85  # of N workers, in shares of N times one
PROMPT, OUTPUT, AT_ONCE = 256, 128, 24  # of the throughput: tokens, and requests per worker


class ServedJobs(NamedTuple):
    """What became of jobs on real workers."""

    streams: list[Stream]
    busy: list[float]  # seconds of each worker
    hit_tokens: int
    seconds: float


def serve(front: Front, jobs: list[Job]) -> ServedJobs:
    """Send each job when it arrives, and wait for all."""
    before = _counts(front)
    started, streams = time.monotonic(), []
    for job in jobs:
        time.sleep(max(0.0, started + job.arrival - time.monotonic()))
        params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
        streams.append(front.submit(job.prompt_ids, params))
    for stream in streams:
        for _ in stream:
            pass
    seconds = time.monotonic() - started
    after = _counts(front)
    busy = [new[0] - old[0] for new, old in zip(after, before, strict=True)]
    hits = sum(new[1] - old[1] for new, old in zip(after, before, strict=True))
    return ServedJobs(streams, busy, hits, seconds)


def _counts(front: Front) -> list[tuple[float, int]]:
    """(busy seconds, hit tokens) of each worker so far."""
    stats = [lane.stats for lane in front.lanes]
    return [
        (one.model_seconds + one.host_seconds, one.hit_tokens) if one is not None else (0.0, 0)
        for one in stats
    ]


def add_rows(
    table: BenchTable,
    numbers: list[int],
    lm: LanguageModel,
    costs: StepSeconds,
    arrivals_of_jobs: Callable[[list[Job]], list[Arrival]],
    block_size: int,
) -> None:
    """For each number of workers a row of the simulator and one of the workers, by prefix; for the
    largest number also those that know nothing of prefixes, without and with a store."""
    alone: float | None = None
    for number in sorted(numbers):
        talks = conversations(lm, TALKS * number, turns=TURNS, real_answers=False)
        jobs = spread_out(talks, number, costs)
        arrivals = arrivals_of_jobs(jobs)
        report = simulate(
            arrivals, ByPrefix(number, block_size), costs,
            cache_blocks=CONFIG.num_blocks, chunk=CONFIG.max_batch_tokens,
            max_num_seqs=CONFIG.max_num_seqs,
        )  # fmt: skip
        table.add(
            {
                "workers": number,
                "routing": "by prefix, simulated",
                "hit rate": report.hit_rate,
                "TTFT P50, ms": 1e3 * report.ttft(50),
                "TTFT P99, ms": 1e3 * report.ttft(99),
                "TBT P50, ms": 1e3 * report.tbt(50),
                "busiest / mean": report.imbalance,
            }
        )
        num_blocks = sum(len(one.names) for one in arrivals)
        with cluster(number, ByPrefix, CONFIG) as front:
            row = measured(serve(front, jobs), jobs, num_blocks * block_size)
            rate = throughput(front, lm, number)
        alone = rate / number if alone is None else alone
        goal = Aim("tokens per s", ">=", EFFICIENCY * number * alone) if number > 1 else None
        table.add({"workers": number, "routing": "by prefix", **row, "tokens per s": rate}, goal)
    if number == 1:
        return
    with cluster(number, RoundRobin, CONFIG) as front:
        row = measured(serve(front, jobs), jobs, num_blocks * block_size)
    table.add({"workers": number, "routing": "round robin", **row})
    with local_server("1 GiB") as server:
        config = replace(CONFIG, store=server.url, host_blocks=CONFIG.num_blocks)
        with cluster(number, RoundRobin, config) as front:
            row = measured(serve(front, jobs), jobs, num_blocks * block_size)
    table.add({"workers": number, "routing": "round robin, a store", **row})


@contextmanager
def cluster(number: int, policy: type[Router], config: EngineConfig) -> Iterator[Front]:
    with ray_workers(number, "tinypy", config) as workers, Front(workers, policy, 1000) as front:
        yield front


def measured(served: ServedJobs, jobs: list[Job], num_tokens: int) -> dict[str, float]:
    """A row. `num_tokens`: in whole blocks of the prompts."""
    times = [stream.times for stream in served.streams]
    firsts = [first - taken for taken, first, _ in times]
    means = [
        (ended - first) / (job.max_tokens - 1)
        for job, (_, first, ended) in zip(jobs, times, strict=True)
        if job.max_tokens > 1
    ]
    return {
        "hit rate": served.hit_tokens / num_tokens,
        "TTFT P50, ms": 1e3 * percentile(firsts, 50),
        "TTFT P99, ms": 1e3 * percentile(firsts, 99),
        "TBT P50, ms": 1e3 * percentile(means, 50),
        "busiest / mean": max(served.busy) * len(served.busy) / sum(served.busy),
    }


def spread_out(jobs: list[Job], number: int, costs: StepSeconds) -> list[Job]:
    """The same, over as long a time as gives each worker `LOAD` of what it can compute, if nothing
    is found in a cache and nothing decoded together."""
    work = sum(
        len(job.prompt_ids) * costs.prefill + job.max_tokens * (costs.start + costs.decode)
        for job in jobs
    )
    factor = work / (number * LOAD) / max(job.arrival for job in jobs)
    return [job._replace(arrival=job.arrival * factor) for job in jobs]


def throughput(front: Front, lm: LanguageModel, number: int) -> float:
    """Output tokens per second, of requests that share nothing and are all there at the start."""
    jobs = [
        Job(write_code(lm, PROMPT, f"{number} workers, request {i}"), OUTPUT)
        for i in range(AT_ONCE * number)
    ]
    return len(jobs) * OUTPUT / serve(front, jobs).seconds
