"""How fast a class is graded: exercises per second, of students who are right, wrong, hostile,
stuck in a loop, or have not begun.

The class is made up: each solution is the reference, one of the known mistakes, or the like, drawn
at random. So the share that fails, which takes longer because its cause is looked for, is a
guess: see `--wrong`.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

from minikv.course.bench.harness import Aim, BenchTable, Spread, positive
from minikv.course.exercises.manifest import Exercise, chapters
from minikv.course.exercises.mistakes import mistakes_of, reference_sources
from minikv.course.exercises.skeletons import fill, skeleton
from minikv.course.grading import grade
from minikv.course.judge import containment, process

CLASS = 500  # students whose time is told
NIGHT = 12.0  # hours
HOSTILE = """
import os
for _number in range(3, 64):
    try:
        os.write(_number, b"passed")
    except OSError:
        pass
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers = [number for number, chapter in chapters().items() if not chapter.cannot_run]
    parser.add_argument("--students", type=positive, default=12, help="in the class that is made")
    parser.add_argument("--chapters", nargs="+", default=numbers, metavar="NN")
    parser.add_argument("--jobs", type=positive, default=2, help="exercises at the same time")
    parser.add_argument(
        "--wrong", type=float, default=0.3, metavar="SHARE",
        help="of the solutions have a mistake; a tenth is something else (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> BenchTable:
    if not process.FORKS:
        raise ValueError("bench class adds up processes as only Linux shows them: run it there")
    table = BenchTable("class: exercises checked per second", 1)
    exercises = [e for number in args.chapters for e in chapters()[number].exercises]
    with tempfile.TemporaryDirectory() as place:
        folders = make_class(Path(place), args.students, exercises, args.wrong)
        students = [grade.find_student(folder) for folder in folders]
        with grade.workers(args.jobs) as pool, closing(grade.Store(None)) as store:
            began = perf_counter()
            found = grade.grades(_Measured(pool), store, students, exercises)
            count = len(students) * len(exercises)
            reports = [report for _, report in grade.progress_bar(count, found)]
            seconds = perf_counter() - began
    rate = len(reports) / seconds
    each = sum(report.seconds for report in reports) / len(reports)
    what = f"{args.jobs} at a time, {len(reports)} exercises of {args.students} students"
    passed = sum(report.passed for report in reports)
    table.add({"what": what, "figure": Spread([rate]), "unit": "exercises per second"})
    table.add({"what": "that passed", "figure": passed, "unit": "exercises"})
    computed = "processor seconds per exercise"
    table.add({"what": "processor time, on average", "figure": each, "unit": computed})
    for number in args.chapters:
        for status in ("passed", "failed"):
            these = [r.seconds for r in reports if r.exercise[:2] == number and r.status == status]
            if these:
                what = f"chapter {number}, {status}: {len(these)} exercises"
                table.add({"what": what, "figure": Spread(these), "unit": computed})
    # The same chapters for every student of a large class.
    number = CLASS * len(exercises)
    what = f"{CLASS} students, {len(args.chapters)} chapters, "
    aim = Aim("figure", "<=", NIGHT)
    by_clock = {"what": what + "at this rate", "figure": number / rate / 3600, "unit": "hours"}
    table.add(by_clock, aim)
    by_time = {"what": what + "2 cores to itself", "figure": number * each / 7200, "unit": "hours"}
    table.add(by_time, aim)
    table.notes.append("the start of the workers and the first use of each exercise are in it")
    return table


class _Measured(Executor):
    """Has the same done, and tells processor seconds in each report."""

    def __init__(self, pool: Executor):
        self._pool = pool

    def submit(self, function: Callable, /, *arguments: Any, **named: Any) -> Future:
        return self._pool.submit(_measured, function, *arguments, **named)


def _measured(function: Callable[..., dict], *arguments: Any) -> dict:
    began = _processor_seconds()
    report = function(*arguments)
    # A starter that had to be ended takes what it had used before out of the sum.
    return report | {"seconds": max(0.0, _processor_seconds() - began)}


def _processor_seconds() -> float:
    """Of this process, of those below it, and of those that have ended there."""
    ticks = 0
    for pid in (os.getpid(), *containment.descendants(os.getpid())):
        # From the 14th field on: user and system time, and both of children that have ended.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def make_class(place: Path, count: int, exercises: list[Exercise], wrong: float) -> list[Path]:
    """Folders of `count` made-up students, always the same ones."""
    folders = []
    for number in range(count):
        draw = random.Random(number)
        folder = place / f"student{number:03}"
        folder.mkdir()
        files: dict[str, str] = {}
        for exercise in exercises:
            chapter = chapters()[exercise.id[:2]]
            text = files.get(chapter.file_name, skeleton(chapter))
            files[chapter.file_name] = _with_solution(text, exercise, draw, wrong)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        if number % 10 == 9:  # one in ten hands in a file that is no Python
            name = draw.choice(list(files))
            (folder / name).write_text(files[name] + "\ndef broken(:\n", encoding="utf-8")
        folders.append(folder)
    return folders


def _with_solution(text: str, exercise: Exercise, draw: random.Random, wrong: float) -> str:
    sources, kind = reference_sources(exercise), draw.random()
    if kind < wrong:
        sources |= draw.choice(mistakes_of(exercise)).sources
    elif kind < wrong + 0.06:
        return text  # not begun
    elif kind < wrong + 0.08:
        path = draw.choice(list(sources))
        head = sources[path].partition("\n")[0]
        if head.endswith(":"):  # it stands on one line
            sources[path] = f"{head}\n    while True:\n        pass"
    elif kind < wrong + 0.1:
        sources[""] = HOSTILE
    return fill(text, sources)
