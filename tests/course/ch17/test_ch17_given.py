"""What the first half of chapter 17 shows: a sum without a state, what is forgotten, a symptom."""

import pytest
import torch

import minikv
from minikv.course.chapters.ch17_running_states import given, rung
from minikv.course.chapters.ch17_running_states.pictures import misread_picture
from minikv.course.exercise_data.skeletons import broken
from minikv.states import StatePool, delta


@pytest.fixture(scope="module")
def lm():
    return minikv.load("tinypy-states")


def test_a_sum_over_all_tokens_is_the_state():
    tokens = given.random_tokens(30, heads=2, n=5, d=3, seed=7)
    found = delta.prefill(torch.zeros(2, 5, 3), *tokens)
    assert torch.allclose(found, given.by_list(*tokens), atol=1e-5)


def test_the_newest_token_is_read_as_it_was_written():
    errors = given.misread_by_age(80, 16, corrects=True)
    assert errors[0] < 1e-5 and errors[0] < errors[5] < errors[30]
    assert given.misread_by_age(80, 16, corrects=False)[0] > 1
    alt = misread_picture({"the delta rule": errors}).alt
    assert f"the delta rule: 0.00, {errors[16]:.2f}, " in alt and alt.startswith("A state that")


def test_only_the_bug_gives_a_request_another_ones_text(lm):
    """It shows once blocks are evicted, with the copies that they carry."""
    texts = ["import os\n", "class Stack:\n", "def read(path):\n"]
    oracle = [lm.generate_naively(lm.encode(text), 12) for text in texts]
    found = given.served_alone(lm, broken("17.3").StatePool, texts)
    assert found != oracle and given.served_alone(lm, StatePool, texts) == oracle
    assert found[0] == oracle[0], "a first request finds memory that nobody has used"


def test_the_rung_counts_states_and_is_only_for_models_with_some(lm, tinypy):
    assert rung.why_not(lm) == "" and rung.why_not(tinypy.lm)
    prompt_ids = lm.encode("def area(width, height):\n")
    [run_states] = rung.RUNS.values()
    run = run_states(lm, prompt_ids, 4)
    assert run.token_ids == lm.generate_naively(prompt_ids, 4)
    share = lm.config.state_bytes(lm.dtype) / (len(prompt_ids) + 4)
    assert run.kv_bytes_per_token == round(lm.config.kv_bytes_per_token(lm.dtype) + share)
