"""The engine's own tests once more, with drafts in every engine that they make: those of `engine/`
and `tiers/` whose text names an engine and an oracle of its tokens.

Each runs with each drafter, which verifies all that it drafts. What cannot is in `LEFT_OUT`.
"""

import inspect
import re
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Clairvoyant, fearless
from programs import random_head

from minikv import Engine
from minikv.speculative import HEADS, Drafter, NgramDrafter, Proposal, SuffixDrafter

ORACLES = re.compile(
    r"(greedy|naively|generate_naively|as_reference|reference_beams|assert_oracle|results)\("
)
LEFT_OUT = {
    "beams are not drafted for": """
        test_beams test_beams_of_the_bundled_model test_one_beam_is_greedy
        test_beams_fork_and_leave_open_blocks
        test_beams_are_as_many_as_before_though_most_likely_tokens_end_them
    """,
    "looks at all logits that are sampled from, and drafts add some": """
        test_logits_equal_the_plain_formula
    """,
    "counts steps, or calls in a step": """
        test_an_interrupted_generate_aborts_what_it_began
        test_a_running_request_is_saved_without_stopping_it
        test_on_a_busy_machine_one_thread_computes test_two_streams_and_a_batch_together
    """,
    "no step has room for drafts: few tokens": """
        test_what_is_no_list_of_token_ids_is_told_and_nothing_is_lost
        test_flat_arrays_and_tensors_are_lists_of_token_ids
    """,
    "counts lines of the plain loops; test_interrupted_programs has drafts": """
        test_an_interrupt_at_any_line_loses_nothing test_an_interrupt_while_recovering_is_made_good
    """,
    "counts computed tokens, and wrong drafts are some": """
        test_an_evicted_prefix_comes_back_as_it_was test_another_process_finds_what_was_flushed
    """,
    "no text comes again": """
        test_a_bad_weight_update_changes_nothing[ngram]
        test_a_bad_weight_update_changes_nothing[suffix]
        test_new_weights_never_meet_old_blocks[ngram]
        test_new_weights_never_meet_old_blocks[suffix]
    """,
    "a draft model must be in float32": "test_a_model_in_bfloat16[model]",
    "ends before the draft model has read the prompt": "test_the_longest_request_of_all[model]",
    "has its own drafter": "test_chunks_of_a_phase_may_be_computed_in_any_order",
}


def left_out() -> list[str]:
    """Tests, or one with one drafter: test[drafter]."""
    return " ".join(LEFT_OUT.values()).split()


def names_an_oracle(text: str) -> bool:
    return "ngine" in text and ORACLES.search(text) is not None


class Wrong(Drafter):
    """Drafts as much as it may, hardly ever a right token."""

    def propose(self, sequence, most):
        return Proposal([1] * most)


class Ngram(NgramDrafter):
    width = 1  # in short texts longer ones do not come again


class Suffix(SuffixDrafter):
    width = 1


def head_of(lm):
    if lm.name in HEADS:
        return "head"
    with tempfile.TemporaryDirectory() as folder:
        return random_head(lm, Path(folder))


DRAFTERS = {
    "ngram": lambda lm: Ngram(),
    "suffix": lambda lm: Suffix(),
    "model": lambda lm: "model",  # the target itself
    "head": head_of,
    "mixed": lambda lm: Clairvoyant(),
    "wrong": lambda lm: Wrong(),
}


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    file, function = metafunc.definition.path, metafunc.function
    if file.parent.name not in ("engine", "tiers") or file.stem in (
        "test_speculative",
        "test_states",
    ):
        return
    text = inspect.getsource(inspect.unwrap(function))
    if names_an_oracle(text) and function.__name__ not in left_out():
        is_quick = file.stem == "test_parts"
        each = [pytest.param(None, id=pytest.HIDDEN_PARAM)]
        for one in DRAFTERS:
            if f"{function.__name__}[{one}]" in left_out():
                continue
            marks = () if is_quick and one == "mixed" else pytest.mark.thorough
            each.append(pytest.param(one, id=f"with {one}", marks=marks))
        metafunc.parametrize("drafts", each, indirect=True)


@pytest.fixture(scope="session")
def verified():
    """How many drafts each test has verified, with whatever parameters. What a text repeats is not
    in every test: of these two drafters, how many its file has. Looked at behind the last test."""
    counts = Counter()
    yield counts
    nothing = [one for one, count in counts.items() if count == 0]
    assert not nothing, (
        f"verified no drafts, so they test nothing with a drafter: {nothing}. Let them generate "
        "more tokens, or texts that repeat; or name them in LEFT_OUT, with the reason"
    )


@pytest.fixture(autouse=True)
def drafts(request):
    """Has a drafter in every engine that a test makes; in most tests, none."""
    name = getattr(request, "param", None)
    if name is None:
        yield
        return
    counts, loops, plain = request.getfixturevalue("verified"), [], Engine.assemble

    def assemble(lm, config, *more):
        drafter, draft_model = DRAFTERS[name](lm), None
        if name == "model":  # the target itself, unless it has layers that keep a state
            draft_model = request.getfixturevalue("llama").lm if lm.config.keeps_states else lm
        config = replace(config, speculative=drafter, draft_model=draft_model)
        parts = fearless(plain(lm, config, *more))
        parts.loop.drafter.LEAST = 1e-9  # drafts that are not sure, too
        loops.append(parts.loop)
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "assemble", staticmethod(assemble))
        yield
    what = request.path.stem if name in ("ngram", "suffix") else request.function.__name__
    counts[what, name] += sum(loop.counts.drafts for loop in loops)
