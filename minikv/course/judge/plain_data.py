"""What is seen of a reader's code, as plain data: numbers, texts, tensors, and lists of them.

`kept` copies a value. `pack` makes bytes of it, and `unpack` the value again in the process that
judges. Nothing in those bytes is code, so unlike a pickle they can be read without trust in who
wrote them; and an object that says it is equal to everything does not arrive as one.
"""

import json
import math
import struct
from typing import Any

import numpy as np
import torch

EXACT = (int, str, bool)  # compared as they are, and never changed
PLAIN: Any = ((str, str.__str__), (int, int.__int__), (float, float.__float__))
LARGEST = 64 << 20  # bytes of one message
LARGEST_TEXT = 4 << 20  # of all that is no tensor: "[],[]" takes twenty times as much when read
MOST_DIMENSIONS = 64  # of a tensor that torch can compute with
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
    of them, each of exactly that type. Of anything else only the kind is kept.

    The value is not asked: what it holds is read as the class does that it is built on, because a
    class of the reader's can say anything when its own methods are called."""
    kind = type(value)  # `isinstance` would ask the value for its class
    if kind in EXACT or kind is Words or value is None:
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return value.detach().clone()
    if kind is np.ndarray or kind in np.sctypeDict.values():
        return value.tolist()
    for row in (list, tuple):
        if issubclass(kind, row):
            return [kept(item) for item in row.__iter__(value)]
    if issubclass(kind, dict):
        return {_key(key): kept(item) for key, item in dict.items(value)}
    for plain, read in PLAIN:
        if issubclass(kind, plain):
            return read(value)
    for unordered in (set, frozenset):
        if issubclass(kind, unordered):
            return {_key(item) for item in unordered.__iter__(value)}
    return f"a {kind.__name__}"


def _key(value: Any) -> Any:
    """The same for what stands in a set or names an entry: a tuple stays one."""
    if issubclass(type(value), tuple):
        return tuple(map(_key, tuple.__iter__(value)))
    return kept(value)


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
        if size > LARGEST_TEXT:
            raise Unreadable(f"{size:,} bytes of text")
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
            buffer, buffers[place] = buffers[place], b""  # each is one tensor's
            size = math.prod(shape) * DTYPES[name].itemsize
            if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0:
                raise Unreadable(f"no shape: {shape}")
            if size != len(buffer):  # what is missing would be this process's own memory
                raise Unreadable(f"{len(buffer)} bytes for {size}")
            if size == 0:
                return torch.empty(shape, dtype=DTYPES[name])
            flat = torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
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
