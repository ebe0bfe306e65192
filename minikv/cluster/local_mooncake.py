"""Mooncake's store on this machine alone, for as long as it is needed: a master, and a process that
lends it memory."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minikv.cluster.local_server import HOST, PATIENCE, free_port
from minikv.cluster.mooncake_store import MISSING
from minikv.errors import parse_bytes

# The shell waits for a line, or for the end of its standard input, which comes if we are killed.
KEEPER = """\
"$@" > /dev/null 2>&1 &
echo $!
read end
kill -9 $! 2> /dev/null
wait
"""


class LocalMooncake:
    """A store that was started here. `pid` is the master's, `lender` the other process's."""

    def __init__(self, port: int, pid: int, lender: int):
        self.port, self.pid, self.lender = port, pid, lender
        self.url = f"mooncake://{HOST}:{port}"


def find_programs() -> Path | None:
    """The folder that has Mooncake's programs; None without the package."""
    package = find_spec("mooncake")
    return None if package is None or package.origin is None else Path(package.origin).parent


@contextmanager
def local_mooncake(memory: int | str = "256 MiB", port: int = 0) -> Iterator[LocalMooncake]:
    """Start a master and a process that lends it `memory` bytes, and end them with the `with`
    block. They also end with this process, however that ends. The second one listens on all
    addresses of the machine, as every client of Mooncake does; no option changes that.

    Raises ImportError without the package, and RuntimeError if they do not start.
    """
    folder = find_programs()
    if folder is None:
        raise ImportError(MISSING)
    number, size = port or free_port(), parse_bytes("memory", memory)
    master = [
        f"--rpc_address={HOST}", f"--rpc_port={number}", f"--metrics_host={HOST}",
        f"--metrics_port={free_port()}", "--enable_metric_reporting=false",
    ]  # fmt: skip
    lender_port = free_port()
    lender = [
        f"--host={HOST}", f"--port={lender_port}", f"--master_server_address={HOST}:{number}",
        "--metadata_server=P2PHANDSHAKE", f"--global_segment_size={size} B",
    ]  # fmt: skip
    with (
        _program(folder / "mooncake_master", master, number) as pid,
        _program(folder / "mooncake_client", lender, lender_port) as lender_pid,
    ):
        yield LocalMooncake(number, pid, lender_pid)


@contextmanager
def _program(file: Path, options: list[str], port: int) -> Iterator[int]:
    """Its process id, once it listens on `port`."""
    keeper: Any = subprocess.Popen(
        ["sh", "-c", KEEPER, "minikv", str(file), *options], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,  # Control-C is for us
    )  # fmt: skip
    try:
        pid = int(keeper.stdout.readline())
        _wait_until_it_listens(file.name, port)
        yield pid
    finally:
        # A line, because a forked process may hold our end open, too. Waits for the shell.
        keeper.communicate("end\n")


def _wait_until_it_listens(name: str, port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{name} did not start within {PATIENCE:.0f} s")
