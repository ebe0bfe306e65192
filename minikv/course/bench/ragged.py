"""Requests of mixed lengths: continuous batching against static batches in `transformers`.

All requests are there at the start. `generate` takes them in batches, in order of arrival,
padded on the left; a batch runs until its longest output is done, and only the tokens
that were asked for count. The batch size that serves `generate` best is the peer.
"""

import argparse
import random
from functools import partial

import minikv
from minikv.course.arguments import positive
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, bar, race


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=peers.MODELS, help="default: %(default)s")
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument(
        "--prompts", type=positive, nargs=2, default=(16, 64), help="tokens, from to"
    )
    parser.add_argument("--outputs", type=positive, nargs=2, default=(16, 256), help="likewise")
    parser.add_argument(
        "--static", type=positive, nargs="+", default=(8, 16, 32), help="batch sizes"
    )


def run(args: argparse.Namespace) -> BenchTable:
    draw = random.Random(0)
    lengths = [draw.randint(*args.prompts) for _ in range(args.requests)]
    asked = [draw.randint(*args.outputs) for _ in range(args.requests)]
    table = BenchTable(
        f"ragged: {args.requests} requests, {sum(asked):,} useful tokens", args.repeats
    )
    table.notes.append(
        f"prompts of {min(lengths)} to {max(lengths)} tokens, outputs of {min(asked)} to "
        f"{max(asked)}, drawn evenly, seed 0"
    )
    params = [minikv.SamplingParams(max_tokens=count, ignore_eos=True) for count in asked]
    rounds = args.repeats + 1
    with bar((1 + len(args.static)) * rounds * len(args.models), "ragged") as progress:
        for name in args.models:
            lm, peer = peers.load_pair(name)
            engine = peers.engine_for(lm, list(map(sum, zip(lengths, asked, strict=True))))

            def static(size, peer=peer):
                def theirs(prompts):
                    outputs = []
                    for i in range(0, len(prompts), size):
                        counts = asked[i : i + size]
                        rows = peers.generate(peer, prompts[i : i + size], max(counts))
                        outputs += [row[:n] for row, n in zip(rows, counts, strict=True)]
                    return outputs

                return theirs

            contenders = {"minikv": partial(peers.ours, engine, params=params)}
            contenders |= {f"static {size}": static(size) for size in args.static}
            inputs = [peers.random_prompts(lm, lengths, seed) for seed in range(rounds)]
            result = race(contenders, inputs, progress)
            rates = {each: result.rate(each, sum(asked)) for each in contenders}
            best = max(list(rates)[1:], key=lambda each: rates[each].median)
            for each, rate in rates.items():
                row = {"model": name, "how": each, "useful tokens/s": rate}
                if each == "minikv":
                    table.add(row | {"rows that differ": ""})
                    continue
                row["minikv is faster by"] = result.ratio(each, "minikv")
                row["rows that differ"] = peers.count_differing(result.results, each)
                table.add(row, Aim("minikv is faster by", ">=", 5) if each == best else None)
    return table
