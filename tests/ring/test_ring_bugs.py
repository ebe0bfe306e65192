"""Bugs of this part that llama.cpp shipped, each with the thread that reports or fixes it.

Numbers are of github.com/ggml-org/llama.cpp. Those that random operations find are in
test_ring_properties.py.
"""

import pytest
import torch

from minikv.ring import (
    FREE,
    OutOfCells,
    RingCache,
    RollingCache,
    context_shift,
    defragment,
    generate_with_ring,
    plan_moves,
    with_config,
)


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


def test_bounded_defragmentation_can_be_finished(llama):
    # 10873: the limit on moves left a ring in which the next batch still found no room.
    cache = RingCache(llama.lm.config, 32)
    cache.place(list(range(32)), [0] * 32)
    for position in range(0, 32, 2):
        cache.seq_rm(0, position, position + 1)
    with pytest.raises(OutOfCells) as caught:
        cache.find_slot(16)
    assert (caught.value.free, caught.value.longest_run) == (16, 1)
    calls = 0
    while defragment(cache, max_moves=3):
        calls += 1
    assert calls > 1 and cache.find_slot(16) == 16


def test_a_ring_without_holes_is_not_defragmented(llama):
    # 11707: padding counted as holes, so that nothing was moved again and again.
    cache = RingCache(llama.lm.config, 64)
    cache.place(list(range(3)), [0] * 3)
    assert cache.num_read == 32 > cache.used_max
    assert plan_moves([position != FREE for position in cache.positions]) == []
    assert defragment(cache) == 0


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


def test_a_rolling_buffer_cannot_go_back(llama, ids):
    # 13194: "removing tokens … not possible when using SWA cache, because token information
    # becomes lost when the window slides". Before it wraps it is possible.
    lm = with_config(llama.lm, window=16)
    cache = RollingCache(lm.config)
    cache.append(lm, ids[:16])
    cache.truncate(10)
    close(cache.append(lm, ids[40:50]), lm.logits(ids[:10] + ids[40:50])[10:])
    with pytest.raises(ValueError, match="num_tokens: 20 tokens have gone through a window of 16"):
        cache.truncate(18)
    assert cache.num_tokens == 20
    close(cache.append(lm, ids[50:53]), lm.logits(ids[:10] + ids[40:53])[20:])


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
