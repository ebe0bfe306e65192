"""The first token of a text that returns, by where its K and V are.

    times = first_token_times(lm, folder, lengths=(64, 256, 896))
    slow = throttled_times(lm, folder, Link(0.006, 128e6), lengths)
    crossing(lengths, times["computed"], slow)     # from where that disk is faster

On a CPU, device and host are the same memory, and the way between them is a copy within it. What
is read from the disk was written a moment ago, so the system may still have it in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from minikv.config import EngineConfig
from minikv.course.chapters.ch12_tiers_and_sessions.given import evict_all
from minikv.course.workloads.timing import REPEATS
from minikv.course.workloads.workload import write_code
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams
from minikv.tiers import tiers_of
from minikv.tiers.costs import Link
from minikv.tiers.store import LowerTier

BLOCK_SIZE = 16
ONE_TOKEN = SamplingParams(max_tokens=1)
CONFIG = EngineConfig(num_blocks=256, host_blocks=1024)


def timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def texts_of(lm: LanguageModel, length: int, repeats: int) -> list[list[int]]:
    return [write_code(lm, length + BLOCK_SIZE, f"{length}/{i}") for i in range(repeats)]


def serve(engine: Engine, texts: list[list[int]]) -> float:
    """Median seconds to the first token."""
    return median(timed(partial(engine.generate, ids, ONE_TOKEN)) for ids in texts)


def first_token_times(
    lm: LanguageModel, folder: str | Path, lengths: Iterable[int], repeats: int = REPEATS
) -> dict[str, list[float]]:
    """Seconds to the first token after `length` tokens and 16 new ones, by where K and V of the
    `length` tokens are: medians of so many texts each.

    "computed": nowhere. "host": evicted from the device. "disk": left by another engine.
    """
    config = replace(CONFIG, disk_path=folder)
    first = Engine(lm, config)
    times: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
    texts = [texts_of(lm, length, repeats) for length in lengths]
    first.generate(write_code(lm, 64, "the first run is slower"), ONE_TOKEN)
    for some in texts:
        times["computed"].append(serve(first, some))
        evict_all(first)
        times["host"].append(serve(first, some))
        evict_all(first)
    tiers_of(first).flush()
    second = Engine(lm, config)
    second.generate(write_code(lm, 64, "the first run is slower"), ONE_TOKEN)
    times["disk"] = [serve(second, some) for some in texts]
    return times


def throttled_times(
    lm: LanguageModel, folder: str | Path, link: Link, lengths: Iterable[int],
    repeats: int = REPEATS,
) -> list[float]:  # fmt: skip
    """As "disk" of `first_token_times`, which has filled the folder, but each read takes as long
    as over `link`. Each engine is new: it has measured nothing yet, so it fetches."""
    times = []
    for length in lengths:
        engine = Engine(lm, replace(CONFIG, disk_path=folder))
        engine.generate(write_code(lm, 8, "the first run is slower"), ONE_TOKEN)
        background = tiers_of(engine).disk
        assert background is not None
        background.tier = Throttled(background.tier, link)
        times.append(serve(engine, texts_of(lm, length, repeats)))
    return times


class Throttled:
    """A tier that is read as over a slow link."""

    def __init__(self, tier: LowerTier, link: Link):
        self.tier, self.link = tier, link

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def get_many(self, names: Sequence[bytes]) -> list[bytes | None]:
        started = perf_counter()
        found = self.tier.get_many(names)
        seconds = self.link.seconds(sum(len(data) for data in found if data is not None))
        sleep(max(0.0, seconds - (perf_counter() - started)))
        return found


def line_through(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds at length 0, seconds per token) of the line through these points."""
    per_token, start = np.polyfit(lengths, seconds, 1)
    return float(start), float(per_token)


def crossing(lengths: Sequence[int], computed: Sequence[float], fetched: Sequence[float]) -> float:
    """The length from which on fetching is faster, by the lines through the times; inf if it never
    is. Not below 0."""
    (a, compute), (b, fetch) = line_through(lengths, computed), line_through(lengths, fetched)
    return max(0.0, (b - a) / (compute - fetch)) if compute > fetch else float("inf")
