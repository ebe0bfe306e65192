"""What chapter 09's checks see of a kernel: every element that it reads or writes, in plain Python.

    with plainly(mine):                       # kernels run as the Python that they are written in
        kv = Watched(kv, "kv", watch)
        mine.attend_heads(q, kv, …)
    watch.reads["kv"]                         # how often each element was read

Compiled code checks no address. So a kernel is first run in Python on small arrays, where one
that is wrong ends in a sentence, and only what was right there is compiled: `refusal` says in a
sentence what Numba does not take, `compiled_code` what became of the loops.
"""

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numpy.lib.mixins import NDArrayOperatorsMixin


@contextmanager
def plainly(module: ModuleType) -> Iterator[None]:
    """In here the kernels of `module`, and those that they call, are Python; and memory that
    nobody has written holds NaN."""
    swapped: list[tuple[dict, str, Any]] = []
    todo, seen = [vars(module)], set()
    while todo:
        names = todo.pop()
        seen.add(id(names))
        for name, value in list(names.items()):
            if isinstance(value, Dispatcher):
                swapped.append((names, name, value))
                names[name] = value.py_func
                if id(value.py_func.__globals__) not in seen:
                    todo.append(value.py_func.__globals__)
            elif inspect.isfunction(value) and ".ch09_" in value.__module__:
                todo += [value.__globals__] * (id(value.__globals__) not in seen)
    empty, empty_like = np.empty, np.empty_like
    vars(np)["empty"] = lambda *a, **more: _poisoned(empty(*a, **more))
    vars(np)["empty_like"] = lambda *a, **more: _poisoned(empty_like(*a, **more))
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        vars(np).update(empty=empty, empty_like=empty_like)
        for names, name, value in reversed(swapped):
            names[name] = value


def _poisoned(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        values.fill(np.nan)
    return values


class Watch:
    """Which elements of some arrays are read and written, in order, and by which caller."""

    def __init__(self) -> None:
        self.reads: dict[str, list[int]] = {}  # by array: elements, in the order of the reads
        self.writes: dict[str, dict[int, set[int]]] = {}  # by array, element: the callers
        self.readers: dict[str, dict[int, set[int]]] = {}
        self.caller = 0
        self.touched: Callable[[str], None] = lambda name: None

    def read(self, name: str, elements: np.ndarray | int) -> None:
        found = np.ravel(elements).tolist()
        self.reads.setdefault(name, []).extend(found)
        for element in found:
            self.readers.setdefault(name, {}).setdefault(element, set()).add(self.caller)
        self.touched(name)

    def wrote(self, name: str, elements: np.ndarray | int) -> None:
        for element in np.ravel(elements).tolist():
            self.writes.setdefault(name, {}).setdefault(element, set()).add(self.caller)
        self.touched(name)

    def fetches(self, name: str, line: Callable[[int], object]) -> int:
        """How often a cache that holds one line of an array has to fetch another one."""
        held, count = None, 0
        for element in self.reads.get(name, []):
            if (now := line(element)) != held:
                held, count = now, count + 1
        return count

    def races(self, name: str) -> int:
        """Elements that one caller writes and another one reads or writes."""
        readers = self.readers.get(name, {})
        return sum(
            len(callers | readers.get(element, set())) > 1
            for element, callers in self.writes.get(name, {}).items()
        )


class Watched(NDArrayOperatorsMixin):
    """An array, or a view of one, that tells a watch what is done to it."""

    def __init__(self, values: np.ndarray, name: str, watch: Watch, ids: np.ndarray | None = None):
        self._values, self._name, self._watch = values, name, watch
        self._ids = np.arange(values.size).reshape(values.shape) if ids is None else ids

    def __getitem__(self, place: Any) -> Any:
        found, ids = self._values[place], self._ids[place]
        if isinstance(found, np.ndarray):
            return Watched(found, self._name, self._watch, ids)
        self._watch.read(self._name, ids)
        return self._values[place]  # again: another caller may have had its turn

    def __setitem__(self, place: Any, value: Any) -> None:
        self._values[place] = np.asarray(value)
        self._watch.wrote(self._name, self._ids[place])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._watch.read(self._name, self._ids)
        return np.array(self._values, dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        out = more.pop("out", ())
        plain = [np.asarray(one) if isinstance(one, Watched) else one for one in inputs]
        result = getattr(ufunc, method)(*plain, **more)
        if out:
            out[0][...] = result
            return out[0]
        return result

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "ndim", "size", "strides"):
            return getattr(self._values, name)
        if name in ("reshape", "transpose", "T", "swapaxes", "ravel"):
            values, ids = getattr(self._values, name), getattr(self._ids, name)
            if name == "T":
                return Watched(values, self._name, self._watch, ids)
            return lambda *a: Watched(values(*a), self._name, self._watch, ids(*a))
        if name == "fill":
            return lambda value: self.__setitem__(..., value)
        if name.startswith("__"):  # NumPy asks for these before it calls __array__
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


# ── Callers that take turns ───────────────────────────────────────────────────────────────


def one_by_one(kernel: Callable, calls: Sequence[tuple]) -> None:
    for call in calls:
        kernel(*call)


def in_turns(kernel: Callable, calls: Sequence[tuple]) -> int:
    """Make the calls side by side, in an order that is always the same: one runs until it writes
    to an array that others hold too, then the next has its turn. Returns how many elements one
    call writes and another reads or writes.

    The kernel is Python, and these are threads of which one runs at a time.
    """
    watch, go_on = Watch(), threading.Condition()
    alive, turn = list(range(len(calls))), [0]
    who = threading.local()

    def next_turn() -> None:
        later = [one for one in alive if one > turn[0]]
        turn[0] = (later or alive or [0])[0]
        go_on.notify_all()

    def give_turn(name: str) -> None:
        if name.startswith("shared"):
            next_turn()
            go_on.wait_for(lambda: turn[0] == who.number)
        watch.caller = who.number

    watch.touched = give_turn
    errors: list[BaseException] = []
    arrays = _by_memory(
        [value for call in calls for value in call if isinstance(value, np.ndarray)]
    )

    def work(number: int) -> None:
        who.number = number
        with go_on:
            go_on.wait_for(lambda: turn[0] == number)
            watch.caller = number
            try:
                kernel(*(_watched(value, arrays, watch) for value in calls[number]))
            except BaseException as error:
                errors.append(error)
            alive.remove(number)
            next_turn()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(watch.races(name) for name in watch.writes)


def _by_memory(values: list[np.ndarray]) -> list[tuple[np.ndarray, str]]:
    """Each piece of memory once, with a name: "shared" if several calls hold it."""
    found: list[list] = []
    for value in values:
        for one in found:
            if np.shares_memory(one[0], value):
                one[1] += 1
                break
        else:
            found.append([value, 1])
    return [(one, f"{'shared' if n > 1 else 'own'} {i}") for i, (one, n) in enumerate(found)]


def _watched(value: Any, arrays: list[tuple[np.ndarray, str]], watch: Watch) -> Any:
    if not isinstance(value, np.ndarray) or value.size == 0:
        return value
    name = next(name for one, name in arrays if np.shares_memory(one, value))
    start = value.__array_interface__["data"][0] // value.itemsize
    strides = [step // value.itemsize for step in value.strides]
    ids = start + sum(
        np.arange(n).reshape([-1 if i == axis else 1 for i in range(value.ndim)]) * step
        for axis, (n, step) in enumerate(zip(value.shape, strides, strict=True))
    )
    return Watched(value, name, watch, np.broadcast_to(ids, value.shape))


# ── What the compiler says ────────────────────────────────────────────────────────────────


def refusal(error: BaseException, file: str) -> tuple[str, int | None]:
    """What Numba refuses, as one sentence of its own long message; and the line in `file`."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [int(n) for name, n in re.findall(r'File "([^"]+)", line (\d+)', text)
             if name and file.endswith(name.removeprefix("./").rpartition("/")[2])]  # fmt: skip
    loc = getattr(error, "loc", None)
    if not lines and loc is not None and loc.filename == file:
        lines = [loc.line]
    raised = re.search(r"Raised from .+? \((\d+)\)", text)  # while it reads the bytecode
    if raised:
        lines, text = [int(raised[1])], text[: raised.start()]
    missing = re.search(r"No implementation of function .*\n.*\n?\s*>>> (.*)", text)
    if missing:
        text = f"it knows no {missing[1]}"
    said = [
        line.strip(" >*-") for line in text.splitlines()
        if line.strip() and not re.match(
            r"\s*(Failed in nopython|File |During: |There (are|is) \d|\^|Enable |This error|"
            r"- (Resolution|argument)|<source|def |Source|Overload)", line)
    ]  # fmt: skip
    sentence = said[0] if said else type(error).__name__
    sentence = re.sub(r"\(<[^>]*>\)", "", sentence).rstrip(":.")
    return sentence[:160], lines[-1] if lines else None


def compiled_code(kernel: Dispatcher) -> str:
    """The optimised code of a compiled kernel, in LLVM's notation."""
    return "\n".join(kernel.inspect_llvm().values())


def widens(code: str) -> bool:
    """Whether a loop turns its float32 into float64 to add them up."""
    return bool(re.search(r"fpext <\d+ x float>", code))
