"""What the exercises and the notebook of chapter 13 work with."""

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@contextmanager
def in_process(module: ModuleType, seed: int) -> Iterator[None]:
    """`module` as it is in another process: there `hash` gives other numbers for strings, as it
    does since Python 3.3, and here for everything."""
    there = vars(module)
    there["hash"] = lambda thing: builtins.hash((seed, thing))
    try:
        yield
    finally:
        del there["hash"]


class Clock:
    """Seconds that pass only when they are told to. `asked` counts who wanted to know them."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now


def calls_to_the_dead(breaker: Any, clock: Clock, down: float, limit: float, pause: float) -> int:
    """How many calls a store gets in the `down` seconds during which it does not answer. Requests
    come one after the other, with `pause` seconds between them; each asks the breaker. A call
    waits for `limit` seconds, and has failed then."""
    calls, end = 0, clock.now + down
    while clock.now < end:
        if breaker.allows():
            calls += 1
            clock.now += limit
            breaker.failed()
        clock.now += pause
    return calls


@dataclass
class Transfer:
    """K and V of a prompt on their way."""

    sender: str
    blocks: list[int]
    wanted: bool = True
    complete: bool = False
