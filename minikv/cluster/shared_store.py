"""A store of blocks that many engines share: a Valkey or Redis server, behind a small interface.

The URL names the server (`minikv.cluster.valkey_store` speaks to it). An entry's key is the version
of the entries' format and the block's name, so an entry of an older version is a miss. There is no
list of names: engines ask whether blocks are there (`contains`, one round trip for a whole prefix)
and may still miss them afterwards, because the server evicts. Memory, eviction, TLS, users and
their rights are the server's work; it should have `maxmemory` and `maxmemory-policy allkeys-lru`.

Whatever happens to the server, a call ends within `timeout` seconds per piece of 8 MiB, with a miss
in place of an error. After a failure a circuit breaker refuses calls at once. It tries again after
half a second, then after twice as long each time. Entries are not verified here, but by
`minikv.tiers.entry.unpack`. Its checksum finds damage, not malice: a client that may write to the
store can write wrong K and V, and a client that may list its keys can read its entries. Give no
tenant access to it. An engine's tenants are kept apart by the salt, which is part of every name: a
salt that cannot be guessed gives names that cannot be guessed.

K and V travel as they are stored, so `EngineConfig.kv_dtype` makes entries smaller, too.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from typing import TypeVar

from minikv.cluster.breaker import Breaker
from minikv.cluster.valkey_store import ValkeyConnection, ValkeyServer
from minikv.tiers import Name

log = logging.getLogger("minikv.cluster")
Answer = TypeVar("Answer")

PIECE = 8 << 20  # bytes that are sent or requested at a time
FORMS = "redis://host:6379/0, rediss:// for TLS, unix:///path/of/a/socket"


class SharedStore:
    """A LowerTier on a server. Each thread that uses it has a connection of its own."""

    def __init__(self, url: str, timeout: float = 1.0):
        """Does not connect yet. Raises ValueError for a URL that cannot be used, and ImportError
        without the package. The URL may hold a user and a password; neither gets into a message."""
        self.timeout, self.breaker, self.writes = timeout, Breaker(), Breaker()
        try:
            self._server = ValkeyServer(url)
        except ImportError:
            raise
        except Exception:  # its text may hold the password
            # "from None", for the same reason.
            raise ValueError(f"store: the URL cannot be used; give one like {FORMS}") from None
        self.address = self._server.address
        self._local = threading.local()
        self._connections: list[ValkeyConnection] = []
        self._is_closed = False
        self._entry_bytes = PIECE // 16  # the largest entry that was seen

    def __repr__(self) -> str:
        return f"SharedStore({self.address})"

    # ── What a tier does ──────────────────────────────────────────────────────

    def names(self) -> Iterable[Name]:
        """Empty: engines ask with `contains` what is there."""
        return ()

    def contains(self, names: Seq[Name]) -> list[bool]:
        """Whether each of these entries is there now, in one round trip."""

        def ask(connection: ValkeyConnection) -> list[bool]:
            answers = connection.contains(names)
            if len(answers) != len(names):
                raise ValueError("the answer to a question has another length")
            return answers

        return self._call(ask, [False] * len(names)) if names else []

    def get_many(self, names: Seq[Name]) -> list[bytes | None]:
        """The entries of these names, None for a name that is missing or cannot be fetched."""
        found: list[bytes | None] = []
        while len(found) < len(names):
            piece = names[len(found) :][: max(1, PIECE // self._entry_bytes)]

            def ask(connection: ValkeyConnection, piece: Seq[Name] = piece) -> list[bytes | None]:
                answers = connection.get(piece)
                if not isinstance(answers, list) or len(answers) != len(piece):
                    raise ValueError("the answer to a fetch has another length")
                if not all(one is None or isinstance(one, bytes) for one in answers):
                    raise ValueError("the answer to a fetch has something else than bytes")
                return answers

            answers: list[bytes | None] = self._call(ask, [])
            if not answers:
                break
            found += answers
            self._entry_bytes = max([self._entry_bytes, *(len(one) for one in answers if one)])
        return found + [None] * (len(names) - len(found))

    def put_many(self, entries: Mapping[Name, bytes]) -> list[Name]:
        """Write entries; returns the names of those that are not there afterwards."""
        gone: list[Name] = []
        for piece in _pieces(entries):

            def write(to: ValkeyConnection, piece: Mapping[Name, bytes] = piece) -> list[Name]:
                return self._refused(list(piece), to.put(piece))

            gone += self._call(write, list(piece)) if self.writes.allows() else list(piece)
        return gone

    def remove(self, name: Name) -> None:
        self._call(lambda connection: connection.remove(name), None)

    def close(self) -> None:
        """End all connections; from now on every call is a miss."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()

    # ── Calls that end ────────────────────────────────────────────────────────

    def _call(self, what: Callable[[ValkeyConnection], Answer], otherwise: Answer) -> Answer:
        """What `what(connection)` returns, within `timeout` seconds; `otherwise` if that fails or
        the breaker is open."""
        if self._is_closed or not self.breaker.allows():
            return otherwise
        connection = self._own_connection()
        connection.timeout = self.timeout
        # A socket's timeout begins anew with each byte that comes, so a timer cuts the connection.
        alarm = threading.Timer(self.timeout, connection.cut)
        alarm.daemon = True
        alarm.start()
        try:
            answer = what(connection)
        except Exception as error:  # of a library, for whatever a server may answer
            connection.cut()  # the rest of the answer must not be taken for the next one
            if self.breaker.failed() and not self._is_closed:
                log.warning("%s", self._safe(f"the store at {self.address} fails, and is left "
                                             f"alone for a while: {_text(error)}"))  # fmt: skip
            return otherwise
        finally:
            alarm.cancel()
        if self.breaker.worked():
            log.warning("the store at %s answers again", self.address)
        return answer

    def _refused(self, names: list[Name], answers: list) -> list[Name]:
        """The names that the server would not take, because it is full or may not be written to. It
        is then still read, but not written to for a while."""
        if len(answers) != len(names):
            raise ValueError("the answer to entries has another length")
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if not errors:
            self.writes.worked()
        elif self.writes.failed():
            log.warning("%s", self._safe(f"the store at {self.address} takes no entry, and is "
                                         f"only read for a while: {_text(errors[0])}"))  # fmt: skip
        return [name for name, answer in zip(names, answers, strict=True) if answer is not True]

    def _own_connection(self) -> ValkeyConnection:
        """This thread's connection: cutting it does not cut another thread's."""
        if not hasattr(self._local, "connection"):
            self._local.connection = self._server.connect(self.timeout)
            self._connections.append(self._local.connection)
        return self._local.connection

    def _safe(self, text: str) -> str:
        """The text without secrets: some servers repeat in an error what they were sent."""
        for secret in self._server.secrets:
            text = text.replace(secret, "***")
        return text


def _pieces(entries: Mapping[Name, bytes]) -> Iterator[dict[Name, bytes]]:
    piece: dict[Name, bytes] = {}
    size = 0
    for name, entry in entries.items():
        if piece and size + len(entry) > PIECE:
            yield piece
            piece, size = {}, 0
        piece[name] = entry
        size += len(entry)
    if piece:
        yield piece


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
