"""Chapter 02: what its exercises ask for beyond the engine, against the oracle and by counting."""

import pytest
import torch
from helpers import greedy_tokens

from minikv import ConcatCache, PreallocatedCache, naive_attention
from minikv.course.chapters.ch02_kv_cache.answers import (
    SharedPrefix,
    fused_attention,
    generate_with_cache,
    tokens_written,
)
from minikv.course.chapters.ch02_kv_cache.bytes_written import BytesWritten

MAKERS = {"concat": lambda config, _: ConcatCache(config), "in place": PreallocatedCache}
caches = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@caches
def test_generates_the_oracle_s_tokens(pair, make):
    (prompt,) = pair.prompts(9, seed=1)
    cache = make(pair.lm.config, 9 + 12 - 1)
    assert generate_with_cache(pair.lm, cache, prompt, 12) == greedy_tokens(pair.lm, prompt, 12)
    assert cache.num_tokens == 9 + 12 - 1


@caches
def test_goes_on_after_what_is_cached(llama, make):
    (tokens,) = llama.prompts(11, seed=2)
    cache = make(llama.lm.config, 20)
    llama.lm.logits(tokens[:4], cache)
    found = generate_with_cache(llama.lm, cache, tokens[4:], 6)
    assert found == greedy_tokens(llama.lm, tokens, 6)


@pytest.mark.parametrize("prompt", [1, 2, 9])
@pytest.mark.parametrize("new", [1, 2, 7, 20])
def test_what_appending_writes_is_what_torch_writes(llama, prompt, new):
    (tokens,) = llama.prompts(prompt, seed=3)
    size = llama.lm.config.kv_bytes_per_token(torch.float32)
    for name, make in MAKERS.items():
        cache = make(llama.lm.config, 40)
        with BytesWritten() as written:
            generate_with_cache(llama.lm, cache, tokens, new)
        assert written.total == size * tokens_written(prompt, new)[name]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (6, 6), (1, 9), (2, 3), (5, 33)])
def test_fused_attention_equals_the_oracle(heads, kv_heads, num_queries, num_keys):
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(num_queries, heads, 16, generator=generator)
    k, v = torch.randn(2, num_keys, kv_heads, 16, generator=generator)
    torch.testing.assert_close(fused_attention(q, k, v), naive_attention(q, k, v))


def test_requests_share_a_prefix_and_nothing_else(llama):
    prefix, *requests = llama.prompts(7, 5, 1, 6, 5, seed=4)
    shared = SharedPrefix(llama.lm, prefix, 13)
    for request in requests + requests[::-1]:
        expected = llama.lm.logits(prefix + request)[7:]
        torch.testing.assert_close(shared.logits(request), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="capacity is 13 tokens, 14 are needed"):
        shared.logits([1] * 7)
    expected = llama.lm.logits(prefix + requests[0])[7:]
    torch.testing.assert_close(shared.logits(requests[0]), expected, rtol=1e-3, atol=1e-3)
