"""What describes a chapter: its exercises, and which parts of the reference they ask for.

Each chapter's folder has it in `chapter.toml`. Skeletons, checks, hints and progress all read it:

    doc = "what the skeleton file is about"
    skeleton = [
        { target = ".answers:blocks_needed", write = "05.1" },
        { target = "minikv.blocks:BlockTable", write = { fork = "05.2" }, show = ["__init__"] },
        { target = "minikv.blocks:OutOfBlocks" },
    ]

    ["05.1"]
    about = "Blocks of a prompt · 10 min · difficulty 1 of 5 · build"
    hint_1 = "a question"
    hint_2 = "what to look at"
    hint_3 = "pseudocode"
    works = "why it works, shown after passing"

- `skeleton` lists functions and classes of the reference, in the order of the reader's file.
  `write` is the exercise in which the reader writes the function, or each of some methods; what
  has none is given. A target that begins with a dot is in the chapter's own folder. Of a class
  with `show`, which then inherits from the reference, the file shows only these methods.
- An exercise is to build, debug or predict something. Of a debug exercise its table also says what
  is broken: `bug."BlockTable.fork" = "old => new"` edits the reference's text as an `edit` in
  `mistakes.toml` does. Why it matters stands in the notebook.
"""

import importlib.util
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from minikv.course import chapters as home
from minikv.course.chapters import folders

OURS = "the check itself is broken, and no solution is to blame: "  # begins what is not a reader's


class ReaderError(ValueError):
    """Something that the reader has to correct. A notebook shows the sentence, and no traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for this
        return [str(self)]


HOW_TO_GET = {
    "triton": "official builds exist for Linux only",
    "numba": "pip install -r requirements.txt installs it where there is a build",
}  # by package that a chapter may need


ABOUT = re.compile(r"(.+) · (\d+) min · difficulty ([1-5]) of 5 · (build|debug|predict)")


@dataclass(frozen=True)
class Definition:
    """A definition of the reference that stands in the skeleton."""

    target: str  # "module:name"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


@dataclass(frozen=True)
class Function(Definition):
    """A function of the skeleton: for the reader to write, for the reader to fix, or given."""

    write: str | None = None  # the exercise's id; None: given


@dataclass(frozen=True)
class Class(Definition):
    """A class of the skeleton. Methods in `write` are for the reader to write; the rest is given.

    With `show`, the skeleton's class inherits from the reference, and of the rest shows only
    these methods.
    """

    write: dict[str, str]
    show: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Exercise:
    """The texts of one exercise."""

    id: str  # "04.2"
    title: str
    minutes: int
    difficulty: int  # 1 to 5
    kind: str  # build, debug or predict
    hints: tuple[str, ...]  # three, each stronger; the third is pseudocode
    works: str  # why it works, shown after passing
    # The function to write, and an earlier one of the same file whose body it starts from.
    begins: tuple[str, str] | None = None
    # Of a debug exercise, by path: edits that break the reference's text, as in `mistakes.toml`.
    bug: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def chapter(self) -> "Chapter":
        return chapter_of(self.id)


@dataclass(frozen=True, eq=False)
class Chapter:
    """One chapter's skeleton and exercises."""

    number: str  # "04"
    name: str  # "paged_blocks"
    doc: str  # what the skeleton file is about
    skeleton: tuple[Function | Class, ...]
    exercises: tuple[Exercise, ...]
    needs: str | None = None  # a package that does not exist for every machine
    in_engine: bool = False  # its parts also run in one engine with those of other chapters
    # Exercises whose function can decode for that engine, in order of preference.
    decodes: tuple[tuple[str, str], ...] = ()  # (id, name of the function)

    @property
    def file_name(self) -> str:
        return f"ch{self.number}_{self.name}.py"

    @property
    def package(self) -> str:
        """The folder that holds all of this chapter, as a module's name."""
        return f"minikv.course.chapters.ch{self.number}_{self.name}"

    @cached_property
    def pieces(self) -> dict[str, Function | Class]:
        """The functions and classes of the skeleton by name, in the order of the file."""
        return {piece.target.partition(":")[2]: piece for piece in self.skeleton}

    @cached_property
    def places(self) -> dict[str, str]:
        """What the reader writes, as paths in the skeleton: "f" or "Class.m" -> exercise id."""
        found: dict[str, str | None] = {}
        for name, piece in self.pieces.items():
            if isinstance(piece, Function):
                found[name] = piece.write
            else:
                found |= {f"{name}.{method}": id_ for method, id_ in piece.write.items()}
        return {path: id_ for path, id_ in found.items() if id_ is not None}

    @cached_property
    def bugs(self) -> dict[str, str]:
        """What is broken, by path: edits of the reference's text."""
        return {path: edits for e in self.exercises for path, edits in e.bug.items()}

    @property
    def cannot_run(self) -> str | None:
        """Why nothing of this chapter runs on this machine; None if it does."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return (
            f"chapter {self.number} needs {self.needs.capitalize()}, which is not installed here "
            f"({HOW_TO_GET[self.needs]}); the other chapters do not need it"
        )

    def __post_init__(self):
        ids = [exercise.id for exercise in self.exercises]
        expected = [f"{self.number}.{i}" for i in range(1, len(ids) + 1)]
        if ids != expected:
            raise ValueError(f"chapter {self.number}: exercises must be {expected}, were {ids}")
        written = set(self.places.values())
        if written != set(ids):
            raise ValueError(
                f"chapter {self.number}: the skeleton writes {sorted(written)}, "
                f"the exercises are {ids}"
            )
        for exercise in self.exercises:
            for path in exercise.bug:
                if self.places.get(path) != exercise.id:
                    raise ValueError(f"{exercise.id}: the skeleton does not have it write {path}")


@cache
def chapters() -> dict[str, Chapter]:
    """Every chapter that has exercises, by its number, in order."""
    found = {}
    for number, folder in folders().items():
        file = resources.files(home) / folder / "chapter.toml"
        if file.is_file():
            found[number] = read(file, folder)
    return found


def read(file: Traversable, folder: str) -> Chapter:
    """The chapter of one folder, such as "ch05_copy_on_write", as its file describes it.

    Raises ValueError with file and exercise for what is not of the form above.
    """
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
        tables = {key: fields.pop(key) for key in [*fields] if isinstance(fields[key], dict)}
        return Chapter(
            number=folder[2:4],
            name=folder[5:],
            skeleton=tuple(_piece(row, folder) for row in fields.pop("skeleton", ())),
            exercises=tuple(_exercise(id_, table) for id_, table in tables.items()),
            decodes=tuple(map(tuple, fields.pop("decodes", ()))),
            **fields,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{OURS}{file}: {error}") from None


def _exercise(id_: str, table: Mapping[str, Any]) -> Exercise:
    """An exercise; what is a list in the file is a tuple."""
    row: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    about = ABOUT.fullmatch(str(row.pop("about", "")))
    if about is None:
        raise ValueError(f'{id_}: about must be like "A fork · 10 min · difficulty 1 of 5 · build"')
    title, minutes, difficulty, kind = about.groups()
    hints = tuple(row.pop(f"hint_{number}", "") for number in (1, 2, 3))
    if not all(hints):
        raise ValueError(f"{id_}: needs hint_1, hint_2 and hint_3")
    try:
        return Exercise(id_, title, int(minutes), int(difficulty), kind, hints, **row)
    except TypeError as error:  # a field too many, or too few
        raise ValueError(f"{id_}: {str(error).partition(' ')[2]}") from None


def _piece(row: dict[str, Any], folder: str) -> Function | Class:
    target, write, show = row.get("target", ""), row.get("write"), row.get("show")
    if ":" not in target or row.keys() - {"target", "write", "show"}:
        raise ValueError(f"skeleton: needs a target, module:name; may have write, show; was {row}")
    target = f"{home.__name__}.{folder}{target}" if target.startswith(".") else target
    if not isinstance(write, dict):
        return Function(target, write)
    return Class(target, write, None if show is None else tuple(show))


def chapter_of(exercise_id: str) -> Chapter:
    """The chapter of an exercise, or by its number. Raises ReaderError with what there is."""
    number = str(exercise_id).partition(".")[0].zfill(2)
    if number not in chapters() or exercise_id == "":
        raise ReaderError(
            f"{exercise_id!r}: there are exercises in chapters {', '.join(chapters())}; "
            'name one by its id, such as "04.2"'
        )
    return chapters()[number]


def find(exercise_id: str) -> Exercise:
    """An exercise by its id. Raises ReaderError with what there is."""
    chapter = chapter_of(exercise_id)
    text = str(exercise_id)
    if re.fullmatch(r"\d\.\d+", text):
        text = "0" + text
    for exercise in chapter.exercises:
        if exercise.id == text:
            return exercise
    ids = ", ".join(exercise.id for exercise in chapter.exercises)
    raise ReaderError(f"{exercise_id!r}: chapter {chapter.number} has the exercises {ids}")
