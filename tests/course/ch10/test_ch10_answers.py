"""Chapter 10's own code: axes, attention over codes, blocks with scales, pictures."""

import importlib.util

import pytest
import torch

import minikv
from minikv.attention import naive_attention
from minikv.course.chapters.ch10_quantised_kv.answers import (
    Int8Blocks,
    attend_int8,
    before_the_crossover,
    better_axis,
    int4_along,
)
from minikv.course.chapters.ch10_quantised_kv.given import (
    keys_and_values,
    sample_naively,
    sample_together,
)
from minikv.course.chapters.ch10_quantised_kv.pictures import FACTORS, OutlierFilm, rulers_picture
from minikv.course.exercises.skeletons import broken
from minikv.course.measure.running_table import WORKLOAD
from minikv.quant.formats import dequantise_int8, format_of, quantise_int8
from minikv.quant.store import block_bytes

PROMPT = "class Queue:\n    def push(self, item):\n        self."


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sampled(n, max_tokens=8):
    return minikv.SamplingParams(
        n=n, max_tokens=max_tokens, temperature=0.8, seed=1, ignore_eos=True
    )


def test_the_examples_of_the_axis():
    x = torch.tensor([[0.0, 1], [15, 16]])
    for dim, span in ((-1, 1), (-2, 15)):  # of a line: the scale is rounded up by 2^-8 at most
        assert float((int4_along(x, dim) - x).abs().max()) <= span / 128
    wide = torch.tensor([[0.0, 100, 2], [1, 101, 3]])
    assert better_axis(wide) == -2 and better_axis(wide.T) == -1
    assert better_axis(torch.full((3, 3), 7.0)) == -1


def test_by_channel_is_by_token_of_the_transpose():
    x = drawn(0, 3, 16, 8)
    assert torch.equal(int4_along(x, -2), int4_along(x.mT, -1).mT)


def test_k_of_tinypy_is_closer_by_channel_in_every_layer(lm):
    """As the notebook says, and at as many scales."""
    k, _ = keys_and_values(lm, lm.encode(WORKLOAD)[:128])
    for layer in k.unflatten(2, (-1, 64)):
        errors = [float((int4_along(layer, dim) - layer).square().mean()) for dim in (-1, -2)]
        assert errors[1] < errors[0]


@pytest.mark.parametrize(("block_size", "context_len"), [(1, 3), (4, 9), (16, 16), (16, 40)])
def test_attention_over_codes_is_naive_attention_over_what_is_read_back(block_size, context_len):
    num_blocks = -(-context_len // block_size) + 2
    block_ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()[:-2]
    q, shape = drawn(2, 4, 64), (num_blocks, 2, block_size, 64)
    k, v = (quantise_int8(3 * drawn(seed, *shape)) for seed in (3, 4))
    found = attend_int8(q, *k, *v, block_ids, context_len)
    rows = (
        dequantise_int8(*pair)[block_ids].transpose(1, 2).flatten(0, 1)[:context_len]
        for pair in (k, v)
    )
    torch.testing.assert_close(found, naive_attention(q[None], *rows)[0], atol=1e-5, rtol=1e-4)


def test_a_copy_is_independent():
    blocks = Int8Blocks(3, 2, 2, 4)
    blocks.write(0, drawn(0, 2, 4), drawn(1, 2, 4))
    before = [part.clone() for part in blocks.read(0)]
    blocks.copy(0, 2)
    assert all(map(torch.equal, blocks.read(2), before))
    blocks.write(5, 9 * drawn(2, 2, 4), 9 * drawn(3, 2, 4))
    assert all(map(torch.equal, blocks.read(0), before))


def test_samples_are_the_oracles(lm):
    prompt, params = lm.encode(PROMPT), sampled(2)
    found = sample_together(lm, prompt, params)
    assert found == [sample_naively(lm, prompt, params, i) for i in range(2)]


def test_the_broken_copy_is_right_greedily_and_wrong_drawn(lm):
    prompt, drawn_params = lm.encode(PROMPT), sampled(3)
    greedy = minikv.SamplingParams(n=2, max_tokens=8, ignore_eos=True)
    for params, right in ((greedy, True), (drawn_params, False)):
        found = sample_together(lm, prompt, params, make=broken("10.5"))
        expected = [sample_naively(lm, prompt, params, i) for i in range(params.n)]
        assert (found == expected) == right


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
