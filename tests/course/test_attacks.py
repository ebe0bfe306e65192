"""What a student with a weekend would try, against each set of fences. (`test_marks` has what they
would try on the mark itself.)

One file makes all attempts to reach something, and says which got through. Those must be what
`reach` announces for these fences, no more and no less; without any fence all of them get through,
so each is known to be an attempt.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from four_ways import right, text_with
from thorough import thorough_after

from minikv.course.exercise_data.manifest import find
from minikv.course.grading import grade
from minikv.course.judge import containment, namespaces, process, refused_calls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has these fences")
ONE = find("04.1")
WRONG = {"BlockPool.allocate": "def allocate(self):\n    return 0"}
LEVELS = {  # the fences that are left out
    "every fence": "",
    "no namespaces": "namespaces",
    "namespaces alone": "landlock filter",
    "Landlock alone": "namespaces filter",
    "no fence": "namespaces landlock filter",
}

ATTEMPTS = {  # at what: name, and a line that raises OSError where it is stopped
    "read your files and the answers": {
        "a file": "open(FOLDER + '/keep').read()",
        "a folder": "os.listdir(FOLDER)",
    },
    "write to files": {
        "append": "open(FOLDER + '/append', 'a').write('x')",
        "truncate by name": "os.truncate(FOLDER + '/truncate', 1)",
        "empty by opening": "os.open(FOLDER + '/empty', os.O_RDONLY | os.O_TRUNC)",
        "remove": "os.remove(FOLDER + '/remove')",
        "move": "os.rename(FOLDER + '/move', FOLDER + '/moved')",
        "link": "os.symlink('/etc/passwd', FOLDER + '/link')",
        "folder": "os.mkdir(FOLDER + '/made')",
        "cache of kernels": "os.makedirs(FOLDER + '/.triton/cache')",
        "beside scratch": "os.mkdir(os.path.dirname(SCRATCH) + '/made')",
        "own exercise": "open(__file__, 'a').write('x')",
    },
    "change the modes and times of files": {
        "chmod": "os.chmod(FOLDER + '/keep', 0o777)",
        "fchmod": "os.fchmod(os.open(FOLDER + '/keep', os.O_RDONLY), 0o666)",
        "utime": "os.utime(FOLDER + '/keep', (1, 1))",
        "chown": "os.chown(FOLDER + '/keep', os.getuid(), os.getgid())",
    },
    "look into other processes": {
        "environment": "open(f'/proc/{PID}/environ').read()",
        "open files": "os.readlink(f'/proc/{PID}/fd/0')",
    },
    "end other processes": {
        "kill": "os.kill(PID, signal.SIGURG)",
        "kill a group": "os.killpg(PID, signal.SIGURG)",
        "queue a signal": "call('sigqueue', PID, signal.SIGURG, None)",
    },
    "set limits on other processes": {
        "prlimit": "resource.prlimit(PID, resource.RLIMIT_NOFILE, (9, 9))",
        "prlimit above": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))",
    },
    "use the network": {
        "TCP": "socket.create_connection(('127.0.0.1', PORT), 2)",
        "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    },
    "talk to Unix sockets": {
        "connect": "socket.socket(socket.AF_UNIX).connect(STREAM)",
        "send from a pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', MAILBOX)",
    },
}
FILLS = {  # the disk, a MiB at a time, in files with names and without
    "files": "open(f'{SCRATCH}/{i >> 6}', 'ab').write(page)",
    "files without a name": "(kept.append(tempfile.TemporaryFile()), kept[-1].write(page))",
}
HEAD = """
import ctypes, os, resource, signal, socket, tempfile
SCRATCH, reached = tempfile.gettempdir(), []
def call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
"""
# Root's processes are out of reach for who has no rights of root, as everybody else's are not.
VICTIM = """
import sys
from minikv.course.judge import containment
containment.give_up_rights()
print(flush=True)
sys.stdin.read()
"""
VIOLENT = {
    "a daemon that writes later": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(2)
        open(FOLDER + "/later", "w")
    os._exit(0)""",
    "folders in folders": """
os.chdir(tempfile.gettempdir())
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")""",
    "a folder that nobody may open": "os.makedirs(tempfile.gettempdir() + '/a/b', 0)",
    "pipes in place of files": """
folder = os.path.dirname(tempfile.gettempdir())
for name in os.listdir(folder):
    try:
        os.remove(f"{folder}/{name}")
        os.mkfifo(f"{folder}/{name}")
    except OSError:
        pass""",
    "dead children": "for _ in range(500):\n    os.fork() or os._exit(0)\ntime.sleep(60)",
    "a timer": "signal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(60)",
    "no files may be opened": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "no modules": "sys.modules.clear()",
    "other packers": """
import json, pickle, struct
json.dumps = pickle.dumps = struct.pack = lambda *_, **__: b"passed" """,
    "a thread that goes on": "threading.Thread(target=time.sleep, args=(60,)).start()",
    "a flood of text": "for _ in range(40):\n    print('x' * 1_000_000)",
    "no standard files": "os.closerange(0, 3)",
    "its own filter": "import ctypes\nctypes.CDLL(None).prctl(22, 1, 0, 0, 0)",  # read, write, exit
    "no name for its memory": "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)",
}


@pytest.fixture
def level(request, monkeypatch):
    """Checks run inside these fences, from a starter that's started. Gives what `reach` says."""
    monkeypatch.setattr(process, "subprocess", subprocess)
    without = LEVELS[request.param]
    if "namespaces" not in without and not namespaces.allowed():
        pytest.skip("this system lets nobody have namespaces")
    monkeypatch.setenv("MINIKV_WITHOUT", without)
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "10")
    process._dismiss()
    yield request.param, *containment.reach()
    process._dismiss()


@pytest.fixture
def folder(tmp_path):
    """The owner's."""
    for name in ("append", "truncate", "empty", "remove", "move", "keep"):
        (tmp_path / name).write_text("the owner's")
        os.utime(tmp_path / name, (10**9, 10**9))
    return tmp_path


def seen(folder):
    """All that could have changed there."""
    return {
        path: (path.lstat().st_mode, *(() if path.is_dir() else path.lstat()[6:9]))  # size, times
        for path in folder.rglob("*")
    }


def check(code, parts=WRONG):
    return grade._report(grade.grade_file(ONE.id, text_with(ONE, {"": code, **parts}).encode()))


@pytest.mark.parametrize("level", thorough_after(0, LEVELS), indirect=True)
def test_what_gets_through_is_what_is_announced(level, folder):
    name, _, can = level
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM], stdin=-1, stdout=-1, start_new_session=True
    )
    victim.stdout.readline()
    shared = Path(f"/dev/shm/minikv-attack-{victim.pid}")
    with (
        victim,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as stream,
        tempfile.TemporaryDirectory(dir="/tmp") as short,  # a socket's name has 107 letters
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox,
    ):
        stream.bind(short + "/socket")
        stream.listen()
        mailbox.bind(short + "/mailbox")
        aims = {"FOLDER": str(folder), "PID": victim.pid, "PORT": server.getsockname()[1]}
        aims |= {"STREAM": short + "/socket", "MAILBOX": short + "/mailbox"}
        before = seen(folder)
        code = [HEAD, *(f"{aim} = {value!r}" for aim, value in aims.items())]
        for attempt, line in (pair for lines in ATTEMPTS.values() for pair in lines.items()):
            code.append(f"try:\n    {line}\n    reached.append({attempt!r})\nexcept OSError: pass")
        code.append(f"try:\n    open({str(shared)!r}, 'w')\nexcept OSError: pass")
        code.append("tempfile.TemporaryFile().close()\nprint('scratch', *reached, sep=';')")
        report = check("\n".join(code))
        scratch, *reached = report.printed.strip().split(";")
        victim.stdin.close()
    assert report.status == "failed" and scratch == "scratch", report.text()
    if name == "no fence":
        assert set(reached) == {one for lines in ATTEMPTS.values() for one in lines}
    got_through = {what for what, lines in ATTEMPTS.items() if {*reached} & {*lines}}
    assert got_through == {*can} - {"fill the disk"}, reached
    files = {"write to files", "change the modes and times of files"}
    assert (seen(folder) != before) == bool(files & set(can))
    assert shared.exists() == ("write to files" in can)
    shared.unlink(missing_ok=True)
    assert grade.grade_file(ONE.id, right(ONE).encode())["status"] == "passed", "the next one"


@pytest.mark.parametrize("kind", thorough_after(0, FILLS))
@pytest.mark.parametrize("level", ["no namespaces", "every fence"], indirect=True)
def test_a_disk_is_not_filled(level, kind):
    """In memory the system says that there is no room. On a disk nobody does, so it is watched."""
    lines = f"page, kept = bytes(1 << 20), []\nfor i in range(4096):\n    {FILLS[kind]}"
    # What is to end it is not that it may open so few files.
    most = "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
    most += "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
    report = check(HEAD + most + lines + "\nprint('4 GiB')")
    said = " ".join(line.what for line in report.lines if not line.ok)
    assert "No space left on device" in said or "MiB to the disk" in said, said


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["every fence", "no namespaces"], indirect=True)
def test_violence_ends_with_its_check(level, folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    os.mkdir(folder / "temporary")
    before = seen(folder)
    for name, code in VIOLENT.items():
        imports = "import os, resource, signal, sys, tempfile, threading, time"
        report = check(f"{imports}\nFOLDER = {str(folder)!r}\n{code}")
        assert report.status == "failed", f"{name}: {report.text()}"
        assert seen(folder) == before, name
    report = grade.grade_file(ONE.id, right(ONE).encode())
    assert report["status"] == "passed", report


REFUSED = {
    "a socket that sends anywhere": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "a raw pair": "socket.socketpair(type=socket.SOCK_RAW)",
    "a file that signals": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "another file that signals": "fcntl.ioctl(os.pipe()[0], 0x8901, bytes(4))",
    "more rights": "call('unshare', 1 << 28)",
    "tracing": "call('ptrace', 0, 0, None, None)",
    "memory without a name": "os.memfd_create('x')",
    "shared memory": "call('shmget', 0, 1 << 20, 0o1600)",
    "a process's file": "os.pidfd_open(os.getppid())",
    "priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "a signal": "os.kill(os.getppid(), 0)",
    "emptying what is read": "os.open(__file__, os.O_RDONLY | os.O_TRUNC)",
}
NEEDED = """
assert subprocess.run(["true"]).returncode == 0
thread = threading.Thread(target=time.sleep, args=(0.01,))
thread.start()
thread.join()
one, other = socket.socketpair()
one.sendall(b"x")
assert other.recv(1) == b"x"
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.kill(os.getpid(), 0)
with tempfile.TemporaryFile() as file:
    file.write(b"x")
    file.truncate(0)
"""


def test_the_filter_refuses_what_it_names_and_nothing_that_is_needed(tmp_path):
    if "talk to Unix sockets" not in containment.reach()[0]:
        pytest.skip("this system has no libseccomp")
    lines = "\n".join(
        f"try:\n    {line}\n    print({name!r})\nexcept PermissionError: pass"
        for name, line in REFUSED.items()
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import fcntl, os, runpy, subprocess, threading, time\n" + HEAD
        + f"runpy.run_path({refused_calls.__file__!r})['refuse'](signals=True)\n"
        + NEEDED + lines
    )  # fmt: skip
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert program.read_text()


def test_a_class_is_told_what_is_not_protected(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MINIKV_WITHOUT", LEVELS["no fence"])
    grade.announce()
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and all(what in said for what in [*ATTEMPTS, "fill the"])
    monkeypatch.setattr(containment, "reach", lambda: (list(ATTEMPTS), []))
    grade.announce()
    assert capsys.readouterr().err == ""
