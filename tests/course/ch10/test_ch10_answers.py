"""Chapter 10's own code: axes, the crossover, pictures."""

import importlib.util

import pytest
import torch

from minikv.course.chapters.ch10_quantised_kv.answers import (
    before_the_crossover,
    int4_along,
)
from minikv.course.chapters.ch10_quantised_kv.given import (
    keys_and_values,
)
from minikv.course.chapters.ch10_quantised_kv.pictures import FACTORS, OutlierFilm, rulers_picture
from minikv.course.measure.running_table import WORKLOAD
from minikv.quant.formats import format_of
from minikv.quant.store import block_bytes


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_k_of_tinypy_is_closer_by_channel_in_every_layer(lm):
    """As the notebook says, and at as many scales."""
    k, _ = keys_and_values(lm, lm.encode(WORKLOAD)[:128])
    for layer in k.unflatten(2, (-1, 64)):
        errors = [float((int4_along(layer, dim) - layer).square().mean()) for dim in (-1, -2)]
        assert errors[1] < errors[0]


def test_the_bytes_of_the_crossover_are_the_engines(lm):
    assert before_the_crossover()["int8 bytes"] * 16 == block_bytes(
        format_of("int8", 16), lm.config, 16
    )
    assert lm.config.kv_bytes_per_token(torch.float32) == 5120


def test_the_crossover_is_where_both_steps_take_equally_long():
    answers = before_the_crossover()
    for batch, key in ((1, "crossover"), (8, "crossover at 8")):
        context = answers[key]
        in_float = 800 + batch * context * 5120 / 20e3
        in_int8 = 800 + 45 + 50 * batch + batch * context * answers["int8 bytes"] / 20e3
        assert in_float == pytest.approx(in_int8)
    assert answers["slowest reading"] == pytest.approx(20 * 1320 / 5120)


@pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="needs Numba")
def test_the_compiled_scores_keep_their_bound():
    from minikv.course.chapters.ch10_quantised_kv.compiled import seconds_by_context

    found = seconds_by_context([16, 100], turns=1)  # raises if a score is further off
    assert [len(times) for times in found.values()] == [2, 2]


def test_the_film_says_what_it_shows_and_the_player_steps():
    film = OutlierFilm(drawn(0, 16, 32), channel=9)
    by_token, by_channel = zip(*map(film.errors, range(len(FACTORS))), strict=True)
    assert list(by_token) == sorted(by_token) and max(by_channel) == pytest.approx(by_channel[0])
    assert film.describe(5) in film.picture().alt
    player = film.widget()
    first = player.picture.value
    player.slider.value = player.slider.max
    assert player.picture.value != first and "times 32" in player.caption.value


def test_rulers_are_said_in_words():
    x = torch.tensor([1.0, 2.5])
    picture = rulers_picture(x, {"one: 3 marks": torch.arange(3.0), "two": torch.arange(6) / 2})
    assert "one 0.50, two 0.00" in picture.alt and "1, 2.5" in picture.alt
