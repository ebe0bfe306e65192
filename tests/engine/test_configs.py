"""Broken and strange config.json: a CheckpointError that names the key, or the tokens that
`transformers` writes."""

import json
import math
import shutil

import pytest
import torch
from thorough import thorough_after

import minikv

NAN, INF = math.nan, math.inf
MISSING = object()
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
KEYS = (
    *SIZES, *FLAGS, "architectures", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window", "max_window_layers", "layer_types", "eos_token_id",
    "quantization_config",
)  # fmt: skip
ROPE = ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings")  # fmt: skip
STRANGE = (
    None, MISSING, 0, 1, -1, 2, 3, 64, 1.5, 2**31, 10**23, 1e308, INF, NAN, "", "64", "\ud800",
    True, False, [], [2], [[]], {}, {"rope_type": "linear"}, ["full_attention"] * 2, [None, 1],
)  # fmt: skip


ARCHITECTURES = thorough_after(
    1, ["llama3-rope", "qwen2-window", "mistral", "qwen3", "like-gpt-oss"]
)


@pytest.fixture(params=ARCHITECTURES, scope="module")
def strange(request, checkpoint, tmp_path_factory):
    """`strange(key, value)`: a checkpoint of the kind with that in its config.json."""
    pair = checkpoint(request.param)
    folder = tmp_path_factory.mktemp("strange")
    shutil.copytree(pair.folder, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    good = json.loads((folder / "config.json").read_text())

    def make(*changes):
        raw = json.loads(json.dumps(good))
        for path, value in changes:
            target = raw
            *outer, key = path.split(".")
            for name in outer:
                target = target.get(name) or {}
            if isinstance(target, dict):
                target.pop(key, None)
                if value is not MISSING:
                    target[key] = value
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    keys = *KEYS, *(f"rope_parameters.{key}" for key in ROPE), *good, *minikv.checkpoint.DEFAULTS
    make.keys = list(dict.fromkeys(keys))
    return make


def written(lm, prompt):
    engine = minikv.Engine(lm, minikv.EngineConfig(num_blocks=8, block_size=4))
    params = minikv.SamplingParams(max_tokens=4, ignore_eos=True)
    return engine.generate([prompt], params)[0].token_ids


def written_by_transformers(folder, prompt):
    """None if it does not load or run the checkpoint either. Without its cache, which cuts at a
    `sliding_window` of models that have none, and keeps everything with a window of 1: [-1 + 1 :].
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
            pad_token_id=0, use_cache=False,
        )  # fmt: skip
    except Exception:
        return None
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("first", thorough_after(0, range(3)))
def test_one_strange_value(strange, first):
    """Every value under every key, a third at a time. Where nothing of the model changes by it,
    `transformers` is asked once a key."""
    prompt = [5, 250, 3, 77, 8, 9, 10, 11, 12, 13, 14, 15]
    plain, asked, num_loaded, bad = minikv.load(strange()).config, set(), 0, []
    for key in strange.keys:
        for value in STRANGE[first::3]:
            folder = strange((key, value))
            try:
                lm = minikv.load(folder)
            except minikv.CheckpointError as error:
                assert "config.json: " in str(error) or "weights: " in str(error)
                assert len(str(error).splitlines()) == 1
                continue
            assert lm.logits([1]).shape == (1, lm.config.vocab_size), (key, value)
            num_loaded += 1
            same = lm.config == plain
            if lm.config.max_context < 16 or (same and key in asked):
                continue
            asked |= {key} if same else set()
            expected = written_by_transformers(folder, prompt)
            if expected is not None and written(lm, prompt) != expected:
                bad.append((key, value))
    assert bad == []
    assert num_loaded > 20


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", None, "num_hidden_layers: must be an int from 1 to .*, was None"),
        ("num_hidden_layers", 1.5, "num_hidden_layers: .* was 1.5"),
        ("num_hidden_layers", 10**23, "num_hidden_layers: .* was 1000"),
        ("num_hidden_layers", 0, "num_hidden_layers: .* was 0"),
        ("max_position_embeddings", None, "max_position_embeddings: .* was None"),
        ("num_key_value_heads", 3, "num_key_value_heads: must divide the 4 heads, was 3"),
        ("head_dim", 15, "head_dim: must be even, .* was 15"),
        ("rms_norm_eps", INF, "rms_norm_eps: must be a finite number from 0 to 1, was inf"),
        ("rms_norm_eps", NAN, "rms_norm_eps: .* was nan"),
        ("rms_norm_eps", -1e-6, "rms_norm_eps: .* was -1e-06"),
        ("rope_parameters", "64", "rope_parameters: must be an object, was '64'"),
        ("rope_parameters.rope_theta", 0, "rope_theta: must be a finite number above 0, was 0"),
        ("rope_parameters.rope_theta", None, "rope_theta: .* was None"),
        ("rope_scaling", {"type": "linear", "factor": 0}, "factor: .* above 0, was 0"),
        ("tie_word_embeddings", "no", "tie_word_embeddings: must be true or false, was 'no'"),
        ("eos_token_id", ["x"], "eos_token_id: must be an int, was 'x'"),
    ],
)
def test_the_message_says_what_would_do(strange, key, value, message):
    with pytest.raises(minikv.CheckpointError, match=f"config.json: {message}"):
        minikv.load(strange((key, value)))
