"""Threads that take parts of a step, if the machine has a core for them.

A kernel does not hold Python's lock, so a second thread can compute beside the first. The threads
divide the work through shared memory (`kernels.run_step`); this file only provides the threads. One
pool serves all engines, and is as large as torch's.
"""

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Helper(threading.Thread):
    """A thread that does one job after another, and sleeps in between."""

    def __init__(self):
        super().__init__(name="minikv-helper", daemon=True)
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job  # it holds an engine's memory


_pool: list[Helper] = []


def offer(job: Callable[[], None], num_helpers: int) -> None:
    """Give the job to those of `num_helpers` threads that have none to begin with. Does not wait.

    A thread that has done its last job, but still waits for Python's lock to say so, is among
    them: its next job begins when the caller lets the lock go, at the beginning of the step.
    """
    while len(_pool) < num_helpers:
        _pool.append(Helper())
    for helper in _pool[:num_helpers]:
        if helper.jobs.empty():
            helper.jobs.put(job)


@atexit.register
def _end() -> None:
    """End the threads before the interpreter does. Python ends a thread that comes back from
    compiled code later than that, in the middle of that code."""
    for helper in _pool:
        helper.jobs.put(None)
    for helper in _pool:
        helper.join(timeout=1)  # a helper stays in a step that another thread still leads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)  # a forked process has no other threads
