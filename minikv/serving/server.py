"""An application behind an address, for as long as it is needed.

    with served(app) as (host, port): ...

It runs in a thread. At the end no new connection is taken, and requests under way get `drain`
seconds to end.
"""

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

try:
    import resource  # Windows has none
except ImportError:
    resource = None  # type: ignore[assignment]

LARGEST_HEAD = 2**16  # bytes of a request's head, of its trailers, or between two of its chunks
LARGEST_REST = 2**20  # bytes of a request that has its answer already
MOST_AHEAD = 100  # requests that a client may send before the first one has its answer


def files() -> int:
    """How many files this process may open, 2**16 at most. A connection is a file."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else 2**13
    return limit if 0 < limit < 2**16 else 2**16


class Connection(HttpToolsProtocol):
    """Ends if its client never asks, asks without end, or does not read: such clients would take
    all the files and the memory that a process may have.

    A connection waits for its client from its first moment until a request is there as a whole,
    and again when that has its answer; for `silence` seconds, whether nothing comes or a byte now
    and then. Uvicorn itself closes it after 5 s of silence behind an answer. If there are more
    than `most` connections, the one goes that has waited for its client the longest.
    """

    _unread: asyncio.TimerHandle | None = None
    _late: asyncio.TimerHandle | None = None  # set while it waits for its client
    _is_whole = False  # the newest request
    _num_head = 0  # bytes of a head, or of what stands between two pieces of a body
    _num_rest = 0  # bytes of a request that came after its answer

    def __init__(self, *arguments: Any, silence: float, most: int, **options: Any):
        super().__init__(*arguments, **options)
        self.silence, self.most = silence, most

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Otherwise a stream's first event would wait until the client has acknowledged the head of
        # the answer (Nagle's algorithm), which takes 40 ms on a connection that was used before.
        # asyncio does this only for sockets that were made with a protocol's number.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait_for_client()
        if len(self.connections) > self.most:
            waiting = {one: one._late for one in cast(set[Connection], self.connections)}
            late = {one: timer.when() for one, timer in waiting.items() if timer is not None}
            min(late, key=late.__getitem__)._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # ── What the client sends ─────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        self._num_head += len(data)
        if self._has_answer and not self._is_whole:
            self._num_rest += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_rest > LARGEST_REST or len(self.pipeline) > MOST_AHEAD:
            self._give_up()
        elif self._num_head > LARGEST_HEAD:  # the parser keeps heads of any length
            self.send_400_response(f"The head has more than {LARGEST_HEAD} bytes.")
        else:
            self._wait_for_client()

    def on_message_begin(self) -> None:
        self._is_whole, self._num_rest = False, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_head = 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self._send_without_chunks()

    def on_body(self, body: bytes) -> None:
        self._num_head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_whole, self._num_head = True, 0
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_client()

    @property
    def _has_answer(self) -> bool:
        """Whether the newest request has one, as a whole."""
        return self.cycle is not None and self.cycle.response_complete

    def _wait_for_client(self) -> None:
        """Begin to, unless it is the client that waits. What it sends ahead of an answer is not
        read, and has time."""
        is_asked = self.pipeline or (self._is_whole and not self._has_answer)
        if self._late is None and not is_asked:
            self._late = self.loop.call_later(self.silence, self._too_late)

    def _too_late(self) -> None:
        if self.pipeline:  # the rest is read when it is its turn
            self._late = None
            return
        is_closing = self.transport.is_closing()  # but the client does not read the last answer
        if is_closing or self.cycle is None or self.cycle.response_started:
            self._give_up()
        else:
            self.send_400_response(f"The request did not come within {self.silence:.0f} s.", 408)

    def _give_up(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self.transport.abort()

    def send_400_response(self, msg: str, status: int = 400) -> None:
        """If an answer is under way, it just ends."""
        if self.cycle is not None and self.cycle.response_started and not self._has_answer:
            return self._give_up()
        head = STATUS_LINE[status] + b"content-type: text/plain\r\nconnection: close\r\n"
        head += b"content-length: %d\r\n\r\n" % len(msg)
        self.transport.write(head + msg.encode("ascii"))
        self.transport.close()
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(self.silence, self._give_up)

    # ── What it is sent ───────────────────────────────────────────────────────

    def _send_without_chunks(self) -> None:
        """HTTP/1.0 knows no chunks: an answer without a length ends with the connection."""
        cycle = self.cycle
        send, cycle.chunked_encoding = cycle.send, False

        async def plain(message: Message) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(cast(Any, message))

        cycle.send = plain  # type: ignore[method-assign, assignment]

    def pause_writing(self) -> None:
        """The client has not read 64 KiB, and the application must wait for it."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.silence, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def shutdown(self) -> None:
        """The server ends: those who only look need not be waited for."""
        super().shutdown()
        if self.scope is not None and self.scope["path"] == "/events":
            self.transport.close()


@contextmanager
def served(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, drain: int = 30, silence: float = 60.0,
    most: int | None = None,
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Serve until the `with` block ends; yields the address, with the port that the system has
    chosen if `port` is 0. silence: seconds that a client may take to ask for something, or to read
    what was sent. most: connections at a time; by default, three quarters of the files that the
    process may open. Raises OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    protocol = partial(Connection, silence=silence, most=most or files() * 3 // 4)
    config = uvicorn.Config(
        app, http=cast(Any, protocol), ws="none", lifespan="off", access_log=False,
        log_config=None, log_level="critical", timeout_graceful_shutdown=drain,
        server_header=False, loop="asyncio",
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, args=([listening],), name="http", daemon=True)
    # Else all requests wait now and then for 0.1 s, while Python looks for garbage among torch's
    # 200,000 objects. What others have set apart stays so behind the end.
    is_first = gc.get_freeze_count() == 0
    if is_first:
        gc.freeze()
    thread.start()
    try:
        yield host, listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        if is_first:
            gc.unfreeze()
