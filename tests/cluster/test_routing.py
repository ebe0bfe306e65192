"""Routers: loads that add up, and who gets what."""

import random

import pytest
from thorough import thorough_after

from minikv.cluster.routing import (
    EVERY_POLICY,
    ByOwnPrefix,
    ByPrefix,
    LeastLoaded,
    RoundRobin,
    Sticky,
)
from minikv.cluster.simulate import simulate
from minikv.course.chapters.ch13_distributed_kv.fleet import BLOCK, COSTS, best_hit_rate, chats


@pytest.mark.parametrize("policy", EVERY_POLICY.values(), ids=EVERY_POLICY)
def test_loads_are_what_is_on_its_way(policy):
    draw, router = random.Random(1), policy(5, block_size=4)
    on_its_way = []
    for step in range(400):
        names = [(draw.randrange(6), *range(i)) for i in range(draw.randrange(9))]
        on_its_way.append(router.route(names, 4 * len(names) + 1 + draw.randrange(4), step % 7))
        while on_its_way and draw.random() < 0.45:
            router.computed(on_its_way.pop(draw.randrange(len(on_its_way))))
        loads = [0] * 5
        for ticket in on_its_way:
            assert ticket.num_tokens >= 1
            loads[ticket.worker] += ticket.num_tokens
        assert router.loads == loads
    for ticket in on_its_way:
        router.computed(ticket)
    assert router.loads == [0] * 5


def test_round_robin_takes_turns_and_least_loaded_the_shortest_queue():
    turns = RoundRobin(3)
    assert [turns.route((), 9).worker for _ in range(5)] == [0, 1, 2, 0, 1]
    least = LeastLoaded(2)
    assert least.route((), 30).worker == 0
    assert [least.route((), 10).worker for _ in range(3)] == [1, 1, 1]
    assert least.route((), 10).worker == 0


def test_idle_workers_share_the_work():
    router = LeastLoaded(4)
    workers = []
    for _ in range(40):
        ticket = router.route((), 100)
        workers.append(ticket.worker)
        router.computed(ticket)
    assert {workers.count(one) for one in range(4)} == {10}


def test_a_session_stays_until_its_worker_has_too_much():
    router = Sticky(4, bound=2.0)
    first = router.route((), 100, "a")
    assert [router.route((), 1, "b").worker for _ in range(5)] == [1] * 5
    router.computed(first)
    assert router.route((), 100, "a").worker == first.worker
    router.route((), 900, "a")
    moved = router.route((), 50, "a")
    assert moved.worker != first.worker
    assert router.route((), 1, "a").worker == moved.worker


def test_a_prefix_draws_its_requests_until_the_queue_costs_more():
    router = ByPrefix(3, block_size=10, bound=100)
    names = ["p1", "p2", "p3"]
    router.computed(router.route(names, 31))
    # 30 tokens are held by worker 0: up to there, waiting is cheaper than computing them again.
    tickets = [router.route([*names, f"q{i}"], 41) for i in range(6)]
    assert [ticket.worker for ticket in tickets[:3]] == [0, 0, 0]
    assert {ticket.worker for ticket in tickets} > {0}
    assert tickets[0].num_tokens == 11


def test_equal_prompts_spread_while_there_are_idle_workers_and_then_share():
    router = ByPrefix(2, block_size=16)
    tickets = [router.route(["a", "b"], 40) for _ in range(4)]
    assert [ticket.worker for ticket in tickets] == [0, 1, 0, 1]
    assert [ticket.num_tokens for ticket in tickets] == [40, 40, 8, 8]


def test_what_a_worker_evicted_draws_nothing():
    router = ByPrefix(2, block_size=16)
    first = router.route(["a", "b"], 40)
    router.computed(first)
    router.removed(first.worker, ["b"])
    assert router.hits(["a", "b"]) == {first.worker: 1}
    router.removed(first.worker, ["a", "never held"])
    assert router.hits(["a", "b"]) == {}
    assert router.holders == {}


def test_a_hit_is_the_whole_beginning():
    router = ByPrefix(2, block_size=16)
    router.holders = {"a": {0, 1}, "b": {0}, "c": {0, 1}}
    assert router.hits(["a", "b", "c"]) == {0: 3, 1: 1}
    assert router.hits(["b", "a"]) == {0: 2}
    assert router.hits(["x", "a"]) == {}


def test_a_favourite_prefix_does_not_make_a_favourite_worker():
    """With a bound, no worker gets much more than its share, even if all prompts begin alike."""
    router, draw = ByPrefix(4, block_size=16, bound=1.2), random.Random(2)
    sent = [0] * 4
    for i in range(2_000):
        ticket = router.route(["system", i], 16 + draw.randrange(1, 64))
        sent[ticket.worker] += ticket.num_tokens
        router.computed(ticket)
    assert max(sent) <= 1.2 * 1.1 * sum(sent) / 4


def test_what_a_quarter_of_the_workers_hold_counts_as_held_by_all():
    router = ByOwnPrefix(16, block_size=16)
    for worker in range(3):
        router.stored(worker, ["system", worker])
    assert router.hits(["system"]) == {0: 1, 1: 1, 2: 1}
    router.lost(15)
    router.stored(3, ["system"])
    assert router.hits(["system", 2]) == {worker: 1 for worker in range(15)} | {2: 2}
    router.removed(2, ["system"])
    assert router.hits(["system", 2]) == {worker: 1 for worker in range(15) if worker != 2}
    router.back(15)
    router.stored(2, ["system"])
    assert router.hits(["system"]).keys() == set(range(16))
    few = ByOwnPrefix(4, block_size=16)
    few.stored(0, ["a"])
    few.stored(1, ["a"])
    assert few.hits(["a"]) == {0: 1, 1: 1}, "two of four hold a conversation that has moved"


def test_to_wait_counts_half_of_computing_again():
    for policy, waits in ((ByPrefix, 320), (ByOwnPrefix, 640)):
        router = policy(2, block_size=16, bound=100)
        router.stored(0, list(range(20)))  # 320 tokens
        for load, worker in ((waits - 1, 0), (waits + 1, 1)):
            router.loads = [load, 0]
            assert router.route(list(range(20)), 321).worker == worker
            router.holders = {i: {0} for i in range(20)}


@pytest.mark.parametrize("workers", thorough_after(2, [4, 16, 64]))
def test_what_all_prompts_share_misleads_by_prefix_and_not_by_own_prefix(workers):
    arrivals = chats(workers)
    best = best_hit_rate(arrivals)
    plain, own = (
        simulate(arrivals, policy(workers, BLOCK), COSTS, cache_blocks=300)
        for policy in (ByPrefix, ByOwnPrefix)
    )
    assert own.hit_rate > 0.98 * best and own.hit_rate > plain.hit_rate
    assert own.imbalance < 0.8 * plain.imbalance and own.ttft(99) < 0.7 * plain.ttft(99)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4"])
def test_numbers_are_checked(wrong):
    with pytest.raises(ValueError, match="num_workers"):
        LeastLoaded(wrong)
    with pytest.raises(ValueError, match="block_size"):
        LeastLoaded(2, wrong)
