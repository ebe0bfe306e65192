"""A reader's whole way: from the skeletons, exercise by exercise, to the model on them.

That each check passes on the reference's other parts, and that a broken variant is not started,
`test_four_ways` and the notebooks show. Here each exercise is built on the reader's earlier ones:
some as a reader checks them, the others by `own_parts`, all in one process and without the model,
which runs on all parts in the end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from four_ways import EXERCISES, checked_by_reader, on_the_way

from minikv.course import lab
from minikv.course.commands import main
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import chapters, find
from minikv.course.exercise_data.skeletons import fill, skeleton
from minikv.course.judge.checking import MODEL_RUNS
from minikv.course.judge.examine import import_checks
from minikv.course.judge.result import Line
from minikv.course.reader import progress_file
from minikv.course.reader.update import merge
from minikv.course.reports.report import Report, in_terminal

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A fresh folder of exercises, for all of this module's tests in turn."""
    folder = tmp_path_factory.mktemp("reader") / "exercises"
    folder.mkdir()
    for chapter in chapters().values():
        (folder / chapter.file_name).write_text(skeleton(chapter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIKV_EXERCISES", str(folder))
        yield folder


@pytest.fixture(scope="module")
def own_parts(tmp_path_factory):
    """What `own_parts.py` has to say, and the reports in it by (exercise, what it is built on)."""
    folder = tmp_path_factory.mktemp("own_parts") / "exercises"
    folder.mkdir()
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "MINIKV_EXERCISES": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
    }
    line = [sys.executable, str(Path(__file__).with_name("own_parts.py"))]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    reports = {}
    for one in said:
        if "report" in one:
            lines = [Line(**line) for line in one["report"].pop("lines")]
            report = Report(**one["report"] | {"lines": lines, "printed": one["printed"]})
            reports[report.exercise, one["on"]] = report
    return said, reports


def solve(exercise):
    """Fill in this exercise alone, in a file that already holds the earlier ones."""
    file = reader_files.folder() / exercise.chapter.file_name
    file.write_text(fill(file.read_text(), on_the_way(exercise)))


def test_nothing_is_passed_at_the_beginning(reader, capsys):
    first = EXERCISES[0]
    assert main(["progress"]) == 0
    said = capsys.readouterr().out
    assert f"0 of {len(EXERCISES)} exercises passed" in said
    assert f"Next: {first.id} {first.title}" in said
    main(["parts"])
    assert "No part of yours" in capsys.readouterr().out


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_exercise_by_exercise(reader, own_parts, exercise):
    if exercise.kind != "debug":
        assert lab.check(exercise.id).status == "not started"
    solve(exercise)
    if checked_by_reader(exercise):
        report = lab.check(exercise.id, own_parts=True)
    else:
        on = "earlier" if exercise.kind == "build" else "nothing"
        report = own_parts[1].pop((exercise.id, on))
        progress_file.note(report, alone=on == "nothing")
    assert report.passed and not report.printed, report.text()
    passed = progress_file.passed()
    assert [one for one in EXERCISES if one.id in passed] == EXERCISES[
        : EXERCISES.index(exercise) + 1
    ]


def test_what_is_built_first_passes_on_all_the_others(own_parts):
    later = [report for (_, on), report in own_parts[1].items() if on == "later"]
    assert len(later) == len({exercise.id[:2] for exercise in EXERCISES})
    for report in later:
        assert report.passed and not report.printed, report.text()


def test_what_the_model_hands_over_is_what_it_does_on_the_reference(own_parts):
    runs = [one for one in own_parts[0] if "model" in one]
    assert len({one["model"][:2] for one in runs}) == len({one.id[:2] for one in EXERCISES})
    for run in runs:
        # Predictions are numbers, which their check has judged.
        assert run["handed"] or find(run["model"]).kind == "predict", run
        assert run["differs"] is None, run


def test_then_everything_is_passed(reader, capsys):
    assert main(["progress"]) == 0
    assert f"{len(EXERCISES)} of {len(EXERCISES)} exercises passed" in capsys.readouterr().out
    one = EXERCISES[0]
    assert main(["check", one.id]) == 0
    assert f"{one.id} {one.title}" in capsys.readouterr().out
    assert main(["diff", one.id]) == 0


def test_an_update_keeps_them(reader):
    for chapter in chapters().values():
        base, mine = skeleton(chapter), (reader / chapter.file_name).read_text()
        newer = base.replace('"""', '"""Newer. ', 1) + "\n\nNEWER = 1\n"
        merged = merge(base, mine, newer)
        assert merged.lost == [] and "NEWER = 1" in merged.text
        (reader / chapter.file_name).write_text(merged.text)
    assert progress_file.passed() == {exercise.id for exercise in EXERCISES}


def test_the_model_runs_on_the_readers_parts(reader):
    import_checks("parts")
    parts = lab.your_parts()
    ran = {id_ for proof in parts.proofs for id_ in proof.ids}
    assert ran == {exercise.id for exercise in EXERCISES if exercise.id in MODEL_RUNS}
    runs = list(dict.fromkeys(proof.which for proof in parts.proofs))
    assert runs == [*chapters(), "together"]
    assert parts.same and parts.written.same, parts
    told = parts.text(in_terminal)
    assert told.count("ok  ") == len(parts.proofs) and parts.written.text in told
    assert max(map(len, told.splitlines())) <= 100
