"""What the forked kernels of notebooks find imported, and the judge that they share."""

import atexit
import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from time import sleep

import minikv
from minikv.course.bench.peers import load_pair
from minikv.course.judge import process

USED = """
    ipykernel.ipkernel ipykernel.kernelapp matplotlib.pyplot matplotlib_inline.backend_inline
    minikv.course.lab minikv.course.workloads.running_table minikv.course.reader.ladder
"""
# Where a Python that was started for a kernel looks for modules.
PATH = [entry for entry in sys.path if entry != str(Path(__file__).parent)]


class Judge:
    """A started judge, as kernels see it, which are not its parent."""

    def __init__(self):
        started = process._start()
        self.pid, self.stdin, self.stdout = started.pid, started.stdin, started.stdout

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:  # the fork server has waited for it
            return 0

    def wait(self) -> int:
        while self.poll() is None:
            sleep(0.01)
        return 0


process._starter = Judge()
atexit.unregister(process._dismiss)  # it ends when nobody is left who can ask it
for module in USED.split():
    import_module(module)
lm, _ = load_pair("tinypy")
minikv.Engine(lm).generate([list(range(1, 33))], minikv.SamplingParams(max_tokens=2))
assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be copied safely"
gc.freeze()  # shared with the kernels as long as nobody writes there
