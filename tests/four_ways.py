"""The checks are checked: solutions that must pass and solutions that must fail, by chapter.

`tests/solutions/chNN.py` holds DIFFERENT, a right solution of each exercise that is written
otherwise than the reference, and WRONG, at least four plausible mistakes of each.
"""

import importlib
from dataclasses import dataclass

from minikv.course.exercise import Chapter, Exercise, chapter_of, chapters
from minikv.course.skeletons import fill, skeleton, targets


def runs_here(chapter: Chapter) -> bool:
    """Checks of kernels need Triton, and to be interpreted: here they run in this process."""
    if chapter.needs != "triton" or chapter.cannot_run:
        return not chapter.cannot_run
    from kernels.mode import INTERPRETED

    return INTERPRETED


EXERCISES = [
    exercise for chapter in filter(runs_here, chapters().values()) for exercise in chapter.exercises
]


@dataclass(frozen=True)
class Rewrite:
    """A wrong solution, written out: the source of each definition by path."""

    name: str
    sources: dict[str, str]
    says: str  # what the report must say: the part that names this mistake


@dataclass(frozen=True)
class Edit:
    """A wrong solution, as edits (old, new) of the reference's text of each definition."""

    name: str
    edits: dict[str, tuple[tuple[str, str], ...]]
    says: str


def solutions(exercise: Exercise):
    """The module tests/solutions/chNN.py of an exercise's chapter."""
    return importlib.import_module(f"solutions.ch{exercise.id[:2]}")


def reference_sources(exercise: Exercise) -> dict[str, str]:
    asked = targets(chapter_of(exercise.id))
    return {path: t.solved for path, t in asked.items() if t.exercise == exercise.id}


def text_with(exercise: Exercise, sources: dict[str, str]) -> str:
    """The skeleton with this exercise's places filled; "" is code above them."""
    return fill(skeleton(chapter_of(exercise.id)), sources)


def right(exercise: Exercise) -> str:
    return text_with(exercise, reference_sources(exercise))


def different(exercise: Exercise) -> str:
    """Where DIFFERENT names only some of the places, the others are the reference's."""
    return text_with(
        exercise, reference_sources(exercise) | solutions(exercise).DIFFERENT[exercise.id]
    )


def wrong(exercise: Exercise, mistake: Edit | Rewrite) -> str:
    sources = reference_sources(exercise)
    if isinstance(mistake, Rewrite):
        return text_with(exercise, sources | mistake.sources)
    for path, edits in mistake.edits.items():
        for old, new in edits:
            count = sources[path].count(old)
            assert count == 1, f"{mistake.name}: {old!r} is {count} times in {path}"
            sources[path] = sources[path].replace(old, new)
    return text_with(exercise, sources)


def all_mistakes() -> list[tuple[Exercise, Edit | Rewrite]]:
    return [(e, mistake) for e in EXERCISES for mistake in solutions(e).WRONG[e.id]]
