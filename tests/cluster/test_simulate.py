"""The simulator against one that takes step after step, and against what must be true of any."""

import random
import re

import pytest

from minikv.cluster.routing import EVERY_POLICY, ByPrefix, LeastLoaded, RoundRobin
from minikv.cluster.simulate import Arrival, Blocks, NetworkLink, StepSeconds, simulate
from minikv.course.bench import cluster as bench
from minikv.course.commands import main

COSTS = StepSeconds(start=1e-3, prefill=1e-5, decode=1e-4)
SIZE = 16


def requests(seed, number=60, gap=0.02, shared=5):
    """Prompts that begin with one of `shared` prefixes; names stand for a block and all before."""
    draw, time, found = random.Random(seed), 0.0, []
    for index in range(number):
        group, length = draw.randrange(shared), draw.randrange(1, 12)
        names = [(group, i) if i < 6 else (index, i) for i in range(length)]
        num_tokens = length * SIZE - draw.randrange(SIZE)
        found.append(Arrival(time, names, num_tokens, draw.randrange(1, 40), group))
        time += draw.expovariate(1 / gap)
    return found


def step_by_step(arrivals, costs, chunk):
    """One worker without a cache, a step at a time: (first token, end) of each request."""
    waiting, time, queue, decoding = list(enumerate(arrivals)), 0.0, [], {}
    firsts, ends = {}, {}
    while waiting or queue or decoding:
        if not queue and not decoding:
            time = max(time, waiting[0][1].time)
        while waiting and waiting[0][1].time <= time:
            index, arrival = waiting.pop(0)
            queue.append([index, arrival.num_tokens, 0])
        room = chunk
        for prompt in queue:  # a step's budget may hold the end of one and the beginning of another
            prompt[2] = min(room, prompt[1])
            room -= prompt[2]
        time += costs.start + costs.prefill * (chunk - room) + costs.decode * len(decoding)
        for index in list(decoding):
            decoding[index] -= 1
            if not decoding[index]:
                ends[index] = time
                del decoding[index]
        for prompt in list(queue):
            prompt[1] -= prompt[2]
            if prompt[1] == 0:
                index = prompt[0]
                queue.remove(prompt)
                firsts[index] = ends[index] = time
                if arrivals[index].num_output > 1:
                    decoding[index] = arrivals[index].num_output - 1
    return [(firsts[i], ends[i]) for i in range(len(arrivals))]


@pytest.mark.parametrize("gap", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_times_are_those_of_single_steps(seed, gap):
    """Nothing repeats, so a cache changes nothing. The simulator counts fractions of a step, so
    an event may come a step early, and what waits for it is early by as much."""
    arrivals = [one._replace(names=()) for one in requests(seed, gap=gap)]
    expected = step_by_step(arrivals, COSTS, chunk=64)
    report = simulate(arrivals, LeastLoaded(1, SIZE), COSTS, chunk=64)
    for job, (first, end) in zip(report.jobs, expected, strict=True):
        assert job.first_token == pytest.approx(first, abs=5e-3)  # two of the longest steps
        assert job.end == pytest.approx(end, abs=5e-3)


def test_one_request_by_hand():
    arrivals = [Arrival(0.0, ["a"], 16, 3)]
    [job] = simulate(arrivals, LeastLoaded(1, SIZE), COSTS, chunk=16).jobs
    assert job.first_token == pytest.approx(1e-3 + 16e-5)
    assert job.end == pytest.approx(1e-3 + 16e-5 + 2 * (1e-3 + 1e-4))


@pytest.mark.parametrize("policy", EVERY_POLICY.values(), ids=EVERY_POLICY)
@pytest.mark.parametrize("decode_workers", [0, 2])
def test_every_request_is_served_in_order(policy, decode_workers):
    arrivals = requests(5, number=200, gap=0.003)
    link = NetworkLink(1e-3, 1e9, 1000) if decode_workers else None
    report = simulate(
        arrivals, policy(3, SIZE), COSTS, cache_blocks=30, max_num_seqs=4,
        decode_workers=decode_workers, hand_over=link,
    )  # fmt: skip
    assert [job.arrival for job in report.jobs] == arrivals
    for job in report.jobs:
        assert job.arrival.time < job.first_token <= job.end
        assert (job.end > job.first_token) == (job.arrival.num_output > 1)
        assert 0 <= job.num_hits <= len(job.arrival.names)
    assert 0 < report.ttft(50) <= report.ttft(99)
    assert (report.in_time(report.ttft(100), report.tbt(100)), report.in_time(0, 1)) == (1, 0)
    assert report.imbalance >= 1
    end = max(job.end for job in report.jobs)
    assert all(busy <= end + 1e-9 for busy in report.busy)
    if decode_workers:
        blocks = sum(len(one.names) for one in arrivals if one.num_output > 1)
        assert report.network_bytes == 1000 * blocks


def test_one_worker_without_a_bound_finds_what_any_cache_could():
    arrivals = requests(6, number=150)
    blocks, hits = Blocks(), 0
    for arrival in arrivals:
        hits += blocks.hits(arrival.names)
        blocks.put(arrival.names)
    report = simulate(arrivals, RoundRobin(1, SIZE), COSTS)
    assert sum(job.num_hits for job in report.jobs) == hits > 0


def test_by_prefix_finds_more_than_round_robin():
    arrivals = requests(7, number=400, gap=0.004, shared=12)
    one = simulate(arrivals, RoundRobin(1, SIZE), COSTS).hit_rate
    spread = simulate(arrivals, RoundRobin(8, SIZE), COSTS).hit_rate
    prefix = simulate(arrivals, ByPrefix(8, SIZE), COSTS)
    assert spread < 0.9 * prefix.hit_rate <= one
    assert prefix.hit_rate > 0.9 * one


def test_a_store_gives_all_workers_the_hits_of_one():
    arrivals = requests(8, number=300, gap=0.05)
    fast = NetworkLink(0.0, 1e12, 1000)
    one = simulate(arrivals, RoundRobin(1, SIZE), COSTS)
    private = simulate(arrivals, RoundRobin(6, SIZE), COSTS)
    shared = simulate(arrivals, RoundRobin(6, SIZE), COSTS, store=fast)
    assert private.hit_rate < shared.hit_rate == pytest.approx(one.hit_rate, abs=0.02)
    distinct = len({name for one in arrivals for name in one.names})
    fetched = sum(job.num_fetched for job in shared.jobs)
    assert fetched > 0 and shared.network_bytes == 1000 * (distinct + fetched)


def test_what_is_quicker_computed_is_not_fetched():
    arrivals = requests(9, number=100)
    bandwidth = 1000 / (2 * SIZE * COSTS.prefill)  # a block takes twice its prefill
    slow = NetworkLink(0.0, bandwidth, 1000)
    report = simulate(arrivals, RoundRobin(4, SIZE), COSTS, store=slow)
    assert not any(job.num_fetched for job in report.jobs)
    assert report.hit_rate == simulate(arrivals, RoundRobin(4, SIZE), COSTS).hit_rate


def test_blocks_of_one_prompt_go_from_the_last_on():
    blocks = Blocks(3)
    assert blocks.put("abc") == (3, [])
    assert blocks.put("abd") == (1, ["c"])
    assert blocks.hits("abc") == 2
    assert blocks.put("xyzw") == (4, ["d", "b", "a", "w"])
    assert blocks.hits("xyzw") == 3


def test_prefill_apart_keeps_long_prompts_from_the_decodes():
    """What a decode waits for is the longest chunk beside it; on a worker of its own, none."""
    arrivals = [Arrival(0.0, (), 10, 200)]
    arrivals += [Arrival(0.01 * i, (), 4000, 1) for i in range(1, 20)]
    together = simulate(arrivals, LeastLoaded(1, SIZE), COSTS, chunk=512)
    apart = simulate(
        arrivals, LeastLoaded(1, SIZE), COSTS, chunk=512, decode_workers=1,
        hand_over=NetworkLink(1e-3, 1e9, 1000),
    )  # fmt: skip
    assert together.tbt(50) > 3 * apart.tbt(50)


def test_a_trace_without_hashes_is_routed_by_load(tmp_path, monkeypatch, capsys):
    """Azure's format: prompts share nothing, and their K and V still go to the decode workers."""
    file = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{i:02}.0,{400 + 300 * i},{1 + i}" for i in range(20)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    arrivals = bench.arrivals_of(str(file))
    assert [len(one.names) for one in arrivals[:4]] == [1, 2, 2, 3]
    assert len({name for one in arrivals for name in one.names}) == sum(
        len(one.names) for one in arrivals
    )
    monkeypatch.setattr(bench, "measured_costs", lambda lm: COSTS)
    assert main(["bench", "cluster", "--trace", str(file), "--workers", "1", "2"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r"[12]  ", line)]
    cells = [re.split(r"  +", row.strip()) for row in rows]
    assert [row[:2] for row in cells] == [
        ["1", "least loaded"], ["2", "least loaded"], ["2", "least loaded, half of them decode"],
    ]  # fmt: skip
    assert all(float(row[2]) == 0 for row in cells)
    assert float(cells[0][-1]) == 0 < float(cells[2][-1])


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="hand_over"):
        simulate([], LeastLoaded(1), COSTS, decode_workers=1)
    with pytest.raises(ValueError, match="chunk"):
        simulate([], LeastLoaded(1), COSTS, chunk=0)
