"""A prefix from the shared store, over computing it: time to first token.

One engine computes a prefix and writes it to a server, started for this. Another engine with the
same weights, which has never seen the prefix, fetches it. A third has no store and computes it.
These two are timed in turns. Each round has another text behind the prefix, and begins with the
caches of both engines empty, on the device and on the host.
"""

import argparse
import random
from contextlib import ExitStack
from functools import partial

from minikv.cluster.local_server import local_server
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, in_turns, over, random_ids
from minikv.course.bench.tiers import FIRST, SIZE, engine_of, first_token, model_of
from minikv.tiers import tiers_of

GOAL = 0.5  # of computing it


def add_rows(table: BenchTable, args: argparse.Namespace) -> None:
    """Two rows, by a random model, for tinypy's prefill is too short to be worth fetching. Raises
    FileNotFoundError without a server, and ImportError without its client."""
    (lm, what), blocks = model_of(args), args.length // SIZE + 8
    text = partial(random_ids, lm, random.Random("store"))
    prefix = text(args.length)
    with (
        local_server("1 GiB") as server,
        ExitStack() as stack,
        bar(2 * (args.repeats + 1), "a prefix from the store") as progress,
    ):
        behind = dict(num_blocks=blocks, host_blocks=2 * blocks, store=server.url)
        writer, store = (stack.enter_context(engine_of(lm, False, **behind)) for _ in range(2))
        plain = stack.enter_context(engine_of(lm, False, num_blocks=blocks))
        writer.generate([prefix], FIRST)
        tiers_of(writer).flush()
        ways = {
            way: partial(first_token, table, engine, from_host=False)
            for way, engine in (("computed", plain), ("store", store))
        }
        prompts = [prefix + text(SIZE) for _ in range(args.repeats + 1)]
        seconds = in_turns(ways, prompts, progress)
    table.notes.append(
        f"a prefix: {args.length} tokens that another engine computed; {what}, median of "
        f"{args.repeats}"
    )
    table.add({"routing": "a prefix, computed", "first token, s": Spread(seconds["computed"])})
    row = {
        "routing": "a prefix, from the store",
        "first token, s": Spread(seconds["store"]),
        "of computed": over(seconds["store"], seconds["computed"]),
    }
    table.add(row, Aim("of computed", "<=", GOAL))
