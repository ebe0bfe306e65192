"""A prefix from the shared store, over computing it: time to first token.

One engine computes a prefix and writes it to a server, started for this. Another engine with the
same weights, which has never seen the prefix, fetches it. A third has no store and computes it.
These two are timed in turns. Each turn has another text behind the prefix, and begins with the
caches of both engines empty, on the device and on the host.
"""

import random
from contextlib import ExitStack
from functools import partial

import minikv
from minikv.cluster.local_server import local_server
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar
from minikv.course.bench.tiers import FIRST, SIZE, engine_of, num_weights, random_model
from minikv.course.measure.timing import timed
from minikv.tiers import tiers_of

GOAL = 0.5  # of computing it


def add_rows(table: BenchTable, hidden: int, layers: int, length: int, repeats: int) -> None:
    """Two rows, by a random model, for tinypy's prefill is too short to be worth fetching. `length`
    is in tokens. Raises FileNotFoundError without a server, and ImportError without its client."""
    lm, blocks = random_model(hidden, layers), length // SIZE + 8
    rng = random.Random("store")

    def text(length: int) -> list[int]:
        return [rng.randrange(1, lm.config.vocab_size) for _ in range(length)]

    prefix = text(length)
    seconds: dict[str, list[float]] = {"computed": [], "store": []}
    with (
        local_server("1 GiB") as server,
        ExitStack() as stack,
        bar(2 * (repeats + 1), "a prefix from the store") as progress,
    ):
        behind = dict(num_blocks=blocks, host_blocks=2 * blocks, store=server.url)
        writer = stack.enter_context(engine_of(lm, False, **behind))
        engines = {
            "computed": stack.enter_context(engine_of(lm, False, num_blocks=blocks)),
            "store": stack.enter_context(engine_of(lm, False, **behind)),
        }
        writer.generate([prefix], FIRST)
        tiers_of(writer).flush()
        for turn in range(repeats + 1):
            prompt = prefix + text(SIZE)
            for way in list(engines)[:: 1 if turn % 2 else -1]:
                engine = engines[way]
                forget(engine)
                before = engine.stats().computed_tokens
                took, _ = timed(partial(engine.generate, [prompt], FIRST))
                computed = engine.stats().computed_tokens - before
                if turn > 0:  # the first is the warm-up
                    seconds[way].append(took)
                    if way == "store" and computed > 3 * SIZE:
                        table.notes.append(f"store: turn {turn} computed {computed} tokens itself")
                progress.update()
    per_token = lm.config.kv_bytes_per_token(lm.dtype)
    table.notes.append(
        f"a prefix: {length} tokens that another engine computed; a random model of "
        f"{num_weights(lm) / 1e6:.0f} million weights, {per_token:,} bytes of K and V per token, "
        f"median of {repeats}"
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
