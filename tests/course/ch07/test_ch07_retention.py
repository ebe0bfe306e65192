"""The load of agents, and what each policy computes again."""

from minikv.course.chapters.ch07_radix_prefix_cache.retention import (
    BLOCK,
    agent_load,
    recomputed,
    retention_picture,
    serve,
    shape,
)
from minikv.retention import RetainingCache, by_age


def test_the_load_has_the_recorded_shape():
    found = shape(agent_load())
    assert found["turns of a median agent"] == 43
    assert abs(found["tokens in, median"] - 142_000) < 15_000
    assert abs(found["back within 1 s, %"] - 86.46) < 3
    assert abs(found["back within 10 s, %"] - 95.12) < 2


def test_what_is_computed_again_is_what_was_there_before():
    turns = agent_load(agents=3, singles_per_s=0.2)

    def plain(pool, clock):
        return RetainingCache(pool, 1, by_age, clock)

    distinct = len(set().union(*(turn.ids for turn in turns)))
    again, cache = serve(turns, distinct, plain)
    assert again == 0 and cache.num_cached_blocks == distinct
    again, cache = serve(turns, distinct // 4, plain)
    cache.check()
    assert again > 0 and again % BLOCK == 0


def test_policies_on_one_load():
    sizes = [500, 1000]
    again = recomputed(agent_load(agents=3, singles_per_s=0.3), sizes)
    assert again["30 s to live"] == again["age"]
    best = again.pop("knows the future")
    assert all(
        least <= count
        for tokens in again.values()
        for least, count in zip(best, tokens, strict=True)
    )
    assert best == sorted(best, reverse=True)
    again["knows the future"] = best
    alt = retention_picture(again, sizes).alt
    assert f"{again['age'][0] / 1e6:.2f} M with 500" in alt
