"""From a name or a folder to a model that runs: `minikv.load`.

The folder has the layout of a `transformers` checkpoint: config.json, one
safetensors file or several with an index, tokenizer.json.
"""

from dataclasses import replace
from pathlib import Path

import torch

from minikv.checkpoint.config_json import (
    ARCHITECTURES as ARCHITECTURES,
    DEFAULTS as DEFAULTS,
    read_config,
)
from minikv.checkpoint.files import (
    INDEX,
    SINGLE,
    is_finite as is_finite,
    read_json as read_json,
    read_shards,
    read_weights,
)
from minikv.checkpoint.tokenizer import read_special_tokens as read_special_tokens, read_tokenizer
from minikv.errors import CheckpointError, require_one_of
from minikv.language_model import LanguageModel
from minikv.model import Transformer
from minikv.states import HybridTransformer

MODELS = Path(__file__).parents[1] / "models"
BUNDLED = {name: MODELS / name for name in ("tinypy", "tinypy-hybrid", "tinypy-states")}
# The files of a checkpoint beside its weights.
SMALL = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json", INDEX,
    "adapter_config.json",
]  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load(
    name_or_path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Load a Llama, Mistral, Ministral, Cwm, Qwen2, Qwen3 or Qwen3.5 (text) checkpoint.

    `name_or_path`: "tinypy", "tinypy-hybrid" or "tinypy-states" (bundled), a local folder, or a
    Hugging Face hub id (downloaded once, then cached). `dtype`: float32, whose tokens are the
    oracle's; float16 or bfloat16 take half the memory, which docs/SETUP.md has in GB.
    Raises CheckpointError (a ValueError) that says what is missing or unsupported.
    """
    require_one_of("dtype", dtype, DTYPES)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: {device!r} is not a device; use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} asked for, but torch finds no CUDA device; use 'cpu'")
    folder = find_folder(str(name_or_path))
    home = BUNDLED["tinypy"] if folder.parent == MODELS else folder  # bundled models share one
    config, tokenizer = read_config(folder), read_tokenizer(home)
    if tokenizer is not None:  # its end token, too: the others are often of the model before chats
        end = tokenizer.token_to_id(read_special_tokens(home).get("eos_token", ""))
        ends = dict.fromkeys((*config.eos_ids, *(() if end is None else (end,))))
        config = replace(config, eos_ids=tuple(ends))
    make = HybridTransformer if config.keeps_states else Transformer
    transformer = make(config, read_weights(folder), device, dtype)
    return LanguageModel(str(name_or_path), transformer, tokenizer)


def find_folder(name: str) -> Path:
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

    try:  # only what is read: many repositories have the weights in other formats, too
        folder = Path(snapshot_download(name, allow_patterns=SMALL))
        index, revision = folder / INDEX, folder.name  # the same, if another one comes meanwhile
        weights = sorted({*read_shards(index).values()}) if index.exists() else [SINGLE]
        return Path(snapshot_download(name, allow_patterns=weights, revision=revision))
    except OSError as error:  # the hub's own errors as well
        raise CheckpointError(
            f"{name!r}: no local folder of that name, and the hub did not give it ({error})"
        ) from error
