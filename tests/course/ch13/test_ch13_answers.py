"""Chapter 13: what its checks and its notebook rest on."""

import pytest
from tiers_case import fetch_everything

import minikv
from minikv.cluster.breaker import Breaker
from minikv.cluster.routing import ByOwnPrefix, ByPrefix
from minikv.course.chapters.ch13_distributed_kv.fleet import BLOCK, best_hit_rate, chats, fleet
from minikv.course.chapters.ch13_distributed_kv.given import Clock, calls_to_the_dead
from minikv.course.chapters.ch13_distributed_kv.store_viewer import STORE, StoreFlow
from minikv.course.workloads.workload import write_code

ONE_TOKEN = minikv.SamplingParams(max_tokens=1)


@pytest.mark.thorough
def test_what_all_prompts_share_misleads_a_router_by_prefix():
    """What the notebook says of the system prompt, and of the correction."""
    shares = []
    for system, router in ((4, ByPrefix), (0, ByPrefix), (4, ByOwnPrefix)):
        arrivals = chats(64, system=system)
        report = fleet(arrivals, router(64, BLOCK))
        shares.append(report.hit_rate / best_hit_rate(arrivals))
    assert shares[0] < 0.8 and shares[1] > 0.95 and shares[2] > 0.95


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


def test_a_breaker_bounds_what_an_outage_costs():
    """What the notebook says of it."""
    for down in (60, 600, 3600):
        clock = Clock()
        breaker = Breaker(first=0.5, most=30.0, clock=clock)
        calls = calls_to_the_dead(breaker, clock, down, limit=1.0, pause=0.1)
        assert calls <= 6 + down / 30
        clock.now += 30
        assert breaker.allows()
