"""Tokens per second of whole calls, prefill included, against `transformers` `generate`.

Same weights, same float32, same prompts, greedy, key-value caches on both sides, every
repeat with new random prompts. Tokens are compared row by row: where two logits are
equal but for rounding, the two sides may go different ways, and a row then differs.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

import minikv
from minikv.course.bench import ctranslate, peers
from minikv.course.bench.harness import Aim, BenchTable, bar, positive, race
from minikv.course.bench.llama_cpp import contexts

GOALS = {1: 6, 8: 4, 32: 2.5}  # times the tokens per second of `generate`, by batch
PEER_GOALS = {  # and of others
    "llama.cpp": {1: 1.2, 8: 1.8, 32: 2.5},
    "ctranslate2": {1: 1.0, 8: 1.0, 32: 1.0},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=peers.MODELS, help="default: %(default)s")
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 8, 32))
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens of each")
    parser.add_argument("--peer", choices=PEER_GOALS, help="run this, too, if it is installed")


def run(args: argparse.Namespace) -> BenchTable:
    title = f"decode: {args.tokens} tokens after {args.prompt}, minikv against transformers"
    table = BenchTable(title, args.repeats)
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    turns = args.repeats + 1
    total = (2 + bool(args.peer)) * turns * len(args.batch) * len(args.models)
    with bar(total, "decode") as progress:
        for name in args.models:
            lm, peer = peers.load_pair(name)
            for batch in args.batch:
                engine = peers.engine_for(lm, [args.prompt + args.tokens] * batch)
                inputs = [peers.random_prompts(lm, [args.prompt] * batch, i) for i in range(turns)]
                contenders: dict[str, Callable] = {
                    "minikv": partial(peers.ours, engine, params=params),
                    "generate": partial(peers.generate, peer, max_tokens=args.tokens),
                }
                goals = {"generate": GOALS, **PEER_GOALS}
                with ExitStack() as stack:
                    if args.peer == "ctranslate2":
                        other = ctranslate.generator(peer)
                        contenders[args.peer] = partial(other, max_tokens=args.tokens)
                    if args.peer == "llama.cpp":
                        make = stack.enter_context(contexts(lm.config, peer.state_dict()))
                        cells = -(-(args.prompt + args.tokens) // 256) * 256  # of each sequence
                        threads = torch.get_num_threads()
                        context = make("float32", batch * cells, batch, threads, False)
                        contenders[args.peer] = partial(context.generate, max_tokens=args.tokens)
                    result = race(contenders, inputs, progress)
                for each in list(contenders)[1:]:
                    row = {"model": name, "batch": batch}
                    row["minikv tokens/s"] = result.rate("minikv", batch * args.tokens)
                    row[f"{each} tokens/s"] = result.rate(each, batch * args.tokens)
                    row["ratio"] = result.ratio(each, "minikv")
                    row["rows that differ"] = peers.count_differing(result.results, each)
                    goal = goals[each].get(batch)
                    table.add(row, Aim("ratio", ">=", goal) if goal else None)
    return table
