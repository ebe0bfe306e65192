"""A round trip of nbgrader itself: an assignment, three students, marks and feedback.

`make test-class` runs this in an environment of its own, with nbgrader beside our packages.
"""

import csv
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from html import unescape
from pathlib import Path

import pytest

from minikv.course.commands import main
from minikv.course.exercise_data.manifest import chapter_of
from minikv.course.exercise_data.mistakes import mistakes_of
from minikv.course.exercise_data.skeletons import fill, skeleton, solved

pytest.importorskip("nbgrader", reason="nbgrader is not installed here: make test-class")

NUMBER = "01"
CHAPTER = chapter_of(NUMBER)
POINTS = {exercise.id: exercise.difficulty for exercise in CHAPTER.exercises}
FIRST = CHAPTER.exercises[0]
# All right, but for one mistake in the first exercise.
MISTAKE = mistakes_of(FIRST)[0]
WRONG = fill(solved(CHAPTER), MISTAKE.sources)
# In a notebook: all that a cell can do to the cells after it, and to what they import.
HOSTILE_CELL = """
import sys
from minikv.course.grading import cells
from minikv.course.grading import grade
from minikv.course.judge import process
from minikv.course.judge.result import Result
right = lambda *rest: Result(rest[-1].id, "passed", 1)
process.run = grade.grade = right
must_pass = cells.must_pass = lambda exercise_id: None
sys.modules["minikv.course.grading.cells"] = type(sys)("cells")
"""
HOSTILE_MODULE = "def begin(number): pass\ndef must_pass(exercise_id): pass\n"


def run(*command, cwd):
    """In an environment that was not activated, as from a cron job."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    more = {"PATH": path, "MINIKV_TIME_LIMIT": "60", "JUPYTER_PLATFORM_DIRS": "1"}
    line = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(line, cwd=cwd, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "course"
    assert main(["release-assignment", NUMBER, "--out", str(folder)]) == 0
    return folder


def hand_in(course, student, text, tamper=lambda folder: None):
    """What a student has made of the released assignment."""
    folder = course / "submitted" / student / f"ch{NUMBER}"
    shutil.copytree(course / "release" / f"ch{NUMBER}", folder)
    (folder / CHAPTER.file_name).write_text(text)
    tamper(folder)


def tamper(folder):
    """A notebook whose cells give points away, and modules that take the place of ours."""
    file = folder / f"ch{NUMBER}.ipynb"
    notebook = json.loads(file.read_text())
    for cell in notebook["cells"]:
        if cell["id"] in ("begin", "own"):
            cell["source"] = HOSTILE_CELL
        elif cell["cell_type"] == "code":
            cell["source"] = "must_pass = print"
            cell["metadata"]["nbgrader"] |= {"points": 100, "locked": False}
    del notebook["cells"][-1]
    file.write_text(json.dumps(notebook))
    package = folder / "minikv" / "course" / "classroom"
    package.mkdir(parents=True)
    for place in (package, *list(package.parents)[:2]):
        (place / "__init__.py").touch()
    (package / "cells.py").write_text(HOSTILE_MODULE)
    (folder / "sitecustomize.py").write_text("raise SystemExit")


@pytest.fixture(scope="module")
def marks(course):
    """(marks by student, the folder of the feedback), after nbgrader has done its work."""
    hand_in(course, "right", solved(CHAPTER))
    hand_in(course, "wrong", WRONG)
    hand_in(course, "hostile", skeleton(CHAPTER), tamper)
    run("nbgrader", "autograde", f"ch{NUMBER}", cwd=course)
    run("nbgrader", "generate_feedback", f"ch{NUMBER}", cwd=course)
    run("nbgrader", "export", "--to", "marks.csv", cwd=course)
    rows = csv.DictReader((course / "marks.csv").open())
    return {row["student_id"]: row for row in rows}


def feedback(course, student):
    page = (course / "feedback" / student / f"ch{NUMBER}" / f"ch{NUMBER}.html").read_text()
    return " ".join(unescape(re.sub(r"<[^>]+>", "", page)).split())


def test_the_release_has_no_solution(course):
    release, source = (course / kind / f"ch{NUMBER}" for kind in ("release", "source"))
    assert (release / CHAPTER.file_name).read_text() == skeleton(CHAPTER)
    assert "write_solution" in (source / f"ch{NUMBER}.ipynb").read_text()
    assert "solution(" not in (release / f"ch{NUMBER}.ipynb").read_text()


def test_the_right_one_gets_all_points(marks):
    assert float(marks["right"]["score"]) == float(marks["right"]["max_score"])
    assert float(marks["right"]["max_score"]) == sum(POINTS.values())


def test_the_wrong_one_loses_the_points_of_one_exercise(course, marks):
    assert float(marks["wrong"]["score"]) == sum(POINTS.values()) - POINTS[FIRST.id]


def test_feedback_names_the_cause(course, marks):
    assert " ".join(MISTAKE.cause.split()) in feedback(course, "wrong")
    assert "likely cause:" not in feedback(course, "right")
    assert "Traceback (most" not in feedback(course, "wrong")


def test_the_hostile_one_gets_nothing(course, marks):
    assert float(marks["hostile"]["score"]) == 0
    left = course / "autograded" / "hostile" / f"ch{NUMBER}"
    assert "not started" in feedback(course, "hostile")
    assert "must_pass = " not in (left / f"ch{NUMBER}.ipynb").read_text()


def test_a_second_release_leaves_the_first_alone_and_says_how_to_make_it_again(course, capsys):
    command = ["release-assignment", NUMBER, "--out", str(course)]
    assert main(command) == 2
    source = course / "source" / f"ch{NUMBER}"
    assert f"rm -r {source}" in " ".join(capsys.readouterr().err.split()).replace("/ ", "/")
    shutil.rmtree(source)
    released = course / "release" / f"ch{NUMBER}" / CHAPTER.file_name
    released.write_text("an old release")
    assert main(command) == 0 and released.read_text() == skeleton(CHAPTER)


def test_the_deadline_of_a_plan_is_nbgraders(tmp_path):
    week = "[[week]]\ndeadline = 2027-03-05T23:59:00+01:00\nexercises = ['01.1']\n"
    (tmp_path / "plan.toml").write_text(f"name = 'A plan'\n{week}")
    command = ["release-assignment", "1", "--plan", str(tmp_path / "plan.toml")]
    assert main([*command, "--out", str(tmp_path / "course")]) == 0
    with closing(sqlite3.connect(tmp_path / "course" / "gradebook.db")) as database:
        rows = database.execute("SELECT name, duedate FROM assignment").fetchall()
    assert rows == [("week01", "2027-03-05 22:59:00.000000")]
