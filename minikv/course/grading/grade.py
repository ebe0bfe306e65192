"""`python -m minikv grade FOLDER …`: check the exercises of a whole class.

What a class has handed in is found by `hand_ins`. Each exercise runs in its own
process, with limits on time, memory, processes and files; the process that writes its mark never
imports it. docs/GRADING.md says what that keeps out, and what it does not.

A mark says what was seen of a solution, and the process that runs it has no answers. Code may
still hold answers of its own, or change what is seen. So the table also names each line that is not
plain code, for a person to read.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

import minikv
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Chapter, Exercise, chapters, find
from minikv.course.exercise_data.mistakes import mistakes_of
from minikv.course.exercise_data.plan import NO_PLAN, read as read_plan
from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.grading import tables
from minikv.course.grading.class_page import as_page
from minikv.course.grading.hand_ins import Student, students_in
from minikv.course.judge import containment, process
from minikv.course.judge.examine import import_checks
from minikv.course.judge.raised import broken
from minikv.course.judge.result import Line, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER",
        help="a student's folder, or one that Moodle's or Canvas's download unpacks to",
    )  # fmt: skip
    parser.add_argument(
        "--plan", metavar="FILE",
        help="exercises, points, overrides, names; else all chapters that were handed in",
    )  # fmt: skip
    parser.add_argument("--week", type=int, metavar="N", help="only this week of the plan")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N",
        help="exercises that are checked at the same time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=Path, metavar="FILE",
        help="keep each result here as it comes, and check only what is new or has changed",
    )  # fmt: skip
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a table, one line per exercise"
    )
    for system in ("moodle", "canvas"):
        parser.add_argument(
            f"--{system}", type=Path, metavar="FILE",
            help=f"write a line per student, with points, for {system.capitalize()}'s gradebook",
        )  # fmt: skip
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    parser.add_argument(
        "--page", type=Path, metavar="FILE",
        help="write a page about the class: marks, common mistakes, solutions that are alike",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    students: list[Student] = []
    try:
        if args.week is not None and not args.plan:
            raise ValueError("--week: of which --plan?")
        plan = read_plan(args.plan) if args.plan else NO_PLAN
        for one in students_in(args.folders, plan.roster):
            if isinstance(one, Student):
                students.append(one)
            else:
                print(one, file=sys.stderr)  # the others are graded all the same
        unknown = {student for student, _ in plan.overrides} - {one.name for one in students}
        if unknown:
            print(
                f"overrides: not among these hand-ins: {', '.join(sorted(unknown))}",
                file=sys.stderr,
            )
        weeks = plan.weeks if args.week is None else [plan.week(args.week)]
        exercises = [exercise for week in weeks for exercise in week.exercises]
        exercises = exercises or handed_in(students)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not students:
        return 2
    if args.jobs is not None and args.jobs < 1:
        print(f"--jobs: must be at least 1, was {args.jobs}", file=sys.stderr)
        return 2
    try:
        for exercise in exercises:  # an error of ours would be told as theirs, or too late
            import_checks(exercise.id)
            mistakes_of(exercise)
    except Exception as error:
        print(broken(error), file=sys.stderr)
        return 2
    announce()
    results: tables.Results = []
    status = 0
    try:
        with workers(args.jobs) as pool, closing(Store(args.resume)) as store:
            found = grades(pool, store, students, exercises)
            for pair in progress_bar(len(students) * len(exercises), found):
                results.append(pair)
    except KeyboardInterrupt:
        status = 130
        print("interrupted: this is what was checked so far", file=sys.stderr)
    except BrokenExecutor as error:
        status = 1
        print(f"{error}\nThis is what was checked so far.", file=sys.stderr)
    order = {name: i for i, name in enumerate(student.name for student in students)}
    results.sort(key=lambda one: (order[one[0].name], one[1].exercise))
    if args.csv:
        write_whole(args.csv, tables.as_csv(results, plan))
    if args.moodle:
        write_whole(args.moodle, tables.for_moodle(results, plan))
    if args.canvas:
        write_whole(args.canvas, tables.for_canvas(results, plan))
    if args.junit:
        write_whole(args.junit, tables.as_junit(results))
    if args.page:
        write_whole(args.page, as_page(results, plan))
    print(tables.as_text(results, plan))
    unfinished = [f"{s.name} {r.exercise}" for s, r in results if r.status == "not finished"]
    if unfinished:
        print(f"\nNot finished, so without a mark: {', '.join(unfinished)}. Give the same command "
              "again on a machine that has less to do, or read them.")  # fmt: skip
    return status or int(bool(unfinished))


def handed_in(students: list[Student]) -> list[Exercise]:
    """The exercises of all chapters of which anybody has a file, or something in its place."""

    def is_there(student: Student, chapter: Chapter) -> bool:
        try:
            return student.meant(chapter) != ""
        except OSError:
            return False

    there = [c for c in chapters().values() if any(is_there(one, c) for one in students)]
    return [exercise for chapter in there for exercise in chapter.exercises]


def announce() -> None:
    """Say, before anything is run, what no fence of this machine keeps from the students' code."""
    _, can = containment.reach()
    if can:
        can_do = tables.in_words(can, "and")
        said = f"On this machine a student's code can {can_do}. docs/GRADING.md says why."
        print(said, file=sys.stderr)


def progress_bar(total: int, results: Iterator) -> Iterator[tuple[Student, Result]]:
    with tqdm(results, total=total, unit="exercise", disable=not sys.stderr.isatty()) as bar:
        for student, report in bar:
            bar.set_description(f"{report.exercise} {student.name}")
            yield student, report


# ── Checking ──────────────────────────────────────────────────────────────────


def grade(student: Student, exercise: Exercise) -> Result:
    try:
        file = student.file(exercise)
    except OSError as error:
        return _not_checked(exercise, error)
    if file is None:
        return tables.not_handed_in(student, exercise)
    return _report(grade_file(exercise.id, file))


def grade_file(exercise_id: str, file: bytes) -> dict:
    """The report on an exercise in a file's bytes, as a dict, for workers. The file lies in a
    folder of its own meanwhile, away from the student's and from all others'."""
    exercise = find(exercise_id)
    try:
        with tempfile.TemporaryDirectory(prefix="minikv-") as place:
            folder = Path(place, "exercises")
            folder.mkdir()
            (folder / exercise.chapter.file_name).write_bytes(file)
            with reader_files.in_folder(folder):
                report = process.run(exercise)
                said = report.place and report.place.partition("; reset(")[0]  # not for lecturers
                return asdict(report) | {"place": said}
    except Exception as error:  # it is ours; the others are graded
        return asdict(_not_checked(exercise, error, "not finished"))


def _not_checked(exercise: Exercise, error: Exception, status: str = "failed") -> Result:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Result(exercise.id, status, 0, place=f"{tables.NOT_CHECKED}{why}")


def grades(
    pool: Executor, store: "Store", students: list[Student], exercises: list[Exercise]
) -> Iterator[tuple[Student, Result]]:
    """Each exercise of each student, as they come. Workers go through the class exercise by
    exercise, because a process remembers what the reference gives. Students who handed in the
    same file, byte for byte, share its reports: it is checked once. What a limit has ended is
    checked again at the end, one by one: then nothing of ours keeps it from the processor."""
    waiting: dict[Future, tuple[Exercise, bytes, list[Student]]] = {}
    files: dict[tuple[Student, str], bytes | OSError | None] = {}
    for exercise in exercises:
        alike: dict[bytes, list[Student]] = {}
        for student in students:
            place = student, exercise.id[:2]
            if place not in files:
                try:
                    files[place] = student.file(exercise)
                except OSError as error:
                    files[place] = error
            file = files[place]
            if isinstance(file, OSError):
                yield student, _not_checked(exercise, file)
                continue
            if file is None:
                yield student, tables.not_handed_in(student, exercise)
                continue
            known = store.get(exercise, file)
            if known is not None:
                yield student, _report(known)
            elif file in alike:
                alike[file].append(student)
            else:
                alike[file] = [student]
                job = pool.submit(grade_file, exercise.id, file)
                waiting[job] = exercise, file, alike[file]
    again: set[Future] = set()
    try:
        for done in as_completed(waiting):
            exercise, file, same = waiting[done]
            found = done.result()
            if found["ended_with"] is not None or found["status"] == "not finished":
                again.add(done)
                continue
            store.put(exercise, file, found)
            for student in same:
                yield student, _report(found)
        for exercise, file, same in (waiting[job] for job in waiting if job in again):
            found = pool.submit(grade_file, exercise.id, file).result()
            if found["status"] != "not finished":
                store.put(exercise, file, found)
            for student in same:
                yield student, _report(found)
    except BaseException:
        for one in waiting:
            one.cancel()
        raise


def _report(found: dict) -> Result:
    return Result(**found | {"lines": [Line(**line) for line in found["lines"]]})


@contextmanager
def workers(jobs: int | None) -> Iterator[Executor]:
    """Processes that check `jobs` exercises at the same time."""
    # Spawned: a worker has its own starter, and shares no file with this process. Control-C is
    # this process's business: what runs comes to its end, and is kept.
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # The folder that we are in may be a student's, with files that are named as Python's modules.
    os.environ["PYTHONSAFEPATH"] = "1"
    with ProcessPoolExecutor(jobs, get_context("spawn"), ignore) as pool:
        yield pool


class Store:
    """Reports by the content of the file, in a database that survives an interrupt at any moment:
    SQLite keeps a whole result or none. Without a path nothing is kept."""

    def __init__(self, path: Path | None):
        self._keeps = path is not None
        self._database = sqlite3.connect(path or ":memory:")
        self._database.execute("CREATE TABLE IF NOT EXISTS reports (name PRIMARY KEY, report)")

    def get(self, exercise: Exercise, file: bytes) -> dict | None:
        if not self._keeps:
            return None
        query = "SELECT report FROM reports WHERE name = ?"
        row = self._database.execute(query, [_name(exercise, file)]).fetchone()
        if row is None:
            return None
        found = json.loads(row[0])
        # With more time than it had then, it may come to its end.
        return found if (found["ended_with"] or math.inf) >= process.time_limit() else None

    def put(self, exercise: Exercise, file: bytes, report: dict) -> None:
        if self._keeps:
            with self._database:
                row = _name(exercise, file), json.dumps(report)
                self._database.execute("INSERT OR REPLACE INTO reports VALUES (?, ?)", row)

    def close(self) -> None:
        self._database.close()


def _name(exercise: Exercise, file: bytes) -> str:
    """What a report depends on: the exercise, the file, and the version of the checks."""
    content = hashlib.sha256(file).hexdigest()
    return f"{minikv.__version__} {exercise.id} {_checks(exercise.chapter.number)} {content}"


@cache
def _checks(number: str) -> str:
    """Names the files that a chapter's checks are made of."""
    package = Path(minikv.__file__).parent
    rooms = (
        "course/exercise_data",
        "course/judge",
        "course/reports",
        f"course/chapters/ch{number}_*",
    )
    places = ["*.py", *(f"{room}/*.{kind}" for room in rooms for kind in ("py", "toml"))]
    files = [file for place in places for file in sorted(package.glob(place))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
