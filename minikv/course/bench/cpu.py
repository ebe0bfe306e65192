"""The engine on a CPU: how near it comes to the memory's rate, prefill, a busy machine, and one
order of sums for all rows.

A decode step at batch 1 reads every weight once. If the weights do not fit the processor's
caches, the memory's rate is the limit; it is measured here by a sum over as many bytes. A busy
machine is one where another process keeps each core busy. Attention of a decode step is compared
with a plain read of the same blocks.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

import minikv
from minikv.course.arguments import positive
from minikv.course.bench import peers
from minikv.course.bench.harness import (
    Aim,
    BenchTable,
    Spread,
    bar,
    in_turns,
    over,
    race,
    take_steps,
)
from minikv.course.bench.random_model import random_model
from minikv.course.bench.step import decoding
from minikv.course.workloads.timing import timed

LARGE: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_heads=16, num_kv_heads=8,
    max_context=512,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {  # of SmolLM2-135M, and of Qwen3-0.6B with heads of 64
    "135M": dict(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, max_context=1024,
    ),
    "0.6B": dict(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=32,
        num_kv_heads=16, max_context=1024,
    ),
}  # fmt: skip
SIZES = (32, 128), (8, 4096)  # sequences, tokens of each, for attention
INVARIANT, CONTEXT = (1, 8, 32), 384  # sequences, and tokens of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[], help="in both dtypes")
    parser.add_argument("--layers", type=positive, default=10, help="of the large model")
    parser.add_argument("--prompt", type=positive, default=512, help="tokens to prefill")
    parser.add_argument("--tokens", type=positive, default=32, help="decode steps in a repeat")


def run(args: argparse.Namespace) -> BenchTable:
    from minikv.course.bench.step_parts import Threads, attention_share  # needs Numba

    title = "cpu: memory rate, attention, prefill, a busy machine, batch invariance"
    table = BenchTable(title, args.repeats)
    shapes = [(kv, *size) for kv in ("auto", "bfloat16", "int8") for size in SIZES]
    threads = torch.get_num_threads()
    total = (5 + 11 * len(args.shapes) + len(shapes) + 2 * len(INVARIANT)) * (args.repeats + 1)
    with bar(total, "cpu") as progress, Threads(threads) as share:
        for name in args.shapes:
            for row, aim in in_both_dtypes(name, args, progress):
                table.add(row, aim)
        lm, size = random_model(**LARGE, num_layers=args.layers)
        table.notes.append(f"the large model has {size / 1e6:.0f} MB of weights, in float32")
        reads = {
            "a sum": lambda round_: memory_rate(size) / 1e9,
            "decode": lambda round_: size / decode_seconds(lm, args.tokens) / 1e9,
        }
        found = in_turns(reads, range(args.repeats + 1), progress)
        table.add({"what": "memory read by a sum", "GB/s": Spread(found["a sum"])})
        pairs = zip(found["decode"], found["a sum"], strict=True)
        row = {"what": "decode at batch 1", "GB/s": Spread(found["decode"])}
        row["% of it"] = Spread([100 * decode / memory for decode, memory in pairs])
        table.add(row, Aim("% of it", ">=", 75))

        lm, peer = peers.load_pair("tinypy")
        engine = minikv.Engine(lm, minikv.EngineConfig(prefix_cache=False))
        inputs = [peers.random_prompts(lm, [args.prompt], i) for i in range(args.repeats + 1)]
        one = minikv.SamplingParams(max_tokens=1)
        ways = {
            "minikv": lambda prompts: engine.generate(prompts, one),
            "generate": lambda prompts: peers.generate(peer, prompts, 1),
        }
        times = race(ways, inputs, progress)
        row = {"what": f"prefill of {args.prompt} tokens, over transformers'"}
        row["times"] = times.ratio("generate", "minikv")
        table.add(row, Aim("times", ">=", 1.2))

        shares: dict[str, Callable[[int], float]] = {}
        for kv_dtype, batch, context in shapes:
            lengths, name = [context] * batch, kv_dtype.replace("auto", "float32")
            engine = peers.engine_for(lm, lengths, attention="cpu", kv_dtype=kv_dtype)
            way = partial(attention_share, engine, share, batch, context)
            shares[f"attention, {name}, {batch} × {context:,} tokens, over a read"] = way
        for what, values in in_turns(shares, range(args.repeats + 1), progress).items():
            table.add({"what": what, "% of it": Spread(values)}, Aim("% of it", ">=", 70))

        def busy_over_alone(round_: int) -> float:
            alone = decode_seconds(lm, 8 * args.tokens)
            with busy_cores():
                return decode_seconds(lm, 8 * args.tokens) / alone

        [ratios] = in_turns({"busy": busy_over_alone}, range(args.repeats + 1), progress).values()
        row = {"what": "decode on a busy machine, over alone", "times": Spread(ratios)}
        table.add(row, Aim("times", "<=", 3))

        for batch in INVARIANT:
            decodes: dict[str, Callable[[int], float]] = {}
            for name, wanted in {"usual": False, "invariant": True}.items():
                total = (args.repeats + 1) * args.tokens
                engine = decoding(lm, batch, CONTEXT, total, batch_invariant=wanted)
                decodes[name] = partial(seconds_of, engine, args.tokens)
            found = in_turns(decodes, range(args.repeats + 1), progress)
            row = {"what": f"batch invariant decode at batch {batch}, over the usual one"}
            table.add(row | {"times": over(found["invariant"], found["usual"])})
    return table


def in_both_dtypes(
    name: str, args: argparse.Namespace, progress: tqdm
) -> Iterator[tuple[dict[str, Any], Aim]]:
    """Rows of decode steps and prefill of a model of this shape in bfloat16, each with its aim: how
    many times as fast as in float32, and of the rate of memory."""
    steps, rounds = args.tokens, range(args.repeats + 1)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    models = {one: random_model(**SHAPES[name], dtype=dtype) for one, dtype in dtypes.items()}
    size = models["bfloat16"][1]
    least = {1: 1.8, 8: 1, 32: 1}
    for batch in least:
        ways: dict[str, Callable[[int], float]] = {}
        for one, (lm, _) in models.items():
            engine = decoding(lm, batch, 128, len(rounds) * steps)
            ways[one] = partial(seconds_of, engine, steps)
        ways["memory"] = lambda round_: steps * size / memory_rate(size)
        found = in_turns(ways, rounds, progress)
        what = f"{name} in bfloat16, batch {batch}"
        times = over(found["float32"], found["bfloat16"])
        yield {"what": f"{what}, over float32", "times": times}, Aim("times", ">=", least[batch])
        if batch == 1:
            share = over([100 * one for one in found["memory"]], found["bfloat16"])
            yield {"what": f"{what}, of memory's rate", "% of it": share}, Aim("% of it", ">=", 75)
    ways = {}
    for one, (lm, _) in models.items():
        prompts = [peers.random_prompts(lm, [args.prompt], round_) for round_ in rounds]
        ways[one] = partial(prefill_seconds, peers.engine_for(lm, [args.prompt + 1]), prompts)
    found = in_turns(ways, rounds, progress)
    row = {"what": f"{name} in bfloat16, prefill of {args.prompt} tokens, over float32"}
    yield row | {"times": over(found["float32"], found["bfloat16"])}, Aim("times", ">=", 0.95)


def prefill_seconds(engine: minikv.Engine, prompts: list[list[list[int]]], round_: int) -> float:
    return timed(lambda: engine.generate(prompts[round_], minikv.SamplingParams(max_tokens=1)))[0]


def seconds_of(engine: minikv.Engine, num_steps: int, round_: int) -> float:
    return timed(lambda: take_steps(engine, num_steps))[0]


def decode_seconds(lm: minikv.LanguageModel, num_steps: int) -> float:
    """Seconds per step of one sequence."""
    engine = minikv.Engine(lm, minikv.EngineConfig(num_blocks=64, prefix_cache=False))
    engine.add_request([1, 2, 3], minikv.SamplingParams(max_tokens=num_steps + 3, ignore_eos=True))
    take_steps(engine, 2)
    seconds, _ = timed(lambda: take_steps(engine, num_steps))
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
