"""What a pool and a prefix cache of any class tell: `minikv.events`."""

import pytest
from helpers import QueuePool, generate, small

from minikv import Engine, RadixCache, SamplingParams
from minikv.events import Listener, listen

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class Diary(Listener):
    """Believes what it is told: which blocks the prefix cache holds, and under which tokens."""

    def __init__(self):
        self.held, self.told, self.pool, self.cache = {}, [], None, None

    def begin(self, pool, cache):
        self.told.append("begin")
        assert pool.num_free == pool.num_blocks
        self.held, self.pool, self.cache = {}, pool, cache

    def freeing(self, block_id):
        self.told.append("freeing")
        assert self.pool.ref_count(block_id) == 1
        self.held.pop(block_id, None)

    def stored(self, token_ids, block_ids, salt):
        self.told.append("stored")
        size = self.cache.block_size
        for i, block_id in enumerate(block_ids):
            self.held[block_id] = salt, tuple(token_ids[: (i + 1) * size])

    def clearing(self):
        self.told.append("clearing")
        self.held.clear()


def prompts_of(llama, *lengths):
    """They begin with the same two blocks."""
    [first, *rest] = llama.prompts(*lengths)
    return [first, *(first[:8] + one for one in rest)]


@pytest.mark.parametrize("parts", [{}, {"block_pool": QueuePool}], ids=["the engine's", "own"])
def test_a_listener_knows_what_the_cache_holds(llama, parts):
    diary = Diary()
    engine = Engine(llama.lm, small(num_blocks=12), listeners=[diary], **parts)
    for prompt in prompts_of(llama, 16, 9, 20, 7, 25):
        generate(engine, [prompt], PARAMS)
        assert set(engine.cache.block_ids()) == set(diary.held)
        for salt, tokens in diary.held.values():
            assert engine.cache.match(tokens, salt).num_tokens == len(tokens)
    assert diary.told.count("freeing") > 6, "the pool was too small for all of them"
    engine.cache.clear()
    assert engine.cache.num_cached_blocks == 0
    assert diary.held == {} and diary.told.count("clearing") == 1
    assert diary.told.count("begin") == 1


def test_a_listener_is_told_when_the_parts_are_made_anew(llama):
    diary = Diary()
    engine = Engine(llama.lm, small(), listeners=[diary])
    generate(engine, llama.prompts(20), PARAMS)
    assert diary.held
    engine.update_weights(llama.hf.state_dict())
    assert diary.told.count("begin") == 2 and diary.held == {}
    assert diary.pool is engine.pool and diary.cache is engine.cache
    generate(engine, llama.prompts(20), PARAMS)
    assert set(engine.cache.block_ids()) == set(diary.held)


def test_several_listeners_and_a_pool_without_a_cache(llama):
    diaries = [Diary(), Diary()]
    engine = Engine(llama.lm, small(prefix_cache=False), listeners=diaries)
    generate(engine, llama.prompts(9), PARAMS)
    assert diaries[0].told == diaries[1].told == ["begin"] + ["freeing"] * 4


def test_nothing_is_wrapped_if_nobody_listens(llama):
    engine = Engine(llama.lm, small())
    for part, method in ((engine.pool, "release"), (engine.cache, "insert"),
                         (engine.cache, "clear"), (engine.scheduler, "schedule")):  # fmt: skip
        assert method not in vars(part)


def test_what_a_pool_raises_is_raised():
    pool, told = QueuePool(2), Diary()
    listen([told], pool, RadixCache(pool, 4))
    with pytest.raises(KeyError):
        pool.release(2)
    with pytest.raises(ValueError, match=r"^block_ids: 1 blocks of tokens"):
        told.cache.insert([1, 2, 3, 4], [])
    assert told.told == ["begin"]
