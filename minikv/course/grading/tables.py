"""What `grade` says of a class: in the terminal, and as tables for a spreadsheet, for Moodle's and
Canvas's gradebooks and for a CI system. `class_page` has the page."""

import csv
import io
import math
from xml.etree import ElementTree

from minikv.course.exercise_data.manifest import Exercise, chapter_of, find
from minikv.course.exercise_data.plan import NO_PLAN, TermPlan
from minikv.course.grading import reading
from minikv.course.grading.hand_ins import Student
from minikv.course.judge.result import Result
from minikv.course.reports.report import Report

COLUMNS = (
    "student", "exercise", "title", "status", "points", "overridden", "checks passed", "checks",
    "seconds", "message", "to be read", "on its word",
)  # fmt: skip

NOT_CHECKED = "could not be checked: "
Results = list[tuple[Student, Result]]


def not_handed_in(student: Student, exercise: Exercise) -> Result:
    """What is said where there is no file of an exercise."""
    said = "nothing was handed in"
    if student.folder is not None:
        others = ", ".join(student.others())
        said = f"no {exercise.chapter.file_name} was handed in"
        said += f"; there is {others}: rename what is meant" if others else ""
    return Result(exercise.id, "not started", 0, place=said)


def in_words(parts: list[str], word: str) -> str:
    """ "a, b or c"."""
    *first, last = parts
    return f"{', '.join(first)} {word} {last}" if first else last


def is_absent(report: Result) -> bool:
    """Whether a report is one of `not_handed_in`."""
    return report.status == "not started" and "was handed in" in (report.place or "")


def to_be_read(student: Student, exercise: Exercise) -> list[str]:
    """Lines of the student's file that are not plain code: "line 12: import gc"."""
    return list(reading.beyond(student.text(exercise), exercise.chapter))


def message(report: Result) -> str:
    """The first failure, in one line."""
    wrong = next((line for line in report.lines if not line.ok), None)
    place = (report.place or "").replace("\n", " ")
    if report.passed or (report.status == "not started" and not is_absent(report)):
        return ""
    if wrong is None:
        return place
    cause = f" ({wrong.cause})" if wrong.cause else ""
    return f"{wrong.name}: {wrong.what}{cause}".replace("\n", " ")


def as_csv(results: Results, plan: TermPlan = NO_PLAN) -> str:
    rows: list[list] = [[*COLUMNS]]
    for student, report in results:
        exercise = find(report.exercise)
        override = plan.overrides.get((student.name, exercise.id))
        rows.append(
            [student.name, exercise.id, exercise.title, report.status,
             given(student, report, plan), override.why if override else "",
             sum(line.ok for line in report.lines), report.total, f"{report.seconds:.1f}",
             message(report), "; ".join(to_be_read(student, exercise)),
             "; ".join(report.on_its_word)]
        )  # fmt: skip
    return _rows(rows)


def given(student: Student, report: Result, plan: TermPlan) -> float:
    """The points for an exercise: what the lecturer says, or else what its check earns."""
    override = plan.overrides.get((student.name, report.exercise))
    return earned(report, plan) if override is None else override.points


def earned(report: Result, plan: TermPlan) -> float:
    """If an exercise is passed, what the plan gives for it, or its difficulty. NaN if it is not
    finished: there is no mark yet."""
    if report.status == "not finished":
        return math.nan
    most = plan.most(find(report.exercise))
    right = sum(line.ok for line in report.lines)
    if report.status != "failed" or not plan.partial or not report.total:
        return most if report.passed else 0  # a bug that is as it was found gives nothing
    return round(most * right / report.total, 2)


def points(results: Results, plan: TermPlan) -> tuple[dict[str, float], dict[str, list[float]]]:
    """What each week of the plan, or each chapter, can give, and what each student has of it."""
    weeks = {e.id: f"week {week.number}" for week in plan.weeks for e in week.exercises}
    possible: dict[str, float] = {}
    reached: dict[str, dict[str, float]] = {}
    for id_ in dict.fromkeys(report.exercise for _, report in results):
        part = weeks.get(id_, id_[:2])
        possible[part] = possible.get(part, 0) + plan.most(find(id_))
    for student, report in results:
        mine = reached.setdefault(student.name, dict.fromkeys(possible, 0))
        mine[weeks.get(report.exercise, report.exercise[:2])] += given(student, report, plan)
    return possible, {name: [*mine.values()] for name, mine in reached.items()}


def for_moodle(results: Results, plan: TermPlan = NO_PLAN) -> str:
    """A student's name is the user name there, if the plan's roster says so."""
    possible, reached = points(results, plan)
    head = ["username", *(f"minikv {part} (of {most:g})" for part, most in possible.items())]
    rows = [[name, *mine, sum(mine)] for name, mine in reached.items()]
    return _rows([[*head, f"minikv (of {sum(possible.values()):g})"], *rows])


def for_canvas(results: Results, plan: TermPlan = NO_PLAN) -> str:
    """With the number that Canvas has put before the files; else a student's name is the login
    there. The second line says what can be reached."""
    possible, reached = points(results, plan)
    ids = {student.name: student.id if student.on_canvas else "" for student, _ in results}
    who = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]
    rows = [[name, ids[name], "", "" if ids[name] else name, "", *mine]
            for name, mine in reached.items()]  # fmt: skip
    most = ["    Points Possible", *[""] * 4, *possible.values()]
    return _rows([[*who, *(f"minikv {part}" for part in possible)], most, *rows])


def _rows(rows: list[list]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerows([[_cell(cell) for cell in row] for row in rows])
    return out.getvalue()


def _cell(cell: object) -> object:
    """NaN as nothing, so that a gradebook keeps what it has; a sum of points to cents. And a
    spreadsheet computes what begins like a formula; a name or a message of a student's must not."""
    if isinstance(cell, float):
        return "" if math.isnan(cell) else round(cell, 2)
    is_one = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{cell}" if is_one else cell


def as_junit(results: Results) -> str:
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
        elif report.status == "not finished":
            ElementTree.SubElement(case, "error", message=_valid_in_xml(message(report)))
        elif not report.passed:
            text = _valid_in_xml(Report.of(report).text())
            failure = ElementTree.SubElement(
                case, "failure", message=_valid_in_xml(message(report))
            )
            failure.text = text
    for suite in suites.values():
        suite.set("tests", str(len(suite.findall("testcase"))))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("errors", str(len(suite.findall("testcase/error"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _valid_in_xml(text: str) -> str:
    """Without the control characters that XML cannot hold, which a student's code may print."""
    return "".join(c for c in text if c in "\t\n" or " " <= c <= "\ud7ff" or c >= "\ue000")


def as_text(results: Results, plan: TermPlan = NO_PLAN) -> str:
    """One line per student: ✓ passed, ✗ failed, · not started, - not handed in, ? not finished.
    Below them, what a person should know."""
    marks = {"passed": "✓", "failed": "✗", "not started": "·", "not finished": "?"}
    lines: dict[str, list[str]] = {}
    for student, report in results:
        mark = "-" if is_absent(report) else marks[report.status]
        lines.setdefault(student.name, []).append(mark)
    ids = list(dict.fromkeys(report.exercise for _, report in results))
    width = max((len(name) for name in [*lines, "student"]), default=7)
    head = "student".ljust(width) + "  " + " ".join(ids) + "  passed"
    rows = [
        f"{name.ljust(width)}  "
        + " ".join(m.center(4) for m in row).ljust(5 * len(ids) - 1)
        + f"  {row.count('✓'):3} of {len(ids)}"
        for name, row in lines.items()
    ]
    remarks = {
        "Not checked; look at these:": [f"{who}: {what}" for who, what in not_checked(results)],
        "Marks of yours, which win over the checks:": [
            f"{who}, {id_}: {points} instead of {of_check} points: {why}"
            for who, id_, _, of_check, points, why in overridden(results, plan)
        ],
        "Lines that are not plain code; read them:": [
            ", ".join(one) for one in lines_to_read(results)
        ],
    }
    told = [line for head, told in remarks.items() if told for line in ("", head, *told)]
    return "\n".join([head, *rows, *told])


def not_checked(results: Results) -> list[tuple[str, str]]:
    """(student, what is said) where there are files, but none that could be checked, as under
    another name than the one that is asked for."""
    found = ((student.name, message(one)) for student, one in results if not one.lines)
    return list(dict.fromkeys(p for p in found if "there is" in p[1] or NOT_CHECKED in p[1]))


def overridden(results: Results, plan: TermPlan) -> list[tuple[str, str, str, str, str, str]]:
    """(student, exercise, status and points of the check, the lecturer's points, why)."""
    found = []
    for student, report in results:
        own = plan.overrides.get((student.name, report.exercise))
        if own is not None:
            of_check = shown_points(earned(report, plan))
            found.append((student.name, report.exercise, report.status, of_check,
                          shown_points(own.points), own.why))  # fmt: skip
    return found


def lines_to_read(results: Results) -> list[tuple[str, str, str]]:
    """(student, file, line) of what is not plain code, each once."""
    return list(
        dict.fromkeys(
            (student.name, chapter_of(report.exercise).file_name, line)
            for student, report in results
            for line in to_be_read(student, find(report.exercise))
        )
    )


def shown_points(points: float) -> str:
    return "?" if math.isnan(points) else f"{points:g}"
