"""The disk's entries, in a SQLite database of bounded size that evicts the least recently used.

Why SQLite: it is in Python's standard library, an entry is there whole or not at all, even if the
process is killed at any moment, and two processes may use one folder.

Why no write-ahead log: two processes share its index by mapping a file into their memory, and
cutting that file off ends both by SIGBUS. SQLite's older journal is an ordinary file.

Entries are not compressed. zstd and lz4 leave about nine tenths of K and V, and pay only if the
disk is slower than 100 MB/s (`python -m minikv bench tiers --only bytes`). To make entries
smaller, set `kv_dtype`: codes are written to the disk as they are.

The order of use is a counter and not a time, so a clock that goes backwards changes nothing. It is
written together with the next entries, so that a read does not wait for a write.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager, suppress
from pathlib import Path

from minikv.tiers.names import Name
from minikv.tiers.store import log

FILE = "minikv.sqlite"
BESIDE = "-journal", "-wal", "-shm"  # what SQLite keeps next to it
PATIENCE = 5.0  # seconds that a call waits for another process
OVERHEAD = 100  # bytes of an entry beside its data, roughly
DAMAGE = sqlite3.DatabaseError, UnicodeDecodeError  # the second is raised by SQLite's own messages


class DiskTier:
    """A LowerTier in a folder, with at most `max_bytes` of entries."""

    def __init__(self, folder: str | os.PathLike, max_bytes: int):
        """Raises ValueError if nothing can be written there. A damaged database is put aside, and
        the log says so."""
        self.path, self.max_bytes = Path(folder) / FILE, max_bytes
        self._used: dict[Name, None] = {}  # read since the last write, the most recent last
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for suffix in ("", *BESIDE):
                _require_plain(self.path.with_name(FILE + suffix))
            try:
                self._open()
            except DAMAGE as error:
                if not _is_damage(error):
                    raise
                self._start_anew(error)
        except (OSError, *DAMAGE) as error:
            raise ValueError(f"disk_path: cannot write in {str(folder)!r}: {error}") from error

    def _open(self) -> None:
        # Used by one thread at a time: first by its maker, then by its worker.
        self._db = sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        # The file may have a write-ahead log. A process that has locked the file needs no shared
        # index to read that.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = TRUNCATE")
        self._db.execute("PRAGMA locking_mode = NORMAL")
        # After a kill, all that was committed is there. A power cut may damage the file: then it is
        # put aside, and no wrong entry gets through its checksum. To wait for the disk at each
        # commit would keep other processes out for so long.
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("PRAGMA mmap_size = 0")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS entries "
            "(name BLOB PRIMARY KEY, used INTEGER NOT NULL, size INTEGER NOT NULL, "
            "data BLOB NOT NULL)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS by_use ON entries (used, size)")
        self._db.execute("BEGIN IMMEDIATE")  # raises if the file cannot be written
        self._db.execute("COMMIT")
        self._db.execute("SELECT total(size) FROM entries")  # raises if it cannot be read

    def _start_anew(self, error: Exception) -> None:
        log.warning("%s is damaged and put aside (%s); the disk tier begins empty", FILE, error)
        self._db.close()
        for suffix in BESIDE:
            self.path.with_name(FILE + suffix).unlink(missing_ok=True)
        os.replace(self.path, self.path.with_name(FILE + ".damaged"))
        self._open()

    @property
    def num_bytes(self) -> int:
        """What the entries take."""
        return int(self._run("SELECT total(size) FROM entries")[0][0])

    def names(self) -> Iterable[Name]:
        try:
            rows = self._run("SELECT name FROM entries")
        except DAMAGE:
            return []  # the database is a new one by now
        return [name for (name,) in rows if isinstance(name, bytes)]

    def get_many(self, names: Seq[Name]) -> list[bytes | None]:
        with self._transaction("DEFERRED"):
            rows = [self._run("SELECT data FROM entries WHERE name = ?", (name,)) for name in names]
        # The first block becomes the most recent: a prefix is evicted from its end.
        for name in reversed(names):
            self._used.pop(name, None)
            self._used[name] = None
        found = [row[0][0] if row else None for row in rows]
        return [one if isinstance(one, bytes) else None for one in found]

    def put_many(self, entries: Mapping[Name, bytes]) -> list[Name]:
        fitting = {n: e for n, e in entries.items() if len(e) + OVERHEAD <= self.max_bytes}
        gone = [name for name in entries if name not in fitting]
        with self._transaction():
            self._write_used()
            excess = self.num_bytes + sum(len(e) + OVERHEAD for e in fitting.values())
            excess -= self.max_bytes
            while excess > 0:
                oldest = self._run("SELECT name, size FROM entries ORDER BY used LIMIT 1")
                if oldest:
                    name, size = oldest[0]
                    self._run("DELETE FROM entries WHERE name = ?", (name,))
                else:  # the new entries alone are too many
                    name, entry = fitting.popitem()
                    size = len(entry) + OVERHEAD
                gone.append(name)
                excess -= size
            for name, entry in fitting.items():
                self._run(
                    f"INSERT OR REPLACE INTO entries VALUES (?, {NEXT}, ?, ?)",
                    (name, len(entry) + OVERHEAD, entry),
                )
        return gone

    def remove(self, name: Name) -> None:
        self._run("DELETE FROM entries WHERE name = ?", (name,))

    def close(self) -> None:
        with suppress(sqlite3.Error), self._transaction():  # else the order of use alone is lost
            self._write_used()
        self._db.close()

    def _write_used(self) -> None:
        for name in self._used:
            self._run(f"UPDATE entries SET used = {NEXT} WHERE name = ?", (name,))
        self._used.clear()

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """All of what is done inside, or nothing."""
        self._run(f"BEGIN {kind}")
        try:
            yield
            self._run("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may have rolled back itself
                self._db.execute("ROLLBACK")
            raise

    def _run(self, sql: str, values: Seq = ()) -> list[tuple]:
        try:
            return self._db.execute(sql, values).fetchall()
        except DAMAGE as error:
            if _is_damage(error):
                self._start_anew(error)
            raise


def _require_plain(path: Path) -> None:
    """Raises OSError for anything but a plain file, or nothing: SQLite would wait for a FIFO, and
    write into the file that a link leads to."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(f"{path.name} is not a plain file; remove it")


def _is_damage(error: Exception) -> bool:
    """Whether the file is damaged, and not just unreadable or unwritable at the moment."""
    now = ("CANTOPEN", "READONLY", "IOERR", "FULL", "PERM", "BUSY", "LOCKED", "NOMEM", "AUTH")
    if isinstance(error, UnicodeDecodeError):
        return True
    name = getattr(error, "sqlite_errorname", "SQLITE_MISUSE")  # absent if Python raised it
    return not name.startswith(tuple(f"SQLITE_{kind}" for kind in (*now, "MISUSE")))


NEXT = "(SELECT ifnull(max(used), 0) + 1 FROM entries)"
