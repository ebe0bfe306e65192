"""What a reader's code starts, takes and writes ends with its check."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from four_ways import text_with

from minikv.course import lab
from minikv.course.exercises.manifest import chapter_of, find
from minikv.course.judge import containment

ONE = find("04.1")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can limit this")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """`check(code)`: the report of a file that runs `code` when it is imported."""
    folder = tmp_path / "exercises"
    folder.mkdir()
    monkeypatch.setenv("MINIKV_EXERCISES", str(folder))
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "4")

    def run(code):
        sources = {"": code, "BlockPool.allocate": "def allocate(self):\n    return 0"}
        (folder / chapter_of(ONE.id).file_name).write_text(text_with(ONE, sources))
        return lab.check(ONE.id)

    return run


@LINUX
@pytest.mark.parametrize("leave_group", [False, True])
def test_processes_that_are_left_behind_are_ended(check, leave_group):
    code = f"""
import os, time
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        if {leave_group}:
            os.setsid()
        time.sleep(300)
        os._exit(0)
    print(pid)
"""
    report = check(code)
    pids = [int(line) for line in report.printed.splitlines() if line.isdigit()]
    assert pids, report.text()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@LINUX
def test_a_flood_of_processes_is_stopped(check):
    report = check(
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(60)\n"
        "        os._exit(0)\ntime.sleep(60)"
    )
    assert f"more than {containment.PROCESS_LIMIT} processes" in report.text()


@LINUX
def test_memory_is_counted_over_all_processes(check, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "30")
    report = check(
        "import mmap, os, time\npage = bytes(1 << 20)\nfor _ in range(3):\n"
        "    if os.fork() == 0:\n        taken = mmap.mmap(-1, 2 << 30)\n"
        "        for _ in range(2 << 10):\n            taken.write(page)\n"
        "        time.sleep(60)\n        os._exit(0)\n"
        "time.sleep(60)"
    )
    assert "GiB of memory" in report.text()


@LINUX
@pytest.mark.parametrize(
    "evade",
    ["import faulthandler\nfaulthandler.cancel_dump_traceback_later()\nwhile True:\n    pass",
     "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"],
    ids=["without the watchdog", "asleep"],
)  # fmt: skip
def test_code_that_evades_the_clock_is_stopped(check, monkeypatch, evade):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "1")  # of which two and a half, and these, are waited
    monkeypatch.setattr("minikv.course.judge.process.LOAD_LIMIT", 2.0)
    began = time.monotonic()
    assert "stopped: not finished after" in check(evade).text()
    assert time.monotonic() - began < 60


def has_landlock():
    import ctypes

    return sys.platform == "linux" and (
        ctypes.CDLL(None).syscall(containment.CREATE_RULESET, None, 0, containment.VERSION)
        >= containment.TCP_SINCE
    )


@pytest.mark.skipif(not has_landlock(), reason="this system has no Landlock for files and TCP")
def test_nothing_is_written_elsewhere_and_nothing_is_sent(check, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        report = check(
            f"""
import os, socket, tempfile
for name, attempt in {{
    "write": lambda: open({str(tmp_path / "left")!r}, "w"),
    "course": lambda: open(os.path.join(os.path.dirname(__file__), "left"), "w"),
    "remove": lambda: os.remove(__file__),
    "connect": lambda: socket.create_connection(("127.0.0.1", {port}), 2),
    "scratch": lambda: tempfile.TemporaryFile(),
}}.items():
    try:
        attempt()
        print(name, "done")
    except OSError as error:
        print(name, "refused")
"""
        )
    said = dict(line.split() for line in report.printed.splitlines() if line.count(" ") == 1)
    assert said == {
        "write": "refused", "course": "refused", "remove": "refused", "connect": "refused",
        "scratch": "done",
    }, report.text()  # fmt: skip
    assert not (tmp_path / "left").exists()


@LINUX
def test_a_file_has_a_largest_size(check):
    report = check(
        "import tempfile\nwith tempfile.TemporaryFile() as file:\n"
        f"    for _ in range({containment.FILE_LIMIT >> 20} + 2):\n"
        "        file.write(bytes(1 << 20))"
    )
    assert "File too large" in report.text() or "SIGXFSZ" in report.text()


def test_a_long_message_is_cut(check):
    report = check("raise ValueError('x' * 20_000_000)")
    assert len(report.text()) < 20_000
    report = check("raise ValueError('x\\n' * 100_000)")
    assert len(report.text().splitlines()) < 100


def test_descendants_are_found():
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    try:
        assert pid in containment.descendants(os.getpid())
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@LINUX
@pytest.mark.parametrize("shared", [False, True])
def test_a_page_that_processes_share_counts_once(monkeypatch, shared):
    """Three processes with 200 MB each, or with the same 200 MB; the limit is 400."""
    size = 200 << 20
    ours = mmap.mmap(-1, size)
    if shared:
        ours.write(b"x" * size)
    pids = []
    ready, written = os.pipe()
    try:
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                taken = ours if shared else mmap.mmap(-1, size)
                taken.seek(0)
                taken.read() if shared else taken.write(b"x" * size)
                os.write(written, b".")
                time.sleep(60)
                os._exit(0)
            pids.append(pid)
        for _ in pids:
            os.read(ready, 1)
        before = sum(map(containment._shares, pids)) - (size if shared else 3 * size)
        monkeypatch.setattr(containment, "MEMORY_LIMIT", before + 2 * size - (1 << 30))
        assert (containment.excess(pids) is None) == shared
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        ours.close()


@LINUX
def test_the_starter_ends_with_a_kernel_that_is_killed(check, tmp_path):
    """So do all processes that it has started: none stays behind with a copy of torch."""
    check("")  # writes the file
    program = """
import os, signal
from minikv.course import lab
from minikv.course.judge import process
lab.check("04.1")
print(process._starter.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    group = int(killed.stdout.splitlines()[-1])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    pytest.fail(f"process group {group} is still there")
