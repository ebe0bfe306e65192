"""The two kinds of shared store, side by side.

Entries as large as a block of tinypy go through `SharedStore` to a server of each kind, started for
this on the same machine, in turns. Each turn has other entries, for Mooncake does not write an
entry again that is there. All of them are asked for, and fetched, by one call.
"""

import random
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from minikv.cluster.local_mooncake import local_mooncake
from minikv.cluster.local_server import local_server
from minikv.cluster.shared_store import SharedStore
from minikv.course.bench.harness import BenchTable, Spread, bar, race
from minikv.course.measure.timing import timed

ENTRIES, SIZE = 200, 82_000  # bytes
KINDS: dict[str, Any] = {"Valkey or Redis": local_server, "Mooncake": local_mooncake}
PATIENCE = 30.0  # seconds that a call may take: here a slow one is a figure, not a failure


def add_rows(table: BenchTable, repeats: int) -> None:
    """A row for each kind that can be started, and a note for one that cannot. Raises RuntimeError
    if there is none, or if an entry is lost."""
    rng = random.Random("kinds")
    memory = 2 * (repeats + 1) * ENTRIES * SIZE
    with ExitStack() as stack:
        stores = {}
        for kind, start in KINDS.items():
            try:
                server = stack.enter_context(start(memory))
            except (ImportError, OSError, RuntimeError) as error:
                table.notes.append(f"{kind} is left out: {error}")
                continue
            stores[kind] = stack.enter_context(closing(SharedStore(server.url, PATIENCE)))
        if not stores:
            raise RuntimeError("; ".join(table.notes))
        progress = stack.enter_context(bar(len(stores) * (repeats + 1), "kinds of store"))
        ways = {kind: partial(_measure, store) for kind, store in stores.items()}
        turns = (_entries(rng) for _ in range(repeats + 1))  # in the first, a store connects
        raced = race(ways, turns, progress)
    table.notes.append(f"{ENTRIES} entries of {SIZE:,} bytes, on this machine")
    for kind, found in raced.results.items():
        row: dict[str, Any] = {"store": kind}
        row |= {column: Spread([one[column] for one in found[1:]]) for column in found[0]}
        table.add(row)


def _entries(rng: random.Random) -> dict[bytes, bytes]:
    return {rng.randbytes(32): rng.randbytes(SIZE) for _ in range(ENTRIES)}


def _measure(store: SharedStore, entries: dict[bytes, bytes]) -> dict[str, float]:
    names = list(entries)
    written, lost = timed(partial(store.put_many, entries))
    asked, are_there = timed(partial(store.contains, names))
    read, found = timed(partial(store.get_many, names))
    if lost or not all(are_there) or found != list(entries.values()):
        raise RuntimeError(f"{store}: an entry that was written is not there")
    megabytes = ENTRIES * SIZE / 1e6
    return {
        "put, MB/s": megabytes / written,
        f"ask for {ENTRIES} names, ms": 1e3 * asked,
        "get, MB/s": megabytes / read,
    }
