"""The compiled kernels over codes, beside PyTorch's way and the plain formula."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from minikv import BlockPool, BlockTable
from minikv.batch import BatchBuilder
from minikv.quant.attention import QuantisedAttention
from minikv.quant.choice import COMPILED
from minikv.quant.formats import format_of
from minikv.quant.oracle import attend_mixed, read_back
from minikv.quant.store import QuantisedStore

pytest.importorskip("numba")

from minikv.quant.compiled import CompiledAttention

# What each sequence computes in each step, side by side: chunks that cut blocks, then decodes.
STEPS = [(7, 16, 1), (9, 3, 20), (1, 1, 5), *[(1, 1, 1)] * 18]


def model(lm, head_dim: int, heads: int, window: int | None):
    return dataclasses.replace(
        lm.config, num_layers=1, num_heads=heads, num_kv_heads=2, head_dim=head_dim,
        windows=(window,),
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", COMPILED)
@pytest.mark.parametrize("block_size", [4, 5, 16])
@pytest.mark.parametrize(("head_dim", "heads", "window"), [(64, 4, None), (64, 2, 9), (16, 6, 9)])
def test_both_ways_and_the_formula(tinypy, kv_dtype, block_size, head_dim, heads, window):
    config = model(tinypy.lm, head_dim, heads, window)
    kv_format = format_of(kv_dtype, block_size)
    pool, size = BlockPool(60), block_size
    pool.allocate()  # so that block ids are no positions
    ways = [
        kind(config, QuantisedStore(kv_format, 8, config, 60, size, "cpu", torch.float32))
        for kind in (QuantisedAttention, CompiledAttention)
    ]
    builder = BatchBuilder(3, 60, size)
    sequences = [
        SimpleNamespace(num_computed=0, token_ids=[1] * 99, table=BlockTable(pool, size))
        for _ in range(3)
    ]
    torch.manual_seed(head_dim + block_size)
    numbers = torch.randn(3, 99, heads + 4, head_dim)
    numbers[:, :, heads, 3] += 8  # an outlier channel of K
    seen: list[list[torch.Tensor]] = [[] for _ in sequences]
    for version, counts in enumerate(STEPS):
        order = sorted(range(3), key=lambda i: counts[i])  # decodes first
        for i in order:
            sequences[i].table.grow(counts[i])
            sequences[i].table_version = version
        chosen, tokens = [sequences[i] for i in order], [counts[i] for i in order]
        starts = [sequence.num_computed for sequence in chosen]
        slots = [s.table.writable_slot(s.num_computed)[0] for s in chosen]
        batch = builder.build(chosen, tokens, slots)
        rows = [numbers[i, n : n + c] for i, n, c in zip(order, starts, tokens, strict=True)]
        q, k, v = torch.cat(rows).split([heads, 2, 2], 1)
        found = [way.bind(batch)(0, q, k, v) for way in ways]
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
        for i, one in zip(order, found[1].split(tokens), strict=True):
            seen[i].append(one)
        for sequence, count in zip(chosen, tokens, strict=True):
            sequence.num_computed += count
    for i, outputs in enumerate(seen):
        length = sequences[i].num_computed
        q, k, v = numbers[i, :length].split([heads, 2, 2], 1)
        k_hat, v_hat = read_back(kv_format, k, v, size)
        own_block = size if kv_format.k_by_block else None
        exact = attend_mixed(q, k, k_hat, v_hat, own_block, window)
        torch.testing.assert_close(torch.cat(outputs), exact, rtol=1e-4, atol=1e-4)
    codes = [way.store.parts for way in ways]
    assert all(torch.equal(codes[0][name], codes[1][name]) for name in codes[0])


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_nan_stays_in_its_sequence(tinypy, kv_dtype):
    """A poisoned token spoils what reads it, visibly, and nothing else."""
    config = model(tinypy.lm, 64, 4, None)
    pool = BlockPool(20)
    store = QuantisedStore(format_of(kv_dtype, 4), 8, config, 20, 4, "cpu", torch.float32)
    way = CompiledAttention(config, store)
    builder = BatchBuilder(2, 20, 4)
    sequences = [
        SimpleNamespace(num_computed=0, token_ids=[1] * 20, table=BlockTable(pool, 4))
        for _ in range(2)
    ]
    torch.manual_seed(0)
    for version in range(9):
        for sequence in sequences:
            sequence.table.grow(1)
            sequence.table_version = version
        slots = [s.table.writable_slot(s.num_computed)[0] for s in sequences]
        q, k, v = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
        if version == 2:
            k[0, :, 5] = torch.nan
        out = way.bind(builder.build(sequences, [1, 1], slots))(0, q, k, v)
        assert out[1].isfinite().all()
        assert out[0].isnan().all() == (version >= 2)
        for sequence in sequences:
            sequence.num_computed += 1


def test_a_step_of_chunks_and_decodes_needs_no_full_copy(tinypy, monkeypatch):
    """The compiled way never reads blocks back as floats."""
    monkeypatch.setattr(QuantisedStore, "read", lambda *_: pytest.fail("a copy in float"))
    import minikv

    for kv_dtype in COMPILED:
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
