"""Chapter 07's cache without a tree does what the tree does; what is kept of a turn; the finale."""

import random
from collections import Counter

import pytest
from helpers import careful_engine, drain, meets, naively, small
from hypothesis import given, settings, strategies as st

from minikv import BlockPool, RadixCache, SamplingParams
from minikv.course.chapters.ch07_radix_prefix_cache.answers import ChainedCache, insert_turn
from minikv.course.chapters.ch07_radix_prefix_cache.append_only import agents, insert_all, two_turns
from minikv.course.chapters.ch07_radix_prefix_cache.four_requests import FourRequests
from minikv.course.exercise_data.skeletons import broken
from minikv.course.judge.stand_ins import LoggingPool

MET = Counter()


@meets(MET, {"hits": 60, "behind a hit": 60, "evicted": 200})
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
        if kind == "e":
            MET["evicted"] += results[0] > 0
        else:
            MET["hits" if kind == "m" else "behind a hit"] += results[0][1] > 0
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
        assert outputs[request_id].token_ids == naively(llama.lm, prompt, 12)
    assert engine.stats().hit_tokens > 0 and engine.stats().preemptions > 0
    engine.cache.evict(14)
    assert engine.pool.num_free == 14


# ── Append-only prompts ───────────────────────────────────────────────────────


def test_the_next_turn_finds_what_stands_before_the_reasoning(lm):
    dead, found, tokens, expected = two_turns(lm, insert_turn)
    assert (dead, found) == (6, 12) and tokens == expected
    _, found, tokens, expected = two_turns(lm, insert_all)
    assert found == 12 and tokens == expected  # what is dead is never found
    _, found, tokens, expected = two_turns(lm, broken("07.6"))
    assert found > 12 and tokens != expected


def test_dead_blocks_push_out_what_would_be_found():
    small, large = 1200, 4000
    assert agents(insert_turn, small).computed < agents(insert_all, small).computed
    assert agents(insert_turn, large).computed == agents(insert_all, large).computed
    longer = agents(insert_all, large, append_only=True)
    assert longer.prompt_tokens > agents(insert_all, large).prompt_tokens
    assert longer.computed < agents(insert_all, large).computed / 4


@pytest.mark.thorough
def test_the_finale_finds_nothing_cold_and_the_prefix_warm(lm, exercises):
    [_, (_, alone, *_), *rows] = FourRequests(lm).rows()
    assert [row[2] for row in rows] == ["0 of 1,945", "0 of 1,945", "1,920 of 1,945"]
    assert [row[1] for row in rows] == ["2,005", "2,005", "85"] and alone == "2,005"
