"""The disk's entries, in a SQLite database: bounded, least recently used first to go.

Why SQLite: it is in Python's standard library, an entry is there whole or not at all, whatever
moment the process is killed at, and two processes may use one folder. See
`minikv.course.bench.tier_stores` for what it was compared with.

The order of use is a counter and not a time: a clock that goes backwards changes nothing.
"""

import os
import sqlite3
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from minikv.tiers.names import Name
from minikv.tiers.store import log

FILE = "minikv.sqlite"
OVERHEAD = 100  # bytes of an entry beside its data, about


class DiskTier:
    """A LowerTier in a folder. At most `max_bytes` of entries."""

    def __init__(self, folder: str | os.PathLike, max_bytes: int):
        """Raises ValueError if nothing can be written there. A damaged database is put aside, and
        the log says so."""
        self.path, self.max_bytes = Path(folder) / FILE, max_bytes
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ValueError(f"disk_path: cannot write in {str(folder)!r}: {error}") from error
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise ValueError(f"disk_path: cannot write in {str(folder)!r}: {error}") from error
            self._start_anew(error)

    def _open(self) -> None:
        # Used by one thread at a time: the one that makes it, then the one that works with it.
        self._db = sqlite3.connect(
            self.path, timeout=5, isolation_level=None, check_same_thread=False
        )
        # Killed: all that was committed is there. Power cut: perhaps without the last commits.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA journal_size_limit = 16777216")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS entries "
            "(name BLOB PRIMARY KEY, used INTEGER NOT NULL, size INTEGER NOT NULL, "
            "data BLOB NOT NULL)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS by_use ON entries (used, size)")
        self._db.execute("BEGIN IMMEDIATE")  # raises if the file cannot be written
        self._db.execute("COMMIT")
        self.num_bytes  # noqa: B018  raises if it cannot be read

    def _start_anew(self, error: Exception) -> None:
        log.warning("%s is damaged and put aside (%s); the disk tier begins empty", FILE, error)
        self._db.close()
        for suffix in ("-wal", "-shm"):
            self.path.with_name(FILE + suffix).unlink(missing_ok=True)
        os.replace(self.path, self.path.with_name(FILE + ".damaged"))
        self._open()

    @property
    def num_bytes(self) -> int:
        """What the entries take."""
        return self._db.execute("SELECT total(size) FROM entries").fetchone()[0].__int__()

    def names(self) -> Iterable[Name]:
        return [name for (name,) in self._db.execute("SELECT name FROM entries")]

    def get_many(self, names: Seq[Name]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for name in names:
            row = self._run("SELECT data FROM entries WHERE name = ?", (name,)).fetchone()
            found.append(row and row[0])
        # The first block is used last: the end of a prefix goes before its beginning.
        with self._change():
            for name in reversed(names):
                self._run(f"UPDATE entries SET used = {NEXT} WHERE name = ?", (name,))
        return found

    def put_many(self, entries: Mapping[Name, bytes]) -> list[Name]:
        fitting = {n: e for n, e in entries.items() if len(e) + OVERHEAD <= self.max_bytes}
        gone = [name for name in entries if name not in fitting]
        with self._change():
            excess = self.num_bytes + sum(len(e) + OVERHEAD for e in fitting.values())
            excess -= self.max_bytes
            while excess > 0:
                oldest = self._run(
                    "SELECT name, size FROM entries ORDER BY used LIMIT 1"
                ).fetchone()
                if oldest is None:  # the new ones alone are too many
                    name, entry = fitting.popitem()
                    oldest = name, len(entry) + OVERHEAD
                self._run("DELETE FROM entries WHERE name = ?", (oldest[0],))
                gone.append(oldest[0])
                excess -= oldest[1]
            for name, entry in fitting.items():
                self._run(
                    f"INSERT OR REPLACE INTO entries VALUES (?, {NEXT}, ?, ?)",
                    (name, len(entry) + OVERHEAD, entry),
                )
        return gone

    def remove(self, name: Name) -> None:
        self._run("DELETE FROM entries WHERE name = ?", (name,))

    def close(self) -> None:
        self._db.close()

    def _change(self) -> "_Transaction":
        return _Transaction(self._run)

    def _run(self, sql: str, values: Seq = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, values)
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._start_anew(error)
            raise


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file makes no sense, in contrast to: it cannot be read or written now."""
    now = ("CANTOPEN", "READONLY", "IOERR", "FULL", "PERM", "BUSY", "LOCKED", "NOMEM", "AUTH")
    name = getattr(error, "sqlite_errorname", "SQLITE_MISUSE")  # absent if Python raised it
    return not name.startswith(tuple(f"SQLITE_{kind}" for kind in (*now, "MISUSE")))


NEXT = "(SELECT ifnull(max(used), 0) + 1 FROM entries)"


class _Transaction:
    """All of it, or nothing."""

    def __init__(self, run):
        self._run = run

    def __enter__(self) -> None:
        self._run("BEGIN IMMEDIATE")

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self._run("COMMIT")
            return
        try:
            self._run("ROLLBACK")
        except sqlite3.Error:
            pass  # there is none: the database was replaced, or has rolled back itself
