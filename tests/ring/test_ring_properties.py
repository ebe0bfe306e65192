"""Random operations on a ring against a plain dictionary: (sequence, position) -> tokens.

The model is a toy: a token's q, k and v are fixed random numbers, turned by RoPE at its position.
So what each cell must hold, and what each query must read, can be computed directly.

Among what this finds are bugs that llama.cpp shipped (numbers of github.com/ggml-org/llama.cpp):
3825   a second shift before a step overwrote the first one's delta
3835   K was turned only if the operation also removed a token
14081  a pending shift was lost when its cell was moved
14189  holes were closed only if a shift was pending, too
17527  one run of cells was asked for where single cells would do
9525   after a failed step, or in 12695 a batch that did not fit, cells stayed taken
13983  a range of all sequences was not removed, or too much was
14298  a position that two cells had was forgotten by the set of positions
6002   a shift of one sequence moved tokens of others
and one without a number: in a build of October 2026 a division turned K the wrong way.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from helpers import assert_reached
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from thorough import thorough_after

from minikv import ModelConfig
from minikv.ring import ALL, FREE, OutOfCells, RingCache, context_shift, defragment, turn

CONFIG = ModelConfig(
    vocab_size=600, hidden_size=32, intermediate_size=1, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_context=400, rms_norm_eps=1e-6, tie_embeddings=True, attention_bias=False,
    output_bias=False, mlp_bias=False, qk_norm=False, rope_theta=10_000.0, rope_scaling=None,
    windows=(None, None), eos_ids=(),
)  # fmt: skip
FREQUENCIES = CONFIG.inverse_frequencies()
NUM_CELLS = 40
SEQS = (0, 1, 2)


class ToyModel:
    """What `RingCache.decode` needs of a language model, and the numbers behind it."""

    config = CONFIG

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        shape = (CONFIG.num_layers, CONFIG.vocab_size)
        self.q = torch.randn(*shape, 4, 8, generator=generator)
        self.k = torch.randn(*shape, 2, 8, generator=generator)
        self.v = torch.randn(*shape, 2, 8, generator=generator)
        self.v[:, :, 0, 0] = torch.arange(CONFIG.vocab_size)  # V tells whose it is
        self.fails_at = None  # a layer
        self.transformer = SimpleNamespace(forward=self.forward, logits=lambda hidden: hidden)

    def at(self, name, layer, token_ids, positions):
        x = getattr(self, name)[layer, token_ids]
        return x if name == "v" else turn(x, positions, FREQUENCIES)

    def forward(self, token_ids, positions, attend):
        outs = []
        for layer in range(CONFIG.num_layers):
            if layer == self.fails_at:
                raise RuntimeError("the device is gone")
            q, k, v = (self.at(name, layer, token_ids, positions) for name in "qkv")
            outs.append(attend(layer, q, k, v))
        return torch.stack(outs, 1)  # (T, layers, H, D)

    def attended(self, layer, token, position, seen):
        """What one query reads, `seen` being (token, position) pairs: (H, D)."""
        tokens, positions = map(torch.tensor, zip(*seen, strict=True))
        q = self.at("q", layer, torch.tensor([token]), torch.tensor([position]))[0]  # (H, D)
        k = self.at("k", layer, tokens, positions).repeat_interleave(2, 1)  # (N, H, D)
        v = self.v[layer, tokens].repeat_interleave(2, 1)
        weights = (torch.einsum("hd,nhd->hn", q, k) * 8**-0.5).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, v)


MODEL = ToyModel()


class RingMachine(RuleBasedStateMachine):
    """The ring beside its dictionary. A token's id is new each time, so it is a name, too."""

    contiguous = True
    window = None
    met: ClassVar = Counter()  # in all runs: what

    def __init__(self):
        super().__init__()
        config = replace(CONFIG, windows=(self.window, self.window))
        self.ring = RingCache(config, NUM_CELLS, contiguous=self.contiguous)
        self.tokens = {}  # (sequence, position): [tokens]
        self.num_tokens = 0  # named so far
        self.calm = 0  # operations since much was lost
        MODEL.fails_at = None

    # ── The dictionary ────────────────────────────────────────────────────────

    def of(self, seq, p0=0, p1=None):
        """The entries (sequence, position, token) of a range."""
        return [
            (s, p, token)
            for (s, p), tokens in self.tokens.items()
            for token in tokens
            if seq in (ALL, s) and p0 <= p and (p1 is None or p < p1)
        ]

    def names(self):
        return {token for tokens in self.tokens.values() for token in tokens}

    def is_known(self, seq):
        return seq == ALL or any(s == seq for s, _ in self.tokens)

    def store(self, entries):
        self.tokens = {}
        for s, p, token in entries:
            self.tokens.setdefault((s, p), []).append(token)

    def expect(self, is_bad, call):
        """Play a call that must be refused exactly if `is_bad`, changing nothing then."""
        before = self.seen()
        if not is_bad:
            call()
            return True
        with pytest.raises((ValueError, OutOfCells)):
            call()
        assert self.seen() == before
        return False

    def seen(self):
        ring = self.ring
        owners = [set(owners) for owners in ring.sequences]
        return ring.positions.copy(), owners, ring.shifts.copy(), ring.head

    # ── Operations ────────────────────────────────────────────────────────────

    counts = st.lists(st.integers(0, 5), min_size=3, max_size=3)

    @initialize(counts=counts, order=st.randoms(), shares=st.sampled_from([True, False]))
    def begin(self, counts, order, shares):
        first, second, _ = counts
        self.decode([1 + first, 1 + second, 0], 0, order, None)
        if shares:
            self.seq_cp(0, 2, (0, first))

    @rule(counts=counts, gap=st.integers(0, 2), order=st.randoms(),
          fails_at=st.sampled_from([None, None, None, 0, 1]))  # fmt: skip
    def decode(self, counts, gap, order, fails_at):
        """A query sees what stands before it in its sequence, wherever in the batch that is."""
        num_new = sum(counts)
        if num_new == 0 or self.num_tokens + num_new > CONFIG.vocab_size:
            return
        batch = []
        for seq, count in zip(SEQS, counts, strict=True):
            start = max((p for _, p, _ in self.of(seq)), default=-1) + 1 + gap
            batch += [(seq, start + i) for i in range(count)]
        order.shuffle(batch)
        if max(p for _, p in batch) >= CONFIG.max_context:
            return
        seqs, positions = map(list, zip(*batch, strict=True))
        ids = list(range(self.num_tokens, self.num_tokens + num_new))
        before = self.seen()
        self.met["shifts applied by a step"] += any(self.ring.shifts)
        MODEL.fails_at = fails_at
        try:
            out = self.ring.decode(MODEL, ids, positions, seqs)
        except OutOfCells as error:
            assert error.free == NUM_CELLS - len(self.names())
            assert self.contiguous or error.free < num_new
            assert self.seen() == before
            self.met["no room"] += 1
            return
        except RuntimeError:
            assert fails_at is not None
            after = self.seen()
            assert after[:2] == before[:2] and after[3] == before[3]
            assert not any(after[2])  # what was pending is turned, or was never there
            self.met["failed steps"] += 1
            return
        finally:
            MODEL.fails_at = None
        self.num_tokens += num_new
        self.store([*self.of(ALL), *((s, p, t) for (s, p), t in zip(batch, ids, strict=True))])
        for (seq, position), token, row in zip(batch, ids, out, strict=True):
            seen = [(t, p) for _, p, t in self.of(seq, 0, position + 1)]
            if self.window is not None:
                seen = [(t, p) for t, p in seen if p > position - self.window]
            for layer in range(CONFIG.num_layers):
                expected = MODEL.attended(layer, token, position, seen)
                torch.testing.assert_close(row[layer], expected, rtol=1e-3, atol=2e-2)

    ranges = st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 16)))

    @precondition(lambda self: self.calm > 4)
    @rule(seq=st.sampled_from([*SEQS, ALL]), span=ranges)
    def seq_rm(self, seq, span):
        self.calm = 0
        p0, p1 = span
        bad = not self.is_known(seq) or (p1 is not None and p1 < p0)
        if self.expect(bad, lambda: self.ring.seq_rm(seq, p0, p1)):
            gone = self.of(seq, p0, p1)
            self.met["removed"] += 0 < len(gone) < len(self.of(ALL))
            self.store([entry for entry in self.of(ALL) if entry not in gone])

    @rule(src=st.sampled_from(SEQS), dst=st.sampled_from(SEQS), span=ranges)
    def seq_cp(self, src, dst, span):
        p0, p1 = span
        has = {t for _, _, t in self.of(dst)}
        new = [(dst, p, t) for _, p, t in self.of(src, p0, p1) if t not in has]
        taken = {p for _, p, _ in self.of(dst)}
        bad = not self.is_known(src) or (p1 is not None and p1 < p0)
        bad = bad or any(p in taken for _, p, _ in new)
        if self.expect(bad, lambda: self.ring.seq_cp(src, dst, p0, p1)):
            self.met["copied"] += len(new) > 0
            self.store([*self.of(ALL), *new])

    def move(self, seq, span, moved, call):
        p0, p1 = span
        entries = self.of(seq, p0, p1)
        names = {t for _, _, t in entries}
        stay = {(s, p) for s, p, t in self.of(ALL) if t not in names}
        bad = not self.is_known(seq) or (p1 is not None and p1 < p0)
        bad = bad or any(moved(p) < 0 or (s, moved(p)) in stay for s, p, _ in entries)
        bad = bad or any(t in names and seq not in (ALL, s) for s, _, t in self.of(ALL))
        if self.expect(bad, lambda: call(seq, p0, p1)):
            self.met["moved"] += any(moved(p) != p for _, p, _ in entries)
            self.store([(s, moved(p) if t in names else p, t) for s, p, t in self.of(ALL)])

    @rule(seq=st.sampled_from([*SEQS, ALL]), span=ranges, delta=st.integers(-6, 12))
    def seq_add(self, seq, span, delta):
        self.move(seq, span, lambda p: p + delta, lambda *a: self.ring.seq_add(*a, delta))

    @rule(seq=st.sampled_from([*SEQS, ALL]), span=ranges, d=st.integers(1, 4))
    def seq_div(self, seq, span, d):
        self.move(seq, span, lambda p: p // d, lambda *a: self.ring.seq_div(*a, d))

    @rule(seq=st.sampled_from(SEQS), n_keep=st.integers(0, 4))
    def context_shift(self, seq, n_keep):
        end = max((p for _, p, _ in self.of(seq)), default=-1) + 1
        gone = (end - n_keep) // 2
        moving = {t for _, _, t in self.of(seq, n_keep + max(gone, 0))}
        is_shared = any(t in moving and s != seq for s, _, t in self.of(ALL))
        bad = end - n_keep < 2 or is_shared
        if self.expect(bad, lambda: context_shift(self.ring, n_keep, seq)):
            self.met["context shifts"] += 1
            others = [entry for entry in self.of(ALL) if entry[0] != seq]
            after = [(s, p - gone, t) for s, p, t in self.of(seq, n_keep + gone)]
            self.store([*others, *self.of(seq, 0, n_keep), *after])

    @precondition(lambda self: self.ring.used_max > self.ring.num_used or self.calm > 8)
    @rule()
    def defragment(self):
        used_max = self.ring.used_max
        is_shifted = any(self.ring.shifts)
        moved = defragment(self.ring)
        self.met["holes closed"] += moved > 0
        self.met["shifted cells moved"] += moved > 0 and is_shifted
        assert self.ring.used_max == self.ring.num_used <= used_max - (moved > 0)

    @rule()
    @precondition(lambda self: any(self.ring.shifts))
    def apply_shifts(self):
        self.ring.apply_shifts()

    # ── What must hold after each ─────────────────────────────────────────────

    @invariant()
    def cells_say_what_the_dictionary_says(self):
        ring = self.ring
        self.calm += 1
        ring.check()
        assert ring.num_used == len(self.names())
        found = []
        for cell, position in enumerate(ring.positions):
            if position != FREE:
                token = int(ring.v[0, cell, 0, 0])
                found += [(s, position, token) for s in ring.sequences[cell]]
        assert sorted(found) == sorted(self.of(ALL))
        for seq in SEQS:
            positions = [p for _, p, _ in self.of(seq)]
            assert ring.seq_pos_max(seq) == max(positions, default=-1)

    @invariant()
    def keys_and_values_are_those_of_the_position(self):
        ring = self.ring
        cells = [cell for cell, position in enumerate(ring.positions) if position != FREE]
        if not cells:
            return
        tokens = ring.v[0, cells, 0, 0].long()
        turned_at = torch.tensor([ring.positions[c] - ring.shifts[c] for c in cells])
        for layer in range(CONFIG.num_layers):
            assert torch.equal(ring.v[layer, cells], MODEL.v[layer, tokens])
            expected = MODEL.at("k", layer, tokens, turned_at)
            torch.testing.assert_close(ring.k[layer, cells], expected, rtol=0, atol=1e-4)


class ByIndex(RingMachine):
    contiguous = False


class Windowed(RingMachine):
    window = 6


@pytest.mark.parametrize("machine", thorough_after(1, [RingMachine, ByIndex, Windowed]))
def test_random_operations(machine):
    RingMachine.met.clear()
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40))
    assert_reached(
        RingMachine.met,
        {
            "shifts applied by a step": 5, "holes closed": 8, "shifted cells moved": 2,
            "context shifts": 15, "copied": 8, "moved": 10, "removed": 3, "failed steps": 10,
        },
    )  # fmt: skip
