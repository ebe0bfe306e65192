"""The mistakes that readers make: a wrong solution, why it is wrong, and where to look.

    Mistake(
        "never copies",
        edits={"BlockTable.writable_slot": (("ref_count(block_id) == 1:", "block_id >= 0:"),)},
        cause="the block is written in place, though others hold it: their tokens are overwritten",
        look="what does the pool count for this block?",
    )

Each chapter keeps its own in `mistakes.py`, as `MISTAKES`: exercise id -> mistakes. Checks use
them to name a reader's mistake, and tests prove that each is caught and named.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from minikv.course.exercises.manifest import Exercise, chapter_of
from minikv.course.exercises.skeletons import fill, skeleton, targets

Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class Mistake:
    """One wrong solution.

    edits: (old, new) pairs by path, each `old` once in the reference's text of that path.
    sources: definitions written out, by path; "" is code above them.
    """

    name: str
    cause: str
    look: str
    edits: Mapping[str, Edits] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


def made(path: str, *records: tuple) -> tuple[Mistake, ...]:
    """Mistakes in one place: (name, change, cause, look) each. A change is either the whole
    definition, or edits of the reference's: old, new, old, new, …"""
    return tuple(
        Mistake(name, cause, look, sources={path: change})
        if isinstance(change, str)
        else Mistake(
            name, cause, look, edits={path: tuple(zip(change[::2], change[1::2], strict=True))}
        )
        for name, change, cause, look in records
    )


def mistakes_of(exercise: Exercise) -> tuple[Mistake, ...]:
    """The known mistakes of one exercise, from its chapter's folder."""
    package = chapter_of(exercise.id).package
    return importlib.import_module(f"{package}.mistakes").MISTAKES[exercise.id]


def reference_sources(exercise: Exercise) -> dict[str, str]:
    """The reference's text of each part of one exercise, by path."""
    asked = targets(chapter_of(exercise.id))
    return {path: t.solved for path, t in asked.items() if t.exercise == exercise.id}


def text_of_mistake(exercise: Exercise, mistake: Mistake) -> str:
    """The chapter's skeleton with this mistake in the parts of the exercise.

    Raises ValueError if the record no longer fits the reference's text.
    """
    sources = reference_sources(exercise)
    for path, pairs in mistake.edits.items():
        for old, new in pairs:
            if sources[path].count(old) != 1:
                raise ValueError(
                    f"{exercise.id}, {mistake.name}: {old!r} is {sources[path].count(old)} "
                    f"times in {path}"
                )
            sources[path] = sources[path].replace(old, new)
    return fill(skeleton(chapter_of(exercise.id)), sources | dict(mistake.sources))
