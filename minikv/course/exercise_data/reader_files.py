"""A reader's exercise files: where they are, which parts are written, and what they do when run."""

import ast
import copy
import hashlib
import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import minikv
from minikv.course.exercise_data.manifest import Chapter, Exercise, ReaderError
from minikv.course.exercise_data.skeletons import (
    AnyFunction,
    Target,
    definitions,
    docstring_of,
    is_unwritten,
    lines_of,
    reference_part,
    targets,
    text_of,
)


class WorkbookError(ReaderError):
    """An exercise file cannot be used. The sentence says where, and what to do."""

    def __init__(self, sentence: str, line: int | None = None):
        super().__init__(sentence)
        self.line = line  # that Python cannot read


MARK = ".minikv"  # in a folder that `minikv start` has made, and nowhere else


def course_folder() -> Path:
    """The folder with the reader's notebooks and exercises: the one around this process that
    `minikv start` has made, or the checkout that the package lies in. Raises ReaderError."""
    here = Path.cwd()
    for place in (here, *here.parents):
        if (place / MARK).is_dir():
            return place
    checkout = Path(minikv.__file__).parents[1]
    if (checkout / "exercises").is_dir():
        return checkout
    raise ReaderError(
        f"{here} is in no folder of the course, so there are no exercises here; "
        "`minikv start` makes one, and `cd` leads into it"
    )


def folder() -> Path:
    """The folder of the exercises: $MINIKV_EXERCISES, or the one in the course's folder."""
    named = os.environ.get("MINIKV_EXERCISES")
    return Path(named).absolute() if named else course_folder() / "exercises"


@contextmanager
def in_folder(place: Path) -> Iterator[None]:
    """Inside, the exercises are those of another folder."""
    before = os.environ.get("MINIKV_EXERCISES")
    os.environ["MINIKV_EXERCISES"] = str(place)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINIKV_EXERCISES"]
        else:
            os.environ["MINIKV_EXERCISES"] = before


def nobodys() -> AbstractContextManager[None]:
    """Inside, there are no exercises: nobody's code is found and run."""
    return in_folder(Path(minikv.__file__).parent / "no-folder")


def path_of(chapter: Chapter) -> Path:
    return folder() / chapter.file_name


def display_name(chapter: Chapter) -> str:
    return f"{folder().name}/{chapter.file_name}"


LONGEST_FILE = 1_000_000  # bytes; the longest skeleton has a fiftieth of it
LONGEST_LINE = 1_000  # characters that are told of a line


def saved_at(chapter: Chapter) -> float | None:
    """When the file was saved, in seconds since 1970; None if there is none."""
    try:
        return path_of(chapter).stat().st_mtime
    except FileNotFoundError:
        return None


def read(chapter: Chapter) -> "ReaderFile":
    """The reader's file. Raises WorkbookError if there is none, or Python cannot read it."""
    try:
        text = text_in(path_of(chapter))
    except FileNotFoundError:
        raise WorkbookError(
            f'{display_name(chapter)} is missing; reset("{chapter.number}") makes it again'
        ) from None
    if not text.strip():
        again = f'reset("{chapter.number}") makes it again'
        raise WorkbookError(f"{display_name(chapter)} is empty; {again}")
    return parsed(chapter, text)


def text_in(file: Path) -> str:
    """The text of a file of exercises. Raises WorkbookError, or FileNotFoundError."""
    name = f"{file.parent.name}/{file.name}"
    try:
        if file.exists() and not file.is_file():
            raise WorkbookError(f"{name} is a folder or a pipe, and no file")
        size = file.stat().st_size
        if size > LONGEST_FILE:
            raise WorkbookError(
                f"{name} has {size:,} bytes; a file of exercises may have "
                f"{LONGEST_FILE:,}. Put long data into another file"
            )
        return file.read_text(encoding="utf-8-sig")  # some editors begin with a mark
    except UnicodeDecodeError as error:
        raise WorkbookError(f"{name} is not UTF-8 text ({error}); save it as UTF-8") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WorkbookError(f"{name}: {error.strerror}") from None


@contextmanager
def _understood(chapter: Chapter) -> Iterator[None]:
    """Whatever Python cannot read inside, or is nested too deeply for it, is a WorkbookError."""
    try:
        yield
    except WorkbookError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        source = (getattr(error, "text", None) or "").strip()
        why = getattr(error, "msg", None) or str(error) or "it is nested too deeply"
        raise WorkbookError(
            f"{display_name(chapter)}{line}: Python cannot read this: {why}"
            + (f": {source[:LONGEST_LINE]}" if source else ""),
            getattr(error, "lineno", None),
        ) from None


@dataclass(frozen=True)
class Progress:
    """How much of one exercise is written, found without running it."""

    written: list[str]  # paths
    unwritten: dict[str, int]  # path: the line of its `raise`
    missing: list[str]

    @property
    def started(self) -> bool:
        return bool(self.written or self.missing)


class ReaderFile:
    """The text of a reader's file, parsed once. Raises WorkbookError, with the line that Python
    cannot read."""

    def __init__(self, chapter: Chapter, text: str):
        self.chapter, self.text = chapter, text
        with _understood(chapter):
            self.tree = ast.parse(text)
        self.definitions = definitions(self.tree)
        self._fingerprints: dict[str, str] = {}  # by exercise

    def progress_of(self, exercise: Exercise) -> Progress:
        """Which parts of an exercise it has. Of a bug that can be mended in one of several places,
        the others may stay as they were found."""
        written, unwritten, missing, as_found = [], {}, [], []
        for path, target in self._asked(exercise).items():
            node = self.definitions.get(path)
            with _understood(self.chapter):
                if node is None:
                    missing.append(path)
                elif target.is_bug and same_code(text_of(self.text, node), target.skeleton):
                    unwritten[path] = node.lineno
                    as_found.append(path)
                elif isinstance(node, AnyFunction) and is_unwritten(node):
                    unwritten[path] = node.body[-1].lineno
                else:
                    written.append(path)
        if written:
            unwritten = {path: line for path, line in unwritten.items() if path not in as_found}
        return Progress(written, unwritten, missing)

    def _asked(self, exercise: Exercise) -> dict[str, Target]:
        return {p: t for p, t in targets(self.chapter).items() if t.exercise == exercise.id}

    def fingerprint(self, exercise: Exercise) -> str:
        """Names the code of one exercise, whatever its layout, comments and docstrings: the
        functions that it asks for, and what the reader has added for them to use."""
        if exercise.id not in self._fingerprints:
            with _understood(self.chapter):
                self._fingerprints[exercise.id] = self._digest(exercise.id)
        return self._fingerprints[exercise.id]

    def _digest(self, exercise: str) -> str:
        found: dict[str, ast.stmt] = dict(self.definitions)
        for statement in self.tree.body:
            if isinstance(statement, ast.Assign):
                found |= {to.id: statement for to in statement.targets if isinstance(to, ast.Name)}
        asked = self.chapter.places
        others = {*asked, *(path.partition(".")[0] for path in asked)}  # seen from outside alone
        todo = [path for path, id_ in asked.items() if id_ == exercise]
        seen: dict[str, str] = {}
        while todo:
            path = todo.pop()
            if path in seen or path not in found:
                continue
            node = without_docstrings(found[path])
            seen[path] = ast.unparse(node)
            owner = path.rpartition(".")[0]
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and inner.id not in others:
                    todo.append(inner.id)
                if owner and isinstance(inner, ast.Attribute):
                    method = f"{owner}.{inner.attr}"
                    todo += [method] if method not in others else []
        code = "\n".join(f"{path}: {seen[path]}" for path in sorted(seen))
        return hashlib.sha256(code.encode()).hexdigest()[:16]

    def line_of(self, exercise: Exercise, at: int | None = None) -> int:
        """Where the exercise's function that holds line `at` begins, else its first function; 1
        where there is none."""
        asked = self._asked(exercise)
        nodes = [node for path, node in self.definitions.items() if path in asked]
        holding = [n for n in nodes if at is not None and n.lineno <= at <= (n.end_lineno or 0)]
        return min((node.lineno for node in holding or nodes), default=1)

    def load(self, keep: set[str]) -> ModuleType:
        """Run it as a complete module: what belongs to no exercise in `keep` is the reference's,
        in a class that several exercises share, too: a mistake fails its own alone."""
        name, file = f"exercises.{Path(self.chapter.file_name).stem}", str(path_of(self.chapter))
        module = ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module  # dataclasses look their module up there
        lines = [f"{line}\n" for line in lines_of(self.text)]  # for the lines that an error names
        linecache.cache[file] = (len(self.text), None, lines, file)
        exec(compile(self.tree, file, "exec"), module.__dict__)
        for path, id_ in self.chapter.places.items():
            owner, _, method = path.rpartition(".")
            holder = getattr(module, owner, None) if owner else module
            if id_ not in keep and holder is not None:
                setattr(holder, method, reference_part(self.chapter, path))
        return module


@lru_cache(maxsize=32)
def parsed(chapter: Chapter, text: str) -> ReaderFile:
    """A file of exercises with this text."""
    return ReaderFile(chapter, text)


def without_docstrings(node: ast.stmt) -> ast.stmt:
    """A copy without them: another release may word them otherwise."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, AnyFunction) and docstring_of(inner):
            inner.body = inner.body[1:] or [ast.Pass()]
    return node


def line_of(exercise: Exercise, at: int | None = None) -> int:
    """`ReaderFile.line_of` of the file as it is now; of one that Python cannot read, line `at`."""
    try:
        return read(exercise.chapter).line_of(exercise, at)
    except WorkbookError:
        return at or 1


def same_code(one: str, other: str) -> bool:
    """Whether two definitions differ in comments and layout at most."""
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


@contextmanager
def aside(chapter: Chapter) -> Iterator[None]:
    """Other modules of this chapter may be loaded inside: the reader's is restored afterwards."""
    name, file = f"exercises.{Path(chapter.file_name).stem}", str(path_of(chapter))
    module, lines = sys.modules.get(name), linecache.cache.get(file)
    try:
        yield
    finally:
        sys.modules.pop(name, None)
        linecache.cache.pop(file, None)
        if module is not None:
            sys.modules[name] = module
        if lines is not None:
            linecache.cache[file] = lines


Swap = tuple[ModuleType, str, object, object]  # where, under which name, the reference's, yours


def holder_of(chapter: Chapter, path: str) -> Any:
    """The reference's function or class that holds `path`."""
    name = path.partition(".")[0]
    return getattr(sys.modules[chapter.pieces[name].module], name)


def borrow(chapter: Chapter, module: ModuleType, kept: set[str]) -> list[Swap]:
    """Replace the reference by the reader's parts of the exercises in `kept`, in this process.

    Returns what was done, for `give_back`.
    """
    swaps: list[Swap] = []
    for path, id_ in chapter.places.items():
        name = path.partition(".")[0]
        if id_ not in kept:
            continue
        reference, mine = holder_of(chapter, path), getattr(module, name)
        for holder in list(sys.modules.values()):
            held = getattr(holder, "__name__", "").startswith("minikv")
            if held and reference is not mine and vars(holder).get(name) is reference:
                setattr(holder, name, mine)
                swaps.append((holder, name, reference, mine))
    return swaps


def give_back(swaps: list[Swap]) -> None:
    """Undo what `borrow` did."""
    for holder, name, reference, _ in reversed(swaps):
        setattr(holder, name, reference)
