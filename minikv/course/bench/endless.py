"""Text longer than the model was trained for: bits per byte by position, for each way to keep it.

Three modules of Python's standard library that tinypy was not trained on. Every way predicts every
next token; a column is an eighth of the positions. The seconds are those of all texts.
"""

import argparse
import collections
import inspect
import logging
import logging.handlers

import minikv
from minikv.course.bench.harness import BenchTable, Spread, positive
from minikv.course.measure import long_text as long
from minikv.course.measure.timing import timed
from minikv.ring import with_config

HELD_OUT = (logging, collections, logging.handlers)
BINS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=positive, default=4096, help="of each text (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> BenchTable:
    lm, size = minikv.load("tinypy"), args.tokens
    longer = with_config(lm, max_context=size)
    texts = [ids for ids in map(lm.encode, map(inspect.getsource, HELD_OUT)) if len(ids) >= size]
    texts = [ids[:size] for ids in texts]
    if not texts:
        raise SystemExit(f"--tokens: no text of the standard library has {size} tokens")
    num_bytes = sum(long.token_bytes(lm, ids) for ids in texts)
    table = BenchTable("endless: bits per byte by position", args.repeats)
    table.notes.append(
        f"{len(texts)} texts of {size:,} tokens; trained on {lm.config.max_context:,}"
    )
    ways = {
        "plain": lambda ids: long.full_logits(longer, ids),
        "context shift, 1,024 cells": lambda ids: long.context_shift_logits(lm, ids, 1024, 4),
        "computed again, 1,024": lambda ids: long.fresh_logits(lm, ids, 1024),
        "window 512": lambda ids: long.window_logits(longer, ids, 512),
        "sinks 4 + 508": lambda ids: long.sink_logits(longer, ids, 4, 508),
        "window 128": lambda ids: long.window_logits(longer, ids, 128),
        "sinks 4 + 124": lambda ids: long.sink_logits(longer, ids, 4, 124),
        **{
            f"SelfExtend {group}, {near}": lambda ids, group=group, near=near: (
                long.self_extend_logits(longer, ids, group, near)
            )
            for group, near in ((4, 512), (8, 512), (16, 512), (16, 256), (32, 256))
        },
    }
    for name, way in ways.items():
        seconds = []
        for _ in range(args.repeats):
            spent, found = timed(lambda way=way: [way(ids) for ids in texts])
            seconds.append(spent)
        nats = sum(map(long.nats_per_token, found, texts))
        bits = long.bits_per_byte(nats, num_bytes, BINS).tolist()
        ends = [f"to {(i + 1) * size // BINS:,}" for i in range(BINS)]
        table.add(
            {"what is seen": name} | dict(zip(ends, bits, strict=True)) | {"s": Spread(seconds)}
        )
    return table
