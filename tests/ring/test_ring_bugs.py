"""Bugs of this part that llama.cpp shipped, each with the thread that reports or fixes it.

Numbers are of github.com/ggml-org/llama.cpp. Those that random operations find are in
test_ring_properties.py.
"""

import pytest
import torch

from minikv.ring import RingCache, context_shift, generate_with_ring, with_config


@pytest.fixture
def ids(llama):
    [prompt] = llama.prompts(100)
    return prompt


def close(found, expected, tolerance=5e-3):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def keys_at(lm, token_ids, positions):
    """K of a text at these positions, computed directly: (layers, T, K, D)."""
    cache = RingCache(lm.config, len(token_ids))
    cache.decode(lm, token_ids, positions, [0] * len(token_ids))
    return cache.k


def test_cells_that_were_never_written_do_not_matter(llama, ids, monkeypatch):
    # 3523: attention multiplied what was in the padding by 0, and 0 * NaN is NaN.
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, torch.nan, **k))
    cache = RingCache(llama.lm.config, 64)
    assert cache.num_read == 0 and cache.k.isfinite().all() and cache.v.isfinite().all()
    assert cache.append(llama.lm, ids[:5]).isfinite().all()


def test_a_chunk_moved_into_the_place_of_another(llama, ids):
    # 12160, fixed by 12161: prompt reuse removed a chunk, moved a later one there, and then
    # looked for what follows at positions from before the move.
    text, new = ids[:10], ids[:2] + ids[4:6] + ids[7:9]  # abcdefghij -> abefhi
    cache = RingCache(llama.lm.config, 16)
    cache.append(llama.lm, text)
    cache.drop(0, 2, 4)
    cache.drop(0, 4, 5)
    cache.seq_rm(0, 6)
    kept = cache.cells_of(0)
    assert [cache.positions[cell] for cell in kept] == [0, 1, 2, 3, 4, 5]
    cache.apply_shifts()
    close(cache.k[0, kept], keys_at(llama.lm, new, list(range(6)))[0])  # layer 0 saw no context


def test_a_context_shift_in_a_ring_with_a_window(llama, ids):
    # 12357: gibberish after a shift of a model with a sliding window. In the ring the window is
    # part of the mask, so what lies inside it is unharmed by what is discarded before it.
    lm = with_config(llama.lm, window=8)
    cache = RingCache(lm.config, 40)
    cache.append(lm, ids[:40])
    assert context_shift(cache, n_keep=0) == 20
    # 2 layers of 8 reach 14 tokens back: none of those is gone, so here equality does hold.
    close(cache.append(lm, ids[40:50]), lm.logits(ids[:50])[40:])


def test_keeping_too_much_is_refused_before_it_goes_round_for_ever(llama, ids):
    # 3969: n_keep left nothing to discard, and the server shifted without end.
    cache = RingCache(llama.lm.config, 16)
    with pytest.raises(ValueError, match=r"n_keep: .*at most 14, .*was 15"):
        generate_with_ring(llama.lm, cache, ids[:10], 20, n_keep=15)
    assert cache.num_used == 0
    assert len(generate_with_ring(llama.lm, cache, ids[:10], 20, n_keep=14)) == 20
