"""KV groups: layers with a window give back what no later query sees, and no token changes."""

import dataclasses
import random
from collections import Counter

import pytest
import torch
from helpers import ALTERNATING, assert_empty, meet, small, with_windows
from hypothesis import strategies as st
from thorough import thorough_after

from minikv import BlockPool, Engine, EngineConfig, OutOfBlocks, SamplingParams
from minikv.checkpoint import BUNDLED, load, read_weights
from minikv.groups import GroupCache, GroupedStore, GroupPool, GroupTable, layout_of
from minikv.oracle import generate_naively
from minikv.serving.metrics import GAUGES
from minikv.tiers import put_prefix, save_session


def store_of(config, windows, num_blocks, block_size):
    config = dataclasses.replace(config, num_layers=len(windows), windows=windows)
    return GroupedStore(config, num_blocks, block_size, "cpu", torch.float32)


# ── Which layers ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("windows", "groups", "num_full"),
    [
        ((8, 8, 8, 8, None), ((4,), (0,), (1,), (2,), (3,)), 1),
        ((8, None, 8, None), ((1, 3), (0, 2)), 1),
        ((8, 8, 8, 8, 8, None) * 2, ((5, 11), (0, 1), (2, 3), (4, 6), (7, 8), (9, 10)), 1),
        ((8, 8), ((0, 1),), 0),
    ],
)
def test_groups_have_the_same_number_of_layers(llama, windows, groups, num_full):
    layout = layout_of(dataclasses.replace(llama.lm.config, windows=windows))
    assert (layout.groups, layout.num_full, layout.window) == (groups, num_full, 8)
    assert [layout.window_of(i) for i in range(len(groups))].count(None) == num_full


@pytest.mark.parametrize("windows", [(None, None), (8, 4), (8, 4096)])
def test_one_group_is_all_that_helps(llama, windows):
    config = dataclasses.replace(llama.lm.config, windows=windows)
    assert layout_of(config) is None
    with pytest.raises(ValueError, match="one group"):
        GroupedStore(config, 4, 4, "cpu", torch.float32)


# ── Blocks whose parts come and go ────────────────────────────────────────────


MET = Counter()
WINDOWS = [(None, 5), (5, 5, 5, 5, None), (5, 5)]


FLOORS = {"prefixes": 5, "forks": 15, "replaced": 2, "evicted": 20, "full": 30}  # of 60 examples


@pytest.mark.parametrize("examples", thorough_after(1, [30, 60]))
def test_tables_keep_what_a_query_sees(llama, examples):
    least = {name: max(1, count * examples // 60) for name, count in FLOORS.items()}
    meet(
        MET, least, examples, assert_tables_keep, llama,
        windows=st.sampled_from(WINDOWS), block_size=st.integers(1, 7), ahead=st.integers(0, 3),
        chunk=st.sampled_from([1, 4, 30]), seed=st.integers(0, 2**20),
    )  # fmt: skip


def assert_tables_keep(llama, windows, block_size, ahead, chunk, seed):
    """Sequences that begin with a prefix of others, are computed in chunks, fork, draft, shrink and
    leave at random. Most have the same text. Each token's mark, in every group, is where the table
    says for as long as a query may look at it."""
    rng = random.Random(seed)
    store = store_of(llama.lm.config, windows, 12, block_size)
    layout, marks = store.layout, {}  # (group, part, offset): the tokens up to the one there
    pool = GroupPool(store, ahead, chunk)
    cache = GroupCache(pool, block_size)
    live, released = [], []  # (table, tokens that were computed); tables

    def text(count):
        return rng.choices((0, 1), (9, 1), k=count)

    def make_writable(table, position):
        _, copied = table.writable_slot(position)
        for group, (source, target) in enumerate(store.copies.pop(copied, ())):
            for offset in range(block_size):
                marks[group, target, offset] = marks.get((group, source, offset))

    def write(table, tokens, count):
        """All of a chunk is written before its first query looks."""
        start = len(tokens)
        make_writable(table, start)
        for token in text(count):
            index, offset = divmod(len(tokens), block_size)
            tokens.append(token)
            for group in range(len(layout.groups)):
                part = pool.part_of[group, table.block_ids[index]]
                marks[group, part, offset] = tuple(tokens)
        look(table, tokens, start)

    def look(table, tokens, query):
        """A query reads all that it may see."""
        for group in range(len(layout.groups)):
            window = layout.window_of(group)
            first = 0 if window is None else max(query - window + 1, 0)
            for position in range(first, len(tokens)):
                index, offset = divmod(position, block_size)
                part = pool.part_of[group, table.block_ids[index]]
                assert part >= 0, f"group {group} has lost position {position} of {len(tokens)}"
                assert marks[group, part, offset] == tuple(tokens[: position + 1])

    def leave():
        table, _ = live.pop(rng.randrange(len(live)))
        table.release()
        released.append(table)

    for _ in range(80):
        action = rng.choice(["begin", *["more"] * 3, "draft", "insert", "leave", "evict"])
        try:
            if action == "begin":
                tokens = text(rng.randint(1, min(10 * block_size, 40)))
                table = released.pop() if released else GroupTable(pool, block_size)
                found = cache.match(tokens[:-1]).block_ids if rng.random() < 0.5 else []
                if found:  # only then, as in the scheduler
                    table.share(found)
                    MET["prefixes"] += 1
                live.append((table, tokens[: table.num_tokens]))
                table.grow(len(tokens) - table.num_tokens)
            elif action == "evict":
                MET["evicted"] += cache.evict(rng.randint(0, 3)) > 0
            elif live:
                table, tokens = rng.choice(live)
                left = table.num_tokens - len(tokens)  # of its prompt
                if action == "more":
                    table.grow(1 if left == 0 else 0)
                    write(table, tokens, rng.randint(1, min(left or 1, chunk)))
                elif action == "draft" and left == 0:
                    table.grow(ahead)
                    if ahead and rng.random() < 0.5:
                        make_writable(table, len(tokens) + ahead - 1)
                    twins = [table.fork() for _ in range(rng.randrange(2))]
                    table.shrink(ahead)
                    cache.check()
                    for twin in twins:
                        twin.shrink(ahead)
                        live.append((twin, list(tokens)))
                        MET["forks"] += 1
                elif action == "insert":
                    full = len(tokens) // block_size
                    result = cache.insert(tokens[: full * block_size], table.block_ids[:full])
                    for index, block_id in enumerate(result.block_ids):
                        if table.block_ids[index] != block_id:
                            table.replace(index, block_id)
                            MET["replaced"] += 1
                elif action == "leave":
                    leave()
        except OutOfBlocks:
            MET["full"] += 1
            while live:
                leave()
            cache.evict(cache.num_cached_blocks)
            assert pool.num_free == 12
        cache.check()
        for table, tokens in live:
            look(table, tokens, len(tokens))


def test_a_pool_has_room_for_more_sequences_than_whole_blocks(llama):
    """40 tokens in blocks of 4 take 10 parts of the full layer and 2 of each other: 18 of 100."""
    store = store_of(llama.lm.config, (8, 8, 8, 8, None), 20, 4)
    pool, tables = GroupPool(store, 0, 1), []
    with pytest.raises(OutOfBlocks):
        while True:
            tables.append(GroupTable(pool, 4))
            for position in range(40):
                tables[-1].grow(1)
                tables[-1].writable_slot(position)
    assert len(tables) - 1 == 100 // 18 == 5  # whole blocks: 20 // 10 = 2
    pool.check()


def test_parts_that_another_table_needs_stay_where_they_are(llama):
    """Two samples share a block, and the cache's block of the same tokens has lost its window."""
    store = store_of(llama.lm.config, (None, 5), 8, 4)
    pool = GroupPool(store, 0, 1)
    cache = GroupCache(pool, 4)

    def table_of(num_tokens):
        table = GroupTable(pool, 4)
        for position in range(num_tokens):
            table.grow(1)
            table.writable_slot(position)
        return table

    [cached] = cache.insert(range(4), table_of(24).block_ids).block_ids  # behind its window
    table = table_of(4)
    twin, [own] = table.fork(), table.block_ids
    while pool.has_windows(cached):
        table_of(4)
    table.replace(0, cached)
    assert table.block_ids == [own] and pool.has_windows(own)
    twin.release()
    table.replace(0, cached)
    assert table.block_ids == [cached] and pool.has_windows(cached)
    pool.check()


# ── In an engine ──────────────────────────────────────────────────────────────


@pytest.mark.usual(attention="cpu", windows=(None, 6), block_size=3)
@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize("windows", [(None, 6), (6, 6)])
@pytest.mark.parametrize("block_size", thorough_after(2, [3, 16, 1, 4, 17]))
def test_tokens_are_the_oracles(llama, attention, windows, block_size):
    """Long and short prompts, in chunks, with and without a hit, in a pool that preempts."""
    lm = with_windows(llama.lm, *windows)
    prompts = llama.prompts(3, 30, 55, 55, seed=block_size)
    prompts[3][:40] = prompts[2][:40]
    config = small(
        num_blocks=-(-96 // block_size), block_size=block_size, max_batch_tokens=16,
        attention=attention,
    )  # fmt: skip
    engine = Engine(lm, config)
    assert isinstance(engine.pool, GroupPool)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = [generate_naively(lm.logits, prompt, 20) for prompt in prompts]
    for _ in range(2):
        assert [one.token_ids for one in engine.generate(prompts, params)] == expected
        engine.check()
    assert engine.stats().hit_tokens > 0
    engine.cache.evict(engine.cache.num_cached_blocks)
    assert engine.pool.num_free == config.num_blocks
    engine.pool.check()


@pytest.mark.parametrize("attention", thorough_after(1, ["cpu", "torch"]))
@pytest.mark.parametrize("name", thorough_after(2, ["tinypy-hybrid", *ALTERNATING, "mistral"]))
def test_layers_that_alternate_equal_transformers(checkpoint, name, attention):
    """In the patterns of Gemma 3 and gpt-oss, and of the models whose attention is ours."""
    pair = checkpoint(name)
    assert any(pair.lm.config.windows)
    prompts = pair.prompts(3, 40, 70, 70)
    prompts[3][:50] = prompts[2][:50]
    engine = Engine(pair.lm, small(max_batch_tokens=16, attention=attention))
    assert isinstance(engine.pool, GroupPool)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for _ in range(2):  # the second time with hits
        outputs = engine.generate(prompts, params)
        assert [one.token_ids for one in outputs] == [pair.greedy(ids, 16) for ids in prompts]
    assert engine.stats().hit_tokens > 0
    engine.check()


def test_tinypy_hybrid_is_tinypy_but_for_its_attention():
    ours, tinypys = (read_weights(BUNDLED[name]) for name in ("tinypy-hybrid", "tinypy"))
    assert ours.keys() == tinypys.keys()
    learned = {name for name in ours if not torch.equal(ours[name], tinypys[name])}
    assert learned == {name for name in ours if "self_attn" in name}
    text = "def fib(n):"
    assert load("tinypy-hybrid").encode(text) == load("tinypy").encode(text)


def test_more_sequences_run_at_once(llama):
    """The same memory, in one group and in groups."""
    lm, most = with_windows(llama.lm, None, 6), {}
    for kv_groups in ("one", "auto"):
        engine = Engine(lm, small(num_blocks=24, prefix_cache=False, kv_groups=kv_groups))
        for prompt in llama.prompts(*[16] * 8):
            engine.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
        running = []
        while engine.has_unfinished:
            engine.step()
            running.append(len(engine.scheduler.running))
        most[kv_groups] = sum(running) / len(running)
        assert_empty(engine)
    assert most["auto"] > 1.3 * most["one"]


def test_long_prompts_share_memory_while_they_are_computed(llama):
    """In chunks of 8 tokens a prompt needs 15 parts in one layer, and at most 5 in the other."""
    lm, prompts = with_windows(llama.lm, None, 6), llama.prompts(60, 60)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    expected = [generate_naively(lm.logits, prompt, 4) for prompt in prompts]
    for kv_groups, together in (("one", 1), ("auto", 2)):
        config = small(
            num_blocks=24, prefix_cache=kv_groups == "auto", kv_groups=kv_groups,
            max_batch_tokens=8,
        )  # fmt: skip
        engine = Engine(lm, config)
        for prompt in prompts:
            engine.add_request(prompt, params)
        outputs, most = {}, 0
        while engine.has_unfinished:
            outputs |= {one.request_id: one.token_ids for one in engine.step()}
            most = max(most, len(engine.scheduler.running))
            engine.check()
        assert most == together
        assert [outputs[i] for i in range(2)] == expected
        assert engine.stats().preemptions == 0


def test_a_block_that_is_promised_is_no_hit(llama):
    """A second sequence would keep what the first counts on: its hit ends earlier."""
    lm, (prompt,) = with_windows(llama.lm, None, 5), llama.prompts(60)
    engine = Engine(lm, small(max_batch_tokens=8))
    engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    for _ in range(3):
        engine.step()
    (first,) = engine.scheduler.running
    assert engine.pool.promised and first.num_computed == 24
    found = engine.cache.match(prompt)  # the first sees from 12 on
    assert found.num_tokens == 12 and engine.pool.promised.isdisjoint(found.block_ids)


@pytest.mark.parametrize(
    "changes", [dict(kv_dtype="int8"), dict(host_blocks=8), dict(preemption="swap")]
)
def test_what_needs_whole_blocks_asks_for_them(llama, changes):
    lm = with_windows(llama.lm, None, 6)
    with pytest.raises(ValueError, match=r"all tokens, .* the last 6; leave .* kv_groups='one'"):
        Engine(lm, small(**changes))
    engine = Engine(lm, small(kv_groups="one", attention="torch", **changes))
    assert type(engine.pool) is BlockPool


def test_parts_of_ones_own_get_whole_blocks_and_sessions_ask_for_them(llama, tmp_path):
    class OwnPool(BlockPool):
        """As a reader's."""

    lm, (prompt,) = with_windows(llama.lm, None, 6), llama.prompts(20)
    engine = Engine(lm, small(), block_pool=OwnPool)
    assert isinstance(engine.pool, OwnPool)
    engine = Engine(lm, small())
    for use in (
        lambda: save_session(engine, prompt, tmp_path / "session"),
        lambda: put_prefix(engine, prompt, {}),
    ):
        with pytest.raises(ValueError, match="kv_groups='one'"):
            use()
    with pytest.raises(ValueError, match="kv_groups"):
        EngineConfig(kv_groups="many")


def test_figures_are_those_of_one_memory():
    """Whole blocks' memory: cached <= used <= total, while there are more ids than such blocks."""
    engine = Engine(load("tinypy-hybrid"), EngineConfig(num_blocks=64))
    rng, seen = random.Random(0), []
    for length in (460, 500, 370):
        prompt = [rng.randrange(2048) for _ in range(length)]
        for _ in engine.stream(prompt, SamplingParams(24, ignore_eos=True)):
            seen.append(engine.stats())
    seen.append(engine.stats())
    for stats in seen:
        assert 0 <= stats.blocks_cached <= stats.blocks_used <= stats.blocks_total == 64
        assert stats.blocks_free == stats.blocks_total - stats.blocks_used
        share = GAUGES["kv_cache_usage_perc"][1](stats)
        assert 0 <= share <= 1
    assert engine.cache.num_cached_blocks > stats.blocks_cached > 0
    assert max(stats.blocks_used for stats in seen) > stats.blocks_cached
