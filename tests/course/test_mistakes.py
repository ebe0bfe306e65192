"""The one reader of `mistakes.toml`: what it makes of a record, and what it refuses."""

import pytest

from minikv.course.exercises.manifest import chapter_of, find
from minikv.course.exercises.mistakes import (
    mistake_named,
    read,
    reference_sources,
    text_of_mistake,
)
from minikv.course.judge.examine import examine
from minikv.course.reports.report import Report

CHAPTER, EXERCISE = chapter_of("05"), find("05.1")
SHARES = """
[["05.1"]]
name = "shares the list"
cause = "both tables have the same list of block ids"
look = "`=` does not copy a list"
"""
EDIT = 'edit."BlockTable.fork" = ["self.block_ids.copy()", "self.block_ids"]\n'


@pytest.fixture
def file(tmp_path):
    return tmp_path / "mistakes.toml"


def test_an_edit_and_a_whole_definition(file):
    whole = """
[["05.1"]]
name = "returns nothing"
cause = "nothing is returned"
look = "what comes after `return`?"
seen = "an engine"
source."BlockTable.fork" = '''
def fork(self):
    pass
'''
"""
    file.write_text(SHARES + EDIT + whole)
    shares, nothing = read(file, CHAPTER)["05.1"]
    [(path, right)] = reference_sources(EXERCISE).items()
    assert shares.sources == {path: right.replace("self.block_ids.copy()", "self.block_ids")}
    assert shares.cause == "both tables have the same list of block ids"
    assert shares.seen is None
    assert nothing.sources == {path: "def fork(self):\n    pass\n"}
    assert nothing.seen == "an engine"


def test_edits_are_made_one_after_the_other(file):
    file.write_text(SHARES + EDIT[:-2] + r', "= self.block_ids\n", "= []\n"]')
    [mistake] = read(file, CHAPTER)["05.1"]
    [(path, right)] = reference_sources(EXERCISE).items()
    assert mistake.sources == {path: right.replace("self.block_ids.copy()", "[]")}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (SHARES + EDIT.replace("copy()", "deepcopy()"), "is 0 times in the reference"),
        (SHARES + EDIT.replace("self.block_ids.copy()", "self"), "times in the reference"),
        (SHARES + EDIT.replace('"BlockTable.fork"', "BlockTable.fork"), "no BlockTable to edit"),
        (SHARES + EDIT.replace(", ", ', "x", '), "an odd number"),
        (SHARES + 'source."BlockTable.spoon" = ""', "no BlockTable.spoon in the reader's file"),
        (SHARES, "neither edit nor source"),
        (SHARES.replace("look", "lok") + EDIT, "it has no look"),
        (SHARES + "hint = 'x'\n" + EDIT, "there is no field hint"),
        (2 * (SHARES + EDIT), "an earlier mistake of this exercise has the same name"),
    ],
)
def test_what_does_not_fit_is_refused_by_file_exercise_and_mistake(file, record, says):
    file.write_text(record)
    with pytest.raises(ValueError, match=says) as refused:
        read(file, CHAPTER)
    assert str(refused.value).startswith(f"{file}, 05.1, shares the list: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SHARES.replace("05.1", "05.9"), "chapter 05 has no exercise '05.9'"),
        (SHARES.replace('list"', "list"), "line 3"),
        (SHARES.replace("name", "nam"), "05.1, mistake 1: it has no name"),
    ],
)
def test_what_is_no_record_is_refused_by_file(file, text, says):
    file.write_text(text)
    with pytest.raises(ValueError, match=says) as refused:
        read(file, CHAPTER)
    assert str(refused.value).startswith(str(file))


def test_a_report_says_which_engine_shipped_the_mistake():
    exercise = find("05.2")
    mistake = mistake_named(exercise, "never copies")
    assert mistake.seen == "Atlas, issue 1193 (2026)"
    report = Report.of(examine(exercise, text_of_mistake(exercise, mistake)))
    assert f"also shipped by: {mistake.seen}" in report.text()
    assert mistake.seen in report.html()
    other = mistake_named(exercise, "always copies")
    report = Report.of(examine(exercise, text_of_mistake(exercise, other)))
    assert "shipped" not in report.text()
