"""Prefill and decode on different workers of this process: tokens are one engine's, whatever fails.
On Ray: see test_serve_ray."""

import random
import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import pytest
from cluster_case import CONFIG, Fragile, assert_all_free, one_engine, params_of, prompts_of, tokens
from helpers import with_weights
from thorough import thorough_after
from waiting import until

from minikv import SamplingParams
from minikv.cluster import front as front_module
from minikv.cluster.front import Front, RequestFailed
from minikv.cluster.routing import ByOwnPrefix, ByPrefix, LeastLoaded
from minikv.cluster.split import SHORT
from minikv.course.chapters.ch13_distributed_kv import mixed_load


def long_prompts(lm, number, seed=0):
    """Longer than what is computed where it is decoded; a third begins alike each."""
    return [prompt[:40] + 3 * prompt[::-1] for prompt in prompts_of(lm, number, seed)]


def split(workers, prefill=1, policy=ByOwnPrefix):
    return Front(workers, policy, num_prefill=prefill)


def stats(worker):
    return worker.worker.engine.stats()


@pytest.mark.parametrize("kv_dtype", thorough_after(1, ["auto", "int8", "int4"]))
def test_one_computes_and_the_other_continues(tinypy, kv_dtype):
    config = replace(CONFIG, kv_dtype=kv_dtype)
    prompts, params = long_prompts(tinypy.lm, 6), params_of(6)
    expected = one_engine(tinypy.lm, prompts, params, config)
    workers = [Fragile(tinypy.lm, config) for _ in range(3)]
    with split(workers) as front:
        streams = [front.submit(*pair) for pair in zip(prompts, params, strict=True)]
        assert [tokens(one) for one in streams] == expected
        assert {one.worker for one in streams} == {1, 2}
        assert front.router.prefill.loads == [0] and front.router.decode.loads == [0, 0]
    assert stats(workers[0]).generated_tokens == 2 + 6, "two at the start, one for each prompt"
    steps = sum(one.max_tokens for one in params)
    computed = sum(stats(one).computed_tokens for one in workers[1:])
    assert computed <= 6 * CONFIG.block_size + steps + 2 * 2, "they decode, and little else"
    assert_all_free(workers)


def test_text_comes_with_the_first_token_and_stops_where_it_should(tinypy):
    prompt = "def fib(n):\n    if n < 2:\n" * 12
    params = SamplingParams(max_tokens=40, stop=("return",), ignore_eos=True)
    [expected] = Fragile(tinypy.lm).worker.engine.generate([prompt], params)
    workers = [Fragile(tinypy.lm) for _ in range(2)]
    with split(workers) as front:
        workers[1].paused.clear()
        deltas = iter(front.submit(prompt, params))
        first = next(deltas)
        workers[1].paused.set()
        deltas = [first, *deltas]
    assert first.token_ids == expected.token_ids[:1]
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [one for delta in deltas for one in delta.token_ids] == expected.token_ids
    assert deltas[-1].finish_reason == expected.finish_reason


def deaths(draw):
    """Says yes soon, and then now and then."""
    soon, calls = draw.randrange(1, 6), count()
    return lambda: next(calls) == soon or draw.random() < 0.03


@pytest.mark.parametrize("seed", thorough_after(0, range(3)))
def test_no_request_is_lost_though_workers_of_both_kinds_die(tinypy, monkeypatch, seed):
    """At random moments, with requests that are cancelled at random. Nothing is left anywhere."""
    monkeypatch.setattr(front_module, "ATTEMPTS", 10**6)
    prompts, params = long_prompts(tinypy.lm, 30, seed), params_of(30)
    expected = one_engine(tinypy.lm, prompts, params)
    workers = [Fragile(tinypy.lm, dies=deaths(random.Random(10 * seed + i))) for i in range(4)]
    draw = random.Random(seed)
    with split(workers, 2, ByPrefix) as front:
        streams = [front.submit(*pair) for pair in zip(prompts, params, strict=True)]
        for stream, want in zip(streams, expected, strict=True):
            leaves, got = draw.random() < 0.1, []
            for delta in stream:
                got += delta.token_ids
                if leaves:
                    break
            assert got == want[: len(got)] and (leaves or got == want)
        assert front.num_requests == 0
        assert front.router.prefill.loads == [0, 0] == front.router.decode.loads
        assert not front.waiting and not any(lane.requests for lane in front.lanes)
        for one in workers:
            one.dies = lambda: False
    assert all(one.num_deaths > 0 for one in workers)
    assert_all_free(workers)


@pytest.mark.parametrize("lost", thorough_after(0, ["the object", "the weights", "the room"]))
def test_what_cannot_be_taken_over_is_computed(tinypy, lost):
    prompts, params = long_prompts(tinypy.lm, 6), params_of(6)
    workers = [Fragile(tinypy.lm) for _ in range(2)]
    taken = []
    with split(workers) as front:
        decode = workers[1].worker
        if lost == "the object":
            decode.fetch = lambda shared: taken.append(shared)
        elif lost == "the weights":  # the prefill worker's are others than ours
            state = {name: one * 1.01 for name, one in tinypy.hf.state_dict().items()}
            workers[0].worker.engine.update_weights(state)
            lm = with_weights(tinypy.lm, state)
            firsts = [one[0] for one in one_engine(lm, prompts, params)]
        else:
            decode.engine.cache.clear()
            room = [decode.engine.pool.allocate() for _ in range(50)]
            fetch = decode.fetch
            decode.fetch = lambda shared: taken.append(shared) or fetch(shared)
        streams = [front.submit(*pair) for pair in zip(prompts, params, strict=True)]
        got = [tokens(one) for one in streams]
        expected = one_engine(tinypy.lm, prompts, params)
        if lost == "the weights":
            assert [one[0] for one in got] == firsts
            got, expected = [one[1:] for one in got], [one[1:] for one in expected]
        assert got == expected
        if lost != "the weights":
            assert len(taken) == 6
        if lost == "the room":
            for block_id in room:
                decode.engine.pool.release(block_id)
    assert_all_free(workers)


@pytest.mark.thorough
def test_what_waits_is_not_evicted_by_what_comes(tinypy):
    """A pool for two of twelve requests: each waits outside until it is its turn."""
    config = replace(CONFIG, num_blocks=40)
    prompts = [[i] + long_prompts(tinypy.lm, 1)[0] for i in range(12)]
    params = [SamplingParams(20, ignore_eos=True)] * 12
    expected = one_engine(tinypy.lm, prompts, params, config)
    workers = [Fragile(tinypy.lm, config) for _ in range(2)]
    with split(workers, policy=LeastLoaded) as front:
        workers[1].paused.clear()
        streams = [front.submit(*pair) for pair in zip(prompts, params, strict=True)]
        until(lambda: len(front.lanes[1].requests) == 12)
        workers[1].paused.set()
        assert [tokens(one) for one in streams] == expected
    assert stats(workers[1]).computed_tokens <= 2 + 12 * (CONFIG.block_size + 20)


@pytest.mark.thorough
def test_what_is_short_or_held_goes_to_a_decode_worker(tinypy):
    workers = [Fragile(tinypy.lm) for _ in range(3)]
    [prompt], params = long_prompts(tinypy.lm, 1), SamplingParams(30, ignore_eos=True)
    with split(workers) as front:
        for sent, prefilled in (
            ([9] * SHORT, 0),
            (prompt, 1),
            (prompt, 1),
            (prompt + [7] * (SHORT // 2), 1),
            (prompt + [7] * 2 * SHORT, 2),
        ):
            stream = front.submit(sent, params)
            assert tokens(stream) == one_engine(tinypy.lm, [sent], [params])[0]
            assert stats(workers[0]).generated_tokens == 2 + prefilled


def test_without_a_prefill_worker_decode_workers_do_both(tinypy):
    workers = [Fragile(tinypy.lm, dies=lambda: True), Fragile(tinypy.lm)]
    prompts, params = long_prompts(tinypy.lm, 6), params_of(6)
    with split(workers) as front:
        workers[0].is_gone = True
        streams = [front.submit(*pair) for pair in zip(prompts, params, strict=True)]
        assert [tokens(one) for one in streams] == one_engine(tinypy.lm, prompts, params)
        until(lambda: front.lanes[0].is_over)


def test_without_a_decode_worker_requests_end_and_are_refused(tinypy):
    workers = [Fragile(tinypy.lm), Fragile(tinypy.lm, dies=lambda: True)]
    [prompt] = long_prompts(tinypy.lm, 1)
    with split(workers) as front:
        workers[1].is_gone = True
        with pytest.raises(RequestFailed, match="no worker is left"):
            tokens(front.submit(prompt))
        with pytest.raises(RequestFailed, match="no worker is left"):
            front.submit(prompt)


def test_what_cannot_be_split_is_refused(tinypy):
    workers = [Fragile(tinypy.lm, replace(CONFIG, prefix_cache=False)) for _ in range(2)]
    [prompt] = long_prompts(tinypy.lm, 1)
    for prefill, at_first in ((2, None), (-1, None), (1, 1)):
        with pytest.raises(ValueError, match="num_prefill"):
            Front(workers, ByPrefix, at_first=at_first, num_prefill=prefill)
    with split(workers) as front, pytest.raises(ValueError, match="prefix_cache: must be True"):
        tokens(front.submit(prompt))


@pytest.mark.thorough
def test_mixed_load_is_measured_or_says_why_not(tinypy, monkeypatch):
    """On workers in this process. Every token of those that decode is timed."""
    for name, value in dict(PROMPT=100, OUTPUT=2, PAUSE=0.05, READERS=2, READ=6).items():
        monkeypatch.setattr(mixed_load, name, value)
    workers = [Fragile(tinypy.lm) for _ in range(2)]
    found = mixed_load.measured(tinypy.lm, rounds=1, workers=nullcontext(workers))
    assert list(found) == list(mixed_load.WAYS)
    for times in found.values():
        assert len(times.between) == 2 * 5 and min(times.between) >= 0
        assert times.first and min(times.first) > 0
    assert [line.split("  ")[0] for line in mixed_load.rows(found)[1:]] == list(found)
    workers[0].paused.clear()
    threading.Timer(1, workers[0].paused.set).start()  # closing waits for its call
    with pytest.raises(RuntimeError, match="the machine is too busy"):
        mixed_load.measured(tinypy.lm, deadline=0.5, workers=nullcontext(workers))
    workers[0].is_gone = True
    with pytest.raises(RuntimeError, match="do not work here: is gone"):
        mixed_load.measured(tinypy.lm, workers=nullcontext(workers))
