"""A histogram, without locks, that can be read while another thread writes it."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Gaps:
    """A histogram that takes many equal values at once: a chunk has several tokens."""

    def __init__(self, limits: Sequence[float]):
        self.limits, self.sum = limits, 0.0
        self.counts = [0] * (len(limits) + 1)  # the last counts what is above all limits

    def observe(self, value: float, number: int = 1) -> None:
        self.counts[bisect_left(self.limits, value)] += number
        self.sum += value * number

    def buckets(self) -> list[tuple[str, float]]:
        """(upper limit, how many are up to it), as Prometheus has them."""
        limits = [*map(str, map(float, self.limits)), "+Inf"]
        return list(zip(limits, accumulate(self.counts), strict=True))
