"""How kernels are compiled: what the compiler may do, and where machine code is kept."""

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from numba import njit, typeof
from numba.core.caching import FunctionCache

# What the compiler may do to our arithmetic. A sum in 16 lanes adds in another order than the one
# written here, so without `reassoc` no summing loop becomes SIMD. `contract` turns x y + z into one
# operation. The rest of `fastmath=True` promises that NaN and infinity never occur: a NaN in a slot
# that no sequence owns could then become any number.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


# A step is compiled from functions of these wings, whichever file it is in.
SOURCES = [Path(__file__).parents[1] / wing for wing in ("cpu", "quant", "groups", "states")]


class MachineCodeCache(FunctionCache):
    """Machine code on disk, for the next process: beside the source, or in the user's cache if the
    source's folder cannot be written. If neither can be, nothing is kept. It is read as long as
    none of SOURCES has changed: Numba alone looks at a function's own file."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        files = sorted(file for folder in SOURCES for file in folder.glob("*.py"))
        found = [(file.name, file.stat().st_mtime, file.stat().st_size) for file in files]
        self._cache_file._source_stamp = self._cache_file._source_stamp, found

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except (AttributeError, ImportError):  # it names a type that is called otherwise by now
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig, data) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


_kernels: list[Any] = []


def num_compiled() -> int:
    """How many versions of kernels this process has compiled itself, not read from disk."""
    return sum(len(one.signatures) - sum(one.stats.cache_hits.values()) for one in _kernels)


def kernel(function: Callable, **options: Any) -> Any:
    """Compile a function for this machine when it is first called with arrays of these types.

    `nogil`: it holds no lock of Python, so threads can run it side by side. `error_model`: x / 0
    is infinity or NaN, as in NumPy. Python's ZeroDivisionError would need a branch at every
    division, and a loop with such a branch is not SIMD. `_nrt`: references to arrays are counted.
    A function that makes no array can do without.
    """
    usual = {"nogil": True, "fastmath": FASTMATH, "error_model": "numpy", "_nrt": True}
    return keep(njit(no_cfunc_wrapper=True, **usual | options)(function))


def keep(compiled: Any) -> Any:
    """Keep what was compiled for the next process. Returns it."""
    _kernels.append(compiled)
    with suppress(OSError, RuntimeError):  # Numba found no folder
        compiled._cache = MachineCodeCache(compiled.py_func)
    return compiled


@contextmanager
def compiled_beside(compiled: Any, *args: Any) -> Iterator[None]:
    """Meanwhile another process compiles a kernel for arguments like these, because Numba compiles
    one function at a time in a process. Afterwards the kernel is on disk; if it is not, whoever
    calls it compiles it."""
    kinds, it, cache = tuple(map(typeof, args)), compiled.py_func, compiled._cache
    with ExitStack() as stack:
        is_wanted = cache.cache_path is not None and kinds not in compiled.overloads
        is_wanted = is_wanted and not cache.load_overload(kinds, compiled.targetctx)
        if is_wanted and (os.cpu_count() or 1) > 1:
            code = f"""import gc, pickle, {it.__module__} as its; gc.disable()
its.{it.__name__}.compile(pickle.loads({pickle.dumps(kinds)!r}))"""
            env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            run = [sys.executable, "-c", code]
            with suppress(OSError):  # this process may not start others
                stack.enter_context(Popen(run, stdout=DEVNULL, stderr=DEVNULL, env=env))
        yield


# For a small function that kernels call: LLVM makes it a part of them. A call hands over seven
# numbers for each array. And a slice counts the references to its memory, with an operation that
# waits for other threads; where there is no call, the compiler leaves the count out.
INLINE: Any = {"fastmath": FASTMATH, "error_model": "numpy", "forceinline": True}
part = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **INLINE)

# For a function with one caller, or few: it becomes a part of each. As a kernel it would be
# compiled alone, too, and so once more.
inline = partial(kernel, inline="always")

# For a kernel that only kernels call, and that makes no array.
inner = partial(kernel, no_cpython_wrapper=True, _nrt=False)

# For a kernel that is called at its address alone, see `minikv.cpu.addresses`.
apart = partial(kernel, no_cpython_wrapper=True)
