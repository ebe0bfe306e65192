"""Engines that share a store: each finds what another computed, and none is stopped by the store.
Their tokens are those of an engine without one, whatever happens."""

import gc
import os
import random
import signal
from contextlib import ExitStack

import pytest
from helpers import assert_empty, assert_kv, drain, generate, naive_kv, naively, small, step
from store_case import line_to, needs_a_store
from thorough import thorough_after
from tiers_case import PROMPT, TINY, damaged, documents_of, ends, fill, params, prompts_of
from waiting import PATIENCE, until

from minikv import Engine, EngineConfig
from minikv.cluster.breaker import Breaker
from minikv.cluster.local_server import local_server
from minikv.tiers.costs import Link, Prefill

pytestmark = needs_a_store


@pytest.fixture(scope="module")
def one_server():
    with local_server("64 MiB") as server:
        yield server


@pytest.fixture
def server(one_server):
    """A server that is empty."""
    import valkey

    with valkey.Valkey.from_url(one_server.url) as client:
        client.flushall()
        one_server.client = client
        yield one_server


@pytest.fixture
def engine_of(engine_of):
    """`engine_of(store=url)` has a host tier, too."""

    def make(lm=None, **config) -> Engine:
        return engine_of(lm, **({"host_blocks": 32} if "store" in config else {}) | config)

    return make


def written(engine, **more):
    """The output of `PROMPT`, whose blocks are in the store then."""
    [out] = generate(engine, [PROMPT], params(**more))
    engine.tiers.flush()
    return out


def store_of(engine):
    return engine.stats().tiers["store"]


def always_try(engine):
    """No breaker: each call meets the fault."""
    tier = engine.tiers.shared.tier
    tier.breaker = Breaker(first=0.0)


# ── What one has computed, the other finds ────────────────────────────────────


def test_another_engine_finds_what_was_computed(engine_of, llama, server):
    first = engine_of(store=server.url)
    out = written(first)
    assert out.token_ids == naively(llama.lm, PROMPT, 4)
    assert store_of(first).blocks == 9 and store_of(first).bytes_in > 9 * first.tiers.block_bytes
    second = engine_of(store=server.url)
    request = second.add_request(PROMPT, params())
    sequence = second.scheduler.waiting[0]
    while sequence.table is None:
        step(second)
    assert sequence.num_cached == 32
    assert_kv(second.store, sequence.table.block_ids[:8], naive_kv(llama.lm, PROMPT)[:, :32])
    assert drain(second)[request].token_ids == out.token_ids
    assert second.stats().computed_tokens == 1 + 3
    assert store_of(second).hits == 8 and store_of(second).bytes_out > 8 * second.tiers.block_bytes
    assert second.tiers.where(PROMPT) == ["device"] * 8
    second.tiers.flush()
    assert store_of(second).bytes_in < 2 * (second.tiers.block_bytes + 100), "only what is new"
    for engine in (first, second):
        assert_empty(engine)


def test_a_prefix_of_several_tiers(engine_of, llama, server, tmp_path):
    """Its beginning on the device, then host, disk and store: one question, for the last part."""
    long = list(range(1, 62))
    writer = engine_of(store=server.url)
    expected = generate(writer, [long], params())[0].token_ids
    writer.tiers.flush()
    engine = engine_of(
        num_blocks=20, max_num_seqs=3, host_blocks=6, disk_path=tmp_path, store=server.url
    )
    generate(engine, [long[:34]], params(1))
    fill(engine)
    assert engine.tiers.disk.wait()
    generate(engine, [long[:9]], params(1))
    where = engine.tiers.where(long)
    assert {"device", "disk"} <= set(where[:8])
    before = store_of(engine).hits
    assert generate(engine, [long], params())[0].token_ids == expected
    stats = engine.stats().tiers
    assert stats["disk"].hits > 0 and stats["store"].hits - before >= 3


@pytest.mark.parametrize("kv_dtype", thorough_after(1, ["int8", "int4", "float16", "bfloat16"]))
def test_quantised_blocks_travel_as_they_are(engine_of, server, kv_dtype):
    rng = random.Random(0)
    documents = documents_of(rng)
    plain = engine_of(num_blocks=200, kv_dtype=kv_dtype)
    engines = [
        engine_of(**TINY, host_blocks=8, kv_dtype=kv_dtype, store=server.url) for _ in range(2)
    ]
    for turn in range(6):
        prompts = prompts_of(rng, documents, 3)
        expected = [out.token_ids for out in generate(plain, prompts, params())]
        outs = generate(engines[turn % 2], prompts, params())
        assert [out.token_ids for out in outs] == expected
        engines[turn % 2].tiers.flush()
    assert sum(store_of(engine).hits for engine in engines) > 0
    whole = engine_of(store=server.url)
    generate(whole, prompts, params())
    assert store_of(whole).hits == 0, "another dtype has other names"


def test_nobody_else_finds_them(engine_of, llama, other_lm, server):
    """Other weights, another block size, another version of the format, another salt or none."""
    written(engine_of(store=server.url), cache_salt="tenant a")
    for lm, more, salt in (
        (other_lm, {}, "tenant a"), (None, dict(block_size=8), "tenant a"), (None, {}, "tenant b"),
        (None, {}, None), (None, {}, ("tenant a",)), (None, {}, b"tenant a"),
    ):  # fmt: skip
        other = engine_of(lm, store=server.url, **more)
        out = written(other, cache_salt=salt)
        assert out.token_ids == naively(lm or llama.lm, PROMPT, 4)
        assert store_of(other).hits == store_of(other).bytes_out == 0
    for key in server.client.scan_iter():
        server.client.rename(key, key.replace(b"minikvB1:", b"minikvB0:"))
    old, same = engine_of(store=server.url), engine_of(store=server.url)
    written(old, cache_salt="tenant a")
    assert store_of(old).hits == 0
    generate(same, [PROMPT], params(cache_salt="tenant a"))
    assert store_of(same).hits == 8


def test_a_salt_without_a_spelling_stays_here(engine_of, server):
    written(engine_of(store=server.url), cache_salt=frozenset([1]))
    assert server.client.dbsize() == 0


def test_new_weights_find_their_own(engine_of, llama, other_lm, other_state, server):
    engine = engine_of(store=server.url)
    old = generate(engine, [PROMPT], params())[0].token_ids
    engine.update_weights(other_state)
    assert written(engine).token_ids == naively(other_lm, PROMPT, 4)
    assert store_of(engine).hits == 0
    engine.update_weights(llama.hf.state_dict())
    assert generate(engine, [PROMPT], params())[0].token_ids == old and store_of(engine).hits == 8


def test_blocks_from_the_disk_go_to_the_store(engine_of, server, tmp_path):
    """An engine that joins brings what it had kept."""
    before = engine_of(host_blocks=32, disk_path=tmp_path)
    written(before)
    before.tiers.disk.close()
    joining = engine_of(store=server.url, disk_path=tmp_path)
    written(joining)
    assert joining.stats().tiers["disk"].hits == 8
    third = engine_of(store=server.url)
    generate(third, [PROMPT], params(1))
    assert store_of(third).hits == 8


# ── Only if it is worth it, and only if it is soon ────────────────────────────


def test_what_is_slower_to_fetch_is_computed(engine_of, server):
    written(engine_of(store=server.url))
    reader = engine_of(store=server.url)
    links = {"host": Link(0, 1e9), "store": Link(0, 1.0)}
    reader.tiers.rates = lambda: (links, Prefill(0, 1e6))
    generate(reader, [PROMPT], params())
    assert store_of(reader).hits == store_of(reader).bytes_out == 0


def test_a_fetch_that_was_slow_once_is_tried_again(engine_of, server):
    engine = engine_of(store=server.url)
    del engine.tiers.rates
    engine.tiers.shared.reader.reading.add(1000, 1000.0)
    assert engine.tiers.rates()[0]["store"].seconds(1000) > 999
    engine.tiers.shared.reader.reading.lasts = 0.0
    assert engine.tiers.rates()[0]["store"].seconds(1000) < 1


# ── The store fails ───────────────────────────────────────────────────────────


def serve(engines, rounds=3, seed=5, between=lambda: None):
    """Some rounds of requests with shared beginnings, from engine to engine; their tokens."""
    rng = random.Random(seed)
    documents = documents_of(rng)
    tokens = []
    for turn in range(rounds):
        engine = engines[turn % len(engines)]
        tokens += [o.token_ids for o in generate(engine, prompts_of(rng, documents, 4), params())]
        between()
    return tokens


def test_down_from_the_start_to_the_end(engine_of, caplog):
    with local_server() as gone:
        pass
    engine = engine_of(**TINY, host_blocks=8, store=gone.url)
    expected = serve([engine_of(num_blocks=400)])
    store, calls = engine.tiers.shared.tier, []
    connection, store.breaker = store._own_connection, Breaker(clock=lambda: 0.0)
    store._own_connection = lambda: calls.append(1) or connection()
    assert serve([engine]) == expected
    assert 1 <= len(calls) <= 2, "two threads may have begun before the first call failed"
    engine.tiers.flush()
    assert [r.message.split(":")[0] for r in caplog.records] == ["the store at 127.0.0.1"]
    assert gone.url not in caplog.text and store_of(engine).blocks == 0
    assert store_of(engine).dropped > 0


def test_killed_while_running_and_back_again_empty(engine_of, caplog):
    expected = serve([engine_of(num_blocks=400)], 9)
    with local_server(password="secret-1") as server, ExitStack() as stack:
        line = stack.enter_context(line_to(server))
        engines = [engine_of(**TINY, host_blocks=8, store=line.url(server)) for _ in range(2)]
        assert serve(engines, 9, between=lambda: [e.tiers.flush() for e in engines]) == expected
        hits = [store_of(engine).hits for engine in engines]
        assert sum(hits) > 0
        one, two = engines
        one.add_request(PROMPT, params(9))
        step(one)
        os.kill(server.pid, signal.SIGKILL)
        drain(one)
        assert serve(engines, 9) == expected
        kept = stack.pop_all()
    with local_server(password="secret-1") as server, kept:
        line.target = server.port
        for engine in engines:
            always_try(engine)

        def is_found():
            """A connection may fail once more before it is made anew."""
            one.cache.clear()
            two.cache.clear()
            written(one)
            generate(two, [PROMPT], params())
            return store_of(two).hits > hits[1]

        until(is_found)  # what is computed anew is written anew
        assert serve(engines, 9) == expected
    assert "secret" not in caplog.text


def test_full(engine_of, caplog):
    with local_server("2 MiB", policy="noeviction") as server:
        engines = [engine_of(**TINY, host_blocks=8, store=server.url) for _ in range(2)]
        for engine in engines:
            engine.tiers.shared.writer.put(b"x" * 32, b"i" * 32, bytes(3 << 20))
        assert serve(engines) == serve([engine_of(num_blocks=400)])
        engines[0].tiers.flush()
    assert "takes no entry" in caplog.text and store_of(engines[0]).dropped > 0


def test_evicted_between_the_question_and_the_fetch(engine_of, server):
    first, engine = written(engine_of(store=server.url)), engine_of(store=server.url)
    get = engine.tiers.shared.get

    def evict_then_get(names, unpack):
        for name in names[2:]:
            engine.tiers.shared.tier.remove(name)
        return get(names, unpack)

    engine.tiers.shared.get = evict_then_get
    assert generate(engine, [PROMPT], params())[0].token_ids == first.token_ids
    assert store_of(engine).hits == 2
    engine.tiers.flush()
    third = engine_of(store=server.url)
    generate(third, [PROMPT], params())
    assert store_of(third).hits == 8, "what was found gone was written again"


@pytest.mark.parametrize("what", ["damaged", "cut", "mixed up", "another kind", "of other weights"])
def test_what_is_not_right_is_refused(engine_of, llama, other_lm, server, what, caplog):
    first = written(engine_of(store=server.url))
    client, rng = server.client, random.Random(what)
    keys = client.keys()
    values = client.mget(keys)
    if what == "of other weights":  # under our names
        written(engine_of(other_lm, store=server.url))
        theirs = client.mget(set(client.keys()) - set(keys))
    for index, key in enumerate(keys):
        if what == "another kind":
            client.delete(key)
            client.rpush(key, b"1")
        else:
            client.set(key, {
                "damaged": lambda i=index: damaged(rng, values[i]) + b"",
                "cut": lambda i=index: values[i][: len(values[i]) // 2],
                "mixed up": lambda i=index: values[i - 1],
                "of other weights": lambda i=index: theirs[i % len(theirs)],
            }[what]())  # fmt: skip
    engine = engine_of(store=server.url)
    assert written(engine).token_ids == first.token_ids
    assert store_of(engine).hits == 0
    if what != "another kind":  # which MGET gives as missing
        assert store_of(engine).dropped == 8 and "an entry is refused" in caplog.text
    third = engine_of(store=server.url)
    assert generate(third, [PROMPT], params())[0].token_ids == first.token_ids
    assert store_of(third).hits == 8, "it was written again"


@pytest.mark.thorough
def test_a_bad_day(engine_of, server):
    """Engines short of memory, a server short of memory, and a line that does all of it in turn."""
    rng = random.Random(1)
    documents = documents_of(rng)
    plain = engine_of(num_blocks=400)
    with line_to(server) as line:
        line.seconds = 0.02
        engines = [
            engine_of(**TINY, store=line.url(server), host_blocks=blocks, preemption=preemption)
            for blocks, preemption in ((4, "recompute"), (12, "swap"))
        ]
        for _ in range(15):
            line.fault = rng.choice(["none", "none", "none", "delay", "deaf", "cut", "garbage"])
            engine = rng.choice(engines)
            engine.tiers.shared.tier.timeout = PATIENCE if line.fault == "none" else 0.3
            always_try(engine)
            prompts = prompts_of(rng, documents, 3)
            expected = [out.token_ids for out in generate(plain, prompts, params(6))]
            assert [out.token_ids for out in generate(engine, prompts, params(6))] == expected
            if line.fault == "none":
                engine.tiers.shared.wait()
            if rng.random() < 0.2:
                server.client.flushall()
            if rng.random() < 0.2:
                engine.cache.clear()
        assert sum(store_of(engine).hits for engine in engines) > 5
        for engine in engines:
            assert_empty(engine)


# ── Settings, and the end ─────────────────────────────────────────────────────


def test_a_configuration_does_not_show_its_password():
    assert "secret" not in repr(EngineConfig(store="redis://:secret@h:1", host_blocks=1))


def test_an_engine_that_ends_writes_what_waits(llama, server):
    engine = Engine(llama.lm, small(attention="torch", host_blocks=4, store=server.url))
    engine.tiers.shared.patience = engine.tiers.shared.tier.timeout = PATIENCE
    generate(engine, [PROMPT], params(1))
    threads = [engine.tiers.shared.writer._thread, engine.tiers.shared.reader._thread]
    del engine
    gc.collect()
    assert server.client.dbsize() == 8
    until(lambda: not any(thread.is_alive() for thread in threads))  # they say so just before


def test_an_engine_ends_soon_with_a_store_that_hangs(llama, server):
    with line_to(server) as line:
        line.fault = "deaf"
        engine = Engine(llama.lm, small(attention="torch", host_blocks=4, store=line.url(server)))
        generate(engine, [PROMPT], params(1))
        shared = engine.tiers.shared
        shared.patience, shared.writer.stuck, shared.reader.stuck = 0.2, 3600.0, 3600.0
        threads = [shared.writer._thread, shared.reader._thread]
        del engine, shared
        ends(gc.collect)
        for thread in threads:
            ends(thread.join)
