"""Sequences that grow side by side over stored K and V, for the tests of those who read them."""

import dataclasses
from types import SimpleNamespace

import torch

from minikv import BlockPool, BlockTable, KVStore, ModelConfig, naive_attention
from minikv.batch import BatchBuilder
from minikv.quant.formats import format_of
from minikv.quant.oracle import attend_mixed, read_back
from minikv.quant.store import QuantisedStore

NUM_BLOCKS, MOST = 200, 400  # MOST tokens of a sequence
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def one_layer(lm, head_dim=16, heads=4, kv_heads=2, window=None) -> ModelConfig:
    return dataclasses.replace(
        lm.config, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        windows=(window,),
    )  # fmt: skip


def make_store(config, kv_dtype, block_size, dtype=torch.float32, device="cpu", blocks=NUM_BLOCKS):
    more = config, blocks, block_size, device, dtype
    if kv_dtype == "auto":
        return KVStore(*more)
    return QuantisedStore(format_of(kv_dtype, block_size), 8, *more)


def check_open(engine) -> None:
    """The open blocks are those that running sequences have begun, and no row is lost."""
    open_keys, size = getattr(engine.store, "open", None), engine.config.block_size
    if open_keys is None:
        return
    begun = {
        sequence.table.block_ids[sequence.num_computed // size]
        for sequence in engine.scheduler.running
        if sequence.num_computed % size
    }
    assert open_keys.block_ids == begun
    num_rows = open_keys.keys.shape[1]
    assert sorted([*open_keys._free, *open_keys._rows.values()]) == list(range(num_rows))


class Steps:
    """Each step is computed in all ways, every one on a store of its own, and compared."""

    def __init__(self, config, num_seqs, kv_dtype, block_size, kinds, dtype=torch.float32,
                 device="cpu"):  # fmt: skip
        """kinds: classes of backends. The last one's outputs are kept in `seen`, by sequence."""
        self.config, self.dtype, self.kv_dtype = config, dtype, kv_dtype
        self.pool = BlockPool(NUM_BLOCKS)
        self.pool.allocate()  # so that block ids are no positions
        self.ways = [
            kind(config, make_store(config, kv_dtype, block_size, dtype, device)) for kind in kinds
        ]
        self.builder = BatchBuilder(num_seqs, NUM_BLOCKS, block_size)
        self.sequences = [
            SimpleNamespace(
                num_computed=0, token_ids=[1] * MOST, table=BlockTable(self.pool, block_size)
            )
            for _ in range(num_seqs)
        ]
        self.heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        torch.manual_seed(config.head_dim + block_size)
        self.numbers = torch.randn(num_seqs, MOST, sum(self.heads), config.head_dim)
        self.numbers[:, :, config.num_heads, 3] += 8  # an outlier channel of K
        self.numbers = self.numbers.to(device, dtype)
        self.seen: list[list[torch.Tensor]] = [[] for _ in range(num_seqs)]

    def step(self, counts):
        """Compute the next counts[i] tokens of sequence i."""
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: counts[i])
        for i in order:  # decodes first
            self.sequences[i].table.grow(counts[i])
            self.sequences[i].table_version = self.sequences[i].num_computed
        chosen, tokens = [self.sequences[i] for i in order], [counts[i] for i in order]
        starts = [s.num_computed for s in chosen]
        slots = [s.table.writable_slot(s.num_computed)[0] for s in chosen]
        batch = self.builder.build(chosen, tokens, slots)
        rows = [self.numbers[i, n : n + c] for i, n, c in zip(order, starts, tokens, strict=True)]
        q, k, v = torch.cat(rows).split(self.heads, 1)
        *others, found = [way.bind(batch)(0, q, k, v) for way in self.ways]
        for other in others:
            if other is not None:
                self.assert_close(found, other)
        for i, one in zip(order, found.split(tokens), strict=True):
            self.seen[i].append(one)
            self.sequences[i].num_computed += counts[i]

    def assert_close(self, found, expected):
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    def assert_formula(self):
        block_size, window = self.ways[-1].store.block_size, self.config.windows[0]
        for i, outputs in enumerate(self.seen):
            q, k, v = self.numbers[i, : self.sequences[i].num_computed].split(self.heads, 1)
            if self.kv_dtype == "auto":
                exact = naive_attention(q, k, v, window)
            else:
                kv_format = format_of(self.kv_dtype, block_size)
                own_block = block_size if kv_format.k_by_block else None
                stored = read_back(kv_format, k, v, block_size)
                exact = attend_mixed(q, k, *stored, own_block, window)
            if len(exact):
                self.assert_close(torch.cat(outputs), exact)

    def assert_same_codes(self):
        """In the first store and in the last, also where nothing was written."""
        one, other = self.ways[0].store.parts, self.ways[-1].store.parts
        for name, part in one.items():
            assert part.dtype == other[name].dtype
            torch.testing.assert_close(other[name], part, rtol=0, atol=0, equal_nan=True)
