"""The generators of workloads: seeded, and with the properties that they claim."""

import math
from itertools import pairwise
from statistics import mean, pstdev

import pytest

from minikv.course.workloads.workload import (
    Length,
    chat_like,
    conversations,
    poisson,
    shared_prompts,
    write_code,
)


def test_shrunk_lengths_are_the_chats_own_divided():
    whole, shrunk = chat_like(300, seed=2), chat_like(300, seed=2, shrink=(30, 4))
    assert shrunk == [Length(-(-prompt // 30), -(-output // 4)) for prompt, output in whole]
    assert min(map(min, shrunk)) >= 1


def test_arrivals_are_a_poisson_process():
    arrivals = poisson(20_000, rate=8.0, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert arrivals == poisson(20_000, rate=8.0, seed=3) != poisson(20_000, rate=8.0, seed=4)
    assert arrivals[0] == 0 and min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert pstdev(gaps) == pytest.approx(1 / 8, rel=0.03)  # of an exponential: its mean
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(1 / math.e, rel=0.03)


def test_arrivals_all_at_once_and_none():
    assert poisson(3, math.inf) == [0.0, 0.0, 0.0]
    assert poisson(0, 1.0) == []
    for rate in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="rate: must be more than 0"):
            poisson(3, rate)


def test_the_text_is_the_same_on_any_machine(lm):
    assert lm.decode(write_code(lm, 40)) == (
        "queue_5066 = {}\nfor event in update(queue):\n    queue_5066[event.index] = event\n\n\n"
        "rows_681"
    )
    for length in (0, 1, 63, 700):
        assert len(write_code(lm, length, seed="x")) == length
    assert write_code(lm, 50, "x") == write_code(lm, 50, "x") != write_code(lm, 50, "y")


def test_groups_share_their_system_prompt_and_nothing_else(lm):
    jobs = shared_prompts(lm, 60, groups=3, shared=48, rate=50.0, seed=1)
    assert jobs == shared_prompts(lm, 60, groups=3, shared=48, rate=50.0, seed=1)
    lengths = chat_like(60, seed=1, shrink=(30, 4))
    assert [Length(len(job.prompt_ids) - 48, job.max_tokens) for job in jobs] == lengths
    assert [job.arrival for job in jobs] == poisson(60, 50.0, seed=1)
    groups = {tuple(job.prompt_ids[:48]) for job in jobs}
    assert len(groups) == 3
    assert len({ids[:16] for ids in groups}) == 3
    assert len({tuple(job.prompt_ids[48:]) for job in jobs}) == 60
    assert max(len(job.prompt_ids) + job.max_tokens for job in jobs) <= lm.config.max_context
    assert len(shared_prompts(lm, 5, shared=0)[0].prompt_ids) == chat_like(5, shrink=(30, 4))[0][0]
    with pytest.raises(ValueError, match="groups: must be at least 1, was 0"):
        shared_prompts(lm, 5, groups=0)


def turns_of(jobs):
    """The jobs of each conversation, in order: a prompt goes on where an earlier answer ended."""
    found = []
    for job in jobs:
        for turns in found:
            last = turns[-1]
            if job.prompt_ids[: len(last.prompt_ids)] == last.prompt_ids:
                assert len(job.prompt_ids) > len(last.prompt_ids) + last.max_tokens
                turns.append(job)
                break
        else:
            found.append([job])
    return found


def test_conversations_grow(lm):
    jobs = conversations(lm, 6, turns=3, shared=32, think=1.0, seed=5, real_answers=False)
    assert jobs == conversations(lm, 6, turns=3, shared=32, think=1.0, seed=5, real_answers=False)
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)
    found = turns_of(jobs)
    assert [len(turns) for turns in found] == [3] * 6
    assert len({tuple(job.prompt_ids[:32]) for job in jobs}) == 1
    assert [turns[0].arrival for turns in found] == poisson(6, 4.0, seed=5)
    for turns in found:
        assert all(later.arrival - earlier.arrival >= 0.5 for earlier, later in pairwise(turns))


def test_a_conversation_ends_before_it_outgrows_the_context(lm):
    jobs = conversations(lm, 6, turns=8, shared=800, seed=5, real_answers=False)
    assert 0 < len(jobs) < 6 * 8
    assert all(len(job.prompt_ids) + job.max_tokens <= lm.config.max_context for job in jobs)


def test_real_answers_are_the_models_own(lm):
    first, second = conversations(lm, 1, turns=2, shared=0)
    start = len(first.prompt_ids)
    answer = second.prompt_ids[start : start + first.max_tokens]
    assert answer == lm.generate_naively(first.prompt_ids, first.max_tokens)
