"""The process in which a client of Mooncake runs: see `minikv.cluster.mooncake_store`.

Its standard input has pairs (name of a call, arguments), its standard output what the calls return.
Both are pickled, because both ends are ours. It imports nothing of ours, so that it starts fast. It
ends with its standard input, whatever the client is doing.
"""

import os
import pickle
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

FULL = -200  # Mooncake's NO_AVAILABLE_HANDLE
BUFFER = 64 << 20  # bytes for what is on its way; an entry must fit
SETUP = 3  # seconds for some round trips


class Client:
    def __init__(self, host: str, port: int):
        """Raises OSError if there is no master, or none that wants us."""
        # `setup` would ask for minutes whether there is a master.
        with socket.create_connection((host, port), 5.0) as one:
            ours = one.getsockname()[0]
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        # It waits half a minute for an answer that is lost, and our owner lets a client that is
        # still connecting go on. So the signal ends this process; the next call starts another.
        signal.alarm(SETUP)
        _check(self.store.setup(ours, "P2PHANDSHAKE", 0, BUFFER, "tcp", "", f"{host}:{port}"))
        signal.alarm(0)

    def contains(self, keys: list[str]) -> list[bool]:
        answers = self.store.batch_is_exist(keys)
        _check(min(answers))
        return [answer == 1 for answer in answers]

    def get(self, keys: list[str]) -> list[bytes | None]:
        found = [None if one is None else bytes(one) for one in self.store.batch_get_buffer(keys)]
        # A miss and a failure look the same.
        missing = [key for key, entry in zip(keys, found, strict=True) if entry is None]
        if missing and any(self.contains(missing)):
            raise OSError("an entry is there, but cannot be fetched")
        return found

    def put(self, keys: list[str], entries: list[bytes]) -> list[Any]:
        code = self.store.put_batch(keys, entries)
        if code == 0:
            return [True] * len(keys)
        if code != FULL:
            _check(code)
        refusal = OSError("there is no memory until the master has evicted something")
        return [True if is_there else refusal for is_there in self.contains(keys)]

    def remove(self, keys: list[str]) -> None:
        self.store.batch_remove(keys, True)  # though it was read just now


def _check(code: int) -> None:
    if code < 0:
        raise OSError(f"Mooncake's error {code}")


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is no answer
    questions: queue.SimpleQueue = queue.SimpleQueue()

    def say(answer: object) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    def work() -> None:
        try:
            client = Client(host, int(port))
        except (OSError, ImportError) as error:  # such as for a library of the system's
            say(error)
            os._exit(1)
        say("ready")
        while True:
            what, arguments = questions.get()
            try:
                say(getattr(client, what)(*arguments))
            except Exception as error:  # of the library, and perhaps none that can be pickled
                say(OSError(str(error)))

    threading.Thread(target=work, daemon=True).start()
    with suppress(EOFError):
        while True:
            questions.put(pickle.load(sys.stdin.buffer))
    os._exit(0)  # while the client is in a call, an orderly end would abort


if __name__ == "__main__":
    main()
