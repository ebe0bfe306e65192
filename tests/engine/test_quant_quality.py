"""The gauges of quality: right on cases computed by hand, and on tinypy in the theory's order."""

import math

import pytest
import torch

import minikv
from minikv.checkpoint import read_weights
from minikv.course.bench import kv_peers, llama_cpp
from minikv.quant import quality
from minikv.quant.formats import format_of
from minikv.quant.oracle import QuantisedOracle

TEXT = "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n" * 6


def window(nats, kl, same, num_bytes):
    return quality.Window(num_bytes, torch.tensor(nats), torch.tensor(kl), torch.tensor(same))


def test_the_gauges_by_hand():
    one = window([math.log(2)] * 4, [0.5, 0.5, 0.0, 0.0], [True, True, False, True], 2)
    two = window([math.log(2)] * 2, [0.0, 0.2], [True, True], 4)
    assert quality.bits_per_byte([one, two]).value == pytest.approx(1)  # 6 bits, 6 bytes
    assert quality.kl_per_token([one, two]).value == pytest.approx(1.2 / 6)
    assert quality.same_arg_max([one, two]).value == pytest.approx(100 * 5 / 6)
    worse = window([2 * math.log(2)] * 4, [1.0] * 4, [False] * 4, 2)
    assert quality.change_of_bits([worse], [one]).value == pytest.approx(100)
    assert quality.times_kl([worse, two], [one, two]).value == pytest.approx(4.2 / 1.2)


def test_an_interval_holds_its_value_and_shrinks_with_more_windows():
    torch.manual_seed(0)

    def windows(count):
        return [window(torch.rand(50).tolist(), [0.0] * 50, [True] * 50, 100) for _ in range(count)]

    few, many = (quality.bits_per_byte(windows(count)) for count in (5, 200))
    for one in (few, many):
        assert one.low < one.value < one.high
    assert many.high - many.low < few.high - few.low
    exact = windows(8)
    assert quality.change_of_bits(exact, exact) == (0, 0, 0)  # paired: nothing differs


def test_float32_changes_nothing_and_fewer_bits_change_more(tinypy):
    found = quality.measure(tinypy.lm, quality.cut(tinypy.lm, [TEXT], 200))
    kl = {name: quality.kl_per_token(windows).value for name, windows in found.items()}
    assert kl["float32"] < 1e-9
    assert quality.same_arg_max(found["float32"]).value == 100
    order = [
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "fp8",
        "int4, K by channel",
        "int4, by token, own block exact",
        "int4, by token",
    ]
    assert [kl[name] for name in order] == sorted(kl[name] for name in order)
    assert kl["int4, one scale"] == max(kl.values())
    assert {scheme.name for scheme in quality.SCHEMES} == found.keys()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8", "fp8", "int4"])
def test_a_scheme_is_what_the_engine_does(tinypy, kv_dtype):
    ids = tinypy.lm.encode(TEXT)[:100]
    scheme = quality.engine_scheme(kv_dtype)
    ours = tinypy.lm.logits(ids, quality.SchemeOracle(tinypy.lm.config, scheme, 16))
    kv_format = format_of(kv_dtype, 16)
    assert torch.equal(
        ours, tinypy.lm.logits(ids, QuantisedOracle(tinypy.lm.config, kv_format, 16))
    )


@pytest.mark.parametrize("size", [1, 2, 64])
def test_hadamard_keeps_dot_products_and_spreads_an_outlier(size):
    turn = quality.hadamard(size)
    torch.testing.assert_close(turn @ turn.T, torch.eye(size))
    q, k = torch.randn(3, size), torch.randn(5, size)
    torch.testing.assert_close((q @ turn) @ (k @ turn).T, q @ k.T, rtol=1e-4, atol=1e-5)
    outlier = torch.zeros(size)
    outlier[0] = 1
    assert (outlier @ turn).abs().allclose(torch.full((size,), size**-0.5))


def test_hadamard_of_another_size_is_refused():
    with pytest.raises(ValueError, match="size: must be a power of 2, was 48"):
        quality.hadamard(48)


def test_a_rotation_alone_changes_nothing(tinypy):
    ids = tinypy.lm.encode(TEXT)[:60]
    turned = quality.Scheme("turned", quality.SCHEMES[0].read, lambda *_: 0, rotated=True)
    logits = tinypy.lm.logits(ids, quality.SchemeOracle(tinypy.lm.config, turned, 16))
    torch.testing.assert_close(logits, tinypy.lm.logits(ids), rtol=1e-3, atol=1e-3)


def test_short_texts_are_left_out(tinypy):
    windows = quality.cut(tinypy.lm, ["x = 1\n", TEXT], 100)
    assert [len(one) for one in windows] == [100] and windows[0][0] == 0


# ── Beside other engines, where they are installed ────────────────────────────


def kl(lm, ids, *ways):
    """KL per token of each, from float32."""
    exact = lm.logits(ids).log_softmax(-1)
    rows = [way.logits(lm, ids, 16).log_softmax(-1) for way in ways]
    return [(exact.exp() * (exact - one)).sum(-1)[100:].mean().item() for one in rows]


@pytest.fixture
def long_text(tinypy):
    return tinypy.lm.encode(TEXT * 3)[:500]


def test_beside_fp8_of_transformers(tinypy, long_text):
    """One scale for all numbers, where ours has one for each vector; fp8 hardly needs either."""
    theirs = kv_peers.TransformersCache("", tinypy.hf, "fp8")
    assert theirs.bytes_per_token(tinypy.lm.config, 16) == 1280
    found = kl(tinypy.lm, long_text, quality.engine_scheme("fp8"), theirs)
    assert 0 < found[0] < 2 * found[1] < 8 * found[0]


@pytest.mark.parametrize(
    ("backend", "module"), [("quanto", "optimum.quanto"), ("hqq", "hqq.core.quantize")]
)
def test_beside_int4_of_transformers(tinypy, long_text, backend, module):
    """At most by a factor nearer to float32 than ours, with 80 bytes more per token."""
    pytest.importorskip(module, reason="a backend of its quantised cache")
    theirs = kv_peers.TransformersCache("", tinypy.hf, backend, group=32, newest=16)
    assert theirs.bytes_per_token(tinypy.lm.config, 16) == 960
    found = kl(tinypy.lm, long_text, quality.engine_scheme("int4"), theirs)
    assert 0 < found[0] < 3 * found[1] < 9 * found[0]


def test_beside_llama_cpp(tinypy, long_text):
    """In float32 it computes what we do; its q8_0 and q4_0 are as near as ours, about."""
    weights = read_weights(minikv.BUNDLED["tinypy"])
    try:
        with llama_cpp.contexts(tinypy.lm.config, weights) as make:
            float32, q8, q4 = (
                kv_peers.LlamaCppCache(name, bits, make(name, 512))
                for name, bits in (("float32", 32), ("q8_0", 8), ("q4_0", 4))
            )
            assert [one.bytes_per_token(tinypy.lm.config, 16) for one in (q8, q4)] == [1360, 720]
            ours = [quality.engine_scheme(name) for name in ("int8", "int4")]
            found = kl(tinypy.lm, long_text, float32, q8, q4, *ours)
            again = kl(tinypy.lm, long_text, q8)
    except ValueError as error:
        pytest.skip(str(error))
    assert found[0] < 1e-7 and again == found[1:2]
    for theirs, one in zip(found[1:3], found[3:], strict=True):
        assert one / 5 < theirs < 5 * one
