"""Tokens per second of whole calls, prefill included, against `transformers` and other engines.

Same weights, same prompts, greedy, key-value caches on all sides, every repeat with new
random prompts. Tokens are compared row by row: where two logits are equal but for rounding,
two sides may go different ways, and a row then differs. `generate` and `generate_batch`,
which batches continuously, are of `transformers`. A peer that does not run has a row, too.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial

import torch

import minikv
from minikv.course.arguments import dtype, positive
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
    "generate": lambda config, peer, *_: nullcontext(partial(peers.generate, peer)),
    "generate_batch": peers.generate_batch,
    "llama.cpp": llama_cpp.generator,
    "ctranslate2": other_process.ctranslate2,
    "openvino": other_process.openvino,
}
FLOAT32_ONLY = "llama.cpp", "ctranslate2", "openvino"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = [*peers.MODELS, "random-135m"]
    parser.add_argument("--models", nargs="+", default=models, help="default: %(default)s")
    parser.add_argument(
        "--dtype", type=dtype, default=torch.float32, help="of the weights (default: float32)"
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=BATCHES)
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens of each")
    parser.add_argument(
        "--peers", choices=PEERS, nargs="+", default=["generate", "generate_batch"],
        help="default: %(default)s; the others, if they are installed",
    )  # fmt: skip


def run(args: argparse.Namespace) -> BenchTable:
    title = f"decode: {args.tokens} tokens after {args.prompt}, minikv against others"
    table = BenchTable(title, args.repeats)
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    rounds = args.repeats + 1
    total = 2 * len(args.peers) * rounds * len(args.batch) * len(args.models)
    with bar(total, "decode") as progress:
        for name in args.models:
            lm, model = peers.load_pair(name, args.dtype)
            for batch in args.batch:
                engine = peers.engine_for(lm, [args.prompt + args.tokens] * batch)
                inputs = [peers.random_prompts(lm, [args.prompt] * batch, i) for i in range(rounds)]
                ours = partial(peers.ours, engine, params=params)
                for each in args.peers:  # one at a time: threads of some do not rest between calls
                    row = {"model": name, "batch": batch, "beside": each}
                    with ExitStack() as stack:
                        try:
                            if each in FLOAT32_ONLY and args.dtype != torch.float32:
                                raise ValueError("is compared in float32 alone")
                            made = PEERS[each](lm.config, model, batch, args.prompt + args.tokens)
                            theirs = partial(stack.enter_context(made), max_tokens=args.tokens)
                            theirs(inputs[0][:1])
                        except Exception as error:  # whatever others raise
                            table.add(row | {"minikv tokens/s": "", "its tokens/s": "does not run"})
                            table.notes += {f"{each}: {error}"} - {*table.notes}
                            progress.update(2 * rounds)
                            continue
                        result = race({"minikv": ours, each: theirs}, inputs, progress)
                    row["minikv tokens/s"] = result.rate("minikv", batch * args.tokens)
                    row["its tokens/s"] = result.rate(each, batch * args.tokens)
                    row["ratio"] = result.ratio(each, "minikv")
                    row["rows that differ"] = peers.count_differing(result.results, each)
                    goals = dict(zip(BATCHES, GOALS.get((each, name), ()), strict=False))
                    goal = goals.get(batch)
                    table.add(row, Aim("ratio", ">=", goal) if goal else None)
    return table
