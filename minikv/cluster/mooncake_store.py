"""Mooncake's store as a shared store: a master that knows where entries are, and processes that
lend memory to it. Data goes from process to process, not through the master.

Mooncake's client runs in a process of its own (`minikv.cluster.mooncake_client`), one per thread. A
call of that library can take minutes and cannot be interrupted, and an interpreter that ends during
a call aborts. A separate process can be killed. The price is one more copy, through a pipe.

Transfers go over TCP, and processes find each other without a metadata server: a process that lends
memory must be started with `--metadata_server=P2PHANDSHAKE`. An entry that is there is not written
again. A full store takes no entries until the master has evicted some, after about a second.

Mooncake has no users, and each of its clients, ours too, listens on all addresses of its machine.
So it belongs in a network of its own.
"""

import os
import pickle
import select
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from minikv.tiers import MAGIC, Name

PORT = 50051  # of a master, unless the URL has another
PROGRAM = os.path.join(os.path.dirname(__file__), "mooncake_client.py")
MISSING = (
    "store: mooncake:// needs a package: pip install mooncake-transfer-engine-non-cuda, on Linux; "
    "it needs apt install libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 liburing2 libcurl4"
)


class MooncakeServer:
    """Raises ImportError without the package, and any exception for a URL that cannot be used."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        if not parts.hostname or "@" in parts.netloc or parts.path + parts.query not in ("", "/"):
            raise ValueError
        self.address = f"{parts.hostname}:{parts.port or PORT}"
        if find_spec("mooncake") is None:
            raise ImportError(MISSING)
        self.secrets: set[str] = set()  # Mooncake has no users

    def connect(self, timeout: float) -> "MooncakeConnection":
        return MooncakeConnection(self.address, timeout)


class MooncakeConnection:
    """One thread's process with a client of Mooncake, started when it is needed."""

    def __init__(self, address: str, timeout: float):
        self._address, self.timeout = address, timeout
        self._process: Any = None  # a Popen
        self._is_ready = False

    def contains(self, names: Seq[Name]) -> list[bool]:
        return self._ask("contains", _keys(names))

    def get(self, names: Seq[Name]) -> list[bytes | None]:
        return self._ask("get", _keys(names))

    def put(self, entries: Mapping[Name, bytes]) -> list[Any]:
        return self._ask("put", _keys(list(entries)), list(entries.values()))

    def remove(self, name: Name) -> None:
        self._ask("remove", _keys([name]))

    def cut(self) -> None:
        # A client that is still starting may go on: on a slow machine none would ever be ready. It
        # ends by itself if the master does not answer.
        if self._process is not None and self._is_ready:
            self._process.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: str, *arguments: Any) -> Any:
        process = self._running()
        pickle.dump((what, arguments), process.stdin)
        process.stdin.flush()
        return self._answer(process)

    def _running(self) -> Any:
        """The process, as soon as its client is connected."""
        if self._process is None or self._process.poll() is not None:
            self._is_ready = False
            self._process = subprocess.Popen(
                [sys.executable, "-P", PROGRAM, self._address],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Control-C is for us
            )  # fmt: skip
        if not self._is_ready:
            # Half of the time, so that the call itself has the other half.
            if not select.select([self._process.stdout], [], [], self.timeout / 2)[0]:
                raise TimeoutError("the client is still connecting")
            self._answer(self._process)
            self._is_ready = True
        return self._process

    def _answer(self, process: Any) -> Any:
        try:
            answer = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise TimeoutError("no answer in time, or the client has died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _keys(names: Seq[Name]) -> list[str]:
    return [f"{MAGIC.decode()}:{name.hex()}" for name in names]
