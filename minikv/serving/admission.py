"""How much may wait: as many prompt tokens as are computed in the time that a first token may take
(`Admission`), and no more requests than find room in that time (`Room`).

A queue without a limit lets every request wait longer than its client does.
"""

import math
from collections import deque
from typing import Any


class Admission:
    """Lets requests in as long as they get their first token in time.

    target: seconds that a request may wait for its first token.
    enough: tokens that a measurement of the rate needs; fewer would measure a single step.
    Times are seconds of any clock; a request is named by a `key`.
    """

    def __init__(self, target: float, enough: int = 0):
        self.target, self.enough = target, enough
        self.waiting: dict[Any, int] = {}  # prompt tokens of requests without a first token
        self.began: dict[Any, tuple[float, int]] = {}  # when each came, and all tokens queued then
        self.measured: deque[tuple[int, float]] = deque(maxlen=8)  # (tokens, seconds)

    @property
    def queued(self) -> int:
        """Prompt tokens that wait."""
        return sum(self.waiting.values())

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second, over the last measurements; None before the first."""
        seconds = sum(one for _, one in self.measured)
        return sum(one for one, _ in self.measured) / seconds if seconds else None

    def enter(self, key: Any, num_tokens: int, now: float) -> int:
        """Let a request wait, and return 0. Or refuse it, and return after how many seconds it
        would be let in if no other came: the value of Retry-After, rounded up.

        It would wait for all tokens that are queued, and for its own, at `self.rate`. If that is at
        most `self.target`, it is let in. So it is if the rate is not known, or nothing waits.
        """
        rate, queued = self.rate, self.queued
        if rate is not None and queued > 0:
            room = max(0.0, self.target * rate - num_tokens)  # tokens that may be ahead of it
            if queued > room:
                return math.ceil((queued - room) / rate)
        self.waiting[key] = num_tokens
        self.began[key] = now, queued + num_tokens
        return 0

    def first_token(self, key: Any, now: float) -> None:
        """A request has its first token and waits no more. Since it came, all that was queued then
        was computed, its own tokens included: a measurement of the rate, if it is of at least
        `self.enough` tokens."""
        began, num_tokens = self.began.pop(key)
        del self.waiting[key]
        if num_tokens >= self.enough:
            self.measured.append((num_tokens, now - began))

    def leave(self, key: Any) -> None:
        """A client has left. It waits no more, and nothing was measured."""
        self.waiting.pop(key, None)
        self.began.pop(key, None)


class Room:
    """Lets requests in as long as those before them end in time.

    A request's share of an engine is the most that it can take: of its seats, one for each sample,
    or of its memory, for all tokens that it asks for. While all shares fit, nobody waits for room.
    A request that comes then waits until so much is given back as is missing, at the rate since
    room became short. Nobody needs to tell how long answers are: that shows in this rate.

    target: seconds that a request may wait for room. crowd: of so many engines' room the requests
    may wait before it is known how long that takes.
    """

    def __init__(self, target: float, crowd: float):
        self.target, self.crowd = target, crowd
        self.shares: dict[Any, float] = {}  # of unfinished requests
        self.full_since: float | None = None
        self.freed = 0.0  # since then

    def missing(self, capacity: float, share: float = 0.0) -> float:
        """How much room there is too little, for all and one more. capacity: number of engines."""
        return max(0.0, sum(self.shares.values()) + share - capacity)

    def enter(self, key: Any, share: float, capacity: float, now: float) -> int:
        """Let a request in, and return 0. Or refuse it, and return after how many seconds it would
        be let in if no other came, rounded up. It is let in if there is no other."""
        missing = self.missing(capacity, share)
        if missing > 0 and self.shares:
            self.full_since = now if self.full_since is None else self.full_since
            elapsed = now - self.full_since
            if self.freed > 0:
                wait = missing * elapsed / self.freed
            else:  # it will take longer than it has taken
                wait = elapsed if missing <= self.crowd else self.target + 1
            if wait > self.target:
                return max(1, math.ceil(wait - self.target))
        self.shares[key] = share
        return 0

    def leave(self, key: Any, capacity: float) -> None:
        """A request is over, or its client has left."""
        self.freed += self.shares.pop(key, 0.0)
        if self.missing(capacity) == 0:
            self.full_since, self.freed = None, 0.0
