"""Chapter 01: what its exercises ask for beyond the engine, against torch and against counting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minikv import naive_attention
from minikv.course.chapters.ch01_naive_attention.answers import (
    attend_one_query,
    grouped_attention,
    work_of_generation,
)

number = st.floats(-100, 100, width=32)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.data())
def test_one_query_equals_torch(num_keys, dim, width, data):
    def draw(*shape):
        size = torch.Size(shape).numel()
        numbers = data.draw(st.lists(number, min_size=size, max_size=size))
        return torch.tensor(numbers, dtype=torch.float64).view(shape)

    query, keys, values = draw(dim), draw(num_keys, dim), draw(num_keys, width)
    found = attend_one_query(query.tolist(), keys.tolist(), values.tolist())
    expected = (keys @ query / dim**0.5).softmax(0) @ values
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected)


def test_the_example_of_one_query():
    assert attend_one_query([1.0, 2.0], [[3.0, 0.0], [3.0, 0.0]], [[10.0], [20.0]]) == [15.0]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (6, 6), (2, 9), (1, 7)])
def test_grouped_attention_equals_the_oracle(num_queries, num_keys, heads, kv_heads, window):
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(num_queries, heads, 8, generator=generator)
    k, v = torch.randn(2, num_keys, kv_heads, 8, generator=generator)
    expected = naive_attention(q, k, v, window)
    torch.testing.assert_close(grouped_attention(q, k, v, window), expected)


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (2, 3), (5, 1), (1, 6), (12, 8)])
def test_the_work_is_what_the_model_is_given(tinypy, monkeypatch, prompt, new):
    passes = []
    transformer = tinypy.lm.transformer

    def attend_naively(layer, q, k, v):
        if layer == 0:
            passes.append((len(q), len(k)))
        return naive_attention(q, k, v)

    monkeypatch.setattr(transformer, "attend_naively", attend_naively)
    tinypy.lm.generate_naively(range(5, 5 + prompt), new)
    seen = {(row, key) for rows, _ in passes for row in range(rows) for key in range(row + 1)}
    assert work_of_generation(prompt, new) == {
        "rows": sum(rows for rows, _ in passes),
        "new rows": len({row for row, _ in seen}),
        "scores": sum(rows * keys for rows, keys in passes),
        "new scores": len(seen),
    }
