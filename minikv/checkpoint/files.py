"""A checkpoint's files, each either whole and plain or refused by name."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minikv.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What else is published as a model, and what to do.
INSTEAD = {
    "*.gguf": "of llama.cpp: give the checkpoint in safetensors that it was made from",
    "adapter_config.json": "of an adapter (LoRA): merge it into its base model, with "
    "merge_and_unload of peft, and save that",
    "pytorch_model*.bin": "a pickle, which may hold code: load it with transformers, if you trust "
    "it, and save it with save_pretrained",
    "consolidated*": "the layout of the model's makers: give the one for transformers, which many "
    "hubs have beside it",
    "checkpoint-*": "of a training run: give one of these folders",
    "model_index.json": "of a pipeline of several models: give the folder of a language model",
    "*.onnx": "a graph for ONNX: give the checkpoint in safetensors that it was made from",
    "tf_model.h5": "of TensorFlow: load it with transformers and save it with save_pretrained",
    "*.npz": "of MLX: give the checkpoint in safetensors that it was made from",
}


def read_shards(index: Path) -> dict[str, str]:
    """The name of the file that has it, for each tensor that an index names. Raises CheckpointError
    unless each is a text that can be a file's name."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index}: has no weight_map; fetch it again")
    for name, file in found.items():
        if not isinstance(file, str) or not 0 < len(file.encode(errors="replace")) < 256:
            said = f"{str(name)[:80]!r} is said to be in {str(file)[:80]!r}"
            raise CheckpointError(f"{index}: {said}, which is no file's name; fetch it again")
    return found


def _instead(folder: Path) -> str:
    """What lies in a folder that is no checkpoint, and what to do, if that is known."""
    for pattern, what in INSTEAD.items():
        for file in sorted(folder.glob(pattern)):
            return f", but {file.name}, {what}"
    return ""


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors, or those that its index names, from the shards it names.
    Raises CheckpointError, naming file and tensor, for weights that are not finite floating-point
    numbers."""
    shards: dict[str, str] = {}
    if (folder / SINGLE).exists():
        files = [folder / SINGLE]
    elif (folder / INDEX).exists():
        shards = read_shards(folder / INDEX)
        files = [folder / name for name in sorted(set(shards.values()))]
    else:
        raise CheckpointError(f"{folder}: no {SINGLE} and no {INDEX}{_instead(folder)}")
    state: dict[str, torch.Tensor] = {}
    for file in map(require_file, files):
        try:
            with safe_open(file, framework="pt") as tensors:
                found = {
                    name: tensors.get_tensor(name)
                    for name in tensors.keys()  # noqa: SIM118
                    if not shards or (name in shards and folder / shards[name] == file)
                }
        except SafetensorError as error:
            raise CheckpointError(f"{file}: missing or damaged ({error}); fetch it again") from None
        for name, tensor in found.items():
            if tensor.dtype not in FLOATS:
                raise CheckpointError(
                    f"{file}: {name} is {tensor.dtype}; weights must be floats of 16 bits or more"
                )
            if not is_finite(tensor):
                raise CheckpointError(f"{file}: {name} has NaN or infinity; fetch it again")
        state |= found
    return state


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number of it is NaN or infinite. A sum is finite unless a number is not, or it is
    too large; only then is each looked at."""
    return bool(tensor.sum(dtype=torch.float32).isfinite() or tensor.float().isfinite().all())


def read_json(path: Path) -> dict:
    """The object in a checkpoint's json file; CheckpointError with the file's name otherwise."""
    if not path.exists():
        what = _instead(path.parent) or "; is it a checkpoint?"
        raise CheckpointError(f"{path.parent}: no {path.name}{what}")
    try:
        content = json.loads(require_file(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise CheckpointError(f"{path}: not valid json (nested too deep)") from None
    except CheckpointError:
        raise
    except ValueError as error:  # a number of thousands of digits, too
        raise CheckpointError(f"{path}: not valid json ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a json object")
    return content


def require_file(path: Path) -> Path:
    """The same path. Raises CheckpointError unless there is a file: a pipe, for one, would be
    waited for."""
    if not path.is_file():
        found = "not a file" if path.exists() else "missing or damaged (No such file)"
        raise CheckpointError(f"{path}: {found}; fetch it again")
    return path
