"""The small pieces: names, entries, costs, the host's pool.

Moves, the break-even length, safe files and the check of a session are what chapter 12's exercises
examine, against other solutions."""

import random
from collections import Counter

import pytest
from helpers import meets
from hypothesis import given, strategies as st
from tiers_case import damaged

from minikv import OutOfBlocks
from minikv.tiers import entry
from minikv.tiers.costs import FAST_ENOUGH, FittedLine, Link, Prefill, blocks_to_fetch
from minikv.tiers.host import HostPool
from minikv.tiers.names import block_name, block_names, identity_of, root_name

HERE = identity_of({"model": "a"})

# ── Names ─────────────────────────────────────────────────────────────────────


def test_a_name_says_everything_before_it():
    root = root_name(HERE)
    one = block_names(root, [1, 2, 3, 4, 5, 6, 7], 2)
    assert len(one) == 3 and len(set(one)) == 3 and all(len(name) == 32 for name in one)
    assert one[1:] == [block_name(one[0], [3, 4]), block_name(one[1], [5, 6])]
    other = block_names(root, [1, 9, 3, 4, 5, 6], 2)
    assert not set(one) & set(other), "the same block after another prefix has another name"
    assert block_names(root, [1], 2) == []


def test_roots_differ_by_salt_and_identity():
    salts = [None, "", "a", b"a", 1, True, 1.0, "1", ("a",), ("a", "b"), ("a,str:'b'",), (), ((),)]
    roots = [root_name(HERE, salt) for salt in salts]
    assert None not in roots and len(set(roots)) == len(salts)
    assert root_name(identity_of({"model": "b"})) != root_name(HERE)
    assert root_name(HERE, object()) is None and root_name(HERE, (1, object())) is None


def test_the_spelling_of_names_is_fixed():
    """They are keys of what other processes wrote."""
    name = block_name(root_name(bytes(32), "salt"), [1, 2])
    assert name.hex() == "cbfb03727c2c5e59af1a262b798d1f55f28f6c06eb0cd9c697f7251dbbec602e"


# ── Entries ───────────────────────────────────────────────────────────────────

NAME, OTHER, DATA = b"n" * 32, b"o" * 32, bytes(range(256)) * 3


def test_entry_round_trip_and_refusals():
    packed = entry.pack(HERE, NAME, DATA)
    assert bytes(entry.unpack(packed, HERE, NAME, len(DATA))) == DATA
    for what, arguments in {
        "another model": (packed, identity_of({}), NAME, len(DATA)),
        "another block": (packed, HERE, OTHER, len(DATA)),
        "a block has 5": (packed, HERE, NAME, 5),
        "says 768": (packed[:-1], HERE, NAME, len(DATA) - 1),
        "its header says": (packed + b"x", HERE, NAME, len(DATA)),
        "a header alone has": (packed[:50], HERE, NAME, len(DATA)),
        "begins with": (b"x" + packed[1:], HERE, NAME, len(DATA)),
    }.items():
        with pytest.raises(entry.EntryError, match=what):
            entry.unpack(*arguments)


def test_ten_thousand_damaged_entries_are_refused():
    rng = random.Random(0)
    packed = entry.pack(HERE, NAME, DATA)
    for _ in range(10_000):
        bad = damaged(rng, packed)
        if bad != packed:
            with pytest.raises(entry.EntryError):
                entry.unpack(bad, HERE, NAME, len(DATA))


# ── Costs ─────────────────────────────────────────────────────────────────────


MET = Counter()


@meets(MET, {"all": 10, "none": 10, "some": 3})
@given(
    tiers=st.lists(st.sampled_from(["host", "disk"]), min_size=2, max_size=12),
    latency=st.floats(0, 1), bandwidth=st.floats(1, 100), rate=st.floats(0.1, 100),
)  # fmt: skip
def test_blocks_to_fetch_is_the_best_of_all_counts(tiers, latency, bandwidth, rate):
    links = {"host": Link(0.01, 50), "disk": Link(latency, bandwidth)}
    prefill = Prefill(0, rate)

    def seconds(count):
        used = tiers[:count]
        fetch = sum(links[tier].latency for tier in set(used))
        fetch += sum(10 / links[tier].bandwidth for tier in used)
        return fetch + (len(tiers) - count) * 4 / rate

    count = blocks_to_fetch(tiers, 10, 4, links, prefill)
    best = min(map(seconds, range(len(tiers) + 1)))
    MET["all" if count == len(tiers) else "some" if count else "none"] += 1
    assert seconds(count) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_a_line_is_found_and_follows():
    line = FittedLine()
    assert line.fit() is None
    line.add(100, 0.5)
    assert line.fit() == (0, pytest.approx(200))
    for size in (100, 400, 200, 800) * 20:
        line.add(size, 0.1 + size / 1000)
    start, rate = line.fit()
    assert start == pytest.approx(0.1, rel=1e-3) and rate == pytest.approx(1000, rel=1e-3)
    for seconds in (0, -1):  # a clock that stands still, or goes backwards
        line.add(100, seconds)
    assert line.fit() == (start, rate)


def test_slow_reads_of_one_block_do_not_end_longer_ones():
    """Nothing tells whether more blocks would take longer, until some are tried."""
    reading, prefill = FittedLine(), Prefill(0.003, 10_000)
    for _ in range(5):
        reading.add(1000, 0.005)
        link = Link(*reading.fit(flat=True))
        assert blocks_to_fetch(["disk"] * 2, 1000, 16, {"disk": link}, prefill) == 0
        assert blocks_to_fetch(["disk"] * 4, 1000, 16, {"disk": link}, prefill) == 4
    reading.add(4000, 0.020)  # they did: no latency, but a slow disk
    link = Link(*reading.fit(flat=True))
    assert blocks_to_fetch(["disk"] * 4, 1000, 16, {"disk": link}, prefill) == 0
    for _ in range(20):
        reading.add(4000, 0.004)  # or they did not
    link = Link(*reading.fit(flat=True))
    assert link.bandwidth == FAST_ENOUGH and link.latency == pytest.approx(0.004, rel=0.1)


# ── The host's pool ───────────────────────────────────────────────────────────


def test_free_blocks_remember_until_they_are_needed():
    gone = []
    pool = HostPool(3, lambda block_id, name: gone.append(name))
    for name in (b"a", b"b"):
        block_id = pool.allocate()
        pool.remember(block_id, name)
        pool.release(block_id)
    assert pool.num_free == 3 and pool.num_named == 2 and not gone
    pool.touch(b"a")
    held = [pool.allocate(), pool.allocate()]
    assert gone == [b"b"] and b"a" in pool and b"b" not in pool
    pool.acquire(pool.find(b"a"))
    assert pool.num_free == 0
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.release(pool.find(b"a"))
    assert pool.num_free == 1
    pool.forget_all()
    assert pool.num_named == 0 and pool.num_free == 1
    for block_id in held:
        pool.release(block_id)
    pool.check()


def test_what_a_plan_frees_is_not_given_out_in_it():
    pool = HostPool(2)
    block_id, other = pool.allocate(), pool.allocate()
    with pool.plan():
        pool.release(block_id)
        assert pool.num_free == 0
        with pytest.raises(OutOfBlocks):
            pool.allocate()
    assert pool.num_free == 1 and pool.allocate() == block_id != other


@meets(MET, {"named": 1, "touched": 1, "held again": 1, "names lost": 1})
@given(st.lists(st.tuples(st.sampled_from("anrtx"), st.integers(0, 4)), min_size=20, max_size=60))
def test_host_pool_invariants(operations):
    pool, held = HostPool(4), []
    for operation, which in operations:
        name, known = b"%d" % which, len(pool._names)
        if operation == "a" and pool.num_free:
            held.append(pool.allocate())
        elif operation == "n" and held and name not in pool and held[-1] not in pool._names:
            pool.remember(held[-1], name)
            MET["named"] += 1
        elif operation == "r" and held:
            pool.release(held.pop(which % len(held)))
        elif operation == "t" and name in pool:
            pool.touch(name)
            MET["touched"] += 1
        elif operation == "x" and name in pool and pool.ref_count(pool.find(name)) == 0:
            pool.acquire(pool.find(name))
            held.append(pool.find(name))
            MET["held again"] += 1
        MET["names lost"] += len(pool._names) < known
        pool.check()
        assert pool.num_free == 4 - len(held)
