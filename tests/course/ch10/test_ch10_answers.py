"""Chapter 10's own code: axes, whose error it is, pictures."""

import pytest
import torch

from minikv.course.chapters.ch10_quantised_kv.answers import int4_along
from minikv.course.chapters.ch10_quantised_kv.given import ALONE, FIVE_BITS, MORE, keys_and_values
from minikv.course.chapters.ch10_quantised_kv.pictures import FACTORS, OutlierFilm, rulers_picture
from minikv.course.workloads.corpus import read_corpus
from minikv.course.workloads.running_table import WORKLOAD
from minikv.quant import quality
from minikv.quant.quality import engine_scheme


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_k_of_tinypy_is_closer_by_channel_in_every_layer(lm):
    """As the notebook says, and at as many scales."""
    k, _ = keys_and_values(lm, lm.encode(WORKLOAD)[:128])
    for layer in k.unflatten(2, (-1, 64)):
        errors = [float((int4_along(layer, dim) - layer).square().mean()) for dim in (-1, -2)]
        assert errors[1] < errors[0]


@pytest.mark.thorough
def test_v_is_most_of_the_error_of_int4_and_the_fifth_bit_belongs_to_it(lm):
    """What the notebook says of KL, on a few of its windows."""
    windows = [ids for ids in quality.cut(lm, read_corpus().held_out, 192) if len(ids) == 192]
    found = quality.measure(lm, windows[:4], (engine_scheme("int4"), *ALONE, *MORE), block_size=32)
    kl = {name: quality.kl_per_token(one).value for name, one in found.items()}
    assert 3 * kl["K by channel"] < kl["V by channel"] < kl["V by token"] < kl["int4"]
    assert kl["int4, but V in 5 bits"] < kl[FIVE_BITS.name] < kl["int4, K and V by channel"]
    ours, theirs = (way.bytes_per_token(lm.config, 32) for way in MORE[1:])
    assert ours < theirs


def test_the_film_says_what_it_shows_and_the_player_steps():
    film = OutlierFilm(drawn(0, 16, 32), channel=9)
    by_token, by_channel = zip(*map(film.errors, range(len(FACTORS))), strict=True)
    assert list(by_token) == sorted(by_token) and max(by_channel) == pytest.approx(by_channel[0])
    player = film.widget()
    first = player.picture.value
    player.slider.value = player.slider.max
    assert player.picture.value != first and "times 32" in player.caption.value


def test_rulers_are_said_in_words():
    x = torch.tensor([1.0, 2.5])
    picture = rulers_picture(x, {"one: 3 marks": torch.arange(3.0), "two": torch.arange(6) / 2})
    assert "one 0.50, two 0.00" in picture.alt and "1, 2.5" in picture.alt
