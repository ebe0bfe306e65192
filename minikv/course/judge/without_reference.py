"""Where a reader's code runs, there is no answer to its exercise.

Each function that the exercise asks for is emptied in place: a call of it, from any module and
under any name, is a call of the reader's. So the engine and the checks run on the reader's part. In
a player that is for good: the answers are in none of its objects, and `containment` keeps it from
the files that hold them. Where checks run in one process with the judge (tests, macOS, Windows), it
lasts while the reader's code runs.
"""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from minikv.course.exercise_data import mistakes, reader_files, skeletons
from minikv.course.exercise_data.manifest import Exercise
from minikv.course.exercise_data.skeletons import reference_part
from minikv.course.judge.checking import Wrong

EMPTIED = "lambda *a, **k: __import__('sys').modules[{!r}]._instead[{}](*a, **k)"
# From methods, properties, Numba's kernels, decorated functions and Triton's kernels to functions.
INNER = ("__func__", "fget", "py_func", "__wrapped__", "fn")

_instead: list[Callable] = []  # what the code of an emptied function calls


@cache
def without_reference(exercise: Exercise) -> "WithoutReference":
    return WithoutReference(exercise)


def files_of(exercise: Exercise) -> set[Path]:
    """What holds answers to the exercise, and to the others of its chapter: the modules, what
    Python and Numba have compiled of them, and the known mistakes. All are imported now."""
    chapter = exercise.chapter
    modules = {import_module(piece.module) for piece in chapter.skeleton}
    files = {Path(module.__file__ or "").resolve() for module in modules}
    compiled = {one for file in files for one in file.parent.glob(f"__pycache__/{file.stem}.*")}
    home = Path(import_module(chapter.package).__file__ or "").resolve()
    return files | compiled | {home.with_name("mistakes.toml")}


class WithoutReference:
    """The reader's parts of one exercise in the place of the reference's."""

    def __init__(self, exercise: Exercise):
        self.chapter = exercise.chapter
        self.mine: ModuleType | None = None  # the reader's module
        self._swaps: list[tuple[Any, str, Any, Any]] = []  # whose attribute: emptied, and as it is
        for path, id_ in self.chapter.places.items():
            part = reference_part(self.chapter, path) if id_ == exercise.id else None
            while part is not None:
                if hasattr(part, "rewrite"):  # a kernel in Triton's interpreter, before it runs
                    rewrite = partial(self._call, path, "rewrite")
                    self._swaps.append((part, "rewrite", rewrite, part.rewrite))
                    self._empty(part.rewritten_fn.get(part.fn), path)
                self._empty(part, path)
                part = next((getattr(part, name) for name in INNER if hasattr(part, name)), None)

    def for_good(self) -> None:
        """From now on in this process, and what was read of the reference is forgotten."""
        for holder, name, emptied, _ in self._swaps:
            setattr(holder, name, emptied)
        self._swaps.clear()
        for known in (
            skeletons.reference, skeletons.targets, skeletons.skeleton, mistakes.of_chapter,
        ):  # fmt: skip
            known.cache_clear()
        linecache.clearcache()

    @contextmanager
    def active(self, mine: ModuleType | None) -> Iterator[None]:
        """In here `mine`, a reader's module, is in the reference's place; None: nothing is."""
        before, self.mine = self.mine, mine
        try:
            for holder, name, emptied, _ in self._swaps:
                setattr(holder, name, emptied)
            yield
        finally:
            self.mine = before
            for holder, name, _, original in self._swaps:
                setattr(holder, name, original)

    def _empty(self, function: Any, path: str) -> None:
        # The code, in place: every reference to the function then runs the reader's.
        if isinstance(function, FunctionType):
            code = eval(EMPTIED.format(__name__, len(_instead))).__code__
            _instead.append(partial(self._call, path, None))
            emptied = code.replace(co_freevars=function.__code__.co_freevars)
            self._swaps.append((function, "__code__", emptied, function.__code__))

    def _call(self, path: str, attribute: str | None, *arguments: Any, **options: Any) -> Any:
        owner, _, name = path.rpartition(".")
        holder: Any = getattr(self.mine, owner, None) if owner else self.mine
        part = getattr(holder, "__dict__", {}).get(name)
        if part is None or part is reference_part(self.chapter, path):
            raise _wrong(path)
        if attribute is not None:
            return getattr(part, attribute)(*arguments, **options)
        part = getattr(part, "__func__", getattr(part, "fget", part))
        if owner and arguments and isinstance(arguments[0], holder):
            # Asked of an object that has the reader's method: by `super()`, or by the class.
            kind = reader_files.holder_of(self.chapter, path)
            heir = isinstance(arguments[0], kind)
            inherited = getattr(super(kind, arguments[0]), name, None) if heir else None
            if inherited is None:
                raise _wrong(path)
            return inherited(*arguments[1:], **options)
        if not owner and sys._getframe(2).f_code is getattr(part, "__code__", None):
            raise _wrong(path)  # by the reader's own function, and so on without end
        return part(*arguments, **options)


def _wrong(path: str) -> Wrong:
    return Wrong(
        f"{path} of the engine was called, which is the answer",
        "the reference's own code does the work",
        "what would you write here if the engine had no such function?",
    )
