"""Batch invariance: the logits after a text have the same bits in whatever company."""

import random
from functools import partial

import pytest
import torch
from helpers import Clairvoyant, drafting_engine, small, with_windows
from thorough import thorough_after

import minikv
from minikv import Engine, EngineConfig, SamplingParams
from minikv.batch import BatchBuilder
from minikv.cpu.step import Crowd
from minikv.runner import Runner
from minikv.speculative import verify

WINDOWS = {"none": (None, None), "one of two": (70, None), "both": (70, 70), "short": (6, None)}


class Witness:
    """Keeps the logits after each text, and counts those whose bits differ from the first time."""

    def __init__(self, monkeypatch):
        self.first: dict[tuple[int, ...], torch.Tensor] = {}
        self.again = self.differ = self.of_drafts = 0
        texts: list[tuple[int, ...]] = []
        build, with_drafts, compute = BatchBuilder.build, verify.build, Runner.compute

        def ends(sequences, num_tokens):
            pairs = zip(sequences, num_tokens, strict=True)
            return [tuple(s.token_ids[: s.num_computed + n]) for s, n in pairs]

        def built(builder, sequences, num_tokens, slots):
            texts[:] = ends(sequences, num_tokens)
            return build(builder, sequences, num_tokens, slots)

        def drafted(builder, plan, drafts):
            filled = [*drafts, *[()] * (len(plan.sequences) - len(drafts))]
            pairs = zip(ends(plan.sequences, plan.num_tokens), filled, strict=True)
            texts[:] = [(*t, *ids[:n]) for t, ids in pairs for n in range(len(ids) + 1)]
            self.of_drafts += sum(map(len, drafts))
            return with_drafts(builder, plan, drafts)

        def computed(runner, batch):
            logits = compute(runner, batch)
            for text, row in zip(texts, logits, strict=True):
                if text in self.first:
                    self.again += 1
                    self.differ += not torch.equal(row, self.first[text])
                self.first.setdefault(text, row.clone())
            return logits

        monkeypatch.setattr(BatchBuilder, "build", built)
        monkeypatch.setattr(verify, "build", drafted)
        monkeypatch.setattr(Runner, "compute", computed)


def play(lm, seed: int, **settings) -> None:
    """An engine of random sizes, and requests that share prefixes, some of them asked twice."""
    draw = random.Random(seed)
    config = small(
        num_blocks=draw.choice((48, 128)), block_size=draw.choice((4, 16)),
        max_num_seqs=draw.choice((1, 3, 8)), max_batch_tokens=draw.choice((8, 17, 64, 200)),
        prefix_cache=draw.random() < 0.7, **settings,
    )  # fmt: skip
    make = partial(drafting_engine, drafter=Clairvoyant(seed), make=Engine)
    engine = (make if draw.random() < 0.5 else Engine)(lm, config)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = [random.Random(i).choices(range(1, 12), k=140) for i in range(2)]
    for _ in range(2):
        lengths = [draw.choice((1, 5, 33, 64, 65, 66, 100, 128, 130)) for _ in range(6)]
        prompts = [draw.choice(texts)[:length] for length in lengths]
        outputs = engine.generate(prompts, params)
        longest = max(outputs, key=lambda output: len(output.token_ids))
        texts.append([*prompts[outputs.index(longest)], *longest.token_ids, 7, 8, 9])
    engine.check()


@pytest.mark.parametrize("windows", thorough_after(1, WINDOWS))
@pytest.mark.parametrize("kv_groups", thorough_after(1, ["auto", "one"]))
def test_the_same_bits_in_any_company(llama, monkeypatch, windows, kv_groups):
    """Over batches, chunks, block sizes, a cold and a warm cache, drafts, numbers of threads."""
    draw = random.Random(1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(Crowd, "goes_alone", lambda crowd: draw.random() < 0.5)
    witness, lm = Witness(monkeypatch), with_windows(llama.lm, *WINDOWS[windows])
    for seed in range(10):
        play(lm, seed, kv_groups=kv_groups, batch_invariant=True)
    assert witness.again > 500 and witness.of_drafts > 10
    assert witness.differ == 0
    for text in random.Random(2).sample(list(witness.first), 10):
        assert torch.allclose(witness.first[text], lm.logits(text)[-1], atol=1e-3)


def test_without_the_mode_bits_differ(llama, monkeypatch):
    """So the test above can fail."""
    witness = Witness(monkeypatch)
    for seed in range(3):
        play(llama.lm, seed)
    assert witness.differ > 0


def test_refused_where_sums_have_no_fixed_order(llama):
    for settings in ({"attention": "torch"}, {"kv_dtype": "int8"}, {"kv_dtype": "float16"}):
        with pytest.raises(ValueError, match="batch_invariant: only attention 'cpu'"):
            Engine(llama.lm, EngineConfig(batch_invariant=True, **settings))
    half = minikv.load(llama.folder, dtype=torch.float16)
    with pytest.raises(ValueError, match="only attention 'cpu', not TorchAttention"):
        Engine(half, EngineConfig(batch_invariant=True))
    with pytest.raises(ValueError, match="batch_invariant: "):
        EngineConfig(batch_invariant="yes")
