"""What forked processes find imported, and how those of them that need a judge get one."""

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest  # and with it what workers are

import minikv
import minikv_kernels  # noqa: F401  before transformers, which imports triton: settles the interpreter
from minikv.course.bench.peers import load_pair
from minikv.course.judge import checking, process

USED = """
    ipykernel.ipkernel ipykernel.kernelapp matplotlib.pyplot matplotlib_inline.backend_inline
    minikv.course.lab minikv.course.workloads.running_table minikv.course.reader.ladder
"""
# Where a Python that was started for a kernel or a judge looks for modules.
PATH = [entry for entry in sys.path if entry != str(Path(__file__).parent)]

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for module in USED.split():
        import_module(module)
process.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": forked.Forked})
lm, _ = load_pair("tinypy")
for one in (lm, checking.tinypy()):
    minikv.Engine(one).generate([list(range(1, 33))], minikv.SamplingParams(max_tokens=2))
assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be copied safely"
gc.freeze()  # shared with the copies as long as nobody writes there
