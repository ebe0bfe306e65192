"""Speculative decoding: the tokens are those without it, whatever is drafted. Each bug that real
engines shipped, planted here, is seen."""

import copy
import itertools
import os
import random
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    Clairvoyant,
    assert_empty,
    careful_engine,
    drafting_engine,
    drain,
    fearless,
    generate,
    small,
    step,
)

import minikv
from minikv import BlockTable, Engine, SamplingParams, Sequence
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
    decide,
    how_many,
    keep_equal,
    loop,
    rejection_sample,
    verify,
)
from minikv.speculative.text import END, Text


class AsManyAsAllowed(Drafter):
    def propose(self, sequence, most):
        return Proposal([1] * most)


DRAFTERS = {
    "ngram": lambda: "ngram",
    "suffix": lambda: "suffix",
    "model": lambda: "model",
    "mixed": Clairvoyant,
    "right": lambda: Clairvoyant(wrong=0),
    "wrong": lambda: AsManyAsAllowed(),
}


@pytest.fixture(params=DRAFTERS)
def drafter(request):
    return DRAFTERS[request.param]()


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


def never_checks_the_first(drafts, token_ids):
    """Seen in lattice#243."""
    kept = min(1, len(drafts))
    while kept < len(drafts) and drafts[kept] == token_ids[kept]:
        kept += 1
    return [*drafts[:kept], token_ids[kept]]


def takes_the_row_after(drafts, token_ids):
    """Seen in openvino.genai#4190: of the wrong draft, too, and then the row behind it."""
    written = keep_equal(drafts, token_ids)
    if len(written) <= len(drafts):
        return [*written[:-1], drafts[len(written) - 1], token_ids[len(written)]]
    return written


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


def distance(p, q, uniform, numbers, count):
    """Total variation between p and what is written first for drafts of q."""
    seen = torch.zeros(len(p))
    for draft in torch.multinomial(q, count, replacement=True, generator=numbers).tolist():
        seen[rejection_sample(torch.stack([p, p]), q[None], [draft], uniform)[0]] += 1
    return float((seen / count - p).abs().sum() / 2)


def test_a_distance_of_a_hundredth_is_seen():
    """Also the one of a bug that several engines had: the number that refused a draft is used again
    for the token in its place."""
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
    chances = Chances()
    for _ in range(200):
        chances.compare([3, 4, 5], [5, 6, 7], [5, 9])
    assert chances.of[3] > 0.95 and chances.of[4] < 0.05
    assert chances.of[5] == Chances().of[5]  # behind a wrong draft nothing is learned


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
    account.note(in_vain=True)
    assert not account.is_open  # for one step
    account.note()
    assert account.is_open


def test_a_drafter_that_is_never_right_is_asked_seldom(tinypy):
    class Wrong(Drafter):
        count = 0

        def propose(self, sequence, most):
            self.count += 1
            return Proposal([1] * most)

    drafter = Wrong()
    engine = Engine(tinypy.lm, small(block_size=16, speculative=drafter))
    # A step that costs next to nothing, so that asking costs more than a step gives.
    engine.loop.costs = SimpleNamespace(of=lambda n: n * 1e-12, row=1e-13, note=lambda *_: None)
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


def test_the_row_of_a_wrong_draft_is_seen(llama, monkeypatch):
    remember = SpeculativeLoop.remember

    def changed(self, hidden, plan, ready, drafts, written):
        remember(self, hidden, plan, ready, drafts, [[0] * (len(ids) + 1) for ids in drafts])

    monkeypatch.setattr(SpeculativeLoop, "remember", changed)
    with pytest.raises(AssertionError):
        test_hidden_states_are_those_of_the_newest_token(llama)


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


@pytest.mark.parametrize("attention", ["torch", "cpu"])
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


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_greedy(pair, block_size, drafter):
    long, other, short = pair.prompts(33, 17, 1, seed=5)
    prompts = [long, short, long[:16] + other[:3], other, long[:16], other]
    expected = [pair.greedy(prompt, 12) for prompt in prompts]
    config = small(block_size=block_size, num_blocks=640 // block_size)
    engine = drafting_engine(pair.lm, config, drafter)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert [output.token_ids for output in generate(engine, prompts, params)] == expected
    assert [output.token_ids for output in generate(engine, prompts, params)] == expected
    assert_empty(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_greedy_under_preemptions(llama, block_size, preemption, drafter):
    prompts = llama.prompts(3, 9, 14, 6, 11, 4, seed=9)
    config = small(block_size=block_size, num_blocks=48 // block_size, preemption=preemption)
    engine = drafting_engine(llama.lm, config, drafter)
    outputs = generate(engine, prompts, SamplingParams(max_tokens=24))
    assert [o.token_ids for o in outputs] == [llama.greedy(prompt, 24) for prompt in prompts]
    assert engine.stats().preemptions > 0
    assert_empty(engine)


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


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_tokens_are_the_same_too(llama, temperature, drafter):
    prompts = llama.prompts(7, 3, 12, seed=4)
    params = [
        SamplingParams(max_tokens=14, temperature=temperature, top_k=k, top_p=p, seed=i, n=n)
        for i, (k, p, n) in enumerate([(0, 1.0, 1), (5, 0.9, 3), (0, 0.8, 2)])
    ]
    engine = drafting_engine(llama.lm, small(), drafter)
    assert found(generate(engine, prompts, params)) == plain(llama.lm, prompts, params)
    assert_empty(engine)


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


def test_to_the_end_of_the_context(llama, drafter):
    (prompt,) = llama.prompts(490)
    config = small(num_blocks=130, max_batch_tokens=512)
    engine = drafting_engine(llama.lm, config, drafter)
    params = SamplingParams(max_tokens=512 - 490, ignore_eos=True)
    assert generate(engine, [prompt], params)[0].token_ids == llama.greedy(prompt, 22)


@pytest.mark.parametrize(
    ("attention", "kv_dtype"),
    [
        *itertools.product(["torch", "cpu"], ["auto", "int8", "int4"]),
        ("triton", "auto"),  # in the interpreter, which is slow
        *(pytest.param("triton", one, marks=pytest.mark.thorough) for one in ("int8", "int4")),
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
    prompts[1] *= 6
    most = 12 if attention == "triton" else 20
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


def test_blocks_are_those_without(llama):
    """After every step the pool holds what it holds without drafts."""
    engine = drafting_engine(llama.lm, small(block_size=2, prefix_cache=False), Clairvoyant())
    for prompt in llama.prompts(3, 8, 5):
        engine.add_request(prompt, SamplingParams(max_tokens=25))
    while engine.has_unfinished:
        step(engine)
        tables = [s.table for s in engine.scheduler.running]
        needed = sum(-(-s.num_computed // 2) for s in engine.scheduler.running)
        assert sum(len(t.block_ids) for t in tables) == needed
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
        engine = drafting_engine(llama.lm, config, AsManyAsAllowed())
        ids = [engine.add_request(p, SamplingParams(max_tokens=6)) for p in prompts[:count]]
        step(engine)
        step(engine)
        assert engine.stats().preemptions == 0 and engine.stats().running == count
        outputs = drain(engine)
        assert [outputs[i].token_ids for i in ids] == [llama.greedy(p, 6) for p in prompts[:count]]


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


# ── Bugs that real engines shipped ────────────────────────────────────────────


def serve(lm, make_table=BlockTable, kv_dtype="auto", steps=3):
    """Requests of all kinds, some while others run; fails if anything is not as without drafts."""
    rng = random.Random(1)
    config = small(num_blocks=40, block_size=4, kv_dtype=kv_dtype, max_batch_tokens=32)
    make = Engine if kv_dtype != "auto" else careful_engine
    engine = drafting_engine(lm, config, Clairvoyant(1, 0.3), make, block_table=make_table)
    base = [rng.randrange(1, 300) for _ in range(9)]
    prompts, params, ids, outputs = [], [], [], {}
    for i in range(10):
        prompts.append(base[: rng.randrange(1, 10)] + [rng.randrange(1, 300) for _ in range(i % 4)])
        stop = tuple(rng.sample(range(300), 12)) if i % 3 == 0 else ()
        params.append(SamplingParams(max_tokens=rng.randrange(6, 24), n=1 + (i % 4 == 3), stop=stop,
                                     temperature=0.9 * (i % 2), seed=i))  # fmt: skip
        ids.append(engine.add_request(prompts[-1], params[-1]))
        for _ in range(steps):
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


def without(name, change):
    """A patch of the loop: its method after `change(method)`."""
    return lambda patch: patch.setattr(
        SpeculativeLoop, name, change(getattr(SpeculativeLoop, name))
    )


def publishes_early(append_rest):
    """Seen in vllm#41838: what is not verified is in the prefix cache."""

    def changed(self, engine, decodes, written):
        for sequence in decodes:
            if sequence.finish_reason is None and sequence.table is not None:
                room = sequence.table.num_tokens - sequence.num_computed
                kept, computed = list(sequence.token_ids), sequence.num_computed
                sequence.num_computed += room
                sequence.token_ids += [0] * room
                engine.scheduler.share_full_blocks(sequence)
                sequence.token_ids, sequence.num_computed = kept, computed
        append_rest(self, engine, decodes, written)

    return changed


def looks_at_the_last_only(append_rest):
    """Seen in sglang#23802, sglang#31599: a stop in the middle of accepted drafts."""

    def changed(self, engine, decodes, written):
        for sequence, tokens in zip(decodes, written, strict=True):
            if sequence.finish_reason is None and len(tokens) > 1:
                sequence.token_ids += tokens[1:-1]
                sequence.num_computed += len(tokens) - 1
                engine.append([sequence], tokens[-1:])

    return changed


def never_shrinks(settle):
    """Seen in sglang#13826, TensorRT-LLM#16448."""

    def changed(self, sequence, num_drafts, num_accepted):
        table = sequence.table
        if table is not None:
            sequence.table = None
            settle(self, sequence, num_drafts, num_accepted)
            sequence.table, sequence.next_slot = table, None

    return changed


def keeps_the_slot(settle):
    """Somebody else knew the length: the slot of the next token."""

    def changed(self, sequence, num_drafts, num_accepted):
        slot = sequence.next_slot
        settle(self, sequence, num_drafts, num_accepted)
        sequence.next_slot = slot

    return changed


def counts_what_nobody_gets(patch):
    """Seen in ik_llama.cpp#2358: the accepted block is charged before it is written."""

    def changed(self, engine, decodes, written):
        engine._generated += sum(len(tokens) - 1 for tokens in written)
        engine._generated -= sum(
            len(tokens) - 1
            for s, tokens in zip(decodes, written, strict=True)
            if s.finish_reason is None
        )
        return append_rest(self, engine, decodes, written)

    append_rest = SpeculativeLoop.append_rest
    patch.setattr(SpeculativeLoop, "append_rest", changed)


def shrinks_too_much(patch):
    """The block of a row that was right."""
    right = BlockTable.shrink

    def changed(table, num_tokens):
        right(table, min(num_tokens + table.block_size, table.num_tokens))

    patch.setattr(BlockTable, "shrink", changed)


def forgets_to_release(patch):
    """Seen in sglang-jax#1147: the counter goes back, the blocks do not."""

    def changed(table, num_tokens):
        table.num_tokens -= num_tokens
        del table.block_ids[-(-table.num_tokens // table.block_size) :]

    patch.setattr(BlockTable, "shrink", changed)


def draws_again(patch):
    """The numbers of the drafts' positions are those of the first: vllm#13196 and its kind."""
    right = Sequence.draw
    patch.setattr(Sequence, "draw", lambda s, index=None, ahead=0: right(s, index))


def greedy_for_drafts(patch):
    """Seen in vllm#42744: the request's parameters hold for one of its rows only."""
    right = verify.run_with_drafts

    def changed(runner, plan, drafts):
        with pytest.MonkeyPatch.context() as inner:
            draw = Sequence.draw
            inner.setattr(
                Sequence, "draw",
                lambda s, index=None, ahead=0: None if ahead else draw(s, index),
            )  # fmt: skip
            return right(runner, plan, drafts)

    patch.setattr(loop, "run_with_drafts", changed)


def positions_one_too_high(patch):
    """Seen in llama.cpp#26478: a gap in the positions."""
    right = verify.build

    def changed(builder, plan, drafts):
        batch = right(builder, plan, drafts)
        for row in range(1, batch.num_decodes):
            if batch.context_lens[row] == batch.context_lens[row - 1] + 1:
                batch.positions[row] += 1
        return batch

    patch.setattr(verify, "build", changed)


BUGS = {
    "never checks the first draft": lambda patch: patch.setattr(
        loop, "keep_equal", never_checks_the_first
    ),
    "takes the row after the wrong one": lambda patch: patch.setattr(
        loop, "keep_equal", takes_the_row_after
    ),
    "publishes what is not verified": without("append_rest", publishes_early),
    "looks for a stop in the last token only": without("append_rest", looks_at_the_last_only),
    "counts tokens that nobody gets": counts_what_nobody_gets,
    "never shrinks": without("settle", never_shrinks),
    "keeps the next slot": without("settle", keeps_the_slot),
    "shrinks by a block too many": shrinks_too_much,
    "forgets to release": forgets_to_release,
    "draws the same number again": draws_again,
    "is greedy for drafts": greedy_for_drafts,
    "has a gap in the positions": positions_one_too_high,
}


def test_serving_is_right(llama):
    serve(llama.lm)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(llama, bug, monkeypatch):
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError, RuntimeError)):
        serve(llama.lm)


def test_a_draft_that_fills_an_int4_block_is_seen(llama, monkeypatch):
    serve(llama.lm, kv_dtype="int4")
    propose = SpeculativeLoop.propose

    def without_limit(self, engine, decodes):
        store = engine.store
        engine.store = None
        try:
            return propose(self, engine, decodes)
        finally:
            engine.store = store

    monkeypatch.setattr(SpeculativeLoop, "propose", without_limit)
    with pytest.raises((RuntimeError, AssertionError), match=r"closed|assert"):
        serve(llama.lm, kv_dtype="int4")


def keeps_what_it_read(patch):
    """Seen in vllm#28558: what belongs to drafts is not forgotten at a preemption."""
    patch.setattr(ModelDrafter, "freeing", lambda self, block_id: None)


def keeps_the_aborted(patch):
    """Seen in llama.cpp, pull request 27692: the state of a request that left is never freed."""
    propose = SpeculativeLoop.propose

    def changed(self, engine, decodes):
        self.known = {one for one in self.known if one.finish_reason != "abort"}
        return propose(self, engine, decodes)

    patch.setattr(SpeculativeLoop, "propose", changed)


def drafts_beyond_the_limit(patch):
    """vLLM's scheduler cuts drafts at the end of the context; this one does not."""
    propose = SpeculativeLoop.propose

    def changed(self, engine, decodes):
        for one in decodes:
            one.request.max_length += 16
        try:
            return propose(self, engine, decodes)
        finally:
            for one in decodes:
                one.request.max_length -= 16

    patch.setattr(SpeculativeLoop, "propose", changed)


def one_number_for_all_samples(patch):
    """Of the drafts' positions: vllm#13196 and its kind."""
    right = Sequence.draw
    patch.setattr(
        Sequence, "draw",
        lambda s, index=None, ahead=0: right(s, 0 if ahead > 0 and index is None else index, ahead),
    )  # fmt: skip


def keeps_the_larger_scale(patch):
    """Of all that was ever written to a slot, a wrong draft's included."""
    put = QuantisedStore._put_tokens

    def changed(self, name, layer, write, x):
        scale = self.parts[f"{name}_scale"][layer]
        before = scale.clone()
        put(self, name, layer, write, x)
        scale.copy_(torch.maximum(scale, before))

    patch.setattr(QuantisedStore, "_put_tokens", changed)


def takes_more_than_there_is(patch):
    """Of a full pool."""
    patch.setattr(loop, "OutOfBlocks", KeyError)


def has_no_budget(patch):
    right = loop.how_many
    patch.setattr(loop, "how_many", lambda chances, step, row, _: right(chances, step, row, 999))


def leaves_shared_blocks(patch):
    """Only the block of the first token is copied before it is written."""
    right = BlockTable.writable_slot

    def changed(table, position):
        if position % table.block_size == 0 and position > 0:
            return table.block_ids[position // table.block_size] * table.block_size, None
        return right(table, position)

    patch.setattr(BlockTable, "writable_slot", changed)


# Whom drafts meet: the bug, and which of the tests above sees it.
MEETINGS = {
    "preemption": (
        keeps_what_it_read, test_a_draft_model_reads_what_its_blocks_lack, ("torch",)
    ),
    "abort": (keeps_the_aborted, test_a_drafter_is_told_what_left, ()),
    "max_tokens and the context": (
        drafts_beyond_the_limit, test_to_the_end_of_the_context, (AsManyAsAllowed(),)
    ),
    "n > 1": (
        one_number_for_all_samples, test_sampled_tokens_are_the_same_too, (0.7, Clairvoyant())
    ),
    "n > 1, shared blocks": (leaves_shared_blocks, test_room_for_drafts_covers_shared_blocks, ()),
    "a full pool": (takes_more_than_there_is, test_a_full_pool_takes_no_drafts, ()),
    "max_batch_tokens": (has_no_budget, test_within_the_budget, (7, Clairvoyant(wrong=0))),
}  # fmt: skip


@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_bug_where_drafts_meet_something_else_is_seen(llama, meeting, monkeypatch):
    plant, test, arguments = MEETINGS[meeting]
    test(llama, *copy.deepcopy(arguments))
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, minikv.OutOfBlocks)):
        test(llama, *copy.deepcopy(arguments))


def test_a_stop_string_within_accepted_drafts_is_seen(tinypy, monkeypatch):
    without("append_rest", looks_at_the_last_only)(monkeypatch)
    with pytest.raises(AssertionError):
        test_ends(tinypy, Clairvoyant(wrong=0))


def test_the_scale_of_a_wrong_draft_is_seen(tinypy, request, monkeypatch):
    keeps_the_larger_scale(monkeypatch)
    with pytest.raises(AssertionError):
        test_every_backend(tinypy, "torch", "int8", request)
