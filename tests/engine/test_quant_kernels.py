"""The compiled kernels over codes, beside PyTorch's way and the plain formula."""

import itertools

import numpy as np
import pytest
import torch
from quant_case import Steps, one_layer
from thorough import thorough_after

from minikv.quant import COMPILED
from minikv.quant.attention import QuantisedAttention
from minikv.quant.formats import format_of
from minikv.quant.store import QuantisedStore

pytest.importorskip("numba")

from minikv.cpu import plain
from minikv.cpu.compiler import kernel
from minikv.cpu.kernels import write_row
from minikv.cpu.tiles import HEADS, KEYS
from minikv.quant import tiles
from minikv.quant.compiled import CompiledAttention

# What each sequence computes in each step, side by side: chunks that cut blocks, then decodes.
STEPS = [(7, 16, 1), (9, 3, 20), (1, 1, 5), *[(1, 1, 1)] * 18]


@kernel
def dots(q, codes, place, scale, low, out):
    begin, stride, count = place
    tiles.dot_by_channel(q, 0, len(q), codes, begin, stride, count, scale, low, out, 1)


@kernel
def sums(weights, codes, place, scale, low, out):
    begin, stride, count = place
    tiles.add_by_token(weights, 1, 0, len(out), codes, begin, stride, count, scale, low, out)


@kernel
def rounded(values, row):
    write_row(values, row)


@pytest.mark.parametrize(
    ("dim", "groups"), [(32, 1), (32, 2), (64, 2), (96, 3), (128, 2), (128, 4)]
)
def test_rows_of_int4_with_their_ends(dim, groups):
    rng, count = np.random.default_rng(dim), 13
    packed = rng.integers(0, 256, (count + 2, 2, dim // 2)).astype(np.uint8)
    place = 3 * packed.shape[2], 2 * packed.shape[2], count  # from row 1, the second of each pair
    codes = np.concatenate([packed & 15, packed >> 4], -1)[1 : 1 + count, 1].astype(np.float32)

    def ends(*shape):  # as the store keeps them, and as they read
        one = torch.randn(shape).bfloat16()
        return plain(one), one.float().numpy()

    torch.manual_seed(dim)
    (scale, by_channel), (low, low_of_channel) = ends(dim), ends(dim)
    (v_scale, by_token), (v_low, low_of_token) = ends(count, groups), ends(count, groups)
    keys = low_of_channel + by_channel * codes
    spread = [one.repeat(dim // groups, 1) for one in (by_token, low_of_token)]
    values = spread[1] + spread[0] * codes
    for heads in range(1, HEADS + 1):
        q = rng.standard_normal((heads, dim), np.float32)
        scores = np.full((heads, 1 + count + KEYS), 7, np.float32)
        dots(q, packed, place, scale, low, scores)
        np.testing.assert_allclose(scores[:, 1 : 1 + count], q @ keys.T, 1e-4, 1e-2)
        assert (scores[:, 0] == 7).all()
        weights = rng.standard_normal((heads, count + 3), np.float32)
        found = rng.standard_normal((heads, dim), np.float32)
        expected = found + weights[:, 1 : 1 + count] @ values
        sums(weights, packed, place, v_scale, v_low, found)
        np.testing.assert_allclose(found, expected, 1e-4, 1e-2)


# What reads bfloat16 takes long to compile.
FORMATS = pytest.mark.parametrize("kv_dtype", thorough_after(2, reversed(COMPILED)))


@pytest.mark.usual(kv_dtype="int4", block_size=5, head_dim=64)
@FORMATS
@pytest.mark.parametrize("block_size", [4, 5, 16])
@pytest.mark.parametrize(("head_dim", "heads", "window"), [(64, 4, None), (64, 2, 9), (16, 6, 9)])
def test_both_ways_and_the_formula(tinypy, kv_dtype, block_size, head_dim, heads, window):
    config = one_layer(tinypy.lm, head_dim, heads, window=window)
    steps = Steps(config, 3, kv_dtype, block_size, (QuantisedAttention, CompiledAttention))
    for counts in STEPS:
        steps.step(counts)
    steps.assert_formula()
    steps.assert_same_codes()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_nan_stays_in_its_sequence(tinypy, kv_dtype):
    """A poisoned token spoils what reads it, visibly, and nothing else."""
    steps = Steps(one_layer(tinypy.lm, 64), 2, kv_dtype, 4, (CompiledAttention,))
    steps.numbers[0, 2, 4:6, 5] = torch.nan  # of K
    for _ in range(9):
        steps.step((1, 1))
    spoiled, other = (torch.cat(outputs) for outputs in steps.seen)
    assert other.isfinite().all()
    assert spoiled[:2].isfinite().all() and spoiled[2:].isnan().all()


@FORMATS
def test_a_step_of_chunks_and_decodes_needs_no_full_copy(tinypy, monkeypatch, kv_dtype):
    """The compiled way never reads blocks back as floats."""
    monkeypatch.setattr(QuantisedStore, "read", lambda *_: pytest.fail("a copy in float"))
    import minikv

    config = minikv.EngineConfig(num_blocks=20, attention="cpu", kv_dtype=kv_dtype)
    params = minikv.SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = minikv.Engine(tinypy.lm, config).generate(["def f(", "import "], params)
    assert all(len(output.token_ids) == 20 for output in outputs)


def test_every_format_that_is_promised_has_arrays():
    from minikv.quant import kernels

    assert set(kernels.PARTS) == set(COMPILED)
    for (name, kind), head_dim in itertools.product(kernels.PARTS.items(), (16, 64)):
        kv_format = format_of(name, 16)
        pieces = {f"k_{piece}" for piece in kv_format.k.shapes(head_dim)}
        pieces |= {f"v_{piece}" for piece in kv_format.v.shapes(head_dim)}
        assert set(kind._fields) == pieces


def test_compiled_codes_are_those_of_the_definition():
    """To the last bit, for the program writes them and everything else reads them."""
    from minikv.quant import formats, kernels

    torch.manual_seed(0)
    x = torch.randn(400, 32) * torch.logspace(-44, 38, 400)[:, None]
    x[:9] = 0
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = torch.nan, torch.inf, -torch.inf, 1e-45
    x[4], x[5, 3] = torch.arange(32) / 2, -3.4e38  # scale 0.123: many near a half
    x[6, :8] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])  # of two the even one
    x[7], x[7, 0] = torch.nan, torch.inf
    codes, scale = formats.quantise_int8(x)
    own = torch.zeros_like(codes)
    found = [kernels.quantise_int8(row.numpy(), to.numpy()) for row, to in zip(x, own, strict=True)]
    assert torch.equal(codes, own)
    scales = torch.tensor(found, dtype=torch.uint16).view(torch.bfloat16)
    torch.testing.assert_close(scales, scale, rtol=0, atol=0, equal_nan=True)
    codes, *ends = formats.quantise_int4(x)
    own = torch.zeros_like(codes)
    found = [kernels.quantise_int4(row.numpy(), to.numpy()) for row, to in zip(x, own, strict=True)]
    assert torch.equal(codes, own)
    for end, bits in zip(ends, zip(*found, strict=True), strict=True):
        end_found = torch.tensor(bits, dtype=torch.uint16).view(torch.bfloat16)
        torch.testing.assert_close(end_found, end, rtol=0, atol=0, equal_nan=True)
    halves = torch.zeros(x.shape, dtype=torch.uint16)
    for row, to in zip(x, halves, strict=True):
        rounded(row.numpy(), to.numpy())
    halves = halves.view(torch.bfloat16)
    torch.testing.assert_close(halves, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_few_tokens_are_one_program(tinypy, monkeypatch, kv_dtype):
    """Tokens and stored codes are those of the other way. K stored by block: decodes alone."""
    import minikv

    bind, bound = CompiledAttention.bind, []
    monkeypatch.setattr(
        CompiledAttention, "bind", lambda self, batch: bound.append(batch) or bind(self, batch)
    )
    params = minikv.SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [[7] * 30, [9, 8, 3] * 11]
    seen = []
    for attention in ("cpu", "torch"):
        config = minikv.EngineConfig(
            num_blocks=20, max_num_seqs=4, attention=attention, kv_dtype=kv_dtype,
            max_batch_tokens=24,
        )  # fmt: skip
        engine = minikv.Engine(tinypy.lm, config)
        tokens = [output.token_ids for output in engine.generate(prompts, params)]
        seen.append((tokens, engine.store.parts))
    (tokens, own), (expected, other) = seen
    assert tokens == expected
    for name in own:  # a number beside the middle of two codes may be rounded to either
        assert (own[name] != other[name]).float().mean() < 0.01
    assert bool(bound) == (kv_dtype == "int4")
    assert all(batch.num_decodes < len(batch.context_lens_host) for batch in bound)
