"""Host time of a decode step: all that happens in `Engine.step` but the model.

The model, the attention and the sampler are stand-ins that return what lies ready, so the
whole step is what remains: schedule, block tables, building the batch, prefix cache, outputs.
Prompts have mixed lengths, so block borders are crossed at different steps.
"""

import argparse
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import minikv
from minikv.course.arguments import positive
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, in_turns, take_steps
from minikv.course.workloads.timing import timed

GOALS = {64: 0.1, 256: 0.3}  # ms per step, by running sequences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=positive, nargs="+", default=(64, 256))
    parser.add_argument("--steps", type=positive, default=256, help="steps timed in a repeat")


def run(args: argparse.Namespace) -> BenchTable:
    title = f"scheduler: host time per step, mean of {args.steps} decode steps"
    table = BenchTable(title, args.repeats)
    with bar((args.repeats + 1) * 2 * len(args.running), "scheduler") as progress:
        for running in args.running:
            ways = {
                name: partial(ms_a_step, running, args.steps, name == "on")
                for name in ("on", "off")
            }
            for name, values in in_turns(ways, range(args.repeats + 1), progress).items():
                row = {"running": running, "prefix cache": name, "ms": Spread(values)}
                table.add(row, Aim("ms", "<=", GOALS[running]) if running in GOALS else None)
    return table


def ms_a_step(running: int, steps: int, cached: bool, seed: int = 0) -> float:
    """Host time of a decode step in ms, mean over `steps`. `cached`: with a prefix cache."""
    engine = decoding_engine(running, steps + 1, cached, seed)
    seconds, _ = timed(lambda: take_steps(engine, steps))
    return 1e3 * seconds / steps


def decoding_engine(running: int, steps: int, cached: bool, seed: int) -> minikv.Engine:
    """An engine over a model that costs nothing, `running` sequences in decode."""
    config = minikv.EngineConfig(
        num_blocks=running * (8 + -(-steps // 16)),
        max_num_seqs=running,
        max_batch_tokens=128 * running,  # every prompt is prefilled in the first step
        prefix_cache=cached,
    )
    draw = random.Random(seed)
    shape = minikv.load("tinypy").config
    engine = minikv.Engine(
        FreeModel(shape, config.max_batch_tokens),
        config,
        attention=FreeAttention,
        sampler=lambda logits, params, draws: [1] * len(logits),
    )
    params = minikv.SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    for _ in range(running):
        length = draw.randint(33, 96)
        prompt = [draw.randrange(1, shape.vocab_size) for _ in range(length)]
        engine.add_request(prompt, params)
    engine.step()
    return engine


class FreeAttention(minikv.TorchAttention):
    def bind(self, batch):
        return None


class FreeModel(minikv.LanguageModel):
    """A language model whose numbers lie ready."""

    def __init__(self, shape: minikv.ModelConfig, max_tokens: int):
        hidden = torch.zeros(max_tokens, 1)
        transformer: Any = SimpleNamespace(
            config=shape,
            device=torch.device("cpu"),
            dtype=torch.float32,
            forward=lambda token_ids, positions, attend: hidden[: len(token_ids)],
            logits=lambda hidden, out=None: hidden,
        )
        super().__init__("stand-in", transformer, None)
