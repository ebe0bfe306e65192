"""A reader's whole way: from the skeletons, exercise by exercise, to the model on them.

That each check passes on the reference's other parts, and that a broken variant is not started,
`test_four_ways` and the notebooks show. Here each exercise is built on the reader's earlier ones.
"""

import os
import subprocess
import sys

import pytest
from four_ways import EXERCISES, on_the_way

from minikv.course import lab
from minikv.course.commands import main
from minikv.course.harness import progress_file, reader_files
from minikv.course.harness.manifest import chapter_of, chapters
from minikv.course.harness.report import in_terminal
from minikv.course.harness.skeletons import fill, skeleton
from minikv.course.harness.update import merge


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A fresh folder of exercises, for all of this module's tests in turn."""
    folder = tmp_path_factory.mktemp("reader") / "exercises"
    folder.mkdir()
    for chapter in chapters().values():
        (folder / chapter.file_name).write_text(skeleton(chapter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIKV_EXERCISES", str(folder))
        patch.setenv("MINIKV_TIME_LIMIT", "60")
        yield folder


def command(*arguments):
    environment = os.environ | {"NO_COLOR": "1"}
    line = [sys.executable, "-m", "minikv", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment)


def solve(exercise):
    """Fill in this exercise alone, in a file that already holds the earlier ones."""
    file = reader_files.folder() / chapter_of(exercise.id).file_name
    file.write_text(fill(file.read_text(), on_the_way(exercise)))


def test_nothing_is_passed_at_the_beginning(reader, capsys):
    first = EXERCISES[0]
    done = command("progress")
    assert done.returncode == 0
    assert f"0 of {len(EXERCISES)} exercises passed" in done.stdout
    assert f"Next: {first.id} {first.title}" in done.stdout
    main(["parts"])
    assert "None of your parts" in capsys.readouterr().out


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_exercise_by_exercise(reader, exercise):
    if exercise.kind != "debug":
        assert lab.check(exercise.id).status == "not started"
    solve(exercise)
    report = lab.check(exercise.id, own_parts=exercise.kind == "build")
    assert report.passed and not report.printed, report.text()
    passed = [e for e in EXERCISES if e.id in progress_file.passed()]
    assert passed == EXERCISES[: EXERCISES.index(exercise) + 1]


def test_then_everything_is_passed(reader, capsys):
    assert main(["progress"]) == 0
    assert f"{len(EXERCISES)} of {len(EXERCISES)} exercises passed" in capsys.readouterr().out
    one = EXERCISES[0]
    done = command("check", one.id)
    assert done.returncode == 0 and f"{one.id} {one.title}" in done.stdout
    assert main(["diff", one.id]) == 0


def test_the_model_runs_on_the_readers_parts(reader):
    parts = lab.your_parts()
    runs = list(dict.fromkeys(proof.which for proof in parts.proofs))
    assert runs == [*chapters(), "together"]
    assert parts.same and parts.written.same, parts
    told = parts.text(in_terminal)
    assert told.count("ok  ") == len(parts.proofs) and parts.written.text in told
    assert max(map(len, told.splitlines())) <= 100


def test_an_update_keeps_them(reader):
    """And what is built first in a chapter passes on all the others, later ones too."""
    for chapter in chapters().values():
        base, mine = skeleton(chapter), (reader / chapter.file_name).read_text()
        newer = base.replace('"""', '"""Newer. ', 1) + "\n\nNEWER = 1\n"
        merged = merge(base, mine, newer)
        assert merged.lost == [] and "NEWER = 1" in merged.text
        (reader / chapter.file_name).write_text(merged.text)
    for chapter in chapters().values():
        first = next(one for one in chapter.exercises if one.kind == "build")
        report = lab.check(first.id, own_parts=True)
        assert report.passed, report.text()
