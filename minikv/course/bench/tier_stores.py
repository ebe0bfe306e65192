"""What a disk tier could be kept in, and whether it pays to compress what goes there.

stores  SQLite, a folder of files, LMDB if it is installed. Entries of 10 KB, 100 KB and 1 MB are
        written in batches of 16, read one by one in another order, and found again by a new
        process's first look. The system may keep all of it in memory. SQLite, the engine's, also
        notes what was read as used. Then a process that writes is killed, --kills times: whole
        entries that are there afterwards, and torn ones
bytes   real K and V of tinypy, in float32 and quantised, through zlib, and through zstd and lz4 if
        they are installed. "pays below" is the speed of a disk, writing and reading alike, under
        which compressing, writing less, reading less and decompressing take less time in sum.
        Seconds are the processor's
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count as count_up
from pathlib import Path
from time import process_time, sleep
from typing import Any

import torch

import minikv
from minikv.course.bench.harness import BenchTable, Spread, bar, positive
from minikv.course.measure.timing import timed
from minikv.course.measure.workload import write_code
from minikv.tiers.blocks import read_block
from minikv.tiers.disk import DiskTier
from minikv.tiers.folder import Folder, save

SIZES = (10_000, 100_000, 1_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=positive, default=32, help="default: %(default)s")
    parser.add_argument("--kills", type=positive, default=5, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", default=tuple(PARTS), choices=tuple(PARTS))


class FileTier:
    """A file per entry, named by its content; `fsync` for each or for none."""

    def __init__(self, folder: str | os.PathLike, syncs: bool):
        self.folder, self.syncs = Path(folder), syncs

    def names(self) -> list[bytes]:
        return [bytes.fromhex(one.name) for one in os.scandir(self.folder) if len(one.name) == 64]

    def get_many(self, names: list[bytes]) -> list[bytes]:
        return [(self.folder / name.hex()).read_bytes() for name in names]

    def put_many(self, entries: dict[bytes, bytes]) -> None:
        for name, data in entries.items():
            if self.syncs:
                save(Folder(self.folder), name.hex(), data)
                continue
            part = self.folder / "part"
            part.write_bytes(data)
            os.replace(part, self.folder / name.hex())

    def close(self) -> None:
        pass


class LmdbTier:
    """LMDB: one mapped file."""

    def __init__(self, folder: str | os.PathLike):
        import lmdb

        self.env = lmdb.open(str(folder), map_size=1 << 32, metasync=False)

    def names(self) -> list[bytes]:
        with self.env.begin() as view:
            return list(view.cursor().iternext(values=False))

    def get_many(self, names: list[bytes]) -> list[bytes | None]:
        with self.env.begin() as view:
            return [view.get(name) for name in names]

    def put_many(self, entries: dict[bytes, bytes]) -> None:
        with self.env.begin(write=True) as change:
            for name, data in entries.items():
                change.put(name, data)

    def close(self) -> None:
        self.env.close()


def stores() -> dict[str, Callable[[str], Any]]:
    found: dict[str, Callable[[str], Any]] = {
        "SQLite": lambda folder: DiskTier(folder, 1 << 40),
        "files, synced": lambda folder: FileTier(folder, True),
        "files, not synced": lambda folder: FileTier(folder, False),
    }
    try:
        import lmdb  # noqa: F401
    except ImportError:
        return found
    return found | {"LMDB": LmdbTier}


def run(args: argparse.Namespace) -> BenchTable:
    table = BenchTable("tier-stores: what a disk tier could be kept in", args.repeats)
    for name in args.only:
        PARTS[name](table, args)
    return table


# ── Stores ────────────────────────────────────────────────────────────────────


def side_by_side(table: BenchTable, args: argparse.Namespace) -> None:
    rng, makers = random.Random(0), stores()
    with bar(len(SIZES) * len(makers) * (args.repeats + 1), "stores") as progress:
        for size in SIZES:
            count = max(16, args.megabytes * 1_000_000 // size)
            data = {rng.randbytes(32): rng.randbytes(size) for _ in range(count)}
            names = rng.sample(list(data), count)
            seconds: dict[str, dict[str, list[float]]] = {}
            whole: dict[str, list[tuple[int, int]]] = {}
            for _ in range(args.repeats):
                for way, make in makers.items():
                    with tempfile.TemporaryDirectory() as folder:
                        one = _measure(make, folder, data, names)
                    for what, value in one.items():
                        seconds.setdefault(way, {}).setdefault(what, []).append(value)
                    progress.update()
            for way, make in makers.items() if hasattr(os, "fork") else ():
                after = (rng.uniform(0.05, 0.3) for _ in range(args.kills))
                whole[way] = [_killed(make, size, moment) for moment in after]
                progress.update()
            for way, found in seconds.items():
                row: dict[str, Any] = {"store": way, "entry, KB": size // 1000}
                for what in ("write", "read"):
                    row[f"{what}, MB/s"] = Spread([count * size / s / 1e6 for s in found[what]])
                row["reopen, ms"] = Spread([1e3 * s for s in found["reopen"]])
                if whole:
                    row["killed: whole"] = sum(one for one, _ in whole[way])
                    row["torn"] = sum(torn for _, torn in whole[way])
                table.add(row)


def _measure(make, folder: str, data: dict[bytes, bytes], names: list[bytes]) -> dict[str, float]:
    """Seconds of each part."""
    store, given = make(folder), list(data.items())

    def write() -> None:
        for start in range(0, len(given), 16):
            store.put_many(dict(given[start : start + 16]))

    def read() -> None:
        for name in names:
            if store.get_many([name]) != [data[name]]:
                raise RuntimeError("another entry came back than was written")

    def reopen() -> Any:
        again = make(folder)
        if len(list(again.names())) != len(data):
            raise RuntimeError("entries are missing")
        return again

    seconds = {"write": timed(write)[0], "read": timed(read)[0]}
    store.close()
    seconds["reopen"], again = timed(reopen)
    again.close()
    return seconds


def _killed(make: Callable[[str], Any], size: int, seconds: float) -> tuple[int, int]:
    """Entries that are whole, and torn, after a process was killed while it wrote them, some
    seconds after its first ones."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        writer = context.Process(target=_write_on, args=(make, folder, size, begun), daemon=True)
        writer.start()
        try:
            begun.wait(20)
            sleep(seconds)
        finally:
            writer.kill()
            writer.join()
        store = make(folder)
        names = list(store.names())
        found = [
            hashlib.sha256(data).digest() == name
            for name, data in zip(names, store.get_many(names), strict=True)
        ]
        store.close()
    return sum(found), len(found) - sum(found)


def _write_on(make: Callable[[str], Any], folder: str, size: int, begun: Any) -> None:
    store = make(folder)
    for turn in count_up():
        data = [random.Random(f"{turn} {i}").randbytes(size) for i in range(4)]
        store.put_many({hashlib.sha256(one).digest(): one for one in data})
        begun.set()


# ── Bytes ─────────────────────────────────────────────────────────────────────

Change = Callable[[bytes], bytes]


def compressors() -> Iterator[tuple[str, Change, Change]]:
    """Name, compress and decompress of each that is installed."""
    yield "zlib, level 1", partial(zlib.compress, level=1), zlib.decompress
    try:
        import zstandard
    except ImportError:
        pass
    else:
        for level in (1, 3):
            pack = zstandard.ZstdCompressor(level=level).compress
            yield f"zstd, level {level}", pack, zstandard.ZstdDecompressor().decompress
    try:
        import lz4.frame
    except ImportError:
        return
    yield "lz4", lz4.frame.compress, lz4.frame.decompress


def to_planes(data: bytes) -> bytes:
    """The first byte of every four, then the second ones, …: exponents beside exponents."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 4).T.numpy().tobytes()


def from_planes(data: bytes) -> bytes:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(4, -1).T.numpy().tobytes()


def compressed(table: BenchTable, args: argparse.Namespace) -> None:
    """Blocks of 16 tokens, and runs of eight, before and after each compressor."""
    lm = minikv.load("tinypy")
    prompt = write_code(lm, 512)
    for kv_dtype in ("auto", "int8", "int4"):
        config = minikv.EngineConfig(num_blocks=40, kv_dtype=kv_dtype, attention="torch")
        engine = minikv.Engine(lm, config)
        engine.generate([prompt], minikv.SamplingParams(max_tokens=1))
        assert engine.cache is not None
        blocks = [read_block(engine.store, block_id) for block_id in engine.cache.block_ids()]
        runs = [b"".join(blocks[start : start + 8]) for start in range(0, len(blocks), 8)]
        kind = "float32" if kv_dtype == "auto" else kv_dtype
        for pieces in (blocks, runs):
            ways = list(compressors())
            if kv_dtype == "auto":
                ways += [
                    (f"{name}, in planes", partial(_after, to_planes, pack),
                     partial(_after, unpack, from_planes))
                    for name, pack, unpack in ways
                ]  # fmt: skip
            for name, pack, unpack in ways:
                row = _compress(pieces, pack, unpack, args.repeats)
                table.add({"store": f"{kind}, {name}", "entry, KB": len(pieces[0]) / 1e3, **row})


def _after(first: Change, then: Change, data: bytes) -> bytes:
    return then(first(data))


def _compress(pieces: list[bytes], pack: Change, unpack: Change, repeats: int) -> dict[str, Any]:
    size = sum(map(len, pieces))
    packed: list[bytes] = []
    down, up = [], []
    for _ in range(repeats):
        started = process_time()
        packed = [pack(piece) for piece in pieces]
        half = process_time()
        back = [unpack(piece) for piece in packed]
        down.append(half - started)
        up.append(process_time() - half)
        if back != pieces:
            raise RuntimeError("other bytes came back than were compressed")
    small = sum(map(len, packed))
    # Written once and read once: 2 (size - small) bytes less for the disk.
    pays = [2 * (size - small) / (one + other) / 1e6 for one, other in zip(down, up, strict=True)]
    return {
        "left, %": 100 * small / size,
        "compress, MB/s": Spread([size / one / 1e6 for one in down]),
        "decompress, MB/s": Spread([size / one / 1e6 for one in up]),
        "pays below, MB/s": Spread([max(0.0, one) for one in pays]),
    }


PARTS = {"stores": side_by_side, "bytes": compressed}
