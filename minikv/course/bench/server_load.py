"""The clients of `bench server`: many requests at once, in a process of their own, so that they
hold up no thread of the server. It reads what to ask from its input, and writes what it got.

They share the server's cores, so they do little: sockets of the standard library, no event loop,
and what comes is only kept, with its time. It is read when all answers are there.
"""

import json
import socket
import sys
from collections.abc import Iterator
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WELL, END = b"HTTP/1.1 200 ", b"0\r\n\r\n"  # of a chunked body


class Client:
    """Streamed completions, one after the other, over one connection."""

    def __init__(self, address: tuple[str, int], bodies: list[dict[str, Any]]):
        self.socket = socket.create_connection(address)
        self.answers: list[tuple[float, list[float], bytearray]] = []
        self._bodies: Iterator[bytes] = iter([json.dumps(one).encode() for one in bodies])

    def ask(self) -> bool:
        """The next one; False if there is none."""
        if (data := next(self._bodies, None)) is None:
            return False
        self.answers.append((monotonic(), [], bytearray()))
        self.socket.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return True

    def take(self) -> bool:
        """A piece has come. False if it was the last one of the last answer."""
        _, times, got = self.answers[-1]
        piece = self.socket.recv(2**16)
        got += piece
        if b"data: {" in piece:
            times.append(monotonic())
        is_open = piece and got.startswith(WELL) and not got.endswith(END)
        return bool(is_open) or self.ask()


def told(asked: float, times: list[float], got: bytearray) -> dict[str, Any]:
    """Of an answer: when it was asked, when pieces came, and how many tokens it says it has."""
    lines = [line[6:] for line in got.split(b"\n") if line.startswith(b"data: {")]
    usage = [json.loads(line).get("usage") for line in lines[-1:]]
    num_tokens = usage[0]["completion_tokens"] if usage and usage[0] else 0
    return {"asked": asked, "times": times, "num_tokens": num_tokens}


def ask_all(host: str, port: int, clients: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    every = [Client((host, port), bodies) for bodies in clients]
    with DefaultSelector() as selector:
        for one in every:
            one.ask()
            selector.register(one.socket, EVENT_READ, one)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.take():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    return [told(*answer) for one in every for answer in one.answers]


if __name__ == "__main__":
    json.dump(ask_all(**json.load(sys.stdin)), sys.stdout)
