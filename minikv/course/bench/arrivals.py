"""Requests that arrive at random: static batches, continuous ones, and those with a prefix cache.

The workload of notebook 06, with answers twice as long: every request begins with one of four
system prompts. How many arrive per second is a multiple of what static batches serve on this
machine, which is measured first. Each way must give the same tokens, and the shortest requests
the oracle's.
"""

import argparse

import minikv
from minikv.cluster.simulate import percentile
from minikv.course.arguments import positive
from minikv.course.bench.harness import BenchTable, Spread, over
from minikv.course.chapters.ch06_continuous_batching.batching import compare, static_rate
from minikv.course.workloads.workload import shared_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive, default=48, help="default: %(default)s")
    parser.add_argument(
        "--load", type=float, default=3.0,
        help="arrivals per second, over what static batches serve; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--seats", type=positive, default=12, help="max_num_seqs")
    parser.add_argument(
        "--attention", default="torch", choices=("auto", "cpu", "torch", "triton"),
        help="default: %(default)s, as in notebook 06",
    )  # fmt: skip


def run(args: argparse.Namespace) -> BenchTable:
    lm = minikv.load("tinypy")
    config = minikv.EngineConfig(max_num_seqs=args.seats, attention=args.attention)
    rate = args.load * static_rate(lm, shared_prompts(lm, args.requests), config)
    jobs = shared_prompts(lm, args.requests, rate=rate)
    comparison = compare(lm, jobs, config, repeats=args.repeats, progress=True)
    notes = [comparison.caption, f"attention: {args.attention}; {rate:.1f} arrivals per second"]
    table = BenchTable("serving: static and continuous batches", args.repeats, notes)
    slowest = next(iter(comparison.runs.values()))
    for way, runs in comparison.runs.items():
        row = {
            "way": way,
            "requests/s": Spread([run.requests_per_second for run in runs]),
            "over static": over([run.seconds for run in slowest], [run.seconds for run in runs]),
        }
        for what in ("latencies", "times_to_first_token"):
            for percent in (50, 99):
                name = f"{'latency' if what == 'latencies' else 'first token'} P{percent}, s"
                row[name] = Spread([percentile(getattr(run, what), percent) for run in runs])
        row["seats filled"] = Spread([run.seats_filled for run in runs])
        table.add(row)
    return table
