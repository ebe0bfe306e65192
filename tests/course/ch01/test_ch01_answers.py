"""Chapter 01: the work of naive generation, counted while the model runs."""

import pytest

from minikv import naive_attention
from minikv.course.chapters.ch01_naive_attention.answers import (
    work_of_generation,
)


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
