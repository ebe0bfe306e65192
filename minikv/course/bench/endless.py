"""Text longer than the model was trained for: bits per byte by position, for each way to keep it.

Three modules of Python's standard library that tinypy was not trained on. Every way predicts every
next token; a column is an eighth of the positions. The seconds are those of all texts.
"""

import argparse
import collections
import inspect
import logging
import logging.handlers
from collections.abc import Callable
from functools import partial

import torch

import minikv
from minikv.course.arguments import positive
from minikv.course.bench.harness import BenchTable, Spread
from minikv.course.workloads import long_text as long
from minikv.course.workloads.timing import timed
from minikv.language_model import LanguageModel
from minikv.ring import with_config

HELD_OUT = (logging, collections, logging.handlers)
BINS = 8
Way = Callable[[list[int]], torch.Tensor]  # token ids -> logits after each of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=positive, default=4096, help="of each text (default: %(default)s)"
    )


def ways(lm: LanguageModel, longer: LanguageModel) -> dict[str, Way]:
    """By what a token sees. `longer` has positions for the whole text."""
    found: dict[str, Way] = {
        "plain": partial(long.full_logits, longer),
        "context shift, 1,024 cells": partial(
            long.context_shift_logits, lm, num_cells=1024, n_keep=4
        ),
        "computed again, 1,024": partial(long.fresh_logits, lm, num_tokens=1024),
    }
    for window in (512, 128):
        found[f"window {window}"] = partial(long.window_logits, longer, window=window)
        found[f"sinks 4 + {window - 4}"] = partial(
            long.sink_logits, longer, num_sinks=4, window=window - 4
        )
    for group, near in ((4, 512), (8, 512), (16, 512), (16, 256), (32, 256)):
        found[f"SelfExtend {group}, {near}"] = partial(
            long.self_extend_logits, longer, group=group, neighbours=near
        )
    return found


def run(args: argparse.Namespace) -> BenchTable:
    lm, size = minikv.load("tinypy"), args.tokens
    longer = with_config(lm, max_context=size)
    texts = [ids for ids in map(lm.encode, map(inspect.getsource, HELD_OUT)) if len(ids) >= size]
    texts = [ids[:size] for ids in texts]
    if not texts:
        raise SystemExit(f"--tokens: no text of the standard library has {size} tokens")
    num_bytes = torch.stack([long.token_bytes(lm, ids) for ids in texts]).sum(0)
    table = BenchTable("endless: bits per byte by position", args.repeats)
    trained = lm.config.max_context
    table.notes.append(f"{len(texts)} texts of {size:,} tokens; trained on {trained:,}")

    def on_all(way: Way) -> list[torch.Tensor]:
        return [way(ids) for ids in texts]

    for name, way in ways(lm, longer).items():
        seconds: list[float] = []
        logits: list[torch.Tensor] = []
        for _ in range(args.repeats):
            spent, logits = timed(partial(on_all, way))
            seconds.append(spent)
        nats = torch.stack(list(map(long.nats_per_token, logits, texts))).sum(0)
        bits = long.bits_per_byte(nats, num_bytes, BINS).tolist()
        ends = [f"to {(i + 1) * size // BINS:,}" for i in range(BINS)]
        table.add(
            {"what is seen": name} | dict(zip(ends, bits, strict=True)) | {"s": Spread(seconds)}
        )
    return table
