"""What the cells of an assignment call. The code that is graded is in the file beside them."""

import os
from pathlib import Path

from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.exercise_data.skeletons import solved
from minikv.course.grading import grade
from minikv.course.grading.hand_ins import find_student
from minikv.course.reports.report import Report

TRIES = 3  # of a check that a limit has ended


class NotPassed(AssertionError):
    """An exercise whose check does not pass. A notebook shows the sentence, and no traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for this
        return [str(self)]


def begin(*ids: str) -> None:
    """From now on the exercises of this process are those beside the notebook."""
    os.environ["MINIKV_EXERCISES"] = str(Path.cwd())
    files = " and ".join(dict.fromkeys(chapter_of(id_).file_name for id_ in ids))
    print(f"You write into {files}. Save, then run the cells of {', '.join(ids)}.")


def write_solution(*numbers: str) -> None:
    """Write the reference's solution of chapters into their files, over what is there."""
    for chapter in map(chapter_of, numbers):
        Path(chapter.file_name).write_text(solved(chapter), encoding="utf-8")


def must_pass(exercise_id: str, partly: float | None = None) -> float | None:
    """Check the file beside the notebook, and print the report. Raises NotPassed; with `partly`,
    the points of all lines, it returns those of the lines that pass to nbgrader. Of a check that
    is not finished there is no mark: then the kernel ends, and with it nbgrader's command fails
    for this student, who can be graded again."""
    exercise = find(exercise_id)
    for _ in range(TRIES):
        report = Report.of(grade.grade(find_student(Path.cwd()), exercise))
        if report.ended_with is None and report.status != "not finished":
            break
    print(report.text())
    if report.status == "not finished":
        os._exit(1)
    if partly is not None and report.status == "failed" and report.total:
        return round(partly * sum(line.ok for line in report.lines) / report.total, 2)
    if not report.passed:
        raise NotPassed(f"{exercise.id} {exercise.title}: {report.headline()}")
    return None
