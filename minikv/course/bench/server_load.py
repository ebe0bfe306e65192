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


async def ask(host: str, port: int, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed completion: when it was asked, when pieces came, and the answer's end."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    asked = monotonic()
    writer.write(head.encode() + data)
    times: list[float] = []
    pieces: list[bytes] = []
    while piece := await reader.read(2**16):
        if b"data: " in piece or pieces:
            times.append(monotonic())
            pieces.append(piece)
    writer.close()
    # The last piece may have several events: the end of the text, the usage, [DONE].
    lines = [line[6:] for line in b"".join(pieces).split(b"\n") if line.startswith(b"data: {")]
    usage = [json.loads(line).get("usage") for line in lines[-1:]]
    num_tokens = usage[0]["completion_tokens"] if usage and usage[0] else 0
    return {"asked": asked, "times": times, "num_tokens": num_tokens}


async def ask_all(host: str, port: int, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(ask(host, port, body) for body in bodies))


if __name__ == "__main__":
    json.dump(asyncio.run(ask_all(**json.load(sys.stdin))), sys.stdout)
