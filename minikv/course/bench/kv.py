"""Quantised K and V: bytes, batch and speed.

Decode steps over a model of tinypy's shape and weights with room for longer contexts, K and V
filled with random numbers: what is in them does not change how long a step takes. All formats of
a row's context and batch take turns in one run.

`--attention torch` measures PyTorch's way instead, which gathers and dequantises all that a step
reads.
"""

import argparse
from dataclasses import replace
from functools import partial
from itertools import count

import torch

import minikv
from minikv.checkpoint import read_weights
from minikv.course.arguments import positive
from minikv.course.bench.harness import Aim, BenchTable, bar, race, take_steps
from minikv.model import Transformer
from minikv.quant.memory import blocks_in
from minikv.quant.store import QuantisedStore

FORMATS = ("auto", "bfloat16", "int8", "int4")
POOL = "256 MiB"
LONG = 4096  # from this context on, reading K and V is most of a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="default: %(default)s")
    parser.add_argument("--contexts", type=positive, nargs="+", default=(128, 4096))
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 32))
    parser.add_argument("--steps", type=positive, default=8, help="decode steps of a round")
    parser.add_argument("--attention", default="auto", choices=("auto", "cpu", "torch"))


def run(args: argparse.Namespace) -> BenchTable:
    table = BenchTable("kv: quantised K and V", args.repeats)
    table.notes.append(
        f"largest batch: sequences of {LONG:,} tokens in a pool of {POOL}, open blocks included"
    )
    longest = -(-max(args.contexts) // 16) * 16 + (args.repeats + 2) * args.steps
    lm = long_tinypy(longest + 16)
    for name in ("auto", *(one for one in args.formats if one != "auto")):
        for block_size in (16, 32) if name == "int4" else (16,):
            add_memory(table, lm, name, block_size)
    rounds = args.repeats + 1
    with bar(len(args.contexts) * len(args.batch) * len(args.formats) * rounds, "kv") as progress:
        for context in args.contexts:
            for batch in args.batch:
                add_speed(table, lm, args, -(-context // 16) * 16, batch, progress)
    return table


def long_tinypy(max_context: int) -> minikv.LanguageModel:
    """tinypy with room for more positions than it was trained for: for speed alone."""
    short = minikv.load("tinypy")
    config = replace(short.config, max_context=max_context, eos_ids=())
    weights = read_weights(minikv.BUNDLED["tinypy"])
    transformer = Transformer(config, weights, short.device, short.dtype)
    return minikv.LanguageModel("tinypy, longer", transformer, None)


def add_memory(table: BenchTable, lm: minikv.LanguageModel, name: str, block_size: int) -> None:
    config = minikv.EngineConfig(kv_dtype=name, kv_memory=POOL, block_size=block_size)

    def tokens_in_pool(batch: int) -> int:
        """In full blocks; each sequence may have an open one."""
        return blocks_in(replace(config, max_num_seqs=batch), lm.config, lm.dtype) * block_size

    fits = next(batch for batch in count(1) if tokens_in_pool(batch + 1) < (batch + 1) * LONG)
    engine = minikv.Engine(lm, replace(config, kv_memory=None, num_blocks=1))
    bytes_per_token = engine.stats().bytes_per_token
    row = {
        "format": label(name), "block": block_size, "bytes per token": bytes_per_token,
        "largest batch": fits,
        "x tokens": lm.config.kv_bytes_per_token(lm.dtype) / bytes_per_token,
    }  # fmt: skip
    goal = {"int8": 3.5, "int4": 6.0}.get(name)
    table.add(row, Aim("x tokens", ">=", goal) if goal else None)


def add_speed(table, lm, args: argparse.Namespace, context: int, batch: int, progress) -> None:
    engines = {name: decoding_engine(lm, name, args, context, batch) for name in args.formats}
    ways = {name: partial(take_steps, engine, args.steps) for name, engine in engines.items()}
    result = race(ways, range(args.repeats + 1), progress)
    for name in args.formats:
        row = {
            "format": label(name), "context": context, "batch": batch,
            "tokens/s": result.rate(name, batch * args.steps),
            "backend": type(engines[name].attention).__name__,
        }  # fmt: skip
        goal = None
        if "auto" in args.formats and name != "auto":
            row["x float32"] = result.ratio("auto", name)
            goal = Aim("x float32", ">=", 0.95 if context < LONG else 1.0)
            if name == "int8" and context >= LONG and batch >= 32:
                goal = Aim("x float32", ">=", 1.5)
        if name == "int4" and "int8" in args.formats:
            row["x int8"] = result.ratio("int8", name)
            goal = Aim("x int8", ">=", 1) if context >= LONG else goal
        table.add(row, goal)


def label(name: str) -> str:
    return "float32" if name == "auto" else name


@torch.inference_mode()
def decoding_engine(lm, kv_dtype: str, args, context: int, batch: int) -> minikv.Engine:
    """An engine whose sequences have `context` tokens, computed in name only."""
    steps = (args.repeats + 2) * args.steps
    config = minikv.EngineConfig(
        num_blocks=batch * -(-(context + steps) // 16),
        max_num_seqs=batch,
        max_batch_tokens=batch * context,
        prefix_cache=False,
        kv_dtype=kv_dtype,
        attention=args.attention,
    )
    engine = minikv.Engine(lm, config)
    params = minikv.SamplingParams(max_tokens=steps, ignore_eos=True)
    for _ in range(batch):
        engine.add_request([1] * context, params)
    plan = engine.scheduler.schedule()
    sequences = engine.scheduler.commit(plan)
    engine.append(sequences, [1] * len(sequences))
    engine.step()  # returns what was appended, and may compile
    torch.manual_seed(0)
    if not isinstance(engine.store, QuantisedStore):
        engine.store.blocks.normal_()
        return engine
    for part in engine.store.parts.values():
        if part.is_floating_point():
            part.uniform_(0.01, 0.02)
        else:
            part.random_(0, 100)
    return engine
