"""Every rung of the course on one request, as in the running table of the notebooks.

All rungs give the same tokens, or there is no table. The last ones are asked several times
at once, and their tokens per second are those of all answers together.
"""

import argparse
from math import inf

import minikv
from minikv.course.bench.harness import BenchTable, Spread
from minikv.course.workloads.running_table import RunningTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> BenchTable:
    lm = minikv.load("tinypy")
    measured = RunningTable(lm, repeats=args.repeats, upto="99", enough=inf)
    table = BenchTable("ladder: one request on every rung", args.repeats, [measured.caption])
    naive = None
    for rung, runs in measured.runs.items():
        speed = Spread([run.answers * len(run.token_ids) / run.seconds for run in runs])
        naive = naive or speed.median
        table.add(
            {
                "rung": rung,
                "tokens/s": speed,
                "over the first": f"{speed.median / naive:.1f} ×",
                "bytes per token": runs[0].kv_bytes_per_token,
                "memory wasted": f"{runs[0].wasted:.1%}" if runs[0].wasted is not None else "–",
            }
        )
    return table
