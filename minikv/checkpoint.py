"""From a name or a folder to a model that runs: `minikv.load`.

The folder has the layout of a `transformers` checkpoint: config.json, one
safetensors file or several with an index, tokenizer.json.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from minikv.config import ModelConfig
from minikv.errors import CheckpointError
from minikv.language_model import LanguageModel
from minikv.model import Transformer

BUNDLED = {"tinypy": Path(__file__).parent / "models" / "tinypy"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

ROPE_KEYS = {  # what each kind of rope scaling needs to be told
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
}  # fmt: skip


def load(
    name_or_path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Load a Llama, Mistral, Qwen2 or Qwen3 checkpoint.

    `name_or_path`: "tinypy" (bundled), a local folder, or a Hugging Face hub id
    (downloaded once, then cached). `dtype`: float32, float16 or bfloat16.
    Raises CheckpointError (a ValueError) that says what is missing or unsupported.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype: {dtype} is not supported; use one of {', '.join(map(str, DTYPES))}"
        )
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: {device!r} is not a device; use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} asked for, but torch finds no CUDA device; use 'cpu'")
    folder = _find(str(name_or_path))
    config = read_config(folder)
    transformer = Transformer(config, read_weights(folder), device, dtype)
    return LanguageModel(str(name_or_path), transformer, read_tokenizer(folder))


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for the end tokens) of a checkpoint folder.

    Raises CheckpointError for a missing or damaged file, an architecture that is
    not one of ARCHITECTURES, or a feature that the engine does not run.
    """
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{folder}: architecture {names[0]!r} is not supported; supported: "
            + ", ".join(ARCHITECTURES)
        )
    architecture = names[0]
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{folder}: quantised weights are not supported; use an fp16 checkpoint"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{folder}: hidden_act is {raw['hidden_act']!r}; only 'silu' is supported"
        )
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    missing = [name for name in required if name not in raw]
    if missing:
        raise CheckpointError(f"{folder / 'config.json'}: missing {', '.join(missing)}")

    # transformers 5 writes one dict; earlier versions wrote theta and scaling apart.
    rope = raw.get("rope_parameters") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    scaling = rope or raw.get("rope_scaling") or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_KEYS:
        raise CheckpointError(
            f"{folder}: rope scaling {rope_type!r} is not supported; "
            f"supported: {', '.join(ROPE_KEYS)}"
        )
    missing = [name for name in ROPE_KEYS[rope_type] if name not in scaling]
    if missing:
        raise CheckpointError(f"{folder}: rope scaling {rope_type!r} lacks {', '.join(missing)}")
    qwen2, qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    layers = raw["num_hidden_layers"]
    heads = raw["num_attention_heads"]
    eos = raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json(generation).get("eos_token_id", eos)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_context=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        attention_bias=qwen2 or raw.get("attention_bias", False),
        output_bias=not qwen2 and raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=qwen3,
        rope_theta=theta,
        rope_scaling=None if rope_type == "default" else dict(scaling, rope_type=rope_type),
        windows=_windows(raw, architecture, layers),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _windows(raw: dict, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer; Qwen switches it on with a flag, Mistral by naming a size."""
    size = raw.get("sliding_window")
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window", False):
        size = None
    if architecture.startswith("Llama") or size is None:
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 0) if architecture.startswith("Qwen") else 0
        return tuple(size if layer >= first else None for layer in range(layers))
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """tokenizer.json, or None where there is none."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{file}: damaged ({error}); fetch it again") from None


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        files = [single]
    elif index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{index}: has no weight_map; fetch it again")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
    else:
        raise CheckpointError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                state |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise CheckpointError(
                f"{file}: the index names this shard, but it is missing"
            ) from None
        except SafetensorError as error:
            raise CheckpointError(
                f"{file}: damaged or cut short ({error}); fetch it again"
            ) from None
    return state


def read_json(path: Path) -> dict:
    """The object in a checkpoint's json file; CheckpointError with the file's name otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: no {path.name} there; is it a checkpoint folder?"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid json ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a json object")
    return content


def _find(name: str) -> Path:
    """The folder behind a bundled name, a path or a hub id."""
    if name in BUNDLED:
        return BUNDLED[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{name!r}: no such folder; give a bundled name ({', '.join(BUNDLED)}), "
            "a local folder, or a hub id of the form 'owner/model'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{name!r}: no local folder of that name, and the hub did not give it ({error})"
        ) from error
