"""`python -m minikv` as a program."""

import re
import subprocess
import sys

import pytest

from minikv.course.commands import COMMANDS


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "minikv", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_alone_it_shows_what_there_is():
    process = start()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert all(re.search(rf"\n    {name}\s", out) for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["progress"]], ids=" ".join)
def test_a_pipe_that_is_closed_early_is_no_error(arguments):
    """As `| head` does."""
    process = start(*arguments)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


WITHOUT_THE_COURSE = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
from minikv.__main__ import run
sys.exit(run(sys.argv[2:]))
"""
NOT_THERE = "transformers matplotlib packaging jupyterlab ipywidgets ipykernel nbconvert nbformat"


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        ("generate def --max-tokens 2", 0, "def"),
        ("serve --help", 0, "--api-key"),
        ("serve-cluster --help", 0, "--workers"),
        ("bench paging --repeats 1", 0, "per block"),
        ("bench decode --repeats 1", 2, 'needs transformers: pip install "minikv[course]"'),
    ],
)
def test_the_engine_alone(arguments, status, said):
    """`pip install minikv` brings nothing of what only the course needs."""
    command = [sys.executable, "-c", WITHOUT_THE_COURSE, f"{NOT_THERE} IPython jupyter_client"]
    done = subprocess.run([*command, *arguments.split()], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr
