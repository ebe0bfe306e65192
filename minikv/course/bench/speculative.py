"""Speculative decoding beside the same engine without: tokens per second, prompts left out.

Four workloads, greedy, on source that the model was not trained on: a function of the prompt begun
again under another name; a text of the prompt begun again; source that is continued; random tokens.
The tokens must be those of the engine without drafts, or the benchmark stops. "foresight" verifies
those of the suffix drafter's drafts that are right and no others: about what deciding better could
give at most.
With `--peer`, at batch 1 also llama.cpp with its own drafts, over llama.cpp without.

All engines decode the same prompts at the same time, a few steps of one, then a few of the next:
so whatever else the machine does reaches all alike. A repeat has new engines, a round in which they
get to know machine and text, and three more, whose times give one ratio for each drafter.
"""

import argparse
import ast
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

import minikv
from minikv.checkpoint import BUNDLED, read_weights
from minikv.course.arguments import positive
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, short
from minikv.course.bench.llama_cpp import Server, write_gguf
from minikv.course.workloads.corpus import read_corpus
from minikv.course.workloads.timing import no_gc
from minikv.sequence import Sequence as Running
from minikv.speculative import DRAFT_MODELS, Proposal, Speculation, SuffixDrafter, keep_equal

CONTROL = "off again"  # over itself: what a difference must exceed to mean anything
DRAFTERS = ("ngram", "suffix", "head", "model")
BOUND = "foresight"
# Costs of steps by which every draft pays.
FREE = SimpleNamespace(of=lambda num_tokens: 1.0, row=0.0, note=lambda *_: 1.0)
COPIES = {1: 2.0, 8: 1.3}  # times the tokens per second without, by batch
HELD_OUT = {1: 1.2}  # with the best drafter
NEVER_BELOW = 0.97  # of any other row
ROUNDS = 4  # of each repeat: its figure is that of all but the first
STEPS, PAUSE = 16, 3e-3  # of an engine before the next one's; seconds until its threads are idle
PEERS = {"llama.cpp": "", "llama.cpp n-gram": "NGRAM_SIMPLE", "llama.cpp model": "DRAFT_SIMPLE"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, help="default: %(default)s")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 8, 32))
    parser.add_argument("--prompt", type=positive, default=300, help="tokens of a prompt, at most")
    parser.add_argument("--tokens", type=positive, default=128, help="new tokens of each")
    parser.add_argument("--attention", default="auto", choices=("auto", "cpu", "torch"))
    parser.add_argument("--peer", action="store_true", help="llama.cpp with its own drafts, too")


class Foresight(SuffixDrafter):
    """Knows the answers, and cuts each proposal off where it is wrong."""

    known: dict[tuple[int, ...], list[int]]  # answers, by prompt

    def propose(self, sequence: Running, most: int) -> Proposal | None:
        proposal = super().propose(sequence, most)
        if proposal is None:
            return None
        rest = self.known[tuple(sequence.request.prompt_ids)][sequence.num_output :]
        return Proposal(keep_equal(proposal.token_ids, rest)[:-1], proposal.levels)


class Pairs(Spread):
    """Ratios of the two times of a repeat. Told is the median, and the interval that it is in with
    95 % confidence: the repeats are drawn again 2,000 times (bootstrap)."""

    def __init__(self, slow: Sequence[float], fast: Sequence[float]):
        super().__init__([one / other for one, other in zip(slow, fast, strict=True)])
        again = np.random.default_rng(0).choice(self.values, (2000, len(self.values)))
        self.low, self.high = np.quantile(np.median(again, axis=1), (0.025, 0.975)).tolist()

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}..{short(self.high)})"


def run(args: argparse.Namespace) -> BenchTable:
    title = f"speculative: {args.tokens} tokens with drafts, over the same engine without"
    table = BenchTable(title, args.repeats)
    table.notes.append("speed-up: its interval is that of 95 % confidence in the median")
    table.notes.append("tokens of a step: of one sequence, the target's own included")
    files = peer_files(args.peer)
    cases = [(workload, batch) for workload in args.workloads for batch in args.batch]
    with bar(len(cases) * args.repeats * ROUNDS, "speculative") as progress:
        for workload, batch in cases:
            compare(table, workload, batch, args, files if batch == 1 else [], progress)
    return table


def compare(
    table: BenchTable, workload: str, batch: int, args: argparse.Namespace, files: list[Path],
    progress: tqdm,
) -> None:  # fmt: skip
    """Add the rows of a workload at a batch. files: those of llama.cpp, if it runs, too."""
    lm, draw, length = minikv.load("tinypy"), random.Random(workload), args.prompt + args.tokens
    servers = {
        name: Server(files[0], kind, files[1], 2 * length) for name, kind in PEERS.items() if files
    }
    names = ["off", CONTROL, *args.drafters, BOUND]
    knows = peers.engine_for(lm, [length] * batch, attention=args.attention)
    seconds: dict[str, list[float]] = {name: [] for name in (*names, *servers)}
    counts = {name: [0, 0] for name in names}  # drafts, and how many were right
    alike = dict.fromkeys(servers, 0)
    for repeat in range(args.repeats):
        # New ones each time: where an engine's memory lies may cost or save a few per cent.
        drafters = {name: name.split()[0] for name in names} | {BOUND: (foresight := Foresight())}
        engines = {
            name: peers.engine_for(
                lm, [length] * batch, speculative=drafters[name], attention=args.attention
            )
            for name in random.Random(repeat).sample(names, len(names))
        }
        loop: Any = engines[BOUND].loop
        loop.costs = FREE
        taken: dict[str, list[float]] = {name: [] for name in seconds}
        for _ in range(ROUNDS):
            prompts = [WORKLOADS[workload](lm, draw, args.prompt) for _ in range(batch)]
            params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
            answers = peers.ours(knows, prompts, params)
            foresight.known = dict(zip(map(tuple, prompts), answers, strict=True))
            found, texts = decode_in_turns(engines, prompts, params)
            for name, server in servers.items():
                found[name], texts[name] = server.generate(prompts, args.tokens)
            for name, text in texts.items():
                if name in engines and text != texts["off"]:
                    raise AssertionError(f"{workload}, batch {batch}: {name} changed a token")
                taken[name].append(found[name])
            for name in servers:
                alike[name] += texts[name] == texts["off"]
            for engine in engines.values():
                if (program := getattr(engine.runner.attention, "program", None)) is not None:
                    program.crowd.goes_alone = lambda: False  # for which engine is chance
            progress.update()
        for name, values in taken.items():
            seconds[name].append(sum(values[1:]))  # the first round is the warm-up
        for name, engine in engines.items():
            done = engine.stats().speculation or Speculation()
            counts[name] = [counts[name][0] + done.drafts, counts[name][1] + done.accepted]

    def row(name: str, plain: str, drafts: int, accepted: int) -> dict:
        a_round = batch * args.tokens
        total = a_round * ROUNDS * args.repeats
        return {
            "workload": workload, "batch": batch, "drafter": name,
            "tokens/s": Spread([a_round * (ROUNDS - 1) / one for one in seconds[name]]),
            "speed-up": Pairs(seconds[plain], seconds[name]),
            "drafts kept": f"{accepted / drafts:.0%} of {drafts:,}" if drafts else "none",
            "tokens of a step": total / (total - accepted),
        }  # fmt: skip

    rows = {name: row(name, "off", *counts[name]) for name in names}
    table.add(rows[CONTROL])
    best = max(args.drafters, key=lambda name: rows[name]["speed-up"].median)
    for name in args.drafters:
        goals = {"source": HELD_OUT if name == best else {}, "random": {}}
        goal = goals.get(workload, COPIES).get(batch, NEVER_BELOW)
        table.add(rows[name], Aim("speed-up", ">=", goal))
    table.add(rows[BOUND])
    for name in [name for name in servers if PEERS[name]]:
        table.add(row(name, "llama.cpp", servers[name].drafts, servers[name].accepted))
        told = f"{alike[name]} of {ROUNDS * args.repeats} texts alike"
        table.notes.append(f"{workload}: {name} wrote {told}")


def decode_in_turns(
    engines: dict[str, minikv.Engine], prompts: list[list[int]], params: minikv.SamplingParams
) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
    """Each engine's seconds of decoding, and its new tokens, by name. The prompts are in its prefix
    cache before its time begins."""
    first = minikv.SamplingParams(max_tokens=1, ignore_eos=True)
    found: dict[str, dict[int, list[int]]] = {}
    taken, ids = dict.fromkeys(engines, 0.0), {}
    for name, engine in engines.items():
        engine.generate(prompts, first)
        ids[name] = [engine.add_request(prompt, params) for prompt in prompts]
        found[name] = {}
    with no_gc():
        while any(engine.has_unfinished for engine in engines.values()):
            for name, engine in engines.items():
                sleep(PAUSE)
                started = perf_counter()
                for _ in range(STEPS if engine.has_unfinished else 0):
                    found[name] |= {one.request_id: one.token_ids for one in engine.step()}
                    if not engine.has_unfinished:
                        break
                taken[name] += perf_counter() - started
    return taken, {name: [found[name][i] for i in ids[name]] for name in engines}


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
