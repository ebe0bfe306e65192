"""Where the time of a compiled decode step goes, and how near it comes to what the machine can do.

Products and attention are timed alone, on all threads, over the same weights and blocks. Their
limits are measured in the same round: the rate at which a product runs whose numbers stay in the
second cache, and the rates at which the same blocks, and weights and blocks by turns, are only
read. `limit` is the products' arithmetic and the blocks, or all that is read, whichever takes
longer, and `% of limit` is what a whole step reaches of it. What is left of a step beside host,
products and attention is `rest`. `serial` is the share of a step in which one thread of the program
works alone. From it and the host's time follows, by Amdahl's law, how many times as fast as here a
step can be `on 4 cores`, on 8 and on 16. `alone` is how many steps went on one thread, because the
machine was found busy.
"""

import argparse
from typing import Any

import torch

import minikv
from minikv.course.arguments import positive
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, take_steps
from minikv.ring import with_config

GOALS = {1: 50, 8: 60, 32: 60, 64: 60}  # % of the limit, by batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 8, 32, 64))
    parser.add_argument("--context", type=positive, default=128, help="tokens of each sequence")
    parser.add_argument("--steps", type=positive, default=32, help="steps timed in a repeat")


def run(args: argparse.Namespace) -> BenchTable:
    title = f"step: parts of a decode step in ms, {args.context} tokens of context"
    from minikv.course.bench.step_parts import Threads, parts  # needs Numba

    table = BenchTable(title, args.repeats)
    total = (args.repeats + 1) * args.steps
    lm = with_config(minikv.load("tinypy"), max_context=args.context + total + 8)
    threads = torch.get_num_threads()
    table.notes.append(f"{threads} threads; a part is timed on all of them, without the others")
    with bar(len(args.batch) * (args.repeats + 1), "step") as progress, Threads(threads) as share:
        for batch in args.batch:
            engine = decoding(lm, batch, args.context, total)
            found: dict[str, list[float]] = {}
            for round_ in range(args.repeats + 1):
                of_round = parts(engine, share, args.steps)
                for name, value in of_round.items() if round_ else ():  # the first is the warm-up
                    found.setdefault(name, []).append(value)
                progress.update()
            row: dict[str, Any] = {"batch": batch}
            alone = f"{sum(found.pop('alone'))} of {args.repeats * args.steps}"
            row |= {name: Spread(values) for name, values in found.items()} | {"alone": alone}
            goal = GOALS.get(batch)
            table.add(row, Aim("% of limit", ">=", goal) if goal else None)
    return table


def decoding(
    lm: minikv.LanguageModel, batch: int, context: int, steps: int, **settings: Any
) -> minikv.Engine:
    """An engine in which `batch` sequences decode, with `context` tokens halfway. `settings`:
    further ones of EngineConfig."""
    length, rest = max(context - steps // 2, 1), 24
    lengths = [length + steps + rest] * batch  # a block more of each: the scheduler keeps some free
    engine = peers.engine_for(lm, lengths, prefix_cache=False, attention="cpu", **settings)
    params = minikv.SamplingParams(max_tokens=steps + 8, ignore_eos=True)
    for prompt in peers.random_prompts(lm, [length] * batch, seed=0):
        engine.add_request(prompt, params)
    take_steps(engine, -(-batch * length // engine.config.max_batch_tokens) + 1)
    return engine
