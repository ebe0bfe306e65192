"""The kernels of notebooks, forked: to import torch, matplotlib and transformers and to start a
judge takes a kernel longer than most notebooks compute.

    worker of pytest ──asks──> fork server ──forks──> kernel      one at a time, one per notebook
                                    │                   │
                                    └──starts──> judge <┘         one for all of them

The fork server is what `preloaded.py` makes it. It has one thread, so it can be copied.
"""

import multiprocessing
import os
import runpy
import sys
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from threading import Thread

import pytest

# The chapter about threads starts its kernel: torch asks the environment for their number when it
# is imported.
STARTED = "09_cpu_kernels.ipynb"


class Kernels:
    """A plugin of pytest: hooks of a conftest are not called for what lies elsewhere."""

    def __init__(self, fork: bool, ray: bool):
        self.fork, self.ray = fork and sys.platform == "linux", ray

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


class Forked:
    """The process of a kernel, with what jupyter_client asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], *, env: dict, cwd: str, ray: bool, **_):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            patch.setenv(
                "MPLBACKEND", env.get("MPLBACKEND", "module://matplotlib_inline.backend_inline")
            )
            forkserver.set_forkserver_preload(["preloaded"])
            forkserver.ensure_running()
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        self._process = context.Process(target=become, args=(command, env, cwd, ray, there))
        self._process.start()
        there.close()
        here.recv()  # it leads a group of its own, which signals are sent to
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def become(command: list[str], env: dict, cwd: str, ray: bool, ready) -> None:
    """Be what this command would start; without `ray`, which is slow to start, if there is none."""
    import preloaded

    os.setsid()
    ready.send(True)
    ready.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = preloaded.PATH
    if not ray:
        sys.modules["ray"] = None
    Thread(target=_end_with_parent, daemon=True).start()
    module = command[command.index("-m") + 1 :]
    sys.argv = module
    runpy.run_module(module[0], run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
