"""A conversation in a file: its tokens with their K and V, for another process to continue.

The file is safetensors, which holds tensors and a header but no code. The header says which model
computed these K and V (`identity.check_session`); the file is written whole or not at all
(`folder.save`).

    tokens      (num_tokens,) int32
    kv          (num_layers, T, 2, K, D): K and V of the first T tokens, whole blocks of them; or
    k_codes, …  the parts of `minikv.quant.store.QuantisedStore`, (num_layers, num_blocks, …)

The few tokens after the last whole block are computed again.
"""

import json
import os
from collections.abc import Hashable, Sequence as Seq
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from minikv.blocks import BlockTable
from minikv.checkpoint import is_finite
from minikv.engine import Engine
from minikv.errors import OutOfBlocks, require_ids, require_one_of
from minikv.outputs import RequestOutput
from minikv.quant import KVFormat, Pieces, Shapes, format_of, part_shapes
from minikv.sampling import SamplingParams
from minikv.tiers.blocks import drop_open, parts_of
from minikv.tiers.folder import Folder, save
from minikv.tiers.identity import (
    FORMAT,
    VERSION,
    SessionError,
    check_session,
    checksum_of,
    model_fingerprint,
    shapes_of,
)
from minikv.version import __version__

What = int | str | Seq[int] | RequestOutput


class Saved(NamedTuple):
    """What was written to a session file."""

    num_tokens: int
    num_blocks: int  # with K and V
    num_bytes: int
    k_error: float  # the largest change of a number by quantising; 0 for an exact session
    v_error: float


def save_session(
    engine: Engine,
    what: What,
    path: str | os.PathLike,
    kv_dtype: str = "auto",
    cache_salt: Hashable = None,
) -> Saved:
    """Write a conversation to a file.

    what: the id of a running request, an output of the engine, or a text or its token ids.
    kv_dtype: "auto" stores K and V as they are; "int8" or "int4" are smaller, and not exact.
    cache_salt: the salt of its prefix, unless `what` is a request.

    Tokens that are no longer cached are computed first. Raises ValueError, naming the argument, for
    what cannot be saved. If anything fails, an earlier file is still there.
    """
    require_one_of("kv_dtype", kv_dtype, ("auto", "int8", "int4"))
    require_all_in_blocks(engine)
    if kv_dtype != "auto" and engine.config.kv_dtype != "auto":
        raise ValueError(
            f"kv_dtype: K and V are {engine.config.kv_dtype} already; save them as they are"
        )
    token_ids, parts = _find(engine, what, cache_salt)
    stored = engine.config.kv_dtype if kv_dtype == "auto" else kv_dtype
    errors = 0.0, 0.0
    if kv_dtype != "auto":
        kv, parts = (
            parts["kv"],
            quantise(format_of(kv_dtype, engine.config.block_size), parts["kv"]),
        )
        errors = largest_errors(kv, parts, format_of(kv_dtype, engine.config.block_size))
    num_blocks = next(iter(parts.values())).shape[1]
    if "kv" in parts:
        parts["kv"] = parts["kv"].flatten(1, 2)  # by token: another block size can read it
    tensors = parts | {"tokens": torch.tensor(token_ids, dtype=torch.int32)}
    tensors = {name: one.cpu().contiguous() for name, one in tensors.items()}
    header = _expected(engine, stored) | {
        "shapes": json.dumps(shapes_of(tensors), sort_keys=True),
        "num_tokens": str(len(token_ids)),
        "course": __version__,
        "k_error": repr(errors[0]),
        "v_error": repr(errors[1]),
    }
    header["checksum"] = checksum_of(header, tensors)
    return Saved(len(token_ids), num_blocks, write_file(path, tensors, header), *errors)


def require_all_in_blocks(engine: Engine) -> None:
    """Raises ValueError unless K and V are all that a model keeps of a text."""
    if engine.lm.config.keeps_states:
        raise ValueError(
            f"session: a file has no place for states, and {engine.lm.name} has layers with one; "
            "send the text again"
        )


def load_session(engine: Engine, path: str | os.PathLike, cache_salt: Hashable = None) -> list[int]:
    """Put a session's K and V into the prefix cache, under this salt; returns its tokens.

    A prompt that begins with these tokens then finds them there. Raises SessionError, saying what
    differs, for a file that does not belong to this engine's model and store, or is damaged;
    OutOfBlocks if the pool has no room. After an error nothing has changed.
    """
    require_all_in_blocks(engine)
    if engine.cache is None:
        raise ValueError("prefix_cache: must be True, because a session is loaded into it")
    header, tensors = read_file(path)
    try:
        token_ids, parts = _checked(engine, header, tensors)
    except SessionError as error:
        raise SessionError(f"{error} (in {Path(path).name})") from error
    put_prefix(engine, token_ids, parts, cache_salt)
    return token_ids


def blocks_of_prefix(
    engine: Engine, token_ids: list[int], salt: Hashable = None
) -> dict[str, torch.Tensor]:
    """K and V of the longest beginning of these tokens that the prefix cache has, in whole blocks:
    each part of the store as (num_layers, num_blocks, …), on the model's device."""
    if engine.cache is None:
        raise ValueError("prefix_cache: must be True, because K and V are taken out of it")
    return _read(engine, engine.cache.match(token_ids, salt).block_ids)


def put_prefix(
    engine: Engine, token_ids: list[int], parts: dict[str, torch.Tensor], salt: Hashable = None
) -> None:
    """Put what `blocks_of_prefix` returned, of an engine with the same weights and EngineConfig,
    under the prefix cache. Raises OutOfBlocks, changing nothing, if the pool has no room."""
    if engine.cache is None:
        raise ValueError("prefix_cache: must be True, because K and V are put under it")
    parts_of(engine.store)  # or raise, before anything changes
    with engine.changing_state():
        error = _insert(engine, token_ids, parts, salt)
    if error is not None:
        raise error


def write_file(
    path: str | os.PathLike, tensors: dict[str, torch.Tensor], header: dict[str, str]
) -> int:
    """Write a session file, whole or not at all; returns its bytes."""
    data, path = to_bytes(tensors, header), _path(path)
    try:
        save(Folder(path.parent), path.name, data)
    except (OSError, ValueError) as error:  # the second for a name with a NUL
        raise SessionError(f"path: cannot write {str(path)!r}: {error}") from error
    return len(data)


def read_file(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Header and tensors of a session file; only the file's own format is checked."""
    path = _path(path)
    try:
        if not S_ISREG(path.stat().st_mode):  # a FIFO would be waited for
            raise OSError("it is not a plain file")
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        # The last two are safetensors' for a dtype that this PyTorch does not have.
        raise SessionError(f"path: {str(path)!r} is not a whole session file: {error}") from error


def _path(path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path: must be a file's path, was {path!r}")
    return Path(path)


def _checked(
    engine: Engine, header: dict[str, str], tensors: dict[str, torch.Tensor]
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """A session's tokens, and the blocks of its K and V as this engine stores them. Raises
    SessionError for a session that must not be used here."""
    stored = engine.config.kv_dtype
    if stored == "auto" and header.get("stored") in ("int8", "int4"):
        stored = header["stored"]  # quantised to be small; read back into floats
    check_session(header, tensors, _expected(engine, stored, header))
    if tensors["tokens"].dim() != 1 or tensors["tokens"].dtype != torch.int32:
        raise SessionError("session: tokens must be a list of int32: it is damaged")
    try:
        token_ids = require_ids("session: tokens", tensors["tokens"], engine.lm.config.vocab_size)
        block_size = int(header.get("block_size", engine.config.block_size))
    except ValueError as error:
        raise SessionError(f"{error}: it is damaged") from error
    parts = {name: one for name, one in tensors.items() if name != "tokens"}
    _check_parts(engine, stored, block_size, parts, len(token_ids))
    size = engine.config.block_size
    if stored != engine.config.kv_dtype:
        one = format_of(stored, block_size)
        parts = {"kv": dequantise(one, parts).to(engine.lm.dtype).flatten(1, 2)}
    if "kv" in parts:
        whole = parts["kv"].shape[1] // size
        parts["kv"] = parts["kv"][:, : whole * size].unflatten(1, (whole, size))
    return token_ids, parts


def _expected(engine: Engine, stored: str, header: dict[str, str] | None = None) -> dict[str, str]:
    """What a session's header must say. Floats are stored by token, so the block size of the
    engine that saved them does not matter; nor does it for what is turned into floats."""
    expected = {
        "format": FORMAT,
        "version": VERSION,
        "model": model_fingerprint(engine.runner.transformer),
        "dtype": str(engine.lm.dtype).removeprefix("torch."),
        "stored": stored,
        "block_size": str(engine.config.block_size),
    }
    if header is not None and engine.config.kv_dtype == "auto":
        del expected["block_size"]
    return expected


def _check_parts(
    engine: Engine, stored: str, block_size: int, parts: dict[str, torch.Tensor], tokens: int
) -> None:
    """Raise SessionError unless the parts are K and V of this model's shapes, for at most as many
    tokens as the session has, and finite: a checksum can be right over NaN."""
    config, size = engine.lm.config, 1
    if stored == "auto":
        token = (2, config.num_kv_heads, config.head_dim)
        expected: Shapes = {"kv": (token, engine.lm.dtype)}
    elif block_size < 1:
        raise SessionError(f"session: block_size is {block_size}: it is damaged")
    else:
        size = block_size
        expected = part_shapes(format_of(stored, size), config, size)
    if parts.keys() != expected.keys():
        raise SessionError(f"session: has {sorted(parts)}, this engine needs {sorted(expected)}")
    rows = {one.shape[1] if one.dim() > 1 else -1 for one in parts.values()}
    for name, (shape, dtype) in expected.items():
        one = parts[name]
        if one.dtype != dtype or (*one.shape[:1], *one.shape[2:]) != (config.num_layers, *shape):
            raise SessionError(
                f"session: {name} is {one.dtype} {list(one.shape)}; this engine needs rows of "
                f"{dtype} {list(shape)} in {config.num_layers} layers"
            )
        if dtype.is_floating_point and not is_finite(one):
            raise SessionError(f"session: {name} has NaN or infinity; compute it again")
    if len(rows) != 1 or max(rows) * size > tokens:
        raise SessionError(f"session: K and V of {rows} rows of {size}, but {tokens} tokens")


# ── Out of the engine ─────────────────────────────────────────────────────────


def _find(engine: Engine, what: What, salt: Hashable) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Tokens, and the whole blocks of their K and V."""
    size = engine.config.block_size
    parts_of(engine.store)  # or raise, before anything is computed
    engine.recover()
    if isinstance(what, int):
        [sequence, *others] = engine.request(what).sequences
        if others or sequence.must_fork:
            raise ValueError(f"what: request {what} has n > 1 samples; give the tokens of one")
        if sequence.table is not None:
            block_ids = sequence.table.block_ids[: sequence.num_computed // size]
            return list(sequence.token_ids), _read(engine, block_ids)
        what, salt = list(sequence.token_ids), sequence.request.params.cache_salt
    if engine.cache is None:
        raise ValueError("prefix_cache: must be True to save anything but a running request")
    if isinstance(what, RequestOutput):
        what = [*what.prompt_ids, *what.token_ids]
    ids = engine.lm.encode(what) if isinstance(what, str) else what
    token_ids = require_ids("what", ids, engine.lm.config.vocab_size)
    if len(token_ids) < 2:
        raise ValueError(f"what: must be at least 2 tokens, was {len(token_ids)}")
    known = token_ids[:-1]  # K and V of the last token are not computed yet
    match = engine.cache.match(known, salt)
    if match.num_tokens < len(known) // size * size:
        engine.generate([known], SamplingParams(max_tokens=1, cache_salt=salt))
        match = engine.cache.match(known, salt)
    return token_ids, _read(engine, match.block_ids)


def _read(engine: Engine, block_ids: Seq[int]) -> dict[str, torch.Tensor]:
    return {name: part[:, list(block_ids)] for name, part in parts_of(engine.store).items()}


def _insert(
    engine: Engine, token_ids: list[int], parts: dict[str, torch.Tensor], salt: Hashable
) -> OutOfBlocks | None:
    """Write blocks to the device and give them to the prefix cache. Returns the error if there is
    no room; raised in here, it would make the engine begin anew, as after any failure."""
    size, cache, pool = engine.config.block_size, engine.cache, engine.pool
    assert cache is not None
    num_blocks = next(iter(parts.values())).shape[1]
    whole = token_ids[: num_blocks * size]
    match = cache.match(whole, salt)
    first = len(match.block_ids)
    cache.lock(match.node)
    table = BlockTable(pool, size)
    try:
        short = num_blocks - first - pool.num_free
        if short > 0 and cache.evict(short) < short:
            return OutOfBlocks(num_blocks - first, pool.num_free)
        table.grow((num_blocks - first) * size)
        for name, part in parts_of(engine.store).items():
            if table.block_ids:
                part[:, table.block_ids] = parts[name][:, first:num_blocks].to(part.device)
        for block_id in table.block_ids:
            drop_open(engine.store, block_id)
        cache.insert(whole, [*match.block_ids, *table.block_ids], salt)
        return None
    finally:
        cache.unlock(match.node)
        table.release()


# ── In fewer bits ─────────────────────────────────────────────────────────────


def quantise(kv_format: KVFormat, kv: torch.Tensor) -> dict[str, torch.Tensor]:
    """kv (layers, blocks, block_size, 2, K, D) -> the parts of a quantised store."""
    parts: dict[str, torch.Tensor] = {}
    for name, one, x in _pair(kv_format, kv):
        parts |= {f"{name}_{piece}": values for piece, values in one.encode(x).items()}
    return parts


def dequantise(kv_format: KVFormat, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The inverse of `quantise`, in float32."""
    pair = []
    for name, one in (("k", kv_format.k), ("v", kv_format.v)):
        pieces: Pieces = {
            part.removeprefix(f"{name}_"): values
            for part, values in parts.items()
            if part.startswith(f"{name}_")
        }
        pair.append(one.decode(pieces).transpose(2, 3))  # (layers, blocks, block_size, K, D)
    return torch.stack(pair, 3)


def largest_errors(
    kv: torch.Tensor, parts: dict[str, torch.Tensor], kv_format: KVFormat
) -> tuple[float, float]:
    """The largest |x - x^| of K and of V."""
    if kv.numel() == 0:
        return 0.0, 0.0
    difference = (dequantise(kv_format, parts) - kv.float()).abs()
    return float(difference[:, :, :, 0].max()), float(difference[:, :, :, 1].max())


def _pair(kv_format: KVFormat, kv: torch.Tensor) -> list[tuple[str, Any, torch.Tensor]]:
    k, v = kv.transpose(2, 4).unbind(3)  # (layers, blocks, K, block_size, D) each
    return [("k", kv_format.k, k), ("v", kv_format.v, v)]
