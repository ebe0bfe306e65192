"""What depends on the machine that an engine runs on: which attention, and why no faster one."""

from minikv.machine.attention import backend_of, numba_problem

__all__ = ["backend_of", "numba_problem"]
