"""config.json, as each of seven architectures writes it, to a ModelConfig."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from minikv.checkpoint.files import read_json
from minikv.config import ModelConfig
from minikv.errors import CheckpointError, require_bool, require_int, require_number, require_one_of
from minikv.states import HybridConfig

LARGEST = 2**20  # of any size in config.json: a larger one is a mistake, or not for this engine

# What `transformers` takes for a key of config.json that is not there.
DEFAULTS = {
    "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "num_key_value_heads": None, "head_dim": None, "eos_token_id": None, "layer_types": None,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip
QWEN = {
    "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096,
}  # fmt: skip
MISTRAL = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
CWM = {
    "max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-5, "sliding_window": 8192,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN3_5 = {
    "max_position_embeddings": 32_768, "num_key_value_heads": 4, "head_dim": 256,
    "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
ARCHITECTURES = {  # what is supported, each with its defaults
    "LlamaForCausalLM": DEFAULTS,
    "MistralForCausalLM": DEFAULTS | MISTRAL,
    "MinistralForCausalLM": DEFAULTS | MISTRAL,
    "CwmForCausalLM": DEFAULTS | CWM,
    "Qwen2ForCausalLM": DEFAULTS | QWEN,
    "Qwen3ForCausalLM": DEFAULTS | QWEN | {"head_dim": 128},
    "Qwen3_5ForCausalLM": DEFAULTS | QWEN3_5,
}
GEMMA = (
    "norms behind attention and MLP (post_feedforward_layernorm), scaled embeddings, and "
    "hidden_activation 'gelu_pytorch_tanh'"
)
REFUSED = {  # well known, with layers that alternate: what the engine does not compute
    "Gemma2ForCausalLM": f"{GEMMA}; attn_logit_softcapping",
    "Gemma3ForCausalLM": f"{GEMMA}; a RoPE base for each kind of layer (rope_local_base_freq)",
    "Gemma3ForConditionalGeneration": f"{GEMMA}; pictures (vision_config)",
    "GptOssForCausalLM": "a learned sink for each head (self_attn.sinks), and a mixture of experts "
    "(num_local_experts)",
}
MAMBA = "Mamba layers, whose states follow another rule"
EXPERTS = "a mixture of experts (num_experts)"
REFUSED |= {  # hybrids: layers that keep a state, and what else they have
    "Qwen3_5ForConditionalGeneration": "pictures (vision_config)",
    "Qwen3_5MoeForCausalLM": EXPERTS,
    "Qwen3NextForCausalLM": f"{EXPERTS}, and one product for queries, keys, values and gates",
    "KimiLinearForCausalLM": f"{EXPERTS}, and a gate for each channel (linear_attn_config)",
    "OlmoHybridForCausalLM": "a convolution for each of queries, keys and values",
    "GraniteMoeHybridForCausalLM": MAMBA, "NemotronHForCausalLM": MAMBA,
    "BambaForCausalLM": MAMBA, "JambaForCausalLM": MAMBA, "FalconH1ForCausalLM": MAMBA,
    "MiniMaxForCausalLM": f"{EXPERTS}, and linear layers without a delta rule",
    "Lfm2ForCausalLM": "layers that are only short convolutions (conv_L_cache)",
}  # fmt: skip
QUANTISED = ("quantization_config", "compression_config", "quantization")
REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
ROPE_KEYS = {  # what each kind of rope scaling needs to be told
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for the end tokens, if it names any) of a
    checkpoint folder.

    Raises CheckpointError for a missing or damaged file, an architecture that is not supported, a
    feature that the engine does not run, and a value that cannot be meant: the message has the
    key, the value and what would do.
    """
    file, generation = folder / "config.json", folder / "generation_config.json"
    raw = read_json(file)
    if generation.exists():
        ends = read_json(generation).get("eos_token_id")
        raw |= {} if ends is None else {"eos_token_id": ends}
    try:
        return _model_config(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _model_config(raw: dict) -> ModelConfig:
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "none"
    if isinstance(architecture, str) and architecture in REFUSED:
        raise ValueError(
            f"architectures: {architecture} is not supported, because it has "
            f"{REFUSED[architecture]}; use one of {', '.join(ARCHITECTURES)}"
        )
    require_one_of("architectures", architecture, ARCHITECTURES)
    for key in QUANTISED:
        if raw.get(key):
            raise ValueError(f"{key}: quantised weights are not supported; use an fp16 checkpoint")
    _require_keys(raw, REQUIRED)
    raw = ARCHITECTURES[architecture] | raw

    def size(key: str) -> int:
        return require_int(key, raw[key], 1, LARGEST)

    def flag(key: str) -> bool:
        return require_bool(key, raw[key])

    require_one_of("hidden_act", raw["hidden_act"], ["silu"])
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = heads if raw["num_key_value_heads"] is None else size("num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: must divide the {heads} heads, was {kv_heads}")
    if raw["head_dim"] is None and hidden % heads:
        raise ValueError(f"hidden_size: must be a multiple of the {heads} heads, was {hidden}")
    head_dim = hidden // heads if raw["head_dim"] is None else size("head_dim")
    if head_dim % 2:
        raise ValueError(f"head_dim: must be even, for RoPE turns pairs, was {head_dim}")
    eos = raw["eos_token_id"]
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    eps = require_number("rms_norm_eps", raw["rms_norm_eps"], " from 0 to 1", lambda x: 0 <= x <= 1)
    hybrid = architecture.startswith("Qwen3_5")
    theta, scaling, factor = _rope(raw)
    if factor != 1 and not hybrid:
        raise ValueError("partial_rotary_factor: RoPE on a part of the channels is not supported")
    qwen2, bias = architecture.startswith("Qwen2"), flag("attention_bias")
    config = ModelConfig(
        vocab_size=size("vocab_size"), hidden_size=hidden,
        intermediate_size=size("intermediate_size"), num_layers=size("num_hidden_layers"),
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        max_context=size("max_position_embeddings"), rms_norm_eps=eps,
        tie_embeddings=flag("tie_word_embeddings"),
        attention_bias=qwen2 or bias, output_bias=not qwen2 and bias, mlp_bias=flag("mlp_bias"),
        qk_norm=architecture.startswith("Qwen3"), rope_theta=theta, rope_scaling=scaling,
        windows=_windows(architecture, size("num_hidden_layers"), raw, flag("use_sliding_window")),
        eos_ids=tuple(require_int("eos_token_id", token_id) for token_id in eos),
    )  # fmt: skip
    return _hybrid(config, raw, factor) if hybrid else config


def _hybrid(config: ModelConfig, raw: dict, factor: float) -> HybridConfig:
    """The same, with what it says of linear layers; RoPE turns a `factor` of a head's channels."""

    def size(key: str) -> int:
        return require_int(key, raw["linear_" + key], 1, LARGEST)

    if config.attention_bias:
        raise ValueError("attention_bias: not supported in a model with linear layers, was True")
    count, kinds = config.num_layers, {"linear_attention": True, "full_attention": False}
    every = require_int("full_attention_interval", raw.get("full_attention_interval", 4), 1)
    types = raw["layer_types"]
    if types is None:
        types = [list(kinds)[(i + 1) % every == 0] for i in range(count)]
    types = _types(types, count)
    is_linear = tuple(kinds[require_one_of("layer_types", kind, kinds)] for kind in types)
    if all(is_linear) or not any(is_linear):
        raise ValueError(f"layer_types: needs layers of both kinds, {list(kinds)}, was {types!r}")
    rotary_dim = int(config.head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > config.head_dim:
        raise ValueError(
            f"partial_rotary_factor: must leave an even number of a head's {config.head_dim} "
            f"channels to RoPE, was {factor}"
        )
    key_heads, value_heads = size("num_key_heads"), size("num_value_heads")
    if value_heads % key_heads:
        raise ValueError(
            f"linear_num_value_heads: must be a multiple of the {key_heads} key heads, was "
            f"{value_heads}"
        )
    plain = {field.name: getattr(config, field.name) for field in fields(config)}
    plain |= dict(windows=(None,) * is_linear.count(False), qk_norm=True)
    return HybridConfig(
        **plain, is_linear=is_linear, key_heads=key_heads, value_heads=value_heads,
        key_dim=size("key_head_dim"), value_dim=size("value_head_dim"),
        width=require_int("linear_conv_kernel_dim", raw["linear_conv_kernel_dim"], 2, LARGEST),
        rotary_dim=rotary_dim,
    )  # fmt: skip


def _rope(raw: dict) -> tuple[float, dict | None, float]:
    """RoPE's theta; its scaling with all that it needs, None for none; its share of channels."""
    # transformers 5 writes one dict; earlier versions wrote theta and scaling apart.
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters: must be an object, was {rope!r}")
    if any(isinstance(one, dict) for one in rope.values()):
        raise ValueError(
            f"rope_parameters: one RoPE for each kind of layer is not supported, was {rope!r}"
        )
    rope = {"rope_theta": raw.get("rope_theta", 10_000.0), "type": "default"} | rope
    kind = rope.get("rope_type", rope["type"])
    require_one_of("rope_type", kind, ROPE_KEYS)
    part = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1))
    part = require_number("partial_rotary_factor", part, " from 0 to 1", lambda x: 0 < x <= 1)
    _require_keys(rope, ROPE_KEYS[kind])
    wanted = ("rope_theta", *ROPE_KEYS[kind])
    rope = {key: require_number(key, rope[key], " above 0", lambda x: x > 0) for key in wanted}
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ValueError(f"high_freq_factor: must be above low_freq_factor, was {rope!r}")
    theta = rope.pop("rope_theta")
    return theta, {"rope_type": kind, **rope} if rope else None, part


def _require_keys(raw: dict, keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if key not in raw]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")


def _windows(
    architecture: str, num_layers: int, raw: dict, is_switched_on: bool
) -> tuple[int | None, ...]:
    """Sliding window of each layer; Qwen switches it on with a flag, the others by naming a size.
    Mistral has it in all layers; the others list a type for each."""
    qwen, size, types = architecture.startswith("Qwen"), raw["sliding_window"], raw["layer_types"]
    if architecture.startswith("Llama") or size is None or (qwen and not is_switched_on):
        return (None,) * num_layers
    size = require_int("sliding_window", size, 1, LARGEST)
    if architecture.startswith("Mistral") or (types is None and architecture.startswith("Minis")):
        return (size,) * num_layers
    if types is None and not qwen:  # Cwm
        return tuple(size if layer % 4 else None for layer in range(num_layers))
    if types is None:
        first = require_int("max_window_layers", raw["max_window_layers"], 0)
        return tuple(size if layer >= first else None for layer in range(num_layers))
    kinds = {"sliding_attention": size, "full_attention": None}
    types = _types(types, num_layers)
    return tuple(kinds[require_one_of("layer_types", kind, kinds)] for kind in types)


def _types(types: Any, num_layers: int) -> list:
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"layer_types: must be a list of {num_layers} types, was {types!r}")
    return types
