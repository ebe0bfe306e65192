"""Which model computed these K and V: its fingerprint, and the check of a session's header.

K and V of other weights may have the right shape. An engine that used them would write fluent
nonsense, and no error would be raised. So everything that leaves the process carries a fingerprint,
which is compared when it comes back.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch

from minikv.config import ModelConfig
from minikv.model import Transformer

FORMAT, VERSION = "minikv session", "1"
WAY_OUT = {
    "format": "this file is not a session of minikv",
    "version": "save it again with this version",
    "model": "it was computed by other weights; load the model that it was saved with",
    "dtype": "load the model in the session's dtype",
    "stored": "set EngineConfig.kv_dtype to the session's",
    "block_size": "set EngineConfig.block_size to the session's",
}


class SessionError(ValueError):
    """A session that must not be used here. The message says what differs, and the way out."""


def fingerprint(config: ModelConfig, state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256, in hexadecimal, over the configuration and all weights: names, dtypes, shapes and
    bytes, sorted by name."""
    digest = hashlib.sha256(repr(sorted(asdict(config).items())).encode())
    add_tensors(digest, state)
    return digest.hexdigest()


def add_tensors(digest: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Feed names, dtypes, shapes and bytes of tensors to a hash, such as hashlib.sha256().

    Equal tensors under equal names give equal digests, in whatever order they are listed and
    however they lie in memory; anything else gives another digest. A name may be any text.
    `bytes_of` gives the bytes of a tensor, row by row.
    """
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(bytes_of(tensor))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and on a CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]


_known: WeakKeyDictionary[Transformer, str] = WeakKeyDictionary()


def model_fingerprint(transformer: Transformer) -> str:
    """The fingerprint of a transformer as it computes: its weights, in the dtype they are used in.
    Computed once per transformer."""
    if transformer not in _known:
        _known[transformer] = fingerprint(transformer.config, weights_of(transformer))
    return _known[transformer]


def weights_of(transformer: Transformer) -> dict[str, torch.Tensor]:
    """Every tensor that K and V, or the tokens after them, depend on."""
    state = {"embedding": transformer.embedding, "rope": transformer.rope_table}
    parts: dict[str, Any] = {"norm": transformer.norm, "head": transformer.head}
    for i, layer in enumerate(transformer.layers):
        for name in ("norm_1", "qkv", "q_norm", "k_norm", "out", "norm_2", "gate_up", "down"):
            parts[f"{i}.{name}"] = getattr(layer, name)
    for name, part in parts.items():
        for piece in ("weight", "bias"):
            tensor = getattr(part, piece, None)
            if tensor is not None:
                state[f"{name}.{piece}"] = tensor.to_dense() if tensor.is_mkldnn else tensor
    return state


def checksum_of(header: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256, in hexadecimal, over a session's header (without its checksum) and tensors."""
    rest = {name: value for name, value in header.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    add_tensors(digest, tensors)
    return digest.hexdigest()


def check_session(
    header: Mapping[str, str], tensors: Mapping[str, torch.Tensor], expected: Mapping[str, str]
) -> None:
    """Raise SessionError unless this session can be used where `expected` holds.

    Every field of `expected` must be in the header with the same value. The tensors must be those
    that the header names: `shapes` has dtype and shape of each, as `shapes_of` gives them, in JSON
    with sorted keys; `num_tokens` is the length of `tokens`. Finally, the checksum must be that of
    `checksum_of`. A field or tensor that is missing makes the session unusable, too.
    """
    for name, value in expected.items():
        if header.get(name) != value:
            way_out = WAY_OUT.get(name, "it belongs to another engine")
            raise SessionError(
                f"session: {name} is {header.get(name)!r}, here it is {value!r}: {way_out}"
            )
    found = json.dumps(shapes_of(tensors), sort_keys=True)
    if header.get("shapes") != found:
        raise SessionError(
            f"session: shapes should be {header.get('shapes')}, are {found}: it is damaged"
        )
    num_tokens = tensors["tokens"].numel() if "tokens" in tensors else None
    if num_tokens is None or header.get("num_tokens") != str(num_tokens):
        raise SessionError(
            f"session: {header.get('num_tokens')} tokens are announced, {num_tokens} are there: "
            "it is damaged"
        )
    if header.get("checksum") != checksum_of(header, tensors):
        raise SessionError("session: the checksum does not fit tokens, K and V: it is damaged")


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list]:
    """[dtype, *shape] of each tensor."""
    return {
        name: [str(one.dtype).removeprefix("torch."), *one.shape] for name, one in tensors.items()
    }
