"""Large blocks below the device: the same tokens, fewer entries, a pool that keeps its counts."""

import random
from collections import Counter

import pytest
from helpers import assert_empty, generate, greedy_tokens
from tiers_case import PROMPT, TINY, damaged, documents_of, fill, params, prompts_of

from minikv import EngineConfig
from minikv.errors import OutOfBlocks
from minikv.tiers.costs import Link, Prefill
from minikv.tiers.large import large_name
from minikv.tiers.runs import RunPool

FAST = lambda: ({"host": Link(0, 1e9), "disk": Link(0, 1e9)}, Prefill(0, 1e-3))  # noqa: E731

# ── The pool ──────────────────────────────────────────────────────────────────


def names_of(*numbers):
    return [number.to_bytes(32, "big") for number in numbers]


def test_a_run_lies_together_and_leaves_together():
    left = []
    pool = RunPool(8, 4, lambda block_id, name: left.append((block_id, pool.run_of(block_id))))
    assert pool.add_run(names_of(1, 2, 3, 4)) == 0 and pool.num_free == 8
    assert [pool.find(name) for name in names_of(1, 2, 3, 4, 5)] == [0, 1, 2, 3, None]
    assert pool.run_of(2) == names_of(1, 2, 3, 4) and pool.run_of(4) is None
    held = [pool.allocate() for _ in range(4)]
    assert sorted(held) == [4, 5, 6, 7], "small blocks come from a group of their own"
    pool.acquire(2)
    assert pool.num_free == 0 and pool.add_run(names_of(5, 6, 7, 8)) is None
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.release(2)
    assert pool.add_run(names_of(5, 6, 7, 8)) == 0 and left == [(0, names_of(1, 2, 3, 4))]
    assert pool.allocate() in range(4) and left[1] == (0, names_of(5, 6, 7, 8))
    pool.check()


def test_room_for_a_run_is_made_in_the_group_used_longest_ago():
    left = []
    pool = RunPool(9, 3, lambda block_id, name: left.append(name))
    for number in range(9):
        block_id = pool.allocate()
        pool.remember(block_id, names_of(number)[0])
        pool.release(block_id)
    oldest = pool.find(names_of(0)[0])
    for number in range(9):
        if pool.find(names_of(number)[0]) // 3 == oldest // 3:
            pool.touch(names_of(number)[0])
    first = pool.add_run(names_of(20, 21, 22))
    assert first // 3 != oldest // 3 and len(left) == 3
    assert pool.add_run(names_of(20, 31, 32)) is None, "one of the names is another run's"
    [kept] = [n for n in range(9) if pool.find(names_of(n)[0]) == oldest]
    assert pool.add_run(names_of(kept, 41, 42)) is not None
    assert pool.find(names_of(kept)[0]) % 3 == 0, "the small block gave its name up"
    pool.check()


@pytest.mark.parametrize("seed", range(8))
def test_long_random_use_of_the_pool(seed):
    """Against a dictionary that knows what was written where: no block is given out while it is
    held or promised, and what a name finds is what was written under it."""
    rng = random.Random(seed)
    length = rng.choice([2, 3, 4])
    memory, happened = {}, Counter()
    pool = RunPool(rng.randint(length, 30), length, lambda block_id, name: leaves(block_id, name))

    def leaves(block_id, name):
        names = pool.run_of(block_id) or [name]
        assert [memory[one] for one in range(block_id, block_id + len(names))] == names
        happened["left"] += len(names)

    held: list[tuple[int, bytes | None]] = []  # what each holder expects to find there
    for turn in range(600):
        action = rng.choice(["allocate", "run", "acquire", "release", "touch", "forget", "plan"])
        if action == "allocate" and pool.num_free:
            block_id = pool.allocate()
            assert block_id not in [one for one, _ in held]
            memory[block_id] = name = names_of(1000 + turn)[0]
            if rng.random() < 0.6:
                name = names_of(rng.randrange(60))[0]
                if name not in pool:
                    pool.remember(block_id, name)
                    memory[block_id] = name
            held.append((block_id, memory[block_id]))
        elif action == "run":
            start = rng.randrange(0, 60 - length)
            names = names_of(*range(start, start + length))
            first = pool.add_run(names)
            if first is not None:
                assert first % length == 0 and pool.run_of(first) == names
                assert not {one for one, _ in held} & set(range(first, first + length))
                memory |= dict(enumerate(names, first))
                happened["run"] += 1
        elif action == "acquire":
            name = names_of(rng.randrange(60))[0]
            block_id = pool.find(name)
            if block_id is not None:
                pool.acquire(block_id)
                held.append((block_id, name))
        elif action == "release" and held:
            for _ in range(rng.randint(1, 4)):
                if held:
                    pool.release(held.pop(rng.randrange(len(held)))[0])
        elif action == "touch":
            name = names_of(rng.randrange(60))[0]
            if name in pool:
                pool.touch(name)
        elif action == "forget" and rng.random() < 0.03:
            pool.forget_all()
            happened["forget"] += 1
        elif action == "plan":
            with pool.plan():
                if held:
                    pool.release(held.pop()[0])
                pool.check()
        pool.check()
        assert all(memory[block_id] == name for block_id, name in held)
        assert all(memory[block_id] == name for name, block_id in pool)
    for block_id, _ in held:
        pool.release(block_id)
    pool.check()
    assert pool.num_free == pool.num_blocks and happened["run"] > 3 and happened["left"] > 3


# ── The engine ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_large_block_comes_back_as_it_was(engine_of, llama, tmp_path, on_disk):
    """8 blocks and one token, 3 per large one: two large blocks, and an edge of two small ones."""
    more = dict(host_blocks=6, disk_path=tmp_path) if on_disk else dict(host_blocks=90)
    engine = engine_of(**TINY, **more, blocks_per_large=3)
    engine.tiers.rates = FAST
    [first] = generate(engine, [PROMPT], params(1))
    assert first.token_ids == greedy_tokens(llama.lm, PROMPT, 1)
    engine.cache.evict(1)  # the last block of the edge
    assert [len(tiers) for tiers in engine.tiers.everywhere(PROMPT)] == [1] * 8
    engine.cache.evict(2)  # the other one, and the end of the second large block
    assert engine.tiers.everywhere(PROMPT)[3:6] == [["device", "host"]] * 2 + [["host"]]
    written = engine.stats().tiers["host"].bytes_in
    assert written == 5 * engine.tiers.block_bytes
    engine.cache.evict(2)
    assert engine.stats().tiers["host"].bytes_in == written, "it went down as one"
    fill(engine, 6)
    if on_disk:
        engine.tiers.disk.wait()
        assert engine.tiers.where(PROMPT) == ["disk"] * 8
    before = engine.stats()
    [again] = generate(engine, [PROMPT], params(1))
    assert again.token_ids == first.token_ids
    after = engine.stats()
    assert after.hit_tokens - before.hit_tokens == 32
    assert after.tiers["disk" if on_disk else "host"].hits >= 8
    assert_empty(engine)


def test_the_disk_has_one_entry_per_large_block(engine_of, llama, tmp_path):
    engine = engine_of(num_blocks=64, host_blocks=8, disk_path=tmp_path, blocks_per_large=4)
    generate(engine, [PROMPT], params(1))
    engine.tiers.flush()
    assert engine.stats().tiers["disk"].blocks == 2
    engine.tiers.disk.close()
    again = engine_of(num_blocks=64, host_blocks=8, disk_path=tmp_path, blocks_per_large=4)
    again.tiers.rates = FAST
    assert again.tiers.where(PROMPT) == ["disk"] * 8
    assert again.tiers.where(PROMPT[:23]) == ["disk"] * 4 + [""], "all of it, or nothing"
    [out] = generate(again, [PROMPT], params())
    assert out.token_ids == greedy_tokens(llama.lm, PROMPT, 4)
    assert again.stats().computed_tokens == 1 + 3 and again.stats().tiers["disk"].hits == 8
    assert again.tiers.where(PROMPT[:23]) == ["device"] * 5
    again.cache.evict(64)
    assert again.tiers.where(PROMPT[:23]) == ["host"] * 5, "on the host a part can be read"
    other = engine_of(num_blocks=64, host_blocks=8, disk_path=tmp_path, blocks_per_large=2)
    assert other.tiers.where(PROMPT) == [""] * 8


def test_where_prefixes_branch_blocks_stay_small(engine_of, tmp_path):
    engine = engine_of(num_blocks=64, host_blocks=60, disk_path=tmp_path, blocks_per_large=4)
    other = PROMPT[:24] + [200] * 9  # they part after six blocks, in the second large one
    generate(engine, [PROMPT], params(1))
    assert len(engine.tiers.chunks) == 8
    generate(engine, [other], params(1))
    assert len(engine.tiers.chunks) == 4
    engine.tiers.flush()
    assert engine.stats().tiers["disk"].blocks == 1 + 2 + 2 + 2
    engine.tiers.host.forget_all()
    engine.cache.evict(64)
    third = PROMPT[:24] + [201] * 9
    engine.tiers.host.forget_all()
    assert engine.tiers.where(third) == ["disk"] * 6 + ["", ""]


def test_a_turn_that_completes_a_large_block(engine_of):
    """Its beginning lies on the host in small blocks; afterwards there is one copy, in a run."""
    engine = engine_of(num_blocks=64, host_blocks=16, blocks_per_large=4)
    [out] = generate(engine, [PROMPT[:27]], params(1))
    engine.cache.evict(64)
    host = engine.tiers.host
    assert host.num_named == 6 and len(engine.tiers.chunks) == 0
    longer = [*PROMPT[:27], *out.token_ids, *range(50, 60)]
    generate(engine, [longer], params(1))
    assert len(engine.tiers.chunks) == 8
    engine.cache.evict(64)
    assert host.num_named == 9 and host.num_free == 16
    runs = {block_id // 4 for _, block_id in host if host.run_of(block_id)}
    assert len(runs) == 2
    engine.check()


def test_write_through_writes_whole_large_blocks(engine_of, tmp_path):
    engine = engine_of(host_blocks=64, disk_path=tmp_path, write_through=True, blocks_per_large=3)
    generate(engine, [PROMPT], params(1))
    engine.tiers.disk.wait()
    assert engine.stats().tiers["host"].bytes_in == 6 * engine.tiers.block_bytes
    assert engine.stats().tiers["disk"].blocks == 2
    engine.cache.evict(8)
    assert engine.tiers.where(PROMPT) == ["host"] * 8


def test_without_room_for_a_run_small_blocks_go_down(engine_of, llama):
    engine = engine_of(num_blocks=30, host_blocks=5, blocks_per_large=4)
    [first] = generate(engine, [PROMPT], params(1))
    held = [engine.tiers.host.allocate() for _ in range(2)]  # one of each group
    engine.cache.evict(3)
    assert engine.tiers.host.num_named == 3 and engine.tiers.host.num_free == 3
    for block_id in held:
        engine.tiers.host.release(block_id)
    assert generate(engine, [PROMPT], params(1))[0].token_ids == first.token_ids


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantised_large_blocks(engine_of, tmp_path, kv_dtype):
    plain = engine_of(num_blocks=200, kv_dtype=kv_dtype)
    engine = engine_of(
        **TINY, host_blocks=9, disk_path=tmp_path, kv_dtype=kv_dtype, blocks_per_large=3
    )
    engine.tiers.rates = FAST
    rng = random.Random(0)
    documents = documents_of(rng)
    for _ in range(4):
        prompts = prompts_of(rng, documents, 5)
        expected = [out.token_ids for out in generate(plain, prompts, params())]
        assert [out.token_ids for out in generate(engine, prompts, params())] == expected
    assert engine.stats().tiers["disk"].hits > 0


def test_damaged_large_entries_are_misses(engine_of, llama, tmp_path):
    engine = engine_of(num_blocks=64, host_blocks=8, disk_path=tmp_path, blocks_per_large=4)
    [first] = generate(engine, [PROMPT], params())
    engine.tiers.flush()
    tiers, rng = engine.tiers, random.Random(1)
    tiers.rates = FAST
    last = tiers.names[next(iter(tiers.chunks.values()))[-1]]
    name = large_name(last, 4)
    [good] = tiers.disk.tier.get_many([name])
    unpack, length = tiers._unpacker(), 4 * tiers.block_bytes
    assert len(unpack(good, name=name)) == length
    for _ in range(300):
        bad = damaged(rng, good)
        if bad != good:
            with pytest.raises(ValueError):
                unpack(bad, name=name)
    tiers.disk.tier.put_many({name: damaged(random.Random(3), good)})
    engine.cache.evict(64)
    tiers.host.forget_all()
    assert generate(engine, [PROMPT], params())[0].token_ids == first.token_ids
    assert engine.stats().tiers["disk"].dropped == 1


@pytest.mark.parametrize("bad", [
    dict(blocks_per_large=4), dict(blocks_per_large=4, host_blocks=3),
    dict(blocks_per_large=4, host_blocks=8, prefix_cache=False),
])  # fmt: skip
def test_bad_settings(engine_of, bad):
    with pytest.raises(ValueError, match=r"blocks_per_large|host_blocks"):
        engine_of(**bad)


def test_without_the_option_nothing_changes(engine_of):
    assert EngineConfig().blocks_per_large == 1
    engine = engine_of(host_blocks=8, blocks_per_large=1)
    assert type(engine.tiers).__name__ == "Tiers" and not isinstance(engine.tiers.host, RunPool)
