"""What can go wrong below the host: each ends in one line of the log, and the engine serves on."""

import itertools
import logging
import os
import random
import signal
import sqlite3
import threading
import time

import pytest
from helpers import generate
from tiers_case import PROMPT, TINY, documents_of, ends, engine_over, fill, params, prompts_of
from waiting import PATIENCE, until

from minikv.tiers import entry
from minikv.tiers.disk import FILE, DiskTier
from minikv.tiers.folder import Folder, save
from minikv.tiers.names import identity_of
from minikv.tiers.store import Background

HERE = identity_of({})


def entries_of(rng, count, size=3000):
    """{name: entry}, and {name: bytes}."""
    names = [rng.randbytes(32) for _ in range(count)]
    data = {name: rng.randbytes(size) for name in names}
    return {name: entry.pack(HERE, name, one) for name, one in data.items()}, data


def read(tier, data):
    """What a Background over this tier hands out, all of it right; how many."""
    background = Background(tier)
    fetch = background.get(
        list(data), lambda one, name: entry.unpack(one, HERE, name, len(data[name]))
    )
    assert fetch.done.wait(PATIENCE)
    background.close()
    for name, found in fetch.found.items():
        assert bytes(found) == data[name]
    return len(fetch.found)


def serve(engine, rounds=4):
    """Some rounds of requests with shared beginnings; their tokens."""
    rng = random.Random(5)
    documents = documents_of(rng)
    tokens = []
    for _ in range(rounds):
        tokens += [o.token_ids for o in generate(engine, prompts_of(rng, documents, 4), params())]
    return tokens


# ── The store ─────────────────────────────────────────────────────────────────


def test_disk_is_bounded_and_forgets_the_oldest(tmp_path):
    entries, data = entries_of(random.Random(0), 30)
    tier = DiskTier(tmp_path, 40_000)
    names, gone = list(entries), []
    for name in names[:10]:
        gone += tier.put_many({name: entries[name]})
    assert gone == [] and set(tier.names()) == set(names[:10])
    tier.get_many([names[0]])
    for name in names[10:20]:
        gone += tier.put_many({name: entries[name]})
    assert gone[:3] == names[1:4] and names[0] in tier.names() and tier.num_bytes <= 40_000
    gone = tier.put_many({name: entries[name] for name in names})  # more than there is room for
    assert tier.num_bytes <= 40_000 and len(list(tier.names())) >= 10
    assert tier.put_many({b"x" * 32: bytes(50_000)}) == [b"x" * 32]
    for _ in range(20):
        entries, data = entries_of(random.Random(1), 12)
        tier.put_many(entries)
    tier.close()
    assert (tmp_path / FILE).stat().st_size < 80_000
    again = DiskTier(tmp_path, 40_000)
    assert read(again, data) >= 10


def test_a_clock_that_goes_backwards(engine_of, llama, tmp_path, monkeypatch):
    ticks = itertools.count(10_000, -1)
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path)
    tiers = engine.tiers
    del tiers.rates
    for one in (tiers, tiers.copying, tiers.prefilling, tiers.disk, tiers.disk.reading):
        one.clock = lambda: float(next(ticks))
    assert serve(engine) == serve(engine_of(num_blocks=400))
    stats = engine.stats().tiers
    assert stats["disk"].hits > 0 and stats["disk"].seconds_out >= 0 <= stats["host"].seconds_in


def test_disk_full(engine_of, tmp_path, caplog):
    engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path)
    engine.tiers.disk.tier._db.execute("PRAGMA max_page_count = 12")
    assert serve(engine) == serve(engine_of(num_blocks=400))
    until(engine.tiers.disk.wait)  # it is False as often as a write fails
    assert [r.message for r in caplog.records] == [
        "the tier cannot be written: OperationalError: database or disk is full"
    ]
    assert engine.stats().tiers["disk"].bytes_in < 12 * 4096
    engine.check()


class Failing:
    """A tier on which every call fails."""

    def names(self):
        return [b"x" * 32]

    def fail(self, *arguments):
        raise OSError(5, "Input/output error")

    get_many = put_many = remove = close = fail


def test_a_tier_that_always_fails(engine_of, tmp_path, caplog):
    engine = engine_over(engine_of, Failing(), tmp_path, **TINY, host_blocks=4)
    assert serve(engine) == serve(engine_of(num_blocks=400))
    until(engine.tiers.disk.wait)  # it is False as often as a write fails
    assert {r.levelno for r in caplog.records} == {logging.WARNING}
    assert 1 <= len(caplog.records) <= 2, "one line for each kind of failure"


def test_a_slow_disk_drops_and_does_not_stop(tmp_path):
    """Nothing is written until all is handed over. What waits, being written or not, is bounded."""
    written = threading.Event()

    class Slow(Failing):
        def names(self):
            return []

        def put_many(self, entries):
            assert written.wait(PATIENCE)
            return []

    background = Background(Slow(), most_waiting=10_000)
    kept = [background.put(b"%032d" % i, HERE, bytes(3000)) for i in range(50)]
    assert kept == [True] * 3 + [False] * 47
    assert background.num_dropped == 47
    written.set()
    background.close()


# ── Locked, in the way, cut off, read-only, slow ──────────────────────────────


def test_flush_does_not_wait_for_a_locked_database(engine_of, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Background, "BATCH", 1)
    engine = engine_of(**TINY, host_blocks=8, disk_path=tmp_path)
    disk, tries = engine.tiers.disk, []
    disk.tier._db.execute("PRAGMA busy_timeout = 0")
    put_many = disk.tier.put_many

    def put_while_awaited(new):
        tries.append(new)
        until(lambda: disk._waits)
        return put_many(new)

    disk.tier.put_many = put_while_awaited
    generate(engine, [PROMPT], params(1))
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    ends(engine.tiers.flush)
    assert len(tries) == 1, "each try is one wait"
    assert [r.message for r in caplog.records] == [
        "the tier cannot be written: OperationalError: database is locked",
        "flush: the disk did not take all blocks; they will be computed again",
    ]
    other.execute("ROLLBACK")
    engine.tiers.flush()
    assert engine.tiers.everywhere(PROMPT) == [["device", "disk"]] * 8


def in_the_way(folder, what):
    """Puts something where the folder, the database, or what SQLite keeps beside it, should be."""
    if what == "file":
        folder.rmdir()
        return folder.write_text("")
    path = folder / (FILE + (what.partition(" ")[2]))
    if what.startswith("fifo"):
        os.mkfifo(path)
    elif what.startswith("folder"):
        path.mkdir()
        (path / "x").write_text("")
    else:
        path.symlink_to(folder / "elsewhere")
    if what == "folder .damaged":
        (folder / FILE).write_bytes(b"no database" * 100)


@pytest.mark.parametrize("what", [
    f"{kind}{suffix}" for kind in ("fifo", "folder", "link") for suffix in ("", " -journal")
] + ["folder .damaged", "file"])  # fmt: skip
def test_what_is_in_the_way_is_named(tmp_path, what):
    in_the_way(tmp_path, what)

    def refused():
        with pytest.raises(
            ValueError, match=r"disk_path: cannot write in .*(plain|directory|exists)"
        ):
            DiskTier(tmp_path, 1 << 20)
        found.append(True)

    found: list[bool] = []
    ends(refused)
    assert found and not os.path.exists(tmp_path / "elsewhere")


def test_damage_that_cannot_be_put_aside(engine_of, tmp_path, caplog):
    engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path)
    in_the_way(tmp_path, "folder .damaged")
    assert serve(engine) == serve(engine_of(num_blocks=400))
    engine.tiers.flush()
    assert 1 <= len(caplog.records) <= 5 and "IsADirectoryError" in caplog.text


def test_files_beside_the_database_may_be_cut_off(tmp_path):
    """No process ends by SIGBUS, because none maps a file that others can cut off."""
    entries, data = entries_of(random.Random(0), 8)
    child = os.fork()
    if child == 0:
        tier = DiskTier(tmp_path, 1 << 20)
        for name, one in entries.items():
            tier.put_many({name: one})
            for path in tmp_path.iterdir():
                if path.name != FILE:
                    os.truncate(path, 0)
        os._exit(0 if read(tier, data) == 8 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read(DiskTier(tmp_path, 1 << 20), data) == 8


def test_a_database_of_an_earlier_version_keeps_its_entries(tmp_path):
    entries, data = entries_of(random.Random(0), 8)
    tier = DiskTier(tmp_path, 1 << 20)
    tier._db.execute("PRAGMA journal_mode = WAL")
    tier.put_many(entries)
    (tmp_path / "left").mkdir()
    for name in (FILE, FILE + "-wal"):  # as a kill leaves them
        (tmp_path / "left" / name).write_bytes((tmp_path / name).read_bytes())
    again = DiskTier(tmp_path / "left", 1 << 20)
    assert [path.name for path in (tmp_path / "left").iterdir() if path.stat().st_size] == [FILE]
    assert read(again, data) == 8


def test_what_can_only_be_read_is_read(engine_of, tmp_path, caplog):
    engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path)
    generate(engine, [PROMPT], params())
    engine.tiers.flush()
    engine.tiers.disk.tier._db.execute("PRAGMA query_only = 1")
    fill(engine)
    generate(engine, [PROMPT], params())
    assert engine.stats().tiers["disk"].hits == 8
    until(engine.tiers.disk.wait)
    assert ["readonly" in r.message for r in caplog.records] == [True]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_that_was_slow_by_chance_is_tried_again(engine_of, tmp_path, tier):
    engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path)
    del engine.tiers.rates
    line = engine.tiers.copying if tier == "host" else engine.tiers.disk.reading
    now = line.clock()
    line.clock = lambda: now
    line.add(1000, 1000.0)
    now += line.lasts - 1
    assert engine.tiers.rates()[0][tier].seconds(1000) > 999
    now += 2
    assert engine.tiers.rates()[0][tier].seconds(1000) < 1
    line.add(1000, 1.0)
    assert line.fit() == (0, 1000), "the slow one is forgotten, not only passed over"


# ── Damage ────────────────────────────────────────────────────────────────────


def test_damaged_entries_are_misses(engine_of, tmp_path, caplog):
    engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path)
    [first] = generate(engine, [PROMPT], params())
    fill(engine)
    assert engine.tiers.disk.wait()
    database = sqlite3.connect(tmp_path / FILE)
    rows = database.execute("SELECT name, data FROM entries").fetchall()
    for index, (name, data) in enumerate(rows):
        changed = bytearray(data)
        changed[-1 - index % 9] ^= 1
        database.execute("UPDATE entries SET data = ? WHERE name = ?", (bytes(changed), name))
    database.commit()
    assert generate(engine, [PROMPT], params())[0].token_ids == first.token_ids
    assert engine.stats().tiers["disk"].hits == 0
    assert engine.stats().tiers["disk"].dropped >= 1
    assert [r.message for r in caplog.records] == [
        "an entry is refused and removed: the checksum is wrong"
    ]


def test_files_with_damage_open_again(tmp_path, caplog):
    """Cut off, overwritten, bits flipped anywhere: what is handed out is right, or missing."""
    rng = random.Random(0)
    entries, data = entries_of(rng, 12, 900)
    tier = DiskTier(tmp_path / "whole", 1 << 20)
    tier.put_many(entries)
    tier.close()
    whole, found = (tmp_path / "whole" / FILE).read_bytes(), 0
    for case in range(60):
        folder = tmp_path / str(case)
        folder.mkdir()
        bad = bytearray(whole)
        kind = case % 3
        if kind == 0:
            for _ in range(rng.choice([1, 10, 100])):
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del bad[rng.randrange(len(bad)) :]
        else:
            start = rng.randrange(len(bad))
            bad[start : start + 4096] = rng.randbytes(rng.choice([0, 100, 4096]))
        (folder / FILE).write_bytes(bad)
        tier = DiskTier(folder, 1 << 20)
        found += read(tier, data)
        again = DiskTier(folder, 1 << 20)  # and it can be used
        fresh, fresh_data = entries_of(rng, 2, 900)
        try:
            again.put_many(fresh)
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # it is put aside, and is empty now
            again.put_many(fresh)
        assert read(again, fresh_data) == 2
    assert found > 60


# ── Two processes, and none ───────────────────────────────────────────────────


class Child:
    """A forked process that works for ever, and says so each time something is done."""

    def __init__(self, work):
        self.says, mouth = os.pipe()
        self.id = os.fork()
        if self.id == 0:
            try:
                for _ in work:
                    os.write(mouth, b".")
            finally:
                os._exit(1)
        os.close(mouth)

    def kill(self, seconds=0.0):
        """Kill it, when something is done and so many seconds later."""
        assert os.read(self.says, 1)
        time.sleep(seconds)
        os.kill(self.id, signal.SIGKILL)
        os.waitpid(self.id, 0)
        os.close(self.says)


def write_for_ever(folder, seed, max_bytes=300_000):
    rng, tier = random.Random(seed), DiskTier(folder, max_bytes)
    while True:
        entries, _ = entries_of(rng, rng.randint(1, 8), 4000)
        tier.put_many(entries)
        tier.get_many(list(entries)[:2])
        yield


KILLS = 20  # 200 were made once, by hand


@pytest.mark.thorough
def test_killed_while_writing(tmp_path):
    """At any moment: the store opens again, holds only whole entries, and keeps its bound."""
    rng, found = random.Random(0), 0
    for turn in range(KILLS):
        Child(write_for_ever(tmp_path, turn)).kill(rng.uniform(0, 0.02))
        tier = DiskTier(tmp_path, 300_000)
        assert tier.num_bytes <= 300_000
        for name, data in zip(names := list(tier.names()), tier.get_many(names), strict=True):
            entry.unpack(data, HERE, name, 4000)
            found += 1
        assert tier._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        tier.close()
    assert found > KILLS


def test_two_processes_in_one_folder(engine_of, tmp_path):
    """Another process writes, and evicts what we wrote, all the time."""
    child = Child(write_for_ever(tmp_path, 1, 60_000))
    try:
        engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path, disk_bytes="60 KiB")
        assert serve(engine, 6) == serve(engine_of(num_blocks=400), 6)
        until(engine.tiers.disk.wait)  # it is False as often as a write has failed
        assert engine.stats().tiers["disk"].bytes_in > 0
        engine.check()
    finally:
        child.kill()


@pytest.mark.thorough
def test_killed_while_saving_a_session(tmp_path):
    rng, versions = random.Random(0), {bytes([n]) * 50_000 for n in range(256)}
    save(Folder(tmp_path), "s", bytes(50_000))

    def save_for_ever():
        for n in itertools.cycle(range(256)):
            save(Folder(tmp_path), "s", bytes([n]) * 50_000)
            yield

    for _ in range(KILLS):
        Child(save_for_ever()).kill(rng.uniform(0, 0.02))
        assert (tmp_path / "s").read_bytes() in versions
