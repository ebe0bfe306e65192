"""Fleets of workers, simulated: made-up conversations, and `fleet(arrivals, router)` for one."""

import random
from collections.abc import Iterator, Sequence

from minikv.cluster.routing import Router
from minikv.cluster.simulate import Arrival, Blocks, FleetReport, NetworkLink, StepSeconds, simulate

BLOCK, SYSTEM, TURNS = 16, 4, 6  # tokens; blocks that all share; turns per conversation
COSTS = StepSeconds(2e-3, 1e-4, 3e-4)  # per step, per prompt token, per sequence that decodes
WORKER_BLOCKS = 300
NETWORK = NetworkLink(1e-3, 1.25e9, 81_920)  # 10 Gbit/s, blocks of tinypy


def chats(workers: int, talks: int = 10, system: int = SYSTEM, seed: int = 13) -> list[Arrival]:
    """Conversations of six turns, `talks` per worker, that begin within a minute. Every prompt has
    all that was said before, and begins with the same `system` blocks. Names of blocks are pairs
    (conversation, place)."""
    return sorted(_turns(workers * talks, system, seed), key=lambda one: one.time)


def _turns(talks: int, system: int, seed: int) -> Iterator[Arrival]:
    draw = random.Random(seed)
    for talk in range(talks):
        time, length = draw.uniform(0, 60), system + draw.randrange(2, 8)
        for _ in range(TURNS):
            names = [("all", i) if i < system else (talk, i) for i in range(length)]
            answer = draw.randrange(16, 64)
            yield Arrival(time, names, length * BLOCK - draw.randrange(BLOCK), answer, talk)
            length += answer // BLOCK + draw.randrange(1, 5)
            time += draw.expovariate(1 / 8)


def denser(arrivals: Sequence[Arrival], times: int) -> list[Arrival]:
    """The same requests in a fraction of the time."""
    return [one._replace(time=one.time / times) for one in arrivals]


def best_hit_rate(arrivals: Sequence[Arrival]) -> float:
    """What one cache without a bound would find."""
    blocks, hits = Blocks(), 0
    for one in arrivals:
        hits += blocks.hits(one.names)
        blocks.put(one.names)
    return hits / max(1, sum(len(one.names) for one in arrivals))


def fleet(
    arrivals: Sequence[Arrival], router: Router, store: NetworkLink | None = None
) -> FleetReport:
    return simulate(arrivals, router, COSTS, cache_blocks=WORKER_BLOCKS, store=store)
