"""Random programs with everything switched on: tiers, quantised K and V, compiled kernels, the
prefix cache, drafts, samples, beams, aborts, sessions, swapping, failures, restarts; also
interrupted.

    MINIKV_SEEDS=1000:9000 pytest -s tests/tiers/test_random_programs.py      more of them
"""

import os
from collections import Counter

import pytest

pytest.importorskip("numba")

from helpers import assert_reached
from programs import Player, any_setup, grouped_setup, play_many
from thorough import thorough_after

from minikv import RadixCache

LENGTH = 60  # operations of a program


def seeds(first, end):
    first, _, end = os.environ.get("MINIKV_SEEDS", f"{first}:{end}").partition(":")
    return range(int(first), int(end))


ALL = [(first, 30) for first in range(0, 120, 30)]


@pytest.mark.parametrize(("first", "count"), thorough_after(1, [(3, 6), *ALL]))
def test_random_programs(first, count):
    seen = play_many(seeds(first, first + count), LENGTH)
    print(dict(seen))
    assert seen["requests"] > 5 * seen["programs"] and seen["tokens"] > 50 * seen["programs"]
    often = dict.fromkeys(["preemptions", "hits of host", "hits of disk"], count // 3)
    often |= dict.fromkeys(["swaps_in", "failures"], 1 + count // 6)
    assert_reached(seen, often | {"accepted drafts": count // 2})


@pytest.mark.parametrize("first", thorough_after(0, range(0, 120, 15)))
def test_random_programs_with_groups(first):
    """Also K and V themselves, of running sequences after each operation."""
    seen = play_many(seeds(first, first + 15), LENGTH, setup_of=grouped_setup)
    print(dict(seen))
    assert seen["engines with groups"] > seen["programs"]  # some restart
    cases = "sequences with groups", "preemptions", "failures", "copies", "hit_tokens"
    assert_reached(seen, dict.fromkeys((*cases, "accepted drafts"), 1))


@pytest.mark.parametrize("setup_of", thorough_after(0, [any_setup, grouped_setup]))
def test_interrupted_programs(setup_of):
    seen = play_many(seeds(0, 6), LENGTH, True, setup_of)
    print(dict(seen))
    assert seen["interrupts inside"] >= seen["interrupts"] > seen["programs"]


def test_samples_that_fork_after_a_clear(tmp_path):
    """Their beginning was cleared with the prompt's: it is cached again when a block fills."""
    config = dict(block_size=4, max_batch_tokens=8, attention="torch")
    setup = dict(config=config, loop="plain", windows=(None, None), cache=RadixCache)
    player = Player(setup, tmp_path, Counter())
    player.add(list(range(1, 11)), dict(max_tokens=7, n=2), False)
    player.step(0)  # computes two blocks
    player.clear(0)
    player.step(0)  # the other two tokens, and the fork
    cache, request = player.engine.cache, player.served[0]
    assert len(request.sequences) == 2 and cache.num_cached_blocks == 0
    player.steps(2)
    assert all(cache.match(one.token_ids[:12]).num_tokens == 12 for one in request.sequences)
    player.drain()
