"""Tiers under the prefix cache: what each gives, and what it costs.

served      conversations that take turns, and documents that several of them begin with, all
            together several times the device's pool: no tiers, host, host and disk, in turns
returning   one conversation comes back after everything was evicted: computed again, fetched from
            the host, fetched from the disk (which the system may have in memory)
no hits     prompts that have nothing in common: what the tiers cost where they give nothing
trace       hit blocks of a trace, or of generated conversations without --trace, by tier
large       `blocks_per_large`: blocks of a cold prefix that go down as one. What is found and
            stored, and the time of the moves
sizes       block sizes from 1 to 256 on the same conversations: slots left empty, entries of block
            tables, hits lost because only whole blocks are shared, and the processor's time of a
            decode step of four sequences with 512 tokens each (tinypy, in PyTorch)

Weights are random; they are as large as --hidden and --layers make them, for tinypy's prefill is
too short to be worth fetching anything.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

import minikv
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, positive
from minikv.course.chapters.ch12_tiers_and_sessions.tier_rates import WriteBack, rates_by_tier
from minikv.course.measure.timing import no_gc
from minikv.course.measure.workload import chat_like, read_trace
from minikv.model import Transformer
from minikv.tiers import tiers_of

SIZE = 16  # tokens per block
TRACE_SIZES = (1_000, 10_000, 50_000)  # blocks of 512 tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=positive, default=512, help="default: %(default)s")
    parser.add_argument("--layers", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--length", type=positive, default=900, help="of what returns, in tokens")
    parser.add_argument("--conversations", type=positive, default=6)
    parser.add_argument("--turns", type=positive, default=3)
    parser.add_argument(
        "--large", type=positive, nargs="+", default=(1, 2, 4, 8, 16), help="blocks per large one"
    )
    parser.add_argument("--trace", type=Path, help="jsonl with hash_ids, as Mooncake's")
    parser.add_argument("--only", nargs="+", default=tuple(PARTS), choices=tuple(PARTS))


def run(args: argparse.Namespace) -> BenchTable:
    lm = random_model(args.hidden, args.layers)
    per_token = lm.config.kv_bytes_per_token(lm.dtype)
    table = BenchTable("tiers: under the prefix cache", args.repeats)
    table.notes.append(
        f"a random model of {num_weights(lm) / 1e6:.0f} million weights, {per_token:,} bytes of K "
        f"and V per token, blocks of {SIZE}"
    )
    for name in args.only:
        PARTS[name](table, lm, args)
    return table


# ── Served ────────────────────────────────────────────────────────────────────

Prompt = list[int]


class Served(NamedTuple):
    hit_rate: float
    first_token: list[float]  # seconds, of each request
    tokens_per_second: float


def conversations(lm: minikv.LanguageModel, args: argparse.Namespace, seed: int) -> list[Prompt]:
    """Prompts in order: turn by turn, one of each conversation. A conversation begins with one of
    two documents of 192 tokens; each turn adds 96 tokens (message and answer, both made up)."""
    rng = random.Random(f"tiers {seed}")

    def text(length: int) -> Prompt:
        return [rng.randrange(1, lm.config.vocab_size) for _ in range(length)]

    documents = [text(192) for _ in range(2)]
    said = [rng.choice(documents) for _ in range(args.conversations)]
    prompts = []
    for _ in range(args.turns):
        said = [one + text(96) for one in said]
        prompts += said
    return prompts


def serve(
    engine: minikv.Engine, prompts: list[Prompt], at_once: int = 2, answer: int = 8
) -> Served:
    """Serve prompts in their order, `at_once` of them at any time."""
    params = minikv.SamplingParams(max_tokens=answer, ignore_eos=True)
    added: dict[int, float] = {}
    first_token: list[float] = []
    left, open_requests = iter(prompts), 0
    with no_gc():
        started = perf_counter()
        while True:
            while open_requests < at_once and (prompt := next(left, None)) is not None:
                added[engine.add_request(prompt, params)] = perf_counter()
                open_requests += 1
            if open_requests == 0:
                break
            for output in engine.step():
                if output.request_id in added:
                    first_token.append(perf_counter() - added.pop(output.request_id))
                open_requests -= output.finish_reason is not None
        seconds = perf_counter() - started
    stats = engine.stats()
    return Served(stats.hit_rate, first_token, stats.generated_tokens / seconds)


def served(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    prompts = conversations(lm, args, 0)
    distinct = len({tuple(p[:end]) for p in prompts for end in range(SIZE, len(p), SIZE)})
    pool = max(distinct // 4, 2 * (len(prompts[-1]) // SIZE + 2))
    table.notes.append(f"served: {distinct} distinct blocks, {pool} on the device")
    ways: dict[str, dict[str, Any]] = {
        "no tiers": {}, "host": dict(host_blocks=pool), "host + disk": dict(host_blocks=pool),
        "unlimited": dict(num_blocks=2 * distinct),
    }  # fmt: skip
    runs: dict[str, list[Served]] = {way: [] for way in ways}
    with bar(len(ways) * (args.repeats + 1), "served") as progress:
        for turn in range(args.repeats + 1):
            for way in list(ways)[:: 1 if turn % 2 else -1]:
                with engine_of(lm, way == "host + disk", **{"num_blocks": pool} | ways[way]) as one:
                    result = serve(one, conversations(lm, args, turn))
                if turn > 0:  # the first is the warm-up
                    runs[way].append(result)
                progress.update()
    for way, results in runs.items():
        row = {
            "what": "served", "way": way,
            "hit rate": Spread([one.hit_rate for one in results]),
            "first token P50, s": Spread([percent(one.first_token, 50) for one in results]),
            "first token P99, s": Spread([percent(one.first_token, 99) for one in results]),
            "tokens/s": Spread([one.tokens_per_second for one in results]),
        }  # fmt: skip
        goal = None
        if way == "host + disk":
            best = [one.hit_rate for one in runs["unlimited"]]
            row["hits of unlimited"] = Spread(
                [one.hit_rate / other for one, other in zip(results, best, strict=True)]
            )
            goal = Aim("hits of unlimited", ">=", 1.0)
        table.add(row, goal)


FIRST = minikv.SamplingParams(max_tokens=1, ignore_eos=True)


def percent(values: list[float], rank: int) -> float:
    return quantiles(values, n=100, method="inclusive")[rank - 1]


# ── Returning ─────────────────────────────────────────────────────────────────


def returning(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """In turns: everything is evicted, then the conversation's next turn is asked for."""
    blocks = args.length // SIZE + 8
    rng = random.Random("returning")
    said = [rng.randrange(1, lm.config.vocab_size) for _ in range(args.length)]
    first = minikv.SamplingParams(max_tokens=1, ignore_eos=True)
    seconds: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
    with (
        bar(3 * (args.repeats + 1), "returning") as progress,
        engine_of(lm, False, num_blocks=blocks) as plain,
        engine_of(lm, False, num_blocks=blocks, host_blocks=2 * blocks) as host,
        engine_of(lm, True, num_blocks=blocks, host_blocks=2 * blocks) as disk,
    ):
        engines = {"computed": plain, "host": host, "disk": disk}
        for engine in engines.values():
            engine.generate([said], first)
            if engine.tiers is not None:
                tiers_of(engine).flush()
        for turn in range(args.repeats + 1):
            message = [rng.randrange(1, lm.config.vocab_size) for _ in range(SIZE)]
            for way in list(engines)[:: 1 if turn % 2 else -1]:
                engine = engines[way]
                assert engine.cache is not None
                engine.cache.evict(engine.cache.num_cached_blocks)
                if way == "disk":
                    tiers = tiers_of(engine)
                    assert tiers.disk is not None
                    tiers.disk.wait()
                    tiers.host.forget_all()
                before = engine.stats().computed_tokens
                with no_gc():
                    started = perf_counter()
                    engine.generate([said + message], first)
                    took = perf_counter() - started
                computed = engine.stats().computed_tokens - before
                if way != "computed" and computed > 3 * SIZE:
                    table.notes.append(f"returning: turn {turn} computed {computed} from {way}")
                if turn > 0:
                    seconds[way].append(took)
                progress.update()
    for way, goal in (("computed", None), ("host", 0.2), ("disk", 0.5)):
        row = {"what": f"returning, {args.length} tokens", "way": way,
               "first token P50, s": Spread(seconds[way])}  # fmt: skip
        if goal is not None:
            pairs = zip(seconds[way], seconds["computed"], strict=True)
            row["of computed"] = Spread([one / other for one, other in pairs])
        table.add(row, Aim("of computed", "<=", goal) if goal is not None else None)


# ── Large blocks ──────────────────────────────────────────────────────────────


def large_blocks(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """Two granularities below the device: what is found and stored, with tinypy; and the time of
    the moves, with tinypy's blocks and with larger ones."""
    tinypy = minikv.load("tinypy")
    _served_large(table, tinypy, args)
    for model in (tinypy, lm):
        _returning_large(table, model, args)


def _what(lm: minikv.LanguageModel) -> str:
    return f"large, of {lm.config.kv_bytes_per_token(lm.dtype) * SIZE / 1e3:.0f} KB blocks"


def _served_large(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """The conversations of `served`, on host and disk; the first round is the warm-up."""
    prompts = conversations(lm, args, 0)
    distinct = len({tuple(p[:end]) for p in prompts for end in range(SIZE, len(p), SIZE)})
    pool = max(distinct // 4, 2 * (len(prompts[-1]) // SIZE + 2))
    found: dict[int, dict[str, list[float]]] = {length: {} for length in args.large}
    with bar(len(args.large) * (args.repeats + 1), _what(lm)) as progress:
        for turn in range(args.repeats + 1):
            for length in args.large[:: 1 if turn % 2 else -1]:
                sizes = dict(num_blocks=pool, host_blocks=pool, blocks_per_large=length)
                with engine_of(lm, True, **sizes) as engine:
                    result = serve(engine, conversations(lm, args, turn))
                    engine.tiers.flush()
                    disk = engine.stats().tiers["disk"]
                if turn > 0:
                    row = {
                        "hit rate": result.hit_rate, "entries": disk.blocks,
                        "stored, MB": disk.bytes_in / 1e6,
                    }  # fmt: skip
                    for column, value in row.items():
                        found[length].setdefault(column, []).append(value)
                progress.update()
    for length in args.large:
        spreads = {column: Spread(values) for column, values in found[length].items()}
        table.add({"what": _what(lm), "way": f"served, {length} per large", **spreads})


def _returning_large(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """One conversation goes down and comes back, without the model's time."""
    rng = random.Random("returning")
    said = [rng.randrange(1, lm.config.vocab_size) for _ in range(args.length)]
    count = args.length // SIZE
    seconds: dict[int, dict[str, list[float]]] = {length: {} for length in args.large}
    with ExitStack() as stack, bar(len(args.large) * (args.repeats + 1), _what(lm)) as progress:
        engines = {}
        for length in args.large:
            sizes = dict(num_blocks=count + 8, host_blocks=count + 16, blocks_per_large=length)
            engines[length] = stack.enter_context(engine_of(lm, True, **sizes))
            engines[length].generate([said], FIRST)
        for turn in range(args.repeats + 1):
            for length in args.large[:: 1 if turn % 2 else -1]:
                parts = _there_and_back(engines[length], said)
                for name, value in parts.items() if turn > 0 else ():
                    seconds[length].setdefault(name, []).append(1e3 * value)
                progress.update()
    for length in args.large:
        spreads = {f"{name}, ms": Spread(values) for name, values in seconds[length].items()}
        way = f"{count} blocks, {length} per large"
        table.add({"what": _what(lm), "way": way, **spreads})


def _there_and_back(engine: minikv.Engine, said: Prompt) -> dict[str, float]:
    """Seconds of the processor to demote a conversation that the device has, to write it to the
    disk and to read it from there; in the end the device has it again."""
    cache, tiers = engine.cache, engine.tiers
    assert cache is not None
    tiers.host.forget_all()
    seconds = {"down": _busy(lambda: cache.evict(cache.num_cached_blocks))}
    for name in list(tiers.disk.known):
        tiers.disk.tier.remove(name)
    tiers.disk.known.clear()
    seconds["to disk"] = _busy(tiers.flush)
    tiers.host.forget_all()
    names = list(tiers.disk.known)

    def read() -> None:
        tiers.disk.get(names, tiers._unpacker()).done.wait()

    seconds["from disk"] = _busy(read)
    engine.generate([said], FIRST)
    return seconds


def _busy(work: Callable[[], Any]) -> float:
    """Seconds of the processor, in all threads."""
    started = process_time()
    work()
    return process_time() - started


# ── No hits ───────────────────────────────────────────────────────────────────


def no_hits(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """The same prompts, which have nothing in common, with tiers and without, in turns."""
    rng = random.Random("no hits")
    rates: dict[str, list[float]] = {"no tiers": [], "host": [], "host + disk": []}
    with bar(3 * (args.repeats + 1), "no hits") as progress:
        for turn in range(args.repeats + 1):
            prompts = [
                [rng.randrange(1, lm.config.vocab_size) for _ in range(300)] for _ in range(8)
            ]
            for way in list(rates)[:: 1 if turn % 2 else -1]:
                more = {} if way == "no tiers" else dict(host_blocks=64)
                with engine_of(lm, way == "host + disk", num_blocks=64, **more) as engine:
                    result = serve(engine, prompts, answer=16)
                if turn > 0:
                    rates[way].append(result.tokens_per_second)
                progress.update()
    for way, values in rates.items():
        row = {"what": "no hits", "way": way, "tokens/s": Spread(values)}
        pairs = zip(values, rates["no tiers"], strict=True)
        row["of no tiers"] = Spread([one / other for one, other in pairs])
        table.add(row, Aim("of no tiers", ">=", 0.98) if way != "no tiers" else None)


# ── Trace ─────────────────────────────────────────────────────────────────────


def trace(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """Hit rates by simulation: a tier, and a second one of ten times its size."""
    sizes: tuple[int, ...]
    if args.trace is not None:
        streams: list[Any] = [request.hash_ids for request in read_trace(args.trace)]
        what, sizes = args.trace.name, TRACE_SIZES
    else:
        known: dict[Any, int] = {}
        more = argparse.Namespace(conversations=40, turns=6)
        streams = [
            [known.setdefault(tuple(p[:end]), len(known)) for end in range(SIZE, len(p), SIZE)]
            for p in conversations(lm, more, 0)
        ]
        what, sizes = "generated conversations", (100, 400, 1_000)
    unlimited = 1 + len(set().union(*streams))
    for size in (*sizes, unlimited):
        below = 10 * size if size < unlimited else 0
        found = rates_by_tier(streams, WriteBack, size, below)
        row = {"what": f"trace: {what}", "way": f"{size:,} blocks" if below else "unlimited",
               "hit rate": found.device}  # fmt: skip
        if below:
            row["with a second tier, 10x"] = found.together
        table.add(row)


# ── Block sizes ───────────────────────────────────────────────────────────────


def block_sizes(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """What a block size costs and gives: by counting, and the time of a step."""
    tinypy = minikv.load("tinypy")
    more = argparse.Namespace(conversations=24, turns=6)
    prompts = conversations(lm, more, 0)
    lengths = [one.prompt + one.output for one in chat_like(2_000)]
    seen: dict[int, set] = {}
    hits: dict[int, int] = {}
    for size in (1, 4, 16, 32, 64, 128, 256):
        seen[size], hits[size] = set(), 0
        for prompt in prompts:
            # One message of these is 96 tokens: a size that does not divide it loses an end.
            names = [hash(tuple(prompt[:end])) for end in range(size, len(prompt), size)]
            found = next((i for i, name in enumerate(names) if name not in seen[size]), len(names))
            hits[size] += found * size
            seen[size].update(names)
        slots = sum(-(-length // size) * size for length in lengths)
        table.add({
            "what": "sizes", "way": f"{size} tokens",
            "slots left empty, %": 100 * (1 - sum(lengths) / slots),
            "table entries per 1,000 tokens": 1000 * slots / size / sum(lengths),
            "hits of size 1": hits[size] / hits[1],
            "decode step, ms": Spread(_step_times(tinypy, size, args.repeats)),
        })  # fmt: skip


def _step_times(lm: minikv.LanguageModel, block_size: int, repeats: int) -> list[float]:
    """Milliseconds of the processor per step, averaged over 16, `repeats` times."""
    rng = random.Random("steps")
    prompts = [[rng.randrange(1, lm.config.vocab_size) for _ in range(512)] for _ in range(4)]
    count = 4 * (-(-(514 + 16 * repeats) // block_size) + 1)
    config = minikv.EngineConfig(num_blocks=count, block_size=block_size, attention="torch")
    engine, times = minikv.Engine(lm, config), []
    for prompt in prompts:
        params = minikv.SamplingParams(max_tokens=1 + 16 * repeats, ignore_eos=True)
        engine.add_request(prompt, params)
    engine.step()  # the prompts
    for _ in range(repeats):
        times.append(1e3 / 16 * _busy(lambda: [engine.step() for _ in range(16)]))
    return times


# ── Models and engines ────────────────────────────────────────────────────────


@contextmanager
def engine_of(lm: minikv.LanguageModel, on_disk: bool, **config: Any) -> Iterator[minikv.Engine]:
    """An engine, with a disk tier in a temporary folder if asked for."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if on_disk:
            config |= dict(disk_path=folder, disk_bytes="8 GiB")
        config = dict(block_size=SIZE, max_num_seqs=8, max_batch_tokens=512) | config
        engine = minikv.Engine(lm, minikv.EngineConfig(**config))
        try:
            yield engine
        finally:
            if engine.tiers is not None and (disk := tiers_of(engine).disk) is not None:
                disk.close()


def random_model(hidden: int, layers: int, max_context: int = 2048) -> minikv.LanguageModel:
    """A Llama of this size with random weights, for speed alone."""
    config = replace(
        minikv.load("tinypy").config, hidden_size=hidden, intermediate_size=3 * hidden,
        num_layers=layers, num_heads=hidden // 64, num_kv_heads=max(1, hidden // 128), head_dim=64,
        max_context=max_context, windows=(None,) * layers, eos_ids=(),
    )  # fmt: skip
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    heads, kv = config.num_heads * 64, config.num_kv_heads * 64
    state = {"model.embed_tokens.weight": draw(config.vocab_size, hidden) * 0.02,
             "model.norm.weight": torch.ones(hidden)}  # fmt: skip
    for i in range(layers):
        shapes = {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (3 * hidden, hidden), "mlp.up_proj": (3 * hidden, hidden),
            "mlp.down_proj": (hidden, 3 * hidden),
        }  # fmt: skip
        for name, shape in shapes.items():
            state[f"model.layers.{i}.{name}.weight"] = draw(*shape) * 0.02
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{i}.{name}.weight"] = torch.ones(hidden)
    transformer = Transformer(config, state, torch.device("cpu"), torch.float32)
    return minikv.LanguageModel("random", transformer, None)


def num_weights(lm: minikv.LanguageModel) -> int:
    c = lm.config
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size
    return c.vocab_size * c.hidden_size + c.num_layers * layer


PARTS = {
    "served": served, "returning": returning, "no-hits": no_hits, "trace": trace,
    "sizes": block_sizes, "large": large_blocks,
}  # fmt: skip
