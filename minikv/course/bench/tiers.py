"""Tiers under the prefix cache: what each gives, and what it costs.

served      conversations that take turns, and documents that several of them begin with, all
            together several times the device's pool: no tiers, host, host and disk, in turns
returning   one conversation comes back after everything was evicted: computed again, fetched from
            the host, fetched from the disk (which the system may have in memory)
no hits     prompts that have nothing in common: what the tiers cost where they give nothing
sizes       block sizes from 1 to 256 on the same conversations: slots left empty, entries of block
            tables, hits lost because only whole blocks are shared, and the processor's time of a
            decode step of four sequences with 512 tokens each (tinypy, in PyTorch)
bytes       K and V of tinypy, in float32 and quantised, in blocks and in runs of eight, through
            zlib, and through zstd and lz4 if they are installed. A compressor pays on a disk that
            is slower than "pays below", for what is written once and read once

Weights are random; they are as large as --hidden and --layers make them, for tinypy's prefill is
too short to be worth fetching anything.
"""

import argparse
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

import minikv
from minikv.cluster.simulate import percentile
from minikv.course.arguments import positive
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, in_turns, over, random_ids
from minikv.course.bench.random_model import random_model
from minikv.course.workloads.timing import no_gc, timed
from minikv.course.workloads.workload import chat_like, write_code
from minikv.tiers import tiers_of
from minikv.tiers.blocks import read_block

SIZE = 16  # tokens per block
FIRST = minikv.SamplingParams(max_tokens=1, ignore_eos=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=positive, default=512, help="default: %(default)s")
    parser.add_argument("--layers", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--length", type=positive, default=900, help="of what returns, in tokens")
    parser.add_argument("--conversations", type=positive, default=6)
    parser.add_argument("--turns", type=positive, default=3)
    parser.add_argument("--only", nargs="+", default=tuple(PARTS), choices=tuple(PARTS))


def run(args: argparse.Namespace) -> BenchTable:
    lm, what = model_of(args)
    table = BenchTable("tiers: under the prefix cache", args.repeats, [f"{what}, blocks of {SIZE}"])
    for name in args.only:
        PARTS[name](table, lm, args)
    return table


# ── Served ────────────────────────────────────────────────────────────────────

Prompt = list[int]


class ServedPrompts(NamedTuple):
    hit_rate: float
    first_token: list[float]  # seconds, of each request
    tokens_per_second: float


def conversations(lm: minikv.LanguageModel, args: argparse.Namespace, seed: int) -> list[Prompt]:
    """Prompts in order: turn by turn, one of each conversation. A conversation begins with one of
    two documents of 192 tokens; each turn adds 96 tokens (message and answer, both made up)."""
    rng = random.Random(f"tiers {seed}")
    text = partial(random_ids, lm, rng)
    documents = [text(192) for _ in range(2)]
    said = [rng.choice(documents) for _ in range(args.conversations)]
    prompts = []
    for _ in range(args.turns):
        said = [one + text(96) for one in said]
        prompts += said
    return prompts


def serve(
    engine: minikv.Engine, prompts: list[Prompt], at_once: int = 2, answer: int = 8
) -> ServedPrompts:
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
    return ServedPrompts(stats.hit_rate, first_token, stats.generated_tokens / seconds)


def serve_in_turns(
    lm: minikv.LanguageModel, what: str, ways: dict[str, dict], inputs: list, answer: int = 8
) -> dict[str, list[ServedPrompts]]:
    """Serve the prompts of each input by engines of these configurations, in turns."""

    def serve_by(way: str, prompts: list[Prompt]) -> ServedPrompts:
        with engine_of(lm, "disk" in way, **ways[way]) as engine:
            return serve(engine, prompts, answer=answer)

    with bar(len(ways) * len(inputs), what) as progress:
        return in_turns({way: partial(serve_by, way) for way in ways}, inputs, progress)


def served(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    inputs = [conversations(lm, args, seed) for seed in range(args.repeats + 1)]
    distinct = len({tuple(p[:end]) for p in inputs[0] for end in range(SIZE, len(p), SIZE)})
    pool = max(distinct // 4, 2 * (len(inputs[0][-1]) // SIZE + 2))
    table.notes.append(f"served: {distinct} distinct blocks, {pool} on the device")
    small = dict(num_blocks=pool)
    ways = {
        "no tiers": small, "host": small | dict(host_blocks=pool),
        "host + disk": small | dict(host_blocks=pool), "unlimited": dict(num_blocks=2 * distinct),
    }  # fmt: skip
    runs = serve_in_turns(lm, "served", ways, inputs)
    for way, results in runs.items():
        row = {
            "what": "served", "way": way,
            "hit rate": Spread([one.hit_rate for one in results]),
            "first token P50, s": Spread([percentile(one.first_token, 50) for one in results]),
            "first token P99, s": Spread([percentile(one.first_token, 99) for one in results]),
            "tokens/s": Spread([one.tokens_per_second for one in results]),
        }  # fmt: skip
        if way != "host + disk":
            table.add(row)
            continue
        rates, best = ([one.hit_rate for one in runs[name]] for name in (way, "unlimited"))
        row["hits of unlimited"] = over(rates, best)
        table.add(row, Aim("hits of unlimited", ">=", 1.0))


# ── Returning ─────────────────────────────────────────────────────────────────


def returning(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """In turns: everything is evicted, then the conversation's next turn is asked for."""
    blocks = args.length // SIZE + 8
    rng = random.Random("returning")
    said = random_ids(lm, rng, args.length)
    with (
        bar(3 * (args.repeats + 1), "returning") as progress,
        engine_of(lm, False, num_blocks=blocks) as plain,
        engine_of(lm, False, num_blocks=blocks, host_blocks=2 * blocks) as host,
        engine_of(lm, True, num_blocks=blocks, host_blocks=2 * blocks) as disk,
    ):

        def come_back(engine: minikv.Engine, message: Prompt) -> float:
            return first_token(table, engine, said + message, from_host=engine is host)

        engines = {"computed": plain, "host": host, "disk": disk}
        for engine in engines.values():
            engine.generate([said], FIRST)
            if engine.tiers is not None:
                tiers_of(engine).flush()
        messages = [random_ids(lm, rng, SIZE) for _ in range(args.repeats + 1)]
        ways = {way: partial(come_back, engine) for way, engine in engines.items()}
        seconds = in_turns(ways, messages, progress)
    for way, goal in (("computed", None), ("host", 0.2), ("disk", 0.5)):
        row = {"what": f"returning, {args.length} tokens", "way": way,
               "first token P50, s": Spread(seconds[way])}  # fmt: skip
        if goal is not None:
            row["of computed"] = over(seconds[way], seconds["computed"])
        table.add(row, Aim("of computed", "<=", goal) if goal is not None else None)


def first_token(table: BenchTable, engine: minikv.Engine, prompt: Prompt, from_host: bool) -> float:
    """Seconds, with the device's cache empty, and the host's, too, unless it is to be fetched from
    there. A note says if a prefix was computed where it should have been fetched."""
    assert engine.cache is not None
    engine.cache.evict(engine.cache.num_cached_blocks)
    if engine.tiers is not None and not from_host:
        tiers_of(engine).flush()
        tiers_of(engine).host.forget_all()
    before = engine.stats().computed_tokens
    seconds, _ = timed(partial(engine.generate, [prompt], FIRST))
    computed = engine.stats().computed_tokens - before
    if engine.tiers is not None and computed > 3 * SIZE:
        table.notes.append(f"a prefix: {computed} tokens were computed, not fetched")
    return seconds


# ── No hits ───────────────────────────────────────────────────────────────────


def no_hits(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """The same prompts, which have nothing in common, with tiers and without, in turns."""
    rng = random.Random("no hits")
    inputs = [[random_ids(lm, rng, 300) for _ in range(8)] for _ in range(args.repeats + 1)]
    small = dict(num_blocks=64)
    ways = {"no tiers": small} | dict.fromkeys(("host", "host + disk"), small | {"host_blocks": 64})
    runs = serve_in_turns(lm, "no hits", ways, inputs, answer=16)
    rates = {way: [one.tokens_per_second for one in results] for way, results in runs.items()}
    for way, values in rates.items():
        row = {"what": "no hits", "way": way, "tokens/s": Spread(values)}
        row["of no tiers"] = over(values, rates["no tiers"])
        table.add(row, Aim("of no tiers", ">=", 0.98) if way != "no tiers" else None)


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
    prompts = [random_ids(lm, rng, 512) for _ in range(4)]
    count = 4 * (-(-(514 + 16 * repeats) // block_size) + 1)
    config = minikv.EngineConfig(num_blocks=count, block_size=block_size, attention="torch")
    engine, times = minikv.Engine(lm, config), []
    for prompt in prompts:
        params = minikv.SamplingParams(max_tokens=1 + 16 * repeats, ignore_eos=True)
        engine.add_request(prompt, params)
    engine.step()  # the prompts
    for _ in range(repeats):
        started = process_time()
        for _ in range(16):
            engine.step()
        times.append(1e3 / 16 * (process_time() - started))
    return times


# ── Bytes ─────────────────────────────────────────────────────────────────────

Change = Callable[[bytes], bytes]


def compressors() -> Iterator[tuple[str, Change, Change]]:
    """Name, compress and decompress of each that is installed."""
    yield "zlib, level 1", partial(zlib.compress, level=1), zlib.decompress
    with suppress(ImportError):
        zstd = import_module("zstandard")
        yield "zstd, level 1", zstd.ZstdCompressor(1).compress, zstd.ZstdDecompressor().decompress
    with suppress(ImportError):
        lz4 = import_module("lz4.frame")
        yield "lz4", lz4.compress, lz4.decompress


def turned(data: bytes, rows: int) -> bytes:
    """A table of bytes with so many rows, column by column. Of float32 with 4 columns this puts
    exponents beside exponents; with 4 rows it puts them back."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1).T.numpy().tobytes()


def in_planes(pack: Change, unpack: Change) -> tuple[Change, Change]:
    return lambda data: pack(turned(data, len(data) // 4)), lambda data: turned(unpack(data), 4)


def compressed(table: BenchTable, lm: minikv.LanguageModel, args: argparse.Namespace) -> None:
    """Blocks of 16 tokens, and runs of eight, before and after each compressor."""
    lm = minikv.load("tinypy")
    prompt = write_code(lm, 512)
    for kv_dtype in ("auto", "int8", "int4"):
        config = minikv.EngineConfig(num_blocks=40, kv_dtype=kv_dtype, attention="torch")
        engine = minikv.Engine(lm, config)
        engine.generate([prompt], FIRST)
        assert engine.cache is not None
        blocks = [read_block(engine.store, block_id) for block_id in engine.cache.block_ids()]
        runs = [b"".join(blocks[start : start + 8]) for start in range(0, len(blocks), 8)]
        kind, ways = kv_dtype, list(compressors())
        if kv_dtype == "auto":
            kind = "float32"
            ways += [(f"{name}, in planes", *in_planes(*way)) for name, *way in ways]
        for pieces in (blocks, runs):
            for name, pack, unpack in ways:
                row = _compress(pieces, pack, unpack, args.repeats)
                way = f"{name}, {len(pieces[0]) / 1e3:.0f} KB"
                table.add({"what": f"bytes of {kind}", "way": way, **row})


def _compress(pieces: list[bytes], pack: Change, unpack: Change, repeats: int) -> dict[str, Any]:
    size, small, down, up = sum(map(len, pieces)), 0, [], []
    for _ in range(repeats):
        started = process_time()
        packed = [pack(piece) for piece in pieces]
        half = process_time()
        back = [unpack(piece) for piece in packed]
        down.append(half - started)
        up.append(process_time() - half)
        small = sum(map(len, packed))
        if back != pieces:
            raise RuntimeError("other bytes came back than were compressed")
    # Written once and read once: 2 (size - small) bytes less for the disk.
    pays = [2 * (size - small) / (one + other) / 1e6 for one, other in zip(down, up, strict=True)]
    return {
        "left, %": 100 * small / size,
        "compress, MB/s": Spread([size / one / 1e6 for one in down]),
        "decompress, MB/s": Spread([size / one / 1e6 for one in up]),
        "pays below, MB/s": Spread([max(0.0, one) for one in pays]),
    }


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


def model_of(args: argparse.Namespace) -> tuple[minikv.LanguageModel, str]:
    """A model with --hidden and --layers, and what it is."""
    lm, size = random_model(
        vocab_size=2048, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_layers=args.layers, num_heads=args.hidden // 64, max_context=2048,
        num_kv_heads=max(1, args.hidden // 128),
    )  # fmt: skip
    per_token = lm.config.kv_bytes_per_token(lm.dtype)
    what = f"a random model of {size / 4e6:.0f} million weights, {per_token:,} bytes of K and V per"
    return lm, f"{what} token"


PARTS = {
    "served": served, "returning": returning, "no-hits": no_hits, "sizes": block_sizes,
    "bytes": compressed,
}  # fmt: skip
