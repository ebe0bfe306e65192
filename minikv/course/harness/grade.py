"""`python -m minikv grade FOLDER …`: check the exercises of a whole class.

Each folder belongs to one student and holds the `chNN_….py` files, or a folder `exercises`
with them. Each exercise runs in its own process, with limits on time, memory, processes and
files. The code still runs with your rights: use a machine or a container that it may damage.

A mark says what the checks saw. Code that sets out to deceive them can: it runs in the same
process. So the table also names each line that reaches for more than an exercise needs, for a
person to read.
"""

import argparse
import ast
import csv
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tqdm import tqdm

from minikv.course.harness import process, reader_files
from minikv.course.harness.files import write_whole
from minikv.course.harness.manifest import Exercise, chapter_of, chapters, find
from minikv.course.harness.report import Report
from minikv.course.harness.skeletons import skeleton

COLUMNS = (
    "student", "exercise", "title", "status", "checks passed", "checks", "seconds", "message",
    "to be read",
)  # fmt: skip

# What a solution may import besides its skeleton's imports, without a person's looking at it.
PLAIN = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "math", "numpy", "operator", "random", "torch", "triton", "typing",
}  # fmt: skip
REACHING = re.compile(r"__import__|eval|exec|compile|globals|open|_getframe|__\w+__")
ORDINARY = re.compile(r"__(init|name|len|iter|getitem|contains|eq|hash|repr|lt|post_init)__")


@dataclass(frozen=True)
class Student:
    """One folder."""

    name: str
    folder: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="a student's folder"
    )
    parser.add_argument(
        "--chapters",
        nargs="+",
        metavar="NN",
        default=[number for number, chapter in chapters().items() if not chapter.cannot_run],
        help="only these chapters",
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a table, one line per exercise"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")


def run(args: argparse.Namespace) -> int:
    try:
        students = [find_student(folder) for folder in args.folders]
        exercises = [e for number in args.chapters for e in chapter_of(number).exercises]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results = []
    try:
        for student, exercise in progress_bar(students, exercises):
            results.append((student, grade(student, exercise)))
    except KeyboardInterrupt:
        print("interrupted: this is what was checked so far", file=sys.stderr)
    if args.csv:
        write_whole(args.csv, as_csv(results))
    if args.junit:
        write_whole(args.junit, as_junit(results))
    print(as_text(results))
    return 0


def find_student(folder: Path) -> Student:
    """Raises ValueError for a folder without exercise files."""
    for place in (folder, folder / "exercises"):
        if any(place.glob("ch[0-9][0-9]_*.py")):
            return Student(folder.resolve().name, place.resolve())
    raise ValueError(f"{folder}: has no chNN_….py, and no folder exercises with them")


def progress_bar(
    students: list[Student], exercises: list[Exercise]
) -> Iterator[tuple[Student, Exercise]]:
    pairs = [(student, exercise) for student in students for exercise in exercises]
    with tqdm(pairs, unit="exercise", disable=not sys.stderr.isatty()) as bar:
        for student, exercise in bar:
            bar.set_description(student.name)
            yield student, exercise


def grade(student: Student, exercise: Exercise) -> Report:
    with reader_files.in_folder(student.folder):
        return process.run(exercise)


def to_be_read(student: Student, exercise: Exercise) -> list[str]:
    """Lines of the student's file that import or name more than an exercise needs, and that its
    skeleton does not have: "line 12: import gc"."""
    chapter = chapter_of(exercise.id)
    try:
        with reader_files.in_folder(student.folder):
            text = reader_files.read(chapter)
        tree = reader_files.parse(chapter, text)
    except reader_files.WorkbookError:
        return []  # its report says so
    given = {line.strip() for line in skeleton(chapter).splitlines()}
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                outside = any(name.name.split(".")[0] not in PLAIN for name in names)
            case ast.ImportFrom(module, _, level):
                outside = level > 0 or (module or "").split(".")[0] not in PLAIN
            case ast.Name(name) | ast.Attribute(_, name):
                outside = bool(REACHING.fullmatch(name)) and not ORDINARY.fullmatch(name)
            case _:
                continue
        line = text.splitlines()[node.lineno - 1].strip()
        if outside and line not in given:
            found[node.lineno] = f"line {node.lineno}: {line[:80]}"
    return [found[number] for number in sorted(found)]


def message(report: Report) -> str:
    """The first failure, in one line."""
    wrong = next((line for line in report.lines if not line.ok), None)
    if report.passed or report.status == "not started":
        return ""
    if wrong is None:
        return (report.place or "").replace("\n", " ")
    cause = f" ({wrong.cause})" if wrong.cause else ""
    return f"{wrong.name}: {wrong.what}{cause}".replace("\n", " ")


def as_csv(results: list[tuple[Student, Report]]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for student, report in results:
        exercise = find(report.exercise)
        table.writerow(
            (student.name, exercise.id, exercise.title, report.status,
             sum(line.ok for line in report.lines), report.total, f"{report.seconds:.1f}",
             message(report), "; ".join(to_be_read(student, exercise)))
        )  # fmt: skip
    return out.getvalue()


def as_junit(results: list[tuple[Student, Report]]) -> str:
    root = ElementTree.Element("testsuites", name="minikv exercises")
    suites: dict[str, ElementTree.Element] = {}
    for student, report in results:
        if student.name not in suites:
            suites[student.name] = ElementTree.SubElement(root, "testsuite", name=student.name)
        case = ElementTree.SubElement(
            suites[student.name], "testcase", classname=student.name, name=report.exercise,
            time=f"{report.seconds:.3f}",
        )  # fmt: skip
        if report.status == "not started":
            ElementTree.SubElement(case, "skipped", message="not started")
        elif not report.passed:
            text = _valid_in_xml(report.text())
            failure = ElementTree.SubElement(
                case, "failure", message=_valid_in_xml(message(report))
            )
            failure.text = text
    for suite in suites.values():
        suite.set("tests", str(len(suite.findall("testcase"))))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _valid_in_xml(text: str) -> str:
    """Without the control characters that XML cannot hold, which a student's code may print."""
    return "".join(c for c in text if c in "\t\n" or " " <= c <= "\ud7ff" or c >= "\ue000")


def as_text(results: list[tuple[Student, Report]]) -> str:
    """One line per student: ✓ passed, ✗ failed, · not started."""
    marks = {"passed": "✓", "failed": "✗", "not started": "·"}
    lines: dict[str, list[str]] = {}
    for student, report in results:
        lines.setdefault(student.name, []).append(marks[report.status])
    ids = list(dict.fromkeys(report.exercise for _, report in results))
    width = max((len(name) for name in [*lines, "student"]), default=7)
    head = "student".ljust(width) + "  " + " ".join(ids) + "  passed"
    rows = [
        f"{name.ljust(width)}  " + " ".join(m.center(4) for m in row).ljust(5 * len(ids) - 1)
        + f"  {row.count('✓'):3} of {len(ids)}"
        for name, row in lines.items()
    ]  # fmt: skip
    places = dict.fromkeys(
        f"{student.name}, {chapter_of(report.exercise).file_name}, {line}"
        for student, report in results
        for line in to_be_read(student, find(report.exercise))
    )
    remarks = ["", "Lines that reach for more than an exercise needs; read them:", *places]
    return "\n".join([head, *rows, *(remarks if places else [])])
