"""The ring against llama.cpp itself: the same weights, the same operations, the same tokens.

Needs `xllamacpp`, whose wheel exports llama.cpp's C functions, and `gguf`, both on the Python path:

    pip install --target peers xllamacpp gguf
    PYTHONPATH=peers python -m pytest tests/ring/test_ring_peer.py

Only on x86-64 Linux.
"""

from pathlib import Path

import pytest
import torch

import minikv
from minikv.checkpoint import read_weights
from minikv.course.bench.llama_cpp import contexts
from minikv.ring import RingCache, context_shift

FLOOR = 1e-3  # of a logit's difference; about 2e-5 is seen, after many operations too


@pytest.fixture(scope="module")
def make_peer(tinypy):
    weights = read_weights(minikv.BUNDLED["tinypy"])
    try:
        with contexts(tinypy.lm.config, weights) as make:
            make()  # whether the structs lie as they are known
            yield make
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def text(tinypy):
    return tinypy.lm.encode(Path(minikv.__file__).with_name("engine.py").read_text())[:200]


class Both:
    """The ring and llama.cpp, told the same."""

    def __init__(self, lm, peer):
        self.lm, self.peer = lm, peer
        self.ring = RingCache(lm.config, 256, contiguous=False)

    def append(self, token_ids, seq=0):
        """The greatest difference of a logit; the tokens must be the same."""
        ours, theirs = self.ring.append(self.lm, token_ids, seq), self.peer.append(token_ids, seq)
        top = ours.topk(2, -1).values
        sure = top[:, 0] - top[:, 1] > 2 * FLOOR
        assert torch.equal(ours.argmax(-1)[sure], theirs.argmax(-1)[sure])
        return float((ours - theirs).abs().max())

    def __getattr__(self, name):
        def call(*arguments):
            for cache in (self.ring, self.peer):
                getattr(cache, name)(*arguments)

        return call


@pytest.fixture
def both(tinypy, make_peer):
    return Both(tinypy.lm, make_peer())


def test_the_same_logits_before_any_operation(both, text):
    assert both.append(text[:100]) < FLOOR


def test_the_same_after_a_shift(both, text):
    both.append(text[:60])
    both.seq_rm(0, 4, 12)
    both.seq_add(0, 12, None, -8)
    assert both.append(text[60:100]) < FLOOR


def test_the_same_greedy_tokens_before_and_after_a_context_shift(both, text, tinypy):
    token, rows = text[63], []
    both.append(text[:63])
    for step in range(60):
        if step == 20:
            gone = context_shift(both.ring, n_keep=4)
            both.peer.seq_rm(0, 4, 4 + gone)
            both.peer.seq_add(0, 4 + gone, None, -gone)
        ours = both.ring.append(tinypy.lm, [token])[0]
        theirs = both.peer.append([token])[0]
        rows.append((int(ours.argmax()), int(theirs.argmax())))
        token = rows[-1][0]
    assert all(ours == theirs for ours, theirs in rows)


def test_the_same_after_many_shifts(both, text):
    both.append(text[:60])
    for i in range(20):
        both.seq_rm(0, 4, 6)
        both.seq_add(0, 6, None, -2)
        assert both.append(text[60 + 2 * i : 62 + 2 * i]) < FLOOR


def test_the_same_with_a_shared_prompt(both, text):
    both.append(text[:40], 0)
    both.seq_cp(0, 1, 0, None)
    assert both.append(text[40:60], 0) < FLOOR
    assert both.append(text[100:120], 1) < FLOOR
    both.seq_rm(0, 0, None)
    assert both.append(text[120:130], 1) < FLOOR


def test_what_this_build_makes_of_division(both, text, tinypy):
    """A right build equals the ring; October 2026's, one whose shifts have the other sign."""
    both.append(text[:64])
    wrong = RingCache(tinypy.lm.config, 256)
    wrong.append(tinypy.lm, text[:64])
    both.seq_div(0, 0, None, 2)
    wrong.seq_div(0, 0, None, 2)
    wrong.shifts = [-shift for shift in wrong.shifts]
    theirs = both.peer.append(text[64:72])
    right = (both.ring.append(tinypy.lm, text[64:72]) - theirs).abs().max()
    mirrored = (wrong.append(tinypy.lm, text[64:72]) - theirs).abs().max()
    assert min(right, mirrored) < FLOOR, (right, mirrored)
