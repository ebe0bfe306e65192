"""Engines with tiers: the same tokens as without, whatever is evicted, fetched, swapped or lost."""

from functools import partial
from itertools import pairwise

import pytest
from helpers import assert_empty, assert_kv, drain, generate, naive_kv, naively, small, step
from tiers_case import PROMPT, TINY, SlowTier, engine_over, fill, params

from minikv import BlockPool, Engine, RadixCache, Scheduler
from minikv.tiers.costs import Link, Prefill

# ── What comes back is what went ──────────────────────────────────────────────


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_evicted_prefix_comes_back_as_it_was(engine_of, llama, tmp_path, on_disk):
    more = dict(host_blocks=4, disk_path=tmp_path) if on_disk else dict(host_blocks=64)
    engine = engine_of(**TINY, **more)
    first = generate(engine, [PROMPT], params())[0].token_ids
    assert first == naively(llama.lm, PROMPT, 4)
    fill(engine)
    tiers = engine.tiers.where(PROMPT)
    assert "device" not in tiers and tiers[:6] == ["disk" if on_disk else "host"] * 6
    before = engine.stats()
    request = engine.add_request(PROMPT, params())
    sequence = engine.scheduler.waiting[0]
    while sequence.table is None:
        step(engine)
    assert sequence.num_cached == 32
    assert_kv(engine.store, sequence.table.block_ids[:8], naive_kv(llama.lm, PROMPT)[:, :32])
    assert drain(engine)[request].token_ids == first
    after = engine.stats()
    assert after.computed_tokens - before.computed_tokens == 1 + 3
    assert after.hit_tokens - before.hit_tokens == 32
    slowest = after.tiers["disk" if on_disk else "host"]
    assert slowest.hits >= 8 and slowest.bytes_out >= 8 * engine.tiers.block_bytes
    assert_empty(engine)


def test_nothing_is_copied_twice(engine_of):
    """A block that was brought back is on the host still: evicted again, it only goes."""
    engine = engine_of(**TINY, host_blocks=200)
    generate(engine, [PROMPT], params(1))
    fill(engine)
    generate(engine, [PROMPT], params(1))
    written = engine.stats().tiers["host"].bytes_in
    new = sum(name not in engine.tiers.host for name in engine.tiers.names.values())
    engine.cache.evict(engine.cache.num_cached_blocks)
    assert new < 12
    assert engine.stats().tiers["host"].bytes_in == written + new * engine.tiers.block_bytes
    assert engine.tiers.where(PROMPT) == ["host"] * 8


def test_another_process_finds_what_was_flushed(engine_of, llama, other_lm, tmp_path):
    engine = engine_of(**TINY, host_blocks=4, disk_path=tmp_path)
    generate(engine, [PROMPT], params())
    engine.tiers.flush()
    engine.tiers.disk.close()
    again = engine_of(num_blocks=64, host_blocks=16, disk_path=tmp_path)
    assert again.tiers.where(PROMPT) == ["disk"] * 8
    [out] = generate(again, [PROMPT], params())
    assert out.token_ids == naively(llama.lm, PROMPT, 4)
    assert again.stats().computed_tokens == 1 + 3
    assert (
        engine_of(host_blocks=4, disk_path=tmp_path, block_size=8).tiers.where(PROMPT) == [""] * 4
    )
    foreign = engine_of(other_lm, host_blocks=4, disk_path=tmp_path)
    assert foreign.tiers.where(PROMPT) == [""] * 8
    [out] = generate(foreign, [PROMPT], params())
    assert out.token_ids == naively(other_lm, PROMPT, 4)
    assert foreign.stats().tiers["disk"].hits == 0


def test_salts_do_not_meet_below_the_device(engine_of):
    engine = engine_of(**TINY, host_blocks=64)
    generate(engine, [PROMPT], params(cache_salt="a"))
    fill(engine)
    assert engine.tiers.where(PROMPT, "a")[:6] == ["host"] * 6
    assert engine.tiers.where(PROMPT, "b") == engine.tiers.where(PROMPT) == [""] * 8
    generate(engine, [PROMPT], params(cache_salt="b"))
    assert engine.stats().tiers["host"].hits == 0
    generate(engine, [PROMPT], params(cache_salt="a"))
    assert engine.stats().tiers["host"].hits > 0


def test_a_salt_without_a_spelling_stays_on_the_device(engine_of):
    engine, salt = engine_of(**TINY, host_blocks=64), frozenset([1])
    generate(engine, [PROMPT], params(cache_salt=salt))
    generate(engine, [PROMPT], params(cache_salt=salt))
    assert engine.stats().hit_tokens == 32
    engine.cache.evict(12)
    assert engine.tiers.host.num_named == 0


def test_new_weights_never_meet_old_blocks(engine_of, llama, other_lm, other_state, tmp_path):
    engine = engine_of(**TINY, host_blocks=16, disk_path=tmp_path)
    generate(engine, [PROMPT], params())
    fill(engine)
    engine.update_weights(other_state)
    assert engine.tiers.where(PROMPT) == [""] * 8
    [out] = generate(engine, [PROMPT], params())
    assert out.token_ids == naively(other_lm, PROMPT, 4)
    engine.update_weights(llama.hf.state_dict())
    assert "disk" in engine.tiers.where(PROMPT), "the disk keeps what is named by its weights"
    [out] = generate(engine, [PROMPT], params())
    assert out.token_ids == naively(llama.lm, PROMPT, 4)


def test_clear_forgets_the_host_too(engine_of):
    engine = engine_of(**TINY, host_blocks=64)
    generate(engine, [PROMPT], params())
    fill(engine)
    engine.cache.clear()
    assert engine.tiers.where(PROMPT) == [""] * 8 and engine.tiers.host.num_named == 0
    engine.check()


def test_a_short_hit_is_not_fetched(engine_of):
    engine = engine_of(**TINY, host_blocks=64, min_prefix_tokens=33)
    generate(engine, [PROMPT], params())
    fill(engine)
    generate(engine, [PROMPT], params())
    assert engine.stats().tiers["host"].hits == 0


def test_write_through_has_everything_below_at_once(engine_of, tmp_path):
    engine = engine_of(host_blocks=64, disk_path=tmp_path, write_through=True)
    generate(engine, [PROMPT], params(1))
    assert engine.tiers.disk.wait()
    engine.cache.evict(1)
    assert engine.stats().tiers["host"].bytes_in == 8 * engine.tiers.block_bytes
    assert engine.stats().tiers["disk"].blocks == 8


# ── While it comes back ───────────────────────────────────────────────────────


@pytest.fixture(params=[("disk", "go"), ("store", "go"), ("store", "tell")], ids="-".join)
def late(request, engine_of, tmp_path):
    """Engines over one tier that has `PROMPT`'s blocks and is late: with these, or with its answer
    whether it has them. Gives what makes an engine, the tier, the event that it waits for, and what
    another engine has written."""
    (below, event), tier = request.param, SlowTier()
    make = partial(engine_over, engine_of, tier, tmp_path, below)
    writer = make(**({} if below == "store" else dict(host_blocks=4, write_through=True)))
    [first] = generate(writer, [PROMPT], params())
    writer.tiers.flush()
    assert len(tier.entries) == 9

    def reader(**config):
        return make(**({} if below == "store" else dict(host_blocks=16)), **config)

    getattr(tier, event).clear()
    yield reader, tier, getattr(tier, event), first
    getattr(tier, event).set()


def fetched(engine):
    return sum(tier.hits for name, tier in engine.stats().tiers.items() if name != "host")


def test_others_run_while_a_prefix_is_fetched(late):
    make, _, event, first = late
    engine, outputs = make(), {}
    returning = engine.add_request(PROMPT, params())
    other = engine.add_request([7, 8, 9], params(6))
    for _ in range(6):
        step(engine, outputs)
    assert outputs[other].finish_reason == "length" and returning not in outputs
    assert [s.request.request_id for s in engine.scheduler.waiting] == [returning]
    event.set()
    assert drain(engine, outputs)[returning].token_ids == first.token_ids
    assert fetched(engine) == 8


def test_a_sequence_whose_seat_is_taken_keeps_what_came(late):
    make, _, event, _ = late
    engine, outputs = make(max_num_seqs=1), {}
    returning = engine.add_request(PROMPT, params())
    engine.add_request([7, 8, 9], params(6))
    for _ in range(3):  # the second request runs in the only seat
        step(engine, outputs)
    event.set()
    drain(engine, outputs)
    assert outputs[returning].finish_reason == "length"
    assert fetched(engine) == 8
    for name, tier in engine.stats().tiers.items():
        assert name == "host" or tier.bytes_out < 9 * (engine.tiers.block_bytes + 200), "once"


def test_what_is_late_is_not_waited_for(late):
    """The clock goes on as soon as it is asked for."""
    make, tier, event, first = late
    engine = make()
    engine.tiers.clock = tier.late(event)
    assert generate(engine, [PROMPT], params())[0].token_ids == first.token_ids
    assert fetched(engine) == 0 and event in tier.awaited and not tier.has_given_up


def test_an_aborted_request_leaves_its_fetch_behind(late):
    make, _, event, _ = late
    engine = make()
    engine.add_request([5, 6], params(9))
    returning = engine.add_request(PROMPT, params())
    step(engine)
    engine.abort(returning)
    event.set()
    drain(engine)
    assert_empty(engine)


def test_what_is_slower_to_fetch_is_computed(engine_of):
    engine = engine_of(**TINY, host_blocks=64)
    generate(engine, [PROMPT], params())
    fill(engine)
    engine.tiers.rates = lambda: ({"host": Link(0, 1)}, Prefill(0, 1e6))
    generate(engine, [PROMPT], params())
    assert engine.stats().tiers["host"].hits == 0
    engine.tiers.rates = lambda: ({"host": Link(0, 1e9)}, Prefill(0, 1e3))
    fill(engine)
    generate(engine, [PROMPT], params())
    assert engine.stats().tiers["host"].hits > 0


def test_a_step_copies_no_more_than_it_may_compute(engine_of, monkeypatch):
    engine = engine_of(num_blocks=24, max_num_seqs=3, max_batch_tokens=12, host_blocks=64)
    generate(engine, [PROMPT], params())
    fill(engine, 8)
    before = engine.stats().tiers["host"].hits
    engine.add_request([5, 6], params(20))
    step(engine)
    engine.add_request(PROMPT, params())
    hits = [before]
    for _ in range(3):
        step(engine)
        hits.append(engine.stats().tiers["host"].hits)
    assert [after - one for one, after in pairwise(hits)] == [3, 3, 2]
    drain(engine)


def test_making_room_does_not_push_out_what_comes_back(engine_of):
    """The host has room for the prefix alone: demoting other blocks would evict it."""
    engine = engine_of(num_blocks=10, max_num_seqs=2, max_batch_tokens=64, host_blocks=8)
    [first] = generate(engine, [PROMPT], params(1))
    engine.cache.evict(9)
    assert engine.tiers.where(PROMPT) == ["host"] * 8
    generate(engine, [list(range(100, 133))], params(1))
    assert engine.tiers.where(PROMPT) == ["host"] * 8 and engine.pool.num_free == 2
    assert generate(engine, [PROMPT], params(1))[0].token_ids == first.token_ids
    assert engine.stats().tiers["host"].hits == 8


# ── A reader's own parts ──────────────────────────────────────────────────────


@pytest.mark.parametrize("as_classes", [True, False])
def test_parts_from_outside_are_joined(llama, as_classes):
    """Of any class, and also those that a function makes."""
    config = small(**TINY, host_blocks=64, attention="torch")
    kinds = dict(block_pool=BlockPool, prefix_cache=RadixCache, scheduler=Scheduler)
    own = {name: type("Own", (kind,), {}) for name, kind in kinds.items()}
    parts = own if as_classes else {name: partial(one) for name, one in own.items()}
    engine = Engine(llama.lm, config, **parts)
    assert [type(part) for part in (engine.pool, engine.cache, engine.scheduler)] == [*own.values()]
    generate(engine, [PROMPT], params())
    fill(engine)
    generate(engine, [PROMPT], params())
    assert engine.stats().tiers["host"].hits > 0


def test_without_tiers_there_is_nothing(engine_of):
    engine = engine_of()
    assert engine.tiers is None and engine.stats().tiers == {}
    assert type(engine.cache) is RadixCache and type(engine.scheduler) is Scheduler
    swap = engine_of(preemption="swap", host_blocks=4, prefix_cache=False)
    assert swap.tiers is None and swap.scheduler.host_pool.num_free == 4
