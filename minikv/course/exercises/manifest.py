"""What describes a chapter: its exercises, and which parts of the reference they ask for.

The `chapter.py` in a chapter's folder is written with these classes. Skeletons, checks, hints
and progress all read it.
"""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache, cached_property

from minikv.course.chapters import each


class ReaderError(ValueError):
    """Something that the reader has to correct. A notebook shows the sentence, and no traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for this
        return [str(self)]


HOW_TO_GET = {
    "triton": "official builds exist for Linux only",
    "numba": "pip install -r requirements.txt installs it where there is a build",
}  # by package that a chapter may need


@dataclass(frozen=True)
class Bug:
    """What a debug exercise breaks: edits (old, new) of the reference's text, each old once."""

    exercise: str
    edits: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Function:
    """A function of the skeleton: for the reader to write, for the reader to fix, or given."""

    target: str  # "module:name" of the reference
    write: str | Bug | None = None  # the exercise's id, or what is broken; None: given
    name: str | None = None  # in the skeleton, if not the reference's


@dataclass(frozen=True)
class Class:
    """A class of the skeleton. Methods in `write` are for the reader to write; the rest is given.

    With `show`, the skeleton's class inherits from the reference, and of the rest shows only
    these methods.
    """

    target: str
    write: dict[str, str | Bug]
    show: tuple[str, ...] | None = None
    name: str | None = None


@dataclass(frozen=True)
class Exercise:
    """The texts of one exercise."""

    id: str  # "04.2"
    title: str
    minutes: int
    difficulty: int  # 1 to 5
    kind: str  # build, debug or predict
    matters: str  # why it matters, one line
    hints: tuple[str, str, str]  # each stronger; the third is pseudocode
    works: str  # why it works, shown after passing
    # The function to write, and an earlier one of the same file whose body it starts from.
    begins: tuple[str, str] | None = None

    @property
    def chapter(self) -> "Chapter":
        return chapter_of(self.id)

    def __post_init__(self):
        if self.kind not in ("build", "debug", "predict"):
            raise ValueError(f"{self.id}: kind must be build, debug or predict, was {self.kind!r}")
        if len(self.hints) != 3 or not all(self.hints):
            raise ValueError(f"{self.id}: needs three hints, has {len(self.hints)}")
        if not 1 <= self.difficulty <= 5:
            raise ValueError(f"{self.id}: difficulty must be 1 to 5, was {self.difficulty}")


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
    def places(self) -> dict[str, str]:
        """What the reader writes, as paths in the skeleton: "f" or "Class.m" -> exercise id."""
        found: dict[str, str | Bug | None] = {}
        for piece in self.skeleton:
            name = piece.name or piece.target.partition(":")[2]
            if isinstance(piece, Function):
                found[name] = piece.write
            else:
                found |= {f"{name}.{method}": write for method, write in piece.write.items()}
        return {
            path: write.exercise if isinstance(write, Bug) else write
            for path, write in found.items()
            if write is not None
        }

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


@cache
def chapters() -> dict[str, Chapter]:
    """Every chapter that has exercises, by its number, in order."""
    return {number: module.CHAPTER for number, module in each("chapter")}


def chapter_of(exercise_id: str) -> Chapter:
    """The chapter of an exercise, or by its number. Raises ReaderError with what there is."""
    number = str(exercise_id).partition(".")[0].zfill(2)
    if number not in chapters():
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
