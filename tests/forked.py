"""Workers of pytest, kernels of notebooks and judges, forked: to import torch, transformers and
matplotlib takes a process longer than most tests compute, and 300 MB, which copies share.

    pytest ──asks──> fork server ──forks──> worker ──asks──> the same for kernels and judges

The fork server is what `preloaded.py` makes it. It has one thread, so it can be copied.
"""

import atexit
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

# The chapter about threads starts its kernel: torch asks the environment for their number when it
# is imported.
STARTED = "09_cpu_kernels.ipynb"
# What CUDA has begun in a process cannot be copied.
FORKS = sys.platform == "linux" and shutil.which("nvidia-smi") is None

address = ""  # of the fork server, once there is one


class Kernels:
    """A plugin of pytest: hooks of a conftest are not called for what lies elsewhere."""

    def __init__(self, fork: bool, ray: bool):
        self.fork, self.ray = fork and FORKS, ray

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self):
        """From now on, workers are forked."""
        if self.fork:
            from execnet import gateway_io

            gateway_io.Popen2IOMaster.__init__ = start_worker

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        with pytest.MonkeyPatch.context() as patch:
            if item.path.name == STARTED:
                patch.delenv("OMP_NUM_THREADS", raising=False)
            elif item.path.suffix == ".ipynb" and self.fork:
                where = "jupyter_client.provisioning.local_provisioner.launch_kernel"
                patch.setattr(where, partial(Forked, ray=self.ray))
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        """Of a cell that fails, nbval tells a number; its id can be found in the file."""
        report = yield
        if report.failed and hasattr(item, "cell"):
            place = f'{item.path.name}, the cell with "id": "{item.cell.get("id")}"'
            mend = f"make notebooks CHAPTER={item.path.name[:2]}"
            report.longrepr = f"{report.longrepr}\n{place}. If it should say this: {mend}"
        return report


# ── Who asks ──────────────────────────────────────────────────────────────────


def start_server() -> None:
    """It ends with this process, which waits for it: its time is then counted as ours."""
    global address
    address = f"\0minikv-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive, hold = os.pipe()  # nothing is ever written: its end is that of this process
    code = f"""import sys; sys.path[0] = {str(Path(__file__).parent)!r}
import forked; forked.serve({listener.fileno()}, {alive}, {address!r})"""
    server = subprocess.Popen([sys.executable, "-c", code], pass_fds=(listener.fileno(), alive))
    atexit.register(server.wait)
    atexit.register(os.close, hold)
    listener.close()
    os.close(alive)


class Forked:
    """A process that is forked to do what `command` says, with what is asked of a
    `subprocess.Popen`."""

    stderr = None

    def __init__(
        self, command: list[str], *, stdin=None, stdout=None, env=None, cwd=None, ray=True, **_
    ):
        if not address:
            start_server()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address)
        theirs, self.stdin = pipe() if stdin == subprocess.PIPE else (nothing(), None)
        self.stdout, to_us = pipe() if stdout == subprocess.PIPE else (None, nothing("wb"))
        with theirs, to_us:
            socket.send_fds(self._line, [b"."], [theirs.fileno(), to_us.fileno()])
        self._line.sendall(pickle.dumps((command, env, cwd, ray)))
        self.pid = int(self._line.recv(20) or 0)
        assert self.pid, "the fork server has ended; what it wrote says why"
        self._end = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return 0 if select.select([self._end], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return 0

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def pipe():
    """Its ends, to read and to write."""
    ours, theirs = os.pipe()
    return open(ours, "rb", buffering=0), open(theirs, "wb", buffering=0)


def nothing(mode: str = "rb"):
    return open(os.devnull, mode)


def start_worker(io, command: list[str], execmodel) -> None:
    """In place of `Popen2IOMaster.__init__` of execnet, which starts the workers of pytest."""
    io.popen = Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    super(type(io), io).__init__(io.popen.stdin, io.popen.stdout, execmodel)


# ── The fork server, and what it forks ────────────────────────────────────────


def serve(listener_fd: int, alive: int, its_address: str) -> None:
    """Fork whenever somebody asks, until who has started this is gone."""
    global address
    address = its_address
    import preloaded  # noqa: F401

    listener = socket.socket(fileno=listener_fd)
    signal.signal(signal.SIGCHLD, bury)
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while alive not in select.select([listener, alive], [], [])[0]:
        line, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(alive)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupted)
            be_forked(line)
        line.close()


def bury(*_) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def be_forked(line: socket.socket) -> None:
    """Do what is asked for, and end."""
    _, streams, _, _ = socket.recv_fds(line, 1, 2)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with line.makefile("rb") as asked:
        command, *others = pickle.load(asked)
    status = 1
    try:
        if "-m" in command:
            os.setsid()  # it leads a group of its own, which signals are sent to
        line.sendall(b"%d" % os.getpid())
        become(line, command, *others)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def become(line, command: list[str], env: dict, cwd: str, ray: bool) -> None:
    """Be what this command would start: a module of Python's, or a worker of pytest. Without `ray`
    where Ray is not installed: its processes take half a minute to start, and 2 GB."""
    import matplotlib
    import preloaded

    if "-m" not in command:
        line.close()
        matplotlib.use("agg")  # the fork server has that of notebooks
        with open(0, "rb", buffering=0, closefd=False) as asked:
            exec(eval(asked.readline()), {"__name__": "__main__"})
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = preloaded.PATH
    if not ray:
        sys.modules["ray"] = None
    if "ipykernel_launcher" in command:
        Thread(target=end_with, args=[line], daemon=True).start()
    else:  # a judge ends when its stdin does
        line.close()
    module = command[command.index("-m") + 1 :]
    sys.argv = module
    runpy.run_module(module[0], run_name="__main__", alter_sys=True)


def end_with(line: socket.socket) -> None:
    """End when who has asked is gone."""
    line.recv(1)
    os._exit(1)
