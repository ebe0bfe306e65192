"""A checkpoint's files, each either whole and plain or refused by name."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from minikv.errors import CheckpointError


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """tokenizer.json, or None where there is none. A text is never cut or filled up, whatever the
    file says of truncation and padding: the engine says what is too long."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    require_file(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{file}: damaged ({error}); fetch it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names; of those that are in
    several shards, the one that the index names. Raises CheckpointError, naming file and tensor,
    for weights that are not finite floating-point numbers."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    shards: Any = {}
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
    for file in map(require_file, files):
        try:
            with safe_open(file, framework="pt") as tensors:
                found = {
                    name: tensors.get_tensor(name)
                    for name in tensors.keys()  # noqa: SIM118
                    if name not in shards or folder / str(shards[name]) == file
                }
        except SafetensorError as error:
            raise CheckpointError(f"{file}: missing or damaged ({error}); fetch it again") from None
        for name, tensor in found.items():
            if not tensor.is_floating_point():
                raise CheckpointError(f"{file}: {name} is {tensor.dtype}; weights must be floats")
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
        raise CheckpointError(f"{path.parent}: no {path.name}; is it a checkpoint?")
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
