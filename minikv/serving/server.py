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
from threading import Thread

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGEST_HEAD = 2**16  # bytes of a request's head
SILENCE = 60.0  # seconds in which a client must ask for something, or read what was sent


class Connection(HttpToolsProtocol):
    """Ends if its client never asks, asks without end, or does not read: such clients would take
    all the files and the memory that a process may have."""

    _unread: asyncio.TimerHandle | None = None
    _num_head = 0  # bytes of a head that has not ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Otherwise a stream's first event would wait until the client has acknowledged the head of
        # the answer (Nagle's algorithm), which takes 40 ms on a connection that was used before.
        # asyncio does this only for sockets that were made with a protocol's number.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.loop.call_later(SILENCE, self._close_if_silent)

    def data_received(self, data: bytes) -> None:
        self._num_head += len(data)
        super().data_received(data)
        # The parser keeps heads of any length.
        if self._num_head > LARGEST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head has more than {LARGEST_HEAD} bytes.")

    def on_headers_complete(self) -> None:
        self._num_head = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        """The client has not read 64 KiB, and the application must wait for it."""
        super().pause_writing()
        self._unread = self.loop.call_later(SILENCE, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def shutdown(self) -> None:
        """The server ends: those who only look need not be waited for."""
        super().shutdown()
        if self.scope is not None and self.scope["path"] == "/events":
            self.transport.close()

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()


@contextmanager
def served(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, drain: int = 30
) -> Iterator[tuple[str, int]]:
    """Serve until the `with` block ends; yields the address, with the port that the system has
    chosen if `port` is 0. Raises OSError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", access_log=False, log_config=None,
        log_level="critical", timeout_graceful_shutdown=drain, server_header=False,
        loop="asyncio",
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, args=([listening],), name="http", daemon=True)
    # Else all requests wait now and then for 0.1 s, while Python looks for garbage among torch's
    # 200,000 objects.
    gc.freeze()
    thread.start()
    try:
        yield host, listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        gc.unfreeze()
