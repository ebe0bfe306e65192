"""A store of blocks that many engines share: a Valkey or Redis server, behind a small interface.

An entry's key is the block's name behind the version of the entries' format, so what an older
version wrote is a miss. There is no list of names: engines ask whether blocks are there
(`contains`, one round trip for a whole prefix) and may still miss them afterwards, for the server
evicts what was used least recently. Memory, eviction, TLS, users and their rights are the server's
work; it should have `maxmemory` and `maxmemory-policy allkeys-lru`.

Whatever happens to the server, a call ends within `timeout` seconds per piece of 8 MiB, with a miss
in place of an error. After a failure a circuit breaker refuses calls at once, and tries again after
half a second, then after twice as long each time. What is handed out is not verified here:
`minikv.tiers.entry.unpack` does that. Its checksum finds damage, not malice: who may write to the
store can write K and V that are wrong, and who may list its keys can read what is there. So let no
tenant near it. An engine's tenants are kept apart by the salt, which is part of every name: a salt
that cannot be guessed gives names that cannot be guessed.

K and V travel as they are stored: `EngineConfig.kv_dtype` makes them smaller here as well.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar
from urllib.parse import quote

from minikv.cluster.breaker import Breaker
from minikv.tiers.entry import MAGIC
from minikv.tiers.names import Name

log = logging.getLogger("minikv.cluster")
Answer = TypeVar("Answer")

PIECE = 8 << 20  # bytes that are sent or asked for at a time
FORMS = "redis://host:6379/0, rediss:// for TLS, or unix:///path/of/a/socket"
MISSING = 'store: needs the package valkey: pip install "minikv[distributed]"'


class SharedStore:
    """A LowerTier on a server. Each thread that uses it has a connection of its own."""

    def __init__(self, url: str, timeout: float = 1.0):
        """Does not connect yet. Raises ValueError for a URL that cannot be used, and ImportError
        without the package. The URL may hold a user and a password; neither gets into a message."""
        try:
            import valkey
        except ImportError:
            raise ImportError(MISSING) from None
        self.timeout, self.breaker, self.writes = timeout, Breaker(), Breaker()
        try:
            self._pools = [self._pool(url)]
            self._pools[0].make_connection()  # it alone looks at some of the URL's options
        except Exception:  # its text may hold the password
            # "from None", for the same reason.
            raise ValueError(f"store: the URL cannot be used; give one like {FORMS}") from None
        options = self._pools[0].connection_kwargs
        at = options.get("host", "localhost"), options.get("port", 6379)
        self.address = options.get("path") or "{}:{}".format(*at)
        secrets = {options.get("username"), options.get("password")} - {None, "", "default"}
        self._secrets = secrets | {quote(secret) for secret in secrets}
        self._url, self._local, self._valkey = url, threading.local(), valkey
        self._is_closed = False
        self._entry_bytes = PIECE // 16  # the largest entry that was seen

    def _pool(self, url: str) -> Any:
        from valkey import ConnectionPool

        if not url.startswith(("redis://", "rediss://", "valkey://", "valkeys://", "unix://")):
            raise ValueError
        # A timeout for each call of the socket. See `_call` for all of them together.
        return ConnectionPool.from_url(url, socket_timeout=self.timeout, socket_read_size=1 << 18)

    def __repr__(self) -> str:
        return f"SharedStore({self.address})"

    # ── What a tier does ──────────────────────────────────────────────────────

    def names(self) -> Iterable[Name]:
        """None: what is there is asked for, by `contains`."""
        return ()

    def contains(self, names: Seq[Name]) -> list[bool]:
        """Whether each of these entries is there now, in one round trip."""

        def ask(client: Any) -> list[bool]:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(_key(name))
            answers = pipeline.execute()
            if len(answers) != len(names) or not {0, 1} >= set(answers):
                raise ValueError("the answer to EXISTS is no 0 or 1")
            return [answer == 1 for answer in answers]

        return self._call(ask, [False] * len(names)) if names else []

    def get_many(self, names: Seq[Name]) -> list[bytes | None]:
        """The entries of these names, None for one that is not there or that cannot be had."""
        found: list[bytes | None] = []
        while len(found) < len(names):
            piece = names[len(found) :][: max(1, PIECE // self._entry_bytes)]

            def ask(client: Any, piece: Seq[Name] = piece) -> list[bytes | None]:
                answers = client.mget([_key(name) for name in piece])
                if not isinstance(answers, list) or len(answers) != len(piece):
                    raise ValueError("the answer to MGET has another length")
                if not all(one is None or isinstance(one, bytes) for one in answers):
                    raise ValueError("the answer to MGET has something else than bytes")
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

            def write(client: Any, piece: Mapping[Name, bytes] = piece) -> list[Name]:
                pipeline = client.pipeline(transaction=False)
                for name, entry in piece.items():
                    pipeline.set(_key(name), entry)
                answers = pipeline.execute(raise_on_error=False)
                return self._refused(list(piece), answers)

            gone += self._call(write, list(piece)) if self.writes.allows() else list(piece)
        return gone

    def remove(self, name: Name) -> None:
        self._call(lambda client: client.unlink(_key(name)), None)

    def close(self) -> None:
        """End all connections; from now on nothing is there."""
        self._is_closed = True
        for pool in self._pools:
            pool.disconnect()

    # ── Calls that end ────────────────────────────────────────────────────────

    def _call(self, what: Callable[[Any], Answer], otherwise: Answer) -> Answer:
        """What `what(client)` returns, within `timeout` seconds; `otherwise` if that fails or the
        breaker is open."""
        if self._is_closed or not self.breaker.allows():
            return otherwise
        pool = self._own_pool()
        # A socket's timeout begins anew with each byte that comes. So the connection is cut.
        alarm = threading.Timer(self.timeout, pool.disconnect)
        alarm.daemon = True
        alarm.start()
        try:
            answer = what(self._valkey.Valkey(connection_pool=pool))
        except Exception as error:  # of the library, for whatever a server may answer
            pool.disconnect()  # the rest of the answer must not be taken for the next one
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
        """The names that the server would not take: it is full, or may not be written to. Then it
        can be read still, but writing is left alone for a while."""
        if len(answers) != len(names):
            raise ValueError("the answer to SET has another length")
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if not errors:
            self.writes.worked()
        elif self.writes.failed():
            log.warning("%s", self._safe(f"the store at {self.address} takes no entry, and is "
                                         f"only read for a while: {_text(errors[0])}"))  # fmt: skip
        return [name for name, answer in zip(names, answers, strict=True) if answer is not True]

    def _own_pool(self) -> Any:
        """This thread's: to cut its connection cuts no other thread's."""
        if not hasattr(self._local, "pool"):
            self._local.pool = self._pool(self._url)
            self._pools.append(self._local.pool)
        return self._local.pool

    def _safe(self, text: str) -> str:
        """Some servers repeat in an error what they were sent: a password, say."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _key(name: Name) -> bytes:
    return MAGIC + b":" + name


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
