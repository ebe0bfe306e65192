"""What a reader does with the exercises, in a notebook and in a terminal."""

import builtins
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from four_ways import EXERCISES, different, right

from minikv.course import lab
from minikv.course.harness import predictions, progress_file
from minikv.course.harness.diff import SideBySide
from minikv.course.harness.manifest import chapter_of, chapters, find
from minikv.course.harness.skeletons import skeleton, targets

ONE = find("04.1")
FILE = chapter_of(ONE.id).file_name
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def exercises(tmp_path, monkeypatch):
    folder = tmp_path / "exercises"
    folder.mkdir()
    monkeypatch.setenv("MINIKV_EXERCISES", str(folder))
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "60")
    (folder / FILE).write_text(skeleton(chapter_of(ONE.id)))
    return folder


# ── The skeletons in the repository ───────────────────────────────────────────


@pytest.mark.parametrize("chapter", chapters().values(), ids=lambda chapter: chapter.number)
def test_the_skeleton_is_what_the_reference_makes_of_it(chapter):
    file = ROOT / "exercises" / chapter.file_name
    assert file.read_text() == skeleton(chapter), (
        "make it again: python -m minikv.course.harness.skeletons"
    )


def test_there_is_no_other_file_of_exercises():
    found = {file.name for file in (ROOT / "exercises").glob("ch*.py")}
    assert found == {chapter.file_name for chapter in chapters().values()}


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_every_exercise_has_its_texts(exercise):
    assert len(exercise.matters) > 20 and "\n" not in exercise.matters
    assert 5 <= exercise.minutes <= 40
    assert len(exercise.works.strip()) > 200
    assert len(set(exercise.hints)) == 3
    assert any(
        target.exercise == exercise.id for target in targets(chapter_of(exercise.id)).values()
    )


# ── Hints and solutions ───────────────────────────────────────────────────────


def test_hints_come_one_after_the_other():
    titles = [lab.hint("04.1").title for _ in range(4)]
    assert [title[-6:] for title in titles] == ["1 of 3", "2 of 3", "3 of 3", "3 of 3"]
    assert lab.hint("04.1", 1).title.endswith("1 of 3")
    with pytest.raises(ValueError, match="number: must be 1, 2 or 3, was 4"):
        lab.hint("04.1", 4)


@pytest.mark.parametrize("name", ["04.99", "99.1", "4", "pool", ""])
def test_an_unknown_exercise_gets_the_ones_there_are(name):
    with pytest.raises(ValueError, match=r"04\.1|chapters 01"):
        find(name)


def test_ids_may_lack_their_zero():
    assert find("4.1") is find("04.1")


def test_nothing_is_given_away_before_it_is_passed():
    for shown in (lab.diff("04.1"), lab.why("04.1")):
        assert 'pass check("04.1") first' in repr(shown)
    assert "self._free" not in repr(lab.solution("04.1", sure=False))


def test_the_solution_asks_once(monkeypatch):
    asked = []

    def answer(question):
        asked.append(question)
        return answers.pop(0)

    answers = ["", "y"]
    monkeypatch.setattr(builtins, "input", answer)
    assert "Not shown" in repr(lab.solution("04.1"))
    for _ in range(2):
        assert "def allocate(self)" in repr(lab.solution("04.1"))
    assert len(asked) == 2
    assert progress_file.entry("04.1").seen_solution


def test_where_nobody_can_answer_the_solution_is_not_shown(monkeypatch):
    def nobody(question):
        raise EOFError

    monkeypatch.setattr(builtins, "input", nobody)
    assert "sure=True" in repr(lab.solution("04.1"))


def test_after_passing_everything_opens(exercises):
    (exercises / FILE).write_text(right(ONE))
    report = lab.check("04.1")
    assert report.passed
    assert "Why it works" in report._repr_html_() and "04.2" in report.next_steps()
    assert "why it works" in repr(lab.why("04.1"))
    assert all(region.equal for region in lab.diff("04.1").regions)
    again = lab.check("04.1")
    assert again.tries == 1, "a second pass is no second try"


def test_side_by_side_shows_the_filled_regions_alone(exercises):
    (exercises / FILE).write_text(different(ONE))
    shown = SideBySide(ONE)
    assert [region.path for region in shown.regions] == ["BlockPool.allocate", "BlockPool.release"]
    assert not all(region.equal for region in shown.regions)
    for region in shown.regions:
        mine = [left for left, _ in region.rows if left is not None]
        assert "\n".join(mine).strip() and '"""' not in "".join(mine)
        assert any(right for _, right in region.rows)
    assert "def grow" not in repr(shown) + shown._repr_html_()


def test_trying_counts(exercises):
    text = right(ONE)
    for body in ("return -1", "return -2"):
        lines = text.replace("block_id = self._free.pop()", body)
        (exercises / FILE).write_text(lines)
        assert not lab.check("04.1").passed
    (exercises / FILE).write_text(text)
    assert "your 3rd try" in lab.check("04.1").headline()
    assert "1 of" in repr(lab.progress()) and "passed" in lab.progress()._repr_html_()


# ── Watching ──────────────────────────────────────────────────────────────────


def test_watching_checks_at_every_save_until_it_passes(exercises):
    seen = []

    def save(text):
        (exercises / FILE).write_text(text)

    def show(report):
        seen.append(report.status)
        if len(seen) == 1:
            threading.Timer(0.3, save, [right(ONE).replace("self._free.pop()", "0")]).start()
        elif len(seen) == 2:
            threading.Timer(0.3, save, [right(ONE)]).start()

    lab.watch("04.1", show=show, every=0.05)
    assert seen == ["not started", "failed", "passed"]


def test_watching_ends_when_interrupted():
    def show(report):
        raise KeyboardInterrupt

    lab.watch("04", show=show)


# ── In a terminal ─────────────────────────────────────────────────────────────


def run(*arguments, **options):
    command = [sys.executable, "-m", "minikv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_the_exit_status_is_zero_only_on_a_pass(exercises):
    done = run("check", "04.1")
    assert done.returncode == 1 and "not started" in done.stdout
    assert "python -m minikv hint 04.1" in done.stdout and "\033" not in done.stdout
    (exercises / FILE).write_text(right(ONE))
    assert run("check", "04.1").returncode == 0
    assert run("check", "04").returncode == 1
    for wrong in (["check", "04.77"], ["hint", "04.1", "9"]):
        done = run(*wrong)
        assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr


def test_colours_only_on_a_terminal():
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    command = [sys.executable, "-m", "minikv", "check", "04.1"]
    done = subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL, env=environment)
    done.wait()
    time.sleep(0.1)
    shown = os.read(ours, 10_000).decode()
    os.close(ours), os.close(theirs)
    assert "\033[34mnot started\033[0m" in shown


def test_the_solution_in_a_terminal():
    done = run("solution", "04.1", input="n\n")
    assert "Show the solution of 04.1" in done.stdout and "def allocate" not in done.stdout
    assert "python -m minikv solution 04.1 --yes" in done.stdout
    assert "def allocate" in run("solution", "04.1", "--yes").stdout


def test_every_command_explains_itself():
    done = run("--help")
    for name in ("check", "hint", "diff", "solution", "progress", "reset", "watch", "update"):
        assert re.search(rf"^    {name} ", done.stdout, re.MULTILINE)


# ── Predictions ───────────────────────────────────────────────────────────────


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(predictions, "_made", {})


def test_a_prediction_stands_beside_what_came_out(fresh):
    assert "no prediction yet" in repr(lab.predict("blocks", ...))
    assert repr(lab.measured("blocks", 13)) == "blocks: 13, no prediction"
    lab.predict("blocks", 26)
    assert repr(lab.measured("blocks", 13)) == "blocks: 13, you said 26 (2.0 × too many)"
    lab.predict("ratio", 1.5)
    assert "exactly" in repr(lab.measured("ratio", 1.5))
    text = repr(lab.predictions())
    assert "blocks" in text and "26" in text and "13" in text
    assert "<table>" in lab.predictions()._repr_html_()


@pytest.mark.parametrize("guess", ["ten", True, float("nan"), [1]])
def test_a_prediction_is_a_number(fresh, guess):
    with pytest.raises(ValueError, match="guess: must be a number"):
        lab.predict("blocks", guess)


def test_what_was_not_predicted_is_shown_without_a_prediction(fresh):
    assert repr(lab.measured("slots", 1)) == "slots: 1, no prediction"
