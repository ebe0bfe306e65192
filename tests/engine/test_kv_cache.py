"""Chapter 02: the concatenating and the preallocated cache give the oracle's logits."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import naive_kv
from hypothesis import given, settings, strategies as st
from thorough import thorough_after

from minikv import ConcatCache, PreallocatedCache

CACHES = {"concat": ConcatCache, "preallocated": lambda config: PreallocatedCache(config, 64)}
caches = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


def cut(tokens, borders):
    edges = [0, *sorted(borders), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(edges) if a < b]


def logits_in_chunks(lm, cache, chunks):
    return torch.cat([lm.logits(chunk, cache) for chunk in chunks])


@caches
def test_every_architecture_prompt_then_one_by_one(pair, make):
    tokens = pair.prompts(30, seed=1)[0]
    chunks = [tokens[:12], *([token] for token in tokens[12:])]
    cache = make(pair.lm.config)
    found = logits_in_chunks(pair.lm, cache, chunks)
    torch.testing.assert_close(found, pair.lm.logits(tokens), rtol=1e-3, atol=1e-3)
    assert cache.num_tokens == 30


@caches
@pytest.mark.parametrize("name", thorough_after(1, ["qwen2-window", "llama", "mistral"]))
@settings(max_examples=25)
@given(borders=st.sets(st.integers(1, 39)), length=st.integers(1, 40))
def test_however_the_tokens_are_chunked(checkpoint, name, make, borders, length):
    pair = checkpoint(name)
    tokens = pair.prompts(40, seed=2)[0][:length]
    cache = make(pair.lm.config)
    found = logits_in_chunks(pair.lm, cache, cut(tokens, {b for b in borders if b < length}))
    torch.testing.assert_close(found, pair.lm.logits(tokens), rtol=1e-3, atol=1e-3)


@caches
def test_a_token_counts_when_the_last_layer_has_it(llama, make):
    """Also if that is the only layer."""
    for num_layers in (1, 2):
        cache = make(replace(llama.lm.config, num_layers=num_layers, windows=(None,) * num_layers))
        q, k, v = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
        counts = [cache.num_tokens]
        for layer in range(num_layers):
            cache.attend(layer, q, k, v)
            counts.append(cache.num_tokens)
        assert counts == [0] * num_layers + [4]


@caches
def test_a_cache_that_forgot_a_token_is_noticed(llama, make):
    """The comparison above can fail: leave one cached token out and the logits change."""
    tokens = llama.prompts(20, seed=4)[0]
    cache = make(llama.lm.config)
    llama.lm.logits(tokens[:10], cache)
    with_gap = llama.lm.logits(tokens[11:], cache)
    assert (with_gap - llama.lm.logits(tokens)[11:]).abs().max() > 0.1


def test_both_hold_the_keys_and_values_of_one_pass(llama):
    tokens = llama.prompts(15, seed=5)[0]
    expected = naive_kv(llama.lm, tokens)  # (layers, T, 2, K, D)
    cache = PreallocatedCache(llama.lm.config, 20)
    grown = ConcatCache(llama.lm.config)
    for chunk in cut(tokens, {4, 5, 11}):
        llama.lm.logits(chunk, cache)
        llama.lm.logits(chunk, grown)
    torch.testing.assert_close(cache.kv[:, :, :15].transpose(1, 2), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(grown.k), expected[:, :, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(grown.v), expected[:, :, 1], rtol=1e-4, atol=1e-4)


def test_preallocated_storage_stays_where_it_is(llama):
    cache = PreallocatedCache(llama.lm.config, 8)
    address = cache.kv.data_ptr()
    llama.lm.logits([1, 2, 3], cache)
    llama.lm.logits([4], cache)
    assert cache.kv.data_ptr() == address and cache.kv.shape[2] == 8


def test_preallocated_refuses_what_does_not_fit_and_goes_on(llama):
    tokens = llama.prompts(8, seed=6)[0]
    cache = PreallocatedCache(llama.lm.config, 8)
    llama.lm.logits(tokens[:6], cache)
    with pytest.raises(ValueError, match=r"capacity is 8 tokens, 9 are needed"):
        llama.lm.logits([1, 2, 3], cache)
    assert cache.num_tokens == 6
    found = llama.lm.logits(tokens[6:], cache)  # exactly full is fine
    torch.testing.assert_close(found, llama.lm.logits(tokens)[6:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_preallocated_in_half_precision(llama, dtype):
    cache = PreallocatedCache(llama.lm.config, 4, dtype=dtype)
    assert cache.kv.dtype == dtype and cache.kv.element_size() == 2
