"""The one reader of `chapter.toml`: what it makes of a chapter, and what it refuses."""

import pytest

from minikv.course.exercise_data import manifest
from minikv.course.exercise_data.manifest import Class, Function, read

FOLDER = "ch05_copy_on_write"
TOP = """
doc = "A test."
in_engine = true
skeleton = [
    { target = ".answers:copy_prefix", write = "05.1" },
    { target = "minikv.blocks:BlockTable", write = { fork = "05.2" }, show = ["release"] },
    { target = "minikv.blocks:OutOfBlocks" },
]
"""
FIRST = """
["05.1"]
about = "One · two · 10 min · difficulty 2 of 5 · debug"
hint_1 = "a"
hint_2 = "b"
hint_3 = "c"
works = "So."
"""
SECOND = FIRST.replace("05.1", "05.2").replace("debug", "build")
BUG = 'bug.copy_prefix = "old => new"\n'
ALL = TOP + FIRST + BUG + SECOND


@pytest.fixture
def read_as(tmp_path):
    def reads(text):
        (tmp_path / "chapter.toml").write_text(text)
        return read(tmp_path / "chapter.toml", FOLDER)

    return reads


def test_a_chapter_is_what_its_file_says(read_as):
    chapter = read_as(ALL)
    assert (chapter.number, chapter.name, chapter.doc) == ("05", "copy_on_write", "A test.")
    assert chapter.in_engine and chapter.needs is None and chapter.decodes == ()
    assert chapter.skeleton == (
        Function(f"{chapter.package}.answers:copy_prefix", "05.1"),
        Class("minikv.blocks:BlockTable", {"fork": "05.2"}, ("release",)),
        Function("minikv.blocks:OutOfBlocks"),
    )
    assert chapter.places == {"copy_prefix": "05.1", "BlockTable.fork": "05.2"}
    assert chapter.bugs == {"copy_prefix": "old => new"}
    first, second = chapter.exercises
    assert (first.id, first.title, first.hints) == ("05.1", "One · two", ("a", "b", "c"))
    assert (first.minutes, first.difficulty) == (10, 2)
    assert (first.kind, second.kind) == ("debug", "build")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ALL.replace("05.2", "05.3"), r"exercises must be \['05.1', '05.2'\], were"),
        (TOP + FIRST + BUG, "the skeleton writes .*, the exercises are"),
        (ALL + BUG, "05.2: the skeleton does not have it write copy_prefix"),
        (ALL.replace(", show", ", shows"), "skeleton: needs a target, .* was {'target'"),
        (ALL.replace("minikv.blocks:Out", "Out"), "skeleton: needs a target"),
        (ALL.replace("debug", "solve"), "05.1: about must be like "),
        (ALL.replace("2 of 5", "6 of 5"), "05.1: about must be like "),
        (ALL.replace('hint_2 = "b"', ""), "05.1: needs hint_1, hint_2 and hint_3"),
        (ALL.replace("works", "why", 1), "05.1: got an unexpected keyword argument 'why'"),
        (ALL.replace('works = "So."', "", 1), "05.1: missing 1 required .* 'works'"),
        (ALL.replace("hint_1", "hint_4", 1), "05.1: needs hint_1, hint_2 and hint_3"),
        (ALL.replace("about", "title", 1), "05.1: about must be like "),
        (ALL.replace("in_engine", "in_motor"), "unexpected keyword argument 'in_motor'"),
        (ALL.replace('"A test."', '"A test.'), "line 2"),
    ],
)
def test_what_does_not_fit_is_refused_by_file(read_as, tmp_path, text, says):
    with pytest.raises(ValueError, match=says) as refused:
        read_as(text)
    assert str(refused.value).startswith(f"{manifest.OURS}{tmp_path / 'chapter.toml'}: ")
