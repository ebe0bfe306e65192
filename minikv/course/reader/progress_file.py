"""What a reader has passed so far, kept in `exercises/.progress/` so that it survives a restart."""

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import minikv
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Exercise, chapter_of, chapters, find
from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.reader import routes
from minikv.course.reports.report import Report


@dataclass
class Entry:
    """One exercise's history. Times are seconds since 1970."""

    tries: int = 0
    first: float | None = None
    passed: float | None = None  # when it first did; None: not passed
    version: str | None = None  # of the course, when it first passed
    hints: int = 0
    seen_solution: bool = False
    solved: bool = False  # it was passed once, so nothing is given away any more
    fingerprint: str | None = None  # of the code that passed; None: passed before these were kept
    last: float | None = None  # when it was last checked
    checked: str | None = None  # the fingerprint of the code that was


def folder() -> Path:
    return reader_files.folder() / ".progress"


def entries() -> dict[str, Entry]:
    """All entries by exercise id. A damaged file is set aside, not deleted."""
    file = folder() / "progress.json"
    names = {field.name for field in fields(Entry)}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return {id_: Entry(**{k: v for k, v in e.items() if k in names}) for id_, e in raw.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        file.replace(file.with_suffix(".damaged"))
        return {}


def entry(exercise_id: str) -> Entry:
    return entries().get(exercise_id, Entry())


def passed() -> set[str]:
    """Exercises that are passed, and whose code is still what passed."""
    return _passed() - changed()


def changed() -> set[str]:
    """Exercises that are passed, but whose code is another by now: to be checked again. What
    passed is known by its fingerprint, so with the old code an exercise is passed again."""
    kept, found = entries(), set()
    for id_ in _passed():
        code = _code_of(id_)
        if code is None or kept[id_].fingerprint not in (None, code):
            found.add(id_)
    return found


def failing(some: set[str]) -> set[str]:
    """Those of these changed exercises whose code, as it is now, has been checked already."""
    kept = entries()
    return {id_ for id_ in some if (code := _code_of(id_)) and code == kept[id_].checked}


def _code_of(id_: str) -> str | None:
    """The fingerprint of an exercise's code; None if it cannot be read."""
    try:
        return reader_files.read(chapter_of(id_)).fingerprint(find(id_))
    except reader_files.WorkbookError:
        return None


def _passed() -> set[str]:
    known = {exercise.id for chapter in chapters().values() for exercise in chapter.exercises}
    return {id_ for id_, entry in entries().items() if entry.passed is not None} & known


def save(exercise_id: str, changed: Entry) -> None:
    everything = entries() | {exercise_id: changed}
    folder().mkdir(exist_ok=True)
    raw = {id_: asdict(everything[id_]) for id_ in sorted(everything)}
    write_whole(folder() / "progress.json", json.dumps(raw, indent=1) + "\n")


def note(report: Report, alone: bool = True) -> None:
    """Keep the result of a check, and tell the report what it can only know from here.

    `alone`: on the reference's other parts; a failure on others does not undo a pass.
    """
    now, kept = time.time(), entry(report.exercise)
    if report.status not in ("not started", "not finished"):
        if report.saved is not None and kept.last is not None:
            report.unchanged = report.saved < kept.last
        code = report.fingerprint  # None: the file cannot be read
        same_code = report.unchanged if code is None else code == kept.checked
        if kept.passed is None and not same_code:
            kept.tries += 1
            kept.first = kept.first or now
        if report.passed:
            if kept.passed is None:
                kept.passed, kept.version = now, minikv.__version__
            kept.fingerprint = report.fingerprint
            kept.solved = True
        elif alone and kept.fingerprint in (None, report.fingerprint):  # the code that passed
            kept.passed = None
        kept.last, kept.checked = now, code
        report.tries = kept.tries
        report.minutes = ((kept.passed or now) - (kept.first or now)) / 60
        save(report.exercise, kept)
    report.following = what_next(report.exercise)


def what_next(after: str | None = None) -> str | None:
    """What the reader does next, in words: at the end of a route its last command, else the
    exercise that `to_do_next` names."""
    route = routes.chosen()
    if route is not None and route.ends and route.exercises <= passed():
        return f"{route.ends}, the end of the {route.name} route"
    exercise = to_do_next(after)
    return f"{exercise.id} {exercise.title}, {exercise.minutes} min" if exercise else None


def to_do_next(after: str | None = None) -> Exercise | None:
    """The first open exercise after the one with this id: in its chapter, then in the chapters
    above, then in those below. Without an id, after the one that was checked last. On a route,
    one of its exercises while any is open."""
    known, done, route = entries(), passed(), routes.chosen()
    if route is not None and not route.exercises <= done:
        done |= {e.id for c in chapters().values() for e in c.exercises} - route.exercises
    if after is None:
        checked = {id_: kept.last or 0.0 for id_, kept in known.items()}
        after = max(checked, key=lambda id_: checked[id_], default="")

    def distance(exercise: Exercise) -> tuple[int, bool, str]:
        number = exercise.id[:2]
        away = 0 if number == after[:2] else 1 if number > after[:2] else 2
        return away, exercise.id < after, exercise.id

    return min(
        (
            exercise
            for chapter in chapters().values()
            for exercise in chapter.exercises
            if exercise.id not in done and not chapter.cannot_run
        ),
        key=distance,
        default=None,
    )


def back_up(file: Path) -> Path:
    """Copy an exercise file, under a name with the time in it; returns the copy."""
    target = folder() / "backups" / f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}.py"
    number = 1
    while target.exists():
        number += 1
        target = target.with_stem(f"{target.stem.partition('~')[0]}~{number}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(file.read_bytes())
    return target
