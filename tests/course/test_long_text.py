"""What is measured on text longer than the cache: that the measures measure what they say."""

import math

import pytest
import torch

import minikv
from minikv.course.workloads import long_text
from minikv.ring import with_config


@pytest.fixture(scope="module")
def lm(tinypy):
    return with_config(tinypy.lm, max_context=400)


@pytest.fixture(scope="module")
def ids(lm):
    with open(minikv.engine.__file__, encoding="utf-8") as file:
        return lm.encode(file.read())[:400]


def test_all_ways_equal_the_oracle_while_nothing_is_forgotten(lm, ids):
    ids = ids[:100]
    expected = lm.logits(ids)
    for found in (
        long_text.full_logits(lm, ids),
        long_text.window_logits(lm, ids, 100),
        long_text.sink_logits(lm, ids, 4, 96),
        long_text.self_extend_logits(lm, ids, 4, 100),
        long_text.context_shift_logits(lm, ids, 100),
        long_text.fresh_logits(lm, ids, 100),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_what_is_computed_afresh_is_the_oracle_on_what_is_left(lm, ids):
    rows = long_text.fresh_logits(lm, ids, 100)
    assert len(rows) == len(ids)
    for end in (100, 101, 150, 151, 230, 400):
        start = max(0, -(-(end - 100) // 50) * 50)
        expected = lm.logits(ids[start:end])[-1]
        torch.testing.assert_close(rows[end - 1], expected, rtol=0, atol=1e-3)


def test_bits_per_byte(lm, ids):
    logits = lm.logits(ids[:200])
    nats, num_bytes = long_text.nats_per_token(logits, ids[:200]), long_text.token_bytes(lm, ids)
    assert num_bytes.sum() == len(lm.decode(ids).encode())
    p = logits.softmax(-1)
    by_hand = sum(-math.log2(p[i - 1, ids[i]]) for i in range(1, 200))
    by_hand /= len(lm.decode(ids[1:200]).encode())
    [whole] = long_text.bits_per_byte(nats, num_bytes[:200])
    assert whole == pytest.approx(by_hand, rel=1e-4)
    parts = long_text.bits_per_byte(nats, num_bytes[:200], bins=5)
    assert len(parts) == 5 and parts.min() < whole < parts.max()


def test_errors_grow_with_shifts_and_with_coarser_numbers(lm):
    k, frequencies = torch.randn(8, 2, 64), lm.config.inverse_frequencies()
    errors = {
        dtype: long_text.shift_errors(k, frequencies, dtype, [1, 10, 100])
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    for found in errors.values():
        assert found == sorted(found)
    first, second, third = errors.values()
    assert all(a < b < c for a, b, c in zip(first, second, third, strict=True))
    assert first[-1] < 1e-4 and third[0] < 1e-2
