"""config.json, as each of six architectures writes it, to a ModelConfig."""

from pathlib import Path

from minikv.checkpoint.files import read_json
from minikv.config import ModelConfig
from minikv.errors import CheckpointError, require_bool, require_int, require_number, require_one_of

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
ARCHITECTURES = {  # what is supported, each with its defaults
    "LlamaForCausalLM": DEFAULTS,
    "MistralForCausalLM": DEFAULTS | MISTRAL,
    "MinistralForCausalLM": DEFAULTS | MISTRAL,
    "CwmForCausalLM": DEFAULTS | CWM,
    "Qwen2ForCausalLM": DEFAULTS | QWEN,
    "Qwen3ForCausalLM": DEFAULTS | QWEN | {"head_dim": 128},
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
    theta, scaling = _rope(raw)
    qwen2, bias = architecture.startswith("Qwen2"), flag("attention_bias")
    return ModelConfig(
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


def _rope(raw: dict) -> tuple[float, dict | None]:
    """RoPE's theta, and its scaling with all that it needs; None for none."""
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
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1)) != 1:
        raise ValueError("partial_rotary_factor: RoPE on a part of the channels is not supported")
    _require_keys(rope, ROPE_KEYS[kind])
    wanted = ("rope_theta", *ROPE_KEYS[kind])
    rope = {key: require_number(key, rope[key], " above 0", lambda x: x > 0) for key in wanted}
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ValueError(f"high_freq_factor: must be above low_freq_factor, was {rope!r}")
    theta = rope.pop("rope_theta")
    return theta, {"rope_type": kind, **rope} if rope else None


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
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"layer_types: must be a list of {num_layers} types, was {types!r}")
    return tuple(kinds[require_one_of("layer_types", kind, kinds)] for kind in types)
