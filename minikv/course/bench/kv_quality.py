"""What each way to store K and V costs in quality, on tinypy and the modules it never saw.

The first tokens of every held-out module, by the plain formula over K and V that were encoded and
decoded. In brackets are 95 % confidence intervals, from drawing modules again. Below ours are the
caches of `transformers` and llama.cpp that are installed, with the same weights.
"""

import argparse

import minikv
from minikv.course.arguments import positive
from minikv.course.bench.harness import BenchTable, bar
from minikv.course.bench.kv_peers import others
from minikv.course.workloads.corpus import read_corpus
from minikv.quant import quality


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=positive, default=512, help="of each module")
    parser.add_argument("--modules", type=positive, default=18, help="at most so many")
    parser.add_argument("--block-size", type=positive, default=16)


def run(args: argparse.Namespace) -> BenchTable:
    lm = minikv.load("tinypy")
    windows = quality.cut(lm, read_corpus().held_out, args.tokens)[: args.modules]
    table = BenchTable("kv-quality: what quantised K and V change, on held-out modules", 1)
    table.notes.append(
        f"{len(windows)} modules, {sum(map(len, windows)):,} tokens; measured once, for nothing "
        "here depends on a clock"
    )
    with others() as (theirs, notes):
        ways = [*quality.SCHEMES, *theirs]
        with bar(len(windows) * len(ways), "kv-quality") as progress:
            found = quality.measure(lm, windows, ways, args.block_size, progress.update)
    table.notes += notes
    for way in ways:
        one = found[way.name]
        table.add(
            {
                "K and V": way.name,
                "bytes per token": way.bytes_per_token(lm.config, args.block_size),
                "bits per byte": str(quality.bits_per_byte(one)),
                "change, %": str(quality.change_of_bits(one, found["float32"])),
                "KL per token": str(quality.kl_per_token(one)),
                "same arg max, %": str(quality.same_arg_max(one)),
            }
        )
    return table
