"""What a reader's code raised, so that another process can compare it and tell of it."""

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import OURS, ReaderError
from minikv.course.judge.checking import Wrong
from minikv.course.judge.result import Line

MOST_FRAMES = 60  # of a stack trace
LONGEST_MESSAGE, LINES_OF_A_MESSAGE = 1_000, 10  # characters and lines of an error's message


@dataclass(frozen=True)
class Told:
    """What a report says of an exception."""

    what: str
    trace: str
    cause: str | None = None
    look: str | None = None
    where: str | None = None  # to look, if nobody knows better
    origin: str | None = None
    at: int | None = None
    unwritten: bool = False


class Raised:
    """The kinds and the words of an exception. The exception itself stays in the process that
    raised it, which `tell`s the rest when it is asked."""

    def __init__(self, kinds: list[str], message: str, tell: Callable[[], Told]):
        self.kinds, self.message = kinds, message  # its class first, then the classes above
        self._tell = tell
        self._told: Told | None = None

    @classmethod
    def of(cls, error: Any) -> "Raised":
        """Of an exception; of one that another process raised, what is known here."""
        if isinstance(error, Raised):
            return error
        if isinstance(error, Failure):
            return error.raised
        kinds = [f"{one.__module__}.{one.__qualname__}" for one in type(error).__mro__]
        return cls(kinds, _said(error), partial(_tell, error))

    @property
    def name(self) -> str:
        return self.kinds[0].rpartition(".")[2]

    def is_a(self, other: "Raised") -> bool:
        return other.kinds[0] in self.kinds

    def ask(self) -> Told:
        if self._told is None:
            self._told = self._tell()
        return self._told

    def line(self, name: str, cause: str | None, look: str | None) -> Line:
        """A report's line about it, with what is to be said where nothing better is known."""
        told = self.ask()
        if told.unwritten:
            return Line(name, False, told.what, None, None, told.origin, told.at)
        look = told.look or look or told.where
        return Line(name, False, told.what, told.cause or cause, look, told.origin, told.at)


class Broken(ReaderError):
    """An error of the course, which no reader can correct and no code is to blame for."""


def broken(error: Exception) -> str:
    """A sentence about an error that was raised where no reader's code runs."""
    frames = traceback.extract_tb(error.__traceback__)
    [*_, last] = [f for f in frames if "chapters" in Path(f.filename).parts] or frames
    where = "" if ".toml" in str(error) else f"{last.filename}, line {last.lineno}: "
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    said = f"{where}{kind}{error}"
    return said if said.startswith(OURS) else f"{OURS}{said}"


class Failure(Exception):
    """Something was raised where the reader's code runs, which is not here."""

    def __init__(self, raised: Raised):
        super().__init__(raised.message)
        self.raised = raised


def _said(error: BaseException) -> str:
    try:
        return str(error)[: 20 * LONGEST_MESSAGE]
    except Exception:
        return ""


def _tell(error: BaseException) -> Told:
    trace = "".join(
        line[:LONGEST_MESSAGE] for line in traceback.format_exception(error)[-MOST_FRAMES:]
    )
    chain = [error]  # Triton wraps what a kernel raises, once for each call
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
        chain.append(error)
    if isinstance(error, Wrong):
        return Told(error.what, trace, error.cause, error.look)
    message = _said(error)
    frames = [f for one in chain for f in traceback.extract_tb(one.__traceback__)]
    own = [f for f in frames if is_readers(f.filename)]
    at = own[-1].lineno if own else None
    if isinstance(error, NotImplementedError) and "Exercise " in message:
        return Told(f"not written yet: {message}", trace, origin=message, at=at, unwritten=True)
    what = f"{type(error).__name__}: {_cut(message)}".rstrip(": ")
    origin = cause = look = None
    if own:
        origin = f"{short(own[-1].filename)}, line {own[-1].lineno}"
        what += f"\n{origin}: {own[-1].line}"
    if isinstance(error, NameError):
        look = "the name on that line: is it spelled as where it is defined, or imported?"
    elif isinstance(error, RecursionError):
        cause = "the function calls itself without end"
    elif isinstance(error, MemoryError) and not (own and (own[-1].line or "").startswith("raise")):
        cause = "more memory was asked for than a check may take"
    elif "changed size during iteration" in message:
        cause = "what a loop goes over changes within the loop: loop over a copy, `list(…)`"
    elif (
        (isinstance(error, RuntimeError) or len(chain) > 1)
        and re.search("size|shape|dimension|einsum", message)
        and not (own and (own[-1].line or "").startswith("raise"))
    ):
        cause, look = "shapes that do not fit", "the shapes of what stands on that line: print them"
    elif len(chain) > 1 and "object is not iterable" in message:
        cause = "a pointer is no array: x[i] is tl.load(x + i), and x[i] = … is tl.store(x + i, …)"
    elif "'function' object is not subscriptable" in message:
        cause = "a function without `@triton.jit` above it is no kernel"
    where = "the line that is named here" if origin else "what your code does in this case"
    return Told(what, trace, cause, look, where, origin, at)


def _cut(message: str) -> str:
    """The beginning of a message that would fill pages."""
    message = message.encode("utf-8", "replace").decode()  # half a pair cannot be printed
    lines = message[:LONGEST_MESSAGE].splitlines()
    kept = "\n".join(lines[:LINES_OF_A_MESSAGE])
    return kept if kept == message else f"{kept} …"


def is_readers(file: str) -> bool:
    return Path(file).parent == reader_files.folder()


def short(file: str) -> str:
    return f"{reader_files.folder().name}/{Path(file).name}"
