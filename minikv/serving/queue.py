"""How much may wait: as many prompt tokens as are computed in the time that a first token may take.

A queue without a limit lets every request wait longer than its client does. The rate is measured:
when a request gets its first token, all tokens that were queued before it, and its own, have been
computed since it came.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil
from time import monotonic

from minikv.serving.inbox import Busy, Inbox

ENOUGH = 256  # tokens that a measurement of the rate needs; fewer would measure a single step


@dataclass(eq=False)
class _Waiting:
    inbox: Inbox
    num_tokens: int
    num_ahead: int  # tokens that were queued before, and its own
    since: float


class Queue:
    """The requests that have no token yet. Used in the event loop alone.

    max_seconds: that a request may wait for its first token.
    max_tokens: that may wait, whatever the rate; until it is known, only this counts.
    """

    def __init__(self, max_seconds: float, max_tokens: int):
        self.max_seconds, self.max_tokens = max_seconds, max_tokens
        self._waiting: list[_Waiting] = []
        self._rates: deque[float] = deque(maxlen=32)  # tokens per second

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self._waiting)

    def enter(self, inbox: Inbox, num_tokens: int) -> None:
        """Let a request wait. Raises Busy if it would wait too long, with the seconds after which
        there will be room; never if nothing waits."""
        self._settle()
        queued = self.num_tokens
        rate = sum(self._rates) / len(self._rates) if self._rates else None
        if self._waiting and rate is not None and queued / rate > self.max_seconds:
            text = f"{queued} tokens are queued, for {queued / rate:.0f} s"
            raise Busy(text, ceil(queued / rate - self.max_seconds))
        if self._waiting and queued + num_tokens > self.max_tokens:
            surplus = min(queued, queued + num_tokens - self.max_tokens)
            text = f"{queued} tokens are queued, at most {self.max_tokens} may be"
            raise Busy(text, ceil(surplus / rate) if rate is not None else 1)
        self._waiting.append(_Waiting(inbox, num_tokens, queued + num_tokens, monotonic()))

    def leave(self, inbox: Inbox) -> None:
        """A request is over, whether it had a token or not."""
        self._settle()
        self._waiting = [one for one in self._waiting if one.inbox is not inbox]

    def _settle(self) -> None:
        """Take out those that have a token."""
        for one in self._waiting:
            if one.inbox.first is not None and one.num_ahead >= ENOUGH:
                self._rates.append(one.num_ahead / max(one.inbox.first - one.since, 1e-6))
        self._waiting = [one for one in self._waiting if one.inbox.first is None]
