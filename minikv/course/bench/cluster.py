"""Many workers, simulated: hit rate, time to first token and balance, by routing policy.

Nothing is computed but times. What a step costs is measured on this machine with tinypy, or taken
from a data sheet for Llama 3.1 8B on an H100 (`--costs h100`; not measured). The requests are
conversations that are made up, or those of a trace (`--trace`). A trace in Mooncake's format tells
which prompts begin alike; the first line is what one cache for everything would find. A trace in
Azure's format tells lengths and times alone, so its requests are routed by load, with prefill and
decode together and apart.

Without a trace, two more rows are measured, not simulated: a prefix from the shared store, over
computing it (`minikv.course.bench.cluster_store`).

With `--real 1 2` that many real workers serve conversations, beside the simulator: see
`minikv.course.bench.cluster_real`. That needs `minikv[distributed]` and a core for each worker.
With `--peer sglang-router`, if it is installed, that router and ours send the same conversations to
workers of `--workers`.
"""

import argparse
from collections.abc import Sequence as Seq
from statistics import mean, median

import torch

import minikv
from minikv.cluster.routing import EVERY_POLICY, ByOwnPrefix, LeastLoaded, Name, Router
from minikv.cluster.simulate import Arrival, FleetReport, NetworkLink, StepSeconds, simulate
from minikv.course.arguments import positive
from minikv.course.bench.harness import Aim, BenchTable
from minikv.course.chapters.ch07_radix_prefix_cache.block_ids import ids_of_jobs, ids_of_trace
from minikv.course.chapters.ch13_distributed_kv.fleet import best_hit_rate
from minikv.course.workloads.timing import timed
from minikv.course.workloads.workload import Job, conversations, read_trace
from minikv.language_model import LanguageModel

BLOCK_OF_A_TRACE = 512  # tokens, in Mooncake's traces
BLOCK = 16
SYSTEM = 64  # tokens that all made-up conversations begin with

# Llama 3.1 8B in bfloat16 (Grattafiori et al., 2024, table 3) on an H100 SXM by NVIDIA's data
# sheet: 3.35 TB/s, and half of its 989 TFLOP/s for a prefill.
WEIGHTS, BYTES_PER_TOKEN = 8.03e9, 131_072
BANDWIDTH, FLOPS = 3.35e12, 989e12 / 2
NETWORK = 50e9  # bytes per second: 400 Gbit/s, the link of such a machine's network card


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=positive, nargs="+", default=(1, 4, 16, 64))
    parser.add_argument("--trace", help="jsonl as Mooncake's, or csv as Azure's; default: made up")
    parser.add_argument(
        "--costs", choices=("tinypy", "h100"), default="tinypy",
        help="of a step: tinypy here, or an 8B model by data sheet (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--real", type=positive, nargs="+", metavar="N", help="real workers beside simulated ones"
    )
    parser.add_argument("--peer", choices=["sglang-router"], help="its routing beside ours")
    parser.add_argument(
        "--hidden", type=positive, default=512,
        help="of the model whose prefix comes from the store (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--layers", type=positive, default=8, help="likewise (%(default)s)")
    parser.add_argument("--length", type=positive, default=900, help="of that prefix, in tokens")
    parser.add_argument("--cache-blocks", type=positive, help="of each worker (default: no bound)")


def run(args: argparse.Namespace) -> BenchTable:
    lm = minikv.load("tinypy")
    if args.real:
        return run_real(args.real, lm)
    if args.peer:
        return run_peer(args.workers, lm)
    block_size = BLOCK_OF_A_TRACE if args.trace else BLOCK
    arrivals = arrivals_of(args.trace) if args.trace else made_up(lm, max(args.workers))
    if args.costs == "tinypy":
        costs, note = measured_costs(lm), "tinypy, measured here"
        per_token = lm.config.kv_bytes_per_token(torch.float32)
    else:
        costs = costs_of_an_h100(mean(one.num_tokens for one in arrivals))
        note, per_token = "by data sheet, not measured", BYTES_PER_TOKEN
    link = NetworkLink(1e-3, NETWORK, block_size * per_token)
    best = best_hit_rate(arrivals)
    table = BenchTable("cluster: many workers, simulated", repeats=1)
    table.notes += [
        f"{len(arrivals):,} requests in blocks of {block_size}; one cache without a bound finds "
        f"{best:.3f} of all blocks",
        costs_note(costs, note),
    ]
    caches = dict(cache_blocks=args.cache_blocks)
    for number in args.workers:
        policies = EVERY_POLICY if best > 0 else {"least loaded": LeastLoaded}
        for name, policy in policies.items():
            report = simulate(arrivals, policy(number, block_size), costs, **caches)
            add(table, number, name, report, best if policy is ByOwnPrefix else None)
        if best > 0:
            router: Router = LeastLoaded(number, block_size)
            report = simulate(arrivals, router, costs, store=link, **caches)
            add(table, number, "least loaded, a store", report, None)
        if number > 1:
            name, last = list(policies.items())[-1]
            router, half = last(number - number // 2, block_size), number // 2
            report = simulate(
                arrivals, router, costs, decode_workers=half, hand_over=link, **caches
            )
            add(table, number, f"{name}, half of them decode", report, None)
    if not args.trace:
        measure_store(table, args)
    return table


def measure_store(table: BenchTable, args: argparse.Namespace) -> None:
    from minikv.course.bench import cluster_store  # here, because it needs a server

    try:
        cluster_store.add_rows(table, args)
    except (ImportError, OSError, RuntimeError) as error:
        table.notes.append(f"no rows of a prefix from the store: {error}")


def run_real(numbers: list[int], lm: LanguageModel) -> BenchTable:
    from minikv.course.bench import cluster_real  # here, because only this needs Ray

    table = BenchTable("cluster: real workers beside simulated ones", repeats=1)
    costs = measured_costs(lm)
    table.notes.append(costs_note(costs, "tinypy, measured here"))
    try:
        cluster_real.add_rows(table, numbers, lm, costs, arrivals_of_jobs, BLOCK)
    except (ImportError, OSError, RuntimeError) as error:  # Ray or the store's server is missing
        raise ValueError(error) from error
    return table


def run_peer(numbers: Seq[int], lm: LanguageModel) -> BenchTable:
    from minikv.course.bench import cluster_peer  # here, because only this needs HTTP

    table = BenchTable("cluster: routers before workers in this process", repeats=1)
    try:
        for number in numbers:
            cluster_peer.add_rows(table, number, lm)
    except (ImportError, RuntimeError) as error:
        raise ValueError(error) from error
    return table


def costs_note(costs: StepSeconds, where: str) -> str:
    return (
        f"a step: {1e3 * costs.start:.2f} ms, {1e6 * costs.prefill:.1f} µs per prompt token, "
        f"{1e6 * costs.decode:.0f} µs per sequence; {where}"
    )


def add(table: BenchTable, number: int, name: str, report: FleetReport, best: float | None) -> None:
    row = {
        "workers": number,
        "routing": name,
        "hit rate": report.hit_rate,
        "TTFT P50, s": report.ttft(50),
        "TTFT P99, s": report.ttft(99),
        "TBT P50, ms": 1e3 * report.tbt(50),
        "TBT P99, ms": 1e3 * report.tbt(99),
        "busiest / mean": report.imbalance,
        "network, GB": report.network_bytes / 1e9,
    }
    table.add(row, Aim("hit rate", ">=", 0.9 * best) if best is not None else None)


def measured_costs(lm: LanguageModel) -> StepSeconds:
    """What a step of the engine takes here: decodes of two batches, and a prompt. What a step takes
    besides its tokens is that of a decode: the line through two prompts would not have it, for a
    long one takes more per token than a short one."""

    def seconds(num_requests: int, num_tokens: int) -> float:
        """Of a prefill step of so many tokens each, or, if they are 0, of a decode step."""
        taken = []
        for _ in range(5):
            engine = minikv.Engine(lm, minikv.EngineConfig(prefix_cache=False))
            params = minikv.SamplingParams(max_tokens=4, ignore_eos=True)
            for _ in range(num_requests):
                engine.add_request([300] * max(num_tokens, 8), params)
            if not num_tokens:
                engine.step()
            taken.append(timed(engine.step)[0])
        return median(taken)

    one, many, prompt = seconds(1, 0), seconds(16, 0), seconds(1, 256)
    decode = max(0.0, (many - one) / 15)
    start = max(1e-6, one - decode)
    return StepSeconds(start, max(1e-9, (prompt - start) / 256), decode)


def costs_of_an_h100(mean_context: float) -> StepSeconds:
    """By arithmetic: a step reads the weights, and K and V of each sequence; a prompt computes."""
    return StepSeconds(
        start=2 * WEIGHTS / BANDWIDTH,
        prefill=2 * WEIGHTS / FLOPS,
        decode=mean_context * BYTES_PER_TOKEN / BANDWIDTH,
    )


def arrivals_of(path: str) -> list[Arrival]:
    """The requests of a trace. Where it does not tell which prompts begin alike, none do."""
    requests = read_trace(path)
    if any(request.hash_ids for request in requests):
        names: list[Seq[Name]] = list(ids_of_trace(requests))
    else:
        sizes = [-(-request.length.prompt // BLOCK_OF_A_TRACE) for request in requests]
        names = [[(index, i) for i in range(size)] for index, size in enumerate(sizes)]
    return [
        Arrival(one.arrival, blocks, one.length.prompt, max(1, one.length.output))
        for one, blocks in zip(requests, names, strict=True)
    ]


def made_up(lm: LanguageModel, most_workers: int) -> list[Arrival]:
    """Conversations of six turns, ten per worker, that begin within a minute. The first block after
    the system prompt names a conversation."""
    jobs = conversations(
        lm, 10 * most_workers, turns=6, shared=SYSTEM, rate=most_workers / 6, real_answers=False
    )
    return arrivals_of_jobs(jobs)


def arrivals_of_jobs(jobs: list[Job]) -> list[Arrival]:
    arrivals = []
    for job, names in zip(jobs, ids_of_jobs(jobs, BLOCK), strict=True):
        session = names[SYSTEM // BLOCK] if len(names) > SYSTEM // BLOCK else None
        arrivals.append(Arrival(job.arrival, names, len(job.prompt_ids), job.max_tokens, session))
    return arrivals
