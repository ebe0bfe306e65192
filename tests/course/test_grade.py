"""One command checks the folders of a whole class."""

import csv
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from four_ways import EXERCISES, different, right

from minikv.course.harness import grade as grading
from minikv.course.harness.manifest import chapter_of, find
from minikv.course.harness.skeletons import skeleton

ONE = find("04.1")
FILE = chapter_of(ONE.id).file_name
LOOP = "def allocate(self):\n        while True:\n            pass\n\n    def old"


@pytest.fixture
def a_class(tmp_path):
    """Four students: one is right, one is wrong, one loops, one has not begun."""
    texts = {
        "ada": right(ONE),
        "ben": right(ONE).replace("self._free.pop()", "0"),
        "cleo": right(ONE).replace("def allocate", LOOP),
        "dan": skeleton(chapter_of(ONE.id)),
    }
    for name, text in texts.items():
        folder = tmp_path / name / ("exercises" if name == "ben" else "")
        folder.mkdir(parents=True)
        (folder / FILE).write_text(text)
    return [tmp_path / name for name in texts]


def grade(*arguments, **options):
    command = [sys.executable, "-m", "minikv", "grade", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_a_class_is_graded(a_class, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "5")
    table, xml = tmp_path / "marks.csv", tmp_path / "marks.xml"
    done = grade(*a_class, "--chapters", "04", "--csv", table, "--junit", xml)
    assert done.returncode == 0, done.stderr
    rows = [row for row in csv.DictReader(table.open()) if row["exercise"] == "04.1"]
    assert [row["student"] for row in rows] == ["ada", "ben", "cleo", "dan"]
    assert [row["status"] for row in rows] == ["passed", "failed", "failed", "not started"]
    assert "not finished after 5 s" in rows[2]["message"]
    suites = ElementTree.parse(xml).getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["ada", "ben", "cleo", "dan"]
    cases = [suite.find("testcase[@name='04.1']") for suite in suites]
    assert [[child.tag for child in case] for case in cases] == [
        [], ["failure"], ["failure"], ["skipped"],
    ]  # fmt: skip
    assert "ada" in done.stdout and "✓" in done.stdout
    assert not (a_class[0] / ".progress").exists(), "a student's own record is left alone"


def test_a_folder_without_exercises_is_refused(tmp_path):
    done = grade(tmp_path)
    assert done.returncode == 2
    assert "has no chNN_" in done.stderr and "Traceback" not in done.stderr


CHEATS = (
    "import minikv.blocks as answers",
    "from minikv.course.harness import report",
    "import gc",
    "import os",
    "MARK = eval('1')",
    "BASE = blocks.BlockTable.__mro__",
    "FREE = open('/proc/self/fd/5')",
)


def test_lines_that_reach_for_more_are_named(tmp_path):
    student = grading.find_student(_student(tmp_path, right(ONE) + "\n" + "\n".join(CHEATS)))
    named = grading.to_be_read(student, ONE)
    assert [line.partition(": ")[2] for line in named] == list(CHEATS)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_honest_solutions_are_not_named(tmp_path, exercise):
    for number, text in enumerate((right(exercise), different(exercise))):
        folder = tmp_path / str(number)
        student = grading.find_student(_student(folder, text, exercise))
        assert grading.to_be_read(student, exercise) == []


def _student(folder, text, exercise=ONE):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / chapter_of(exercise.id).file_name).write_text(text)
    return folder
