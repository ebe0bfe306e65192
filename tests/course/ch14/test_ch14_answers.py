"""Chapter 14: its references, its film and its picture."""

import random

import pytest

import minikv
from minikv.course.chapters.ch14_speculative_decoding.answers import (
    drafts_that_pay,
    expected_tokens,
    propose_ngram,
    two_reports,
)
from minikv.course.chapters.ch14_speculative_decoding.given import FILMED, film, seconds_by_tokens
from minikv.course.chapters.ch14_speculative_decoding.pictures import bars_picture, gain_picture
from minikv.course.chapters.ch14_speculative_decoding.trees import keep_path, tree_logits
from minikv.course.exercise_data.manifest import find
from minikv.course.exercise_data.mistakes import reference_sources
from minikv.course.exercise_data.skeletons import fill, skeleton
from minikv.course.judge.examine import examine
from minikv.kv_cache import PreallocatedCache
from minikv.speculative import how_many
from minikv.speculative.decide import GAIN
from minikv.speculative.text import Text


def test_the_docstrings_examples():
    assert propose_ngram([7, 8, 1, 7, 8], 2, 5) == [1, 7, 8, 1, 7]
    assert propose_ngram([7, 8, 1, 2], 2, 5) == []
    assert expected_tokens(2, 0.5) == 1.75
    assert drafts_that_pay([1.0, 1.2, 1.6], 0.5) == 1


def test_the_ngram_is_found_where_the_engine_finds_it():
    rng = random.Random(1)
    for _ in range(200):
        token_ids = [rng.randrange(3) for _ in range(rng.randrange(12))]
        text = Text(width=3)
        text.extend(token_ids)
        match = text.find(token_ids)
        found = propose_ngram(token_ids, 3, 1)
        assert found == ([] if match is None else [token_ids[match.place]])


def test_one_sequence_gets_the_engines_number_of_drafts():
    for acceptance in (0.3, 0.6, 0.8, 0.95):
        for more in (0.05, 0.2, 0.7):
            cost = [1 + more * place for place in range(9)]
            [chosen], _ = how_many([[acceptance] * 8], 1.0, more, 8)
            best = drafts_that_pay(cost, acceptance)
            rates = [expected_tokens(k, acceptance) / cost[k] for k in (chosen, best)]
            assert rates[0] >= rates[1] / GAIN  # it leaves out drafts of little chance or gain


def test_the_reports_by_counting():
    p, q, rng = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6], random.Random(2)
    matched = top = 0
    written = [0, 0, 0]
    for _ in range(40_000):
        [draft], [own] = rng.choices(range(3), q), rng.choices(range(3), p)
        matched += draft == own
        top += draft == 0
        written[0 if draft == 0 else own] += 1
    answers = two_reports()
    assert matched / 40_000 == pytest.approx(answers["matched"], abs=0.01)
    assert top / 40_000 == pytest.approx(answers["top"], abs=0.01)
    far = sum(abs(count / 40_000 - a) for count, a in zip(written, p, strict=True)) / 2
    assert far == pytest.approx(answers["top distance"], abs=0.01)


def test_the_film_takes_back_what_is_wrong(lm):
    history = film(lm, lm.encode(FILMED), lambda tokens: propose_ngram(tokens, 2, 5))
    words = [step.words for step in history.steps]
    assert any(told.startswith("5 of 5 kept") for told in words)
    assert any(told.startswith("0 of 5 kept") for told in words)
    for before, step in zip(history.steps, history.steps[1:], strict=False):
        assert not step.warnings
        if " kept" in step.words:
            assert step.tables["A"].num_tokens <= before.tables["A"].num_tokens
            assert not any(text.startswith("?") for text in step.tables["A"].texts)
    assert any(
        step.num_free > before.num_free
        for before, step in zip(history.steps, history.steps[1:], strict=False)
    )
    final = history.steps[-1].tables["A"].num_tokens
    assert final >= len(lm.encode(FILMED)) + 8


def test_bars_show_what_is_kept_and_what_is_missing():
    alt = bars_picture("abcd", [1, 2, 3, 2], [4, 2, 1, 1]).alt
    assert "Kept: 5/8 of the drafts" in alt
    assert "a: p 1/8, q 4/8, kept 1/8, missing 0/8" in alt
    assert "c: p 3/8, q 1/8, kept 1/8, missing 2/8" in alt


def test_costs_are_measured_and_drawn(lm):
    seconds = seconds_by_tokens(lm, [1, 4], "torch", steps=2)
    assert len(seconds) == 2 and min(seconds) > 0
    picture = gain_picture([1, 2], {"torch": [1.0, 1.1]}, [0.5])
    assert "torch, acceptance 50%: 1.00, 1.36" in picture.alt


def test_a_tree_is_verified_in_one_pass_and_its_right_path_is_kept():
    """Text by trees with right and wrong branches is the oracle's only if right rows are kept."""
    lm = minikv.load("tinypy")
    prompt = lm.encode(FILMED)
    expected = lm.generate_naively(prompt, 24)

    def write(keep):
        cache, rng = PreallocatedCache(lm.config, 120), random.Random(3)
        lm.logits(prompt, cache)
        text = expected[:1]
        while len(text) < 20:
            end = len(text)
            tokens, parents = [text[-1], 7, expected[end], 9], [-1, 0, 0, 2]
            tokens += [expected[end + 1], rng.randrange(2048)]
            parents += [2, 4]
            own = tree_logits(lm, cache, tokens, parents).argmax(-1).tolist()
            path = [0]  # always the draft that equals what the target draws after the row before
            for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                path += [row] if parent == path[-1] and token == own[parent] else []
            assert len(path) >= 3 or keep is not keep_path
            text += [own[row] for row in path]
            keep(cache, path)
        return text

    text = write(keep_path)
    assert text == expected[: len(text)]
    text = write(lambda cache, path: keep_path(cache, range(len(path))))
    assert text != expected[: len(text)]


def test_a_number_where_a_word_belongs_is_a_wrong_answer():
    exercise = find("14.6")
    sources = reference_sources(exercise)
    [(path, text)] = sources.items()
    wrong = fill(skeleton(exercise.chapter), {path: text.replace('"2",', "2,")})
    [line] = [line for line in examine(exercise, wrong).lines if not line.ok]
    assert line.name == "right report" and "expected another answer" in line.what
