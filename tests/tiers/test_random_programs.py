"""Random programs with everything switched on: tiers, quantised K and V, compiled kernels, the
prefix cache, drafts, samples, beams, aborts, sessions, swapping, failures, restarts; also
interrupted.

    MINIKV_SEEDS=1000:9000 pytest -s tests/tiers/test_random_programs.py      more of them
"""

import os

import pytest

pytest.importorskip("numba")

from programs import play_many
from thorough import thorough_after

LENGTH = 60  # operations of a program


def seeds(first, end):
    first, _, end = os.environ.get("MINIKV_SEEDS", f"{first}:{end}").partition(":")
    return range(int(first), int(end))


@pytest.mark.parametrize("first", thorough_after(1, range(0, 120, 30)))
def test_random_programs(first):
    seen = play_many(seeds(first, first + 30), LENGTH)
    print(dict(seen))
    assert seen["requests"] > 5 * seen["programs"] and seen["tokens"] > 50 * seen["programs"]
    for what in (
        "preemptions", "swaps_in", "failures", "hits of host", "hits of disk", "accepted drafts",
    ):  # fmt: skip
        assert seen[what], what


def test_interrupted_programs():
    seen = play_many(seeds(0, 6), LENGTH, interrupted=True)
    print(dict(seen))
    assert seen["interrupts inside"] >= seen["interrupts"] > seen["programs"]
