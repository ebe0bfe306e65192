"""The clients of `bench server`: many requests at once, in a process of their own, so that they
hold up no thread of the server. It reads what to ask from its input, and writes what it got.

Only the standard library: a client of another kind would take more of the processor than the
server does.
"""

import asyncio
import json
import sys
from time import monotonic
from typing import Any


async def ask(reader: Any, writer: Any, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed completion: when it was asked, when pieces came, and the answer's end."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    asked = monotonic()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    is_well = b" 200 " in await reader.readuntil(b"\r\n\r\n")
    times: list[float] = []
    got = b""
    while is_well and not got.endswith(b"0\r\n\r\n"):  # the end of a chunked body
        got += await reader.read(2**16)
        times.append(monotonic())
    lines = [line[6:] for line in got.split(b"\n") if line.startswith(b"data: {")]
    usage = [json.loads(line).get("usage") for line in lines[-1:]]
    num_tokens = usage[0]["completion_tokens"] if usage and usage[0] else 0
    return {"asked": asked, "times": times, "num_tokens": num_tokens}


async def client(host: str, port: int, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One after the other, over one connection."""
    reader, writer = await asyncio.open_connection(host, port)
    found = [await ask(reader, writer, body) for body in bodies]
    writer.close()
    return found


async def ask_all(
    host: str, port: int, clients: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    found = await asyncio.gather(*(client(host, port, bodies) for bodies in clients))
    return [answer for answers in found for answer in answers]


if __name__ == "__main__":
    json.dump(asyncio.run(ask_all(**json.load(sys.stdin))), sys.stdout)
