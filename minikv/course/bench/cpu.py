"""The engine on a CPU: how near it comes to the memory's rate, prefill, and a busy machine.

A decode step at batch 1 reads every weight once. If the weights do not fit the processor's
caches, the memory's rate is the limit; it is measured here by a sum over as many bytes. A busy
machine is one where another process keeps each core busy.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import minikv
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, positive, race
from minikv.course.bench.random_model import random_model
from minikv.course.measure.timing import timed

LARGE: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_heads=16, num_kv_heads=8,
    max_context=512,
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=10, help="of the large model")
    parser.add_argument("--prompt", type=positive, default=512, help="tokens to prefill")
    parser.add_argument("--tokens", type=positive, default=32, help="decode steps in a repeat")


def run(args: argparse.Namespace) -> BenchTable:
    table = BenchTable("cpu: memory rate, prefill, a busy machine", args.repeats)
    with bar(5 * (args.repeats + 1), "cpu") as progress:
        lm, size = random_model(**LARGE, num_layers=args.layers)
        table.notes.append(f"the large model has {size / 1e6:.0f} MB of weights, in float32")
        rate, steps, share = [], [], []
        for _ in range(args.repeats + 1):
            rate.append(memory_rate(size))
            steps.append(decode_seconds(lm, args.tokens))
            share.append(100 * size / steps[-1] / rate[-1])
            progress.update(2)
        row = {"what": "memory read by a sum", "GB/s": Spread([one / 1e9 for one in rate[1:]])}
        table.add(row)
        reads = Spread([size / one / 1e9 for one in steps[1:]])
        row = {"what": "decode at batch 1", "GB/s": reads, "% of it": Spread(share[1:])}
        table.add(row, Aim("% of it", ">=", 75))
        del lm

        lm, peer = peers.load_pair("tinypy")
        engine = minikv.Engine(lm, minikv.EngineConfig(prefix_cache=False))
        inputs = [peers.random_prompts(lm, [args.prompt], i) for i in range(args.repeats + 1)]

        def ours(prompts):
            return engine.generate(prompts, minikv.SamplingParams(max_tokens=1))

        def theirs(prompts):
            return peers.generate(peer, prompts, 1)

        times = race({"minikv": ours, "generate": theirs}, inputs, progress)
        row = {"what": f"prefill of {args.prompt} tokens, over transformers'"}
        row["times"] = times.ratio("generate", "minikv")
        table.add(row, Aim("times", ">=", 1.2))

        ratios = []
        for _ in range(args.repeats + 1):
            alone = decode_seconds(lm, 8 * args.tokens)
            with busy_cores():
                ratios.append(decode_seconds(lm, 8 * args.tokens) / alone)
            progress.update()
        row = {"what": "decode on a busy machine, over alone", "times": Spread(ratios[1:])}
        table.add(row, Aim("times", "<=", 3))
    return table


def decode_seconds(lm: minikv.LanguageModel, num_steps: int) -> float:
    """Seconds per step of one sequence."""
    engine = minikv.Engine(lm, minikv.EngineConfig(num_blocks=64, prefix_cache=False))
    engine.add_request([1, 2, 3], minikv.SamplingParams(max_tokens=num_steps + 3, ignore_eos=True))
    for _ in range(2):
        engine.step()
    seconds, _ = timed(lambda: [engine.step() for _ in range(num_steps)])
    return seconds / num_steps


def memory_rate(num_bytes: int) -> float:
    """Bytes per second of a sum over an array of this size, on torch's threads; best of five."""
    values = torch.ones(num_bytes // 4)
    return num_bytes / min(timed(values.sum)[0] for _ in range(5))


@contextmanager
def busy_cores() -> Iterator[None]:
    """Beside a process per core that never rests."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
