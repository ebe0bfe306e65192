"""Tokens per second of whole calls, prefill included, against `transformers` `generate`.

Same weights, same float32, same prompts, greedy, key-value caches on both sides, every
repeat with new random prompts. Tokens are compared row by row: where two logits are
equal but for rounding, the two sides may go different ways, and a row then differs.
"""

import argparse

import minikv
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, bar, positive, race

GOALS = {1: 6, 8: 4, 32: 2.5}  # times the tokens per second of `generate`, by batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=peers.MODELS, help="default: %(default)s")
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 8, 32))
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens of each")


def run(args: argparse.Namespace) -> BenchTable:
    title = f"decode: {args.tokens} tokens after {args.prompt}, minikv against transformers"
    table = BenchTable(title, args.repeats)
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    turns = args.repeats + 1
    with bar(2 * turns * len(args.batch) * len(args.models), "decode") as progress:
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
                result = race({"minikv": ours, "generate": theirs}, inputs, progress)
                row = {
                    "model": name,
                    "batch": batch,
                    "minikv tokens/s": result.rate("minikv", batch * args.tokens),
                    "generate tokens/s": result.rate("generate", batch * args.tokens),
                    "ratio": result.ratio("generate", "minikv"),
                    "rows that differ": peers.count_differing(*result.results.values()),
                }
                table.add(row, Aim("ratio", ">=", GOALS[batch]) if batch in GOALS else None)
    return table
