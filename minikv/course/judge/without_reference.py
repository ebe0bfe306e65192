"""Where a reader's code runs, the reference's answer to its exercise is out of reach.

Each function that the exercise asks for is guarded, whatever name it is reached by: called by the
reader's code, it raises. The engine and the checks may go on calling it. On an object of the
reader's class, a method gives way to the one that the class would inherit if the reference had
none.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from minikv.course.exercises import reader_files
from minikv.course.exercises.manifest import Exercise
from minikv.course.exercises.skeletons import targets
from minikv.course.judge import scenarios
from minikv.course.judge.checking import Wrong

GUARD = "lambda *a, **k: __import__('sys').modules[{!r}]._guards[{}](*a, **k)"
STARTS_THREADS = {threading.__file__, thread.__file__}

_guards: list[Callable] = []  # what the code of a guarded function calls


class WithoutReference:
    """Guards the reference's answers to one exercise inside `active`."""

    def __init__(self, exercise: Exercise):
        chapter = exercise.chapter
        self.file = str(reader_files.path_of(chapter))
        self.reference = vars(scenarios.reference_module(exercise.id))
        self.asked = {p: t for p, t in targets(chapter).items() if t.exercise == exercise.id}
        self._swaps: list[tuple[Any, str, Any, Any]] = []  # whose attribute: guarded, and as it is
        self._guard_code(scenarios.reference_module, "reference_module", None)
        for path, target in self.asked.items():
            part: Any = target.reference
            for inner in ("__func__", "fget", "py_func"):  # methods, properties, Numba's kernels
                part = getattr(part, inner, part)
            if isinstance(part, FunctionType):
                owner = reader_files.holder_of(chapter, path) if "." in path else None
                self._guard_code(part, path, owner)
            elif hasattr(part, "rewrite"):  # a kernel in Triton's interpreter, before it runs
                guard = partial(self._call, part.rewrite, path, None)
                self._swaps.append((part, "rewrite", guard, part.rewrite))

    @contextmanager
    def active(self, mine: ModuleType | None = None) -> Iterator[None]:
        """In here the reader's code runs. Raises Wrong if a part of `mine`, the reader's module,
        is the reference's."""
        for path, target in self.asked.items():
            owner, _, name = path.rpartition(".")
            holder = getattr(mine, owner, None) if owner else mine
            if getattr(holder, "__dict__", {}).get(name, self) is target.reference:
                raise _wrong(path)
        try:
            for holder, name, guard, _ in self._swaps:
                setattr(holder, name, guard)
            yield
        finally:
            for holder, name, _, original in self._swaps:
                setattr(holder, name, original)

    def _guard_code(self, function: Any, path: str, owner: type | None) -> None:
        # The code, in place: whoever has the function has the guard.
        code, names = function.__code__, function.__globals__
        more = function.__name__, function.__defaults__, function.__closure__

        def original(*arguments: Any, **options: Any) -> Any:
            again = FunctionType(code, names, *more)
            again.__kwdefaults__ = function.__kwdefaults__
            return again(*arguments, **options)

        guard = eval(GUARD.format(__name__, len(_guards))).__code__
        _guards.append(partial(self._call, original, path, owner))
        guard = guard.replace(co_freevars=code.co_freevars)
        self._swaps.append((function, "__code__", guard, code))

    def _call(
        self, original: Callable, path: str, owner: Any, *arguments: Any, **options: Any
    ) -> Any:
        name = path.rpartition(".")[2]
        mine = owner is not None and bool(arguments) and self._is_readers(type(arguments[0]), name)
        if not mine and not self._asked_by_reader():
            return original(*arguments, **options)
        heir = mine and isinstance(arguments[0], owner)
        inherited = getattr(super(owner, arguments[0]), name, None) if heir else None
        if inherited is None:
            raise _wrong(path)
        return inherited(*arguments[1:], **options)

    def _is_readers(self, kind: type, name: str) -> bool:
        """Whether such objects have a reader's class, and no method of this name from a check."""
        for one in kind.__mro__:
            if one.__module__.startswith("exercises."):
                return self.reference.get(one.__name__) is not one
            if name in vars(one):
                break
        return False

    def _asked_by_reader(self) -> bool:
        """Whether the reader's code called, and not a function of ours that it has called."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename in (__file__, "<string>"):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename in STARTS_THREADS:
            return True
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("minikv"):
            code = frame.f_code
            if code.co_filename == self.file and frame.f_globals is not self.reference:
                return True
            frame = frame.f_back
        return False


def _wrong(path: str) -> Wrong:
    return Wrong(
        f"{path} of the engine was called, which is the answer",
        "the reference's own code does the work",
        "what would you write here if the engine had no such function?",
    )
