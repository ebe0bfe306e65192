"""Tiers and sessions: blocks go down and come back, and files survive a crash.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("12.1") in the notebook, or in a terminal: python -m minikv check 12.1
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Sequence as Seq
from typing import Any

import torch

from minikv.blocks import BlockPool
from minikv.tiers.costs import Link, Prefill
from minikv.tiers.folder import TEMPORARY, Folder
from minikv.tiers.identity import WAY_OUT, SessionError, bytes_of, checksum_of, shapes_of
from minikv.tiers.moves import Copy, Place


# ── 12.1 Down and back ────────────────────────────────────────────────────────────
def demote(place: Place, device: BlockPool, host: BlockPool, copy: Copy) -> None:
    """Move a block one tier down, from the device to the host; its device block is released.

    `copy(from_block, to_block)` copies K and V from the device to the host. A block that is on the
    host already (write-through) is not copied again. All or nothing: raises ValueError if the block
    is not on the device or is held there by others too, and OutOfBlocks if the host has no room;
    what `copy` raises, KeyboardInterrupt too, is raised again.

    Worked example: device block 3 has one holder, host block 0 is free. copy(3, 0) is called while
    both have a holder. Afterwards the place says device None, host 0, and device block 3 is free.
    """
    raise NotImplementedError("Exercise 12.1: demote")


# ── 12.1 Down and back ────────────────────────────────────────────────────────────
def promote(
    place: Place, device: BlockPool, host: BlockPool, copy: Copy, keep: bool = False
) -> None:
    """Bring a block back from the host to the device; with `keep` it stays on the host as well.

    `copy(from_block, to_block)` copies from the host to the device. A block that is on the device
    already is not copied; without `keep` it still leaves the host. `device.allocate` may first
    demote another block to make room, and a full host then evicts the oldest of its blocks that
    has one holder. All or nothing, as in `demote`: raises ValueError if the block is not on the
    host, and OutOfBlocks if the device has no room; what `copy` raises is raised again.
    """
    raise NotImplementedError("Exercise 12.1: promote")


class HostTier:
    """K and V of blocks below the device. A block is named by all tokens up to its end, so that a
    name is found only after the same beginning.

    names: of a prefix, block by block. contents: its blocks, as many as names.
    `blocks` holds the block of each name that is here, the least recently used name first, and
    `memory` what was written to each block. write(memory, block, content) writes there, or raises
    OSError and writes nothing.
    """

    def __init__(self, num_blocks: int, write: Callable[[list, int, object], None]):
        self.pool = BlockPool(num_blocks)
        self.memory: list = [None] * num_blocks
        self.blocks: OrderedDict[str, int] = OrderedDict()
        self.write = write

    # ── 12.2 Found, but never written: broken, fix it ─────────────────────────────
    def store(self, names: Sequence[str], contents: Sequence[object]) -> None:
        """Keep each block of a prefix that is not here yet. One that cannot be written is left out
        and takes no memory; the next ones are still tried, as a later store may fill the gap. If no
        block is free, the least recently used one is forgotten."""
        for name, content in zip(names, contents, strict=True):
            if name in self.blocks:
                continue
            if self.pool.num_free == 0:
                self.pool.release(self.blocks.popitem(last=False)[1])
            block = self.pool.allocate()
            self.blocks[name] = block
            try:
                self.write(self.memory, block, content)
            except OSError:
                continue  # the next request will compute it

    # ── 12.2 Found, but never written: broken, fix it ─────────────────────────────
    def find(self, names: Sequence[str]) -> int:
        """How many blocks of a prefix can be used from here: those before the first that is
        missing."""
        return sum(name in self.blocks for name in names)

    def load(self, names: Sequence[str]) -> list:
        """The contents of the blocks that `find` counts. They then count as the most recently used,
        the first block as the newest: a prefix loses its end before its beginning."""
        count = self.find(names)
        for name in reversed(names[:count]):
            self.blocks.move_to_end(name)
        return [self.memory[self.blocks[name]] for name in names[:count]]


# ── 12.3 Fetch or compute ─────────────────────────────────────────────────────────
def break_even(bytes_per_token: float, link: Link, prefill: Prefill) -> float:
    """The length in tokens from which on fetching is faster than computing; inf if it never is.

    A `Link` has a `latency` in seconds and a `bandwidth` in bytes per second, a `Prefill` a `rate`
    in tokens per second and a `start` in seconds. The start of a step is left out: it is paid
    either way, because at least one token is computed after every hit.

    Worked example: 1 ms of latency and 1 GB/s, 10,000 tokens/s, 50,000 bytes per token. A token
    takes 50 µs to fetch and 100 µs to compute: 50 µs are gained with each, and 20 tokens gain the
    latency.
    """
    raise NotImplementedError("Exercise 12.3: break_even")


# ── 12.3 Fetch or compute ─────────────────────────────────────────────────────────
def blocks_to_fetch(
    tiers: Seq[str],
    block_bytes: float,
    block_size: int,
    links: Mapping[str, Link],
    prefill: Prefill,
) -> int:
    """How many of the blocks after the device's hit to fetch; the rest is computed.

    `tiers` names the tier of each block, in order, and `links` has the link of each. A block has
    `block_size` tokens and `block_bytes` bytes. It can only be used with all before it, so a slow
    tier in between may cost what a fast one behind it would gain. A link's latency is paid once, by
    the first of its blocks. The answer has the least total time; of several such numbers it is the
    smallest.

    Worked example: host, host, disk. The host takes 1 ms and 1 ms per block, the disk 10 ms and 2
    per block, computing 4 ms per block. For 0, 1, 2 and 3 blocks: 12, 10, 7 and 15 ms. So fetch 2.
    """
    raise NotImplementedError("Exercise 12.3: blocks_to_fetch")


# ── 12.4 Whole, or not there ──────────────────────────────────────────────────────
def save(folder: Folder, name: str, data: bytes) -> None:
    """Write `data` to the file `name`: after a crash it is the old file or the new one, whole.

    Once this has returned, no crash brings the old file back. If a step up to the rename fails or
    is interrupted, the old file is still there. If `sync_folder` fails, the file is whole, old or
    new. In either case the temporary one, `name + TEMPORARY`, is gone, and the caller gets the
    error.
    """
    raise NotImplementedError("Exercise 12.4: save")


# ── 12.5 A session for this model and no other ────────────────────────────────────
def add_tensors(digest: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Feed names, dtypes, shapes and bytes of tensors to a hash, such as hashlib.sha256().

    Equal tensors under equal names give equal digests, in whatever order they are listed and
    however they lie in memory; anything else gives another digest. A name may be any text.
    `bytes_of` gives the bytes of a tensor, row by row.
    """
    raise NotImplementedError("Exercise 12.5: add_tensors")


# ── 12.5 A session for this model and no other ────────────────────────────────────
def check_session(
    header: Mapping[str, str], tensors: Mapping[str, torch.Tensor], expected: Mapping[str, str]
) -> None:
    """Raise SessionError unless this session can be used where `expected` holds.

    Every field of `expected` must be in the header with the same value. The tensors must be those
    that the header names: `shapes` has dtype and shape of each, as `shapes_of` gives them, in JSON
    with sorted keys; `num_tokens` is the length of `tokens`. Finally, the checksum must be that of
    `checksum_of`. A field or tensor that is missing makes the session unusable, too.
    """
    raise NotImplementedError("Exercise 12.5: check_session")
