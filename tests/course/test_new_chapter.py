"""A new chapter is laid out whole, and touches nothing that is there."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minikv.course.authoring import new_chapter

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.thorough
NUMBER, NAME = "97", "tried_out"
MAKE_AND_TELL = f"""
from minikv.course.__main__ import main
from minikv.course.chapters import folders
from minikv.course.lab import check
from minikv.course.reader.ladder import ladder, navigation
main(["skeletons"])
print(ladder(4)._repr_html_(), navigation(int(list(folders())[-2])), check("{NUMBER}.1"))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project to which a chapter was added, what each file held before, and what
    MAKE_AND_TELL tells. What Python and Numba have compiled comes along, but for files that are
    being written."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("minikv", "kernels", "exercises", "tests", "notebooks"):
        leave = shutil.ignore_patterns("*.pyc.*", "*.tmp.*", ".progress", ".ipynb_checkpoints")
        shutil.copytree(ROOT / folder, root / folder, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", root)
    before = contents(root)
    done = python(root, "-m", "minikv.course", "new", NUMBER, NAME)
    assert done.returncode == 0, done.stderr
    assert f"make test CHAPTER={NUMBER}" in done.stdout
    done = python(root, "-c", MAKE_AND_TELL)
    assert done.returncode == 0, done.stderr
    return root, before, done.stdout


def python(root, *arguments):
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "MINIKV_EXERCISES": str(root / "exercises"),
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True
    )


def contents(root):
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_only_files_of_its_own_are_added(copy):
    root, before, _ = copy
    after = contents(root)
    assert {name: after.get(name) for name in before} == before
    folder = f"minikv/course/chapters/ch{NUMBER}_{NAME}"
    assert set(after) - set(before) == {
        *(f"{folder}/{name}" for name in new_chapter.FILES),
        f"exercises/ch{NUMBER}_{NAME}.py",
        f"notebooks/{NUMBER}_{NAME}.ipynb",
        f"tests/course/ch{NUMBER}/different.toml",
    }


def test_it_passes_lint(copy):
    root, before, _ = copy
    added = sorted(set(contents(root)) - set(before))
    for arguments in (["check"], ["format", "--check"]):
        done = python(root, "-m", "ruff", *arguments, *added)
        assert done.returncode == 0, done.stdout


def test_its_exercise_is_checked_four_ways_and_its_notebook_has_its_form(copy):
    root, _, told = copy
    form = f"{NUMBER}_{NAME} and (opens or closes or asks or tags or short)"
    files = [f"tests/course/{name}.py" for name in ("test_four_ways", "test_notebook_files")]
    asked = f"{NUMBER}.1 and not a_few_mistakes or {form}"
    done = python(root, "-m", "pytest", "-q", *files, "-k", asked)
    assert done.returncode == 0, done.stdout
    assert "not started" in told


def test_the_other_notebooks_link_to_it(copy):
    _, _, told = copy
    assert f'<a href="{NUMBER}_{NAME}.ipynb">{NUMBER} Tried out</a>' in told
    assert f"next: {NUMBER}_{NAME}.ipynb" in told


@pytest.mark.parametrize(
    ("number", "name", "says"),
    [
        ("9", "cpu_kernels", "two digits"),
        ("98", "CPU kernels", "lower-case letters"),
        ("05", "again", "chapter 05 exists already"),
    ],
)
def test_what_cannot_be_a_chapter_is_refused(tmp_path, number, name, says):
    with pytest.raises(ValueError, match=says):
        new_chapter.lay_out(number, name, tmp_path)
    assert list(tmp_path.iterdir()) == []
