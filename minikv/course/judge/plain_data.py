"""What is seen of a reader's code, as plain data: numbers, texts, tensors, and lists of them.

`kept` copies a value. `pack` makes bytes of it, and `unpack` the value again in the process that
judges. Nothing in those bytes is code, so unlike a pickle they can be read without trust in who
wrote them; and an object that says it is equal to everything does not arrive as one.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch

EXACT = (int, str, bool)  # compared as they are, and never changed
LARGEST = 64 << 20  # bytes of one message
DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


class Words(str):
    """A text that is told without quotes."""

    __repr__ = str.__str__


class Unreadable(ValueError):
    """Bytes that `pack` has not made."""


def kept(value: Any) -> Any:
    """A copy that later changes do not reach: numbers, texts, tensors, and lists, dicts and sets
    of them. Of anything else only the kind is kept."""
    if type(value) in EXACT or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [kept(item) for item in value]
    if isinstance(value, Mapping):
        return {kept(key): kept(item) for key, item in value.items()}
    if isinstance(value, Words):
        return value
    for plain in (str, int, float):
        if isinstance(value, plain):  # as the class below says, whatever this one does
            return (str.__str__ if plain is str else getattr(plain, f"__{plain.__name__}__"))(value)
    if isinstance(value, set | frozenset):
        return {item if isinstance(item, tuple) else kept(item) for item in value}
    return f"a {type(value).__name__}"


def pack(value: Any) -> bytes:
    """A kept value as bytes: the length of a JSON text, the text, and the tensors' memory."""
    buffers: list[bytes] = []
    body = _packed(value, buffers)
    text = json.dumps([body, [len(one) for one in buffers]]).encode()
    return b"".join([struct.pack("<Q", len(text)), text, *buffers])


def _packed(value: Any, buffers: list[bytes]) -> Any:
    if type(value) in EXACT or value is None or type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if str(value.dtype) not in DTYPES:
            value = value.double()
        flat = value.detach().cpu().contiguous().reshape(-1)
        buffers.append(flat.view(torch.uint8).numpy().tobytes())
        return {"tensor": [str(value.dtype), list(value.shape), len(buffers) - 1]}
    if isinstance(value, list | tuple):
        inner = [_packed(item, buffers) for item in value]
        return inner if isinstance(value, list) else {"tuple": inner}
    if isinstance(value, dict):
        return {"dict": [[_packed(one, buffers) for one in pair] for pair in value.items()]}
    if isinstance(value, set):
        return {"set": [_packed(item, buffers) for item in value]}
    if isinstance(value, Words):
        return {"words": str.__str__(value)}
    return _packed(kept(value), buffers)


def unpack(data: bytes) -> Any:
    """The value that was packed. Raises Unreadable for anything else."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        body, lengths = json.loads(data[8 : 8 + size])
        buffers, at = [], 8 + size
        for length in lengths:
            buffers.append(data[at : at + length])
            at += length
        if at != len(data) or any(length < 0 for length in lengths):
            raise Unreadable("the lengths do not fit")
        return _unpacked(body, buffers)
    except (
        ValueError, TypeError, LookupError, OverflowError, struct.error, RuntimeError,
    ) as error:  # fmt: skip
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def _unpacked(body: Any, buffers: list[bytes]) -> Any:
    if isinstance(body, list):
        return [_unpacked(item, buffers) for item in body]
    if not isinstance(body, dict):
        return body
    [(kind, inner)] = body.items()
    match kind:
        case "tensor":
            name, shape, place = inner
            if not buffers[place]:
                return torch.empty(shape, dtype=DTYPES[name])
            flat = torch.frombuffer(bytearray(buffers[place]), dtype=torch.uint8)
            return flat.view(DTYPES[name]).reshape(shape)
        case "tuple":
            return tuple(_unpacked(item, buffers) for item in inner)
        case "set":
            return {_unpacked(item, buffers) for item in inner}
        case "dict":
            return {_unpacked(k, buffers): _unpacked(v, buffers) for k, v in inner}
        case "words" if isinstance(inner, str):
            return Words(inner)
    raise Unreadable(f"unknown kind {kind!r}")
