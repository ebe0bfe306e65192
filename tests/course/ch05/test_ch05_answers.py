"""Chapter 05's own code: the count of blocks, branches, the copies of a step, and their bugs."""

import pytest
import torch

import minikv
from minikv import Engine, EngineConfig, SamplingParams
from minikv.course.chapters.ch05_copy_on_write.answers import (
    blocks_for_samples,
    copy_blocks,
    copy_prefix,
)
from minikv.course.chapters.ch05_copy_on_write.given import go_on, sample_naively
from minikv.course.exercises.skeletons import broken
from minikv.sequence import Request

PROMPT = "class Queue:\n    def push(self, item):\n        self."


def make_engine(lm, block_size=4):
    return Engine(lm, EngineConfig(num_blocks=256, block_size=block_size, prefix_cache=False))


def sampled(n, max_tokens=8):
    return SamplingParams(n=n, max_tokens=max_tokens, temperature=0.8, seed=1, ignore_eos=True)


def begin(engine, token_ids):
    """A sequence on the engine's pool that is none of its requests."""
    sequence = Request(-1, token_ids, SamplingParams()).sequences[0]
    sequence.table = engine.block_table(engine.pool, engine.config.block_size)
    return sequence


def writes_what_it_would_alone(lm, engine, table, tokens, cut, copy_prefix):
    """Whether a branch off `table` after `cut` tokens goes on as naive attention does."""
    branch = begin(engine, [*tokens[:cut], *lm.encode(" return")])
    branch.table, branch.num_computed = copy_prefix(table, cut), cut
    expected = lm.generate_naively(branch.token_ids, 6)
    found = go_on(engine, branch, 6)
    branch.table.release()
    return found == expected


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_count_is_the_engines(lm, n, block_size):
    prompt = lm.encode(PROMPT)
    for length in (1, 15, 16, 18):
        engine = make_engine(lm, block_size)
        engine.add_request(prompt[:length], sampled(n))
        for stored in range(7):
            engine.step()
            used = engine.stats().blocks_used
            assert used == blocks_for_samples(n, length, stored, block_size)[0]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_samples_are_the_oracles(lm, block_size):
    prompt, params = lm.encode(PROMPT), sampled(3)
    [output] = make_engine(lm, block_size).generate(prompt, params)
    for index, sample in enumerate(output.samples):
        assert sample.token_ids == sample_naively(lm, prompt, params, index)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_branch_goes_on_alone(lm, block_size):
    engine = make_engine(lm, block_size)
    first = begin(engine, lm.encode(PROMPT))
    assert go_on(engine, first, 10) == lm.generate_naively(lm.encode(PROMPT), 10)
    free = engine.pool.num_free
    tokens = list(first.token_ids)
    for cut in (1, 15, 16, 18, 20, 23, 27):
        assert writes_what_it_would_alone(lm, engine, first.table, tokens, cut, copy_prefix)
        assert engine.pool.num_free == free
    expected = lm.generate_naively(tokens, 4)
    assert go_on(engine, first, 4) == expected  # nothing was written under its feet


def test_a_branch_takes_nothing_and_refuses_what_is_not_there():
    pool = minikv.BlockPool(3)
    table = minikv.BlockTable(pool, 4)
    table.grow(11)
    branch = copy_prefix(table, 6)
    assert (branch.block_ids, branch.num_tokens) == (table.block_ids[:2], 6)
    assert [pool.ref_count(block_id) for block_id in table.block_ids] == [2, 2, 1]
    assert copy_prefix(table, 0).block_ids == []
    for num_tokens in (-1, 12):
        with pytest.raises(ValueError, match="num_tokens: must be 0 to 11"):
            copy_prefix(table, num_tokens)


def test_the_broken_branch_is_right_at_a_blocks_end_alone(lm):
    engine = make_engine(lm)
    first = begin(engine, lm.encode(PROMPT))
    go_on(engine, first, 10)
    tokens = list(first.token_ids)
    right = {
        cut: writes_what_it_would_alone(lm, engine, first.table, tokens, cut, broken("05.5"))
        for cut in range(19, 27)
    }
    assert right[20] and right[24] and not all(right.values())


def test_copies_are_those_of_the_store(lm):
    copies = [(1, 2), (0, 4), (1, 5), (0, 3)]
    stores = [minikv.KVStore(lm.config, 6, 4, lm.device, lm.dtype) for _ in range(2)]
    stores[0].blocks.normal_(generator=torch.Generator().manual_seed(0))
    stores[1].blocks.copy_(stores[0].blocks)
    stores[0].copy_to(stores[0], copies)
    copy_blocks(stores[1].blocks, copies)
    assert torch.equal(stores[0].blocks, stores[1].blocks)
    copy_blocks(stores[1].blocks, [])
    assert torch.equal(stores[0].blocks, stores[1].blocks)


@pytest.mark.parametrize(("n", "wrong"), [(2, []), (3, [0]), (4, [0, 1])])
def test_the_broken_copies_are_right_for_two(lm, n, wrong):
    prompt, params, engine = lm.encode(PROMPT), sampled(n, 12), make_engine(lm)
    copy = broken("05.6")
    engine.store.copy_to = lambda other, pairs: copy(other.blocks, pairs)
    [output] = engine.generate(prompt, params)
    found = [
        index
        for index, sample in enumerate(output.samples)
        if sample.token_ids != sample_naively(lm, prompt, params, index)
    ]
    assert found == wrong
