"""Chapter 06: what its exercises ask for beyond the engine: another victim, and arithmetic."""

import pytest
from helpers import assert_empty, careful_engine, drain, greedy_tokens, small

from minikv import Engine, SamplingParams, Scheduler
from minikv.course.chapters.ch06_continuous_batching.answers import FreesTheMost, before_the_race
from minikv.course.chapters.ch06_continuous_batching.serving import StaticBatches


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [12, 13, 15])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_largest_may_go_and_no_token_changes(llama, samples, num_blocks, preemption):
    config = small(num_blocks=num_blocks, preemption=preemption, max_batch_tokens=16)
    engine = careful_engine(llama.lm, config, scheduler=FreesTheMost)
    prompts = llama.prompts(17, 6, 9, 3, seed=6)
    params = SamplingParams(max_tokens=14, n=samples)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = drain(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = [greedy_tokens(llama.lm, prompt, 14)] * samples
        assert [sample.token_ids for sample in outputs[request_id].samples] == expected
    assert engine.stats().preemptions > 0
    assert (engine.stats().swaps_out > 0) == (preemption == "swap")
    assert_empty(engine)


def test_it_is_the_largest_that_goes(llama):
    """Where the scheduler itself would have sent the last to come."""
    gone = {}
    for scheduler in (Scheduler, FreesTheMost):
        engine = Engine(llama.lm, small(prefix_cache=False), scheduler=scheduler)
        for prompt in llama.prompts(8, 14, 6, seed=1):
            engine.add_request(prompt, SamplingParams(max_tokens=12))
        engine.step()
        while engine.pool.num_free:  # taken by another owner
            engine.pool.allocate()
        engine.step()  # the first needs a block
        gone[scheduler] = [sequence.order[0] for sequence in engine.scheduler.waiting]
    assert gone == {Scheduler: [2], FreesTheMost: [1]}


@pytest.mark.parametrize(
    ("scheduler", "key"), [(StaticBatches, "static"), (Scheduler, "continuous")]
)
def test_the_race_on_paper_is_the_engine_s(llama, scheduler, key):
    answers, seats = before_the_race(), 4
    for wanted in ([8, 2, 3, 3, 6, 1, 5, 7], [5] * 8):
        engine = Engine(llama.lm, small(max_num_seqs=seats), scheduler=scheduler)
        for tokens in wanted:
            engine.add_request([1, 2], SamplingParams(max_tokens=tokens))
        drain(engine)
        steps = engine.stats().steps
        if len(set(wanted)) == 1:
            assert steps == answers["equal steps"]
        else:
            assert steps == answers[f"{key} steps"]
            assert steps * seats - sum(wanted) == answers[f"{key} empty"]
