"""Threads that take parts of a step, if the machine has a core for them.

A kernel does not hold Python's lock, so a second thread can compute beside the first. The threads
divide the work through shared memory (`kernels.run_step`); this file only provides the threads. One
pool serves all engines, and is as large as torch's.
"""

import atexit
import os
import threading
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from queue import SimpleQueue

import torch


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


# libgomp, which is in torch for Linux. Other runtimes of OpenMP were not tried.
_RUNTIMES = [CDLL(str(file)) for file in Path(torch.__file__).parent.glob("lib/libgomp*")]
HARD = 2  # omp_pause_hard: keep nothing


def end_torchs_threads() -> None:
    """End the threads that help the calling thread with torch's operations. Torch makes new ones
    when it needs some again. If there are none, this takes less than 1 µs.

    They spin after an operation, for a while or, with `OMP_WAIT_POLICY=ACTIVE`, for ever, on the
    cores that our helpers need.
    """
    for runtime in _RUNTIMES:
        runtime.omp_pause_resource_all(HARD)


if hasattr(os, "register_at_fork"):  # a forked process has no other threads
    os.register_at_fork(before=end_torchs_threads, after_in_child=_pool.clear)
