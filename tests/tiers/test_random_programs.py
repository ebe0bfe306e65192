"""Random programs with everything switched on: tiers, quantised K and V, compiled kernels, the
prefix cache, drafts, samples, beams, aborts, sessions, swapping, failures, restarts; also
interrupted.

    MINIKV_SEEDS=1000:9000 pytest -s tests/tiers/test_random_programs.py      more of them
"""

import os

import pytest

pytest.importorskip("numba")

from programs import play_many

LENGTH = 60  # operations of a program


def seeds(default):
    first, _, end = os.environ.get("MINIKV_SEEDS", f"0:{default}").partition(":")
    return range(int(first), int(end))


def test_random_programs():
    seen = play_many(seeds(100), LENGTH)
    print(dict(seen))
    assert seen["requests"] > 5 * seen["programs"] and seen["tokens"] > 50 * seen["programs"]
    for what in (
        "preemptions", "swaps_in", "failures", "hits of host", "hits of disk", "accepted drafts",
    ):  # fmt: skip
        assert seen[what], what


def test_interrupted_programs():
    seen = play_many(seeds(6), LENGTH, interrupted=True)
    print(dict(seen))
    assert seen["interrupts inside"] >= seen["interrupts"] > seen["programs"]
