"""The mistakes that readers make: a wrong solution, why it is wrong, and where to look.

Each chapter keeps its own in `mistakes.toml`, one record after another:

    ["05.1"."shares the list"]
    edit = "self.block_ids.copy() => self.block_ids"
    cause = "both tables have the same list of block ids"
    look = "`=` does not copy a list"
    seen = "an engine, and where it is told"

- `edit` changes the reference's text: `old => new`, or several lines of them, one after the other.
  Each `old` must be there once. Whole lines are changed as in a diff: `-` begins a line that goes,
  `+` one that comes, a blank one that stays, and an empty line stands between two places.
- `source = '''…'''` is the whole definition, where edits would be hard to read.
- Where an exercise has several parts, `edit."BlockTable.fork" = …` says which one; `source` may
  replace something that the exercise gives, too.
- A list holds several ways to make the mistake, `edit = ["old => new", "old => other"]`: each text
  of the record is then a wrong solution of its own, and all have its cause.
- `look` is left out where it says no more than the line that fails: its own is shown then.
- `also = "05.2"` makes the record that exercise's, too, after its own: the same edit, and cause.
- `seen` is for the few mistakes that a real engine has shipped. A report that names one says so.

Checks name a reader's mistake with these records, and tests prove that each is caught and named.
"""

import ast
import tomllib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from minikv.course.exercise_data.manifest import Chapter, Exercise
from minikv.course.exercise_data.skeletons import definitions, edited, fill, skeleton, targets


@dataclass(frozen=True, eq=False)
class Mistake:
    """One wrong solution. `sources` are the definitions that are wrong, by path. Those of one
    record have the same name."""

    name: str
    cause: str
    look: str | None  # None: where the line that fails says
    sources: dict[str, str]
    seen: str | None = None


def mistakes_of(exercise: Exercise) -> tuple[Mistake, ...]:
    """The known mistakes of one exercise, in the order of its chapter's file."""
    return of_chapter(exercise.chapter).get(exercise.id, ())


def mistake_named(exercise: Exercise, name: str) -> Mistake:
    """One known mistake of an exercise."""
    [mistake] = [one for one in mistakes_of(exercise) if one.name == name]
    return mistake


def reference_sources(exercise: Exercise) -> dict[str, str]:
    """The reference's text of each part of one exercise, by path."""
    asked = targets(exercise.chapter)
    return {path: t.solved for path, t in asked.items() if t.exercise == exercise.id}


def text_of_mistake(exercise: Exercise, mistake: Mistake) -> str:
    """The chapter's skeleton with this mistake in the parts of the exercise."""
    sources = reference_sources(exercise) | mistake.sources
    return fill(skeleton(exercise.chapter), sources)


def read(file: Traversable, chapter: Chapter) -> dict[str, tuple[Mistake, ...]]:
    """The mistakes in one chapter's file, by exercise.

    Raises ValueError with file, exercise and mistake for a record that is not of the form above,
    or that no longer fits the reference's text.
    """
    try:
        records = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: {error}") from None
    for number, name, row in _shared(records):
        if name in records.setdefault(number, {}):
            raise ValueError(f"{file}, {number}, {name}: there is another record of this name")
        records[number][name] = row
    given = definitions(ast.parse(skeleton(chapter)))
    ids = {exercise.id: exercise for exercise in chapter.exercises}
    found = {}
    for number, rows in records.items():
        if number not in ids:
            raise ValueError(f"{file}: chapter {chapter.number} has no exercise {number!r}")
        right = reference_sources(ids[number])
        mistakes = list[Mistake]()
        for name, row in rows.items() if isinstance(rows, dict) else [("", rows)]:
            try:
                mistakes += _ways(name, row, right, given)
            except ValueError as error:
                raise ValueError(f"{file}, {number}, {name}: {error}") from None
        found[number] = tuple(mistakes)
    return found


def _shared(records: Mapping[str, Any]) -> list[tuple[str, str, dict]]:
    """(exercise, name, row) of each record that is also another exercise's."""
    rows = [row for rows in records.values() if isinstance(rows, dict) for row in rows.items()]
    return [
        (row.pop("also"), name, row)
        for name, row in rows
        if isinstance(row, dict) and "also" in row
    ]


@cache
def of_chapter(chapter: Chapter) -> dict[str, tuple[Mistake, ...]]:
    return read(resources.files(chapter.package) / "mistakes.toml", chapter)


def _ways(
    name: str, row: Any, right: Mapping[str, str], given: Container[str]
) -> Iterator[Mistake]:
    """One record, in each way that the mistake is made. `right` are the reference's texts, `given`
    all that the reader's file defines."""
    if not isinstance(row, dict):
        raise ValueError("a record begins with its exercise and its name")
    if not row.get("cause"):
        raise ValueError("it has no cause")
    unknown = sorted(row.keys() - {"cause", "look", "seen", "edit", "source"})
    if unknown:
        raise ValueError(f"there is no field {', '.join(unknown)}")
    edits, sources = (_by_path(row.get(field, {}), right) for field in ("edit", "source"))
    if not edits and not sources:
        raise ValueError("it has neither edit nor source, so it changes nothing")
    for path in edits:
        if path not in right:
            raise ValueError(
                f"there is no {path} to edit, but {', '.join(right)} (in quotes, if there is a dot)"
            )
    for path in sources:
        if path not in given:
            raise ValueError(f"there is no {path} in the reader's file to replace")
    changed = [{path: edited(right[path], text)} for path, text in _texts(edits)]
    changed += [{path: text} for path, text in _texts(sources)]
    if not any(isinstance(text, list) for text in (*edits.values(), *sources.values())):
        changed = [{path: text for one in changed for path, text in one.items()}]
    for one in changed:
        yield Mistake(name, row["cause"], row.get("look"), one, row.get("seen"))


def _texts(by_path: Mapping[str, str | list[str]]) -> Iterator[tuple[str, str]]:
    for path, texts in by_path.items():
        yield from ((path, text) for text in ([texts] if isinstance(texts, str) else texts))


def _by_path(given: Any, right: Mapping[str, str]) -> dict[str, str | list[str]]:
    if isinstance(given, dict):
        return given
    if len(right) > 1:
        raise ValueError(f"of which part is the text: {', '.join(right)}?")
    return dict.fromkeys(right, given)
