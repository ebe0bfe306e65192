"""Where minikv is a program of its own: what it does before it imports anything else."""

import sys

AS_MODULE = sys.argv[:1] == ["-m"]  # what Python says until it has found the module

if AS_MODULE and not sys.flags.safe_path and __file__ != f"{sys.path[0]}/minikv/program.py":
    # The folder that it was called in may hold a random.py, which torch would take for Python's.
    del sys.path[0]

import signal  # noqa: E402  only now
from pathlib import Path  # noqa: E402

program = AS_MODULE or Path(sys.argv[0]).stem == "minikv"
if program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Control-C ends it at once: a trace from within torch would tell nobody anything.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
