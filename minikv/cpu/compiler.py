"""How kernels are compiled: what the compiler may do, and where machine code is kept."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

# What the compiler may do to our arithmetic. A sum that is computed in 16 lanes has another order
# than the one written here: without `reassoc` no loop that sums up becomes SIMD. `contract` turns
# x y + z into one operation. The rest of `fastmath=True` says that NaN and infinity never occur:
# a NaN in a slot that nobody owns would then be anything, even invisible.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


class Cache(FunctionCache):
    """Machine code on disk, for the next process: beside the source, or in the user's cache where
    that cannot be written. Where nothing can be written, nothing is kept."""

    def save_overload(self, sig, data) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


_kernels: list[Any] = []


def num_compiled() -> int:
    """How many versions of kernels this process has compiled, not found on disk."""
    return sum(len(one.signatures) - sum(one.stats.cache_hits.values()) for one in _kernels)


def kernel(function: Callable) -> Any:
    """Compile a function for this machine when it is first called with arrays of these types.

    `nogil`: it holds no lock of Python, so threads can run it side by side. `error_model`: x / 0
    is infinity or NaN, as in NumPy. Python's ZeroDivisionError would need a branch at every
    division, and a loop with such a branch is not SIMD.
    """
    compiled = njit(nogil=True, fastmath=FASTMATH, error_model="numpy")(function)
    return keep(compiled)


def keep(compiled: Any) -> Any:
    """Let what was compiled be found by the next process. Returns it."""
    _kernels.append(compiled)
    with suppress(OSError, RuntimeError):  # Numba found no folder
        compiled._cache = Cache(compiled.py_func)
    return compiled


# For a function that one other calls: it becomes a part of that one. On its own it would be
# compiled twice, alone and again with its caller.
inline = njit(inline="always")
