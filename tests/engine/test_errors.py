"""Bad input and interruptions: a clear error, and the engine serves the next request."""

import math
import re
from dataclasses import fields

import numpy as np
import pytest
import torch
from helpers import assert_empty, careful_engine, drain, generate, naively, small, step

import minikv
from minikv import (
    BlockPool,
    BlockTable,
    Engine,
    EngineConfig,
    OutOfBlocks,
    Plan,
    RadixCache,
    SamplingParams,
    Scheduler,
)
from minikv.beam import _decided

NAN, INF = math.nan, math.inf


def assert_serves(engine, prompt=(3, 1, 4, 1, 5)):
    """The engine is whole, and gives the oracle's tokens."""
    engine.check()
    (output,) = generate(engine, [list(prompt)], SamplingParams(max_tokens=6))
    assert output.token_ids == naively(engine.lm, list(prompt), 6)
    assert_empty(engine)


# ── Numbers and types ─────────────────────────────────────────────────────────

BAD_PARAMS = {
    "max_tokens": [0, -1, 1.5, "3", True, None],
    "temperature": [-0.1, INF, -INF, NAN, "hot", True, None],
    "top_k": [-1, 1.5, "x", True, None],
    "top_p": [0, 0.0, -0.1, 1.1, INF, NAN, "x", True, None],
    "seed": [-1, 1.5, "x", True],
    "n": [0, -1, 1.5, "x", True, None],
    "stop": ["text", 5, -1, b"x", None, ("",), (1.5,), (None,), (True,), ([], "ok"), np.array(5),
             torch.tensor(5), (np.array([1, 2]),)],
    "ignore_eos": [1, 0, None, "yes"],
    "cache_salt": [[], {}, ([],), NAN],
    "retain_s": [-1, 1.5, "x", True, None],
}  # fmt: skip
BAD_CONFIG = {
    "num_blocks": [0, -1, 1.5, "x", True, None],
    "block_size": [0, -16, 16.0, "x", True, None],
    "max_num_seqs": [0, -1, 1.5, "x", True, None],
    "max_batch_tokens": [0, -1, 63, 1.5, "x", True, None],  # 63 is below max_num_seqs
    "prefix_cache": [1, 0, None, "yes"],
    "min_prefix_tokens": [-1, 1.5, "x", True, None],
    "preemption": ["", "drop", None, True],
    "host_blocks": [-1, 1.5, "x", True, None],
    "attention": ["", "fast", None, 3],
    "kv_dtype": ["", "int3", None, 8],
    "kv_memory": ["", "much", "1 MB", 0, -1, True, 1.5],
    "disk_path": [3, True, b"x"],
    "disk_bytes": ["", "much", 0, -1, True, None],
    "write_through": [1, 0, None, "yes"],
    "retention": ["", "all", True, 3],
    "kv_groups": ["", "two", None, True],
    "speculative": ["", "guess", None, True],
    "batch_invariant": [1, 0, None, "yes"],
    "state_bytes": ["", "much", 0, -1, True, None],
    "state_interval": [-1, 1.5, "x", True, None],
}
ELSEWHERE = {"store", "draft_model"}  # fields of EngineConfig whose bad values have other tests


def test_every_field_has_bad_values_here():
    """A new field is given some, or a test of its own."""
    for kind, bad in ((SamplingParams, BAD_PARAMS), (EngineConfig, BAD_CONFIG)):
        missing = {field.name for field in fields(kind)} - bad.keys()
        assert missing == (ELSEWHERE if kind is EngineConfig else set())


def every(bad):
    pairs = [(name, value) for name, values in bad.items() for value in values]
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, value in pairs]


@pytest.mark.parametrize(("name", "value"), every(BAD_PARAMS))
def test_sampling_params(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: ") as error:
        SamplingParams(**{name: value})
    shown = value[0] if isinstance(value, tuple) and value else value
    assert repr(shown) in str(error.value) or repr(value) in str(error.value)


@pytest.mark.parametrize(("name", "value"), every(BAD_CONFIG))
def test_engine_config(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: ") as error:
        EngineConfig(**{name: value})
    assert repr(value) in str(error.value)


def test_the_smallest_of_each_number_is_taken():
    ones = dict.fromkeys(("num_blocks", "block_size", "max_num_seqs", "max_batch_tokens"), 1)
    zeros = dict.fromkeys(("min_prefix_tokens", "host_blocks", "state_interval"), 0)
    taken = EngineConfig(**ones, **zeros, kv_memory=1, disk_bytes=1, state_bytes=1)
    assert {name: getattr(taken, name) for name in ones | zeros} == ones | zeros
    assert RadixCache(BlockPool(1), 1).block_size == BlockTable(BlockPool(1), 1).block_size == 1
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, seed=0, n=1, retain_s=0)


def test_what_is_left_out_is_what_it_always_was():
    """Answers and memory of all who say nothing depend on it."""
    assert repr(EngineConfig()) == (
        "EngineConfig(num_blocks=512, block_size=16, max_num_seqs=64, max_batch_tokens=2048, "
        "prefix_cache=True, min_prefix_tokens=16, retention=None, preemption='recompute', "
        "host_blocks=0, disk_path=None, disk_bytes='1 GiB', write_through=False, attention='auto', "
        "kv_dtype='auto', kv_memory=None, kv_groups='auto', speculative='off', draft_model=None, "
        "batch_invariant=False, state_bytes='256 MiB', state_interval=0)"
    )
    assert repr(SamplingParams()) == (
        "SamplingParams(max_tokens=64, temperature=0.0, top_k=0, top_p=1.0, seed=None, n=1, "
        "stop=(), ignore_eos=False, cache_salt=None, retain_s=0)"
    )


def test_swap_needs_blocks():
    with pytest.raises(ValueError, match=r"host_blocks: .*at least 1.*was 0"):
        EngineConfig(preemption="swap")


@pytest.mark.parametrize(
    "below", [dict(disk_path="x"), dict(store="redis://:secret@h"), dict(write_through=True)]
)
@pytest.mark.parametrize("above", [dict(), dict(host_blocks=4, prefix_cache=False)])
def test_what_lies_below_the_host_needs_one_and_a_prefix_cache(below, above):
    says = r"^disk_path, store, write_through: .* host_blocks was"
    with pytest.raises(ValueError, match=says) as refused:
        EngineConfig(**below, **above)
    assert "secret" not in str(refused.value)
    assert EngineConfig(**below, host_blocks=4).prefix_cache


def test_a_store_is_named_by_its_url():
    with pytest.raises(ValueError, match=r"^store: must be the URL") as error:
        EngineConfig(store=b"redis://:secret@h", host_blocks=4)
    assert "secret" not in str(error.value)


def test_unknown_arguments_are_not_swallowed():
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)
    with pytest.raises(TypeError, match="blocks"):
        EngineConfig(blocks=1)


def test_configs_and_params_cannot_be_changed_past_the_checks():
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 0
    with pytest.raises(AttributeError):
        EngineConfig().num_blocks = 0


@pytest.mark.parametrize("value", [0, -1, 1.5, "x", None, True])
def test_pools_tables_and_caches(value):
    with pytest.raises(ValueError, match=f"^num_blocks: .*{value!r}"):
        BlockPool(value)
    for part in (BlockTable, RadixCache):
        with pytest.raises(ValueError, match=f"^block_size: .*{value!r}"):
            part(BlockPool(4), value)


@pytest.mark.parametrize("value", [-1, 1.5, "x", None, True, [1]], ids=repr)
def test_amounts_and_places(value):
    """Nothing is changed by a wrong one."""
    pool = BlockPool(4)
    table, cache = BlockTable(pool, 4), RadixCache(pool, 4)
    table.grow(5)
    calls = {
        "num_tokens": lambda: table.grow(value),
        "num_tokens ?": lambda: table.shrink(value),
        "num_blocks": lambda: cache.evict(value),
        "index": lambda: table.replace(value, 0),
        "position": lambda: table.writable_slot(value),
        "block": lambda: pool.ref_count(value),
        "block_?i?d?": lambda: pool.acquire(value),
        "blocks?(_id)?": lambda: pool.release(value),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}.*{re.escape(repr(value))}"):
            call()
    assert (table.num_tokens, pool.num_free) == (5, 2)


def test_integers_of_numpy(llama):
    """They are taken, wherever an int is."""
    config = small(num_blocks=np.int64(64), max_num_seqs=np.int32(4))
    assert type(config.num_blocks) is int
    engine = Engine(llama.lm, config)
    params = SamplingParams(max_tokens=np.int64(3), stop=np.array([299]), seed=np.uint8(3))
    assert [type(value) for value in (params.max_tokens, params.seed, *params.stop)] == [int] * 3
    prompt = np.array([5, 6, 7])
    for prompts in (prompt.tolist(), [prompt]):
        assert engine.generate(prompts, params)[0].token_ids == naively(llama.lm, [5, 6, 7], 3)
    pool = BlockPool(np.int64(3))
    table = BlockTable(pool, np.int16(4))
    table.grow(np.int64(6))
    assert table.writable_slot(np.int64(5)) == (5, None)
    assert_serves(engine)


# ── Requests ──────────────────────────────────────────────────────────────────

BAD_PROMPTS = [  # what is no token id, and no list of them: see the end of this file
    ("", "is empty"),
    ([], "is empty"),
    ((), "is empty"),
    ([1, 300], "must be an int from 0 to 299, was 300"),
    ([1, -1], "must be an int from 0 to 299, was -1"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=repr)
def test_prompts(checkpoint, prompt, message):
    pair = checkpoint("llama")
    lm = pair.lm
    if prompt == "":  # text needs a tokenizer
        lm = minikv.LanguageModel(lm.name, lm.transformer, checkpoint("tinypy").lm.tokenizer)
    engine = Engine(lm, small())
    running = engine.add_request([7, 8, 9], SamplingParams(max_tokens=5))
    outputs = step(engine)
    for attempt in (engine.add_request, engine.stream, engine.beam_search):
        with pytest.raises(ValueError, match=f"^prompt: .*{message}"):
            attempt(prompt)
    with pytest.raises(ValueError, match=r"^prompt"):
        engine.generate([[1, 2], prompt])
    assert engine.stats().waiting == 0  # the good one of the two is gone as well
    drain(engine, outputs)
    assert outputs[running].token_ids == naively(lm, [7, 8, 9], 5)
    assert_serves(engine)


def test_text_without_a_tokenizer(llama):
    assert llama.lm.tokenizer is None
    engine = Engine(llama.lm, small())
    for attempt in (engine.add_request, engine.generate, engine.stream, engine.beam_search):
        with pytest.raises(ValueError, match=r"no tokenizer.json: pass token ids"):
            attempt("text")
    with pytest.raises(ValueError, match=r"^stop: strings need a tokenizer"):
        engine.add_request([1, 2], SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        _ = engine.generate([[1, 2]], SamplingParams(max_tokens=2))[0].text
    deltas = list(engine.stream([1, 2], SamplingParams(max_tokens=3)))  # token ids do stream
    assert [t for d in deltas for t in d.token_ids] == naively(llama.lm, [1, 2], 3)
    assert_serves(engine)


@pytest.mark.parametrize("params", [5, "x", {"max_tokens": 3}, 0, ""], ids=repr)
def test_params_of_another_type(llama, params):
    engine = Engine(llama.lm, small())
    for attempt in (engine.add_request, engine.stream):
        with pytest.raises(ValueError, match=f"^params: .*{params!r}"):
            attempt([1, 2], params)
    for wrong in (params, [params]):
        with pytest.raises(ValueError, match=r"^params: "):
            engine.generate([[1, 2]], wrong)
    assert_serves(engine)


@pytest.mark.parametrize("prompts", [None, 5, 1.5], ids=repr)
def test_generate_wants_prompts(llama, prompts):
    engine = Engine(llama.lm, small())
    with pytest.raises(ValueError, match=r"^prompts?: "):
        engine.generate(prompts)
    assert engine.generate([]) == []
    assert_serves(engine)


def test_generate_wants_as_many_params_as_prompts(llama):
    engine = Engine(llama.lm, small())
    with pytest.raises(ValueError, match="params: 1 for 2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert_serves(engine)


@pytest.mark.parametrize("call", ["add_request", "beam_search"])
def test_what_can_never_fit(llama, call):
    """The pool, then the context: the message says how much is needed and how much there is."""
    attempts = {
        "add_request": lambda e, p, n: e.add_request(p, SamplingParams(max_tokens=n)),
        "beam_search": lambda e, p, n: e.beam_search(p, beam_width=1, max_tokens=n),
    }
    attempt = attempts[call]
    engine = Engine(llama.lm, small(num_blocks=6))
    message = "20 tokens and max_tokens=5 make 25 tokens, 7 blocks of 4; the pool has 6"
    with pytest.raises(ValueError, match=message):
        attempt(engine, [1] * 20, 5)
    attempt(engine, [1] * 20, 4)
    drain(engine)
    assert_serves(engine)

    engine = Engine(llama.lm, small(num_blocks=512))
    with pytest.raises(ValueError, match="make 513 tokens; the model's context is 512"):
        attempt(engine, [1] * 500, 13)
    assert_serves(engine)


def test_the_longest_request_of_all(llama):
    """Exactly the context, exactly the pool."""
    (prompt,) = llama.prompts(505, seed=1)
    engine = careful_engine(llama.lm, small(num_blocks=128, max_batch_tokens=200))
    (output,) = generate(engine, [prompt], SamplingParams(max_tokens=7))
    assert output.token_ids == naively(llama.lm, prompt, 7)


def test_more_samples_or_beams_than_seats(llama):
    engine = Engine(llama.lm, small(max_num_seqs=4))
    with pytest.raises(ValueError, match=r"^n: 5 .*max_num_seqs=4"):
        engine.add_request([1], SamplingParams(n=5))
    with pytest.raises(ValueError, match=r"^beam_width: 5 .*max_num_seqs=4"):
        engine.beam_search([1], beam_width=5)
    with pytest.raises(ValueError, match=r"^n: a stream has one sample, was 2"):
        engine.stream([1], SamplingParams(n=2))
    assert_serves(engine)


@pytest.mark.parametrize(
    ("name", "value"),
    every(
        {
            "beam_width": [0, -1, 1.5, "x", True, None],
            "max_tokens": [0, -1, 1.5, "x", True, None],
            "length_penalty": ["x", True, None, NAN, INF, -INF],
        }
    ),
)
def test_beam_search(llama, name, value):
    engine = Engine(llama.lm, small())
    with pytest.raises(ValueError, match=f"^{name}: .*{value!r}"):
        engine.beam_search([1, 2], **{name: value})
    assert_serves(engine)


@pytest.mark.parametrize("request_id", [0, -1, 99, "x", None, 1.5, [1]], ids=repr)
def test_abort_of_nothing(llama, request_id):
    engine = Engine(llama.lm, small())
    with pytest.raises(
        ValueError, match=r"^request_id: (.* is not an unfinished request|must be an)"
    ):
        engine.abort(request_id)
    assert_serves(engine)


@pytest.mark.parametrize("lm", [None, "tinypy", 5], ids=repr)
def test_an_engine_wants_a_model(lm):
    with pytest.raises(ValueError, match=r"^lm: "):
        Engine(lm)


@pytest.mark.parametrize("config", [512, {"num_blocks": 5}, "x", SamplingParams()], ids=repr)
def test_an_engine_wants_a_config(llama, config):
    with pytest.raises(ValueError, match=r"^config: "):
        Engine(llama.lm, config)


def test_an_engine_wants_a_backend(llama):
    with pytest.raises(ValueError, match=r"^attention: must make an AttentionBackend.*made None"):
        Engine(llama.lm, attention=lambda config, store: None)


def test_compiled_attention_wants_float32_or_bfloat16(llama):
    lm = minikv.load(llama.folder, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"'cpu' computes float32 and bfloat16.* torch.float16"):
        Engine(lm, small(attention="cpu"))


def step_once(lm):
    """A request of 8 tokens in two blocks of 4, 7 of them computed."""
    engine = Engine(lm, small(prefix_cache=False))
    engine.add_request([1] * 7, SamplingParams(max_tokens=4))
    engine.step()
    return engine


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda engine, _: engine.pool._free.pop(), "125 free blocks, 126 without a holder"),
        (lambda engine, _: engine.pool.allocate(), "reference count 1, 0 holders"),
        (lambda _, table: table.block_ids.pop(), "computed tokens without a block"),
        (lambda _, table: table.grow(4), "a block without a token"),
        (lambda engine, _: engine._requests.clear(), "other sequences than the unfinished"),
    ],
    ids=range(5),
)
def test_check_notices(llama, damage, message):
    engine = step_once(llama.lm)
    engine.check()
    damage(engine, engine.scheduler.running[0].table)
    with pytest.raises(AssertionError, match=message):
        engine.check()


def test_check_looks_at_the_prefix_cache_and_at_what_lies_below(llama):
    engine = Engine(llama.lm, small(host_blocks=8))
    engine.check()
    engine.tiers.is_planning = True
    with pytest.raises(AssertionError, match="tiers: a copy is still planned"):
        engine.check()
    engine.cache.num_cached_blocks += 1
    with pytest.raises(AssertionError, match="num_cached_blocks is off"):
        engine.check()


def test_nothing_is_thrown_away_but_after_a_failure(llama):
    """What was made again is the pool, too; a step behind the recovery keeps it."""
    engine = step_once(llama.lm)
    pool = engine.pool
    request_id = engine.add_request([2], SamplingParams(max_tokens=2))
    engine.step()
    assert engine.pool is pool
    run = engine.runner.run
    engine.runner.run = lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner.run = run
    assert engine.request(request_id).sequences[0].table is None  # it waits again
    assert engine.pool is not pool
    pool = engine.pool
    while engine.step():
        assert engine.pool is pool
    stats = engine.stats()
    assert stats.looked_up_tokens == 7 + 1  # once each
    assert engine.step() == [] and engine.stats().steps == stats.steps


@pytest.mark.parametrize(
    "call", [Engine.step, Engine.check, lambda engine: engine.add_request([9])]
)
def test_whatever_is_called_after_a_failure_begins_anew(llama, call):
    engine = careful_engine(llama.lm, small())
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, stop=(3,)))
    [sequence] = engine.request(0).sequences
    engine.attention.interrupt(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        engine.step()
    call(engine)
    assert sequence.num_preemptions == 1
    drain(engine)
    assert sequence.num_output > 0  # the prompt's last token is none of its own


def test_who_had_all_tokens_when_a_step_failed_is_finished(llama):
    """What failed is told, and no later step returns the request."""
    engine = Engine(llama.lm, small())
    engine.scheduler.remove = lambda sequence: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert not engine.has_unfinished and engine.step() == []


def test_a_fork_that_failed_halfway_is_begun_anew(llama):
    engine, params = Engine(llama.lm, small()), SamplingParams(max_tokens=3, n=3)
    [expected] = engine.generate([1, 2, 3], params)
    add, forks = engine.scheduler.add_running, []

    def add_once(sequence):
        forks.append(sequence)
        if len(forks) == 2:
            raise OSError("gone")
        add(sequence)

    engine.scheduler.add_running = add_once
    request_id = engine.add_request([1, 2, 3], params)
    with pytest.raises(OSError, match="gone"):
        engine.step()
    found = drain(engine)[request_id].samples
    assert [one.token_ids for one in found] == [one.token_ids for one in expected.samples]


@pytest.mark.parametrize(
    ("prefix_cache", "said"), [(False, "2 are free and 0"), (True, "1 are free and 1")]
)
def test_blocks_held_outside_the_engine(llama, prefix_cache, said):
    """Then nothing can run. The engine says so, and goes on when they are given back."""
    engine = Engine(llama.lm, small(num_blocks=6, prefix_cache=prefix_cache))
    engine.generate([2] * 4, SamplingParams(max_tokens=1))  # leaves a cached block
    held = [engine.pool.allocate() for _ in range(4)]
    request_id = engine.add_request([1] * 12, SamplingParams(max_tokens=4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"needs 3 blocks; {said} can be evicted"):
            engine.step()
    for block_id in held:
        engine.pool.release(block_id)
    outputs = drain(engine)
    assert outputs[request_id].token_ids == naively(llama.lm, [1] * 12, 4)
    assert_serves(engine)


def test_a_scheduler_that_gives_nobody_a_token(llama):
    class Idle(Scheduler):
        def schedule(self):
            return Plan() if self.running else super().schedule()

    engine = Engine(llama.lm, small(), scheduler=Idle)
    engine.add_request([1, 2], SamplingParams(max_tokens=4))
    engine.step()
    with pytest.raises(RuntimeError, match="gave none of the running sequences a token"):
        engine.step()


def test_what_another_call_moved_is_returned_once(llama):
    """A batch moves two requests that were there before it; one is aborted then."""
    engine = Engine(llama.lm, small())
    params = SamplingParams(max_tokens=9)
    kept, aborted = (engine.add_request([token], params) for token in (1, 2))
    engine.generate([3], SamplingParams(max_tokens=2))
    engine.abort(aborted)
    assert [len(one.token_ids) for one in engine.step() if one.request_id == kept] == [3]
    engine.generate([3], SamplingParams(max_tokens=2))
    engine.abort(kept)
    assert not engine.has_unfinished and engine.step() == []


def test_what_a_stream_moved_is_returned_unless_it_is_aborted(llama):
    engine = Engine(llama.lm, small())
    ended, aborted = (engine.add_request([1], SamplingParams(max_tokens=n)) for n in (1, 9))
    stream = engine.stream([3], SamplingParams(max_tokens=4))
    next(stream)
    engine.abort(aborted)
    list(stream)
    [output] = engine.step()
    assert (output.request_id, output.finish_reason) == (ended, "length")
    assert not engine.has_unfinished and engine.step() == []


def test_beams_evict_what_nobody_uses_and_take_every_seat(llama):
    config = small(num_blocks=9, max_num_seqs=2)
    engine, alone = Engine(llama.lm, config), Engine(llama.lm, config)
    engine.generate([1] * 20, SamplingParams(max_tokens=4))
    assert engine.stats().blocks_free == 4  # and five are needed
    beams = [one.beam_search([5] * 6, 2, 6) for one in (engine, alone)]
    assert [beam.token_ids for beam in beams[0]] == [beam.token_ids for beam in beams[1]]
    engine.cache.clear()
    pool = engine.pool
    for _ in range(5):
        pool.allocate()
    with pytest.raises(OutOfBlocks, match="blocks needed: 5, free: 4"):
        engine.beam_search([5] * 6, 2, 6)
    assert engine.pool is pool  # it was not begun


def test_beams_are_decided_when_the_best_that_runs_cannot_win():
    finished = [(-0.6, None)]
    assert not _decided(finished, -1.0, 2, 1, 1.0)  # -0.5 might
    assert _decided(finished, -1.4, 2, 1, 1.0)
    assert not _decided(finished, -1.4, 2, 2, 1.0)
    assert _decided(finished, -1.0, 1, 1, 1.0)
    assert not _decided(finished, -1.0, 0, 1, 1.0)


@pytest.mark.parametrize("state", [None, 5, "tinypy", [1]], ids=repr)
def test_a_weight_update_wants_a_dict(llama, state):
    engine = Engine(llama.lm, small())
    with pytest.raises(ValueError, match=r"^(state_dict|weights): "):
        engine.update_weights(state)
    assert_serves(engine)


# ── Interruptions: test_interrupts.py has every line of a step ────────────────


def test_an_interrupted_generate_aborts_what_it_began(llama):
    engine = careful_engine(llama.lm, small())
    other = engine.add_request([9, 8, 7], SamplingParams(max_tokens=8))
    outputs = step(engine)
    engine.attention.interrupt(KeyboardInterrupt(), countdown=7)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(llama.prompts(5, 6, seed=4), SamplingParams(max_tokens=20))
    engine.check()
    assert [sequence.request.request_id for sequence in engine.scheduler] == [other]
    drain(engine, outputs)
    assert outputs[other].token_ids == naively(llama.lm, [9, 8, 7], 8)
    assert_serves(engine)


def test_an_interrupted_stream_goes_on_nowhere(llama):
    """The error reaches the reader, and the request is aborted."""
    engine = careful_engine(llama.lm, small())
    stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=9))
    next(stream)
    engine.attention.interrupt(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        next(stream)
    assert not engine.has_unfinished
    assert_serves(engine)


# ── Imports ───────────────────────────────────────────────────────────────────


def test_every_public_name_is_there():
    assert len(set(minikv.__all__)) == len(minikv.__all__)  # in the order that the linter wants
    assert all(hasattr(minikv, name) for name in minikv.__all__)


NOT_IDS = {
    "a number": 5, "nothing": None, "a set": {1, 2}, "bytes": b"ab", "an array of no dimension":
    np.array(5), "a tensor of no dimension": torch.tensor(5),
}  # fmt: skip
NO_ID = {
    "nothing": [None], "a fraction": [1.5], "text": ["a"], "a list": [[1]], "a bool": [True],
    "an unknown id": [10**9], "a negative one": [-1], "a row": np.array([[1, 2]]),
    "rows": torch.tensor([[1, 2]]), "fractions": torch.tensor([1.0]),
}  # fmt: skip


@pytest.mark.parametrize("ids", [*NOT_IDS.values(), *NO_ID.values()], ids=[*NOT_IDS, *NO_ID])
def test_what_is_no_list_of_token_ids_is_told_and_nothing_is_lost(tinypy, ids):
    lm = tinypy.lm
    engine = Engine(lm, small(block_size=16))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    is_id = any(ids is value for value in NO_ID.values())
    for name, ask in {
        "prompt": engine.add_request,
        "prompt: ": lambda ids: next(engine.stream(ids)),
        "prompt:": engine.beam_search,
        "token_ids": lm.decode,
        "token_ids: ": lm.logits,
        "token_ids:": lambda ids: lm.generate_naively(ids, 1),
    }.items():
        says = "a token id: must be an int from 0 to 2047" if is_id else "must be a list of token"
        with pytest.raises(ValueError, match=rf"^{name.strip(': ')}: {says}.*, was "):
            ask(ids)
    engine.check()
    while engine.has_unfinished:
        outputs = engine.step()
    assert len(outputs) == 1 and engine.pool.num_free == engine.pool.num_blocks


def test_flat_arrays_and_tensors_are_lists_of_token_ids(tinypy):
    lm = tinypy.lm
    expected = lm.generate_naively([1, 2, 3], 2)
    for ids in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3), range(1, 4)):
        [output] = minikv.Engine(lm).generate([ids], SamplingParams(max_tokens=2))
        assert list(output.token_ids) == expected == lm.generate_naively(ids, 2)
        assert lm.decode(ids) == lm.decode([1, 2, 3])
