"""Chapter 04's own code: slots, attention over many tables, and the backends made of them."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import drain, generate, meet_contexts, meets, naively, scattered, small
from hypothesis import given, settings, strategies as st

from minikv import Engine, SamplingParams, TorchAttention, naive_attention
from minikv.course.chapters.ch04_paged_blocks.answers import batched_attention, slot_mapping
from minikv.course.chapters.ch04_paged_blocks.block_by_block import BlockByBlock, DecodesTogether

BACKENDS = [BlockByBlock, DecodesTogether]


@given(st.integers(1, 20), st.integers(0, 70), st.integers(0, 70), st.integers(0, 99))
def test_slots_of_a_chunk_are_those_of_its_positions(block_size, one, other, seed):
    start, end = sorted((one, other))
    table = random.Random(seed).sample(range(100), 71)
    flat = np.arange(100 * block_size).reshape(100, block_size)[table].ravel()
    assert slot_mapping(table, block_size, start, end) == flat[start:end].tolist()


def test_slots_are_the_engines(llama):
    """Chunks, decodes and a prefix from the cache: the same slots as in the engine's batches."""

    class SameSlots(TorchAttention):
        seen = 0

        def bind(self, batch):
            borders, slots = batch.query_start.tolist(), []
            for row, (start, end) in enumerate(itertools.pairwise(borders)):
                length = int(batch.context_lens[row])
                table = batch.block_tables[row].tolist()
                slots += slot_mapping(table, self.store.block_size, length - end + start, length)
            assert batch.slot_mapping.tolist() == slots
            SameSlots.seen += len(slots)
            return super().bind(batch)

    engine = Engine(llama.lm, small(max_batch_tokens=10), attention=SameSlots)
    for prompt in (*llama.prompts(23, 9, 14, seed=4), llama.prompts(23, seed=4)[0]):
        engine.add_request(prompt, SamplingParams(max_tokens=7))
    drain(engine)
    assert engine.stats().hit_tokens > 0 and SameSlots.seen == engine.stats().computed_tokens


MET = Counter()


@meets(MET, {
    "other lengths": 15, "several blocks": 20, "a block that is not full": 10,
    "groups of heads": 10,
})  # fmt: skip
@settings(max_examples=40)
@given(
    lens=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 3, 4, 16, 64]),
    group=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_batched_attention_equals_naive_attention(lens, block_size, group, kv_heads, seed):
    meet_contexts(MET, lens, block_size=block_size, group=group)
    values, kv, tables = scattered(lens, block_size, kv_heads, 8, 1e4, 0, seed)  # a loud rest
    q = torch.randn(len(lens), kv_heads * group, 8)
    pairs = zip(q, values, strict=True)
    expected = [naive_attention(one[None], *own.unbind(1)) for one, own in pairs]
    found = batched_attention(q, kv, tables, torch.tensor(lens))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_backends_write_the_oracles_tokens(llama, backend, block_size):
    """Prefill in chunks beside decodes, in a pool that has not room for all."""
    prompts = llama.prompts(15, 4, 9, seed=7)
    config = small(num_blocks=-(-44 // block_size), block_size=block_size, max_batch_tokens=12)
    engine = Engine(llama.lm, config, attention=backend)
    outputs = generate(engine, prompts, SamplingParams(max_tokens=8))
    expected = [naively(llama.lm, prompt, 8) for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backends_use_the_functions_they_are_given(llama, backend):
    def no_slots(*arguments):
        raise ZeroDivisionError("asked for slots")

    def attention(config, store):
        return backend(config, store, slot_mapping=no_slots)

    with pytest.raises(ZeroDivisionError, match="asked for slots"):
        Engine(llama.lm, small(), attention=attention).generate([[1, 2]])


def test_the_backends_refuse_a_sliding_window(checkpoint):
    with pytest.raises(ValueError, match="sliding window"):
        Engine(checkpoint("mistral").lm, small(), attention=BlockByBlock)
