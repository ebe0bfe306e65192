"""A prefix from the shared store, over computing it: time to first token.

One engine computes a prefix and writes it to a server, started for this. Another engine with the
same weights, which has never seen the prefix, fetches it. A third has no store and computes it.
These two are timed in turns. Each turn has another text behind the prefix, and begins with the
caches of both engines empty, on the device and on the host.
"""

import argparse
import random
from contextlib import ExitStack
from functools import partial

import minikv
from minikv.cluster.local_server import local_server
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, race
from minikv.course.bench.tiers import FIRST, SIZE, engine_of, model_of
from minikv.course.measure.timing import timed
from minikv.tiers import tiers_of

GOAL = 0.5  # of computing it


def add_rows(table: BenchTable, args: argparse.Namespace) -> None:
    """Two rows, by a random model, for tinypy's prefill is too short to be worth fetching. Raises
    FileNotFoundError without a server, and ImportError without its client."""
    (lm, what), blocks = model_of(args), args.length // SIZE + 8
    rng = random.Random("store")

    def text(length: int) -> list[int]:
        return [rng.randrange(1, lm.config.vocab_size) for _ in range(length)]

    def first_token(engine: minikv.Engine, prompt: list[int]) -> float:
        forget(engine)
        before = engine.stats().computed_tokens
        seconds, _ = timed(partial(engine.generate, [prompt], FIRST))
        computed = engine.stats().computed_tokens - before
        if engine.tiers is not None and computed > 3 * SIZE:
            table.notes.append(f"store: {computed} tokens of a prompt were computed, not fetched")
        return seconds

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
        ways = {"computed": partial(first_token, plain), "store": partial(first_token, store)}
        prompts = [prefix + text(SIZE) for _ in range(args.repeats + 1)]
        seconds = {way: took[1:] for way, took in race(ways, prompts, progress).results.items()}
    table.notes.append(
        f"a prefix: {args.length} tokens that another engine computed; {what}, median of "
        f"{args.repeats}"
    )
    table.add({"routing": "a prefix, computed", "first token, s": Spread(seconds["computed"])})
    pairs = zip(seconds["store"], seconds["computed"], strict=True)
    row = {
        "routing": "a prefix, from the store",
        "first token, s": Spread(seconds["store"]),
        "of computed": Spread([one / other for one, other in pairs]),
    }
    table.add(row, Aim("of computed", "<=", GOAL))


def forget(engine: minikv.Engine) -> None:
    """Empty the device's cache and the host's; what is in the store stays there."""
    assert engine.cache is not None
    engine.cache.evict(engine.cache.num_cached_blocks)
    if engine.tiers is not None:
        tiers_of(engine).flush()
        tiers_of(engine).host.forget_all()
