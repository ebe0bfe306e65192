"""Chapter 01: naive attention, against values worked by hand and against torch."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import meet_contexts, meets
from hypothesis import given, strategies as st

from minikv import causal_mask, naive_attention


def draw_qkv(num_queries, num_keys, heads, kv_heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_queries, heads, dim, generator=generator)
    k, v = torch.randn(2, num_keys, kv_heads, dim, generator=generator)
    return q, k, v


def torch_attention(q, k, v, window=None):
    """The same by torch's fused function, which wants heads first."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        attn_mask=causal_mask(len(q), len(k), window),
        enable_gqa=True,
    )
    return out.transpose(0, 1)


def test_two_tokens_by_hand():
    # head dim 1, so the scale is 1: scores of the second query are 0 and ln 3, weights 1/4 and 3/4
    q = torch.ones(2, 1, 1)
    k = torch.tensor([0.0, math.log(3)]).view(2, 1, 1)
    v = torch.tensor([1.0, 5.0]).view(2, 1, 1)
    out = naive_attention(q, k, v).flatten()
    torch.testing.assert_close(out, torch.tensor([1.0, 1 / 4 * 1 + 3 / 4 * 5]))


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "window", "rows"),
    [
        (3, 3, None, ["100", "110", "111"]),
        (2, 5, None, ["11110", "11111"]),  # a chunk after a cached prefix: a rectangle
        (1, 4, None, ["1111"]),
        (4, 4, 2, ["1000", "1100", "0110", "0011"]),
        (2, 5, 3, ["01110", "00111"]),
        (3, 3, 1, ["100", "010", "001"]),
        (2, 4, 9, ["1110", "1111"]),
    ],
)
def test_causal_mask(num_queries, num_keys, window, rows):
    mask = causal_mask(num_queries, num_keys, window)
    assert ["".join(str(int(x)) for x in row) for row in mask] == rows


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 8), (4, 4, 16), (8, 2, 64)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (7, 7), (3, 11), (1, 20)])
def test_equals_torch(num_queries, num_keys, heads, kv_heads, dim, window):
    q, k, v = draw_qkv(num_queries, num_keys, heads, kv_heads, dim)
    out = naive_attention(q, k, v, window)
    assert out.shape == (num_queries, heads, dim)
    torch.testing.assert_close(out, torch_attention(q, k, v, window), rtol=1e-4, atol=1e-5)


MET = Counter()


@meets(MET, {"a window that hides": 10, "a chunk after a prefix": 30})
@given(st.integers(1, 24), st.data())
def test_a_chunk_equals_the_last_rows_of_the_whole(num_keys, data):
    num_queries = data.draw(st.integers(1, num_keys))
    window = data.draw(st.none() | st.integers(1, 30))
    meet_contexts(MET, [num_keys], [num_queries], window=window)
    q, k, v = draw_qkv(num_keys, num_keys, 4, 2, 8, seed=num_keys)
    whole = naive_attention(q, k, v, window)
    chunk = naive_attention(q[-num_queries:], k, v, window)
    torch.testing.assert_close(chunk, whole[-num_queries:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = (x.to(dtype) for x in draw_qkv(5, 9, 4, 2, 16))
    out = naive_attention(q, k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out, naive_attention(q.float(), k.float(), v.float()).to(dtype))


def test_large_scores_do_not_overflow():
    q, k, v = draw_qkv(3, 3, 1, 1, 4)
    assert naive_attention(q * 1e4, k * 1e4, v).isfinite().all()
