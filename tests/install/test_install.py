"""Every way in, with real downloads into empty environments: `make test-install`, which is slow.

What only the places themselves can show is left out: their images, their front ends, their
limits on memory.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from minikv.course.authoring import buttons

ROOT = Path(__file__).parents[2]
NOTEBOOK = "notebooks/00_start_here.ipynb"
BARE = {  # what a machine with a GPU may have, and no more
    "torch": "2.11.0", "triton": "3.6.0", "numpy": "2.5.2", "transformers": "5.17.0",
    "tokenizers": "0.23.2", "safetensors": "0.8.0",
}  # fmt: skip
CPU = "https://download.pytorch.org/whl/cpu"
# Colab's module, and what a reader sees after its cell.
IN_COLAB = "import sys, types\nsys.modules['google.colab'] = types.ModuleType('google.colab')"
CHECK = "from minikv.course.lab import check\nprint(repr(check('01.1')))"
# Stored tokens come out, and Triton's interpreter computes.
WORKS = """
from minikv.course.reader.doctor import check_model, check_triton
found = [check_model(), check_triton()]
assert not [one for one in found if one.status == "FAIL"], found
"""
BESIDE = """
from importlib.metadata import files
assert not {str(file) for file in files("minikv")} & {str(file) for file in files("kernels")}
import kernels, minikv_kernels
from transformers.utils import is_kernels_available
assert is_kernels_available("0", "999") and kernels.get_kernel
"""
RUN = """
import sys
import nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(text) for text in sys.argv[1:]]
NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=1800).execute()
print("".join(output.get("text", "") for cell in cells for output in cell.outputs))
"""


@cache
def pip_options():
    """What pip is told: the index that has builds without CUDA, if it can be reached."""
    try:
        urlopen(f"{CPU}/torch/", timeout=10).close()
        return {"PIP_EXTRA_INDEX_URL": CPU}
    except (URLError, TimeoutError):
        return {"PIP_RETRIES": "0"}


def done(*command, cwd, path=None):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"MINIKV_TIME_LIMIT": "90", "NO_COLOR": "1", **pip_options()}
    environment["PIP_NO_COMPILE"] = "0"  # pip's --no-compile: of 17,000 files few ever run
    if path:
        environment["PATH"] = os.pathsep.join([str(path), environment["PATH"]])
    line = [str(part) for part in command]
    finished = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture
def bin_folder(tmp_path):
    """The programs of an environment with nothing but pip."""
    venv.create(tmp_path / "environment", with_pip=True)
    return tmp_path / "environment" / "bin"


@pytest.fixture
def published(tmp_path):
    """The course as it would be published: what git has of this checkout."""
    done("git", "clone", "--quiet", ROOT, tmp_path / "published", cwd=tmp_path)
    return tmp_path / "published"


def cells_of(folder, *names):
    cells = json.loads((folder / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for name in names for cell in cells if cell["id"] == name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done("git", "clone", "--quiet", ROOT, folder / "published", cwd=folder)
    done(sys.executable, "-m", "build", "--outdir", folder, folder / "published", cwd=folder)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_the_engine_alone_and_then_beside_hugging_faces_kernels(bin_folder, wheel, tmp_path):
    done(
        bin_folder / "pip",
        "install",
        "--quiet",
        "-c",
        ROOT / "constraints.txt",
        wheel,
        cwd=tmp_path,
    )
    assert "matplotlib" not in (listed := done(bin_folder / "pip", "list", cwd=tmp_path))
    assert "jupyter" not in listed and "transformers" not in listed
    done(bin_folder / "python", "-c", WORKS, cwd=tmp_path)
    assert "per block" in done(bin_folder / "minikv", "bench", "paging", cwd=tmp_path)
    done(bin_folder / "pip", "install", "--quiet", "kernels", "transformers", cwd=tmp_path)
    done(bin_folder / "python", "-c", BESIDE + WORKS, cwd=tmp_path)


def test_the_lowest_versions(bin_folder, wheel, tmp_path):
    """torch and Triton too, if PyTorch's index of small builds can be reached."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = [line.partition(",")[0].replace(">=", "==") for line in project["dependencies"]]
    if "PIP_EXTRA_INDEX_URL" not in pip_options():
        lowest = [line for line in lowest if not line.startswith(("torch", "triton"))]
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        lowest += [line for line in pins if line.startswith("torch==")]
    done(bin_folder / "pip", "install", "--quiet", wheel, *lowest, cwd=tmp_path)
    done(bin_folder / "python", "-c", WORKS, cwd=tmp_path)


def test_pip_install(bin_folder, wheel, tmp_path):
    done(bin_folder / "pip", "install", "--quiet", f"{wheel}[course]", cwd=tmp_path)
    # The extras and the pins fit each other; they are not installed.
    extras = f"{wheel}[course,class,clients,distributed,test]"
    pins = ("-c", ROOT / "constraints.txt")
    done(bin_folder / "pip", "install", "--quiet", "--dry-run", *pins, extras, cwd=tmp_path)
    done(bin_folder / "minikv", "start", "course", "--no-lab", cwd=tmp_path)
    course = tmp_path / "course"
    assert "Ready." in done(bin_folder / "minikv", "doctor", cwd=course)
    python, cells = bin_folder / "python", cells_of(course, "ladder", "load", "sample")
    said = done(python, "-c", RUN, *cells, CHECK, cwd=course / "notebooks")
    assert "import os" in said and "not started" in said


def test_colab(bin_folder, published, tmp_path):
    """Colab has a kernel of its own, which the cell leaves alone."""
    done(bin_folder / "pip", "install", "--quiet", "ipykernel", "nbclient", cwd=tmp_path)
    [notebook] = (published / "notebooks").glob("00_*.ipynb")
    text = notebook.read_text(encoding="utf-8")
    text = buttons.in_notebook(notebook.name, text, f"file://{published}")
    notebook.write_text(text, encoding="utf-8")
    [colab] = cells_of(published, "colab")
    content = tmp_path / "content"
    content.mkdir()
    colab = colab.replace("/content", str(content))
    cells = [IN_COLAB, colab, *cells_of(published, "ladder", "load", "sample"), CHECK]
    said = done(bin_folder / "python", "-c", RUN, *cells, cwd=content, path=bin_folder)
    assert "import os" in said and "not started" in said
    installed = done(bin_folder / "pip", "list", cwd=tmp_path)
    assert "jupyterlab" not in installed


@pytest.mark.skipif(not shutil.which("sh"), reason="there is no sh")
def test_binder(bin_folder, published):
    pip = bin_folder / "pip"
    done(pip, "install", "--quiet", "-r", "binder/requirements.txt", cwd=published)
    assert "Ready." in done("sh", "binder/postBuild", cwd=published, path=bin_folder)
    asked = done("sh", "binder/start", bin_folder / "minikv", "progress", cwd=published)
    assert "0 of 6 exercises passed" in asked


def python_312():
    """One that NumPy 2.5 and Triton 3.6 run on."""
    of_pyenv = sorted(Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python"))
    for name in (sys.executable, "python3.12", "python3.13", *of_pyenv):
        with suppress(OSError, subprocess.CalledProcessError):
            line = (
                "import sys, venv; print((3, 12) <= sys.version_info < (3, 14) and sys.executable)"
            )
            found = subprocess.check_output([name, "-c", line], text=True).strip()
            if found != "False":
                return found
    pytest.skip("needs Python 3.12 or newer beside this one: apt install python3.12-venv, or pyenv")


def test_the_versions_of_a_bare_machine_with_a_gpu(published, tmp_path):
    """`make gpu` needs nothing but these. Rehearsed at tiny sizes; what cannot run says so."""
    done(python_312(), "-m", "venv", tmp_path / "bare", cwd=tmp_path)
    python = tmp_path / "bare" / "bin" / "python"
    versions = [f"{name}=={version}" for name, version in BARE.items()]
    others = ["numba", "tqdm", "pytest", "hypothesis", "matplotlib"]
    others.append("psutil")  # without a GPU, `generate_batch` asks it how much memory there is
    # A machine's own constraints may ask for another torch.
    pip = ("env", f"PIP_CONSTRAINT={os.devnull}", python, "-m", "pip", "install", "--quiet")
    done(*pip, *versions, *others, cwd=tmp_path)
    out = tmp_path / "out"
    line = ("env", f"OUT={out}", python, "tests/gpu/run.py", "--seconds", "20000")
    done(*line, cwd=published)
    parts = json.loads((out / "gpu.json").read_text(encoding="utf-8"))["parts"]
    states = {name: part["state"] for name, part in parts.items()}
    assert states.pop("tests") == states.pop("transformers") == "passed"
    assert set(states) == {"kernels", "steps", "notebook"} and set(states.values()) == {"skipped"}
    for name in states:
        assert "Triton 3.6.0 cannot interpret" in parts[name]["rows"][-1]["skipped"]
    rows = parts["transformers"]["rows"]
    assert sum("tokens_per_s" in row for row in rows) == 4, rows
