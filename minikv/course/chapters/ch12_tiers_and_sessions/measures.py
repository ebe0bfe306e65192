"""What the tiers cost here: the links, and the first token of a text that returns.

    links = measure_links(lm, folder)          # by tier: write and read
    times = first_token_times(lm, folder, lengths=(64, 256, 896))
    crossing(lengths, times["computed"], times["disk"])     # from where the disk is faster

On a CPU, device and host are the same memory, and the way between them is a copy within it. What
is read from the disk was written a moment ago, so the system may still have it in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from minikv.config import EngineConfig
from minikv.course.chapters.ch12_tiers_and_sessions.given import evict_all
from minikv.course.measure.workload import write_code
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.paged import KVStore
from minikv.sampling import SamplingParams
from minikv.tiers import tiers_of
from minikv.tiers.costs import Link
from minikv.tiers.disk import DiskTier

BLOCK_SIZE = 16
FEW, MANY = 2, 64  # blocks per measurement: a line goes through both
ONE_TOKEN = SamplingParams(max_tokens=1)


class Way(NamedTuple):
    """A tier, measured: the way down and the way back."""

    down: Link
    back: Link


def line(seconds: Callable[[int], float], block_bytes: int, repeats: int) -> Link:
    """Latency and bandwidth of something that takes `seconds(number of blocks)`."""
    few, many = (median(seconds(n) for _ in range(repeats)) for n in (FEW, MANY))
    per_block = max(1e-9, (many - few) / (MANY - FEW))
    return Link(max(0.0, few - FEW * per_block), block_bytes / per_block)


def timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def measure_links(lm: LanguageModel, folder: str | Path, repeats: int = 7) -> dict[str, Way]:
    """The ways between the device and the host, and between the host and a disk's folder."""
    device = KVStore(lm.config, MANY, BLOCK_SIZE, lm.device, lm.dtype)
    host = KVStore(lm.config, MANY, BLOCK_SIZE, "cpu", lm.dtype)
    block_bytes = int(BLOCK_SIZE * device.bytes_per_token)
    disk, count = DiskTier(folder, 1 << 30), iter(range(10**9))
    data = bytes(block_bytes)
    written: list[list[bytes]] = []

    def write(n: int) -> float:
        written.append([next(count).to_bytes(32) for _ in range(n)])
        return timed(lambda: disk.put_many(dict.fromkeys(written[-1], data)))

    def read(n: int) -> float:
        names = next(names for names in reversed(written) if len(names) == n)
        return timed(lambda: disk.get_many(names))

    def copy(source: KVStore, target: KVStore) -> Callable[[int], float]:
        return lambda n: timed(lambda: source.copy_to(target, [(i, i) for i in range(n)]))

    def way(down: Callable[[int], float], back: Callable[[int], float]) -> Way:
        for one in (down, back):
            one(MANY)  # not counted: the first touches memory for the first time
        return Way(line(down, block_bytes, repeats), line(back, block_bytes, repeats))

    ways = {"host": way(copy(device, host), copy(host, device)), "disk": way(write, read)}
    disk.close()
    return ways


def first_token_times(
    lm: LanguageModel, folder: str | Path, lengths: Iterable[int], repeats: int = 3
) -> dict[str, list[float]]:
    """Seconds to the first token after `length` tokens and 16 new ones, by where K and V of the
    `length` tokens are: medians of so many texts each.

    "computed": nowhere. "host": evicted from the device. "disk": left by another engine.
    """
    lengths = list(lengths)
    config = EngineConfig(num_blocks=256, host_blocks=1024, disk_path=folder)
    first = Engine(lm, config)
    times: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
    texts = {
        length: [write_code(lm, length + BLOCK_SIZE, f"{length}/{i}") for i in range(repeats)]
        for length in lengths
    }
    first.generate(write_code(lm, 64, "the first run is slower"), ONE_TOKEN)

    def serve(engine: Engine, length: int) -> list[float]:
        return [timed(partial(engine.generate, ids, ONE_TOKEN)) for ids in texts[length]]

    def note(kind: str, seconds: list[float]) -> None:
        times[kind].append(median(seconds))

    for length in lengths:
        note("computed", serve(first, length))
        evict_all(first)
        note("host", serve(first, length))
        evict_all(first)
    tiers_of(first).flush()
    second = Engine(lm, config)
    second.generate(write_code(lm, 64, "the first run is slower"), ONE_TOKEN)
    for length in lengths:
        note("disk", serve(second, length))
    return times


def crossing(lengths: Sequence[int], computed: Sequence[float], fetched: Sequence[float]) -> float:
    """The length from which on fetching is faster, by the lines through the first two times of
    each; inf if it never is. Not below 0."""
    between = lengths[1] - lengths[0]
    gain = (computed[1] - computed[0] - fetched[1] + fetched[0]) / between  # per token
    if gain <= 0:
        return float("inf")
    return max(0.0, lengths[0] - (computed[0] - fetched[0]) / gain)
