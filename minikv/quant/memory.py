"""How many blocks fit in a number of bytes, and which combinations of settings cannot work."""

from dataclasses import replace

import torch

from minikv.config import EngineConfig, ModelConfig
from minikv.errors import parse_bytes
from minikv.language_model import LanguageModel
from minikv.quant.formats import format_of
from minikv.quant.store import block_bytes


def resolve(config: EngineConfig, lm: LanguageModel) -> EngineConfig:
    """The same settings for this model: with as many blocks as `kv_memory` holds, and with
    kv_dtype="auto" if the model computes in that dtype already.

    Raises ValueError, naming the argument, for what cannot work.
    """
    if str(lm.dtype) == f"torch.{config.kv_dtype}":
        config = replace(config, kv_dtype="auto")
    if config.kv_dtype == "int4" and config.block_size == 1:
        raise ValueError(
            "block_size: with kv_dtype='int4' a block's keys share their scales, so it needs at "
            "least 2 tokens, was 1"
        )
    if config.kv_memory is not None:
        config = replace(config, num_blocks=blocks_in(config, lm.config, lm.dtype))
    return config


def blocks_in(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """How many blocks fit in `config.kv_memory`, beside keys of open blocks in full precision if
    the format needs them. Raises ValueError if there is no room for one block."""
    memory = parse_bytes("kv_memory", config.kv_memory)
    block, row = bytes_of(config, model, dtype)
    # There are never more open blocks than blocks.
    num_blocks = max((memory - config.max_num_seqs * row) // block, 0)
    if num_blocks < config.max_num_seqs:
        num_blocks = min(config.max_num_seqs, memory // (block + row))
    if num_blocks < 1:
        raise ValueError(
            f"kv_memory: one block of {config.block_size} tokens takes {block + row:,} bytes, "
            f"was {config.kv_memory!r}"
        )
    return num_blocks


def bytes_of(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a block, and of the keys of an open block in full precision (0 if they are not
    kept)."""
    full = model.kv_bytes_per_token(dtype) * config.block_size
    if config.kv_dtype == "auto":
        return full, 0
    kv_format = format_of(config.kv_dtype, config.block_size)
    row = full // 2 if kv_format.k_by_block else 0
    return block_bytes(kv_format, model, config.block_size), row
