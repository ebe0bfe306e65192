"""What a reader's code starts, takes and writes ends with its check."""

import errno
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from four_ways import text_with
from thorough import thorough_after
from waiting import until

from minikv.course import lab
from minikv.course.exercise_data.manifest import find
from minikv.course.judge import containment, namespaces, process

ONE = find("04.1")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can limit this")


@pytest.fixture
def check(exercises, monkeypatch):
    """`check(code)`: the report of a file that runs `code` when it is imported."""
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "4")

    def run(code):
        sources = {"": code, "BlockPool.allocate": "def allocate(self):\n    return 0"}
        (exercises / ONE.chapter.file_name).write_text(text_with(ONE, sources))
        return lab.check(ONE.id)

    return run


@LINUX
@pytest.mark.parametrize("leave_group", thorough_after(1, [True, False]))
def test_processes_that_are_left_behind_are_ended(check, tmp_path, monkeypatch, leave_group):
    """Each holds the pipe open to read it: with the last of them goes its last reader."""
    monkeypatch.setenv("MINIKV_WITHOUT", "landlock")  # which lets nobody read it
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"""
import os, time
os.open({str(pipe)!r}, os.O_RDONLY | os.O_NONBLOCK)
for _ in range(20):
    if os.fork() == 0:
        if {leave_group}:
            os.setsid()
        time.sleep(300)
        os._exit(0)
print("started")
"""
    report = check(code)
    assert report.printed == "started\n", report.text()

    def nobody_reads():
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            return error.errno == errno.ENXIO

    until(nobody_reads)  # the children would sleep for longer


@pytest.mark.thorough
@LINUX
def test_a_flood_of_processes_is_stopped(check):
    report = check(
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(60)\n"
        "        os._exit(0)\ntime.sleep(60)"
    )
    assert f"more than {containment.PROCESS_LIMIT} processes" in report.text()


def start_processes(most):
    """For a process that stands apart: raises OSError when it can start no more."""
    for _ in range(most):
        if os.fork() == 0:
            os.setsid()
            signal.pause()
            os._exit(0)


def refused_one(most):
    """Threads count, too, and take less time to start."""
    for _ in range(300):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    with pytest.raises(BlockingIOError):
        start_processes(most)


@LINUX
@pytest.mark.skipif(not namespaces.limits_tasks(), reason="Linux 6.14 brought this limit")
@pytest.mark.skipif(not namespaces.allowed(), reason="no namespaces here")
@pytest.mark.parametrize("then", thorough_after(1, [start_processes, refused_one]))
def test_processes_that_leave_their_group_run_into_a_limit(monkeypatch, then):
    monkeypatch.setattr(namespaces, "MOST_TASKS", 310)  # Linux reserves 300
    assert namespaces.attempted(lambda: namespaces.stand_apart() and then(20))


@LINUX
@pytest.mark.thorough
def test_memory_is_counted_over_all_processes(check, monkeypatch):
    """That it ends a check; that what breaks another limit ends it, the flood above shows."""
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "60")
    report = check(
        "import mmap, os, time\npage = bytes(1 << 20)\nfor _ in range(3):\n"
        "    if os.fork() == 0:\n        taken = mmap.mmap(-1, 2 << 30)\n"
        "        for _ in range(2 << 10):\n            taken.write(page)\n"
        "        time.sleep(60)\n        os._exit(0)\n"
        "time.sleep(60)"
    )
    assert "GiB of memory" in report.text()


@LINUX
@pytest.mark.thorough
@pytest.mark.parametrize(
    "evade",
    ["while True:\n    pass", "if os.fork():\n    os.wait()\nwhile True:\n    pass"],
    ids=["itself", "in a child"],
)
def test_code_that_does_not_hear_of_the_processors_limit_is_stopped(check, monkeypatch, evade):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "1")
    deaf = "import os, signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    assert "stopped: used 1 s of processor time" in check(deaf + evade).text()


@LINUX
def test_code_that_evades_the_clock_is_stopped(exercises):
    stop = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    sources = {"": stop, "BlockPool.allocate": "def allocate(self):\n    return 0"}
    (exercises / ONE.chapter.file_name).write_text(text_with(ONE, sources))
    [line] = process.run(ONE, far=1).lines
    assert line.what.startswith("not finished after 1 s")


@LINUX
def test_the_judges_memory_has_a_limit(check):
    check("")
    limits = Path(f"/proc/{process._starter.pid}/limits").read_text()
    assert re.search(r"^Max data size +[0-9]+ ", limits, re.MULTILINE), limits


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
        signal.pause()
        os._exit(0)
    try:
        assert pid in containment.descendants(os.getpid())
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@LINUX
@pytest.mark.parametrize("shared", thorough_after(1, [True, False]))
def test_a_page_that_processes_share_counts_once(monkeypatch, shared):
    """Three processes with 64 MB each, or with the same 64 MB; the limit is 128."""
    size = 64 << 20
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
                signal.pause()
                os._exit(0)
            pids.append(pid)
        for _ in pids:
            os.read(ready, 1)
        before = sum(map(containment._shares, pids)) - (size if shared else 3 * size)
        monkeypatch.setattr(containment, "MEMORY_LIMIT", before + 2 * size - (1 << 30))
        found = containment.excess(pids, "/nowhere")
        assert found is None if shared else "GiB of memory" in found
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        ours.close()


@pytest.mark.thorough
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

    def is_gone():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True

    try:
        until(is_gone)
    except AssertionError:
        os.killpg(group, signal.SIGKILL)
        raise
