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
