"""`pip install minikv` and `minikv start`: the wheel, in an environment of its own.

The environment finds the other packages where this one has them; nothing is downloaded. It finds
no Numba, which would compile the engine's step anew for a minute.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
from four_ways import right

from minikv.course.exercise_data.manifest import find
from minikv.course.exercise_data.skeletons import skeleton
from minikv.course.reader import unpacked

ROOT = Path(__file__).parents[2]
LARGEST = 16_000_000  # bytes of the wheel; docs/SETUP.md says "15 MB"
ONE = find("04.1")
FILE = f"exercises/{ONE.chapter.file_name}"
LEFT_OUT = (".*", "build", "dist", "*.egg-info", "__pycache__")
BUILD = "from setuptools.build_meta import build_sdist as build; print(build({!r}))"
START_AND_PROGRESS = """
import os
from minikv.course.commands import main
main(["start", "--no-lab"])
os.chdir("..")
main(["progress"])
"""
PROGRESS_AND_START = """
from minikv.course.commands import main
print(main(["progress"]), main(["start", ".", "--no-lab"]))
"""
# Cells of a notebook, run by a kernel of this environment in the notebook's folder.
RUN_CELLS = """
import sys
from pathlib import Path
import nbformat
from nbclient import NotebookClient
file, *cells = sys.argv[1:]
notebook = nbformat.read(file, 4)
own = [nbformat.v4.new_code_cell(text) for text in cells if "(" in text]
known = {cell.id: cell for cell in notebook.cells}
notebook.cells = [known[name] for name in cells if "(" not in name] + own
NotebookClient(notebook, timeout=300, resources={"metadata": {"path": Path(file).parent}}).execute()
for cell in notebook.cells:
    for output in cell.outputs:
        print(output.get("text") or output["data"]["text/plain"])
"""


def call(*command, cwd, **more):
    """Without this checkout on the path, and without what the tests' own environment says."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and k[:7] != "MINIKV_"}
    kept |= {"NO_COLOR": "1", "MINIKV_TIME_LIMIT": "90", **more}
    line = [str(part) for part in command]
    return subprocess.run(line, cwd=cwd, env=kept, capture_output=True, text=True)


def done(*command, cwd):
    finished = call(*command, cwd=cwd)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def words(text):
    """In one line: where it is broken depends on the length of paths."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made from the sdist, so that neither lacks a file."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    name = done(sys.executable, "-c", BUILD.format(str(folder)), cwd=source).split()[-1]
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    unpacked_to = folder / name.removesuffix(".tar.gz")
    done(sys.executable, "-m", "pip", "wheel", *offline, ".", "-w", folder, cwd=unpacked_to)
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """The programs of an environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    offline = ("--no-deps", "--no-index", "--quiet")
    done(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel, cwd=folder)
    [site] = folder.glob("lib/python*/site-packages")
    others = folder / "others"
    others.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("numba", "minikv", "__editable__")):
            (others / package.name).symlink_to(package)
    (site / "others.pth").write_text(f"{others}\n")
    return folder / "bin"


@pytest.fixture(scope="module")
def started(bin_folder, tmp_path_factory):
    """A folder that `minikv start` has made, and what it said."""
    folder = tmp_path_factory.mktemp("home") / "kv"
    return folder, done(bin_folder / "minikv", "start", "kv", "--no-lab", cwd=folder.parent)


def test_the_wheel_has_all_and_is_small(wheel):
    assert wheel.stat().st_size < LARGEST


def test_starting_unpacks_notebooks_and_exercises(started):
    folder, said = started
    names = {path.name for path in (folder / "notebooks").iterdir()}
    assert names == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert (folder / FILE).read_text() == skeleton(ONE.chapter)
    assert (folder / "engine" / "minikv" / "blocks.py").exists()
    assert f"{folder} is your copy of the course: {len(names)} notebooks" in words(said)


def test_links_of_the_notebooks_lead_somewhere(started):
    folder, _ = started
    dead = [
        f"{file.name}: {link}"
        for file in sorted((folder / "notebooks").glob("*.ipynb"))
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "markdown"
        for link in unpacked_links("".join(cell["source"]))
        if not (file.parent / link).exists()
    ]
    assert dead == []


def unpacked_links(text):
    return re.findall(r"\]\((?!http|attachment:)([^)#\s]+)", text)


def test_a_reader_works_there(bin_folder, started):
    folder, _ = started
    minikv = bin_folder / "minikv"
    (folder / FILE).write_text(right(ONE))
    assert "04.1" in (said := done(minikv, "check", "04.1", cwd=folder / "notebooks"))
    assert "passed: all" in said and "oracle" in said
    said = done(bin_folder / "python", "-c", START_AND_PROGRESS, cwd=folder / "exercises")
    assert "as you left it. " in words(said) and "1 of " in said
    assert (folder / FILE).read_text() == right(ONE), "nothing of the reader's is overwritten"
    cells = [
        "ladder",
        "load",
        "sample",
        "from minikv.course.lab import *; mine('04.1')",
        "from exercises.ch04_paged_blocks import BlockPool; print(BlockPool(3).allocate())",
    ]
    first = folder / "notebooks" / "00_start_here.ipynb"
    said = done(bin_folder / "python", "-c", RUN_CELLS, first, *cells, cwd=folder.parent)
    assert "✓" not in said and "import os\n\ndef list_files" in said
    assert "BlockPool: yours (04.1)" in said and "Pool" in said


def test_elsewhere_it_says_how_to_begin(bin_folder, tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_start_here.ipynb").write_text("mine")
    asked = call(bin_folder / "python", "-c", PROGRESS_AND_START, cwd=tmp_path)
    assert asked.stdout == "2 1\n" and "Traceback" not in asked.stderr
    told = words(asked.stderr)
    assert "`minikv start` makes one" in told and "name an empty folder" in told
    assert [path.name for path in tmp_path.rglob("*.ipynb")] == ["00_start_here.ipynb"]


# ── In this process ───────────────────────────────────────────────────────────


@pytest.fixture
def copy(tmp_path, monkeypatch):
    monkeypatch.delenv("MINIKV_EXERCISES", raising=False)
    unpacked.unpack(tmp_path)
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


def test_what_is_missing_comes_back_and_nothing_else_changes(copy):
    (copy / FILE).write_text("mine")
    (copy / "notebooks" / "00_start_here.ipynb").unlink()
    assert unpacked.unpack(copy) == ["notebooks/00_start_here.ipynb"]
    assert (copy / FILE).read_text() == "mine"
    assert unpacked.unpack(copy) == []


def test_answers_to_predictions_are_left_out_and_a_readme_of_ones_own_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    unpacked.unpack(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    # One text for an assistant: in the repository, and in a reader's folder.
    rules = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert (tmp_path / "AGENTS.md").read_text(encoding="utf-8") == rules
    for file in tmp_path.glob("notebooks/*.ipynb"):
        notebook = json.loads(file.read_text(encoding="utf-8"))
        answers = [cell for cell in notebook["cells"] if "measured(" in "".join(cell["source"])]
        assert (answers and all(cell["outputs"] == [] for cell in answers)) or file.name[:2] == "00"
