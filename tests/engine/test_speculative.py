"""Speculative decoding: the same tokens, whatever is drafted. Bugs of real engines are seen."""

import ast
import copy
import inspect
import itertools
import os
import random
import textwrap
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from drafted import DRAFTERS, Wrong, left_out, names_an_oracle
from helpers import (
    Clairvoyant,
    assert_empty,
    careful_engine,
    drafting_engine,
    drain,
    fearless,
    generate,
    naively,
    small,
    step,
)
from thorough import thorough_after
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import minikv
from minikv import BlockTable, Engine, SamplingParams, Sequence
from minikv.course.chapters.ch14_speculative_decoding.trees import continuations
from minikv.quant.store import QuantisedStore
from minikv.sequence import Request
from minikv.speculative import (
    DRAFT_MODELS,
    HEADS,
    Account,
    Chances,
    Costs,
    Drafter,
    HeadDrafter,
    ModelDrafter,
    Proposal,
    SpeculativeLoop,
    SuffixDrafter,
    acceptance,
    decide,
    how_many,
    keep_equal,
    loop,
    rejection_sample,
    verify,
)
from minikv.speculative.text import END, Text

TESTS = Path(__file__).parents[1]


@pytest.fixture(params=(NAMES := [name for name in DRAFTERS if name != "head"]))
def drafter(request):
    return DRAFTERS[request.param](None)


# ── Which drafts are kept ─────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("drafts", "own", "written"),
    [
        ([], [7], [7]),
        ([5], [7, 8], [7]),
        ([7], [7, 8], [7, 8]),
        ([7, 9, 3], [7, 8, 3, 1], [7, 8]),
        ([7, 8, 3], [7, 8, 3, 1], [7, 8, 3, 1]),
    ],
)
def test_a_draft_is_kept_while_it_equals_the_targets_own_token(drafts, own, written):
    assert keep_equal(drafts, own) == written


P = torch.tensor([[1, 2, 3, 2], [2, 2, 2, 2]]) / 8
Q = torch.tensor([[4, 2, 1, 1]]) / 8


def test_rejection_sampling_is_exact():
    """Every draft and every pair of numbers from a grid that all borders are on."""
    grid = [(2 * i + 1) / 48 for i in range(24)]
    found = {}
    for draft in range(4):
        for numbers in itertools.product(grid, grid):
            written = rejection_sample(P, Q, [draft], iter(numbers).__next__)
            weight = Fraction(round(8 * float(Q[0, draft])), 8) / len(grid) ** 2
            found[tuple(written)] = found.get(tuple(written), 0) + weight
    first = [sum(w for ids, w in found.items() if ids[0] == token) for token in range(4)]
    assert first == [Fraction(n, 8) for n in (1, 2, 3, 2)]
    for kept, share in enumerate((Fraction(1, 8), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8))):
        pairs = [found[kept, token] for token in range(4)]
        assert pairs == [share / 4] * 4  # min(p, q), then the second distribution
    kept = sum(w for ids, w in found.items() if len(ids) == 2)
    assert kept == Fraction(5, 8)  # sum min(p, q); keep_equal keeps sum p q = 4 / 16 of them


@pytest.mark.parametrize("p", [[0.0, 0.0], [0.5, float("nan")]])
def test_a_draw_from_no_distribution_is_refused(p):
    with pytest.raises(ValueError, match=r"p: must have a sum above 0, was (0\.0|nan)"):
        acceptance.draw(torch.tensor(p), 0.5)


def distance(p, q, uniform, numbers, count):
    """Total variation between p and what is written first for drafts of q."""
    seen = torch.zeros(len(p))
    for draft in torch.multinomial(q, count, replacement=True, generator=numbers).tolist():
        seen[rejection_sample(torch.stack([p, p]), q[None], [draft], uniform)[0]] += 1
    return float((seen / count - p).abs().sum() / 2)


@pytest.mark.thorough
def test_a_distance_of_a_hundredth_is_seen():
    """Also a bug of several engines: the number that refused a draft is used for its substitute."""
    numbers = torch.Generator().manual_seed(3)
    p = torch.tensor([0.30, 0.25, 0.15, 0.10, 0.08, 0.06, 0.04, 0.02])
    q = torch.tensor([0.33, 0.22, 0.16, 0.09, 0.06, 0.07, 0.05, 0.02])
    rng = random.Random(4)
    assert distance(p, q, rng.random, numbers, 40_000) < 0.006

    far = torch.tensor([0.10, 0.12, 0.16, 0.19, 0.16, 0.12, 0.10, 0.05])
    assert distance(p, far, rng.random, numbers, 20_000) < 0.01

    def broken():
        uniform = rng.random()
        return lambda: uniform

    seen = torch.zeros(8)
    for draft in torch.multinomial(far, 20_000, replacement=True, generator=numbers).tolist():
        seen[rejection_sample(torch.stack([p, p]), far[None], [draft], broken())[0]] += 1
    assert float((seen / 20_000 - p).abs().sum() / 2) > 0.01


# ── How many drafts pay ───────────────────────────────────────────────────────


def test_as_many_drafts_as_pay():
    assert how_many([[0.8, 0.5, 0.5]], 1, 0.25, 10) == ([2], 1.0)  # the docstring's example
    assert how_many([[0.8, 0.5, 0.5], []], 1, 0.25, 10)[0] == [0, 0]
    assert how_many([[0.8, 0.5, 0.5]], 1, 0.25, 1)[0] == [1]
    assert how_many([[0.2, 0.9]], 1, 0.25, 10)[0] == [0]
    assert how_many([[0.9] * 8], 1, 1, 10)[0] == [0]  # nothing is gained
    assert how_many([[0.9] * 8], 0, 0, 10)[0] == [0]  # nothing is known
    rng = random.Random(1)
    for _ in range(200):
        sequences = range(rng.randrange(1, 4))
        chances = [[rng.random() ** 0.3 for _ in range(rng.randrange(4))] for _ in sequences]
        row, budget = rng.choice([0.05, 0.2, 0.5]), rng.randrange(8)

        def tokens(counts, chances=chances):
            kept = [itertools.accumulate([1.0, *some], float.__mul__) for some in chances]
            return [sum(itertools.islice(k, n + 1)) for k, n in zip(kept, counts, strict=True)]

        def time(counts, row=row, tokens=tokens):
            gain = decide.GAIN if any(counts) else 1
            return gain * sum(1 / n for n in tokens(counts)) * (1 + row * sum(counts))

        counts, worth = how_many(chances, 1.0, row, budget)
        every = itertools.product(*(range(len(some) + 1) for some in chances))
        assert time(counts) == pytest.approx(min(time(c) for c in every if sum(c) <= budget))
        if any(counts):  # what all of the new tokens are worth is what the step gains
            given = tokens(counts)
            gained = len(given) / sum(1 / n for n in given) - 1
            assert worth * (sum(given) - len(given)) == pytest.approx(gained)


def test_costs_are_learned_and_forgotten():
    costs = Costs()
    assert costs.of(1) == 0
    for _ in range(20):
        costs.note(2, 1.0)
    assert costs.of(2) == pytest.approx(1) and costs.row == pytest.approx(Costs.ROW / 2)
    for num_tokens in (3, 6, 10):
        costs.note(num_tokens, 0.8 + 0.1 * num_tokens)
    assert costs.row == pytest.approx(0.1, rel=0.05)
    assert [costs.of(n) for n in (1, 20)] == pytest.approx([0.9, 2.8], rel=0.05)
    costs.note(2, 99.0)  # interrupted
    assert costs.of(2) < 1.1
    for _ in range(1000):
        costs.note(2, 2.0)
    assert costs.of(2) == pytest.approx(2, rel=1e-3)
    assert costs.row == pytest.approx(Costs.ROW, rel=0.05)
    for num_tokens in (2, 9):
        costs.note(num_tokens, 0.5 * num_tokens**2)
    assert costs.of(1) >= 0  # a step over fewer tokens costs something


def test_chances_are_learned():
    chances, shorter = Chances(), Chances()
    for _ in range(200):
        chances.compare([3, 4, 5], [5, 6, 7], [5, 9])
        shorter.compare([3, 4], [5, 6], [5, 9])
    right, wrong, unknown = chances.of_drafts([3, 4, 5], 3)
    assert right > 0.95 and wrong < 0.05
    assert unknown == pytest.approx(0.5, abs=0.01)  # as often as those of all levels
    # Behind a wrong draft nothing is learned.
    assert [*chances.of_drafts(range(99), 99)] == [*shorter.of_drafts(range(99), 99)]


def asked(account, steps, written):
    """How often a drafter is asked, if asking costs half a step and verifying a tenth."""
    count = 0
    for _ in range(steps):
        count += account.is_open
        account.note(written - 1.6 if account.is_open else 0.0)
    return count


def test_looking_for_drafts_takes_little_of_the_time():
    account = Account()
    assert asked(account, 2000, written=1.0) * 0.6 <= Account.FIRST + 2000 * 0.005 + 1
    assert asked(account, 2000, written=1.5) * 0.1 <= 2000 * 0.005 + 1  # right, but too seldom
    assert asked(account, 1000, written=2.0) > 800  # they pay again
    account.note(-1e6)  # the machine stood still while it was asked
    assert asked(account, 200, written=2.0) > 190
    slow, count = Account(), 0
    for _ in range(20_000):
        count += slow.is_open
        slow.note(-100.0 if slow.is_open else 0.0)
    assert count <= 2  # that it was interrupted is believed once


def timed(engine, row, ask, interrupted=0):
    """A clock of the engine's own: a step takes 1, each token of it beyond the first `row` more,
    and asking the drafter `ask`. Every other step with drafts is `interrupted` for so long, which
    only the engine sees."""
    loop, clock, verified = engine.loop, SimpleNamespace(now=0.0, lost=0), itertools.count()
    compute, ask_drafter = engine.runner.compute, loop.ask

    def computed(batch):
        clock.now += 1 + row * (len(batch.token_ids) - 1)
        clock.lost += interrupted * (batch.num_decodes > 1 and next(verified) % 2 == 0)
        return compute(batch)

    def asked(*what):
        clock.now += ask
        return ask_drafter(*what)

    engine.runner.compute, loop.ask = computed, asked
    loop.clock = lambda: clock.now + clock.lost
    return clock


def decode(engine, clock, prompt, most):
    """A prompt's new tokens, and the time without that of the prompt."""
    engine.add_request(prompt, SamplingParams(most, ignore_eos=True))
    step(engine)
    started = clock.now
    [output] = drain(engine).values()
    return output.token_ids, clock.now - started


def test_drafts_are_verified_where_a_row_costs_little():
    """Nobody knows it before. One draft of the head wherever it has any: 308 steps, not 378."""
    lm = minikv.load("tinypy")
    engine = Engine(lm, small(block_size=16, max_batch_tokens=96, speculative="head"))
    clock, time = timed(engine, row=0.04, ask=0.05), 0
    for text in continuations(lm, 6, 64):
        token_ids, seconds = decode(engine, clock, text[:96], 64)
        assert token_ids == text[96:]
        time += seconds
    assert engine.loop.counts.accepted > 65 and time < 378 / 1.13


class FirstRight(Clairvoyant):
    """Right for a hundred tokens, then in nothing."""

    def propose(self, sequence, most):
        self.wrong = float(sequence.num_output > 100)
        return super().propose(sequence, most)


@pytest.mark.parametrize(
    ("drafter", "ask"),
    thorough_after(2, [(Wrong, 0.05), (FirstRight, 5.0), (Wrong, 5.0), (FirstRight, 0.05)]),
)
def test_drafts_cost_little_where_a_row_costs_a_step(llama, drafter, ask):
    engine = Engine(llama.lm, small(num_blocks=256, speculative=drafter()))
    engine.loop.drafter.engine = engine
    clock, most, drafts, prompts = timed(engine, 1.0, ask), 400, [], llama.prompts(5, 7)
    expected = plain(llama.lm, prompts, SamplingParams(most, ignore_eos=True), num_blocks=256)
    for prompt, [(tokens, _)] in zip(prompts, expected, strict=True):
        token_ids, seconds = decode(engine, clock, prompt, most)
        assert token_ids == tokens
        assert seconds < 1.03 * (most - 1)
        drafts.append(engine.loop.counts.drafts)
    assert drafts[1] < drafts[0] + 6  # what the first request has taught is still known


def test_drafts_do_not_pay_for_an_interruption(llama):
    [prompt] = llama.prompts(5)
    engine = Engine(llama.lm, small(num_blocks=256, speculative=Clairvoyant(wrong=0)))
    engine.loop.drafter.engine = engine
    token_ids, seconds = decode(engine, timed(engine, 0.1, 0.05, interrupted=50), prompt, 60)
    assert token_ids == llama.greedy(prompt, 60)
    assert seconds < 40


@pytest.mark.thorough
def test_a_drafter_that_is_never_right_is_asked_seldom(tinypy):
    class Counted(Wrong):
        count = 0

        def propose(self, sequence, most):
            self.count += 1
            return super().propose(sequence, most)

    drafter = Counted()
    engine = Engine(tinypy.lm, small(block_size=16, speculative=drafter))
    # A step that costs next to nothing, so that asking costs more than a step gives.
    engine.loop.costs = SimpleNamespace(of=lambda n: n * 1e-12, row=1e-13, note=lambda *_: 0.0)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    engine.generate([tinypy.lm.encode("def f(x):")], params)
    assert drafter.count < 5


# ── Drafters ──────────────────────────────────────────────────────────────────


def naive_match(text, other, width):
    """(length, place) of the last occurrence of the last `width` tokens of `other`."""
    for place in range(len(text) - 1, width - 1, -1):
        if END not in other[-width:] and text[place - width : place] == other[-width:]:
            length = width
            while (
                length < min(place, len(other), 24)
                and text[place - 1 - length] == other[-1 - length] != END
            ):
                length += 1
            return length, place
    return None


@pytest.mark.parametrize("width", [2, 3])
def test_matches_are_the_last_ones(width):
    rng = random.Random(width)
    text = Text(width)
    for _ in range(60):
        text.extend([*(rng.randrange(3) for _ in range(rng.randrange(9))), END])
        other = [rng.randrange(3) for _ in range(rng.randrange(width, 30))]
        found = text.find(other)
        assert (found and (found.length, found.place)) == naive_match(text.token_ids, other, width)
    own = Text(width)
    for _ in range(200):
        own.extend([rng.randrange(3) for _ in range(rng.choice([0, 1, 1, 2, 9]))])
        found = own.find(own.token_ids)
        expected = naive_match(own.token_ids, own.token_ids, width)
        assert (found and (found.length, found.place)) == expected


def sequence_of(token_ids, salt=None):
    return Request(0, list(token_ids), SamplingParams(cache_salt=salt)).sequences[0]


def test_text_that_repeats_itself_goes_on():
    sequence = sequence_of([9, 8, 1, 2, 3, 1, 2, 3, 1, 2])
    proposal = minikv.speculative.NgramDrafter().propose(sequence, 7)
    assert proposal.token_ids == [3, 1, 2, 3, 1, 2, 3]


def test_answers_are_found_with_the_same_salt_only():
    drafter = SuffixDrafter()
    for salt in (None, "a"):
        one = sequence_of([1, 2, 3], salt)
        one.token_ids += [4, 5, 6]
        drafter.left(one)
    for salt, expected in ((None, [4, 5, 6]), ("a", [4, 5, 6]), ("b", None)):
        found = drafter.propose(sequence_of([7, 2, 3], salt), 9)
        assert (found and found.token_ids) == expected


def test_answers_take_bounded_memory():
    drafter = SuffixDrafter(memory=100)
    for start in range(0, 5000, 7):
        one = sequence_of([1, 2, 3])
        one.token_ids += range(start, start + 7)
        drafter.left(one)
        assert sum(len(text.token_ids) for text in drafter.answers) <= 2 * 100 + 10
    assert drafter.propose(sequence_of([4992, 4993]), 2).token_ids == [4994, 4995]
    assert not drafter.followed or len(drafter.followed) <= 2


@pytest.mark.thorough
def test_a_drafter_is_told_what_left(llama):
    drafter = Clairvoyant()
    engine = drafting_engine(llama.lm, small(), drafter)
    ids = [engine.add_request(p, SamplingParams(max_tokens=9)) for p in llama.prompts(3, 5, 4)]
    kept = [engine.request(i).sequences[0] for i in ids]
    for _ in range(2):
        step(engine)
    engine.abort(ids[0])
    drain(engine)
    engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert set(kept) <= set(drafter.gone)
    assert len(engine.loop.known) <= 1


class Reads(Clairvoyant):
    """Looks at the hidden states that it gets: the newest token was drawn from them."""

    reads_hidden, seen = True, 0

    def propose_all(self, sequences, most, hidden):
        logits = self.engine.runner.transformer.logits(hidden)
        params = [one.request.params for one in sequences]
        draws = [one.draw(ahead=-1) for one in sequences]
        drawn = minikv.Sampler()(logits, params, draws).tolist()
        assert drawn == [one.token_ids[-1] for one in sequences]
        self.seen += len(sequences)
        return super().propose_all(sequences, most, hidden)


def test_hidden_states_are_those_of_the_newest_token(llama):
    """Chunks, forks, drafts of which some are wrong, and preemptions."""
    for attention, preemption in (("torch", "swap"), ("cpu", "recompute")):
        drafter = Reads(wrong=0.3)
        config = small(num_blocks=24, max_batch_tokens=24, attention=attention,
                       preemption=preemption)  # fmt: skip
        engine = drafting_engine(llama.lm, config, drafter, Engine)
        params = [SamplingParams(max_tokens=14, n=n, temperature=t, seed=1, ignore_eos=True)
                  for n, t in ((1, 0.0), (3, 0.8), (1, 1.0), (2, 0.0))]  # fmt: skip
        prompts = llama.prompts(20, 9, 3, 12)
        assert found(generate(engine, prompts, params)) == plain(llama.lm, prompts, params)
        assert drafter.seen > 20 and engine.stats().preemptions > 0


@pytest.mark.parametrize("drafter", ["model", "head"])
def test_what_is_bundled_drafts(drafter):
    """What it proposes is right in good part, and changes no token."""
    lm = minikv.load("tinypy")
    prompts = [lm.encode(text) for text in ("def f(a, b):", "import os\nimport", "x = [1, 2", "a")]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = fearless(Engine(lm, small(block_size=16, speculative=drafter)))
    expected = plain(lm, prompts, params, block_size=16)
    assert found(generate(engine, prompts, params)) == expected
    counts = engine.stats().speculation
    assert counts.accepted > counts.drafts / 2 > 20


def test_the_head_drafts_the_same_in_any_batch():
    lm = minikv.load("tinypy")
    drafter, sequence = HeadDrafter(lm), sequence_of([5])
    together = torch.randn(3, lm.config.hidden_size)
    alone = [drafter.propose_all([sequence], [4], row[None])[0] for row in together]
    assert drafter.propose_all([sequence] * 3, [4, 4, 4], together) == alone
    half = together.bfloat16()  # of a model in 16 bits
    drafts = [drafter.propose_all([sequence] * 3, [4, 4, 4], one) for one in (half, half.float())]
    assert drafts[0] == drafts[1]


def test_a_head_for_another_model_is_refused(llama):
    with pytest.raises(ValueError, match="no head was trained for"):
        Engine(llama.lm, small(speculative="head"))
    with pytest.raises(ValueError, match="is for another model"):
        HeadDrafter(llama.lm, HEADS["tinypy"])


@pytest.mark.parametrize("folder", [HEADS["tinypy"], DRAFT_MODELS["tinypy"]])
def test_what_is_bundled_is_small_and_has_a_card(folder):
    names = (
        {"head.safetensors"} if folder == HEADS["tinypy"] else {"config.json", "model.safetensors"}
    )
    files = {file.name: file for file in folder.iterdir()}
    assert set(files) == names | {"README.md"}
    assert sum(file.stat().st_size for file in files.values()) < 1_000_000
    assert "n greedy continuations of held-out text" in files["README.md"].read_text()


@pytest.mark.parametrize("attention", thorough_after(1, ["cpu", "torch"]))
def test_a_draft_model_reads_what_its_blocks_lack(llama, attention):
    """The target drafts for itself. So a draft is wrong only if it follows from a block that has
    not the K and V of its tokens: after forks and copies, hits, preemptions, swaps, drafts that go
    beyond the table, prompts that are read in several steps, and sequences that leave."""
    head, *rest = llama.prompts(22, 9, 3, 14, seed=2)
    prompts = [head, head[:17] + rest[0], rest[1], head, rest[2], head[:9]]
    for changes in (
        dict(preemption="swap"),
        dict(block_size=1, num_blocks=96),
        dict(block_size=16),
    ):
        config = small(**dict(num_blocks=24, max_batch_tokens=24, attention=attention) | changes)
        engine = drafting_engine(llama.lm, config, "model", Engine)
        drafter = engine.loop.drafter
        drafter.READS, drafter.LEAST = 20, 1e-9
        params = [SamplingParams(max_tokens=16, n=n, ignore_eos=True) for n in (1, 3, 1, 2, 1, 1)]
        expected = plain(llama.lm, prompts, params)
        for _ in range(2):
            assert found(generate(engine, prompts, params)) == expected
        counts = engine.stats().speculation
        assert counts.accepted == counts.drafts > 100
        assert engine.stats().preemptions > 0 or config.block_size == 16
        assert engine.stats().hit_tokens > 0


# ── The tokens are those without ──────────────────────────────────────────────


def plain(lm, prompts, params, **changes):
    outputs = Engine(lm, small(**changes)).generate(prompts, params)
    return [[(s.token_ids, s.finish_reason) for s in output.samples] for output in outputs]


def found(outputs):
    return [[(s.token_ids, s.finish_reason) for s in output.samples] for output in outputs]


@pytest.mark.usual(budget=3, drafter="mixed")
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 31])
def test_within_the_budget(llama, budget, drafter):
    prompts = llama.prompts(20, 5, 9, seed=3)
    engine = drafting_engine(llama.lm, small(max_batch_tokens=budget), drafter)
    most, compute = [], engine.runner.compute

    def watched(batch):
        most.append(len(batch.token_ids))
        return compute(batch)

    engine.runner.compute = watched
    outputs = generate(engine, prompts, SamplingParams(max_tokens=12))
    assert [o.token_ids for o in outputs] == [llama.greedy(prompt, 12) for prompt in prompts]
    assert max(most) <= budget


@pytest.mark.parametrize("temperature", thorough_after(1, [0.7, 1.5]))
def test_sampled_tokens_are_the_same_too(llama, temperature, drafter):
    prompts = llama.prompts(7, 3, 12, seed=4)
    params = [
        SamplingParams(max_tokens=14, temperature=temperature, top_k=k, top_p=p, seed=i, n=n)
        for i, (k, p, n) in enumerate([(0, 1.0, 1), (5, 0.9, 3), (0, 0.8, 2)])
    ]
    engine = drafting_engine(llama.lm, small(), drafter)
    assert found(generate(engine, prompts, params)) == plain(llama.lm, prompts, params)
    assert_empty(engine)


@pytest.mark.parametrize("drafter", thorough_after(1, sorted(NAMES)), indirect=True)
def test_ends(tinypy, drafter):
    """Stop tokens, stop strings and limits, met in the middle of accepted drafts."""
    prompt = "def fib(n):\n    if n < 2:\n        return n\n"
    text = tinypy.lm.encode(prompt)
    whole = Engine(tinypy.lm, small(block_size=16)).generate(
        [text], SamplingParams(max_tokens=40, ignore_eos=True)
    )[0]
    words = [whole.text[at : at + size] for at, size in ((2, 3), (9, 1), (20, 6), (31, 4))]
    params = [
        SamplingParams(max_tokens=limit, stop=stop, ignore_eos=True)
        for limit in (1, 2, 5, 6, 17)
        for stop in [(), *((word,) for word in words), tuple(whole.token_ids[4:6])]
    ]
    engine = drafting_engine(tinypy.lm, small(block_size=16, max_batch_tokens=512), drafter)
    outputs = generate(engine, [text] * len(params), params)
    expected = Engine(tinypy.lm, small(block_size=16)).generate([text] * len(params), params)
    assert found(outputs) == found(expected)
    assert [o.text for o in outputs] == [o.text for o in expected]
    assert engine.stats().generated_tokens == sum(len(o.token_ids) for o in outputs)


@pytest.mark.parametrize(
    "drafter", thorough_after(2, ["wrong", "model", "mixed", "ngram", "suffix"]), indirect=True
)
def test_to_the_end_of_the_context(llama, drafter):
    (prompt,) = llama.prompts(490)
    config = small(num_blocks=130, max_batch_tokens=512)
    engine = drafting_engine(llama.lm, config, drafter)
    params = SamplingParams(max_tokens=512 - 490, ignore_eos=True)
    assert generate(engine, [prompt], params)[0].token_ids == llama.greedy(prompt, 22)


@pytest.mark.parametrize(
    ("attention", "kv_dtype"),
    [
        ("cpu", "auto"),
        *thorough_after(0, itertools.product(["torch"], ["auto", "int8", "int4"])),
        *thorough_after(0, itertools.product(["cpu"], ["int8", "int4"])),
        *thorough_after(0, itertools.product(["triton"], ["auto", "int8", "int4"])),  # slow
    ],
)
def test_every_backend(tinypy, attention, kv_dtype, request):
    """Drafting and plain sequences and chunks of prompts in one batch."""
    if attention == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("needs Triton's interpreter")
        request.getfixturevalue("quick_interpreter")
    config = small(block_size=16, attention=attention, kv_dtype=kv_dtype, max_batch_tokens=24)
    drafter = Clairvoyant(wrong=0.3)
    lm = tinypy.lm
    prompts = [lm.encode(text) for text in ("def f(a, b):", "import os\nimport", "x = [1, 2, 3")]
    prompts[1], most = (3 * prompts[1], 9) if attention == "triton" else (6 * prompts[1], 20)
    params = [SamplingParams(max_tokens=m, ignore_eos=True, temperature=t, seed=1)
              for m, t in ((most, 0.0), (9, 0.0), (most, 0.8))]  # fmt: skip
    plain_engine = Engine(lm, config)
    engine = drafting_engine(lm, config, drafter, make=Engine)
    results = []
    for one in (plain_engine, engine):
        outputs, ids = {}, []
        for prompt, rule in zip(prompts, params, strict=True):
            ids.append(one.add_request(prompt, rule))
            step(one, outputs)
            step(one, outputs)
        drain(one, outputs)
        results.append([outputs[i].token_ids for i in ids])
    assert results[0] == results[1]
    assert engine.stats().speculation.accepted > 5
    assert engine.stats().speculation.drafts > engine.stats().speculation.accepted


@pytest.mark.parametrize("cached", [False, True])
def test_blocks_are_those_without(llama, cached):
    """After every step pool and prefix cache hold what they hold without drafts."""
    engine = drafting_engine(llama.lm, small(block_size=2, prefix_cache=cached), Clairvoyant())
    for prompt in llama.prompts(3, 8, 5):
        engine.add_request(prompt, SamplingParams(max_tokens=25))
    while engine.has_unfinished:
        step(engine)
        tables = [s.table for s in engine.scheduler.running]
        needed = sum(-(-s.num_computed // 2) for s in engine.scheduler.running)
        assert sum(len(t.block_ids) for t in tables) == needed
        assert all(
            s.num_inserted == cached * (s.num_computed // 2) for s in engine.scheduler.running
        )
        if not cached:
            assert engine.pool.num_free == 128 - needed


def test_stats_count_what_was_written(llama):
    drafter = Clairvoyant(wrong=0, most=3)
    engine = drafting_engine(llama.lm, small(), drafter)
    engine.generate(llama.prompts(5, 6), SamplingParams(max_tokens=20, ignore_eos=True))
    counts = engine.stats().speculation
    assert counts.drafts == counts.accepted == sum(counts.drafts_at) > 10
    assert counts.accepted_at == counts.drafts_at and counts.drafts_at[3] == 0
    assert counts.mean_accepted_length == 1 + counts.accepted / counts.verified
    assert engine.stats().generated_tokens == 40
    assert Engine(llama.lm, small()).stats().speculation is None


def test_room_for_drafts_covers_shared_blocks(llama):
    """Blocks behind the next token that others hold as well are copied before drafts go there."""
    engine = drafting_engine(llama.lm, small(), Clairvoyant())
    pool = engine.pool
    sequence = sequence_of(range(1, 7))
    sequence.num_computed = 5
    sequence.table = BlockTable(pool, 4)
    sequence.table.grow(12)
    twin = sequence.table.fork()
    plan = minikv.Plan()
    assert loop.reserve(engine, plan, sequence, 4) == 4
    assert plan.copies == [(twin.block_ids[2], sequence.table.block_ids[2])]
    assert sequence.table.block_ids[:2] == twin.block_ids[:2]  # the plan's own slot is its matter


def test_a_full_pool_takes_no_drafts(llama):
    """Drafts never preempt: what has no room is left out."""
    prompts = llama.prompts(6, 6)
    for count, num_blocks in ((1, 3), (2, 5)):
        config = small(num_blocks=num_blocks, block_size=4, prefix_cache=False)
        engine = drafting_engine(llama.lm, config, Wrong())
        ids = [engine.add_request(p, SamplingParams(max_tokens=6)) for p in prompts[:count]]
        step(engine)
        step(engine)
        assert engine.stats().preemptions == 0 and engine.stats().running == count
        outputs = drain(engine)
        assert [outputs[i].token_ids for i in ids] == [llama.greedy(p, 6) for p in prompts[:count]]


def test_a_draft_model_has_the_same_token_under_each_id(llama):
    """The same number of tokens is not enough. One that only one of the two names is no harm."""

    def speaks(*tokens):
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=tokens[0]))
        return minikv.LanguageModel("it", llama.lm.transformer, tokenizer)

    target = speaks("a", "b", "c")
    for draft in (speaks("a", "b", "c"), speaks("a", "b"), speaks("a", "b", "c", "d"), llama.lm):
        assert Engine(target, small(speculative="model", draft_model=draft)) is not None
    with pytest.raises(ValueError, match=r"draft_model: .*; 1 is 'b' in it and 'c' in it$"):
        Engine(target, small(speculative="model", draft_model=speaks("a", "c", "b")))


def test_a_gpu_and_unknown_drafters_are_refused(llama):
    with pytest.raises(ValueError, match="speculative: must be one of 'off', 'ngram', 'suffix'"):
        small(speculative="medusa")
    with pytest.raises(ValueError, match="speculative: must be one of 'model', was 'suffix'"):
        small(speculative="suffix", draft_model=llama.lm)
    with pytest.raises(ValueError, match="draft_model, or use 'suffix'"):
        Engine(llama.lm, small(speculative="model"))
    with pytest.raises(ValueError, match="must have the target's tokens, 300 of them; tinypy has"):
        Engine(llama.lm, small(speculative="model", draft_model="tinypy"))
    runner = copy.copy(Engine(llama.lm, small()).runner)
    runner.transformer = copy.copy(runner.transformer)
    runner.transformer.device = torch.device("cuda")
    with pytest.raises(ValueError, match="speculative: drafts are verified on a CPU only"):
        minikv.speculative.speculate(llama.lm, runner, small(speculative="ngram"), None)


class Guesses(Drafter):
    """Nonsense: levels and lengths of any kind."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def propose(self, sequence, most):
        count = self.rng.randrange(most + 1)
        first = self.rng.randrange(60)
        return Proposal([self.rng.randrange(300) for _ in range(count)], range(first, first + most))


def test_levels_and_lengths_of_any_kind_are_taken(llama):
    engine = drafting_engine(llama.lm, small(), Guesses(2))
    prompts = llama.prompts(7, 3, 12, seed=4)
    outputs = generate(engine, prompts, SamplingParams(max_tokens=24))
    assert [o.token_ids for o in outputs] == [llama.greedy(prompt, 24) for prompt in prompts]
    assert engine.stats().speculation.drafts > 10
    assert_empty(engine)


def test_what_does_not_run_with_drafters_is_named():
    found = {
        node.name
        for file in [*TESTS.glob("engine/test_*.py"), *TESTS.glob("tiers/test_*.py")]
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and names_an_oracle(ast.unparse(node))
    }
    named = {name.partition("[")[0] for name in left_out()}
    assert named < found and len(found) - len(named) > 30


# ── Bugs that real engines shipped ────────────────────────────────────────────


def serve(lm, kv_dtype):
    """Requests of all kinds, some while others run; fails if anything is not as without drafts."""
    rng = random.Random(1)
    config = small(num_blocks=40, block_size=4, kv_dtype=kv_dtype, max_batch_tokens=32)
    make = Engine if kv_dtype != "auto" else careful_engine
    engine = drafting_engine(lm, config, Clairvoyant(1, 0.3), make)
    base = [rng.randrange(1, 300) for _ in range(9)]
    prompts, params, ids, outputs = [], [], [], {}
    for i in range(10):
        prompts.append(base[: rng.randrange(1, 10)] + [rng.randrange(1, 300) for _ in range(i % 4)])
        stop = tuple(rng.sample(range(300), 12)) if i % 3 == 0 else ()
        params.append(SamplingParams(max_tokens=rng.randrange(6, 24), n=1 + (i % 4 == 3), stop=stop,
                                     temperature=0.9 * (i % 2), seed=i))  # fmt: skip
        ids.append(engine.add_request(prompts[-1], params[-1]))
        for _ in range(3):
            step(engine, outputs)
    drain(engine, outputs)
    generated = engine.stats().generated_tokens
    for _ in range(2):  # what is in the prefix cache now is right, too
        more = [engine.add_request(o.prompt_ids + o.token_ids, SamplingParams(max_tokens=4))
                for o in list(outputs.values())[:4]]  # fmt: skip
        drain(engine, outputs)
        for request_id in more:
            output = outputs[request_id]
            alone = Engine(lm, replace(config, num_blocks=200))
            again = alone.generate([output.prompt_ids], SamplingParams(max_tokens=4))[0]
            assert again.token_ids == output.token_ids
    expected = plain(lm, prompts, params, kv_dtype=kv_dtype, prefix_cache=False)
    assert found(outputs[i] for i in ids) == expected
    assert generated == sum(len(t) for o in expected for t, _ in o)
    counts = engine.stats().speculation
    assert 0 < counts.accepted < counts.drafts
    assert_empty(engine)


@pytest.mark.parametrize("kv_dtype", ["auto", "int4"])
def test_serving_is_right(llama, kv_dtype):
    serve(llama.lm, kv_dtype)


def plant(patch, function, edits):
    """A function of ours with its text changed: old, new, old, new, …"""
    function = inspect.unwrap(function)
    names, text = dict(function.__globals__), textwrap.dedent(inspect.getsource(function))
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    exec(text, names)
    patch.setattr(function, "__code__", inspect.unwrap(names[function.__name__]).__code__)


# The function, the edits, and what sees it, if that is not `serve`.
BUGS = {
    "the first draft is never checked: lattice#243": (keep_equal, [
        "kept = 0", "kept = min(1, len(drafts))",
        "list(token_ids[: kept + 1])", "[*drafts[:kept], token_ids[kept]]",
    ]),
    "takes the wrong draft, and the row after it: openvino.genai#4190": (keep_equal, [
        "return list(token_ids[: kept + 1])",
        """right = kept == len(drafts)
    return token_ids[:] if right else [*drafts[: kept + 1], token_ids[kept + 1]]""",
    ]),
    "publishes what is not verified: vllm#41838": (SpeculativeLoop.append_rest, [
        "place = 1\n", """place = 1
    for one in decodes:
        if one.finish_reason is None:
            ids, computed = one.token_ids, one.num_computed
            one.num_computed = one.table.num_tokens
            one.token_ids = ids + [0] * (one.num_computed - computed)
            engine.scheduler.share_full_blocks(one)
            one.token_ids, one.num_computed = ids, computed
""",
    ]),
    "looks for a stop in the last token only: sglang#23802, #31599": (
        SpeculativeLoop.append_rest, [
            "place = 1\n", """for one, tokens in zip(decodes, written):
        if one.finish_reason is None and len(tokens) > 1:
            one.token_ids += tokens[1:-1]
            one.num_computed += len(tokens) - 1
            engine.append([one], tokens[-1:])
    return
""",
        ], test_ends, "tinypy", Clairvoyant(wrong=0),
    ),
    "counts tokens that nobody gets: ik_llama.cpp#2358": (SpeculativeLoop.append_rest, [
        "place = 1\n", """place = 1
    engine._generated += sum(
        len(tokens) - 1 for one, tokens in zip(decodes, written) if one.finish_reason
    )
""",
    ]),
    "never shrinks: sglang#13826, TensorRT-LLM#16448": (SpeculativeLoop.settle, [
        "if table.num_tokens > room:", "if False:",
    ]),
    "keeps the slot of the next token": (SpeculativeLoop.settle, [
        "sequence.next_slot = None", "sequence.next_slot",
    ]),
    "shrinks by a block too many": (BlockTable.shrink, [
        "total = self.num_tokens - num_tokens",
        "total = max(0, self.num_tokens - num_tokens - self.block_size)",
    ]),
    "the counter goes back, the blocks do not: sglang-jax#1147": (BlockTable.shrink, [
        "self.pool.release(block_id)", "pass",
    ]),
    "draws the first number again: vllm#13196": (Sequence.draw, [" + ahead", ""]),
    "n > 1: one number for all samples": (
        Sequence.draw, ["self.index if", "0 if ahead else self.index if"],
        test_sampled_tokens_are_the_same_too, "llama", 0.7, Clairvoyant(),
    ),
    "is greedy for drafts: vllm#42744": (verify.run_with_drafts, [
        "sequence.draw(ahead=ahead)", "None if ahead else sequence.draw()",
    ]),
    "has a gap in the positions: llama.cpp#26478": (verify.build, [
        "positions += places",
        "positions += places; gaps += [at >= start + count for at in places]",
        "counts: list[int] = []", "counts: list[int] = []; gaps = []",
        "tokens, at_positions", "flat[1] += gaps; tokens, at_positions",
    ]),
    "fills an int4 block": (
        SpeculativeLoop.propose, ['engine.store.open is not None', "False"],
        test_serving_is_right, "llama", "int4",
    ),
    "int8: keeps the larger scale": (
        QuantisedStore._put_tokens, [
            "] = values", "] = values if piece != 'scale' else torch.maximum("
            "self.parts[f'{name}_scale'][layer][write.block_ids, :, write.offsets], values)",
        ], test_every_backend, "tinypy", "torch", "int8", None,
    ),
    "preemption: keeps what it read: vllm#28558": (
        ModelDrafter.freeing, ["self.num_read[block_id] = 0", "pass"],
        test_a_draft_model_reads_what_its_blocks_lack, "llama", "torch",
    ),
    "abort: keeps the request's state: llama.cpp, pull request 27692": (
        SpeculativeLoop.propose,
        ["finish_reason is not None", "finish_reason not in (None, 'abort')"],
        test_a_drafter_is_told_what_left, "llama",
    ),
    "max_tokens and the context: drafts beyond": (
        SpeculativeLoop.propose,
        ["sequence.request.max_length - len(sequence.token_ids) - 1", "15"],
        test_to_the_end_of_the_context, "llama", Wrong(),
    ),
    "n > 1: leaves shared blocks": (
        loop.reserve, ["_, copy = table.writable_slot(position)", "copy = None"],
        test_room_for_drafts_covers_shared_blocks, "llama",
    ),
    "a full pool: takes more than there is": (
        loop.reserve, ["OutOfBlocks:\n            num_drafts", "KeyError:\n            num_drafts"],
        test_a_full_pool_takes_no_drafts, "llama",
    ),
    "max_batch_tokens: has no budget": (
        SpeculativeLoop.choose, ["engine.config.max_batch_tokens - num_tokens", "999"],
        test_within_the_budget, "llama", 7, Clairvoyant(wrong=0),
    ),
    "reads the hidden states of a wrong draft": (
        SpeculativeLoop.remember, ["len(written[place]) - 1", "len(drafts[place])"],
        test_hidden_states_are_those_of_the_newest_token, "llama",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", thorough_after(3, BUGS))
def test_a_planted_bug_is_seen(bug, request, monkeypatch):
    function, edits, *seen_by = BUGS[bug]
    test, model, *arguments = seen_by or (test_serving_is_right, "llama", "auto")
    model = request.getfixturevalue(model)
    plant(monkeypatch, function, edits)
    with pytest.raises((AssertionError, LookupError, RuntimeError, ValueError, minikv.OutOfBlocks)):
        test(model, *copy.deepcopy(arguments))


class Given(Drafter):
    """Proposes what it is given, once."""

    def __init__(self, proposals):
        self.proposals = [proposals]

    def propose_all(self, sequences, most, hidden):
        given = self.proposals.pop() if self.proposals else [None] * len(sequences)
        return given(sequences, most) if callable(given) else given


def extends(sequences, most):
    sequences[0].token_ids.append(7)
    return [None]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([Proposal([5, 1_000_000])], "a token id: must be an int from 0 to 2047, was 1000000"),
        ([Proposal([5, -1])], "a token id: .* was -1"),
        ([Proposal([1.5])], "a token id: .* was 1.5"),
        ([Proposal(["a"])], "a token id: .* was 'a'"),
        ([Proposal("abc")], "must be a list of token ids, was 'abc'"),
        ([Proposal(None)], "must be a list of token ids, was None"),
        ([Proposal([5] * 16)], "at most 15 were asked for, gave 16"),
        ([Proposal([5], [0.5])], "a level: must be an int, was 0.5"),
        ([Proposal([5], [-1])], "levels must be at least 0"),
        ([[5, 6]], r"must give a Proposal or None, gave \[5, 6\]"),
        ([], r"was asked for 1 proposals, gave \[\]"),
        ([None, None], "was asked for 1 proposals"),
        (None, "was asked for 1 proposals, gave None"),
        (extends, "has changed the token_ids of a sequence"),
        (lambda sequences, most: {}[7], "7"),
    ],
)
def test_what_a_drafter_gives_is_checked_and_the_engine_goes_on(tinypy, given, says):
    """A token that the model does not have would be read from elsewhere in memory."""
    engine = Engine(tinypy.lm, small(speculative=Given(given)))
    with pytest.raises((ValueError, KeyError), match=says) as caught:
        engine.generate([[5, 6, 7]], SamplingParams(40, ignore_eos=True))
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any("drafter Given" in one for one in told)
    assert_empty(engine)
    params = SamplingParams(8, ignore_eos=True)
    [output] = engine.generate([[5, 6, 7]], params)
    assert output.token_ids == naively(tinypy.lm, [5, 6, 7], 8)


def test_a_drafter_that_gives_an_array_of_tokens_is_understood(tinypy):
    right = tinypy.lm.generate_naively([5, 6, 7], 9)
    drafter = Given([Proposal(torch.tensor(right[1:4]), range(3))])
    engine = Engine(tinypy.lm, small(speculative=drafter))
    [output] = engine.generate([[5, 6, 7]], SamplingParams(9, ignore_eos=True))
    assert output.token_ids == right


@pytest.mark.parametrize("speculative", ["off", Wrong()])
@pytest.mark.parametrize(
    ("chooses", "says"),
    [(lambda rows: [2048, 0], "from 0 to 2047, chose"),
     (lambda rows: [0, -1], "from 0 to 2047, chose"),
     (lambda rows: [1] * (rows + 1), r"must choose \d+ tokens")],
)  # fmt: skip
def test_what_a_sampler_chooses_is_checked(tinypy, speculative, chooses, says):
    calls = []

    def sampler(logits, params, draws):
        calls.append(1)
        return chooses(len(logits)) if len(calls) == 3 else logits.argmax(-1)

    engine = Engine(tinypy.lm, small(speculative=speculative), sampler=sampler)
    with pytest.raises(ValueError, match=f"^sampler: .*{says}"):
        engine.generate([[5, 6, 7]] * 2, SamplingParams(9, ignore_eos=True))
    [output] = engine.generate([[5, 6, 7]], SamplingParams(5, ignore_eos=True))
    assert output.token_ids == tinypy.lm.generate_naively([5, 6, 7], 5)


def test_a_drafter_is_told_that_a_step_has_failed(tinypy):
    drafter = Wrong()
    drafter.start_over = Mock()
    engine = Engine(tinypy.lm, small(speculative=drafter), sampler=Mock(side_effect=OSError))
    with pytest.raises(OSError):
        engine.generate([[5, 6, 7]])
    drafter.start_over.assert_called_once_with()
