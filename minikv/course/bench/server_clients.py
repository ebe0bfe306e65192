"""The clients of `bench server`: many requests at once, in a process of their own, so that they
hold up no thread of the server. It reads what to ask from its input, and writes what it got.

They share the server's cores, so they do little: sockets of the standard library, no event loop,
and what comes is only kept, with its time. It is read when an answer is whole.
"""

import json
import socket
import sys
from collections.abc import Iterator
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WELL, END = b"HTTP/1.1 200 ", b"\r\n0\r\n\r\n"  # of a chunked body


def client(
    link: socket.socket, bodies: list[dict[str, Any]], found: list[dict[str, Any]]
) -> Iterator[None]:
    """Streamed completions, one after the other, over one connection. Yields before each piece that
    must have come. Of each answer: when it was asked, when pieces came, and its end."""
    for body in bodies:
        data = json.dumps(body).encode()
        asked, times, got = monotonic(), list[float](), bytearray()
        link.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        is_open = True
        while is_open:
            yield
            piece = link.recv(2**16)
            got += piece
            if b"data: {" in piece:
                times.append(monotonic())
            is_open = piece != b"" and got.startswith(WELL) and not got.endswith(END)
        _, is_there, last = got.rpartition(b"data: {")
        usage = json.loads(b"{" + last.split(b"\n")[0]).get("usage") if is_there else None
        num_tokens = usage["completion_tokens"] if usage else 0
        found.append({"asked": asked, "times": times, "num_tokens": num_tokens})


def ask_all(host: str, port: int, clients: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    links = [socket.create_connection((host, port)) for _ in clients]
    with DefaultSelector() as selector:
        for link, bodies in zip(links, clients, strict=True):
            asking = client(link, bodies, found)
            next(asking)
            selector.register(link, EVENT_READ, asking)
        while selector.get_map():
            for key, _ in selector.select():
                if next(key.data, "over") == "over":
                    selector.unregister(key.fileobj)
    return found


if __name__ == "__main__":
    json.dump(ask_all(**json.load(sys.stdin)), sys.stdout)
