"""Bugs of this part that llama.cpp shipped, each with the thread that reports or fixes it.

Numbers are of github.com/ggml-org/llama.cpp.
"""

import pytest
import torch

from minikv.ring import (
    ALL,
    FREE,
    Cells,
    OutOfCells,
    RingCache,
    RollingCache,
    context_shift,
    defragment,
    generate_with_ring,
    plan_moves,
    turn,
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


def test_two_shifts_before_a_step_add_up(llama, ids):
    # 3825, fixed by 3835: the second shift overwrote the first one's delta, not the position.
    cache = RingCache(llama.lm.config, 32)
    cache.append(llama.lm, ids[:10])
    cache.seq_add(0, 0, None, 7)
    cache.seq_add(0, 0, None, 5)
    assert cache.shifts[:10] == [12] * 10
    cache.apply_shifts()
    close(cache.k[:, :10], keys_at(llama.lm, ids[:10], list(range(12, 22))))


def test_a_shift_is_applied_though_no_token_left(llama, ids):
    # 3835: K was turned only if the operation also removed a token.
    cache = RingCache(llama.lm.config, 64)
    cache.append(llama.lm, ids[:10])
    cache.seq_add(0, 0, None, 40)
    assert cache.num_used == 10
    close(cache.append(llama.lm, ids[10:20]), llama.lm.logits(ids[:20])[10:])
    assert not any(cache.shifts)


def test_the_search_does_not_give_up_at_the_end_of_the_buffer():
    # 3493: a run that would go over the end counted as if every cell had been tested.
    cells = Cells(8)
    cells.place(list(range(6)), [0] * 6)
    cells.seq_rm(0, 0, 4)
    cells.head = 6
    assert cells.find_slot(3) == 0


def test_cells_that_were_never_written_do_not_matter(llama, ids, monkeypatch):
    # 3523: attention multiplied what was in the padding by 0, and 0 * NaN is NaN.
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, torch.nan, **k))
    cache = RingCache(llama.lm.config, 64)
    assert cache.num_read == 0 and cache.k.isfinite().all() and cache.v.isfinite().all()
    assert cache.append(llama.lm, ids[:5]).isfinite().all()


def test_every_hole_has_its_data():
    # 14059, 14081: "nf != nh". A hole was found for which no cell from the back was left.
    for number in range(2**12):
        used = [bool(number >> i & 1) for i in range(12)]
        moves = plan_moves(used)
        for source, target, length in moves:
            assert target + length <= sum(used) <= source
        assert sum(move.length for move in moves) == used[: sum(used)].count(False)


@pytest.mark.parametrize("shift_first", [True, False])
def test_a_pending_shift_survives_defragmentation(llama, ids, shift_first):
    # 14081: shift and defragmentation pending together, in either order.
    cache = RingCache(llama.lm.config, 64)
    cache.append(llama.lm, ids[:20], seq=0)
    cache.append(llama.lm, ids[40:60], seq=1)
    if shift_first:
        cache.seq_add(1, 0, None, 30)
    cache.seq_rm(0)
    assert defragment(cache) == 20
    if not shift_first:
        cache.seq_add(1, 0, None, 30)
    assert cache.used_max == 20
    close(cache.append(llama.lm, ids[60:70], 1), llama.lm.logits(ids[40:70])[20:])


def test_defragmentation_happens_without_a_shift(llama, ids):
    # 14189: it was done only if a shift was pending, too.
    cache = RingCache(llama.lm.config, 64)
    cache.append(llama.lm, ids[:20], seq=0)
    cache.append(llama.lm, ids[40:50], seq=1)
    cache.seq_rm(0)
    assert not any(cache.shifts)
    assert defragment(cache) == 10 and cache.used_max == 10


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


def test_a_fragmented_ring_has_room_by_index(llama, ids):
    # 17527, fixed by 17982: restoring a state asked for one run where single cells would do.
    cache = RingCache(llama.lm.config, 32, contiguous=False)
    for start in range(0, 16):
        for seq in (0, 1):
            cache.append(llama.lm, [ids[50 * seq + start]], seq)
    cache.seq_rm(0)
    assert cache.longest_run == 1
    close(cache.append(llama.lm, ids[66:82], 1), llama.lm.logits(ids[50:82])[16:])


@pytest.mark.parametrize("layer", [0, 1])
def test_a_failed_step_leaves_nothing_behind(llama, ids, layer, monkeypatch):
    # 9525, 12695: after a failed decode the cells of its tokens stayed in the cache.
    cache = RingCache(llama.lm.config, 48)
    cache.append(llama.lm, ids[:20])
    cache.seq_rm(0, 4, 8)
    cache.seq_add(0, 8, None, -4)
    owners = [set(owners) for owners in cache.sequences]
    before = cache.positions[:], owners, cache.head
    bind = RingCache.bind

    def bind_to_fail(self, cells):
        attend = bind(self, cells)

        def fail(i, *tensors):
            if i == layer:
                raise RuntimeError("the device is gone")
            return attend(i, *tensors)

        return fail

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="device is gone"):
        patch.setattr(RingCache, "bind", bind_to_fail)
        cache.append(llama.lm, ids[20:30])
    cache.check()
    assert (cache.positions, cache.sequences, cache.head) == before
    untroubled = RingCache(llama.lm.config, 48)
    untroubled.append(llama.lm, ids[:20])
    untroubled.seq_rm(0, 4, 8)
    untroubled.seq_add(0, 8, None, -4)
    close(cache.append(llama.lm, ids[30:40]), untroubled.append(llama.lm, ids[30:40]), 1e-4)


def test_a_full_ring_refuses_a_batch_as_a_whole(llama, ids):
    # 12695: what had been placed of a batch that did not fit was not taken back.
    cache = RingCache(llama.lm.config, 16)
    cache.append(llama.lm, ids[:12])
    before = cache.positions[:], cache.head
    with pytest.raises(OutOfCells, match="cells needed: 5, free: 4"):
        cache.append(llama.lm, ids[12:17])
    assert (cache.positions, cache.head) == before


def test_removing_a_range_of_all_sequences():
    # 13983, fixed by 13985: seq_rm with a sequence below 0 removed nothing, or too much.
    cells = Cells(12)
    cells.place([0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1])
    cells.seq_cp(0, 2)
    assert cells.seq_rm(ALL, 1, 2) == 2
    assert [cells.seq_pos_max(seq) for seq in (0, 1, 2)] == [2, 2, 2]
    assert cells.positions.count(1) == 0 and cells.positions.count(0) == 2


def test_positions_that_occur_twice_are_counted_twice():
    # 14298, fixed by 14339: a set of positions forgot one that two cells had for a while.
    cells = Cells(16)
    cells.place(list(range(8)), [0] * 8)
    cells.seq_div(0, 0, None, 4)
    assert sorted(cells.positions[:8]) == [0, 0, 0, 0, 1, 1, 1, 1]
    cells.free([cells.positions.index(1)])
    assert cells.seq_pos_max(0) == 1
    cells.seq_add(0, 1, None, 3)
    assert (cells.seq_pos_min(0), cells.seq_pos_max(0)) == (0, 4)


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


def test_the_first_queries_of_a_chunk_keep_their_window(llama, ids):
    # 18720, put right in 18727: cells were reused by the batch's last position, while its first
    # queries still saw them.
    lm = with_config(llama.lm, window=8)
    cache = RollingCache(lm.config)
    cache.append(lm, ids[:8])
    close(cache.append(lm, ids[8:16]), lm.logits(ids[:16])[8:])


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


def test_a_shift_of_one_sequence_leaves_the_others_alone(llama, ids):
    # 6002: with several slots, text broke after one of them had been shifted.
    cache = RingCache(llama.lm.config, 64)
    cache.append(llama.lm, ids[:12], seq=0)
    cache.seq_cp(0, 1)
    cache.append(llama.lm, ids[12:24], seq=0)
    cache.append(llama.lm, ids[60:72], seq=1)
    context_shift(cache, n_keep=12, seq=0)
    close(cache.append(llama.lm, ids[72:80], 1), llama.lm.logits(ids[:12] + ids[60:80])[24:])
    with pytest.raises(ValueError, match="seq: position"):  # would move sequence 1's tokens
        context_shift(cache, n_keep=0, seq=0, n_discard=1)


@pytest.mark.parametrize("name", ["llama3-rope", "qwen3"])
def test_the_shift_turns_as_the_model_does(checkpoint, name):
    # 4889: the shift turned by another rotary dimension than the model's own.
    pair = checkpoint(name)
    [prompt] = pair.prompts(8)
    cache = RingCache(pair.lm.config, 8)
    cache.append(pair.lm, prompt)
    cache.seq_add(0, 0, None, 150)
    cache.apply_shifts()
    close(cache.k, keys_at(pair.lm, prompt, list(range(150, 158))))


def test_division_turns_back_and_not_on(llama, ids):
    # No thread was found. In a build of October 2026 seq_div turned K the wrong way: from 6 to 3
    # by +3 in place of -3.
    cache = RingCache(llama.lm.config, 16)
    cache.append(llama.lm, ids[:12])
    cache.seq_div(0, 0, None, 2)
    assert cache.shifts[:12] == [p // 2 - p for p in range(12)]
    cache.apply_shifts()
    # Layer 0's K depends on token and position alone.
    once = keys_at(llama.lm, ids[:12], list(range(12)))[0]
    deltas = torch.tensor([p // 2 - p for p in range(12)])
    frequencies = llama.lm.config.inverse_frequencies()
    close(cache.k[0, :12], turn(once, deltas, frequencies))
    assert (cache.k[0, :12] - turn(once, -deltas, frequencies)).abs().max() > 0.5
    direct = RingCache(llama.lm.config, 1)
    direct.decode(llama.lm, ids[11:12], [5], [0])
    close(cache.k[0, 11], direct.k[0, 0])
