"""A circuit breaker: leaves what has failed alone for a while, so that it cannot delay callers."""

import threading
import time
from collections.abc import Callable


class Breaker:
    """Says whether to call something that may fail.

        closed      every call goes through
        open        after a failure: none does, for `first` seconds
        half-open   then one does, as a trial. If it works, the breaker closes. If it fails, the
                    next trial is twice as long away, at most `most` seconds.

    Usable from several threads. A trial that reports nothing counts as a failure.

    Worked example, first = 0.5: a call fails at 0.0 s. `allows` is False until 0.5 s, then True for
    one caller. That call fails as well, at 0.6 s: the next trial is at 1.6 s.
    """

    def __init__(
        self, first: float = 0.5, most: float = 30.0, clock: Callable[[], float] = time.monotonic
    ):
        self.first, self.most, self.clock = first, most, clock
        self.wait = 0.0  # seconds from a failure to the next trial; 0: closed
        self._next_trial = 0.0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the last call failed."""
        return self.wait > 0

    def allows(self) -> bool:
        """Whether to call now. After True, report with `worked` or `failed`.

        While it is open: False until the time of the next trial, then True once. With that True the
        wait is doubled, and the next trial is a whole wait from now. So no other caller goes
        through while the trial runs, nor if it never reports.
        """
        with self._lock:
            if self.wait == 0:
                return True
            if self.clock() < self._next_trial:
                return False
            self._lengthen()  # others wait for this trial's end
            return True

    def worked(self) -> bool:
        """Close. Returns whether it was open."""
        with self._lock:
            was_open, self.wait = self.is_open, 0.0
            return was_open

    def failed(self) -> bool:
        """Open, from now on: the next trial is a whole wait from now. If it was open, the wait is
        as long as before, because the trial has doubled it already. Returns whether it was closed.
        """
        with self._lock:
            was_open = self.is_open
            if was_open:  # its trial has lengthened the wait already
                self._next_trial = self.clock() + self.wait
            else:
                self._lengthen()
            return not was_open

    def _lengthen(self) -> None:
        self.wait = min(self.most, max(self.first, 2 * self.wait))
        self._next_trial = self.clock() + self.wait
