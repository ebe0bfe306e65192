"""Random paged sequences for the tests of kernels, which are skipped where there is no Triton."""

import importlib.util

import pytest
import torch
from helpers import scattered

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (it is for Linux)", allow_module_level=True)

import minikv
import minikv_kernels.settings
from minikv_kernels.mode import INTERPRETED
from minikv_kernels.paged_decode import paged_decode
from minikv_kernels.paged_prefill import paged_prefill
from minikv_kernels.settings import Setting
from minikv_kernels.splits import count_splits, make_scratch
from minikv_kernels.walk import locate

import triton  # isort: skip  after kernels, which settles the interpreter
import triton.language as tl  # isort: skip

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Inputs are rounded before both sides see them, so what is left is the output's last bit or
# two, and on a GPU the weights, which tl.dot takes in 16 bits.
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
    torch.bfloat16: dict(rtol=1.6e-2, atol=1e-2),
}
SMALL = Setting(rows=16, tile=16, num_warps=4, num_stages=3)  # many tiles, much padding


def bad(name, message, **changes):
    """A case of wrong arguments."""
    return pytest.param(changes, message, id=name)


class Paged:
    """Random sequences in a pool of poison, and the same K and V as plain tensors."""

    def __init__(
        self, lens, chunks=None, kv_heads=2, group=2, head_dim=16, block_size=4,
        dtype=torch.float32, index=torch.int64, poison=float("nan"), seed=0,
    ):  # fmt: skip
        """`chunks[i]` queries for sequence i, 1 each if None."""
        self.chunks = [1] * len(lens) if chunks is None else chunks
        # What must not be read: other slots, and table entries that no block has.
        shape = block_size, kv_heads, head_dim
        dense, kv, tables = scattered(lens, *shape, fill=poison, no_block=2**30, seed=seed)
        self.dense = [tokens.to(DEVICE, dtype) for tokens in dense]
        self.kv, self.tables = kv.to(DEVICE, dtype), tables.to(DEVICE, index)
        self.lens = torch.tensor(lens, dtype=index, device=DEVICE)
        self.start = torch.tensor([0, *self.chunks]).cumsum(0).to(DEVICE, index)
        q = torch.randn(sum(self.chunks), kv_heads * group, head_dim)
        self.q = q.to(DEVICE, dtype)

    def expected(self, window=None):
        outs = []
        for q, tokens in zip(self.q.split(self.chunks), self.dense, strict=True):
            known = len(tokens) > 0
            k, v = tokens.unbind(1)
            outs.append(minikv.naive_attention(q, k, v, window) if known else torch.zeros_like(q))
        return torch.cat(outs)

    def decode(self, window=None, rows=None, setting=SMALL):
        scratch = self.scratch(rows)
        out = torch.full_like(self.q, float("nan"))
        got = paged_decode(self.q, self.kv, self.tables, self.lens, window, out, scratch, setting)
        assert got is out
        return out

    def prefill(self, window=None, setting=SMALL):
        out = torch.full_like(self.q, float("nan"))
        got = paged_prefill(
            self.q, self.kv, self.tables, self.lens, self.start, window, out, setting
        )
        assert got is out
        return out

    def scratch(self, rows=None):
        _, num_heads, head_dim = self.q.shape
        scratch = make_scratch(num_heads, self.kv.shape[3], head_dim, self.q.device, rows)
        for tensor in scratch:
            tensor.fill_(float("nan"))
        return scratch

    def assert_equal(self, out, window=None):
        torch.testing.assert_close(out, self.expected(window), **TOLERANCE[self.q.dtype])


@triton.jit
def splits_kernel(
    lens, counts, owners, num_seqs, rows,
    SEQS: tl.constexpr, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program i: the counts, and whose item i is."""
    found = count_splits(lens, num_seqs, rows, SEQS, WINDOW, MIN_SPLIT)
    index = tl.arange(0, SEQS)
    tl.store(counts + index, found, mask=index < num_seqs)
    item = tl.program_id(0)
    sequence, place = locate(found, item)
    tl.store(owners + 2 * item, sequence)
    tl.store(owners + 2 * item + 1, place)


def count(lens, rows, window=0):
    """Splits of each sequence, and (sequence, split) of every item in order, then one more."""
    counts = torch.zeros(len(lens), dtype=torch.int32, device=DEVICE)
    owners = torch.zeros(len(lens) + rows + 1, 2, dtype=torch.int32, device=DEVICE)
    splits_kernel[(len(owners),)](
        torch.tensor(lens, device=DEVICE), counts, owners, len(lens), rows,
        SEQS=triton.next_power_of_2(len(lens)), WINDOW=window,
        MIN_SPLIT=minikv_kernels.settings.MIN_SPLIT,
    )  # fmt: skip
    return counts.tolist(), owners.tolist()
