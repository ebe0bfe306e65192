"""One command checks the folders of a whole class."""

import contextlib
import csv
import ctypes
import html
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import Future
from xml.etree import ElementTree

import pytest
from four_ways import EXERCISES, different, right
from thorough import thorough_after
from waiting import PATIENCE, until

from minikv.course.commands import main
from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.exercise_data.mistakes import mistakes_of
from minikv.course.exercise_data.skeletons import skeleton
from minikv.course.grading import grade as grading, tables
from minikv.course.grading.hand_ins import find_student
from minikv.course.grading.similarity import fingerprints, pairs_alike
from minikv.course.judge import process
from minikv.course.judge.result import Line, Result

ONE = find("04.1")
FILE = ONE.chapter.file_name
HOSTILE = """
import os
for _number in range(3, 64):
    try:
        os.write(_number, b"passed")
    except OSError:
        pass
"""
LOOP = "def allocate(self):\n        while True:\n            pass\n\n    def old"


@pytest.fixture
def a_class(tmp_path):
    """Four students: one is right, one is wrong, one loops, one has not begun."""
    texts = {
        "ada": right(ONE),
        "ben": right(ONE).replace("self._free.pop()", "0"),
        "cleo": right(ONE).replace("def allocate", LOOP),
        "dan": skeleton(ONE.chapter),
    }
    for name, text in texts.items():
        folder = tmp_path / name / ("exercises" if name == "ben" else "")
        folder.mkdir(parents=True)
        (folder / FILE).write_text(text)
    return [tmp_path / name for name in texts]


def grade(*arguments, **options):
    command = [sys.executable, "-m", "minikv", "grade", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.thorough
def test_a_class_is_graded(a_class, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "4")
    table, xml = tmp_path / "marks.csv", tmp_path / "marks.xml"
    page, kept = tmp_path / "class.html", tmp_path / "kept.sqlite"
    command = ("--jobs", "2", "--csv", table, "--junit", xml)
    command += ("--page", page, "--resume", kept)
    command += ("--moodle", tmp_path / "moodle.csv", "--canvas", tmp_path / "canvas.csv")
    done = grade(*a_class, *command)
    assert done.returncode == 0, done.stderr
    difficulty = {exercise.id: exercise.difficulty for exercise in chapter_of("04").exercises}
    most = sum(difficulty.values())
    reached = dict.fromkeys(("ada", "ben", "cleo", "dan"), 0)
    for row in csv.DictReader(table.open()):
        reached[row["student"]] += difficulty[row["exercise"]] * (row["status"] == "passed")
    [head, *moodle] = csv.reader((tmp_path / "moodle.csv").open())
    assert head == ["username", f"minikv 04 (of {most})", f"minikv (of {most})"]
    assert moodle == [[name, str(mark), str(mark)] for name, mark in reached.items()]
    [head, line, *canvas] = csv.reader((tmp_path / "canvas.csv").open())
    assert head == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "minikv 04"]
    assert line == ["    Points Possible", "", "", "", "", str(most)]
    assert canvas == [[name, "", "", name, "", str(mark)] for name, mark in reached.items()]
    assert 0 < reached["ada"] <= most
    rows = [row for row in csv.DictReader(table.open()) if row["exercise"] == "04.1"]
    assert [row["student"] for row in rows] == ["ada", "ben", "cleo", "dan"]
    assert [row["status"] for row in rows] == ["passed", "failed", "failed", "not started"]
    assert "used 4 s of processor time" in rows[2]["message"]
    suites = ElementTree.parse(xml).getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["ada", "ben", "cleo", "dan"]
    cases = [suite.find("testcase[@name='04.1']") for suite in suites]
    assert [[child.tag for child in case] for case in cases] == [
        [], ["failure"], ["failure"], ["skipped"],
    ]  # fmt: skip
    assert "ada" in done.stdout and "✓" in done.stdout
    assert not (a_class[0] / ".progress").exists(), "a student's own record is left alone"

    look_at(page.read_text())
    first = table.read_text(), xml.read_text()
    monkeypatch.setattr(grading, "grade_file", None)  # nothing is checked again
    assert main(["grade", *map(str, [*a_class, *command])]) == 0
    assert capsys.readouterr().out == done.stdout
    assert (table.read_text(), xml.read_text()) == first


def look_at(page):
    """What a lecturer wants to talk about next week."""
    text = re.sub(r"<[^>]+>", " ", page)
    counted = f"4 students, {len(chapter_of('04').exercises)} exercises"
    for said in (counted, "Lines to read", "alike"):
        assert said in text, said
    known = next(m for m in mistakes_of(ONE) if m.cause in html.unescape(text))
    assert known.name in html.unescape(text)
    assert "by a process that does not import it" in text
    assert "<script" not in page


def test_a_folder_without_exercises_is_refused(tmp_path, capsys):
    assert main(["grade", str(tmp_path)]) == 2
    assert "is no folder with a hand-in" in capsys.readouterr().err


HOSTILE_FILES = {  # name of the student: what stands in the place of the file, and what is told
    "nested": (lambda file: file.write_text("x = " + "-" * 90_000 + "1"), "cannot read this"),
    "brackets": (lambda file: file.write_text("(" * 90_000), "cannot read this"),
    "sum": (lambda file: file.write_text(right(ONE) + "\ny = " + "1 + " * 90_000 + "1"), "cannot"),
    "deep": (  # Python can read it, and not write it again
        lambda file: file.write_text(
            right(ONE).replace("def allocate(self)", f"def allocate(self, a={'-' * 700}1)")
        ),
        "nested|recursion",
    ),
    "empty": (lambda file: file.touch(), f"{FILE} is empty$"),
    "latin": (lambda file: file.write_bytes("# fün".encode("latin-1")), "not UTF-8"),
    "pipe": (os.mkfifo, "no file"),
    "socket": (lambda file: socket.socket(socket.AF_UNIX).bind(str(file)), "no file"),
    "folder": (os.mkdir, "no file"),
    "link": (lambda file: file.symlink_to("/etc/passwd"), "no file"),
    "loop": (lambda file: file.symlink_to(file), "no file"),
    "huge": (lambda file: (file.touch(), os.truncate(file, 2 << 30)), "bytes"),
    "closed": (lambda file: (file.touch(), file.chmod(0)), "Permission denied"),
    "locked": (lambda file: (file.touch(), file.parent.chmod(0)), "Permission denied"),
    "circle": (lambda file: (file.parent.rmdir(), file.parent.symlink_to(file.parent)), "a link"),
    "not utf-8 \udcff": (lambda file: file.write_text("def broken(:"), "cannot read this"),
}


def without_the_rights_of_root():
    """To read everything is two of them; they do not come back with the next program."""
    for right_ in (1, 2):
        ctypes.CDLL(None).prctl(24, right_, 0, 0, 0)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has all of these files")
def test_half_of_a_class_is_hostile(tmp_path):
    """All are marked, the bad ones with the reason, and the tables are written."""
    folders = []
    for number, (name, (make, _)) in enumerate(HOSTILE_FILES.items()):
        for folder in (tmp_path / f"student {number}", tmp_path / name):
            folder.mkdir()
            folders.append(folder)
        (tmp_path / f"student {number}" / FILE).write_text(right(ONE))
        make(tmp_path / name / FILE)
    assert len(folders) == 32
    table, xml, page = (tmp_path / name for name in ("marks.csv", "marks.xml", "class.html"))
    tables = ("--csv", table, "--junit", xml, "--page", page)
    done = grade(
        *map(os.fspath, folders), "--jobs", "1", *tables,
        preexec_fn=without_the_rights_of_root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [row for row in csv.DictReader(table.open()) if row["exercise"] == ONE.id]
    assert [row["status"] for row in rows] == ["passed", "failed"] * 16
    names = [name.replace("\udcff", "\\xff") for name in HOSTILE_FILES]
    assert [row["student"] for row in rows[1::2]] == names
    for row, (_, reason) in zip(rows[1::2], HOSTILE_FILES.values(), strict=True):
        assert re.search(reason, row["message"]), row
    assert len(ElementTree.parse(xml).getroot().findall("testsuite")) == 32
    assert "32 students" in page.read_text()
    assert len(done.stdout.splitlines()) >= 33


@pytest.mark.thorough
def test_code_that_writes_to_every_open_file_is_told_so():
    report = grading.grade_file(ONE.id, (right(ONE) + HOSTILE).encode())
    assert report["status"] == "failed"
    assert "no answer to what it was asked" in report["lines"][-1]["what"]


class AtOnce:
    """An executor without processes; `calls` is what it was asked."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = [], fail_at

    def submit(self, function, exercise_id, file):
        future = Future()
        self.calls.append((exercise_id, file))
        if len(self.calls) == self.fail_at:
            future.set_exception(KeyboardInterrupt())
        else:
            line = Line("a line", True)
            future.set_result(vars(Result(exercise_id, "passed", 1)) | {"lines": [vars(line)]})
        return future


class TooBusy(AtOnce):
    """One whose first answers were ended after `seconds` of the processor, or (None) the clock."""

    def __init__(self, seconds, times=1):
        super().__init__()
        self.seconds, self.times = seconds, times

    def submit(self, function, exercise_id, file):
        future = super().submit(function, exercise_id, file)
        if len(self.calls) > self.times:
            return future
        line = Line("a line", False, "what ended it", "a loop that never ends")
        status = "not finished" if self.seconds is None else "failed"
        found = Result(exercise_id, status, 1, ended_with=self.seconds or process.time_limit())
        future = Future()
        future.set_result(vars(found) | {"lines": [vars(line)]})
        return future


@pytest.mark.parametrize("seconds", [None, 10.0])
def test_what_a_limit_has_ended_is_checked_again_at_the_end(a_class, seconds):
    students = [find_student(folder) for folder in a_class[:2]]
    pool = TooBusy(seconds)
    found = list(grading.grades(pool, grading.Store(None), students, [ONE]))
    assert [student.name for student, _ in found] == ["ben", "ada"]
    assert all(report.passed for _, report in found) and len(pool.calls) == 3


def test_what_is_not_finished_is_no_mark_and_is_not_kept(a_class, tmp_path, monkeypatch, capsys):
    tables = [option for name in ("moodle", "csv", "junit", "page")
              for option in (f"--{name}", str(tmp_path / name))]  # fmt: skip
    command = ["grade", str(a_class[0]), "--resume", str(tmp_path / "kept")]
    pool = TooBusy(None, times=len(chapter_of("04").exercises) + 1)  # all once, the first twice
    monkeypatch.setattr(grading, "workers", lambda jobs: contextlib.nullcontext(pool))
    assert main([*command, *tables]) == 1
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("Not finished, so without a mark: ada 04.1. ")
    )
    assert (tmp_path / "moodle").read_text().splitlines()[1] == "ada,,"
    assert "not finished" in (tmp_path / "csv").read_text()
    assert 'errors="1"' in (tmp_path / "junit").read_text()
    assert "a loop that never ends" not in (tmp_path / "page").read_text()
    pool.calls.clear()
    pool.times = 0
    assert main(command) == 0 and [id_ for id_, _ in pool.calls] == ["04.1"]


def test_more_time_is_given_to_what_used_all(a_class, monkeypatch):
    students, store = [find_student(a_class[0])], grading.Store(":memory:")
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "10")
    list(grading.grades(TooBusy(10.0, times=2), store, students, [ONE]))
    assert list(grading.grades(again := TooBusy(10.0), store, students, [ONE])) and not again.calls
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "60")
    [(_, report)] = grading.grades(AtOnce(), store, students, [ONE])
    assert report.passed


def test_what_was_checked_is_kept_through_an_interrupt(a_class, tmp_path):
    students = [find_student(folder) for folder in a_class]
    exercises = list(chapter_of("04").exercises)
    file = tmp_path / "kept.sqlite"
    store = grading.Store(file)
    done = []
    with pytest.raises(KeyboardInterrupt):
        for one in grading.grades(AtOnce(fail_at=9), store, students, exercises):
            done.append(one)
    store.close()
    assert [path.name for path in tmp_path.glob("kept*")] == ["kept.sqlite"]

    rest = AtOnce()
    found = list(grading.grades(rest, grading.Store(file), students, exercises))
    assert len(found) == len(students) * len(exercises)
    assert len(rest.calls) == len(found) - len(done)
    # A file that has changed is checked again, and no other.
    (a_class[0] / FILE).write_text("# another\n" + (a_class[0] / FILE).read_text())
    again, store = AtOnce(), grading.Store(file)
    for student in students[1:]:  # the store holds these
        assert store.get(ONE, student.file(ONE)) is not None
    list(grading.grades(again, store, students, [ONE]))
    assert [file for _, file in again.calls] == [students[0].file(ONE)]


def test_a_file_that_two_students_handed_in_is_checked_once(a_class):
    students = [find_student(folder) for folder in a_class]
    (a_class[3] / FILE).write_text(right(ONE))  # Dan's is Ada's now, to the last byte
    pool = AtOnce()
    found = list(grading.grades(pool, grading.Store(None), students, [ONE, find("04.2")]))
    assert len(found) == 8 and len(pool.calls) == 6
    names = [student.name for student, report in found if report.exercise == "04.2"]
    assert sorted(names) == ["ada", "ben", "cleo", "dan"]


@pytest.mark.thorough
def test_control_c_leaves_tables_of_what_was_checked(a_class, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "4")  # the check that runs then comes to its end
    table = tmp_path / "marks.csv"
    command = [sys.executable, "-m", "minikv", "grade", *map(str, a_class), "--jobs", "1"]
    command += ["--csv", str(table), "--resume", str(tmp_path / "kept")]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell lets what it starts in the background ignore Control-C, and so all below it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip

    def has_begun():
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(tmp_path / "kept")) as database,
        ):
            # When the second is kept, the first is in the tables.
            return database.execute("SELECT count(*) FROM reports").fetchone()[0] > 1

    until(has_begun, 2 * PATIENCE)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130 and "Traceback" not in said, said
    assert list(csv.DictReader(table.open())), "what was checked so far is told"


# ── Solutions that are alike ──────────────────────────────────────────────────


def made_up(seed):
    """Some function, and each seed's another."""
    draw = random.Random(seed)
    lines = ["", "def helper(total, rest):"]
    for _ in range(30):
        left, right = draw.choice(["total", "rest", "1", "len(rest)"]), draw.choice("+-*/%")
        lines.append(draw.choice([
            f"    total = {left} {right} {draw.randrange(9)}",
            f"    while {left} > rest[{draw.randrange(9)}]: rest.append(total {right} 2)",
            f"    if not {left} and rest is not None: return [total, {left}, *rest]",
            f"    for rest in range({left}, {draw.randrange(9)}): total {right}= rest",
        ]))  # fmt: skip
    return "\n".join(lines)


def test_renaming_and_layout_do_not_hide_a_copy():
    text = right(find("04.2"))
    renamed = text.replace("num_tokens", "how_many").replace("block_ids", "places")
    renamed = re.sub(r'""".*?"""', '""" """', renamed, flags=re.S)
    own = fingerprints(text)
    assert len(own & fingerprints(renamed)) > 0.9 * len(own)


def test_a_copy_among_solutions_of_ones_own_is_found():
    texts = {f"student {i}": made_up(i) for i in range(12)}
    texts["copy"] = texts["student 3"].replace("total", "summe") + "\n# mine\n"
    given = skeleton(ONE.chapter)
    [(share, *pair)] = pairs_alike({k: given + v for k, v in texts.items()}, (given,))
    assert sorted(pair) == ["copy", "student 3"] and share > 0.9


CHEATS = (
    "import minikv.blocks as answers",
    "from minikv.course.reports import report",
    "import gc",
    "import os",
    "MARK = eval('1')",
    "BASE = blocks.BlockTable.__mro__",
    "FREE = open('/proc/self/fd/5')",
)


def test_lines_that_reach_for_more_are_named(tmp_path):
    student = find_student(_student(tmp_path, right(ONE) + "\n" + "\n".join(CHEATS)))
    named = tables.to_be_read(student, ONE)
    assert [line.partition(": ")[2] for line in named] == list(CHEATS)


@pytest.mark.thorough
def test_a_long_file_does_not_hold_up_the_tables(tmp_path):
    line = "x = x\n"
    long = find_student(_student(tmp_path / "long", line * 50_000 + "import gc\n"))
    too_long = find_student(_student(tmp_path / "too long", line * 200_000))
    # If the time grew by the square of its length, these would not end.
    assert tables.to_be_read(long, ONE) == ["line 50001: import gc"]
    assert tables.to_be_read(too_long, ONE) == []


@pytest.mark.parametrize("exercise", thorough_after(20, EXERCISES), ids=lambda one: one.id)
def test_honest_solutions_are_not_named(tmp_path, exercise):
    for number, text in enumerate((right(exercise), different(exercise))):
        folder = tmp_path / str(number)
        student = find_student(_student(folder, text, exercise))
        assert tables.to_be_read(student, exercise) == []


def _student(folder, text, exercise=ONE):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / exercise.chapter.file_name).write_text(text)
    return folder


# ── Names and links ───────────────────────────────────────────────────────────


def test_a_link_hands_in_nothing(tmp_path):
    """Of a file, of the folder, and of the folder of exercises."""
    _student(tmp_path / "alice" / "exercises", right(ONE))
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / FILE).symlink_to(tmp_path / "alice" / "exercises" / FILE)
    (tmp_path / "folder").symlink_to(tmp_path / "alice" / "exercises")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "exercises").symlink_to(tmp_path / "alice" / "exercises")
    for name in ("file", "folder", "inner"):
        student = find_student(tmp_path / name)
        report = grading.grade(student, ONE)
        assert report.status == "failed" and "link" in report.place, name
        assert tables.to_be_read(student, ONE) == []


def test_tables_hold_any_name_and_message(tmp_path):
    name = "=HYPERLINK('x')\x1b[1A\x07\u2028"
    student = find_student(_student(tmp_path / name, right(ONE) + "\nopen('\x1b[2K')\n"))
    line = Line("a line", False, "=1+1\x1b[2K")
    results = [(student, Result(ONE.id, "failed", 1, lines=[line]))]
    [suite] = ElementTree.fromstring(tables.as_junit(results))
    assert suite.get("name").startswith("=HYPERLINK") and "\\x1b" in suite.get("name")
    for text in (tables.as_csv(results), tables.for_moodle(results), tables.for_canvas(results)):
        cells = [cell for row in csv.reader(text.splitlines()) for cell in row]
        assert not [cell for cell in cells if cell.startswith("=")] and "'=HYPER" in text
    said = tables.as_text(results)
    assert "\x1b" not in said and "\\x1b[2K" in said


@pytest.mark.thorough
def test_a_folder_with_names_of_pythons_harms_nothing(tmp_path):
    """A hand-in that we are in: nothing of it is imported where it is graded."""
    folder = _student(tmp_path, right(ONE))
    ran = tmp_path / "ran"
    for name in ("random", "token", "numpy", "json", "queue", "tokenize", "tempfile", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit({name!r})")
    done = grade(".", "--jobs", "1", cwd=folder)
    assert done.returncode == 0 and done.stdout.count("✓") == 1, done
    assert not ran.exists()
