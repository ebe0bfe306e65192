"""Tokens per second of whole calls, prefill included, against `transformers` `generate`.

Same weights, same float32, same prompts, greedy, key-value caches on both sides, every
repeat with new random prompts. Tokens are compared row by row: where two logits are
equal but for rounding, the two sides may go different ways, and a row then differs.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import minikv
from minikv.course.arguments import positive
from minikv.course.bench import llama_cpp, other_process, peers
from minikv.course.bench.harness import Aim, BenchTable, bar, race

BATCHES = 1, 8, 32
GOALS = {  # times the tokens per second of these, by model and batch
    ("generate", "tinypy"): (6, 4, 2.5), ("generate", "random-8m"): (5, 3, 2),
    ("llama.cpp", "tinypy"): (1.2, 1.8, 2.5), ("llama.cpp", "random-8m"): (1.2, 1.6, 2),
    ("ctranslate2", "tinypy"): (1, 1, 1), ("ctranslate2", "random-8m"): (1, 1, 1),
    ("openvino", "tinypy"): (1, 1, 1), ("openvino", "random-8m"): (1, 1, 1),
}  # fmt: skip
PEERS: dict[str, Callable] = {  # (config, model of `transformers`, batch, tokens of each)
    "llama.cpp": llama_cpp.generator,
    "ctranslate2": other_process.ctranslate2,
    "openvino": other_process.openvino,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=peers.MODELS, help="default: %(default)s")
    parser.add_argument("--batch", type=positive, nargs="+", default=BATCHES)
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens of each")
    parser.add_argument("--peer", choices=PEERS, help="run this, too, if it is installed")


def run(args: argparse.Namespace) -> BenchTable:
    title = f"decode: {args.tokens} tokens after {args.prompt}, minikv against transformers"
    table = BenchTable(title, args.repeats)
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    rounds = args.repeats + 1
    total = (2 + bool(args.peer)) * rounds * len(args.batch) * len(args.models)
    with bar(total, "decode") as progress:
        for name in args.models:
            lm, peer = peers.load_pair(name)
            for batch in args.batch:
                engine = peers.engine_for(lm, [args.prompt + args.tokens] * batch)
                inputs = [peers.random_prompts(lm, [args.prompt] * batch, i) for i in range(rounds)]
                contenders: dict[str, Callable] = {
                    "minikv": partial(peers.ours, engine, params=params),
                    "generate": partial(peers.generate, peer, max_tokens=args.tokens),
                }
                with ExitStack() as stack:
                    if args.peer:
                        made = PEERS[args.peer](lm.config, peer, batch, args.prompt + args.tokens)
                        other = stack.enter_context(made)
                        contenders[args.peer] = partial(other, max_tokens=args.tokens)
                    result = race(contenders, inputs, progress)
                for each in list(contenders)[1:]:
                    row = {"model": name, "batch": batch}
                    row["minikv tokens/s"] = result.rate("minikv", batch * args.tokens)
                    row[f"{each} tokens/s"] = result.rate(each, batch * args.tokens)
                    row["ratio"] = result.ratio(each, "minikv")
                    row["rows that differ"] = peers.count_differing(result.results, each)
                    goals = dict(zip(BATCHES, GOALS.get((each, name), ()), strict=False))
                    goal = goals.get(batch)
                    table.add(row, Aim("ratio", ">=", goal) if goal else None)
    return table
