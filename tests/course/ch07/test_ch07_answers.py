"""Chapter 07's own code: the trie, the cache without a tree, and what its exercises break."""

import random

import pytest
from helpers import careful_engine, drain, greedy_tokens, small, step
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv import BlockPool, Engine, RadixCache, SamplingParams
from minikv.course.chapters.ch07_radix_prefix_cache.answers import (
    BlockTrie,
    ChainedCache,
    chained_hashes,
    keys_of,
)
from minikv.course.exercises.skeletons import broken
from minikv.testing import LoggingPool, PrefixModel

TOKENS = st.lists(st.sampled_from([0, 1]), max_size=12)


# ── The trie ──────────────────────────────────────────────────────────────────


@given(stored=st.lists(TOKENS, max_size=6), asked=TOKENS, size=st.integers(1, 3))
def test_the_trie_finds_the_longest_beginning(stored, asked, size):
    trie, model, count = BlockTrie(size), PrefixModel(size), 0
    for token_ids in stored:
        blocks = range(count, count + len(token_ids) // size)
        count += len(blocks)
        trie.insert(token_ids, blocks)
        model.insert(token_ids, blocks)
    assert trie.match(asked) == model.match(asked)


def test_a_rest_of_a_block_has_no_key():
    assert keys_of([1, 2, 3, 4, 5], 2) == [(1, 2), (3, 4)]
    assert keys_of([1], 2) == keys_of([], 2) == []


# ── Names ─────────────────────────────────────────────────────────────────────


@given(
    TOKENS, TOKENS, st.integers(1, 3), st.sampled_from([None, "x"]), st.sampled_from([None, "x"])
)
def test_names_are_equal_as_far_as_prompts_are(one, other, size, salt, other_salt):
    pairs = zip(
        chained_hashes(one, size, salt), chained_hashes(other, size, other_salt), strict=False
    )
    model = PrefixModel(size)
    beginnings = zip(model.names(one, salt), model.names(other, other_salt), strict=False)
    assert [a == b for a, b in pairs] == [a == b for a, b in beginnings]


def test_names_do_not_collide_where_pythons_hash_does():
    assert hash(0) == hash(2**61 - 1)
    assert chained_hashes([0], 1) != chained_hashes([2**61 - 1], 1)
    assert chained_hashes([1, 23], 2) != chained_hashes([12, 3], 2)


# ── The cache without a tree ──────────────────────────────────────────────────


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 3))
def test_it_finds_and_evicts_what_the_tree_does(seed, size):
    draw = random.Random(seed)
    pools = [LoggingPool(12), LoggingPool(12)]
    caches = [RadixCache(pools[0], size), ChainedCache(pools[1], size)]
    for _ in range(60):
        token_ids = draw.choices([0, 1], k=draw.randint(0, 4 * size))
        salt, kind = draw.choice([None, "x"]), draw.choice("mie")
        if kind == "i" and len(token_ids) // size > pools[0].num_free:
            kind = "e"
        count, results = draw.randint(0, 4), []
        for pool, cache in zip(pools, caches, strict=True):
            if kind == "e":
                results.append(cache.evict(count))
            elif kind == "m":
                results.append(cache.match(token_ids, salt)[1:])
            else:
                own = [pool.allocate() for _ in range(len(token_ids) // size)]
                results.append(cache.insert(token_ids, own, salt)[1:])
                for block_id in own:
                    pool.release(block_id)
            cache.check()
        assert results[0] == results[1] and pools[0].freed == pools[1].freed
        assert caches[0].num_cached_blocks == caches[1].num_cached_blocks
        assert caches[0].num_evictable_blocks == caches[1].num_evictable_blocks


def test_it_keeps_what_is_in_use_and_clears_the_rest():
    pool = BlockPool(8)
    cache = ChainedCache(pool, 2)
    own = [pool.allocate() for _ in range(3)]
    cache.insert([1, 2, 3, 4, 5, 6], own)
    for block_id in own[1:]:
        pool.release(block_id)
    assert (cache.num_cached_blocks, cache.num_evictable_blocks) == (3, 2)
    assert cache.evict(9) == 2 and cache.match([1, 2, 3, 4]).block_ids == own[:1]
    assert list(cache.block_ids()) == own[:1]
    cache.clear()
    assert pool.ref_count(own[0]) == 1 and cache.match([1, 2]).num_tokens == 0
    with pytest.raises(ValueError, match="block_ids: 2 blocks of tokens, 1 blocks"):
        cache.insert([1, 2, 3, 4], own[:1])
    with pytest.raises(ValueError, match="num_blocks: must be at least 0, was -1"):
        cache.evict(-1)


def test_check_notices():
    pool = BlockPool(4)
    cache = ChainedCache(pool, 1)
    block_id = pool.allocate()
    cache.insert([1], [block_id])
    cache.check()
    cache.blocks["other"] = block_id
    with pytest.raises(AssertionError, match="two names"):
        cache.check()
    del cache.blocks["other"]
    pool.release(block_id)
    pool.release(block_id)
    with pytest.raises(AssertionError, match="is free"):
        cache.check()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_engine_runs_on_it(llama, preemption):
    """Shared prefixes, samples, a salt, too little memory: the oracle's tokens."""
    config = small(num_blocks=14, preemption=preemption)
    engine = careful_engine(llama.lm, config, prefix_cache=ChainedCache)
    shared, *rests = llama.prompts(9, 4, 7, 11, seed=7)
    prompts = [shared + rest for rest in rests] + [shared, shared + rests[0]]
    jobs = [(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
    jobs.append((prompts[0], SamplingParams(max_tokens=12, cache_salt="x")))
    ids = [engine.add_request(*job) for job in jobs]
    outputs = drain(engine)
    for request_id, (prompt, _) in zip(ids, jobs, strict=True):
        assert outputs[request_id].token_ids == greedy_tokens(llama.lm, prompt, 12)
    assert engine.stats().hit_tokens > 0 and engine.stats().preemptions > 0
    engine.cache.evict(14)
    assert engine.pool.num_free == 14


# ── What the exercises break ──────────────────────────────────────────────────


def test_the_broken_locks_lose_a_prefix_in_use(llama):
    (prompt,) = llama.prompts(12, seed=1)
    engine = Engine(llama.lm, small(), prefix_cache=broken("07.5"))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    node = engine.cache.match(prompt).node
    engine.cache.lock(node)
    assert engine.cache.num_evictable_blocks == 3
    engine.cache.evict(3)
    assert engine.cache.match(prompt).num_tokens == 0


def test_the_broken_scheduler_frees_blocks_that_a_table_names(llama):
    (prompt,) = llama.prompts(13, seed=1)
    engine = Engine(llama.lm, small(), scheduler=broken("07.6"))
    for _ in range(2):
        engine.add_request(prompt, SamplingParams(max_tokens=3))
    with pytest.raises(AssertionError, match="reference count 0, 1 holders"):
        step(engine)


def test_the_broken_scheduler_leaves_nothing_to_compute(llama):
    (prompt,) = llama.prompts(12, seed=1)
    engine = Engine(llama.lm, small(), scheduler=broken("07.6"))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    with pytest.raises(RuntimeError, match="gave none of the running sequences a token"):
        engine.generate([prompt], SamplingParams(max_tokens=1))


def test_the_broken_trie_is_right_for_a_chat_and_wrong_for_questions():
    trie = broken("07.1")(2)
    trie.insert([1, 2, 3, 4], [0, 1])
    assert trie.match([1, 2, 3, 4, 5, 6]) == [0, 1]
    assert trie.match([1, 2, 9, 9]) == []
