"""Penalties: the tokens of a naive loop that applies their definition, whatever an engine does."""

import random

import pytest
import torch
from cluster_case import Fragile, tokens
from helpers import careful_engine, drafting_engine, drain, greedy, run_ahead, small
from thorough import thorough_after

from minikv import ConcatCache, Engine, Sampler
from minikv.cluster.front import Front
from minikv.cluster.routing import ByPrefix
from minikv.serving import Scored
from minikv.serving.scores import Asked, Scoring
from minikv.speculative import Drafter, Proposal

PENALTIES = [
    {"frequency_penalty": 1.2}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.4},
    {"frequency_penalty": -0.6, "presence_penalty": 2.0, "repetition_penalty": 0.8},
    {"frequency_penalty": 2.0, "logit_bias": ((271, 3.0), (5, -4.0))},
]  # fmt: skip
LENGTH = 16


def by_definition(lm, prompt, asked, index=0):
    """Sample `index`. Nothing is counted before it is needed."""
    found, cache = [], ConcatCache(lm.config)
    for place in range(asked.max_tokens):
        logits = lm.logits(found[-1:] or prompt, cache)[-1].clone()
        for token_id, bias in asked.logit_bias:
            logits[token_id] += bias
        for token_id in {*prompt, *found}:
            factor = asked.repetition_penalty
            logits[token_id] *= 1 / factor if logits[token_id] > 0 else factor
        for token_id in set(found):
            logits[token_id] -= found.count(token_id) * asked.frequency_penalty
            logits[token_id] -= asked.presence_penalty
        draw = random.Random(f"{asked.seed}/{index}/{place}").random()
        draw = draw if asked.temperature > 0 else None
        found.append(int(Sampler()(logits[None], [asked], [draw])))
    return found


@pytest.fixture(scope="module")
def cases(tinypy):
    """(prompt, what is asked, the tokens of each sample): greedy and drawn, one and several."""
    rng, found = random.Random(0), []
    for i, penalties in enumerate(PENALTIES):
        for temperature, n in ((0, 1), (0.8, 1 + i % 3)):
            prompt = [rng.randrange(300) for _ in range(rng.randint(1, 30))]
            asked = Asked(
                LENGTH, temperature=temperature, n=n, seed=i, ignore_eos=True, **penalties
            )
            samples = [by_definition(tinypy.lm, prompt, asked, index) for index in range(n)]
            found.append((prompt, asked, samples))
    plain = careful_engine(tinypy.lm, small()).generate([one[0] for one in found], greedy(LENGTH))
    for output, (_, _, samples) in zip(plain, found, strict=True):  # penalties change something
        assert list(output.token_ids) not in samples
    return found


class Right(Drafter):
    """Knows what a request with penalties gets: every draft is accepted if rows are penalised."""

    def __init__(self, cases):
        self.cases = cases

    def propose(self, sequence, most):
        for prompt, asked, samples in self.cases:
            if (prompt, asked) == (sequence.request.prompt_ids, sequence.request.params):
                done = sequence.num_output
                return Proposal(samples[sequence.index][done : done + most])
        return Proposal([])


def answers(engine, cases):
    engine.runner.sampler = Scored(engine.runner)
    prompts, asked, _ = zip(*cases, strict=True)
    outputs = engine.generate(prompts, asked)
    return [[one.token_ids for one in output.samples] for output in outputs]


def expected(cases):
    return [samples for _, _, samples in cases]


@pytest.mark.parametrize("changes", thorough_after(0, [
    {"num_blocks": 32}, {"attention": "cpu"}, {"max_num_seqs": 3}, {},
    {"num_blocks": 32, "preemption": "swap"}, {"max_batch_tokens": 16},
]))  # fmt: skip
def test_tokens_are_those_of_the_definition(tinypy, cases, changes):
    """Also for sequences that were preempted: what they have is not counted twice."""
    config = small(**changes)
    if changes.get("attention") == "cpu":
        engine = Engine(tinypy.lm, config)
    else:
        engine = careful_engine(tinypy.lm, config)
    assert answers(engine, cases) == expected(cases)
    assert (engine.stats().preemptions > 0) == ("num_blocks" in changes)


@pytest.mark.parametrize("make", ["ngram", Right])
def test_tokens_are_those_without_drafts(tinypy, cases, make):
    engine = drafting_engine(tinypy.lm, small(), make if make == "ngram" else make(cases))
    assert answers(engine, cases) == expected(cases)
    counts = engine.stats().speculation
    assert counts.drafts > 0 and (make == "ngram" or counts.accepted == counts.drafts)


@pytest.mark.thorough
def test_tokens_are_those_of_an_engine_that_runs_ahead(tinypy, cases):
    """It begins a step before the newest token of each sequence is known."""
    engine = careful_engine(tinypy.lm, small(num_blocks=48))
    run_ahead(engine)
    assert answers(engine, cases) == expected(cases)


def test_a_step_that_fails_is_not_counted(tinypy, cases):
    engine = careful_engine(tinypy.lm, small())
    engine.runner.sampler = Scored(engine.runner)
    ids = [engine.add_request(prompt, asked) for prompt, asked, _ in cases]
    for countdown in (0, 20, 40):
        engine.attention.interrupt(RuntimeError("planted"), countdown)
        with pytest.raises(RuntimeError, match="planted"):
            while True:
                engine.step()
    outputs = drain(engine)
    assert [[one.token_ids for one in outputs[i].samples] for i in ids] == expected(cases)


def test_tokens_are_those_though_a_worker_dies(tinypy, cases):
    """Its requests go on elsewhere, and what was sent already counts there."""
    single = [one for one in cases if one[1].n == 1]
    turns = iter([False] * 20 + [True])
    workers = [Fragile(tinypy.lm, small(), lambda: next(turns, False)), Fragile(tinypy.lm, small())]
    with Front(workers, ByPrefix) as front:
        streams = [front.submit(prompt, asked) for prompt, asked, _ in single]
        assert [[tokens(one)] for one in streams] == expected(single)
    assert workers[0].num_deaths == 1


def test_counts_are_kept_while_a_sequence_is_unfinished(tinypy, cases):
    engine = careful_engine(tinypy.lm, small())
    scored = engine.runner.sampler = Scored(engine.runner)
    prompt, asked, _ = cases[0]
    request_id = engine.add_request(prompt, asked)
    for step in range(12):
        engine.step()
        [seen] = scored._seen.values()
        assert sum(seen.counts) == step
    engine.abort(request_id)
    engine.generate([prompt], asked)
    assert len(scored._seen) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_is_told_with_the_first_token(tinypy, ahead):
    engine, prompt = careful_engine(tinypy.lm, small()), list(range(40, 60))
    if ahead:
        run_ahead(engine)
    asked = Asked(4, n=3, temperature=1, seed=2, logprobs=0, scores_prompt=True, ignore_eos=True)
    rows = tinypy.lm.logits(prompt).log_softmax(-1)
    right = [rows[at, token_id].item() for at, token_id in enumerate(prompt[1:])]
    scoring = Scoring(engine.runner, prompt, asked)
    while not scoring.advance():
        pass
    [samples] = answers(engine, [(prompt, scoring.params, None)])
    for first, *others in samples:
        assert first.prompt == prompt and not any(one.prompt for one in others)
        told = [one.logprob for one in first.prompt[1:]]
        assert told == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("prompt", thorough_after(1, [list(range(40, 60)), [5]]))
def test_repetition_is_penalised_as_transformers_does(tinypy, prompt):
    engine = careful_engine(tinypy.lm, small())
    asked = Asked(24, repetition_penalty=1.3, ignore_eos=True)
    [[found]] = answers(engine, [(prompt, asked, None)])
    theirs = tinypy.hf.generate(
        torch.tensor([prompt]), do_sample=False, repetition_penalty=1.3, max_new_tokens=24,
        min_new_tokens=24,
    )  # fmt: skip
    assert found == theirs[0, len(prompt) :].tolist()
