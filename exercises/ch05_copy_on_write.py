"""Copy on write: tables that share blocks, samples, beams, branches.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("05.1") in the notebook, or in a terminal: python -m minikv check 05.1
"""

from minikv import blocks
from minikv.blocks import BlockPool
from minikv.errors import require_int
from minikv.sequence import Sequence


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

    # ── 05.1 A fork ───────────────────────────────────────────────────────────────
    def fork(self) -> "BlockTable":
        """Return a second table over the same blocks; each block gains a holder. From then on
        each of the two can grow and be released without affecting the other."""
        raise NotImplementedError("Exercise 05.1: BlockTable.fork")

    # ── 05.2 Copy on first write ──────────────────────────────────────────────────
    def writable_slot(self, position: int) -> tuple[int, tuple[int, int] | None]:
        """The slot to write `position` in, and the copy that must happen first, if any.

        A block with one holder is written in place: `(slot, None)`. A shared block is left
        to its other holders: this table takes a new block in its place and returns
        `(slot, (from_block, to_block))`. Copy the block's slots before you write.
        Raises OutOfBlocks, changing nothing, if a copy is due and no block is free, and
        ValueError for a position below 0 or from `num_tokens` on.
        """
        raise NotImplementedError("Exercise 05.2: BlockTable.writable_slot")

    def release(self) -> None:
        """Release every block, the last one first, and be empty again."""
        for block_id in reversed(self.block_ids):
            self.pool.release(block_id)
        self.block_ids = []
        self.num_tokens = 0


# ── 05.3 How many blocks? ─────────────────────────────────────────────────────────
def blocks_for_samples(n: int, num_prompt: int, num_new: int, block_size: int) -> tuple[int, int]:
    """Blocks that `n` samples of one prompt hold together: (shared, copied).

    The prompt has `num_prompt` tokens, at least 1. After them each sample has stored `num_new`
    tokens of its own, the same number for all, perhaps 0.

    shared    every sample began as a fork, and shared blocks were copied on first write
    copied    every sample has all its blocks to itself

    Worked for 2 samples of a prompt of 7 tokens, blocks of 4: (2, 4) before either has stored
    a token, (3, 4) when both have stored one, (5, 6) when both have stored two.
    """
    raise NotImplementedError("Exercise 05.3: blocks_for_samples")


# ── 05.4 Beams fork and end ───────────────────────────────────────────────────────
def next_beams(beams: list[Sequence], chosen: list[tuple[int, int]]) -> list[Sequence]:
    """Return one new beam for each (index of its parent in `beams`, next token), in that order.

    A new beam is a fork of its parent with the token at the end of `token_ids`. The token's K and
    V are not computed yet, so `num_computed` is the parent's. `Sequence.fork` copies the token ids
    and takes an index, which may be any.

    A parent may have several children, or none; `chosen` may be empty. Once the children hold what
    they need, all parents' tables are released or handed on to a child. Then blocks without a
    holder are free, and no block of a new beam was ever free in between.
    """
    raise NotImplementedError("Exercise 05.4: next_beams")


# ── 05.5 A branch in the middle: broken, fix it ───────────────────────────────────
def copy_prefix(table: BlockTable, num_tokens: int) -> BlockTable:
    """A second table over the first `num_tokens` tokens of `table`: a conversation branches off.

    K and V of these tokens are read through both tables; none of it is computed again or
    moved. Afterwards neither table sees what is written through the other, and either may end
    first. Raises ValueError for fewer than 0 tokens, or more than `table` has.
    """
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError(f"num_tokens: must be 0 to {table.num_tokens}, was {num_tokens}")
    branch = type(table)(table.pool, table.block_size)
    branch.block_ids = table.block_ids[: num_tokens // table.block_size]
    for block_id in branch.block_ids:
        table.pool.acquire(block_id)
    branch.num_tokens = len(branch.block_ids) * table.block_size
    branch.grow(num_tokens - branch.num_tokens)
    return branch
