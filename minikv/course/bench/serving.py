"""Requests that arrive at random: static batches, continuous ones, and those with a prefix cache.

The workload of notebook 06: every request begins with one of four system prompts, and the rate
is above what the machine serves. Each way must give the same tokens, and the shortest requests
the oracle's.
"""

import argparse

import minikv
from minikv.course.bench.harness import BenchTable, Spread, positive
from minikv.course.chapters.ch06_continuous_batching.serving import compare, percentile
from minikv.course.measure.workload import shared_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive, default=48, help="default: %(default)s")
    parser.add_argument(
        "--rate", type=float, default=60.0, help="requests per second; default: %(default)s"
    )
    parser.add_argument("--seats", type=positive, default=12, help="max_num_seqs")


def run(args: argparse.Namespace) -> BenchTable:
    lm = minikv.load("tinypy")
    jobs = shared_prompts(lm, args.requests, rate=args.rate)
    config = minikv.EngineConfig(max_num_seqs=args.seats)
    comparison = compare(lm, jobs, config, repeats=args.repeats, progress=True)
    table = BenchTable("serving: static and continuous batches", args.repeats, [comparison.caption])
    slowest = next(iter(comparison.runs.values()))
    for way, runs in comparison.runs.items():
        row = {
            "way": way,
            "requests/s": Spread([run.requests_per_second for run in runs]),
            "over static": Spread(
                [one.seconds / run.seconds for one, run in zip(slowest, runs, strict=True)]
            ),
        }
        for what in ("latencies", "times_to_first_token"):
            for percent in (50, 99):
                name = f"{'latency' if what == 'latencies' else 'first token'} P{percent}, s"
                row[name] = Spread([percentile(getattr(run, what), percent) for run in runs])
        row["seats filled"] = Spread([run.seats_filled for run in runs])
        table.add(row)
    return table
