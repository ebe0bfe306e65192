"""Chapter 06: the race on paper is the engine's."""

import pytest
from helpers import drain, small

from minikv import Engine, SamplingParams, Scheduler
from minikv.course.chapters.ch06_continuous_batching.answers import before_the_race
from minikv.course.chapters.ch06_continuous_batching.serving import StaticBatches


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
