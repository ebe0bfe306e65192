"""The number formats of K and V: their error bounds on random and on adversarial values."""

import math
from collections import Counter

import pytest
import torch
from helpers import meets
from hypothesis import given, strategies as st

from minikv.errors import parse_bytes
from minikv.quant.formats import (
    TINY,
    Fp8,
    Half,
    Int4,
    Int4ByChannel,
    Int8,
    dequantise_int4,
    dequantise_int8,
    logit_bound,
    pack,
    quantise_int4,
    quantise_int8,
    round_down,
    round_up,
    unpack,
)

INF = math.inf
FLOAT32 = 2.0**-23  # what computing in float32 may add, relative to the greatest number involved

finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)
vectors = st.lists(finite, min_size=1, max_size=40)


def adversarial() -> list[torch.Tensor]:
    """Vectors of 32 on which a careless format fails."""
    torch.manual_seed(0)
    ramp = torch.linspace(-1, 1, 32)
    one_huge = torch.randn(32)
    one_huge[7] = 1e6
    offset = 100 + torch.randn(32) / 100  # far from zero, close together
    ties = torch.arange(32) / 2  # exactly between two codes, for a scale of 1
    return [
        torch.zeros(32), torch.full((32,), 3.14159), torch.full((32,), -1e-30), ramp, ramp * 1e-12,
        ramp * 1e25, one_huge, -one_huge, offset, -offset, ties, ramp.abs(), -ramp.abs(),
        torch.tensor([1e-40] * 31 + [1.0]),
    ]  # fmt: skip


@pytest.fixture(params=range(len(adversarial())))
def hard(request) -> torch.Tensor:
    return adversarial()[request.param]


def slack(x: torch.Tensor) -> torch.Tensor:
    """Rounding of float32; and below 127 TINY, the divisor may be larger than the scale."""
    return FLOAT32 * x.abs().amax(-1, keepdim=True) + 127 * TINY


def assert_int8(x: torch.Tensor) -> None:
    codes, scale = quantise_int8(x)
    assert codes.dtype == torch.int8 and scale.dtype == torch.bfloat16
    assert codes.abs().max() <= 127
    error = (x - dequantise_int8(codes, scale)).abs()
    assert (error <= scale.float()[..., None] / 2 + slack(x)).all()
    # The scale is not larger than it has to be: one step of bfloat16 at most.
    assert (scale.float() <= x.abs().amax(-1) / 127 * (1 + 2**-7) + 1e-38).all()


def assert_int4(x: torch.Tensor) -> None:
    codes, scale, low = quantise_int4(x)
    assert codes.dtype == torch.uint8 and codes.max() <= 15
    error = (x - dequantise_int4(codes, scale, low)).abs()
    assert (error <= scale.float()[..., None] / 2 + slack(x)).all()


MET = Counter()


def meet(values: list[float]) -> None:
    """Count what a format may get wrong: a vector of one value, or of zeros, shows little."""
    sizes = [abs(value) for value in values]
    MET["several values"] += len(set(values)) > 4
    MET["both signs"] += min(values) < 0 < max(values)
    MET["no sign"] += min(values) > 0 or max(values) < 0
    MET["far apart"] += max(sizes) > 1e4 * min(sizes)


several = meets(MET, {"several values": 15, "both signs": 20, "no sign": 8, "far apart": 30})


@several
@given(vectors)
def test_int8_is_off_by_half_a_scale_at_most(values):
    meet(values)
    assert_int8(torch.tensor(values))


@several
@given(vectors)
def test_int4_is_off_by_half_a_scale_at_most(values):
    meet(values)
    assert_int4(torch.tensor(values))


def test_the_bounds_hold_on_hard_vectors(hard):
    assert_int8(hard)
    assert_int4(hard)


@several
@given(vectors)
def test_fp8_is_off_by_a_sixteenth_at_most(values):
    meet(values)
    x = torch.tensor(values)
    pieces = Fp8().encode(x)
    error = (x - Fp8().decode(pieces)).abs()
    smallest = pieces["scale"].float() * 2**-10
    assert (error <= torch.maximum(x.abs() * (2**-4 + FLOAT32), smallest + 1e-38)).all()


@given(st.lists(st.floats(width=32, min_value=-60000, max_value=60000), min_size=1))
def test_half_formats_are_off_by_half_a_digit_at_most(values):
    x = torch.tensor(values)
    for dtype, relative, least in (
        (torch.float16, 2**-11, 2**-25), (torch.bfloat16, 2**-8, 1e-38),
    ):  # fmt: skip
        error = (x - Half(dtype).decode(Half(dtype).encode(x))).abs()
        assert (error <= (relative * x.abs()).clamp_min(least)).all()


def test_float16_makes_infinity_of_what_is_too_large_and_bfloat16_does_not():
    x = torch.tensor([65_519.0, 65_520.0, 1e30])
    assert Half(torch.float16).decode(Half(torch.float16).encode(x)).tolist() == [65504, INF, INF]
    assert Half(torch.bfloat16).decode(Half(torch.bfloat16).encode(x)).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("one", [Int8(), Fp8()])
def test_nan_and_infinity_spoil_their_vector_and_no_other(one, bad):
    x = torch.randn(3, 8)
    x[1, 2] = bad
    back = one.decode(one.encode(x))
    assert back[1].isnan().all()
    assert back[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_nan_and_infinity_spoil_their_group_of_int4_and_no_other(bad):
    x = torch.randn(2, 64)
    x[1, 40] = bad
    back = Int4(32).decode(Int4(32).encode(x))
    assert back[1, 32:].isnan().all()
    assert back[0].isfinite().all() and back[1, :32].isfinite().all()
    block = torch.randn(16, 64)  # and by channel: that channel, in all tokens of the block
    block[3, 40] = bad
    back = Int4ByChannel(16).decode(Int4ByChannel(16).encode(block))
    assert back[:, 40].isnan().all()
    assert back[:, :40].isfinite().all() and back[:, 41:].isfinite().all()


@given(st.lists(finite, min_size=1))
def test_scales_are_rounded_to_the_safe_side(values):
    x = torch.tensor(values)
    up, down = round_up(x), round_down(x)
    assert up.dtype == down.dtype == torch.bfloat16
    assert (up.float() >= x).all() and (down.float() <= x).all()
    near = x.bfloat16()
    assert ((up == near) | (down == near)).all()  # they enclose x, with nothing in between


@given(st.lists(st.integers(0, 15), min_size=2, max_size=40).filter(lambda x: len(x) % 2 == 0))
def test_packing_keeps_every_code(codes):
    packed = pack(torch.tensor(codes, dtype=torch.uint8))
    assert packed.dtype == torch.uint8 and len(packed) == len(codes) // 2
    assert unpack(packed).tolist() == codes


def test_how_four_codes_are_packed():
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist() == [0x31, 0x42]


@pytest.mark.parametrize(("dim", "groups"), [(64, 2), (16, 1), (80, 4), (96, 3), (2, 1), (128, 4)])
def test_groups_are_of_one_size_and_at_most_32(dim, groups):
    assert Int4(32).groups(dim) == groups
    assert dim % groups == 0 and dim // groups <= 32
    x = torch.randn(5, dim)
    assert torch.allclose(Int4(32).decode(Int4(32).encode(x)), x, atol=0.5)


def test_shapes_are_those_that_are_encoded():
    for one, x in (
        (Int8(), torch.randn(3, 64)), (Fp8(), torch.randn(3, 64)), (Int4(), torch.randn(3, 64)),
        (Half(torch.float16), torch.randn(3, 64)), (Int4ByChannel(8), torch.randn(3, 8, 64)),
    ):  # fmt: skip
        pieces = one.encode(x)
        assert {k: (tuple(t.shape[1:]), t.dtype) for k, t in pieces.items()} == one.shapes(64)


def test_by_channel_an_outlier_channel_costs_the_others_nothing():
    torch.manual_seed(0)
    block = torch.randn(16, 64)
    block[:, 5] += 50  # large in every token, as channels of K are
    rest = [channel for channel in range(64) if channel != 5]
    by_token = Int4(64).decode(Int4(64).encode(block))
    by_channel = Int4ByChannel(16).decode(Int4ByChannel(16).encode(block))
    error = (by_token - block)[:, rest].abs().mean(), (by_channel - block)[:, rest].abs().mean()
    assert error[1] < error[0] / 5
    alone = block.clone()
    alone[:, 5] = 0
    same = Int4ByChannel(16).decode(Int4ByChannel(16).encode(alone))
    assert torch.equal(by_channel[:, rest], same[:, rest])


# ── What an error of K does ───────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(20))
def test_a_logit_and_a_weight_move_no_further_than_derived(seed):
    torch.manual_seed(seed)
    size = 10 ** (seed % 4 - 1)
    q, k = size * torch.randn(64), size * torch.randn(200, 64)
    codes, scale = quantise_int8(k)
    k_hat = dequantise_int8(codes, scale)
    bound = logit_bound(q, (scale.float() / 2)[:, None].expand(-1, 64))
    logits, moved = (q @ k.T / 8).double(), (q @ k_hat.T / 8).double()
    assert ((logits - moved).abs() <= bound * (1 + 1e-3)).all()
    # A weight is e^x / sum e^y. Each term, above and below the line, changes by e^(+-bound).
    ratio = moved.log_softmax(-1) - logits.log_softmax(-1)
    assert ratio.abs().max() <= 2 * bound.max() * (1 + 1e-3) + 1e-6


def test_the_worst_error_of_a_logit_is_reached():
    scale, q = 0.5, torch.ones(4)
    k = torch.full((4,), 63.5)
    k[0] = 63.25  # every other channel is stored exactly
    codes, stored = quantise_int8(k)
    assert float(stored) == scale
    error = (q @ (dequantise_int8(codes, stored) - k)).abs() / 2
    assert error == logit_bound(q, torch.tensor([scale / 2, 0, 0, 0]))


# ── Bytes ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "number"),
    [(5, 5), ("5 B", 5), ("1 KiB", 1024), ("256 MiB", 2**28), ("3GiB", 3 * 2**30)],
)
def test_bytes_are_read(text, number):
    assert parse_bytes("kv_memory", text) == number


@pytest.mark.parametrize("bad", ["", "256", "256 MB", "MiB", "-1 MiB", "0 MiB", 0, -5, True, 2.5])
def test_bytes_that_cannot_be_read_are_named(bad):
    with pytest.raises(ValueError, match="kv_memory") as error:
        parse_bytes("kv_memory", bad)
    assert repr(bad) in str(error.value) and "MiB" in str(error.value)
