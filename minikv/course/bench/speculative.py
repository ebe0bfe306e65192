"""Speculative decoding beside the same engine without: tokens per second, in turns, in one run.

Four workloads, greedy, on source that the model was not trained on: a function of the prompt begun
again under another name; a text of the prompt begun again; source that is continued; random tokens.
The tokens must be those of the engine without drafts, or the benchmark stops. With `--peer`, at
batch 1 also llama.cpp with its own drafts, over llama.cpp without.
"""

import argparse
import ast
import random
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import minikv
from minikv.checkpoint import BUNDLED, read_weights
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, bar, positive, race
from minikv.course.bench.llama_cpp import Server, write_gguf
from minikv.course.measure.corpus import read_corpus
from minikv.speculative import DRAFT_MODELS, Speculation

CONTROL = "off again"  # over itself: what a difference must exceed to mean anything
DRAFTERS = ("ngram", "suffix", "head", "model")
COPIES = {1: 2.0, 8: 1.3}  # times the tokens per second without, by batch
HELD_OUT = {1: 1.2}  # with the best drafter
NEVER_BELOW = 0.97  # of any other row
PEERS = {"llama.cpp": "", "llama.cpp n-gram": "NGRAM_SIMPLE", "llama.cpp model": "DRAFT_SIMPLE"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, help="default: %(default)s")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 8, 32))
    parser.add_argument("--prompt", type=positive, default=300, help="tokens of a prompt, at most")
    parser.add_argument("--tokens", type=positive, default=128, help="new tokens of each")
    parser.add_argument("--peer", action="store_true", help="llama.cpp with its own drafts, too")


def run(args: argparse.Namespace) -> BenchTable:
    title = f"speculative: {args.tokens} tokens with drafts, over the same engine without"
    table = BenchTable(title, args.repeats)
    table.notes.append("accepted length: tokens of a step that verified drafts, of one sequence")
    lm = minikv.load("tinypy")
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    turns = args.repeats + 1
    names = ["off", CONTROL, *args.drafters]
    files = peer_files(args.peer)
    total = len(names) * turns * len(args.batch) * len(args.workloads)
    total += len(PEERS) * turns * len(args.workloads) * (args.peer and 1 in args.batch)
    with bar(total, "speculative") as progress:
        for workload in args.workloads:
            draw = random.Random(workload)
            for batch in args.batch:
                prompts = [
                    [WORKLOADS[workload](lm, draw, args.prompt) for _ in range(batch)]
                    for _ in range(turns)
                ]
                lengths = [args.prompt + args.tokens] * batch
                engines = {
                    name: peers.engine_for(lm, lengths, speculative=name.split()[0])
                    for name in names
                }
                racers = {name: partial(peers.ours, engines[name], params=params) for name in names}
                servers = {
                    name: Server(files[0], kind, files[1], 2 * sum(lengths))
                    for name, kind in PEERS.items()
                    if args.peer and batch == 1
                }
                for name, server in servers.items():
                    racers[name] = partial(server.generate, num_tokens=args.tokens)
                result = race(racers, prompts, progress)
                rows = {}
                for name in names[1:]:
                    if result.results[name] != result.results["off"]:
                        raise AssertionError(f"{workload}, batch {batch}: {name} changed a token")
                    counts = engines[name].stats().speculation or Speculation()
                    rows[name] = {
                        "workload": workload, "batch": batch, "drafter": name,
                        "tokens/s": result.rate(name, batch * args.tokens),
                        "speed-up": result.ratio("off", name),
                        "drafts kept": share(counts.accepted, counts.drafts),
                        "accepted length": counts.mean_accepted_length,
                    }  # fmt: skip
                table.add(rows.pop(CONTROL))
                best = max(rows, key=lambda name: rows[name]["speed-up"].median)
                for name, row in rows.items():
                    goals = {"source": HELD_OUT if name == best else {}, "random": {}}
                    goal = goals.get(workload, COPIES).get(batch, NEVER_BELOW)
                    table.add(row, Aim("speed-up", ">=", goal))
                for name in [name for name, kind in PEERS.items() if kind and servers]:
                    server, mine = servers[name], result.results["off"]
                    same = sum(map(list.__eq__, result.results[name], mine))
                    table.notes.append(
                        f"{workload}: {name} wrote {same} of {len(mine)} texts alike"
                    )
                    table.add({
                        "workload": workload, "batch": batch, "drafter": name,
                        "tokens/s": result.rate(name, args.tokens),
                        "speed-up": result.ratio("llama.cpp", name),
                        "drafts kept": share(server.accepted, server.drafts),
                    })  # fmt: skip
    return table


def share(accepted: int, drafts: int) -> str:
    return f"{accepted / drafts:.0%} of {drafts:,}" if drafts else "none"


def peer_files(wanted: bool) -> list[Path]:
    """tinypy and its draft model in llama.cpp's format, in a folder that is left to the system."""
    files = []
    for name, source in (("tinypy", BUNDLED["tinypy"]), ("draft", DRAFT_MODELS["tinypy"])):
        if wanted:
            files.append(Path(tempfile.mkdtemp(), f"{name}.gguf"))
            write_gguf(minikv.load(source).config, read_weights(source), files[-1])
    return files


# ── Workloads: one prompt, of at most so many tokens ──────────────────────────


def edit(lm: minikv.LanguageModel, draw: random.Random, most: int) -> list[int]:
    """A function, and its first two lines again under another name."""
    while True:
        text = draw.choice(read_corpus().held_out)
        functions = [node for node in ast.walk(ast.parse(text)) if type(node) is ast.FunctionDef]
        if not functions:
            continue
        chosen = draw.choice(functions)
        source = ast.get_source_segment(text, chosen) or ""
        lines = source.splitlines(keepends=True)
        renamed = re.sub(rf"\b{chosen.name}\b", f"new_{chosen.name}", "".join(lines[:2]))
        token_ids = lm.encode(f"{source}\n\n{renamed}")
        if most // 3 < len(token_ids) <= most:
            return token_ids


def again(lm: minikv.LanguageModel, draw: random.Random, most: int) -> list[int]:
    """A piece of source, and its first fifth again."""
    token_ids = source(lm, draw, most * 5 // 6)
    return token_ids + token_ids[: most - len(token_ids)]


def source(lm: minikv.LanguageModel, draw: random.Random, most: int) -> list[int]:
    """A piece of source, from the beginning of some line."""
    while True:
        text = draw.choice(read_corpus().held_out)
        start = text.find("\n", draw.randrange(len(text))) + 1
        token_ids = lm.encode(text[start : start + 8 * most])
        if len(token_ids) >= most:
            return token_ids[:most]


def random_tokens(lm: minikv.LanguageModel, draw: random.Random, most: int) -> list[int]:
    return [draw.randrange(1, lm.config.vocab_size) for _ in range(most)]


WORKLOADS: dict[str, Callable[[minikv.LanguageModel, random.Random, int], list[int]]] = {
    "edit": edit,
    "again": again,
    "source": source,
    "random": random_tokens,
}
