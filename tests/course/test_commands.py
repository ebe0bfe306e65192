"""`python -m minikv` as a program."""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from thorough import thorough_after
from waiting import PATIENCE

from minikv import program
from minikv.__main__ import run
from minikv.course.commands import COMMANDS

ROOT = Path(__file__).parents[2]
# Says when the exercise's process has been started, which then runs without end.
INTERRUPTED = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
from minikv.__main__ import run
from minikv.course.judge import process
check = process.run
def started(*arguments):
    print("running", flush=True)
    return check(*arguments)
process.run = started
sys.exit(run(["check", "04.2"]))
"""


def start(*arguments):
    command = [sys.executable, "-m", "minikv", *arguments]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True)


def test_alone_it_says_where_you_stand_and_what_comes_next(exercises, capsys):
    assert run([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    following = re.match(r"\d+ of \d+ exercises passed\. Next: (\d\d\.\d+) ", out)[1]
    assert f"python -m minikv check {following}\n" in out
    assert all(re.search(rf"\n  {name}\s", out) for name in COMMANDS)


def test_a_mistyped_command_names_the_nearest(capsys):
    assert run(["chek", "04.2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith('There is no command "chek". Did you mean check?')


@pytest.mark.parametrize(
    "arguments",
    [
        "", "--help", "foo", "check 99", "check 04.2", "hint 10.6", "why 04.2", "progress", "parts",
        "diff 05.1", "generate x --top-p 7",
        *(f"{name} --help" for name in COMMANDS),
    ],
)  # fmt: skip
def test_every_line_fits_eighty_columns(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    monkeypatch.setenv("MINIKV_EXERCISES", str(tmp_path / "exercises"))
    with contextlib.suppress(SystemExit):
        run(arguments.split())
    said = "".join(capsys.readouterr())
    assert said and [line for line in said.splitlines() if len(line) > 80] == []


@pytest.mark.thorough
def test_control_c_ends_a_command_without_a_trace(tmp_path):
    """While it runs: a terminal sends the signal to the command and to its children."""
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    file = tmp_path / "exercises/ch04_paged_blocks.py"
    text, count = re.subn(
        r'raise NotImplementedError\("Exercise 04.2[^\n]*', "while True: pass", file.read_text()
    )
    assert count == 1
    file.write_text(text)
    command = [sys.executable, "-c", INTERRUPTED]
    environment = os.environ | {"MINIKV_EXERCISES": str(tmp_path / "exercises")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "running\n"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "\nEnded by Control-C.\n")


def test_control_c_ends_a_command_that_still_imports(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('torch', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "minikv", "progress"], stdout=-1, stderr=-1, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout.readline() == "torch\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("argument", "folder", "safe", "handler", "leaves", "ends"),
    [
        ("-m", ROOT.parent, False, signal.default_int_handler, 1, 1),
        ("-m", ROOT, False, signal.default_int_handler, 0, 1),
        ("-m", "/", True, signal.SIG_IGN, 0, 0),
        ("/bin/minikv", "/", False, signal.default_int_handler, 0, 1),
        ("/bin/pytest", "/", False, signal.default_int_handler, 0, 0),
    ],
)
def test_what_a_program_changes(argument, folder, safe, handler, leaves, ends, monkeypatch):
    """Whether the folder leaves the path, and whether Control-C ends it at once."""
    path, told = [str(folder), "/lib"], []
    flags = SimpleNamespace(safe_path=safe)
    for name, value in dict(argv=[argument, "check"], path=path.copy(), flags=flags).items():
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(signal, "getsignal", {signal.SIGINT: handler}.get)
    monkeypatch.setattr(signal, "signal", lambda *both: told.append(both))
    exec(Path(program.__file__).read_text(), {"__file__": program.__file__})
    assert sys.path == path[leaves:]
    assert told == [(signal.SIGINT, signal.SIG_DFL)] * ends


@pytest.mark.thorough
@pytest.mark.again
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_our_characters_is_answered(encoding, tmp_path):
    """In a folder with files that are named as what torch imports."""
    for name in ("random", "numpy", "queue", "token", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the reader')")
    done = subprocess.run(
        [sys.executable, "-m", "minikv", "check", "99"], capture_output=True, cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert done.returncode == 2 and b"there are exercises in chapters" in done.stderr
    with io.TextIOWrapper(io.BytesIO(), encoding=encoding) as stream:
        sys.stdout, before = stream, sys.stdout
        try:
            assert run(["--version"]) is None
        except SystemExit:
            print("✓ 1 · é → ✗ 文")
        finally:
            sys.stdout = before
        stream.flush()
        said = stream.buffer.getvalue().decode(encoding)
    assert "+ 1" in said and "-> x ?" in said


@pytest.mark.parametrize("arguments", thorough_after(0, ["progress", "--help"]))
def test_a_pipe_that_is_closed_early_is_no_error(arguments):
    """As `| head` does."""
    process = start(arguments)
    process.stdout.close()
    assert process.wait(PATIENCE) == 0
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


@pytest.mark.parametrize("arguments, status, said", thorough_after(1, [
    ("generate def --max-tokens 2", 0, ["def"]),
    ("bench decode --repeats 1", 2, ['needs transformers: pip install "minikv[course]"']),
    ("serve --help", 0, ["--api-key", "--replicas"]),
    ("bench paging --repeats 1 --requests 20 --block-sizes 16 --pools 50", 0, ["per block"]),
]))  # fmt: skip
def test_the_engine_alone(arguments, status, said):
    """`pip install minikv` brings nothing of what only the course needs."""
    command = [sys.executable, "-c", WITHOUT_THE_COURSE, f"{NOT_THERE} IPython jupyter_client"]
    done = subprocess.run([*command, *arguments.split()], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert all(one in done.stdout + done.stderr for one in said)
    assert "Traceback" not in done.stderr
