"""What the tests of the shared store have in common: a real server, and a bad line to it."""

import importlib.util
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from waiting import PATIENCE

from minikv.cluster.local_server import HOST, find_server

MISSING = (
    'the package valkey is missing: pip install "minikv[distributed]"'
    if importlib.util.find_spec("valkey") is None
    else "no valkey-server or redis-server: apt install redis-server"
    if find_server() is None
    else ""
)
GARBAGE = b"*-5\r\n", b"$9999999999\r\n", b":x\r\n", b"+OK\r\n", b"*2\r\n", b":7\r\n", b"\r\n"
needs_a_store = pytest.mark.skipif(bool(MISSING), reason=MISSING)


class Line:
    """A proxy in front of a server. Its `fault` can change at any time; it is for what comes back.

    none, delay: `seconds` before each piece. dribble: a byte at a time, a tenth of a second
    apart. deaf: nothing comes back. held: until `go` is set. cut: the connection ends in the middle
    of a piece. garbage: other bytes. http: an answer of a server of another kind.
    """

    def __init__(self, port):
        self.target, self.fault, self.seconds = port, "none", 0.0
        self.num_sent, self.go = 0, threading.Event()  # bytes that went to the server
        self.rng, self.sockets = random.Random(0), []
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self._start(self._accept)

    def url(self, server):
        return server.url.replace(f":{server.port}", f":{self.port}")

    def _start(self, work, *arguments):
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                ours = self.listener.accept()[0]
                self.sockets.append(ours)
                try:
                    server = socket.create_connection((HOST, self.target))
                except OSError:
                    _end(ours)
                    continue
                self.sockets.append(server)
                self._start(self._carry, ours, server, False)
                self._start(self._carry, server, ours, True)

    def _carry(self, source, target, back):
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if back:
                    self._spoil(piece, target)
                else:
                    self.num_sent += len(piece)
                    target.sendall(piece)
        _end(source)
        _end(target)

    def _spoil(self, piece, target):
        fault = self.fault
        if fault == "delay":
            time.sleep(self.seconds)
        elif fault == "held":
            assert self.go.wait(PATIENCE)
        elif fault == "dribble":
            for index in range(len(piece)):
                target.sendall(piece[index : index + 1])
                time.sleep(0.1)
            return
        elif fault == "cut":
            target.sendall(piece[: len(piece) // 2])
            raise OSError
        elif fault == "garbage":
            piece = self.rng.choice([*GARBAGE, self.rng.randbytes(60)])
        elif fault == "http":
            piece = b"HTTP/1.1 400 Bad Request\r\n\r\n"
        if fault != "deaf":
            target.sendall(piece)

    def close(self):
        _end(self.listener)
        for one in self.sockets:
            _end(one)


def _end(one):
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@contextmanager
def line_to(server):
    line = Line(server.port)
    try:
        yield line
    finally:
        line.close()
