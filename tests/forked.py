"""Workers, kernels of notebooks and judges are forked: copies import nothing, and share 300 MB.

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
from functools import partial, partialmethod
from pathlib import Path
from threading import Thread

import pytest

# The chapter about threads starts its kernel: torch asks for their number when it is imported.
STARTED = "09_cpu_kernels.ipynb"

to_server: socket.socket | None = None


class Kernels:
    """A plugin of pytest: hooks of a conftest are not called for what lies elsewhere."""

    def __init__(self, fork: bool, ray: bool):
        can_fork = sys.platform == "linux" and not shutil.which("nvidia-smi")  # or CUDA has begun
        self.fork, self.ray = fork and can_fork, ray

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
            mend = f"If it should say this: make notebooks CHAPTER={item.path.name[:2]}"
            report.longrepr = f"{report.longrepr}\n{place}. {mend}"
        return report


def start_server() -> None:
    """It ends with this process, which waits for it: its time is then counted as ours."""
    global to_server
    to_server, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"""import sys; sys.path[0] = {str(Path(__file__).parent)!r}
import forked; forked.serve({its.fileno()})"""
    with its:
        # -u, as a judge starts a player: what it prints must not wait in a buffer.
        server = subprocess.Popen([sys.executable, "-u", "-c", code], pass_fds=[its.fileno()])
    atexit.register(server.wait)
    atexit.register(server.terminate)


class Forked:
    """A process that is forked to do what `command` says, with what is asked of a
    `subprocess.Popen`. OSError, ValueError: there is no fork server; what it wrote says why."""

    def __init__(self, command: list[str], *, env=None, cwd=None, ray=True, **_):
        if to_server is None:
            start_server()
        (source, to), (of, sink) = os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = os.fdopen(to, "wb"), os.fdopen(of, "rb"), None
        self._line, line = socket.socketpair()
        theirs = [source, sink, to_server.fileno(), line.detach()]
        socket.send_fds(to_server, [pickle.dumps((command, env, cwd, ray))], theirs)
        for file in (source, sink, theirs[-1]):
            os.close(file)
        self.pid = int(self._line.recv(20))
        self._end = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return 0 if select.select([self._end], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return 0

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    kill = partialmethod(send_signal, signal.SIGKILL)


def start_worker(io, command: list[str], execmodel) -> None:
    """In place of `Popen2IOMaster.__init__` of execnet, which starts the workers of pytest."""
    io.popen = Forked(command)
    super(type(io), io).__init__(io.popen.stdin, io.popen.stdout, execmodel)


def serve(ours: int) -> None:
    """Fork whenever somebody asks, until nobody is left who can."""
    import preloaded  # noqa: F401

    asked = socket.socket(fileno=ours)
    signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))  # their time is ours
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (received := socket.recv_fds(asked, 1 << 18, 4))[0]:
        if os.fork() == 0:
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupted)
            return become(*pickle.loads(received[0]), *received[1])
        for file in received[1]:
            os.close(file)


def become(command, env, cwd, ray, source, sink, server, line) -> None:
    """Be what `command` would start, a module or a worker; without `ray`, one that has no Ray."""
    global to_server
    import preloaded

    to_server, asker = socket.socket(fileno=server), socket.socket(fileno=line)
    for number, file in enumerate((source, sink)):
        os.dup2(file, number)
        os.close(file)
    if "-m" not in command:
        asker.send(b"%d" % os.getpid())
        sys.modules["matplotlib"].use("agg")  # the fork server has that of notebooks
        return exec(eval(os.read(0, 1 << 16)), {"__name__": "__main__"})  # a line, from execnet
    os.setsid()  # it leads a group of its own, which signals are sent to
    asker.send(b"%d" % os.getpid())
    is_kernel, nothing = "ipykernel_launcher" in command, os.open(os.devnull, os.O_RDWR)
    for number in range(0 if is_kernel else 2, 3):
        os.dup2(nothing, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = preloaded.PATH
    if not ray:
        sys.modules["ray"] = None
    if is_kernel:  # it ends with who has asked; a judge does when its stdin ends
        Thread(target=lambda: (asker.recv(1), os._exit(1)), daemon=True).start()
    else:
        to_server.close()  # a reader's code may write into every open file
    sys.argv = command[command.index("-m") + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
