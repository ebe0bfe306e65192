"""Measure the kernels on this GPU, against their goals: `minikv.course.bench.gpu_goals`.

    python -m minikv bench kernels

Every case is timed in every round, replayed from a CUDA graph and launched one by one,
beside a copy and a matrix product of the same round: a ratio is made from two times of one
round. torch's attention on contiguous K and V of as many bytes is timed as well. Outputs
are poisoned before each timing and compared with the reference after it. The figures are
printed and kept in `results/` beside this file.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from minikv.course.bench import gpu_goals
from minikv.course.bench.gpu_clock import (
    COPIED,
    SIDE,
    Copy,
    CudaClock,
    Product,
    random_values,
    where,
)
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar

COMMAND = gpu_goals.COMMANDS["kernels"]
BATCHES = (16, 24, 32, 48, 64)
CONTEXTS = {"4k": 4096, "8k": 8192}
HEAD_DIMS = (64, 128)


def decode(head_dim: int, batch: int, context: str) -> str:
    """The name of a batch of decodes at contexts of one length, block 16."""
    return f"decode, head dim {head_dim}, batch {batch}, context {context}"


EVEN = {
    decode(head_dim, batch, context): (head_dim, batch, CONTEXTS[context])
    for head_dim in HEAD_DIMS
    for context in CONTEXTS
    for batch in BATCHES
}
SMALL = {decode(64, 8, "4k"): (64, 8, 4096), decode(128, 1, "8k"): (128, 1, 8192)}
FULL = decode(64, 64, "4k")
SKEWED, COARSE, PREFILL = f"{FULL}, skewed lengths", f"{FULL}, block 256", "prefill, head dim 128"


def all_cases() -> dict[str, Any]:
    """What is timed, by name: `minikv.course.bench.kernel_workloads.Case`."""
    from minikv.course.bench.kernel_workloads import (  # not before: without Triton it raises
        Case,
        skewed,
    )

    cases = {
        name: Case(head_dim, (length,) * batch)
        for name, (head_dim, batch, length) in (EVEN | SMALL).items()
    }
    return cases | {
        SKEWED: Case(64, skewed(64 * 4096, 64)),
        COARSE: Case(64, (4096,) * 64, block_size=256),
        PREFILL: Case(128, (8192,), prefill=True),
    }


def measure(cases: Mapping[str, Any], clock: CudaClock, repeats: int) -> dict[str, Any]:
    """Seconds of one launch of each case and the rates of the two peers, one a round:
    "graph", "eager", "torch" and "error" by case; "copy" (bytes/s) and "product" (flops)."""
    from minikv.course.bench.kernel_workloads import DTYPE, Contiguous, Workload

    needed = max(case.num_values(clock.l2_bytes) for case in cases.values())
    needed = max(needed, 2 * COPIED // DTYPE.itemsize, 2 * SIDE**2)
    clock.require_memory(needed * DTYPE.itemsize + 4 * COPIED)  # a copy, queries, outputs
    values = random_values(needed, DTYPE, clock.device)
    peers: dict[str, Copy | Product] = {"copy": Copy(values), "product": Product(values)}
    found: dict[str, Any] = {name: [] for name in peers}
    found |= {how: {name: [] for name in cases} for how in ("graph", "eager", "torch", "error")}

    works = {}
    with bar(len(cases) * (1 + repeats), "kernels") as progress:
        for name, case in cases.items():
            workload = Workload(case, values, clock.l2_bytes)
            runs = {"graph": clock.captured(workload.run), "eager": workload.run}
            if len(set(case.lens)) == 1:
                runs["torch"] = clock.captured(Contiguous(workload, values).run)
            works[name] = workload, runs
            progress.update()
        for _ in range(repeats):
            for name, peer in peers.items():
                found[name].append(peer.rate(clock))
            for name, (workload, runs) in works.items():
                for how, run in runs.items():
                    workload.poison()
                    found[how][name].append(clock.seconds(run) / workload.launches)
                    if how != "torch":
                        found["error"][name].append(workload.check())
                progress.update()
    return found


def figures(cases: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, list[float]]:
    """The figure of each goal, one a round. Those of the kernels are of graph replays."""
    graph, copy = found["graph"], found["copy"]

    def shares(name: str) -> list[float]:
        """Of the copy's rate: bytes of K and V per second over bytes per second."""
        size = cases[name].kv_bytes
        return [size / s / rate for s, rate in zip(graph[name], copy, strict=True)]

    def over(name: str, other: str) -> list[float]:
        return [one / two for one, two in zip(graph[name], graph[other], strict=True)]

    def floors(name: str) -> list[float]:
        return [1 / share for share in shares(name)]

    flops = cases[PREFILL].prefill_flops
    return {
        "decode-64-4k": shares(decode(64, 64, "4k")),
        "decode-64-8k": shares(decode(64, 64, "8k")),
        "decode-128-4k": shares(decode(128, 64, "4k")),
        "decode-128-8k": shares(decode(128, 64, "8k")),
        "floor-64-batch-8": floors(decode(64, 8, "4k")),
        "floor-128-batch-1": floors(decode(128, 1, "8k")),
        "no-cliff": [min(of_round) for of_round in zip(*map(shares, EVEN), strict=True)],
        "skewed": over(SKEWED, FULL),
        "block-size": over(FULL, COARSE),
        "prefill-128-8k": [
            flops / s / rate for s, rate in zip(graph[PREFILL], found["product"], strict=True)
        ],
    }


def timings(cases: Mapping[str, Any], found: Mapping[str, Any], repeats: int) -> BenchTable:
    """What every case took."""
    copy, product = Spread(found["copy"]), Spread(found["product"])
    table = BenchTable("kernels: milliseconds of a launch", repeats)
    table.notes.append(
        f"copy {_scaled(copy, 1e-9)} GB/s, product {_scaled(product, 1e-12)} TFLOP/s"
    )
    for name, case in cases.items():
        row: dict[str, Any] = {"what": name}
        for how in ("graph", "eager", "torch"):
            if found[how][name]:
                row[how] = Spread([1e3 * seconds for seconds in found[how][name]])
        if not case.prefill:
            row["K/V GB/s"] = Spread([case.kv_bytes / s / 1e9 for s in found["graph"][name]])
        row["error"] = max(found["error"][name])
        table.add(row)
    return table


def verdict(found: Mapping[str, list[float]], repeats: int) -> BenchTable:
    table = BenchTable("goals", repeats)
    for name, values in found.items():
        goal = gpu_goals.GOALS[name]
        table.add({"what": goal.text, "figure": Spread(values)},
                  Aim("figure", goal.sign, goal.bound))  # fmt: skip
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> BenchTable:
    """The goals, each with what was reached. Raises ValueError where there is no CUDA GPU."""
    gpu_goals.require_rounds(args.repeats)
    clock = CudaClock(COMMAND)
    cases, here = all_cases(), where()
    found = measure(cases, clock, args.repeats)
    reached = figures(cases, found)
    content = {
        "repeats": args.repeats,
        "goals": gpu_goals.judge(reached),
        "cases": {
            name: {
                "head_dim": case.head_dim,
                "sequences": len(case.lens),
                "tokens": sum(case.lens),
                "longest": max(case.lens),
                "block_size": case.block_size,
                "kv_bytes": case.kv_bytes,
                "regions": case.num_regions(clock.l2_bytes),
            }
            for name, case in cases.items()
        },
        "measured": found,
    }
    path = gpu_goals.save("kernels", here, content, gpu_goals.RESULTS)
    print(f"{timings(cases, found, args.repeats)}\n")
    table = verdict(reached, args.repeats)
    table.notes.append(f"kept in {path}")
    return table


def _scaled(spread: Spread, by: float) -> Spread:
    return Spread([value * by for value in spread.values])
