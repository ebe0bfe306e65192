"""Fleets of workers, simulated: made-up conversations, and what was computed once and stored.

`fleet(workers, router, …)` simulates one; `Fleets(sizes)` computes the sizes named again, of which
1,000 workers take some minutes.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from minikv.cluster.routing import ByOwnPrefix, ByPrefix, LeastLoaded, Router, Sticky
from minikv.cluster.simulate import Arrival, Blocks, Costs, Link, Report, simulate
from minikv.course.pictures import style
from minikv.course.pictures.table import Table

BLOCK, SYSTEM, TURNS = 16, 4, 6  # tokens; blocks that all share; turns per conversation
COSTS = Costs(2e-3, 1e-4, 3e-4)  # seconds: per step, per prompt token, per sequence that decodes
WORKER_BLOCKS = 300
NETWORK = Link(1e-3, 1.25e9, 81_920)  # 10 Gbit/s, blocks of tinypy


def chats(workers: int, talks: int = 10, system: int = SYSTEM, seed: int = 13) -> list[Arrival]:
    """Conversations of six turns, `talks` per worker, that begin within a minute. Every prompt has
    all that was said before, and begins with the same `system` blocks. Names of blocks are pairs
    (conversation, place)."""
    return sorted(_turns(workers * talks, system, seed), key=lambda one: one.time)


def _turns(talks: int, system: int, seed: int) -> Iterator[Arrival]:
    draw = random.Random(seed)
    for talk in range(talks):
        time, length = draw.uniform(0, 60), system + draw.randrange(2, 8)
        for _ in range(TURNS):
            names = [("all", i) if i < system else (talk, i) for i in range(length)]
            answer = draw.randrange(16, 64)
            yield Arrival(time, names, length * BLOCK - draw.randrange(BLOCK), answer, talk)
            length += answer // BLOCK + draw.randrange(1, 5)
            time += draw.expovariate(1 / 8)


def denser(arrivals: Sequence[Arrival], times: int) -> list[Arrival]:
    """The same requests in a fraction of the time."""
    return [one._replace(time=one.time / times) for one in arrivals]


def best_hit_rate(arrivals: Sequence[Arrival]) -> float:
    """What one cache without a bound would find."""
    blocks, hits = Blocks(), 0
    for one in arrivals:
        hits += blocks.hits(one.names)
        blocks.put(one.names)
    return hits / sum(len(one.names) for one in arrivals)


WAYS: dict[str, tuple[Callable[[int], Router], Link | None]] = {
    "least loaded": (lambda n: LeastLoaded(n, BLOCK), None),
    "by prefix": (lambda n: ByPrefix(n, BLOCK), None),
    "by own prefix": (lambda n: ByOwnPrefix(n, BLOCK), None),
    "sticky sessions": (lambda n: Sticky(n, BLOCK, 2.0), None),
    "least loaded, a store": (lambda n: LeastLoaded(n, BLOCK), NETWORK),
}


class Found(NamedTuple):
    """Of one fleet."""

    hit_rate: float  # found, or fetched from the store
    ttft: float  # P99, in ms
    imbalance: float  # busiest worker over the mean
    gigabytes: float  # over the network


def fleet(arrivals: Sequence[Arrival], router: Router, store: Link | None = None) -> Report:
    return simulate(arrivals, router, COSTS, cache_blocks=WORKER_BLOCKS, store=store)


def found(workers: int, way: str, arrivals: Sequence[Arrival]) -> Found:
    make, store = WAYS[way]
    report = fleet(arrivals, make(workers), store)
    return Found(
        report.hit_rate, 1e3 * report.ttft(99), report.imbalance, report.network_bytes / 1e9
    )


STORED = {
    (1, "least loaded"): Found(0.7740, 15.4, 1.000, 0.000),
    (1, "by prefix"): Found(0.7740, 15.4, 1.000, 0.000),
    (1, "by own prefix"): Found(0.7740, 15.4, 1.000, 0.000),
    (1, "sticky sessions"): Found(0.7740, 15.4, 1.000, 0.000),
    (1, "least loaded, a store"): Found(0.7740, 15.4, 1.000, 0.023),
    (4, "least loaded"): Found(0.4263, 49.7, 1.073, 0.000),
    (4, "by prefix"): Found(0.7623, 25.2, 1.535, 0.000),
    (4, "by own prefix"): Found(0.7722, 14.7, 1.054, 0.000),
    (4, "sticky sessions"): Found(0.7711, 15.4, 1.409, 0.000),
    (4, "least loaded, a store"): Found(0.7762, 13.6, 1.088, 0.219),
    (16, "least loaded"): Found(0.2547, 53.1, 1.045, 0.000),
    (16, "by prefix"): Found(0.7220, 39.1, 1.774, 0.000),
    (16, "by own prefix"): Found(0.7679, 16.6, 1.161, 0.000),
    (16, "sticky sessions"): Found(0.7673, 16.6, 1.461, 0.000),
    (16, "least loaded, a store"): Found(0.7730, 13.5, 1.068, 1.161),
    (64, "least loaded"): Found(0.2164, 53.1, 1.157, 0.000),
    (64, "by prefix"): Found(0.5431, 48.2, 1.853, 0.000),
    (64, "by own prefix"): Found(0.7670, 14.3, 1.408, 0.000),
    (64, "sticky sessions"): Found(0.7638, 16.6, 1.783, 0.000),
    (64, "least loaded, a store"): Found(0.7725, 13.6, 1.191, 4.836),
    (256, "least loaded"): Found(0.2036, 53.1, 1.132, 0.000),
    (256, "by prefix"): Found(0.3043, 52.5, 1.725, 0.000),
    (256, "by own prefix"): Found(0.7656, 16.0, 1.437, 0.000),
    (256, "sticky sessions"): Found(0.7643, 16.2, 2.009, 0.000),
    (256, "least loaded, a store"): Found(0.7723, 13.5, 1.146, 19.756),
    (1000, "least loaded"): Found(0.2003, 53.2, 1.173, 0.000),
    (1000, "by prefix"): Found(0.3340, 52.1, 1.886, 0.000),
    (1000, "by own prefix"): Found(0.7663, 15.1, 1.593, 0.000),
    (1000, "sticky sessions"): Found(0.7648, 15.8, 1.941, 0.000),
    (1000, "least loaded, a store"): Found(0.7722, 13.5, 1.210, 77.550),
}


class Fleets(Table):
    """Hit rate, time to first token and balance, by number of workers and way of routing."""

    def __init__(self, sizes: Sequence[int] = ()):
        self.found = dict(STORED)
        for size in sizes:
            arrivals = chats(size)
            for way in WAYS:
                self.found[size, way] = found(size, way, arrivals)
        self.caption = f"Simulated; computed here: {', '.join(map(str, sizes)) or 'none'} workers."

    def rows(self) -> list[tuple[str, ...]]:
        """The table's text, with its header."""
        header: tuple[str, ...] = (
            "workers",
            "routing",
            "found",
            "TTFT P99, ms",
            "busiest / mean",
            "network, GB",
        )
        return [header] + [
            (f"{size:,}", way, f"{one.hit_rate:.1%}", f"{one.ttft:.0f}", f"{one.imbalance:.2f}",
             f"{one.gigabytes:.2f}")
            for (size, way), one in sorted(self.found.items(), key=lambda item: item[0][0])
        ]  # fmt: skip

    def picture(self) -> style.Picture:
        """What is found, over the number of workers, for each way."""
        most = max(size for size, _ in self.found)
        least, prefix, *others = (self.found[most, way].hit_rate for way in WAYS)
        title = (
            f"{most:,} workers: {least:.0%} found by load alone, {prefix:.0%} by prefix,\n"
            f"{min(others):.0%} to {max(others):.0%} by own prefix, sticky sessions or with a store"
        )
        figure, axes = style.new_axes(title, "workers", "found (% of all blocks)", 3.2)
        told = []
        looks: tuple[dict[str, Any], ...] = (
            dict(marker="s", linestyle="--", color=style.PALETTE[3], markersize=5),
            dict(marker="o", linestyle="-", color=style.PALETTE[0], markersize=5),
            dict(marker="x", linestyle="--", color=style.PALETTE[1], markersize=9, zorder=3),
            dict(marker="D", linestyle="-", color=style.PALETTE[5], markersize=4),
            # Around the marks of the two before: all three can be seen.
            dict(marker="o", linestyle=":", color=style.INK, markersize=11, fillstyle="none"),
        )
        for way, look in zip(WAYS, looks, strict=True):
            points = sorted(
                (size, one.hit_rate) for (size, w), one in self.found.items() if w == way
            )
            axes.plot(
                [size for size, _ in points], [100 * rate for _, rate in points], label=way, **look
            )
            told += [f"{way}, {size:,}: {100 * rate:.0f}" for size, rate in points]
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
        axes.set_ylim(0, 100)
        axes.legend(frameon=False, fontsize=8)
        words = title.replace("\n", " ")
        return style.Picture(figure, f"Found, in per cent. {words}. {'; '.join(told)}.")


def bound_picture(bounds: Sequence[float], workers: int) -> style.Picture:
    """Hit rate of a router by prefix over its bound. Marked are the bounds of which the number of
    workers is a multiple."""
    arrivals = chats(workers)
    reports = [fleet(arrivals, ByPrefix(workers, BLOCK, bound)) for bound in bounds]
    rates = [100 * report.hit_rate for report in reports]
    unbounded = fleet(arrivals, ByPrefix(workers, BLOCK, workers))
    title = (
        f"Found with a bound of 1.9, 2 and 2.1: {_at(1.9, bounds, rates)}, {_at(2, bounds, rates)} "
        f"and {_at(2.1, bounds, rates)}; without one {unbounded.hit_rate:.0%}"
    )
    figure, axes = style.new_axes(title, "bound", "found (% of all blocks)", 3.2)
    whole = [workers / n for n in range(1, workers) if bounds[0] <= workers / n <= bounds[-1]]
    for bound in whole:
        label = "all favourites at their bound" if bound == whole[0] else None
        axes.axvline(bound, color=style.PALETTE[3], linestyle=":", linewidth=1.2, label=label)
    axes.plot(bounds, rates, "o-", color=style.PALETTE[0], markersize=4)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.margins(y=0.25)
    told = [f"bound {bound:.1f}: {rate:.0f}%" for bound, rate in zip(bounds, rates, strict=True)]
    return style.Picture(figure, f"Found over the bound, {workers} workers. {'; '.join(told)}.")


def _at(bound: float, bounds: Sequence[float], rates: Sequence[float]) -> str:
    return f"{next(rate for b, rate in zip(bounds, rates, strict=True) if b == bound):.0f}%"
