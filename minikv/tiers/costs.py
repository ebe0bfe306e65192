"""Whether fetching or computing is faster, from a measured link and a measured prefill.

    fetching n tokens      latency + n bytes_per_token / bandwidth     the latency once per tier
    computing n tokens     n / rate                                    and one step's start

The start is paid either way, because at least one token is computed: without it there are no
logits.
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from math import inf
from time import perf_counter
from typing import NamedTuple

FAST_ENOUGH = 1e30  # per second: a rate that was not measured


class Link(NamedTuple):
    """The way from a tier to the device."""

    latency: float  # seconds per fetch, whatever its size
    bandwidth: float  # bytes per second

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


class Prefill(NamedTuple):
    """How fast tokens are computed."""

    start: float  # seconds per step, whatever its size
    rate: float  # tokens per second

    def seconds(self, num_tokens: float) -> float:
        return self.start + num_tokens / self.rate


def break_even(bytes_per_token: float, link: Link, prefill: Prefill) -> float:
    """The length in tokens from which on fetching is faster than computing; inf if it never is.

    A `Link` has a `latency` in seconds and a `bandwidth` in bytes per second, a `Prefill` a `rate`
    in tokens per second and a `start` in seconds. The start of a step is left out: it is paid
    either way, because at least one token is computed after every hit.

    Worked example: 1 ms of latency and 1 GB/s, 10,000 tokens/s, 50,000 bytes per token. A token
    takes 50 µs to fetch and 100 µs to compute: 50 µs are gained with each, and 20 tokens gain the
    latency.
    """
    gain = 1 / prefill.rate - bytes_per_token / link.bandwidth  # seconds per token
    if gain <= 0:
        return float("inf")
    return link.latency / gain


def blocks_to_fetch(
    tiers: Seq[str],
    block_bytes: float,
    block_size: int,
    links: Mapping[str, Link],
    prefill: Prefill,
) -> int:
    """How many of the blocks after the device's hit to fetch; the rest is computed.

    `tiers` names the tier of each block, in order, and `links` has the link of each. A block has
    `block_size` tokens and `block_bytes` bytes. It can only be used with all before it, so a slow
    tier in between may cost what a fast one behind it would gain. A link's latency is paid once, by
    the first of its blocks. The answer has the least total time; of several such numbers it is the
    smallest.

    Worked example: host, host, disk. The host takes 1 ms and 1 ms per block, the disk 10 ms and 2
    per block, computing 4 ms per block. For 0, 1, 2 and 3 blocks: 12, 10, 7 and 15 ms. So fetch 2.
    """
    saved = best_saved = 0.0
    best = 0
    used: set[str] = set()
    for count, tier in enumerate(tiers, 1):
        link = links[tier]
        saved += block_size / prefill.rate - block_bytes / link.bandwidth
        if tier not in used:
            used.add(tier)
            saved -= link.latency
        if saved > best_saved:
            best, best_saved = count, saved
    return best


class FittedLine:
    """A straight line through measured (size, seconds): seconds = start + size / rate. Newer
    measurements count more.

    After `lasts` seconds without a new measurement all are forgotten. A disk that was slow by
    chance is not used, so it is not measured: without this it would never be tried again.

    The `clock` may stand still or go backwards: a time that is not above 0 is ignored.
    """

    FORGET = 0.9  # the weight of earlier measurements, at each new one

    def __init__(self, lasts: float = inf, clock: Callable[[], float] = perf_counter):
        self.lasts, self.clock = lasts, clock
        self._start_anew()

    def _start_anew(self) -> None:
        self.count = self.x = self.y = self.xx = self.xy = 0.0
        self.at = self.clock()  # of the last measurement

    def add(self, size: float, seconds: float) -> None:
        if size <= 0 or seconds <= 0:
            return
        if self.clock() - self.at > self.lasts:
            self._start_anew()
        self.at = self.clock()
        for name, value in (
            ("count", 1), ("x", size), ("y", seconds), ("xx", size * size), ("xy", size * seconds)
        ):  # fmt: skip
            setattr(self, name, self.FORGET * getattr(self, name) + value)

    def fit(self, flat: bool = False) -> tuple[float, float] | None:
        """(start, rate), neither negative; None before the first measurement, and after `lasts`
        seconds without one.

        If larger sizes did not take longer, or there was one size only, nothing tells the start
        from the rate: then all of the time is the rate's or, if `flat`, the start's.
        """
        if self.count == 0 or self.clock() - self.at > self.lasts:
            return None
        spread = self.count * self.xx - self.x * self.x
        slope = 0.0
        if spread > 1e-6 * self.count * self.xx:  # else all sizes were the same
            slope = (self.count * self.xy - self.x * self.y) / spread
        if slope <= 0 and flat:
            return self.y / self.count, FAST_ENOUGH
        start = (self.y - slope * self.x) / self.count
        if slope <= 0 or start < 0:
            start, slope = 0.0, self.y / self.x
        return start, 1 / slope
