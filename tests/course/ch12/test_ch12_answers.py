"""Chapter 12: what its checks and its notebook rest on."""

import itertools
import os

import pytest

import minikv
from minikv.course.chapters.ch07_radix_prefix_cache.block_ids import ids_of_jobs
from minikv.course.chapters.ch12_tiers_and_sessions.given import (
    CrashingFolder,
    SmallMachine,
    with_heads_reversed,
)
from minikv.course.chapters.ch12_tiers_and_sessions.measures import crossing
from minikv.course.chapters.ch12_tiers_and_sessions.tier_rates import (
    WriteBack,
    WriteThrough,
    rates_by_tier,
)
from minikv.course.chapters.ch12_tiers_and_sessions.tier_viewer import TierHistory
from minikv.course.chapters.ch12_tiers_and_sessions.trace_rates import (
    STORED,
    STORED_MOST,
    TraceRates,
)
from minikv.course.workloads.workload import conversations, write_code
from minikv.tiers.identity import model_fingerprint

ONE_TOKEN = minikv.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def streams(lm):
    return ids_of_jobs(conversations(lm, 40, turns=4, real_answers=False))


@pytest.mark.parametrize("size", [30, 100, 300, 5000])
def test_without_a_host_the_device_finds_what_the_radix_tree_finds(streams, size):
    """The engine's prefix cache, with blocks of one id."""
    pool, tiers = minikv.BlockPool(size), WriteBack(size, 0)
    cache = minikv.RadixCache(pool, block_size=1)
    for ids in streams:
        match = cache.match(ids[:size])
        needed = len(ids[:size]) - match.num_tokens
        cache.lock(match.node)
        cache.evict(max(0, needed - pool.num_free))
        cache.unlock(match.node)
        new = [pool.allocate() for _ in range(needed)]
        cache.insert(ids[:size], match.block_ids + new)
        for block_id in new:
            pool.release(block_id)  # the tree holds it now
        assert tiers.serve(ids)[0] == match.num_tokens


def test_write_back_is_one_cache_of_both_sizes(streams):
    for device, host in ((40, 60), (100, 300)):
        both, one = WriteBack(device, host), WriteBack(device + host, 0)
        alone = WriteBack(device, 0)
        for ids in streams:
            found = both.serve(ids)
            assert sum(found) == one.serve(ids)[0]
            assert found[0] == alone.serve(ids)[0]


def test_write_through_writes_each_block_once_if_there_is_room(streams):
    rates = rates_by_tier(streams, WriteThrough, 100, 100_000)
    distinct = len(set().union(*streams)) / sum(map(len, streams))
    assert rates.written == pytest.approx(distinct)
    assert rates.together == pytest.approx(1 - distinct)


class RoomFirst(WriteBack):
    """Fetched blocks leave the host only after room is made on the device for `at_once` of them."""

    at_once = 10

    def serve(self, ids):
        here = [id_ for id_ in ids if id_ in self.host]
        found = len(here) if here == ids[: len(here)] else 0
        held = set(here[:found])
        for start in range(len(ids), 0, -self.at_once):
            part = ids[max(0, start - self.at_once) : start]
            while len(self.device) + len(part) > self.device_blocks:
                down = self.device.popitem(last=False)[0]
                if len(self.host) == self.host_blocks:
                    del self.host[next(one for one in self.host if one not in held)]
                self.host[down] = None
            for id_ in reversed(part):
                self.host.pop(id_, None)
                self.device[id_] = None
        return 0, found


@pytest.mark.parametrize(("at_once", "found"), [(10, [10, 0] * 24), (1, [9] * 48)])
def test_the_first_open_question(at_once, found):
    """What is found if fetched blocks leave the host after room has been made for them."""
    tiers = RoomFirst(60, 60)
    tiers.at_once = at_once
    loop = [[10 * c + i for i in range(10)] for c in range(12)]
    assert [tiers.serve(ids)[1] for ids in loop * 6][24:] == found


@pytest.mark.skipif("MINIKV_TRACE" not in os.environ, reason="MINIKV_TRACE names no trace")
def test_the_stored_rates_are_the_trace_s():
    again = TraceRates(os.environ["MINIKV_TRACE"])
    for sizes, shares in STORED.items():
        assert again.rates[sizes] == pytest.approx(shares, abs=5e-5)
    assert again.most == pytest.approx(STORED_MOST, abs=5e-4)


def test_the_stored_rates_are_shown():
    told = TraceRates().picture().alt
    assert "finds 4.5%; with a host of ten times its size, 22.1%" in told
    assert "36.4" in told and "without limit: 36.6%" in told


# ── The simulated disk ────────────────────────────────────────────────────────


def test_a_crash_may_leave_what_was_in_memory_only():
    disk = CrashingFolder({"a": b"old"})
    assert disk.left_by_a_crash("a") == {b"old"}
    disk.write("a", b"newer")
    assert disk.left_by_a_crash("a") == {b"old", b"", b"ne", b"newer"}
    disk.sync("a")
    assert disk.left_by_a_crash("a") == {b"newer"}
    disk.write("b", b"xy")
    disk.rename("b", "a")
    assert disk.left_by_a_crash("a") == {b"newer", b"", b"x", b"xy"}
    disk.sync_folder()
    assert disk.left_by_a_crash("a") == {b"", b"x", b"xy"}
    disk.sync("a")
    assert disk.left_by_a_crash("a") == {b"xy"}


def test_no_shorter_way_than_save_is_safe():
    """All sequences of up to three of its steps, and the one of four that `save` takes."""
    steps = {
        "write new": lambda disk: disk.write("new", b"newer"),
        "write chat": lambda disk: disk.write("chat", b"newer"),
        "sync new": lambda disk: disk.sync("new"),
        "sync chat": lambda disk: disk.sync("chat"),
        "rename": lambda disk: disk.rename("new", "chat"),
        "sync folder": lambda disk: disk.sync_folder(),
    }

    def is_safe(names):
        disk = CrashingFolder({"chat": b"old"})
        try:
            for name in names:
                steps[name](disk)
        except FileNotFoundError:
            return False
        on_the_way = [left["chat"] for _, left in disk.steps]
        safe = all(left <= {b"old", b"newer"} for left in on_the_way)
        return safe and disk.left_by_a_crash("chat") == {b"newer"}

    for length in (1, 2, 3):
        assert not any(is_safe(names) for names in itertools.product(steps, repeat=length))
    assert is_safe(["write new", "sync new", "rename", "sync folder"])


# ── Measured times ────────────────────────────────────────────────────────────


def test_measured_times_say_from_where_fetching_is_faster():
    lengths, computed = (10, 110, 200), [2.0, 12.0, 21.0]  # 1 + length / 10
    assert crossing(lengths, computed, [2.5, 7.5, 12.0]) == pytest.approx(20)
    assert crossing(lengths, computed, [1.0, 6.0, 10.5]) == 0
    assert crossing(lengths, computed, [1.0, 12.0, 21.9]) == float("inf")


# ── The others ────────────────────────────────────────────────────────────────


def test_the_small_machine_makes_room_by_itself():
    machine = SmallMachine(1, 1)
    machine.put("A", device=True)
    machine.put("B", device=True)
    assert machine.places["A"].host is not None and machine.places["A"].device is None
    machine.put("C", device=True)
    assert machine.places["A"].host is None and machine.places["B"].host is not None
    assert (machine.device.num_free, machine.host.num_free) == (0, 0)


def test_the_model_with_reversed_heads_is_another_one_with_the_same_answers(lm):
    other, ids = with_heads_reversed(lm), lm.encode("class Queue:\n    def push(")
    assert float((other.logits(ids) - lm.logits(ids)).abs().max()) < 1e-3
    assert model_fingerprint(other.transformer) != model_fingerprint(lm.transformer)


def test_the_viewer_says_where_blocks_are(lm, tmp_path):
    settings = minikv.EngineConfig(
        num_blocks=6, host_blocks=2, disk_path=tmp_path, max_batch_tokens=128, max_num_seqs=4,
        attention="torch",
    )  # fmt: skip
    engine = minikv.Engine(lm, settings)
    start = write_code(lm, 16, "start")
    texts = {name: start + write_code(lm, 64, name) for name in "AB"}
    history = TierHistory(engine)
    engine.generate([texts["A"]], ONE_TOKEN)
    first = history.snap("A", {"A": texts["A"]})
    assert first.count("device") == 5 and first.count("host") == first.count("disk") == 0
    engine.generate([texts["B"]], ONE_TOKEN)
    assert engine.tiers.disk.wait()
    second = history.snap("B", texts)
    assert len(second.blocks) == 9 and second.count("device") == 6
    assert [second.count(tier) for tier in ("host", "disk")] == [2, 1]
    assert history.describe(1, 0).endswith("A: 11223. B: 11111.")
    assert "blocks on the host: 0 → 2" in history.picture().caption.lower()
    assert history.frame(0).get_size_inches()[1] == history.frame(1).get_size_inches()[1]


def test_an_engine_without_tiers_has_nothing_to_see(lm):
    with pytest.raises(ValueError, match="host_blocks"):
        TierHistory(minikv.Engine(lm, minikv.EngineConfig(num_blocks=4)))
