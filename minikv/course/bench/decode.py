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
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, Race, bar, positive, race
from minikv.course.bench.llama_cpp import contexts

GOALS = {1: 6, 8: 4, 32: 2.5}  # times the tokens per second of `generate`, by batch
LLAMA_CPP_GOALS = {1: 1.2, 8: 1.4, 32: 1.6}  # and of llama.cpp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=peers.MODELS, help="default: %(default)s")
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 8, 32))
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens of each")
    parser.add_argument("--peer", choices=["llama.cpp"], help="run this, too, if it is installed")


def run(args: argparse.Namespace) -> BenchTable:
    title = f"decode: {args.tokens} tokens after {args.prompt}, minikv against transformers"
    table = BenchTable(title, args.repeats)
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    turns = args.repeats + 1
    with bar(
        (2 + bool(args.peer)) * turns * len(args.batch) * len(args.models), "decode"
    ) as progress:
        for name in args.models:
            lm, peer = peers.load_pair(name)
            for batch in args.batch:
                needed = batch * -(-(args.prompt + args.tokens) // 16)
                config = minikv.EngineConfig(
                    num_blocks=max(512, needed),
                    max_num_seqs=max(64, batch),
                    max_batch_tokens=max(2048, batch),
                )
                engine = minikv.Engine(lm, config)

                def ours(prompts, engine=engine):
                    return [list(output.token_ids) for output in engine.generate(prompts, params)]

                def theirs(prompts, peer=peer):
                    return peers.generate(peer, prompts, args.tokens)

                lengths = [args.prompt] * batch
                inputs = [peers.random_prompts(lm, lengths, seed) for seed in range(turns)]
                contenders: dict[str, Callable] = {"minikv": ours, "generate": theirs}
                with ExitStack() as stack:
                    if args.peer:
                        make = stack.enter_context(contexts(lm.config, peer.state_dict()))
                        cells = -(-(args.prompt + args.tokens) // 256) * 256  # of each sequence
                        other = make(
                            "float32", batch * cells, batch, torch.get_num_threads(), False
                        )
                        contenders[args.peer] = partial(other.generate, max_tokens=args.tokens)
                    result = race(contenders, inputs, progress)
                row = {
                    "model": name,
                    "batch": batch,
                    "minikv tokens/s": result.rate("minikv", batch * args.tokens),
                    "generate tokens/s": result.rate("generate", batch * args.tokens),
                    "ratio": result.ratio("generate", "minikv"),
                    "rows that differ": differing(result, "generate"),
                }
                table.add(row, Aim("ratio", ">=", GOALS[batch]) if batch in GOALS else None)
                if args.peer:
                    row = {"model": name, "batch": batch}
                    row["minikv tokens/s"] = result.rate("minikv", batch * args.tokens)
                    row[f"{args.peer} tokens/s"] = result.rate(args.peer, batch * args.tokens)
                    row["ratio"] = result.ratio(args.peer, "minikv")
                    row["rows that differ"] = differing(result, args.peer)
                    goal = LLAMA_CPP_GOALS.get(batch)
                    table.add(row, Aim("ratio", ">=", goal) if goal else None)
    return table


def differing(result: Race, peer: str) -> str:
    return peers.count_differing(result.results["minikv"], result.results[peer])
