"""The one reader of `mistakes.toml`: what it makes of a record, and what it refuses."""

import pytest

from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.exercise_data.mistakes import (
    mistake_named,
    read,
    reference_sources,
    text_of_mistake,
)
from minikv.course.judge.examine import examine
from minikv.course.reports.report import Report

CHAPTER, EXERCISE = chapter_of("05"), find("05.1")
SHARES = """
["05.1"."shares the list"]
cause = "both tables have the same list of block ids"
look = "`=` does not copy a list"
"""
EDIT = 'edit = "self.block_ids.copy() => self.block_ids"\n'


@pytest.fixture
def file(tmp_path):
    return tmp_path / "mistakes.toml"


def test_an_edit_and_a_whole_definition(file):
    whole = """
["05.1"."returns nothing"]
cause = "nothing is returned"
look = "what comes after `return`?"
seen = "an engine"
source = '''
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


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        ("twin.block_ids => xyz\nxyz => more", "twin.block_ids", "more"),
        ("-    twin.num_tokens = self.num_tokens", "    twin.num_tokens = self.num_tokens\n", ""),
        ("+    x = 1\n     return twin\n", "", "    x = 1\n"),
        ("-    return twin\n+    return self", "return twin", "return self"),
        ("+    x = 1\n     return twin\n\n-    return twin", "    return twin\n", "    x = 1\n"),
    ],
)
def test_edits_are_made_one_after_the_other(file, edit, old, new):
    """Within a line, or of whole lines as in a diff, whose places have an empty line between."""
    file.write_text(f"{SHARES}edit = '''\n{edit}'''")
    [mistake] = read(file, CHAPTER)["05.1"]
    [(path, right)] = reference_sources(EXERCISE).items()
    place = right.index(old or "    return twin")
    assert mistake.sources == {path: right[:place] + new + right[place + len(old) :]}


def test_several_ways_to_make_one_mistake(file):
    """Each text is a wrong solution of its own, edits before whole definitions."""
    ways = """edit = ["twin.block_ids => one", "twin.block_ids => two"]
source = '''
def fork(self):
    return self'''"""
    file.write_text(SHARES + ways)
    mistakes = read(file, CHAPTER)["05.1"]
    [(path, right)] = reference_sources(EXERCISE).items()
    texts = [right.replace("twin.block_ids", new) for new in ("one", "two")]
    assert [one.sources for one in mistakes] == [
        {path: text} for text in (*texts, "def fork(self):\n    return self")
    ]
    assert {one.name for one in mistakes} == {"shares the list"}
    assert {one.cause for one in mistakes} == {"both tables have the same list of block ids"}
    file.write_text(SHARES + ways.replace("block_ids => two", "spoon => two"))
    with pytest.raises(ValueError, match=r"shares the list: .* is 0 times"):
        read(file, CHAPTER)


def test_a_record_of_two_exercises(file):
    """What comes first is an exercise's own."""
    chapter = chapter_of("01")
    record = '["{}"."{}"]\nedit = "scores = => scores = 1 *"\ncause = "c"\n'
    no_mask = '["01.4"."own"]\nedit = "return => return 1 *"\ncause = "c"\n'
    file.write_text(record.format("01.3", "both") + 'also = "01.4"\n' + no_mask)
    found = read(file, chapter)
    [both], [own, again] = found["01.3"], found["01.4"]
    assert (both.name, own.name, again.name) == ("both", "own", "both")
    assert both.sources.keys() == {"naive_attention"} and own.look is None
    assert again.sources.keys() == {"grouped_attention"}


def test_without_a_look_a_report_shows_that_of_the_line():
    exercise = find("05.1")
    mistake = mistake_named(exercise, "forgets the number of tokens")
    report = examine(exercise, text_of_mistake(exercise, mistake))
    looks = {line.name: line.look for line in report.lines if line.cause == mistake.cause}
    assert mistake.look is None
    assert looks["the same tokens, in the same blocks"] == "the fields of the new table"


def test_of_several_parts_a_record_names_its_own(file):
    chapter = chapter_of("15")
    exercise = next(one for one in chapter.exercises if len(reference_sources(one)) > 1)
    (first, _), (second, right), *_ = reference_sources(exercise).items()
    line = next(line for line in right.splitlines() if right.count(f"{line}\n") == 1)
    record = f'["{exercise.id}"."x"]\ncause = "y"\nlook = "z"\n'
    file.write_text(f"{record}edit.\"{second}\" = '''-{line}'''")
    [mistake] = read(file, chapter)[exercise.id]
    assert mistake.sources == {second: right.replace(f"{line}\n", "")}
    file.write_text(f"{record}edit = '''-{line}'''")
    with pytest.raises(ValueError, match=f"of which part is the text: {first}, {second}"):
        read(file, chapter)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (SHARES + EDIT.replace("copy()", "deepcopy()"), "is 0 times in the reference"),
        (SHARES + EDIT.replace("self.block_ids.copy()", "self"), "times in the reference"),
        (SHARES + EDIT.replace("edit", "edit.BlockTable.fork"), "no BlockTable to edit"),
        (SHARES + EDIT.replace("=>", "->"), "neither `old => new` nor a line of a diff"),
        (SHARES + 'source."BlockTable.spoon" = ""', "no BlockTable.spoon in the reader's file"),
        (SHARES, "neither edit nor source"),
        (SHARES.replace("cause", "caus") + EDIT, "it has no cause"),
        (SHARES.replace("look", "lok") + EDIT, "there is no field lok"),
        (SHARES + "hint = 'x'\n" + EDIT, "there is no field hint"),
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
        (SHARES.replace('ids"', "ids"), "line 3"),
        (2 * (SHARES + EDIT), "twice"),
        (SHARES + EDIT + 'also = "05.1"', "05.1, shares the list: there is another record of this"),
        (SHARES + EDIT + 'also = "05.2"', "05.2, shares the list: .* is 0 times"),
        ('["05.1"]\nx = 1', "05.1, x: a record begins with its exercise and its name"),
        ('[["05.1"]]\nx = 1', "05.1, : a record begins with its exercise and its name"),
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
