"""A Valkey or Redis server as a shared store."""

from collections.abc import Mapping, Sequence as Seq
from typing import Any
from urllib.parse import quote

from minikv.tiers import MAGIC, Name

# EXISTS of many keys gives only their number, and a command for each key takes ten times as long.
ARE_THERE = """\
local answers = {}
for i, key in ipairs(KEYS) do answers[i] = redis.call('EXISTS', key) end
return table.concat(answers)
"""
SCHEMES = "redis://", "rediss://", "valkey://", "valkeys://", "unix://"
MISSING = 'store: needs the package valkey: pip install "minikv[distributed]"'


class ValkeyServer:
    """Raises ImportError without the package, and any exception for a URL that cannot be used. The
    URL may hold a user and a password, its `secrets`."""

    def __init__(self, url: str):
        try:
            import valkey  # noqa: F401
        except ImportError:
            raise ImportError(MISSING) from None
        if not url.startswith(SCHEMES):
            raise ValueError
        self._url = url
        pool = self._pool(1.0)
        pool.make_connection()  # only this checks some of the URL's options
        options = pool.connection_kwargs
        at = options.get("host", "localhost"), options.get("port", 6379)
        self.address = options.get("path") or "{}:{}".format(*at)
        secrets = {options.get("username"), options.get("password")} - {None, "", "default"}
        self.secrets = secrets | {quote(secret) for secret in secrets}

    def connect(self, timeout: float) -> "ValkeyConnection":
        return ValkeyConnection(self._pool(timeout), timeout)

    def _pool(self, timeout: float) -> Any:
        from valkey import ConnectionPool

        # A timeout for each call of the socket; `SharedStore` has one for all of them together.
        return ConnectionPool.from_url(self._url, socket_timeout=timeout, socket_read_size=1 << 18)


class ValkeyConnection:
    """One thread's connection, so that cutting it cuts no other thread's. Reconnects by itself."""

    def __init__(self, pool: Any, timeout: float):
        from valkey import Valkey

        self.timeout, self._pool = timeout, pool
        self._client: Any = Valkey(connection_pool=pool)

    def contains(self, names: Seq[Name]) -> list[bool]:
        answer = self._client.eval(ARE_THERE, len(names), *map(_key, names))
        if not isinstance(answer, bytes) or not set(answer) <= set(b"01"):
            raise ValueError("the answer to a question is not a row of 0 and 1")
        return [one == ord("1") for one in answer]

    def get(self, names: Seq[Name]) -> list[bytes | None]:
        return self._client.mget([_key(name) for name in names])

    def put(self, entries: Mapping[Name, bytes]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for name, entry in entries.items():
            pipeline.set(_key(name), entry)
        return pipeline.execute(raise_on_error=False)

    def remove(self, name: Name) -> None:
        self._client.unlink(_key(name))

    def cut(self) -> None:
        self._pool.disconnect()

    close = cut


def _key(name: Name) -> bytes:
    return MAGIC + b":" + name
