"""Paged blocks: a pool, a table for each sequence, slots, and attention over blocks.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("04.1") in the notebook, or in a terminal: python -m minikv check 04.1
"""

import torch

from minikv import blocks
from minikv.errors import OutOfBlocks, require_int


class BlockPool:
    """Reference-counted blocks 0 … num_blocks - 1. Every call is O(1).

    A block is free exactly when its reference count is 0. The most recently freed block
    is given out first: its slots are the most likely ones to be in the processor's cache.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = require_int("num_blocks", num_blocks, 1)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is on top
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    # ── 04.1 A pool of blocks ─────────────────────────────────────────────────────
    def allocate(self) -> int:
        """Take a free block; its reference count is now 1. Raises OutOfBlocks if there is none."""
        raise NotImplementedError("Exercise 04.1: BlockPool.allocate")

    def acquire(self, block_id: int) -> None:
        """Add a holder to a block in use. Raises ValueError for a free or unknown block."""
        if self.ref_count(block_id) == 0:
            raise ValueError(f"block {block_id} is free: allocate it before it can be shared")
        self._ref_counts[block_id] += 1

    # ── 04.1 A pool of blocks ─────────────────────────────────────────────────────
    def release(self, block_id: int) -> None:
        """Remove a holder; without the last one the block is free. Raises ValueError if it is
        free already."""
        raise NotImplementedError("Exercise 04.1: BlockPool.release")

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has: block tables, plus 1 if the prefix cache holds it."""
        if type(block_id) is not int:
            require_int("block_id", block_id)
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not in this pool of {self.num_blocks} blocks")
        return self._ref_counts[block_id]


class BlockTable(blocks.BlockTable):
    """One sequence's blocks in logical order: the token at `position` lies in block
    `block_ids[position // block_size]`.

    `num_tokens` is the number of tokens that room was asked for, with `grow` or `share`, and not
    taken back, with `shrink`. What else would fit into the last block is not counted.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = require_int("block_size", block_size, 1)
        self.block_ids: list[int] = []
        self.num_tokens = 0

    # ── 04.2 A table that grows ───────────────────────────────────────────────────
    def grow(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens; take new blocks where the last one is full.

        All or nothing: raises OutOfBlocks, and changes nothing, if the pool has too few. Raises
        ValueError for a negative number.
        """
        raise NotImplementedError("Exercise 04.2: BlockTable.grow")

    def release(self) -> None:
        """Release every block, the last one first, and be empty again."""
        for block_id in reversed(self.block_ids):
            self.pool.release(block_id)
        self.block_ids = []
        self.num_tokens = 0


# ── 04.3 Where a token goes ───────────────────────────────────────────────────────
def slot_mapping(block_ids: list[int], block_size: int, start: int, end: int) -> list[int]:
    """The slots of positions `start` … `end` - 1 of one sequence, in that order.

    `block_ids` is its block table in logical order, with blocks for all of these positions.
    Slot s is place s % block_size in physical block s // block_size. For a table [7, 1, 3]
    with blocks of 4, positions 2 to 5 lie in

        position            2   3 | 4   5
        logical block       0   0 | 1   1
        physical block      7   7 | 1   1
        place in the block  2   3 | 0   1
        slot               30  31 | 4   5

    A decode asks for one position, a prompt for all its positions, a chunk of a prompt for some
    in the middle. `start` == `end` asks for none. A tensor or an array of slots will do, too.
    """
    raise NotImplementedError("Exercise 04.3: slot_mapping")


# ── 04.4 Attention, one block at a time ───────────────────────────────────────────
def blockwise_attention(
    q: torch.Tensor, kv: torch.Tensor, block_ids: list[int], context_len: int
) -> torch.Tensor:
    """One query over the blocks of its context, with a running softmax.

    q (H, D); kv (num_blocks, block_size, 2, K, D) float32 of one layer, where kv[b, i, 0] is the
    key and kv[b, i, 1] the value in place i of block b; returns (H, D) float32. Query head h reads
    KV head h // (H // K). The query sees `context_len` tokens, at least 1. `block_ids` may be
    longer than they need, and slots that are not theirs may hold anything, even NaN.

    Only one block is read at a time. With m the largest score so far, s the sum of exp(score - m)
    and o the sum of exp(score - m) v, a block with scores x and maximum m' changes them to

        M = max(m, m')    s = s e^(m - M) + sum e^(x - M)    o = o e^(m - M) + sum e^(x - M) v

    and the result is o / s (m and s: Milakov and Gimelshein, 2018; o: Rabe and Staats, 2021).
    """
    raise NotImplementedError("Exercise 04.4: blockwise_attention")


# ── 04.5 Wrong only in a batch: broken, fix it ────────────────────────────────────
def batched_attention(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """One query for each of S sequences, over that sequence's own tokens and no others.

    q (S, H, D) and kv (num_blocks, block_size, 2, K, D) of one layer, float32; block_tables (S, B)
    int64, each row padded with 0 to the longest; context_lens (S,) int64, tokens each sequence
    attends to, its newest included. Returns (S, H, D) float32.

    All tables are gathered into one padded tensor of L = B * block_size keys for each
    sequence. What a sequence must not see gets a score of -inf: the unfilled end of its last
    block, and the blocks that only pad its table.
    """
    rows, heads, dim = q.shape
    kv_heads = kv.shape[3]
    gathered = kv[block_tables].flatten(1, 2).float()  # (S, L, 2, K, D)
    k, v = gathered.permute(2, 0, 3, 1, 4)  # (S, K, L, D) each
    q = q.float().view(rows, kv_heads, -1, dim) * dim**-0.5  # (S, K, G, D)
    keys = torch.arange(k.shape[2])
    visible = keys <= context_lens[:, None]  # (S, L)
    scores = q @ k.transpose(2, 3)  # (S, K, G, L)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    return (scores.softmax(-1) @ v).view(rows, heads, dim)
