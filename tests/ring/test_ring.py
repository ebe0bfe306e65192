"""The ring against the oracle, at every position, wherever equality is promised."""

import dataclasses
import itertools
import random

import pytest
import torch
from helpers import ARCHITECTURES, with_windows
from thorough import thorough_after

import minikv
from minikv.ring import (
    ALL,
    FREE,
    PADDING,
    Cells,
    OutOfCells,
    RingCache,
    RollingCache,
    SelfExtendCache,
    SelfExtendRing,
    SinkCache,
    context_shift,
    generate_in_parallel,
    generate_with_ring,
    masked_attention,
    plan_moves,
    turn,
    with_config,
)


def close(found, expected, tolerance=2e-3):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    # Where two logits are as near as that, either may be the first.
    top = expected.topk(2, -1).values
    sure = top[..., 0] - top[..., 1] > 2 * tolerance
    assert torch.equal(found.argmax(-1)[sure], expected.argmax(-1)[sure])


@pytest.fixture
def ids(llama):
    [prompt] = llama.prompts(120)
    return prompt


# ── Cells ─────────────────────────────────────────────────────────────────────


def occupied(text, head=0):
    """Cells drawn as text: "." is free, a digit names the sequence."""
    cells = Cells(len(text))
    for cell, letter in enumerate(text):
        if letter != ".":
            cells.positions[cell], cells.sequences[cell] = cell, {int(letter)}
    cells.head = head
    cells.check()
    return cells


@pytest.mark.parametrize(
    ("name", "cell", "value", "broken"),
    [
        ("positions", 1, -2, "cell 1 stands at position -2"),
        ("positions", 0, FREE, r"free cell 0 belongs to \{1\}"),
        ("sequences", 0, set(), "cell 0 at position 0 belongs to nobody"),
        ("sequences", 0, {-3}, r"cell 0 belongs to \{-3\}"),
        ("shifts", 2, 5, "free cell 2 has a shift of 5"),
        ("shifts", 1, 4, "cell 1: K was turned to -3"),
    ],
)
def test_check_names_what_is_broken(name, cell, value, broken):
    cells = occupied("12..")
    getattr(cells, name)[cell] = value
    with pytest.raises(AssertionError, match=f"^ring: {broken}"):
        cells.check()


def test_check_names_a_wrong_length_and_a_lost_head():
    cells = occupied("12..")
    cells.head = 4
    with pytest.raises(AssertionError, match=r"^ring: the head is at 4"):
        cells.check()
    cells.shifts.pop()
    with pytest.raises(AssertionError, match=r"^ring: 4 cells, lists of \(4, 4, 3\)"):
        cells.check()


@pytest.mark.parametrize("seed", range(5))
def test_find_slot_finds_what_looking_everywhere_finds(seed):
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choice("0.") for _ in range(rng.randint(1, 12)))
        cells = occupied(text, rng.randrange(len(text)))
        for num_tokens in range(1, len(text) + 1):
            starts = [i for i in range(len(text)) if text[i : i + num_tokens] == "." * num_tokens]
            if not starts:
                with pytest.raises(OutOfCells) as caught:
                    cells.find_slot(num_tokens)
                assert caught.value.free == text.count(".")
                assert caught.value.longest_run == max(map(len, text.split("0")))
            else:
                later = [start for start in starts if start >= cells.head]
                assert cells.find_slot(num_tokens) == min(later or starts)


def test_cells_by_index_wrap_and_need_no_run():
    cells = occupied(".0.0.0.0", head=5)
    assert cells.find_cells(3) == [6, 0, 2]
    with pytest.raises(OutOfCells):
        cells.find_cells(5)


def test_head_follows_what_is_freed():
    cells = occupied("00112233", head=7)
    cells.seq_rm(2)
    assert cells.head == 4
    cells.seq_rm(3)
    assert cells.head == 4


def test_used_max_and_what_attention_reads():
    cells = Cells(100)
    assert (cells.used_max, cells.num_read) == (0, 0)
    cells.place([0, 1], [0, 0])
    assert (cells.used_max, cells.num_read) == (2, PADDING)
    cells.place(list(range(2, 98)), [0] * 96)
    assert (cells.used_max, cells.num_read) == (98, 100)  # padded, but not beyond the last cell


def test_operations_count_what_is_new_or_free_by_them():
    cells = Cells(8)
    cells.place([0, 1, 2], [0, 0, 0])
    assert cells.seq_cp(0, 1, 0, 2) == 2
    assert cells.seq_cp(0, 1) == 1
    assert cells.seq_cp(0, 0) == cells.seq_cp(0, 1) == 0
    assert cells.seq_rm(0, 2) == 0  # the other sequence has it
    assert cells.seq_rm(ALL, 2) == 1
    cells.place([0], [2])


# ── The oracle ────────────────────────────────────────────────────────────────


@pytest.mark.usual(pair="llama", contiguous=True)
@pytest.mark.parametrize("contiguous", [True, False])
def test_every_architecture_and_position(pair, contiguous):
    [prompt] = pair.prompts(40)
    cache = RingCache(pair.lm.config, 64, contiguous=contiguous)
    rows = [cache.append(pair.lm, prompt[:17])]
    rows += [cache.append(pair.lm, [token]) for token in prompt[17:30]]
    rows.append(cache.append(pair.lm, prompt[30:]))
    close(torch.cat(rows), pair.lm.logits(prompt))


@pytest.mark.parametrize(
    "pair", thorough_after(2, [*reversed(ARCHITECTURES), "tinypy"]), indirect=True
)
def test_greedy_tokens_equal_the_oracle_until_the_ring_is_full(pair):
    [prompt] = pair.prompts(20)
    new = generate_with_ring(pair.lm, RingCache(pair.lm.config, 51), prompt, 32)
    assert new == pair.lm.generate_naively(prompt, 32)


def test_moves_are_merged_into_runs():
    assert plan_moves([c == "x" for c in "x..xx...xxx.."]) == [(8, 1, 2), (10, 5, 1)]
    assert plan_moves([c == "x" for c in "xxx...."]) == []
    for number in range(2**10):  # 14059 of llama.cpp: a hole for which no cell was left
        used = [bool(number >> i & 1) for i in range(10)]
        after, data = list(used), [i if x else None for i, x in enumerate(used)]
        for source, target, length in plan_moves(used):
            for i in range(length):
                assert after[source + i] and not after[target + i]
                after[source + i], after[target + i] = False, True
                data[target + i], data[source + i] = data[source + i], None
        assert after == sorted(used, reverse=True)
        assert sorted(i for i in data if i is not None) == [i for i, x in enumerate(used) if x]


# ── Rolling buffers ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("window", [1, 3, 16, 64])
@pytest.mark.parametrize("chunks", [(120,), (50, 1, 1, 1, 30, 37), (1,) * 40])
def test_a_rolling_buffer(llama, ids, window, chunks):
    lm = with_config(llama.lm, window=window)
    cache = RollingCache(lm.config)
    ends = list(itertools.accumulate(chunks))
    rows = [cache.append(lm, ids[end - n : end]) for n, end in zip(chunks, ends, strict=True)]
    close(torch.cat(rows), lm.logits(ids[: ends[-1]]))
    token = 2 * lm.config.num_kv_heads * lm.config.head_dim * 4
    assert cache.num_bytes == lm.config.num_layers * window * token


@pytest.mark.parametrize("windows", [(8, None), (None, 8), (4, 16)])
def test_buffers_of_two_sizes(llama, ids, windows):
    lm = with_windows(llama.lm, *windows)
    cache = RollingCache(lm.config, num_tokens_max=100)
    rows = [cache.append(lm, ids[:60]), *(cache.append(lm, [t]) for t in ids[60:70])]
    close(torch.cat(rows), lm.logits(ids[:70]))
    assert [kv.shape[1] for kv in cache.kv] == [w or 100 for w in windows]


def test_sinks_are_a_shift_by_one_for_each_token(llama, ids):
    lm = llama.lm
    sinks = SinkCache(lm.config, num_sinks=3, window=13)
    rows = torch.cat([sinks.append(lm, ids[:50]), sinks.append(lm, ids[50:90])])
    ring = RingCache(lm.config, 16)
    for position, token in enumerate(ids[:90]):
        if ring.num_free == 0:
            context_shift(ring, n_keep=3, n_discard=1)
        close(ring.append(lm, [token])[0], rows[position], 5e-3)
    assert ring.seq_pos_max(0) == 15


@pytest.mark.parametrize("group, width", [(1, 16), (2, 16), (4, 8), (8, 32)])
def test_self_extend_on_the_ring_equals_two_merged_attentions(llama, ids, group, width):
    lm = llama.lm
    ring = SelfExtendRing(RingCache(lm.config, 128), group, width)
    rows = torch.cat([ring.append(lm, ids[:37]), ring.append(lm, ids[37:])])
    ring.cache.check()
    direct = SelfExtendCache(lm.config, 128, group, width, border="steps").append(lm, ids)
    close(rows, direct, 2e-2)
    if group == 1:
        close(rows, lm.logits(ids))
    else:
        assert ring.cache.seq_pos_max(0) < len(ids) // group + width


@pytest.mark.parametrize("border", ["rolling", "steps"])
def test_self_extend_changes_nothing_among_neighbours(llama, ids, border):
    cache = SelfExtendCache(llama.lm.config, 128, group=4, neighbours=40, border=border)
    close(cache.append(llama.lm, ids[:40]), llama.lm.logits(ids[:40]))
    rest = cache.append(llama.lm, ids[40:])
    assert (rest - llama.lm.logits(ids)[40:]).abs().max() > 0.1


def test_the_papers_grouped_positions():
    """Distances in SelfExtend's figure: W exact, then one more for each `group` tokens."""
    config = dataclasses.replace(_tiny(), windows=(None,))
    cache = SelfExtendCache(config, 64, group=2, neighbours=4)
    queries = torch.tensor([9])
    first_near, grouped = cache.far_positions(queries)
    keys = torch.arange(10)
    distance = torch.where(keys >= first_near, queries - keys, grouped - keys // 2)
    assert distance.tolist() == [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]


def _tiny():
    return minikv.load("tinypy").config


# ── Shifts ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "llama-linear-rope", "qwen3"])
@pytest.mark.parametrize("delta", [1, -7, 100])
def test_a_shifted_key_is_the_key_of_the_new_position(checkpoint, name, delta):
    pair = checkpoint(name)
    lm, [prompt] = pair.lm, pair.prompts(12)
    cache, moved = (RingCache(lm.config, 16) for _ in range(2))
    start = 200
    positions = list(range(start, start + 12))
    cache.decode(lm, prompt, positions, [0] * 12)
    moved.decode(lm, prompt, [p + delta for p in positions], [0] * 12)
    cache.seq_add(0, 0, None, delta)
    assert cache.apply_shifts() == 12
    torch.testing.assert_close(cache.k[:, :12], moved.k[:, :12], rtol=0, atol=2e-3)
    torch.testing.assert_close(cache.v[:, :12], moved.v[:, :12], rtol=0, atol=2e-3)


def test_two_turns_are_one():
    k, frequencies = torch.randn(5, 2, 64), _tiny().inverse_frequencies()
    deltas = torch.tensor([0, 1, -3, 500, 1000])
    twice = turn(turn(k, deltas, frequencies), deltas, frequencies)
    torch.testing.assert_close(twice, turn(k, 2 * deltas, frequencies), rtol=0, atol=1e-5)
    assert torch.equal(turn(k, deltas * 0, frequencies), k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    k, frequencies = torch.randn(4, 2, 64).to(dtype), _tiny().inverse_frequencies()
    deltas = torch.tensor([1, 10, 100, 1000])
    exact = turn(k.float(), deltas, frequencies)
    assert torch.equal(turn(k, deltas, frequencies), exact.to(dtype))


def test_what_stays_after_a_context_shift_is_not_what_the_oracle_computes(tinypy):
    """K and V that stay saw what is gone: the oracle reads only what the ring still holds."""
    ids = tinypy.lm.encode((minikv.__doc__ or "") * 3)[:160]
    cache = RingCache(tinypy.lm.config, 128)
    cache.append(tinypy.lm, ids[:128])
    gone = context_shift(cache, 4)
    ring = cache.append(tinypy.lm, ids[128:])
    oracle = tinypy.lm.logits([*ids[:4], *ids[4 + gone :]])[-32:]
    assert (ring - oracle).abs().max() > 0.05
    assert (ring.argmax(-1) == oracle.argmax(-1)).float().mean() > 0.5


def test_text_without_end_in_constant_memory(tinypy):
    lm = tinypy.lm
    prompt = lm.encode("def fib(n):\n")
    cache = RingCache(lm.config, 32)
    before = cache.num_bytes
    new = generate_with_ring(lm, cache, prompt, 90, n_keep=4)
    assert len(new) == 90 and cache.num_bytes == before
    assert cache.seq_pos_max(0) < 32
    cache.check()
    kept = [cache.positions.index(p) for p in range(4)]
    fresh = RingCache(lm.config, 32)
    fresh.append(lm, prompt)
    torch.testing.assert_close(cache.k[:, kept], fresh.k[:, :4])


def test_the_models_last_position_shifts_too(tinypy):
    lm = with_config(tinypy.lm, max_context=24)
    cache = RingCache(lm.config, 100)
    assert len(generate_with_ring(lm, cache, [1, 2, 3], 60)) == 60
    assert cache.seq_pos_max(0) < 24


def test_sequences_side_by_side_over_one_prompt(tinypy):
    lm = tinypy.lm
    shared = lm.encode("import os\n\n\ndef main():\n")
    tails = [lm.encode(text) for text in ("    return", "    for i in", "    x =")]
    cache = RingCache(lm.config, 128)
    found = generate_in_parallel(lm, cache, shared, tails, 16)
    assert found == [lm.generate_naively(shared + tail, 16) for tail in tails]
    assert cache.num_used == len(shared) + sum(map(len, tails)) + 3 * 15
    cache.check()


def test_sequences_side_by_side_without_end(tinypy):
    lm = tinypy.lm
    shared = lm.encode("import os\n\n\ndef main():\n")
    tails = [lm.encode(text) for text in ("    return", "    for i in", "    x =")]
    cache = RingCache(lm.config, 48)
    found = generate_in_parallel(lm, cache, shared, tails, 50)
    assert [len(tokens) for tokens in found] == [50] * 3
    cache.check()
    assert cache.cells_of(0, 0, len(shared)) == cache.cells_of(1, 0, len(shared))


def test_a_short_sequence_beside_a_long_one_in_a_full_ring(tinypy):
    lm = tinypy.lm
    cache = RingCache(lm.config, 40)
    found = generate_in_parallel(lm, cache, [1, 2, 3], [[4], list(range(5, 40))], 50)
    assert [len(tokens) for tokens in found] == [50, 50]
    cache.check()


def test_a_prompt_for_which_the_ring_is_defragmented(tinypy):
    lm = tinypy.lm
    cache = RingCache(lm.config, 32)
    for i in range(8):
        cache.append(lm, [i + 1, i + 2], seq=i % 2)
    cache.seq_rm(0)
    new = generate_with_ring(lm, cache, list(range(20)), 5, seq=3)
    assert new == lm.generate_naively(list(range(20)), 5)


def test_a_second_sequence_generates_beside_a_first(tinypy):
    """The ring is full with the first one's tokens still in it; only the second is shifted."""
    lm = tinypy.lm
    cache = RingCache(lm.config, 32)
    cache.append(lm, list(range(20)), seq=0)
    assert len(generate_with_ring(lm, cache, [1, 2, 3], 40, n_keep=2, seq=1)) == 40
    cache.seq_rm(1)
    close(cache.append(lm, [7], 0), lm.logits([*range(20), 7])[20:])


def test_failing_in_parallel_leaves_the_ring_empty(tinypy):
    cache = RingCache(tinypy.lm.config, 32)
    with pytest.raises(ValueError, match="token id"):
        generate_in_parallel(tinypy.lm, cache, [1, 2], [[3], [2048]], 4)
    assert cache.num_used == 0
    cache.check()


def test_a_longer_table_changes_no_position_that_was_there(tinypy):
    longer = with_config(tinypy.lm, max_context=4096)
    assert torch.equal(longer.transformer.rope_table[:1024], tinypy.lm.transformer.rope_table)
    assert tinypy.lm.config.max_context == 1024


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 0.05), (torch.bfloat16, 0.5)])
def test_k_and_v_in_half_precision(tinypy, dtype, tolerance):
    lm, ids = tinypy.lm, tinypy.lm.encode("import os\nimport sys\n\n\ndef main(args):\n    return")
    cache = RingCache(lm.config, 32, dtype=dtype)
    assert cache.num_bytes == 32 * lm.config.kv_bytes_per_token(dtype)
    cache.append(lm, ids[:10])
    cache.seq_add(0, 0, None, 500)
    assert (cache.append(lm, ids[10:]) - lm.logits(ids)[10:]).abs().max() < tolerance


# ── Bad arguments ─────────────────────────────────────────────────────────────


def snapshot(cache):
    owners = [set(owners) for owners in cache.sequences]
    return cache.positions[:], owners, cache.shifts[:], cache.head, cache.k.clone()


BAD = {
    "unknown sequence": (lambda c, lm: c.seq_rm(7), "seq: 7 owns no cell.*: 0, 1"),
    "all to copy": (lambda c, lm: c.seq_cp(ALL, 2), "seq: must be an int of at least 0"),
    "copy to all": (lambda c, lm: c.seq_cp(0, ALL), "dst: must be an int of at least 0"),
    "copy onto others": (lambda c, lm: c.seq_cp(0, 1, 5), r"dst: .*positions \[5"),
    "reversed range": (lambda c, lm: c.seq_rm(0, 5, 4), "p1: must be an int of at least 5"),
    "negative range": (lambda c, lm: c.seq_add(0, -1, None, 1), "p0: must be"),
    "below zero": (lambda c, lm: c.seq_add(1, 5, None, -6), "delta: position 5 would become -1"),
    "onto a token": (lambda c, lm: c.seq_add(1, 6, None, -1), "p0: position 6 would become 5"),
    "shared": (lambda c, lm: c.seq_add(0, 0, 2, 1), r"seq: position 0 .* \[1\].*seq=-1"),
    "divide by zero": (lambda c, lm: c.seq_div(0, 0, None, 0), "d: must be an int of at least 1"),
    "more than cells": (lambda c, lm: c.find_slot(17), "num_tokens: .*from 1 to 16, was 17"),
    "prompt": (lambda c, lm: generate_with_ring(lm, c, [1] * 17, 2, seq=2), "prompt_ids: .*17"),
    "n_keep": (lambda c, lm: generate_with_ring(lm, c, [1], 2, n_keep=15, seq=2), "n_keep: "),
    "shared n_keep": (
        lambda c, lm: generate_with_ring(lm, c, [1], 9, seq=0), "n_keep: must be at least 5"),
    "drop all": (lambda c, lm: c.drop(ALL, 0, 2), "seq: must be an int of at least 0"),
    "n_keep to shift": (lambda c, lm: context_shift(c, 99), "n_keep: 99 of 10 positions"),
    "n_discard": (lambda c, lm: context_shift(c, 5, 0, 9), "n_discard: must be"),
    "shift what is shared": (lambda c, lm: context_shift(c, 0, 0, 2), "seq: position 2"),
    "taken": (lambda c, lm: c.decode(lm, [1], [3], [0]), "positions: sequence 0 has a token at 3"),
    "twice": (lambda c, lm: c.decode(lm, [1, 1], [30, 30], [0, 0]), "positions: sequence 0 has"),
    "negative position": (lambda c, lm: c.decode(lm, [1], [-1], [0]), "positions: a position"),
    "no context": (lambda c, lm: c.decode(lm, [1], [512], [0]), "positions: 512 is beyond"),
    "lengths": (lambda c, lm: c.decode(lm, [1], [30, 31], [0, 0]), "positions: 2 for 1"),
    "no tokens": (lambda c, lm: c.append(lm, []), "positions: 0 for 0"),
    "sequence below 0": (lambda c, lm: c.decode(lm, [1], [30], [-2]), "seqs: a sequence"),
    "two sequences": (
        lambda c, lm: c.decode(lm, [1], [30], [[0, 1]]), "seqs: a sequence.*seq_cp.*was .0, 1"),
    "a sequence of no kind": (lambda c, lm: c.decode(lm, [1], [30], [{}]), "seqs: a sequence"),
    "token": (lambda c, lm: c.decode(lm, [300], [30], [0]), "token_ids: a token id"),
    "cells": (lambda c, lm: RingCache(lm.config, 0), "num_cells: must be"),
    "no limit": (lambda c, lm: RollingCache(lm.config), "num_tokens_max: must be given"),
    "group": (lambda c, lm: SelfExtendCache(lm.config, 9, 4, 10), "neighbours: .*multiple.*4"),
    "used": (lambda c, lm: SelfExtendRing(c, 2, 8), "seq: 0 must be empty"),
    "parallel": (lambda c, lm: generate_in_parallel(lm, c, [1], [[1]], 1), "cache: has 15 used"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_say_what_and_change_nothing(llama, ids, name):
    call, message = BAD[name]
    cache = RingCache(llama.lm.config, 16)
    cache.append(llama.lm, ids[:10])
    cache.seq_cp(0, 1, 0, 5)
    cache.append(llama.lm, ids[10:15], seq=1)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        call(cache, llama.lm)
    for found, expected in zip(snapshot(cache), before, strict=True):
        assert torch.equal(found, expected) if torch.is_tensor(found) else found == expected


def test_a_query_without_keys_is_not_asked():
    """Each new token has a cell, so it sees at least itself."""
    out = masked_attention(*(torch.randn(1, 2, 4) for _ in range(3)), torch.tensor([[True]]))
    assert out.isfinite().all()
