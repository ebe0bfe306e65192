"""A ring in a file, as in llama.cpp's state files: every used cell with its place and sequences.

Cells come back to their old places, so attention adds the same numbers in the same order, and the
logits are the same bit for bit. Keys are turned to their positions before they are written.
"""

import json
import os
from collections.abc import Sequence as Seq

import torch

from minikv.errors import require_ids
from minikv.language_model import LanguageModel
from minikv.ring import RingCache
from minikv.tiers.identity import (
    VERSION,
    SessionError,
    check_session,
    checksum_of,
    model_fingerprint,
    shapes_of,
)
from minikv.tiers.session import read_file, write_file
from minikv.version import __version__

FORMAT = "minikv ring"


def save_ring(
    cache: RingCache, lm: LanguageModel, path: str | os.PathLike, token_ids: Seq[int] = ()
) -> int:
    """Write a ring to a file; returns its bytes. `token_ids` are stored for the caller, because a
    ring does not know its tokens."""
    cache.apply_shifts()
    cells = [cell for cell, owners in enumerate(cache.sequences) if owners]
    tokens = require_ids("token_ids", token_ids, lm.config.vocab_size)
    tensors = {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "cells": torch.tensor(cells, dtype=torch.int32),
        "positions": torch.tensor([cache.positions[cell] for cell in cells], dtype=torch.int32),
        "k": cache.k[:, cells].cpu().contiguous(),  # (layers, N, K, D)
        "v": cache.v[:, cells].cpu().contiguous(),
    }
    header = _expected(lm) | {
        "num_cells": str(cache.num_cells),
        "contiguous": str(cache.contiguous),
        "head": str(cache.head),
        "windows": json.dumps(cache.windows),
        "sequences": json.dumps([sorted(cache.sequences[cell]) for cell in cells]),
        "num_tokens": str(len(tokens)),
        "course": __version__,
        "shapes": json.dumps(shapes_of(tensors), sort_keys=True),
    }
    header["checksum"] = checksum_of(header, tensors)
    return write_file(path, tensors, header)


def load_ring(lm: LanguageModel, path: str | os.PathLike) -> tuple[RingCache, list[int]]:
    """A ring as it was saved, and the tokens that were saved with it. Raises SessionError, saying
    what differs, for a file of another model, and for a damaged one."""
    header, tensors = read_file(path)
    check_session(header, tensors, _expected(lm))
    try:
        cells, positions = tensors["cells"].tolist(), tensors["positions"].tolist()
        owners, windows = json.loads(header["sequences"]), tuple(json.loads(header["windows"]))
        num_cells, contiguous = int(header["num_cells"]), header["contiguous"] == "True"
        k = tensors["k"]
        cache = RingCache(
            lm.config, num_cells, contiguous=contiguous, dtype=k.dtype, device=lm.device
        )
        fits = (cache.k.shape[0], len(cells), *cache.k.shape[2:])
        if not (len(windows) == len(cache.windows) and k.shape == tensors["v"].shape == fits):
            raise ValueError(f"K and V are {tuple(k.shape)}, {fits} are announced")
        cache.windows, cache.head = windows, int(header["head"])
        for cell, position, seqs in zip(cells, positions, owners, strict=True):
            if not (0 <= cell < num_cells and position >= 0 and seqs and min(seqs) >= 0):
                raise ValueError(f"cell {cell} at position {position} of {seqs}")
            cache.positions[cell], cache.sequences[cell] = position, set(seqs)
        if not 0 <= cache.head <= num_cells or len(set(cells)) != len(cells):
            raise ValueError("a cell is named twice, or the head is outside")
    except (KeyError, TypeError, ValueError) as error:
        raise SessionError(f"session: the ring makes no sense: {error}") from error
    cache.k[:, cells], cache.v[:, cells] = k.to(lm.device), tensors["v"].to(lm.device)
    return cache, require_ids("session: tokens", tensors["tokens"], lm.config.vocab_size)


def _expected(lm: LanguageModel) -> dict[str, str]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model_fingerprint(lm.transformer),
        "dtype": str(lm.dtype).removeprefix("torch."),
    }
