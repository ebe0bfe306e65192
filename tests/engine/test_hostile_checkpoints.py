"""Damaged and hostile checkpoints, and new weights that do not fit: each ends in one sentence."""

import json
import os
import random
import shutil

import pytest
import torch
from helpers import assert_empty, careful_engine, drain, naively, small, step
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from thorough import thorough_after
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split

import minikv
from minikv import CheckpointError, SamplingParams
from minikv.checkpoint import read_weights

FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def folder(checkpoint, tmp_path):
    shutil.copytree(checkpoint("llama").folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as error:
        minikv.load(folder)
    assert isinstance(error.value, ValueError)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 1000


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file(folder, file, kind):
    path = folder / file
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "folder": os.mkdir, "socket": make_socket}[kind](path)
    refused(folder, f"{file}.*not a file")


def make_socket(path):
    import socket

    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite(folder, number, dtype):
    state = {name: one.to(dtype) for name, one in load_file(folder / FILES[3]).items()}
    name = random.Random(str((number, dtype))).choice(list(state))
    state[name].view(-1)[-1] = number
    save_file(state, folder / FILES[3])
    refused(folder, f"{FILES[3]}.*{name} has NaN or infinity")


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_that_are_no_floats(folder, dtype):
    state = load_file(folder / FILES[3])
    name = "model.norm.weight"
    save_file(state | {name: state[name].to(dtype)}, folder / FILES[3])
    refused(folder, f"{FILES[3]}.*{name} is {dtype}")


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.up_proj.weight_scale", "model.layers.1.self_attn.q_proj.bias",
     "model.layers.2.input_layernorm.weight", "model.layers.0.mlp.gate.weight", "score.weight"],
)  # fmt: skip
def test_weights_that_nobody_reads(folder, name):
    """Those of a quantised model, or of another one: it would talk, and not be itself."""
    state = load_file(folder / FILES[3])
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(state | table, folder / FILES[3])
    minikv.load(folder)  # of old checkpoints, and computed anyway
    save_file(state | table | {name: torch.ones(64)}, folder / FILES[3])
    refused(folder, f"^weights: 1 of {len(state) + 2} tensors are .*such as {name}: quantised")


def test_large_finite_weights_are_loaded(folder):
    state = load_file(folder / FILES[3])
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = torch.full_like(state[name], 1e37)  # their sum is infinite
    save_file(state, folder / FILES[3])
    minikv.load(folder)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_half_a_pair_is_no_text(checkpoint, text):
    lm = checkpoint("tinypy").lm
    with pytest.raises(ValueError, match=r"^prompt: character \d is .*, which is no text"):
        minikv.Engine(lm).add_request(text)
    with pytest.raises(ValueError, match=r"^text: character \d is"):
        lm.encode(text)


def change_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))


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
    refused(tmp_path, "no config.json; is it a checkpoint")


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("it-Q4_K_M.gguf", "llama.cpp: give the checkpoint in safetensors"),
        ("adapter_config.json", "merge it into its base model"),
        ("pytorch_model.bin", "a pickle.*save_pretrained"),
        ("pytorch_model-00001-of-00002.bin", "a pickle.*save_pretrained"),
        ("consolidated.00.pth", "give the one for transformers"),
        ("checkpoint-500", "a training run: give one of these"),
        ("model_index.json", "several models"),
        ("model.onnx", "ONNX"),
        ("weights.npz", "MLX"),
        ("tf_model.h5", "TensorFlow"),
    ],
)
def test_what_lies_in_a_folder_that_is_no_checkpoint(folder, name, says, has_config):
    (folder / FILES[3]).unlink()
    if not has_config:
        (folder / FILES[0]).unlink()
    (folder / name).write_bytes(b"x")
    refused(folder, f"no (config.json|model.safetensors and no .*json), but {name}, .*{says}")


def test_only_what_is_read_is_downloaded(folder, tmp_path_factory, llama, monkeypatch):
    """One file of weights, or several by their index, without other layouts, formats and states."""
    beside = (
        "consolidated.safetensors", "original/model.safetensors", "checkpoint-100/config.json",
        "model.fp16.safetensors", "adapter_model.safetensors", "optimizer.pt", "pytorch_model.bin",
        "checkpoint-100/model.safetensors", "trainer_state.json", "onnx/config.json",
    )  # fmt: skip
    asked = []

    def snapshot_download(name, allow_patterns, revision=None):
        assert name == "owner/model" and (revision in (None, "1a2b"))
        asked.append(revision)
        every = [str(one.relative_to(hub)) for one in hub.rglob("*") if one.is_file()]
        for one in filter_repo_objects(every, allow_patterns=allow_patterns):
            (cache / one).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(hub / one, cache / one)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for size, number in (("1GB", 1), ("100KB", 3)):
        hub, cache = (tmp_path_factory.mktemp(name) for name in ("hub", "cache"))
        cache = cache / "1a2b"
        cache.mkdir()
        llama.hf.save_pretrained(hub, max_shard_size=size)
        named = {one.name for one in hub.iterdir()} - {"README.md"}
        for name in (*beside, "tokenizer_config.json", "chat_template.jinja"):
            (hub / name).parent.mkdir(exist_ok=True)
            (hub / name).write_text("{}")
        lm = minikv.load("owner/model")
        assert torch.equal(lm.logits([1, 2]), llama.lm.logits([1, 2]))
        found = {str(one.relative_to(cache)) for one in cache.rglob("*") if one.is_file()}
        assert found == named | {"tokenizer_config.json", "chat_template.jinja"}
        assert len([one for one in found if one.endswith(".safetensors")]) >= number
    assert asked == [None, "1a2b"] * 2


def with_expression(folder, tinypy, pattern, part="pre_tokenizer"):
    """tokenizer.json of tinypy with a regular expression of its own."""
    raw = json.loads((tinypy.folder / "tokenizer.json").read_text())
    if part == "pre_tokenizer":
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        raw[part] = {"type": "Sequence", "pretokenizers": [split | {"invert": False}]}
    else:
        raw[part] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(raw))


ENDLESS_EXPRESSIONS = [  # (expression, part)
    (r"(a+)+$", "pre_tokenizer"),  # 2^n steps
    (r"\w+!", "pre_tokenizer"),  # n^2
    (r".*.*=.*;", "pre_tokenizer"),  # n^3
    (r"\w+!", "decoder"),
    (r"\w+!", "normalizer"),
    *((one, "pre_tokenizer") for one in [
        r"(?:\d|\d)+x", r"(.*)*=", r"([ -~]+)+\n", r"(?:\w\d|\w\d)+!", r"\s+x",
        r"(?:[a-z]+ )+=", r"\w+\w+!", r"[ab]*[ab]*[ab]*c", r"\p{L}*\p{L}*\p{L}*7\n", r"q+q+#",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "part"), thorough_after(1, ENDLESS_EXPRESSIONS))
def test_a_regular_expression_without_end(folder, tinypy, pattern, part):
    """It is told when the checkpoint is loaded, and not by a request that never ends."""
    with_expression(folder, tinypy, pattern, part)
    refused(folder, r"tokenizer.json: a regular expression in it takes 40 times as long as it may")


@pytest.mark.parametrize(
    "pattern",
    thorough_after(1, [
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
        *(r"(?:ab|cd)+| ?\p{L}+", r"(\d{3})*\d+|\s+", r"[^\n]+|\n+", r"\d{1,3}(?=(?:\d{3})*\b)"),
    ]),
)  # fmt: skip
def test_a_regular_expression_that_is_quick_is_taken(folder, tinypy, pattern):
    """Those of published tokenizers have repeated groups, and two kinds that may be a blank."""
    with_expression(folder, tinypy, pattern)
    assert minikv.load(folder).tokenizer is not None


def test_a_tokenizer_that_gives_up_loses_one_request_alone(tinypy):
    """What no check has foreseen ends in a panic of the library, which is no Exception."""
    tokenizer = Tokenizer.from_str(tinypy.lm.tokenizer.to_str())
    tokenizer.pre_tokenizer = Split(Regex(r"(x+)+$|[^x]+|x"), "isolated")
    engine = minikv.Engine(minikv.LanguageModel("own", tinypy.lm.transformer, tokenizer))
    kept = engine.add_request("def", SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match=r"^text: the tokenizer of own has given up: .*retry"):
        engine.add_request("x" * 60 + " ")
    assert drain(engine)[kept].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: .*Qwen3.*, was 'GPT2LMHeadModel'"),
        ({"architectures": []}, "architectures: must be one of .*, was 'none'"),
        ({"architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM.*sinks.*num_local_experts"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3For.*feedforward_layernorm.*rope_local"),
        ({"architectures": ...}, "architectures: must be one of .*, was 'none'"),
        ({"vocab_size": ..., "hidden_size": ...}, "missing vocab_size, hidden_size"),
        ({"num_attention_heads": ...}, "missing num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act: must be one of 'silu', was 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights are not"),
        ({"compression_config": {"format": "f"}}, "compression_config: quantised weights are not"),
        ({"quantization": {"bits": 4}}, "quantization: quantised weights are not"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters: one RoPE for each kind of layer is not supported",
        ),
        (
            {"rope_parameters": ..., "rope_scaling": {"sliding_attention": {"factor": 8.0}}},
            "rope_parameters: one RoPE for each kind of layer is not supported",
        ),
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
    refused(folder, message)


# ── Damaged files ─────────────────────────────────────────────────────────────

INDEX = "model.safetensors.index.json"
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


def cut(name, length):
    """A damage: the last of these files ends after so many bytes, or is gone if None."""

    def damage(folder):
        file = sorted(folder.glob(name))[-1]
        content = file.read_bytes()
        file.unlink()
        if length is not None:
            file.write_bytes(content[:length])

    return damage


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def without(name):
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def having(name, value):
    return lambda state: state | {name: value}


def weights(change):
    def damage(folder):
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file)

    return damage


def forget_a_file(folder):
    """The index names every tensor but those of one file."""
    index = folder / INDEX
    names = json.loads(index.read_text())["weight_map"]
    kept = {k: file for k, file in names.items() if file == names[NORM]}
    index.write_text(json.dumps({"weight_map": kept}))


ENDLESS = [b"[" * 100_000, b'{"a":' * 100_000, b'{"vocab_size": %s}' % (b"9" * 10_000)]
NO_JSON = [b"", b"{", b'{"a": }', b"\x00", b"\xff\xfe\xfa", *ENDLESS]
NO_OBJECT = [b"[1, 2]", b'"text"', b"null"]
DAMAGES = [
    *[
        (write(file, content), f"{file}.*not {what}")
        for file in ("config.json", "generation_config.json")
        for contents, what in ((NO_JSON, "valid json"), (NO_OBJECT, "a json object"))
        for content in contents
    ],
    (cut("model.safetensors", None), f"no model.safetensors and no {INDEX}"),
    *[
        (cut("model.safetensors", length), "model.safetensors: missing or damaged")
        for length in (0, 4, 100, 5000, -1)
    ],
    *[
        (weights(without(name)), f"{name} is missing")
        for name in (NORM, "lm_head.weight", "model.layers.1.mlp.up_proj.weight")
    ],
    (
        weights(having(DOWN, torch.zeros(64, 32))),
        rf"{DOWN} .*\(64, 32\), config.json says \(64, 128\)",
    ),
    *[(write("tokenizer.json", content), "tokenizer.json") for content in (b"", b"{", b"{}")],
]
DAMAGES_OF_TOKENS = [
    (b'{"eos_token": "\\ud800"}', "tokenizer_config.json: eos_token: character 0 is"),
    (b'{"bos_token": {"content": "a\\udfff"}}', "tokenizer_config.json: bos_token: character 1 is"),
    (b"{", "tokenizer_config.json: not valid json"),
    (b"[]", "tokenizer_config.json: not a json object"),
]
DAMAGES_OF_SHARDS = [
    (cut("*.safetensors", None), "of-00.*safetensors: missing or damaged .*No such file"),
    (cut("*.safetensors", 300), "of-00.*safetensors: missing or damaged"),
    *[(write(INDEX, one), INDEX) for one in (b"", b"{", b"{}", b"[]", b'{"weight_map": 5}')],
    *[
        (write(INDEX, json.dumps({"weight_map": {NORM: "a", DOWN: name}}).encode()), says)
        for name, says in [
            ([], "no file's name"),
            ({"a": 1}, "no file's name"),
            (None, "no file's name"),
            (3, "no file's name"),
            ("", "no file's name"),
            ("x" * 300, "no file's name"),
            ("é" * 200, "no file's name"),
            ("a\0b", "missing or damaged"),
            ("\ud800", "missing or damaged"),
            (".", "not a file"),
        ]
    ],
    (write(INDEX, b'{"weight_map": {}}'), "no weight_map"),
    (forget_a_file, "is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_checkpoint(folder, damage, message):
    damage(folder)
    refused(folder, message)


@pytest.mark.parametrize(("content", "message"), thorough_after(1, DAMAGES_OF_TOKENS))
def test_damaged_names_of_tokens(folder, tinypy, content, message):
    shutil.copy(tinypy.folder / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_bytes(content)
    refused(folder, message)


@pytest.mark.parametrize(("damage", "message"), DAMAGES_OF_SHARDS)
def test_a_damaged_checkpoint_of_several_files(llama, tmp_path, damage, message):
    llama.hf.save_pretrained(tmp_path, max_shard_size="100KB")
    damage(tmp_path)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    "change",
    [without(NORM), having(DOWN, torch.zeros(3, 3)), having(NORM, [1, 2, 3]), lambda state: {},
     having("model.layers.9.mlp.up_proj.weight", torch.zeros(3, 3))],
)  # fmt: skip
def test_a_bad_weight_update_changes_nothing(llama, change):
    engine = careful_engine(llama.lm, small())
    prompts = llama.prompts(13, 9, seed=2)
    params = SamplingParams(max_tokens=10)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = {}
    for _ in range(4):
        step(engine, outputs)
    before = engine.stats()
    with pytest.raises(ValueError, match="weights: "):
        engine.update_weights(change(read_weights(llama.folder)))
    assert engine.stats() == before and before.blocks_cached > 0
    drain(engine, outputs)
    assert [outputs[i].token_ids for i in ids] == [naively(llama.lm, p, 10) for p in prompts]
    assert engine.stats().preemptions == 0
    assert_empty(engine)


def test_of_two_shards_the_index_says_which(tmp_path):
    for name, value in (("a", 0.0), ("b", 1.0)):
        save_file({key: torch.full((2,), value) for key in ("w", "unnamed")}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a", "v": "b"}}))
    assert {name: each.tolist() for name, each in read_weights(tmp_path).items()} == {"w": [0, 0]}
