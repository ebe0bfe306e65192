"""Two kinds of layers in one model.

Four layers in five have a window: all layers alike, and in KV groups.

memory     bytes of K and V that a sequence holds for each of its tokens, after its prompt
running    sequences that decode at once in the same memory, when no further one is admitted
hits       conversations that take turns, in a pool that cannot hold all of them
decode     tokens per second of eight sequences, for what looking up parts costs

Weights are random. That the tokens are the same is checked in each run.

Three layers in five keep a state: tinypy, and tinypy-states.

bytes      of K and V, and of states, that one sequence of a length holds
copies     conversations that take turns, by which copies of states the prefix cache keeps
states     tokens per second of decodes, after as many tokens as --contexts says; weights do not
           matter, so positions go further than these were trained for
"""

import argparse
import dataclasses
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from unittest.mock import patch

import minikv
from minikv.course.arguments import positive
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, in_turns, over, random_ids
from minikv.course.bench.random_model import random_model
from minikv.course.bench.tiers import conversations, serve
from minikv.course.workloads.timing import no_gc
from minikv.model import rope_table
from minikv.states import HybridConfig

SIZE, LAYERS = 16, 5  # tokens in a block
CHUNK = 512  # tokens of a step, where sequences are counted
WAYS = ("one", "auto")  # kv_groups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=positive, default=128, help="default: %(default)s")
    parser.add_argument("--window", type=positive, default=64, help="default: %(default)s")
    parser.add_argument("--lengths", type=positive, nargs="+", default=(1024, 8192))
    parser.add_argument("--conversations", type=positive, default=6)
    parser.add_argument("--turns", type=positive, default=3)
    parser.add_argument("--contexts", type=positive, nargs="+", default=(128, 4096))


def run(args: argparse.Namespace) -> BenchTable:
    longest = max(*args.lengths, 512) + SIZE
    plain, _ = random_model(
        vocab_size=2048, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_layers=LAYERS, num_heads=args.hidden // 64, num_kv_heads=1, max_context=2 * longest,
    )  # fmt: skip
    windows = (args.window,) * (LAYERS - 1) + (None,)
    plain.transformer.config = dataclasses.replace(plain.config, windows=windows)
    lm = minikv.LanguageModel("random", plain.transformer, None)
    title = "hybrid: layers with a window give back what they no longer see"
    note = f"windows of {args.window} tokens in {LAYERS - 1} of {LAYERS} layers, blocks of {SIZE}"
    table = BenchTable(title, args.repeats, [note])
    for length in args.lengths:
        add_memory(table, lm, length)
    add_hits(table, lm, args)
    add_decode(table, lm, args)
    add_bytes(table)
    add_copies(table, args)
    add_rates(table, args)
    return table


def engine_of(lm: minikv.LanguageModel, way: str, num_blocks: int, **more) -> minikv.Engine:
    config = minikv.EngineConfig(
        num_blocks=num_blocks, block_size=SIZE, min_prefix_tokens=0, kv_groups=way, **more
    )
    return minikv.Engine(lm, config)


def prompts_of(lm: minikv.LanguageModel, count: int, length: int) -> list[list[int]]:
    rng = random.Random(f"hybrid {length}")
    return [random_ids(lm, rng, length) for _ in range(count)]


def add_memory(table: BenchTable, lm: minikv.LanguageModel, length: int) -> None:
    """In memory for four sequences of this length, were all layers alike."""
    pool, tokens = 4 * (length // SIZE + 2), {}
    (alone,) = prompts_of(lm, 1, length)
    for way in WAYS:
        engine = engine_of(lm, way, pool, prefix_cache=False)
        engine.add_request(alone, minikv.SamplingParams(max_tokens=SIZE, ignore_eos=True))
        while not engine.step():
            pass
        engine.step()  # the first decode: what is behind its window is given back
        held = engine.stats().blocks_used * SIZE * engine.store.bytes_per_token
        tokens[way] = [one.token_ids for one in _drain(engine)]
        figure = {"what": f"memory, {length:,} tokens", "way": way, "figure": held / length}
        table.add(figure | {"unit": "bytes a token"})
        count = most_running(lm, way, pool, length)
        table.add({"what": f"running, {length:,} tokens", "way": way, "figure": count})
    assert tokens["one"] == tokens["auto"]


def _drain(engine: minikv.Engine) -> list[minikv.RequestOutput]:
    done = []
    while engine.has_unfinished:
        done += [one for one in engine.step() if one.finish_reason is not None]
    return done


def most_running(lm: minikv.LanguageModel, way: str, pool: int, length: int) -> int:
    """Sequences that decode in one step while one more waits for memory. Each writes an eighth of
    its length, so that the first still runs when the last is admitted."""
    engine = engine_of(lm, way, pool, prefix_cache=False, max_batch_tokens=CHUNK)
    params = minikv.SamplingParams(max_tokens=length // 8, ignore_eos=True)
    prompt = prompts_of(lm, 1, length - length // 8)[0]
    while True:
        if not engine.scheduler.waiting:
            engine.add_request(prompt, params)
        running = engine.scheduler.running
        has_budget = bool(running) and all(one.num_output > 0 for one in running)
        engine.step()
        if has_budget and engine.scheduler.waiting:
            return len(running)


def add_hits(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    inputs = [conversations(lm, args, seed) for seed in range(args.repeats)]
    distinct = len({tuple(p[:end]) for p in inputs[0] for end in range(SIZE, len(p), SIZE)})
    pool = max(distinct // 4, 2 * (len(inputs[0][-1]) // SIZE + 2))
    table.notes.append(f"hits: {distinct} distinct blocks, memory for {pool}")
    for way in WAYS:
        rates = [serve(engine_of(lm, way, pool), prompts).hit_rate for prompts in inputs]
        row = {"what": "hits", "way": way, "figure": Spread([100 * rate for rate in rates])}
        table.add(row | {"unit": "% of prompt tokens"})


def add_decode(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    prompts = prompts_of(lm, 8, 256)
    params = minikv.SamplingParams(max_tokens=64, ignore_eos=True)

    def decode(way: str, round_: int) -> tuple[float, list[list[int]]]:
        engine = engine_of(lm, way, 256, prefix_cache=False)
        for prompt in prompts:
            engine.add_request(prompt, params)
        engine.step()
        with no_gc():
            started, done = perf_counter(), _drain(engine)
            rate = 8 * 63 / (perf_counter() - started)
        return rate, [one.token_ids for one in sorted(done, key=lambda one: one.request_id)]

    rounds = range(args.repeats + 1)
    with bar(len(WAYS) * len(rounds), "hybrid: decode") as progress:
        results = in_turns({way: partial(decode, way) for way in WAYS}, rounds, progress)
    assert results["one"][0][1] == results["auto"][0][1]
    rates = {way: [rate for rate, _ in results[way]] for way in WAYS}
    for way in WAYS:
        row = {"what": "decode, batch of 8", "way": way, "figure": Spread(rates[way])}
        row["unit"] = "tokens/s"
        if way == "auto":
            row["over one"] = over(rates["auto"], rates["one"])
        table.add(row, Aim("over one", ">=", 0.97) if way == "auto" else None)


# ── States ────────────────────────────────────────────────────────────────────

LAST, EVERY = "last", 64
KEPT: dict[str, dict] = {  # by policy
    "last and junctions": {}, LAST: {}, f"and every {EVERY} tokens": dict(state_interval=EVERY),
    "and every block": dict(state_interval=SIZE),
}  # fmt: skip


def add_bytes(table: BenchTable) -> None:
    for length in (1024, 8192, 65536):
        for name in ("tinypy", "tinypy-states"):
            lm = minikv.load(name)
            held = length * lm.config.kv_bytes_per_token(lm.dtype)
            if isinstance(lm.config, HybridConfig):
                held += lm.config.state_bytes(lm.dtype)
            row = {"what": f"bytes, {length:,} tokens", "way": name, "figure": held / 2**20}
            table.add(row | {"unit": "MiB a sequence"})


def add_copies(table: BenchTable, args: argparse.Namespace) -> None:
    """With room for all blocks and all copies."""
    lm = minikv.load("tinypy-states")
    inputs = [conversations(lm, args, seed) for seed in range(args.repeats)]
    for policy, settings in KEPT.items():
        rates, sizes = [], []
        for prompts in inputs:
            engine = engine_of(lm, "auto", 2048, state_bytes="1 GiB", **settings)
            # As if no prompt left a prefix that is known.
            nothing = patch.object(engine.cache, "known", lambda *_: (0, False))
            with nothing if policy == LAST else nullcontext():
                rates.append(100 * serve(engine, prompts).hit_rate)
            sizes.append(engine.stats().states.copied_bytes / 2**20)
        row = {"what": "copies", "way": policy, "figure": Spread(rates)}
        table.add(row | {"unit": "% of prompt tokens", "MiB of copies": Spread(sizes)})


def add_rates(table: BenchTable, args: argparse.Namespace) -> None:
    names = ("tinypy", "tinypy-states")
    ways: dict[str, Callable] = {}
    for name in names:
        transformer = minikv.load(name).transformer
        longer = dataclasses.replace(transformer.config, max_context=max(args.contexts) + 64)
        transformer.config, transformer.rope_table = longer, rope_table(longer)
        lm = minikv.LanguageModel(name, transformer, None)
        for length in args.contexts:
            for batch in (1, 8, 32):
                ways[f"{batch} {length} {name}"] = partial(decode_rate, lm, batch, length)
    rounds = range(args.repeats + 1)
    with bar(len(ways) * len(rounds), "hybrid: states") as progress:
        rates = in_turns(ways, rounds, progress)
    for length in args.contexts:
        for batch in (1, 8, 32):
            plain, states = (rates[f"{batch} {length} {name}"] for name in names)
            what = f"states, batch of {batch}, {length:,} tokens"
            table.add({"what": what, "way": names[0], "figure": Spread(plain), "unit": "tokens/s"})
            row = {"what": what, "way": names[1], "figure": Spread(states), "unit": "tokens/s"}
            aim = Aim("over tinypy", ">=", 1.0 if length >= 4096 else 0.7)
            table.add(row | {"over tinypy": over(states, plain)}, aim)


def decode_rate(lm: minikv.LanguageModel, batch: int, length: int, _: int) -> float:
    engine = engine_of(lm, "auto", batch * (length // SIZE + 6), prefix_cache=False)
    params = minikv.SamplingParams(max_tokens=64, ignore_eos=True)
    for prompt in prompts_of(lm, batch, length):
        engine.add_request(prompt, params)
    while engine.scheduler.waiting or any(one.num_output < 2 for one in engine.scheduler.running):
        engine.step()
    num_steps = 32
    with no_gc():
        started = perf_counter()
        for _ in range(num_steps):
            engine.step()
        return batch * num_steps / (perf_counter() - started)
