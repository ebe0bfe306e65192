"""Bad input and interruptions: a clear error, and the engine serves the next request."""

import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import (
    assert_empty,
    careful_engine,
    drain,
    generate,
    greedy_tokens,
    small,
    step,
)
from safetensors.torch import load_file, save_file

import minikv
from minikv import (
    BlockPool,
    BlockTable,
    CheckpointError,
    Engine,
    EngineConfig,
    RadixCache,
    Sampler,
    SamplingParams,
)
from minikv.checkpoint import read_weights

NAN, INF = math.nan, math.inf


def assert_serves(engine, prompt=(3, 1, 4, 1, 5)):
    """The engine is whole, and gives the oracle's tokens."""
    engine.check()
    (output,) = generate(engine, [list(prompt)], SamplingParams(max_tokens=6))
    assert output.token_ids == greedy_tokens(engine.lm, list(prompt), 6)
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
}


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


def test_swap_needs_blocks():
    with pytest.raises(ValueError, match=r"host_blocks: .*at least 1.*was 0"):
        EngineConfig(preemption="swap")


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
        assert engine.generate(prompts, params)[0].token_ids == greedy_tokens(
            llama.lm, [5, 6, 7], 3
        )
    pool = BlockPool(np.int64(3))
    table = BlockTable(pool, np.int16(4))
    table.grow(np.int64(6))
    assert table.writable_slot(np.int64(5)) == (5, None)
    assert_serves(engine)


# ── Requests ──────────────────────────────────────────────────────────────────

BAD_PROMPTS = [
    ("", "is empty"),
    ([], "is empty"),
    ((), "is empty"),
    ([300], "must be an int from 0 to 299, was 300"),
    ([5, -1], "must be an int from 0 to 299, was -1"),
    ([1, 2.0], "must be an int from 0 to 299, was 2.0"),
    ([1, True], "must be an int .* was True"),
    ([1, None], "must be an int .* was None"),
    (["a"], "must be an int .* was 'a'"),
    ([[1, 2]], r"must be an int .* was \[1, 2\]"),
    (None, "None"),
    (5, "5"),
    (1.5, "1.5"),
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
    assert outputs[running].token_ids == greedy_tokens(lm, [7, 8, 9], 5)
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
    assert [t for d in deltas for t in d.token_ids] == greedy_tokens(llama.lm, [1, 2], 3)
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
    assert output.token_ids == greedy_tokens(llama.lm, prompt, 7)


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


def test_blocks_held_outside_the_engine(llama):
    """Then nothing can run. The engine says so, and goes on when they are given back."""
    engine = Engine(llama.lm, small(num_blocks=6))
    held = [engine.pool.allocate() for _ in range(4)]
    request_id = engine.add_request([1] * 12, SamplingParams(max_tokens=4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"needs 3 blocks; 2 are free and 0 can be evicted"):
            engine.step()
    for block_id in held:
        engine.pool.release(block_id)
    outputs = drain(engine)
    assert outputs[request_id].token_ids == greedy_tokens(llama.lm, [1] * 12, 4)
    assert_serves(engine)


# ── Checkpoints ───────────────────────────────────────────────────────────────


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of a good checkpoint, to be damaged."""
    shutil.copytree(llama.folder, tmp_path, dirs_exist_ok=True)
    assert minikv.load(tmp_path).config == llama.lm.config
    return tmp_path


def change_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))


def change_weights(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def refuse_to_load(folder, message):
    with pytest.raises(CheckpointError, match=message) as error:
        minikv.load(folder)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("name", ["nowhere", "./no/such", "/no/such/folder", "a/b/c", "tiny py"])
def test_no_such_folder(name):
    with pytest.raises(CheckpointError, match=r"no such folder; .*tinypy.*hub id"):
        minikv.load(name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "float32", None], ids=str)
def test_dtypes(dtype):
    with pytest.raises(ValueError, match=f"^dtype: .*float16, torch.bfloat16, was {dtype!r}"):
        minikv.load("tinypy", dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "", 1.5, None], ids=repr)
def test_devices(device):
    with pytest.raises(ValueError, match=f"^device: {device!r}"):
        minikv.load("tinypy", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none():
    with pytest.raises(
        ValueError, match=r"^device: cuda asked for, but torch finds no CUDA device"
    ):
        minikv.load("tinypy", device="cuda")


def test_an_empty_folder(tmp_path):
    refuse_to_load(tmp_path, "no config.json; is it a checkpoint")


@pytest.mark.parametrize("text", ["", "{", '{"a": }', "\x00", "[1, 2]", '"text"', "null"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_damaged_json(folder, file, text):
    (folder / file).write_text(text)
    refuse_to_load(folder, f"{file}.*not (valid json|a json object)")


def test_json_that_is_not_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\xfa")
    refuse_to_load(folder, "config.json.*not valid json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: .*Qwen3.*, was 'GPT2LMHeadModel'"),
        ({"architectures": []}, "architectures: must be one of .*, was 'none'"),
        ({"architectures": ...}, "architectures: must be one of .*, was 'none'"),
        ({"vocab_size": ..., "hidden_size": ...}, "missing vocab_size, hidden_size"),
        ({"num_attention_heads": ...}, "missing num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act: must be one of 'silu', was 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
            "rope_type: .*'llama3', was 'yarn'",
        ),
        (
            {"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}},
            "rope_type: .* was 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: must divide the 4 heads, was 3"),
        ({"hidden_size": 65}, r"embed_tokens.weight .*\(300, 64\).*\(300, 65\)"),
        ({"num_hidden_layers": 3}, r"model.layers.2.* is missing"),
        ({"vocab_size": 299}, r"embed_tokens.weight .*\(300, 64\).*\(299, 64\)"),
        ({"head_dim": 32}, r"q_proj.weight .*\(64, 64\)"),
        ({"attention_bias": True}, r"q_proj.bias is missing"),
    ],
    ids=str,
)
def test_configs(folder, changes, message):
    change_config(folder, **changes)
    refuse_to_load(folder, message)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    refuse_to_load(folder, "no model.safetensors and no model.safetensors.index.json")


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse_to_load(folder, "model.safetensors: missing or damaged")


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor(folder, name):
    change_weights(folder, lambda state: state.pop(name))
    refuse_to_load(folder, f"{name} is missing")


def test_a_tensor_of_another_shape(folder):
    name = "model.layers.0.self_attn.o_proj.weight"
    change_weights(folder, lambda state: state.update({name: torch.zeros(64, 32)}))
    refuse_to_load(folder, rf"{name} .*\(64, 32\), config.json says \(64, 64\)")


@pytest.fixture
def sharded(llama, tmp_path):
    llama.hf.save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refuse_to_load(sharded, f"{shard.name}: missing or damaged .*No such file")


def test_a_truncated_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:300])
    refuse_to_load(sharded, f"{shard.name}: missing or damaged")


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"weight_map": 5}'])
def test_a_damaged_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refuse_to_load(sharded, "model.safetensors.index.json")


def test_an_index_that_forgets_a_tensor(sharded):
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    gone = set(raw["weight_map"].values()) - {raw["weight_map"]["model.norm.weight"]}
    raw["weight_map"] = {k: v for k, v in raw["weight_map"].items() if v not in gone}
    index.write_text(json.dumps(raw))
    refuse_to_load(sharded, "is missing")


@pytest.mark.parametrize("text", ["", "{", "{}"])
def test_a_damaged_tokenizer(folder, text):
    (folder / "tokenizer.json").write_text(text)
    refuse_to_load(folder, "tokenizer.json")


# ── Weights that do not fit ───────────────────────────────────────────────────


def without_norm(state):
    del state["model.norm.weight"]


def of_another_shape(state):
    state["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 3)


def not_tensors(state):
    state["lm_head.weight"] = [1, 2, 3]


def empty(state):
    state.clear()


@pytest.mark.parametrize("damage", [without_norm, of_another_shape, not_tensors, empty])
def test_a_bad_weight_update_changes_nothing(llama, damage):
    engine = careful_engine(llama.lm, small())
    prompts = llama.prompts(13, 9, seed=2)
    params = SamplingParams(max_tokens=10)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = {}
    for _ in range(4):
        step(engine, outputs)
    before = engine.stats()
    state = read_weights(llama.folder)
    damage(state)
    with pytest.raises(ValueError, match="weights: "):
        engine.update_weights(state)
    assert engine.stats() == before and before.blocks_cached > 0
    drain(engine, outputs)
    assert [outputs[i].token_ids for i in ids] == [greedy_tokens(llama.lm, p, 10) for p in prompts]
    assert engine.stats().preemptions == 0
    assert_serves(engine)


@pytest.mark.parametrize("state", [None, 5, "tinypy", [1]], ids=repr)
def test_a_weight_update_wants_a_dict(llama, state):
    engine = Engine(llama.lm, small())
    with pytest.raises(ValueError, match=r"^(state_dict|weights): "):
        engine.update_weights(state)
    assert_serves(engine)


# ── Interruptions ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no more")], ids=repr)
def test_an_interrupted_step_loses_nothing(llama, error, prefix_cache, preemption):
    """Thrown from inside attention, in every third step, before or after a layer has written:
    every request, greedy or sampled, still gets its tokens."""
    config = small(num_blocks=16, prefix_cache=prefix_cache, preemption=preemption)
    prompts = llama.prompts(14, 9, 5, 11, seed=3)
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, n=2, temperature=1.0, seed=1),
        SamplingParams(max_tokens=12, temperature=1.0, seed=2),
        SamplingParams(max_tokens=12),
    ]
    expected = [
        [s.token_ids for s in Engine(llama.lm).generate([p], one)[0].samples]
        for p, one in zip(prompts, params, strict=True)
    ]
    engine = careful_engine(llama.lm, config)
    ids = [engine.add_request(p, one) for p, one in zip(prompts, params, strict=True)]
    outputs, interrupted, count = {}, 0, 0
    while engine.has_unfinished:
        count += 1
        assert count < 500
        if count % 3 == 2:
            engine.attention.interrupt(error, countdown=count % 2)
            with pytest.raises(type(error)):
                engine.step()
            interrupted += 1
            engine.check()
        else:
            step(engine, outputs)
    assert interrupted > 5
    assert [[s.token_ids for s in outputs[i].samples] for i in ids] == expected
    assert_serves(engine)


def test_an_interrupted_sampler_loses_nothing(llama):
    """Not even the place in the sequence of random numbers."""

    class Interrupted(Sampler):
        calls = 0

        def __call__(self, *arguments):
            self.calls += 1
            if self.calls in (1, 3, 4):
                raise KeyboardInterrupt
            return super().__call__(*arguments)

    params = SamplingParams(max_tokens=9, temperature=1.2, seed=5, n=2)
    (expected,) = Engine(llama.lm, small()).generate([[1, 2, 3]], params)
    engine = careful_engine(llama.lm, small(), sampler=Interrupted())
    engine.add_request([1, 2, 3], params)
    outputs, count = {}, 0
    while engine.has_unfinished:
        try:
            step(engine, outputs)
        except KeyboardInterrupt:
            count += 1
            engine.check()
    assert count == 3
    assert [s.token_ids for s in outputs[0].samples] == [s.token_ids for s in expected.samples]


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
    assert outputs[other].token_ids == greedy_tokens(llama.lm, [9, 8, 7], 8)
    assert_serves(engine)


def test_an_interrupted_beam_search_gives_everything_back(llama):
    engine = careful_engine(llama.lm, small())
    free = engine.pool.num_free
    for countdown in (0, 1, 5, 9):
        engine.attention.interrupt(KeyboardInterrupt(), countdown)
        with pytest.raises(KeyboardInterrupt):
            engine.beam_search([1, 2, 3, 4, 5], 3, 12)
        engine.check()
        assert engine.pool.num_free == free
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


def test_a_failing_swap_loses_nothing(llama, monkeypatch):
    """The copy to the host fails in the very step that preempts."""
    config = small(num_blocks=9, preemption="swap", host_blocks=8)
    prompts = llama.prompts(9, 10, 8, seed=6)
    engine = careful_engine(llama.lm, config)
    ids = [engine.add_request(p, SamplingParams(max_tokens=18)) for p in prompts]
    move, failures = engine.runner.move_blocks, []

    def fail_once_each(plan):
        kind = (bool(plan.swap_out), bool(plan.swap_in))
        if any(kind) and kind not in failures:
            failures.append(kind)
            raise OSError("host memory")
        move(plan)

    monkeypatch.setattr(engine.runner, "move_blocks", fail_once_each)
    outputs, count = {}, 0
    while engine.has_unfinished:
        count += 1
        assert count < 500
        try:
            step(engine, outputs)
        except OSError:
            engine.check()
    assert failures
    assert [outputs[i].token_ids for i in ids] == [greedy_tokens(llama.lm, p, 18) for p in prompts]
    assert_serves(engine)


# ── Imports ───────────────────────────────────────────────────────────────────


def test_import_stays_light():
    heavy = ("transformers", "matplotlib", "ipywidgets", "IPython", "triton", "huggingface_hub")
    code = f"import sys, minikv; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "[]"


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
    engine = minikv.Engine(lm)
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
