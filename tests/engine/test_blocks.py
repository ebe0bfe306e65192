"""Chapter 04: the block pool, the block table, and attention over blocks."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import meet_contexts, meets, scattered
from hypothesis import example, given, settings, strategies as st
from quant_case import Steps, one_layer

from minikv import (
    BlockPool,
    BlockTable,
    KVStore,
    OutOfBlocks,
    TorchAttention,
    blockwise_attention,
    naive_attention,
)

# ── The pool ──────────────────────────────────────────────────────────────────


def test_every_block_is_given_out_once_then_none_and_the_last_freed_comes_first():
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(OutOfBlocks, match="blocks needed: 1, free: 0") as caught:
        pool.allocate()
    assert (caught.value.needed, caught.value.free) == (1, 0)
    pool.release(0)
    pool.release(2)
    assert [pool.allocate() for _ in range(2)] == [2, 0]


def test_free_blocks_can_be_neither_released_nor_shared():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match=f"block {block} is free already"):
        pool.release(block)
    with pytest.raises(ValueError, match=f"block {block} is free"):
        pool.acquire(block)
    assert pool.num_free == 2 and {pool.allocate(), pool.allocate()} == {0, 1}


@pytest.mark.parametrize("block_id", [-1, 2, 10**9])
@pytest.mark.parametrize("method", ["acquire", "release", "ref_count"])
def test_unknown_blocks(method, block_id):
    with pytest.raises(ValueError, match=f"block {block_id} is not in this pool of 2 blocks"):
        getattr(BlockPool(2), method)(block_id)


# ── The table: test_copy_on_write.py compares it with a model ─────────────────


def test_release_gives_everything_back_last_block_first():
    pool = BlockPool(3)
    table = BlockTable(pool, 2)
    with pytest.raises(OutOfBlocks, match="blocks needed: 4, free: 3"):
        table.grow(7)  # all or nothing
    assert (table.block_ids, table.num_tokens, pool.num_free) == ([], 0, 3)
    table.grow(6)
    first = table.block_ids[0]
    table.release()
    assert (table.block_ids, table.num_tokens, pool.num_free) == ([], 0, 3)
    assert pool.allocate() == first
    table.release()  # nothing left to give back
    assert pool.num_free == 2


@pytest.mark.parametrize("size", [1, 2])
def test_shrink_keeps_exactly_the_blocks_that_have_a_token_left(size):
    pool = BlockPool(6)
    table = BlockTable(pool, size)
    table.grow(6)
    blocks = list(table.block_ids)
    for left in (5, 4, 3, 2, 1, 0):
        table.shrink(1)
        table.shrink(0)
        for wrong in (-1, left + 1):  # changes nothing
            with pytest.raises(ValueError, match=r"^num_tokens: "):
                table.shrink(wrong)
        kept = blocks[: -(-left // size)]
        assert (table.num_tokens, table.block_ids, pool.num_free) == (left, kept, 6 - len(kept))
    assert pool.allocate() == blocks[0]  # the last one that was released


@pytest.mark.parametrize("position", [-1, 5, 7, 100])
def test_slots_beyond_the_promised_tokens(position):
    table = BlockTable(BlockPool(2), 4)
    table.grow(5)  # the second block has room for 8, but 5 were asked for
    with pytest.raises(ValueError, match=rf"position {position} is not among this table's 5"):
        table.writable_slot(position)


def test_only_an_empty_table_begins_with_blocks_of_others():
    pool = BlockPool(4)
    table, other = BlockTable(pool, 4), BlockTable(pool, 4)
    table.grow(9)
    with pytest.raises(ValueError, match="only an empty table"):
        table.share([0])
    other.share(table.block_ids[:2])
    assert (other.num_tokens, other.block_ids) == (8, table.block_ids[:2])


@pytest.mark.parametrize("bad", [3, 9, "x"])
def test_a_bad_block_among_shared_ones_leaks_nothing(bad):
    pool = BlockPool(4)
    owner, table = BlockTable(pool, 4), BlockTable(pool, 4)
    owner.grow(8)
    with pytest.raises(ValueError, match="block"):
        table.share([*owner.block_ids, bad])
    table.release()
    owner.release()
    assert pool.num_free == 4


def test_replace_holds_the_new_block_and_lets_go_of_the_old():
    pool = BlockPool(4)
    table, other = BlockTable(pool, 4), BlockTable(pool, 4)
    table.grow(8)
    other.grow(4)
    old, new = table.block_ids[1], other.block_ids[0]
    for place in (-1, 2):  # changes nothing
        with pytest.raises(ValueError, match=r"^index: "):
            table.replace(place, new)
    table.replace(1, new)
    assert table.block_ids[1] == new
    assert (pool.ref_count(old), pool.ref_count(new)) == (0, 2)
    table.replace(1, new)  # with itself: nothing changes,
    table.replace(0, table.block_ids[0])  # even if nobody else holds it
    assert [pool.ref_count(block) for block in table.block_ids] == [1, 2]


# ── Where K and V lie ─────────────────────────────────────────────────────────


def make_store(config, num_blocks, block_size, fill=None):
    store = KVStore(config, num_blocks, block_size, torch.device("cpu"), torch.float32)
    if fill is not None:
        store.blocks.fill_(fill)
    return store


def test_slots_and_blocks_are_the_same_memory(llama):
    store = make_store(llama.lm.config, 3, 4)
    store.slots[1, 2 * 4 + 3] = 7.0
    assert (store.blocks[1, 2, 3] == 7).all() and store.blocks.sum() == store.blocks[1, 2, 3].sum()


def test_copies_read_everything_before_they_write(llama):
    store, other = make_store(llama.lm.config, 3, 2), make_store(llama.lm.config, 2, 2, fill=9.0)
    for block in range(3):
        store.blocks[:, block] = float(block)
    store.copy_to(store, [(0, 1), (1, 0)])  # a swap
    assert [float(store.blocks[0, b, 0, 0, 0, 0]) for b in range(3)] == [1, 0, 2]
    store.copy_to(other, [(2, 0)])
    assert (other.blocks[:, 0] == 2).all() and (other.blocks[:, 1] == 9).all()
    store.copy_to(other, [])
    assert (other.blocks[:, 1] == 9).all()


# ── Attention over blocks ─────────────────────────────────────────────────────


MET = Counter()


@meets(MET, {"several blocks": 20, "a block that is not full": 20, "groups of heads": 15})
@settings(max_examples=60)
@given(
    block_size=st.integers(1, 64),
    context_len=st.integers(1, 150),
    group=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_blockwise_attention_equals_naive_attention(block_size, context_len, group, kv_heads, seed):
    """In any order of blocks; what lies in other blocks and in unfilled slots is not read."""
    meet_contexts(MET, [context_len], block_size=block_size, group=group)
    [own], kv, [table] = scattered([context_len], block_size, kv_heads, 8, no_block=0, seed=seed)
    q = torch.randn(kv_heads * group, 8) * 3
    found = blockwise_attention(q, kv, table.tolist(), context_len)
    expected = naive_attention(q[None], *own.unbind(1))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_blockwise_attention_by_hand():
    # scores 0, ln 2, ln 5 over blocks of two: weights 1/8, 2/8, 5/8
    kv = torch.zeros(2, 2, 2, 1, 1)
    kv[1, :, 0, 0, 0] = torch.tensor([0.0, np.log(2)])
    kv[1, :, 1, 0, 0] = torch.tensor([8.0, 16.0])
    kv[0, 0, :, 0, 0] = torch.tensor([np.log(5), 24.0])
    out = blockwise_attention(torch.ones(1, 1), kv, [1, 0], 3)
    torch.testing.assert_close(out, torch.tensor([[1.0 + 4.0 + 15.0]]))


@meets(MET, {
    "other lengths": 60, "several blocks": 40, "a block that is not full": 60,
    "a window that hides": 15, "a chunk after a prefix": 40,
})  # fmt: skip
@settings(max_examples=40)
@given(
    counts=st.lists(st.lists(st.integers(0, 16), min_size=4, max_size=4).filter(any), max_size=5),
    block_size=st.sampled_from([2, 3, 4, 16, 64]), window=st.sampled_from([None, 5]),
)  # fmt: skip
def test_the_backend_equals_naive_attention(llama, counts, block_size, window):
    """Decodes of any lengths beside chunks after prefixes of any lengths, in one batch."""
    steps = Steps(one_layer(llama.lm, window=window), 4, "auto", block_size, (TorchAttention,))
    steps.ways[0].store.blocks.fill_(1e4)  # a loud rest
    for of_step in [*counts, [1, 3, 1, 1]]:
        steps.step(of_step)
        lens = [one.num_computed for one in steps.sequences]
        meet_contexts(MET, lens, of_step, block_size, 2, window)
    steps.assert_formula()


@given(
    lens=st.lists(st.integers(1, 200), min_size=1, max_size=9),
    block_size=st.sampled_from([1, 16]),
)
@example(lens=[4, 8], block_size=1)
@example(lens=[4, 9], block_size=1)
def test_decodes_are_padded_by_at_most_as_much_as_they_have(llama, lens, block_size):
    """In groups: a single one, unless the longest has more than twice what the shortest has."""
    backend = TorchAttention(llama.lm.config, make_store(llama.lm.config, 1, block_size))
    lens = np.array(lens)
    batch = SimpleNamespace(num_decodes=len(lens), context_lens=lens, context_lens_host=lens)
    groups = [np.arange(len(lens))[rows] for rows in backend._rows_alike(batch)]
    assert sorted(np.concatenate(groups)) == [*range(len(lens))]
    assert (len(groups) == 1) == (max(lens) <= 2 * max(min(lens), block_size))
    for own in (lens[group] for group in groups):
        assert len(own) * max(own) <= 2 * max(sum(own), len(own) * block_size)


def test_bytes_per_token(checkpoint):
    """2 (K and V) × layers × KV heads × head dim × bytes of the dtype, and so much is allocated."""
    config = checkpoint("qwen3").lm.config
    assert config.kv_bytes_per_token(torch.float32) == 2 * 2 * 2 * 32 * 4
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 32 * 2
    store = make_store(config, 3, 5)
    assert store.blocks.nbytes == 3 * 5 * config.kv_bytes_per_token(torch.float32)
