"""A thousand random faults: tokens stay those of one engine, and no block leaks anywhere."""

import random

import pytest
from handover_case import LEASE, ChaosNetwork, World, expected, greedy
from helpers import assert_empty, small

from minikv import Engine

NUM_FAULTS = 1000  # in all rounds
ROUNDS = 10


@pytest.fixture(scope="module")
def requests(llama):
    """Prompts that share beginnings, their params, and what one engine says."""
    long, other = llama.prompts(36, 30)
    prompts = [long, long[:25], long[:18] + other[:9], other, other[:13], other[:3]]
    params = [
        greedy(4),
        greedy(6, temperature=1.0, seed=2),
        greedy(3, n=2, temperature=1.0, seed=4),
    ]
    engine = Engine(llama.lm, small(attention="torch"))
    return [
        (prompt, one, expected(engine, [prompt], one)[0]) for prompt in prompts for one in params
    ]


def trouble(rng, world, numbers) -> None:
    """One thing that goes wrong."""
    kind = rng.choice(["abort", "kill", "interrupt", "silence"])
    if kind == "abort":
        world.front.abort(rng.choice(numbers))
    elif kind == "kill":
        address = rng.choice(list(world.workers))
        role = address.split()[0]
        world.kill(address)
        world.front.add_worker(role, world.start(role))
    elif kind == "interrupt":
        rng.choice(list(world.workers.values())).engine._is_sound = False
    else:
        world.clock.now += LEASE + 0.1  # everybody seems to be dead


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_faults(llama, requests, seed):
    rng = random.Random(seed)
    network = ChaosNetwork(rng)
    world = World(llama.lm, prefill=2, decode=2, network=network, num_blocks=40, max_num_seqs=4)
    asked, num_troubles = [], 0
    while network.num_faults + num_troubles < NUM_FAULTS / ROUNDS:
        if rng.random() < 0.3:
            prompt, params, want = rng.choice(requests)
            asked.append((world.front.submit(prompt, params), want))
        if asked and rng.random() < 0.1:
            trouble(rng, world, [number for number, _ in asked])
            num_troubles += 1
        for worker in world.workers.values():
            if rng.random() < 0.8:
                worker.step()
            worker.check()
        network.deliver_some()
        world.front.poll()
        world.clock.now += rng.random() * LEASE / 20
    network.is_faulty = False
    world.drain(seconds=LEASE / 30)
    finished = 0
    for number, want in asked:
        answer = world.front.answers[number]
        assert answer.is_finished and not answer.error
        if "abort" in answer.finish_reasons:
            pairs = zip(answer.token_ids, want, strict=False)
            assert all(mine == one[: len(mine)] for mine, one in pairs)
        else:
            finished += 1
            assert answer.token_ids == want
    assert finished > len(asked) / 2
    assert sum(worker.num_taken for worker in world.of("decode")) > 0
    for worker in world.workers.values():
        assert_empty(worker.engine)
    assert all(not one.landings.landings and not one.loads for one in world.of("decode"))
    assert all(not one.jobs and not one.sendings.num_transfers for one in world.of("prefill"))
