"""The checks are checked: solutions that must pass and solutions that must fail, by chapter.

A chapter's `mistakes.toml` holds at least four plausible mistakes of each exercise;
`tests/course/chNN/different.toml` holds right solutions that are written otherwise.
"""

import tomllib
from functools import cache
from pathlib import Path

from minikv.course.exercise_data.manifest import Chapter, Exercise, chapters
from minikv.course.exercise_data.mistakes import Mistake, mistakes_of, reference_sources
from minikv.course.exercise_data.skeletons import fill, skeleton


def runs_here(chapter: Chapter) -> bool:
    """Checks of kernels need Triton, and to be interpreted: here they run in this process."""
    if chapter.needs != "triton" or chapter.cannot_run:
        return not chapter.cannot_run
    from minikv_kernels.mode import INTERPRETED

    return INTERPRETED


EXERCISES = [
    exercise for chapter in filter(runs_here, chapters().values()) for exercise in chapter.exercises
]


@cache
def right_otherwise(number: str) -> dict[str, dict[str, str]]:
    """The right solutions of chapter `number`: the sources by path, by exercise id."""
    file = Path(__file__).parent / f"course/ch{number}/different.toml"
    solutions = tomllib.loads(file.read_text(encoding="utf-8"))
    return {id_: solution["source"] for id_, solution in solutions.items()}


def text_with(exercise: Exercise, sources: dict[str, str]) -> str:
    """The skeleton with this exercise's places filled; "" is code above them."""
    return fill(skeleton(exercise.chapter), sources)


def right(exercise: Exercise) -> str:
    return text_with(exercise, reference_sources(exercise))


def different(exercise: Exercise) -> str:
    """Where it names only some of the places, the others are the reference's."""
    return text_with(
        exercise, reference_sources(exercise) | right_otherwise(exercise.id[:2])[exercise.id]
    )


def on_the_way(exercise: Exercise) -> dict[str, str]:
    """The sources that `test_journey` takes: in turns the others, and the reference's. So each
    chapter has one of the others that tinypy runs on, and 01.3 calls 01.2."""
    sources = reference_sources(exercise)
    if EXERCISES.index(exercise) % 2 == 0:
        sources |= right_otherwise(exercise.id[:2])[exercise.id]
    return sources


def checked_by_reader(exercise: Exercise) -> bool:
    """Whether `test_journey` checks it as a reader does: the last of a chapter that compiles."""
    chapter, last = exercise.chapter, list(chapters().values())[-1]
    builds = [one for one in chapter.exercises if one.kind == "build"]
    return exercise is builds[-1] and (chapter.needs is not None or chapter is last)


def all_mistakes() -> list[tuple[Exercise, Mistake]]:
    return [(e, mistake) for e in EXERCISES for mistake in mistakes_of(e)]


def is_representative(exercise: Exercise, mistake: Mistake | None = None) -> bool:
    """Whether `make test` tries it: a chapter's first exercise, the first mistake in each part."""
    if exercise is not exercise.chapter.exercises[0]:
        return False
    known = mistakes_of(exercise)
    return mistake is None or mistake == next(
        one for one in known if one.sources.keys() == mistake.sources.keys()
    )
