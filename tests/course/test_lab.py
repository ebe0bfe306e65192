"""What a reader does with the exercises, in a notebook and in a terminal."""

import builtins
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from four_ways import EXERCISES, different, reference_sources, right
from IPython.core.interactiveshell import InteractiveShell
from thorough import thorough_after

from minikv.course import commands, lab, terminal
from minikv.course.exercise_data.manifest import chapter_of, chapters, find
from minikv.course.exercise_data.skeletons import fill, skeleton, targets
from minikv.course.judge.result import Line
from minikv.course.reader import panel, predictions, progress_file
from minikv.course.reader.mine import used_below
from minikv.course.reports.diff import SideBySide
from minikv.course.reports.markup import GREEN, VERMILION, hours
from minikv.course.reports.report import Report

ONE = find("04.1")
FILE = ONE.chapter.file_name
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def begun(exercises, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    (exercises / FILE).write_text(skeleton(ONE.chapter))


# ── The skeletons in the repository ───────────────────────────────────────────


@pytest.mark.parametrize("chapter", chapters().values(), ids=lambda chapter: chapter.number)
def test_the_skeleton_is_what_the_reference_makes_of_it(chapter):
    file = ROOT / "exercises" / chapter.file_name
    assert file.read_text() == skeleton(chapter), (
        "make it again: python -m minikv.course skeletons (if it is your own solution: "
        "this test is for a checkout in which no exercise was begun)"
    )


def test_there_is_no_other_file_of_exercises():
    found = {file.name for file in (ROOT / "exercises").glob("ch*.py")}
    assert found == {chapter.file_name for chapter in chapters().values()}


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_every_exercise_has_its_texts(exercise):
    assert 5 <= exercise.minutes <= 60
    assert len(exercise.works.strip()) > 200
    assert len(set(exercise.hints)) == 3
    assert any(target.exercise == exercise.id for target in targets(exercise.chapter).values())


# ── Hints and solutions ───────────────────────────────────────────────────────


def test_hints_come_one_after_the_other():
    titles = [lab.hint("04.1").title for _ in range(4)]
    assert [title[-6:] for title in titles] == ["1 of 3", "2 of 3", "3 of 3", "3 of 3"]
    assert lab.hint("04.1", 1).title.endswith("1 of 3")
    with pytest.raises(ValueError, match="number: must be 1, 2 or 3, was 4"):
        lab.hint("04.1", 4)


@pytest.mark.parametrize("name", ["04.99", "99.1", "4", "pool", ""])
def test_an_unknown_exercise_gets_the_ones_there_are(name):
    with pytest.raises(ValueError, match=r"04\.1|chapters 00"):
        find(name)


def test_ids_may_lack_their_zero():
    assert find("4.1") is find("04.1")


def test_nothing_is_given_away_before_it_is_passed():
    for shown in (lab.diff("04.1"), lab.why("04.1")):
        assert 'opens once check("04.1") passes' in repr(shown)
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


@pytest.mark.thorough
def test_after_passing_everything_opens(exercises):
    (exercises / FILE).write_text(right(ONE))
    report = lab.check("04.1")
    assert report.passed
    html = report._repr_html_()
    assert "Why it works" in html and "why(" not in html and "Next: 04.2" in html
    assert 'why("04.1")' in repr(report) and "04.2 A table that grows, 15 min" in repr(report)
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


@pytest.mark.thorough
def test_trying_counts(exercises, now):
    text = right(ONE)
    for body in ("return -1", "return -2"):
        lines = text.replace("block_id = self._free.pop()", body)
        (exercises / FILE).write_text(lines)
        assert not lab.check("04.1").passed
    (exercises / FILE).write_text(text)
    report = lab.check("04.1")
    assert report.headline().startswith("passed: all 8 checks, ")
    assert "your 3rd try, 1 min" in report.headline()
    entry = progress_file.entry("04.1")
    entry.first -= 1200
    entry.passed -= 600  # ten minutes after the first try, and ten minutes ago
    progress_file.save("04.1", entry)
    assert "your 3rd try, 10 min" in lab.check("04.1").headline()


def test_the_same_code_again_is_no_second_try(exercises):
    def tries(text):
        (exercises / FILE).write_text(text)
        return lab.check("04.1").tries

    assert [tries(BROKEN), tries(BROKEN)] == [1, 1]
    assert tries(BROKEN.replace("block_id = -1", "block_id  =  -1  # why?")) == 1
    assert tries(BROKEN.replace("block_id = -1", "block_id = -2")) == 2
    assert tries("def broken(") == 3
    assert lab.check("04.1").tries == 3
    assert tries(BROKEN) == 4


@pytest.mark.thorough
def test_code_that_does_not_come_to_its_end_is_tried_once(exercises, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "1")
    endless = BROKEN.replace("block_id = -1", "while True: pass")
    (exercises / FILE).write_text(endless)
    assert [lab.check("04.1").tries for _ in range(2)] == [1, 1]


# ── What a report looks like ──────────────────────────────────────────────────


BROKEN = right(ONE).replace("block_id = self._free.pop()", "block_id = -1")


def test_the_first_failure_is_open_and_the_others_are_folded(exercises):
    (exercises / FILE).write_text(BROKEN)
    report = lab.check("04.1")
    html = report._repr_html_()
    failures = [line for line in report.lines if not line.ok]
    assert len(failures) > 2 and html.count("<details open>") == 1
    assert html.index("<details open>") < html.index(failures[0].name) < html.index("<details>")
    assert html.count("✗ FAIL") == len(failures) and "white-space:nowrap" in html
    passing = report.total - len(failures)
    assert f"{passing} of {report.total} checks pass" in html
    assert "<table" not in html
    assert f"{passing} of {report.total} checks pass" in repr(report)
    (exercises / FILE).write_text(right(ONE))
    passed = lab.check("04.1")._repr_html_()
    assert "✓ passed" in passed and GREEN in passed
    assert VERMILION in html and VERMILION not in passed


def test_a_cause_is_called_the_same_only_where_it_is_known():
    lines = [
        Line("a", False, "1, expected 2", "never copies", "the count"),
        Line("b", False, "3, expected 4", "never copies", "the count"),
        Line("c", False, "5, expected 6", None, "the count"),
        Line("d", True),
    ]
    report = Report("04.1", "failed", 4, lines)
    names = [row.name for row in report.rows()]
    assert names == ["a", "b  (same cause)", "c", "d"]
    assert [label for label, _ in report.rows()[2].details] == [""], "the same look is told once"
    assert "Fix the first" in repr(report) and "1 of 4 checks pass" in repr(report)
    assert "Fix the first" not in repr(Report("04.1", "failed", 4, [*lines[:2], lines[3]]))


def test_long_messages_are_cut():
    report = Report("04.1", "failed", 1, [Line("a", False, "x" * 5000)])
    assert len(repr(report)) < 1000 and len(report._repr_html_()) < 2000


def test_a_stored_report_is_the_same_on_every_day(exercises):
    first = lab.check("04.1")
    os.utime(exercises / FILE, (1, 1))
    second = lab.check("04.1")
    assert repr(first) == repr(second) and first._repr_html_() == second._repr_html_()
    assert "Ctrl+S in the editor saves" in repr(first) and "ago" not in repr(first)


@pytest.fixture
def now(monkeypatch):
    """The time, which stands still."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    return now


def test_a_report_says_which_version_was_checked(exercises, now):
    (exercises / FILE).write_text(BROKEN)
    os.utime(exercises / FILE, (now - 725,) * 2)
    report = lab.check("04.1")
    assert f"exercises/{FILE}, as saved 12 minutes ago (Ctrl+S in the editor saves)" in repr(report)
    again = lab.check("04.1")
    assert "Nothing has been saved since your last check" in repr(again)
    assert "<b>Nothing has been saved" in again._repr_html_()
    os.utime(exercises / FILE, (now, now))
    assert "as saved just now" in repr(lab.check("04.1"))


def test_places_in_the_file_are_links(exercises, monkeypatch):
    monkeypatch.chdir(exercises.parent)
    html = lab.check("04.1")._repr_html_()
    lines = re.findall(rf'<a href="exercises/{FILE}#line=(\d+)">', html)
    text = (exercises / FILE).read_text().splitlines()
    assert lines and all("NotImplementedError" in text[int(line)] for line in lines)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: lab.check("99.1"),
        lambda: lab.hint("04.1", 7),
        lambda: lab.predict("blocks", "many"),
        lambda: SideBySide(ONE),
    ],
)
def test_what_a_reader_mistypes_is_answered_in_a_sentence(mistake, exercises):
    (exercises / FILE).write_text("def (")
    with pytest.raises(ValueError) as raised:
        mistake()
    shown = []
    shell = InteractiveShell.instance()
    try:
        shell._showtraceback = lambda kind, error, lines: shown.extend(lines)
        shell.showtraceback((raised.type, raised.value, raised.tb))
    finally:
        InteractiveShell.clear_instance()  # or pictures of later tests are shown as in a notebook
    assert shown == [str(raised.value)]


# ── The panel in JupyterLab ───────────────────────────────────────────────────


@pytest.fixture
def in_lab(exercises, tmp_path, monkeypatch):
    """As if JupyterLab had started this process; what it is given to show."""
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "notebooks" / "04.ipynb"))
    monkeypatch.setenv("JPY_PARENT_PID", "7")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "jpserver-7.json").write_text(json.dumps({"root_dir": str(tmp_path)}))
    shown = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))
    monkeypatch.setattr(panel, "display", lambda data, **_: shown.append(data) or handle)
    monkeypatch.setattr(panel, "_open", {})
    return shown


@pytest.fixture
def buttons(in_lab):
    """`buttons(id)`: check it, and return what is shown as HTML, and a way to click."""

    def show(exercise_id):
        lab.check(exercise_id)._ipython_display_()
        data, box = in_lab[-2:]
        row, page = box.children

        def click(name):
            [button] = [b for b in row.children if b.description.partition(":")[0] == name]
            button.click()
            return page.value

        return data["text/html"], click

    return show


def test_without_jupyterlab_there_are_no_buttons(exercises):
    report = lab.check("04.1")
    assert report.panel is None and "<button" not in report._repr_html_()
    with pytest.raises(NotImplementedError):
        report._ipython_display_()


def commands_in(html):
    """What JupyterLab would do at a click, and of this what opens a file."""
    found = [json.loads(unescape(text)) for text in re.findall(r'linker-args="([^"]+)"', html)]
    return found, [c["args"] for c in found if c["commands"][0] == "docmanager:open"]


def line_that_opens(html, exercises):
    """The text of the line that the button "Open the file beside" goes to."""
    line = int(commands_in(html)[1][-1]["id"].removeprefix("#line="))
    return (exercises / FILE).read_text().splitlines()[line]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "release",
    [
        "raise NotImplementedError('Exercise 04.1: BlockPool.release')",
        "return 1 / 0",
        "return",  # a known mistake
        "while True: pass",
    ],
)
def test_the_panel_opens_the_function_that_failed(buttons, exercises, monkeypatch, release):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "3")
    sources = reference_sources(ONE)
    sources["BlockPool.release"] = f"def release(self, block_id):\n    {release}"
    (exercises / FILE).write_text(fill(skeleton(ONE.chapter), sources))
    html, _ = buttons("04.1")
    assert "def release" in line_that_opens(html, exercises)


def test_the_first_failure_is_what_opens(buttons, exercises):
    sources = reference_sources(ONE)
    sources["BlockPool.allocate"] = "def allocate(self):\n    return 1 / 0"
    sources["BlockPool.release"] = "def release(self, block_id):\n    return"
    (exercises / FILE).write_text(fill(skeleton(ONE.chapter), sources))
    html, _ = buttons("04.1")
    assert "def allocate" in line_that_opens(html, exercises)


def test_the_panel_opens_the_file_beside_at_the_line_and_checks_again(buttons, exercises):
    html, _ = buttons("04.1")
    commands, opened = commands_in(html)
    for arguments in opened:
        assert arguments["path"] == f"exercises/{FILE}"
        assert arguments["options"] == {"mode": "split-right"}
    assert "def allocate" in line_that_opens(html, exercises)
    assert ["notebook:run-cell"] in [c["commands"] for c in commands]
    assert "hint(" not in html and "was saved" in html


def test_the_panel_gives_hints_and_keeps_them_open(buttons):
    _, click = buttons("04.1")
    assert "hint 1 of 3" in click("Hint 1") and "hint 3 of 3" in click("Hint 3")
    assert progress_file.entry("04.1").hints == 3
    _, click = buttons("04.1")
    assert click("Hint 3") == "", "it was open, so a click folds it"
    assert "opens once" in click("Why") and "opens once" in click("Diff")


def test_the_panel_asks_before_it_gives_away_or_puts_back(buttons, exercises):
    (exercises / FILE).write_text(BROKEN)
    _, click = buttons("04.1")
    assert "Click again to see it." in click("Solution") and "def allocate" not in click("Hint 1")
    assert "Click again" in click("Solution"), "another button in between takes it back"
    assert "def allocate" in click("Solution")
    assert "Click again to do it." in click("Reset")
    assert (exercises / FILE).read_text() == BROKEN
    assert "is kept in" in click("Reset")
    assert (exercises / FILE).read_text() == skeleton(ONE.chapter)
    [copy] = (exercises / ".progress" / "backups").iterdir()
    assert copy.read_text() == BROKEN


def test_after_a_reset_the_file_can_still_be_checked_and_opened(buttons, in_lab, exercises):
    (exercises / FILE).write_text("# a line more\n" + BROKEN)
    _, click = buttons("04.1")
    click("Reset")
    click("Reset")
    html = in_lab[-1]["text/html"]
    assert "was reset" in html and ">Check<" in html
    assert "def allocate" in line_that_opens(html, exercises)


def test_the_panel_opens_the_line_that_python_cannot_read(buttons, exercises):
    (exercises / FILE).write_text(right(ONE).replace("def release(", "def release((", 1))
    html, _ = buttons("04.1")
    assert "def release((" in line_that_opens(html, exercises)


@pytest.mark.parametrize(
    "cell, expected",
    [
        ('a, b = mine("04.2", "04.1")', True),
        ("engine = own_engine(lm)", True),
        ('mine("04.11")', False),
        ("your_parts()", False),
    ],
)
def test_which_cells_run_on_an_exercise_is_read_from_the_notebook(in_lab, tmp_path, cell, expected):
    write_notebook(tmp_path, 'mine("04.1")', 'check("04.1")', cell)
    assert used_below("04.1") == expected


@pytest.mark.thorough
def test_a_pass_says_once_that_the_cells_below_run_on_it(in_lab, exercises, tmp_path):
    write_notebook(tmp_path, 'check("04.1")', 'mine("04.1")')
    said = "Run the cells below again"
    assert said not in lab.check("04.1").html()
    (exercises / FILE).write_text(right(ONE))
    assert said in lab.check("04.1").html()
    assert said not in lab.check("04.1").html(), "nothing has changed since"


def write_notebook(folder, *code):
    """The notebook that is open in `in_lab`."""
    (folder / "notebooks").mkdir()
    cells = [{"cell_type": "code", "source": [text]} for text in code]
    (folder / "notebooks" / "04.ipynb").write_text(json.dumps({"cells": cells}))


def test_code_on_a_page_is_not_broken_inside_words(exercises):
    (exercises / FILE).write_text(different(ONE))
    for page in (SideBySide(ONE), lab.hint("04.1", 3)):
        html = page._repr_html_()
        assert html.count("<pre") == html.count("word-break:normal;overflow-wrap:normal")


@pytest.mark.thorough
def test_the_panel_tells_what_cannot_be_shown(buttons, exercises):
    (exercises / FILE).write_text(right(ONE))
    _, click = buttons("04.1")
    (exercises / FILE).unlink()
    assert "is missing" in click("Diff")


# ── Side by side ──────────────────────────────────────────────────────────────


def test_side_by_side_fits_the_terminal(exercises, monkeypatch):
    (exercises / FILE).write_text(different(ONE))
    monkeypatch.setenv("COLUMNS", "200")
    wide = repr(SideBySide(ONE)).splitlines()
    monkeypatch.setenv("COLUMNS", "125")
    broken = repr(SideBySide(ONE)).splitlines()
    assert max(map(len, broken)) <= 125 < max(map(len, wide))
    monkeypatch.setenv("COLUMNS", "80")
    narrow = repr(SideBySide(ONE)).splitlines()
    assert all(any(" | " in line for line in one) for one in (wide, broken))
    assert len(narrow) > len(wide)
    assert max(map(len, narrow)) < max(map(len, wide)) and "  ── the reference" in narrow
    assert "minmax(" in SideBySide(ONE)._repr_html_()


@pytest.mark.thorough
def test_after_a_reset_there_is_nothing_to_compare(exercises):
    (exercises / FILE).write_text(right(ONE))
    lab.check("04.1")
    lab.reset("04.1")
    assert "nothing of yours" in repr(lab.diff("04.1"))


# ── Progress ──────────────────────────────────────────────────────────────────


def note(id_, **changed):
    progress_file.save(id_, progress_file.Entry(**changed))


def test_the_next_exercise_is_in_the_chapter_that_was_worked_on_last():
    before, here, after = (chapter_of(number).exercises for number in ("02", "04", "05"))
    first, second, *others = (exercise.id for exercise in here)
    assert progress_file.to_do_next().id == next(iter(chapters().values())).exercises[0].id
    note(second, tries=1, first=1.0, passed=5.0, solved=True, last=5.0)
    note(before[0].id, tries=1, first=1.0, last=3.0)
    assert progress_file.to_do_next().id == others[0]
    for id_ in others:
        note(id_, passed=4.0, last=4.0)
    assert progress_file.to_do_next().id == first
    note(first, passed=4.0, last=4.0)
    assert progress_file.to_do_next() == after[0]


def test_progress_tells_the_same_in_both_forms():
    chapter = chapter_of("04")
    passed, tried, *others = chapter.exercises
    note(passed.id, tries=3, passed=5.0, last=5.0)
    note(tried.id, tries=2, last=4.0)
    shown = lab.progress()
    text, html = repr(shown), shown._repr_html_()
    minutes = hours(sum(exercise.minutes for exercise in chapter.exercises))
    for said in (
        f"1 of {len(chapter.exercises)} exercises passed, {hours(passed.minutes)} of {minutes}",
        f"Next: {tried.id} {tried.title}, {hours(tried.minutes)}", "tried 2 ×",
        "04 Paged blocks", "02 KV cache",
    ):  # fmt: skip
        assert said in text and said in html
    assert others[0].id in text and "05.1" not in text, "a chapter that was not begun is one line"
    assert "05.1" in html and html.count("<details open>") == 1 and "<th scope='col'" in html
    assert '<a href="04_paged_blocks.ipynb">' in html


@pytest.fixture
def greenwich(monkeypatch):
    """No moment is the same day in all time zones."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_progress_can_be_kept_as_a_page(tmp_path, greenwich):
    noon = 10.5 * 86_400.0
    note("04.1", tries=3, passed=noon, hints=2, version="0.0.7")
    file = tmp_path / "mine.html"
    assert str(file) in repr(lab.progress(export=str(file), name="Ada <Lovelace>"))
    page = file.read_text()
    assert "by Ada &lt;Lovelace&gt;" in page and "04.1 A pool of blocks" in page
    assert "2 hints" in page and "11 January 1970" in page and "<td>0.0.7</td>" in page
    assert "src=" not in page
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        lab.progress(export=str(tmp_path / "nowhere" / "mine.html"))


# ── Watching ──────────────────────────────────────────────────────────────────


def test_watching_checks_at_every_save_until_it_passes(exercises):
    seen = []

    def save(text):
        """Whole: a file that is half written would be checked, too."""
        (exercises / "new").write_text(text)
        (exercises / "new").replace(exercises / FILE)

    def show(report):
        seen.append(report.status)
        if len(seen) == 1:
            threading.Timer(0.3, save, [right(ONE).replace("self._free.pop()", "0")]).start()
        elif len(seen) == 2:
            threading.Timer(0.3, save, [right(ONE)]).start()

    lab.watch("04.1", show=show, every=0.05)
    assert seen == ["not started", "failed", "passed"]


def test_watching_in_a_terminal_says_when(capsys):
    terminal._show_with_time(lab.check("04.1"))
    assert re.search(r"^── \d\d:\d\d:\d\d ─", capsys.readouterr().out, re.MULTILINE)


def test_watching_ends_when_interrupted():
    def show(report):
        raise KeyboardInterrupt

    lab.watch("04", show=show)


# ── In a terminal ─────────────────────────────────────────────────────────────


def run(*arguments, **options):
    command = [sys.executable, "-m", "minikv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.thorough
def test_the_exit_status_is_zero_only_on_a_pass(exercises, capsys):
    done = run("check", "04.1")
    assert done.returncode == 1 and "not started" in done.stdout
    assert "python -m minikv hint 04.1" in done.stdout and "\033" not in done.stdout
    (exercises / FILE).write_text(right(ONE))
    assert commands.main(["check", "04.1"]) == 0
    assert commands.main(["check", "04"]) == 1
    for wrong in (["check", "04.77"], ["hint", "04.1", "9"]):
        capsys.readouterr()
        assert commands.main(wrong) == 2
        assert capsys.readouterr().err


def test_the_exit_status_tells_whether_something_was_shown(exercises, capsys, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda question: "n")

    def status(*arguments):
        return commands.main([*arguments])

    for refused in ("why", "diff", "solution"):
        assert status(refused, "04.1") == 1, refused
        assert "04.1" in capsys.readouterr().out
    for shown in (["hint", "04.1"], ["solution", "04.1", "--yes"], ["why", "04.1"]):
        assert status(*shown) == 0, shown
    assert status("diff", "04.1") == 1, "the solution was seen, and nothing is written"
    assert "nothing of yours" in capsys.readouterr().out
    (exercises / FILE).write_text("def broken(")
    for unreadable in ("diff", "reset"):
        assert status(unreadable, "04.1") == 1
        assert "Python cannot read this" in capsys.readouterr().err
    assert status("reset", "04") == 0


@pytest.mark.thorough
def test_colours_only_on_a_terminal():
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    command = [sys.executable, "-m", "minikv", "check", "04.1"]
    done = subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux's way to say that there is no more
        while piece := os.read(ours, 10_000):
            shown += piece
    done.wait()
    os.close(ours)
    assert "\033[34m○ not started\033[0m" in shown.decode()


def test_hints_are_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for exercise in EXERCISES[::4]:
        for number in (1, 2, 3):
            shown = repr(lab.hint(exercise.id, number)).splitlines()
            assert max(map(len, shown[1:])) <= 80, exercise.id


def test_the_solution_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    commands.main(["solution", "04.1"])
    said = capsys.readouterr().out
    assert "Show the solution of 04.1" in said and "def allocate" not in said
    assert "python -m minikv solution 04.1 --yes" in said
    commands.main(["solution", "04.1", "--yes"])
    assert "def allocate" in capsys.readouterr().out


def test_every_command_explains_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main(["--help"])
    assert not ended.value.code
    said = capsys.readouterr().out
    for name in commands.COMMANDS:
        assert re.search(rf"^  {name} ", said, re.MULTILINE)


# ── Predictions ───────────────────────────────────────────────────────────────


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(predictions, "_made", {})


def test_a_prediction_stands_beside_what_came_out(fresh):
    assert "no prediction yet" in repr(lab.predict("blocks", ...))
    assert repr(lab.measured("blocks", 13)) == "blocks:\n    13, no prediction"
    lab.predict("blocks", 26)
    assert repr(lab.measured("blocks", 13)) == "blocks:\n    13, you said 26 (2 times too high)"
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
    assert repr(lab.measured("slots", 1)) == "slots:\n    1, no prediction"


def test_a_name_that_is_nearly_one_that_was_predicted_is_told(fresh):
    lab.predict("blocks for 8 samples", 3)
    assert 'predicted is "blocks for 8 samples"' in repr(lab.measured("block for 8 samples", 4))


def test_a_prediction_that_no_cell_measures_is_told(fresh, tmp_path, monkeypatch):
    notebook = tmp_path / "one.ipynb"
    cells = [{"cell_type": "code", "source": ['measured("blocks for 8 samples", found)']}]
    notebook.write_text(json.dumps({"cells": cells}))
    assert "measures" not in repr(lab.predict("block for 8 samples", 3))
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebook))
    assert 'Did you mean "blocks for 8 samples"?' in repr(lab.predict("block for 8 samples", 3))
    assert "measures" not in repr(lab.predict("blocks for 8 samples", 3))
    cells[0]["source"].append("\nmeasured(name, found)")
    notebook.write_text(json.dumps({"cells": cells}))
    assert "measures" not in repr(lab.predict("block for 8 samples", 3)), "not all are known"


# ── On a machine that lacks a package ─────────────────────────────────────────


@pytest.mark.parametrize(
    ("number", "package", "solved"),
    thorough_after(
        0, [("08", "Triton", "tl.program_id(0) * TILE"), ("09", "Numba", "max(new_top, scores[t])")]
    ),
)
def test_a_machine_without_a_package_is_told_so(exercises, number, package, solved):
    chapter = chapters()[number]
    (exercises / chapter.file_name).write_text(skeleton(chapter))
    code = (
        f"import sys; sys.modules[{package.lower()!r}] = None\n"
        "from minikv.course import lab\n"
        f"lab.progress(), print(lab.check('{number}.1'), lab.solution('{number}.1', sure=True))\n"
        f"try:\n    import {chapters()['09'].package}.needed\n"
        "except ValueError as error:\n    print('cell:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cannot run" in done.stdout and solved in done.stdout, done.stderr
    assert f"chapter {number} needs {package}" in done.stdout, done.stderr
    assert ("cell: chapter 09 needs Numba" in done.stdout) == (number == "09"), done.stderr
