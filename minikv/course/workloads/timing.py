"""Wall time, with the garbage collector off, as `timeit` takes it."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

# How often a notebook measures what it tells. MINIKV_REPEATS=1 is enough to see that it runs.
REPEATS = int(os.environ.get("MINIKV_REPEATS", "3"))


def full_size(full: float, trial: float = 1) -> Any:
    """`full`, or `trial` where it is only to be seen that code runs (MINIKV_REPEATS=1)."""
    return full if REPEATS > 1 else trial


@contextmanager
def no_gc() -> Iterator[None]:
    """The garbage collector off: it would run in one contender's time for another's garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, what `work` returned), with the garbage collector off."""
    with no_gc():
        started = perf_counter()
        result = work()
        return perf_counter() - started, result
