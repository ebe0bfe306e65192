"""What is kept of a try: how many there were, how long they took, and which code passed."""

import pytest

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import find
from minikv.course.exercise_data.skeletons import skeleton, solved
from minikv.course.reader import progress_file
from minikv.course.reports.report import Report

ONE = find("04.3")
CHAPTER = ONE.chapter
RIGHT, OTHER = solved(CHAPTER), solved(CHAPTER).replace("+ offset", "- offset")


@pytest.fixture
def file(exercises):
    return exercises / CHAPTER.file_name


def tried(file, text, status, monkeypatch, at, alone=True):
    """The report of a try with this text, `at` minutes after the first."""
    file.write_text(text)
    monkeypatch.setattr(progress_file.time, "time", lambda: 1000.0 + 60 * at)
    report = Report(
        ONE.id, status, 1, fingerprint=reader_files.parsed(CHAPTER, text).fingerprint(ONE)
    )
    progress_file.note(report, alone)
    return report


def test_the_clock_stops_when_it_passes(file, monkeypatch):
    assert OTHER != RIGHT
    assert tried(file, OTHER, "failed", monkeypatch, at=0).tries == 1
    report = tried(file, RIGHT, "passed", monkeypatch, at=7)
    assert (report.tries, report.minutes) == (2, 7)
    for later, text, status in ((30, OTHER, "failed"), (60, RIGHT, "passed")):
        report = tried(file, text, status, monkeypatch, at=later)
        assert (report.tries, report.minutes) == (2, 7)


def test_the_version_is_that_of_the_first_pass(file, monkeypatch):
    for at, version in enumerate(("1.0", "2.0")):
        monkeypatch.setattr(progress_file.minikv, "__version__", version)
        tried(file, RIGHT, "passed", monkeypatch, at)
    assert progress_file.entry(ONE.id).version == "1.0"


def test_a_later_experiment_does_not_undo_a_pass(file, monkeypatch):
    tried(file, RIGHT, "passed", monkeypatch, at=0)
    tried(file, OTHER, "failed", monkeypatch, at=1)
    assert progress_file.changed() == {ONE.id} and progress_file.passed() == set()
    file.write_text(RIGHT)
    assert progress_file.passed() == {ONE.id} and progress_file.changed() == set()
    file.unlink()
    assert progress_file.changed() == {ONE.id}


def test_what_passed_last_counts(file, monkeypatch):
    tried(file, RIGHT, "passed", monkeypatch, at=0)
    tried(file, OTHER, "passed", monkeypatch, at=1)
    assert progress_file.passed() == {ONE.id}
    file.write_text(RIGHT)
    assert progress_file.changed() == {ONE.id}


def test_the_code_that_passed_and_fails_now_has_not_passed(file, monkeypatch):
    tried(file, RIGHT, "passed", monkeypatch, at=0)
    tried(file, RIGHT, "failed", monkeypatch, at=1, alone=False)  # on other parts of the reader's
    assert progress_file.passed() == {ONE.id}
    tried(file, RIGHT, "failed", monkeypatch, at=2)
    assert progress_file.passed() == progress_file.changed() == set()


def test_the_words_around_the_code_do_not_matter(file, monkeypatch):
    tried(file, RIGHT, "passed", monkeypatch, at=0)
    node = RIGHT[RIGHT.index("def slot_mapping") :]
    docstring = node.split('"""')[1]
    file.write_text("# A remark.\n" + RIGHT.replace(docstring, "Other words."))
    assert progress_file.passed() == {ONE.id}
    file.write_text(skeleton(CHAPTER))
    assert progress_file.changed() == {ONE.id}


def test_progress_of_an_earlier_release_is_believed_until_it_fails(file, monkeypatch):
    file.write_text(OTHER)
    progress_file.save(ONE.id, progress_file.Entry(tries=1, first=1.0, passed=2.0))
    assert progress_file.passed() == {ONE.id}
    tried(file, OTHER, "failed", monkeypatch, at=1)
    assert progress_file.passed() == progress_file.changed() == set()
