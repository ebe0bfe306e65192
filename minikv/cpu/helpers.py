"""Threads that help a step along, if the machine has a core for them.

A kernel holds no lock of Python, so a second thread can compute beside the first. Which part it
computes is settled in memory that both see (`kernels.run_step`); here is only where the threads
come from. There is one pool for all engines, as large as torch's.
"""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Helper(threading.Thread):
    """A thread that does one job after another, and sleeps in between."""

    def __init__(self):
        super().__init__(name="minikv-helper", daemon=True)
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.is_busy = False
        self.start()

    def run(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                job()
            finally:
                del job  # it holds an engine's memory
                self.is_busy = False


_pool: list[Helper] = []


def offer(job: Callable[[], None], num_helpers: int) -> None:
    """Let up to `num_helpers` threads do the job, those that have none. Waits for nothing."""
    while len(_pool) < num_helpers:
        _pool.append(Helper())
    for helper in _pool[:num_helpers]:
        if not helper.is_busy:
            helper.is_busy = True
            helper.jobs.put(job)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)  # a fork takes no threads along
