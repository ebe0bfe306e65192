"""A newer course keeps what a reader has written, and says what it could not keep."""

import ast
import json
import subprocess
from pathlib import Path

import pytest
from four_ways import EXERCISES, reference_sources, right, right_otherwise, runs_here
from thorough import thorough_after

from minikv.course.commands import main
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import ReaderError, chapter_of, chapters
from minikv.course.exercise_data.skeletons import (
    definitions,
    fill,
    skeleton,
    solved,
    targets,
    text_of,
)
from minikv.course.reader import unpacked, update
from minikv.course.reader.update import UpdateError, merge

ROOT = Path(__file__).parents[2]

BASE = '''"""Pools."""

from minikv.blocks import OutOfBlocks


class Pool:
    """Blocks."""

    def __init__(self, size):
        self.free = list(range(size))

    # ── 04.1 Take ──
    def take(self):
        """One block."""
        raise NotImplementedError("Exercise 04.1: Pool.take")

    # ── 04.1 Give ──
    def give(self, block):
        """Back."""
        raise NotImplementedError("Exercise 04.1: Pool.give")


# ── 04.2 Count ──
def count(pool):
    """How many."""
    raise NotImplementedError("Exercise 04.2: count")
'''
TAKE = '    def take(self):\n        """One block."""\n        return self.free.pop()  # the last'
MINE = fill(
    BASE, {"Pool.take": TAKE, "count": 'def count(pool):\n    """How many."""\n    return 7'}
)


ADDED = """import math

LIMIT = 3


def half(n):
    return n / 2


class Mine:
    x = 1

    def y(self):
        return 2


"""


def function(text, path):
    return text_of(text, definitions(ast.parse(text))[path])


# ── One file ──────────────────────────────────────────────────────────────────


def solutions(chapter, of=reference_sources):
    """A file with a solution of every exercise of the chapter."""
    each = [of(exercise) for exercise in chapter.exercises if exercise in EXERCISES]
    above = "\n\n\n".join(sources[""] for sources in each if "" in sources)
    sources = {path: text for one in each for path, text in one.items() if path}
    return fill(skeleton(chapter), sources | ({"": above} if above else {})), list(sources)


def otherwise(exercise):
    return reference_sources(exercise) | right_otherwise(exercise.id[:2])[exercise.id]


@pytest.fixture(params=thorough_after(6, chapters().values()), ids=lambda chapter: chapter.number)
def chapter(request):
    return request.param


def test_what_a_reader_has_not_touched_is_the_courses(chapter):
    base, new = skeleton(chapter), solved(chapter)
    assert merge(base, base, base).text == base
    assert merge(base, base, new).text == new


@pytest.mark.parametrize("of", thorough_after(1, [otherwise, reference_sources]))
def test_solutions_survive_a_course_that_has_changed_elsewhere(chapter, of):
    base, (mine, paths) = skeleton(chapter), solutions(chapter, of)
    assert merge(base, mine, base).text == mine
    if of is reference_sources:
        assert merge(base, mine, base + "\n\nNEW = 1\n").text == mine + "\n\nNEW = 1\n"
    merged = merge(base, mine, base.replace('"""', '"""New words. ', 1))
    assert "New words." in merged.text and merged.lost == []
    assert paths or not runs_here(chapter)
    for path in paths:
        assert function(merged.text, path) == function(mine, path)


def test_both_sides_are_kept():
    theirs = BASE.replace("list(range(size))", "list(range(size))[::-1]")
    merged = merge(BASE, MINE, theirs)
    assert "return self.free.pop()  # the last" in merged.text
    assert "[::-1]" in merged.text and "return 7" in merged.text
    assert merged.kept == ["Pool.take", "count"] and merged.lost == []


def test_a_new_docstring_is_taken_with_the_readers_body():
    merged = merge(BASE, MINE, BASE.replace("How many.", "How many are free."))
    assert (
        function(merged.text, "count")
        == 'def count(pool):\n    """How many are free."""\n    return 7\n'
    )


def test_another_signature_is_told_and_not_mixed():
    merged = merge(BASE, MINE, BASE.replace("def count(pool)", "def count(pool, of)"))
    assert "return 7" not in merged.text and "def count(pool, of)" in merged.text
    assert merged.lost == ["count: it is now count(pool, of), yours was count(pool)"]


def test_annotations_are_a_matter_of_taste():
    theirs = BASE.replace("def count(pool)", "def count(pool: Pool) -> int")
    merged = merge(BASE, MINE, theirs)
    assert "return 7" in merged.text and merged.lost == []


def test_what_the_course_has_dropped_is_told():
    gone = BASE[: BASE.index("# ── 04.2")]
    merged = merge(BASE, MINE, gone)
    assert merged.lost == ["count: the course does not have it any more"]
    assert "return self.free.pop()" in merged.text


def test_what_the_reader_has_added_is_kept():
    mine = MINE.replace("class Pool:", ADDED + "class Pool:")
    mine = mine.replace(
        "    # ── 04.1 Give", "    def look(self):\n        return self.free\n\n    # ── 04.1 Give"
    )
    merged = merge(BASE, mine, BASE.replace("Back.", "Back again."))
    namespace = {}
    exec(merged.text, namespace)
    assert namespace["LIMIT"] == 3 and namespace["half"](4) == 2 and namespace["Mine"]().y() == 2
    assert namespace["Pool"](2).look() == [0, 1] and namespace["count"](None) == 7
    assert "Back again." in merged.text and merged.lost == []


def test_what_the_reader_has_changed_in_given_code_is_kept():
    mine = MINE.replace("list(range(size))", "set(range(size))")
    merged = merge(BASE, mine, BASE.replace("How many.", "How many?"))
    assert "set(range(size))" in merged.text and "Pool.__init__" in merged.kept


def test_a_comment_between_functions_is_told():
    mine = MINE.replace("class Pool:", "# my own thoughts\nclass Pool:")
    merged = merge(BASE, mine, BASE.replace("How many.", "How many?"))
    assert merged.lost == ["a comment outside of functions: # my own thoughts"]


# ── A whole course ────────────────────────────────────────────────────────────

OLD_DOC, NEW_DOC = "Take a free block;", "Take any free block;"


def git(folder, *arguments):
    identity = ["-c", "user.name=reader", "-c", "user.email=reader@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def course(tmp_path):
    """An upstream repository and a reader's clone of it, of the exercises alone."""
    upstream, clone = tmp_path / "upstream", tmp_path / "clone"
    (upstream / "exercises").mkdir(parents=True)
    for chapter in chapters().values():
        (upstream / "exercises" / chapter.file_name).write_text(skeleton(chapter))
    (upstream / "requirements.txt").write_text("torch\n")
    (upstream / ".gitignore").write_text(".progress/\n")
    git(upstream, "init", "--quiet", "--initial-branch=main")
    git(upstream, "add", ".")
    git(upstream, "commit", "--quiet", "--message=first")
    git(tmp_path, "clone", "--quiet", str(upstream), str(clone))
    return upstream, clone


@pytest.fixture
def pool_solved():
    return next(right(exercise) for exercise in EXERCISES if exercise.id == "04.1")


POOL = chapter_of("04.1").file_name


def release(upstream):
    """A second version upstream: another docstring in chapter 04."""
    file = upstream / "exercises" / POOL
    text = file.read_text()
    assert OLD_DOC in text
    file.write_text(text.replace(OLD_DOC, NEW_DOC))
    (upstream / "requirements.txt").write_text("torch\nnumpy\n")
    git(upstream, "commit", "--quiet", "--all", "--message=second")


def test_updating_a_checkout(course, pool_solved, monkeypatch):
    upstream, clone = course
    monkeypatch.setenv("MINIKV_EXERCISES", str(clone / "exercises"))
    assert update.update_checkout() == ["This is the newest version."]
    (clone / "exercises" / POOL).write_text(pool_solved)
    release(upstream)
    said = update.update_checkout()
    now = (clone / "exercises" / POOL).read_text()
    assert now == pool_solved.replace(OLD_DOC, NEW_DOC)
    assert "BlockPool.allocate" in said[0] and "make setup" in said[-1]
    assert git(clone, "rev-parse", "HEAD") == git(upstream, "rev-parse", "HEAD")
    [copy] = (clone / "exercises" / ".progress" / "backups").iterdir()
    assert copy.read_text() == pool_solved
    assert git(clone, "status", "--porcelain").split() == ["M", f"exercises/{POOL}"]


@pytest.mark.parametrize(
    "trouble", thorough_after(2, ["own commit", "broken file", "other file", "no upstream"])
)
def test_an_update_that_cannot_be_made_changes_nothing(course, pool_solved, monkeypatch, trouble):
    upstream, clone = course
    monkeypatch.setenv("MINIKV_EXERCISES", str(clone / "exercises"))
    file = clone / "exercises" / POOL
    file.write_text(pool_solved)
    release(upstream)
    expected = {
        "other file": "requirements.txt: changed",
        "own commit": "commits of its own",
        "broken file": f"exercises/{POOL}, line",
        "no upstream": "follows no branch",
    }[trouble]
    if trouble == "other file":
        (clone / "requirements.txt").write_text("mine\n")
    elif trouble == "own commit":
        git(clone, "commit", "--quiet", "--all", "--message=mine")
    elif trouble == "broken file":
        file.write_text(pool_solved + "\ndef f(:\n")
    else:
        git(clone, "branch", "--unset-upstream")
    before = file.read_text(), git(clone, "rev-parse", "HEAD")
    with pytest.raises(UpdateError, match=expected):
        update.update_checkout()
    assert (file.read_text(), git(clone, "rev-parse", "HEAD")) == before


def test_the_command_says_what_is_wrong(course, monkeypatch, capsys):
    _, clone = course
    monkeypatch.setattr(reader_files, "course_folder", lambda: clone)
    monkeypatch.setenv("MINIKV_EXERCISES", str(clone / "exercises"))
    git(clone, "branch", "--unset-upstream")
    assert main(["update"]) == 1
    assert "follows no branch" in " ".join(capsys.readouterr().err.split())  # of any width


# ── A folder of `minikv start` ────────────────────────────────────────────────


def test_updating_a_folder_that_start_has_made(tmp_path, pool_solved, monkeypatch):
    monkeypatch.delenv("MINIKV_EXERCISES", raising=False)
    unpacked.unpack(tmp_path)
    monkeypatch.chdir(tmp_path / "notebooks")
    assert "which is the installed one" in update.update_unpacked(tmp_path)[0]
    # An older version, in which a docstring was another, and one notebook.
    same, run = "00_start_here.ipynb", "01_naive_attention.ipynb"
    record = json.loads((tmp_path / ".minikv" / "course.json").read_text())
    record["version"] = "0.0.9"
    for name in (same, run):
        record["notebooks"][name] = unpacked.digest("old")
    (tmp_path / "notebooks" / same).write_text("old")
    (tmp_path / "notebooks" / run).write_text("old, and run")
    (tmp_path / ".minikv" / "course.json").write_text(json.dumps(record))
    begun = tmp_path / ".minikv" / "exercises" / POOL
    begun.write_text(begun.read_text().replace(OLD_DOC, NEW_DOC))
    (tmp_path / "exercises" / POOL).write_text(pool_solved.replace(OLD_DOC, NEW_DOC))
    other = tmp_path / "exercises" / chapter_of("05.1").file_name
    other.write_text("x = 1\n")
    (tmp_path / ".minikv" / "exercises" / other.name).write_text("x = 1\n")
    with pytest.raises(ReaderError, match="`minikv update`"):
        unpacked.unpack(tmp_path)
    said = update.update_unpacked(tmp_path)
    assert (tmp_path / "exercises" / POOL).read_text() == pool_solved
    assert other.read_text() == skeleton(chapter_of("05.1"))
    assert said == [
        f"{POOL}: kept BlockPool.allocate, BlockPool.release",
        f"{run}: new; yours is notebooks/of_0.0.9/{run}",
    ]
    assert (tmp_path / "notebooks" / "of_0.0.9" / run).read_text() == "old, and run"
    assert (tmp_path / "notebooks" / same).read_text() == unpacked.notebooks()[same]
    assert unpacked.unpack(tmp_path) == []


# ── Files of any editor ───────────────────────────────────────────────────────

ODD = {
    "a form feed": "\f\n# a page\f\n",
    "a vertical tab": "# a\x0bb\n",
    "U+2028": "# a\u2028b\n",
    "U+0085": "TEXT = 'a\x85b'\n",
    "tabs": "class Own:\n\tdef one(self):\n\t\treturn 1\n",
    "an async function": "def twice(f):\n    return f\n\n@twice\nasync def later():\n    return\n",
}


@pytest.mark.parametrize("odd", ODD)
def test_lines_are_those_of_python(odd):
    """A bug is found as it was, an exercise is put back, and an update keeps what is there."""
    exercise = next(one for one in EXERCISES if one.kind == "debug")
    text = fill(skeleton(exercise.chapter), {"": ODD[odd]})
    assert not reader_files.parsed(exercise.chapter, text).progress_of(exercise).started
    mine = fill(text, reference_sources(exercise))
    assert reader_files.parsed(exercise.chapter, mine).progress_of(exercise).started
    asked = {p: t.skeleton for p, t in targets(exercise.chapter).items()}
    back = fill(mine, {p: asked[p] for p in reference_sources(exercise)})
    assert ast.dump(ast.parse(back)) == ast.dump(ast.parse(text))
    merged = merge(skeleton(exercise.chapter), mine, skeleton(exercise.chapter) + "\n\nNEW = 1\n")
    ours = {ast.dump(node) for node in ast.parse(mine).body}
    assert ours <= {ast.dump(node) for node in ast.parse(merged.text).body}


def test_a_method_is_put_back_among_tabs():
    text = "class A:\n\tdef f(self):\n\t\treturn 1\n\n\tdef g(self):\n\t\treturn 2\n"
    back = fill(text, {"A.f": "def f(self):\n    raise NotImplementedError\n"})
    assert [node.name for node in ast.parse(back).body[0].body] == ["f", "g"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_that_is_not_utf_8_is_named(encoding, tmp_path):
    (tmp_path / "ch04_paged_blocks.py").write_bytes("# fünf".encode(encoding))
    with pytest.raises(ReaderError, match=r"ch04_paged_blocks.py is not UTF-8 text"):
        update.read_folder(tmp_path)
    (tmp_path / "ch04_paged_blocks.py").write_bytes("# fünf".encode("utf-8-sig"))
    assert update.read_folder(tmp_path) == {"ch04_paged_blocks.py": "# fünf"}


@pytest.mark.parametrize("damaged", ["", "{half", "[]", '{"version": 1}', "\udcff"])
def test_a_damaged_record_is_named(damaged, tmp_path):
    (tmp_path / ".minikv").mkdir()
    file = tmp_path / ".minikv" / "course.json"
    file.write_bytes(damaged.encode("utf-8", "surrogateescape"))
    with pytest.raises(ReaderError, match=r"course.json is damaged"):
        unpacked.version_of(tmp_path)


def test_a_notebook_that_is_not_utf_8_is_put_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacked, "notebooks", lambda: {"01_a.ipynb": "{}\n"})
    monkeypatch.setattr(unpacked, "_write_engine", lambda folder: None)
    (tmp_path / "notebooks").mkdir()
    unpacked.record(tmp_path)
    (tmp_path / "notebooks" / "01_a.ipynb").write_bytes(b"\xff\xfe")
    assert len(unpacked.renew_notebooks(tmp_path)) == 1
    assert (tmp_path / "notebooks" / "01_a.ipynb").read_text() == "{}\n"
    [kept] = (tmp_path / "notebooks").glob("of_*/01_a.ipynb")
    assert kept.read_bytes() == b"\xff\xfe"
