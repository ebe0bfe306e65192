"""Blocks that are chosen, and what a query that reads only these makes of the next token."""

import pytest
import torch

from minikv.course.chapters.ch16_newer_models.choosing import (
    SIZE,
    by_bounds,
    divergence,
    the_latest,
)
from minikv.course.chapters.ch16_newer_models.pictures import choice_picture, memory_picture


def test_a_key_that_a_query_asks_for_is_among_the_chosen():
    """In either direction of a channel: the bound takes the larger of two products."""
    k = torch.randn(6 * SIZE + 3, 1, 8, generator=torch.Generator().manual_seed(0)) / 10
    k[2 * SIZE + 5, 0, 1], k[4 * SIZE, 0, 3] = 9.0, -9.0
    up, down = torch.zeros(2, 1, 1, 8)
    up[..., 1], down[..., 3] = 1.0, -1.0
    assert by_bounds(up, k, 1) == [[2]] and by_bounds(down, k, 1) == [[4]]
    assert by_bounds(torch.cat([up, down], 1), k, 2) == [[2, 4]]
    assert by_bounds(torch.cat([up, down]), k.expand(-1, 2, -1), 1) == [[2], [4]]
    assert len(by_bounds(up, k, 99)[0]) == 6
    assert the_latest(up, k, 2) == [[4, 5]] and the_latest(up, k, 99) == [[*range(6)]]


@pytest.mark.parametrize("length", [6 * SIZE, 5 * SIZE + 1])
def test_all_blocks_are_full_attention_and_fewer_are_not(tinypy, length):
    text = list(tinypy.lm.encode("def area(width, height):\n    return width * height\n\n" * 9))
    text = text[:length]
    assert len(text) == length
    for choose in (by_bounds, the_latest):
        assert abs(divergence(tinypy.lm, [text], 3, choose, 99)) < 1e-6
        assert divergence(tinypy.lm, [text], 3, choose, 1) > 1e-3


def test_pictures_tell_their_numbers():
    latest, chosen = {2: 0.66, 4: 0.5, 8: 0.45}, {2: 0.68, 4: 0.3, 8: 0.2}
    alt = choice_picture({"the latest": latest, "the highest bounds": chosen}, 62).alt
    assert alt.startswith(
        "From 4 of 62 blocks on, chosen ones come closer than the latest. KL in bits"
    )
    assert "the latest: 0.660 with 2, 0.500 with 4, 0.450 with 8; the highest bounds: 0.680" in alt
    alt = memory_picture({"in groups": {124: 2**20, 324: 3 * 2**19}}).alt
    assert "MiB at 124, 324 tokens: in groups: 1.0, 1.5" in alt
