"""What a disk tier could be kept in, side by side: SQLite, a folder of files, LMDB if installed.

Entries of 10 KB, 100 KB and 1 MB are written in batches of 16, read one by one in another order,
and found again by a new process's first look. Nothing is compressed, and the system may keep all of
it in memory. Killing a process while it writes is a test: tests/tiers/test_tiers_faults.py.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minikv.course.bench.harness import BenchTable, Spread, bar, positive
from minikv.course.measure.timing import timed
from minikv.tiers.disk import DiskTier
from minikv.tiers.folder import Folder, save

SIZES = (10_000, 100_000, 1_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=positive, default=32, help="default: %(default)s")


class FileTier:
    """A file per entry, named by its content; `fsync` for each or for none."""

    def __init__(self, folder: str | os.PathLike, syncs: bool):
        self.folder, self.syncs = Path(folder), syncs

    def names(self) -> list[bytes]:
        return [bytes.fromhex(one.name) for one in os.scandir(self.folder)]

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

    def get_many(self, names: list[bytes]) -> list[bytes]:
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
    rng, makers = random.Random(0), stores()
    with bar(len(SIZES) * len(makers) * args.repeats, "tier-stores") as progress:
        for size in SIZES:
            count = max(16, args.megabytes * 1_000_000 // size)
            data = {rng.randbytes(32): rng.randbytes(size) for _ in range(count)}
            names = rng.sample(list(data), count)
            seconds: dict[str, dict[str, list[float]]] = {}
            for _ in range(args.repeats):
                for way, make in makers.items():
                    with tempfile.TemporaryDirectory() as folder:
                        one = _measure(make, folder, data, names)
                    for what, value in one.items():
                        seconds.setdefault(way, {}).setdefault(what, []).append(value)
                    progress.update()
            for way, found in seconds.items():
                row: dict[str, Any] = {"store": way, "entry, KB": size // 1000}
                for what in ("write", "read"):
                    row[f"{what}, MB/s"] = Spread([count * size / s / 1e6 for s in found[what]])
                row["reopen, ms"] = Spread([1e3 * s for s in found["reopen"]])
                table.add(row)
    return table


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
