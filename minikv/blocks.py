"""Paged memory: a pool of fixed-size blocks, and a table of blocks for each sequence.

Chapters 04 and 05; the idea is vLLM's PagedAttention (Kwon et al., 2023). These
classes count and name blocks. The keys and values themselves lie in `paged.KVStore`;
slot `block_id * block_size + position % block_size` there belongs to a position.
"""

from collections.abc import Sequence

from minikv.errors import OutOfBlocks, require_int


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks `num_tokens` tokens need, the last one perhaps not full."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Reference-counted blocks 0 … num_blocks - 1. Every call is O(1).

    A block is free exactly when its reference count is 0. The most recently
    freed block is given out first: its slots are the likeliest to be in a cache.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = require_int("num_blocks", num_blocks, 1)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is on top
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take a free block; its reference count is 1. Raises OutOfBlocks when there is none."""
        if not self._free:
            raise OutOfBlocks(1, 0)
        block_id = self._free.pop()
        self._ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """One more holder of a live block. Raises ValueError for a free or unknown block."""
        if self.ref_count(block_id) == 0:
            raise ValueError(f"block {block_id} is free: allocate it before it can be shared")
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """One holder less; the last one frees the block. Raises ValueError if there is none."""
        count = self.ref_count(block_id)
        if count == 0:
            raise ValueError(f"block {block_id} is free already: it was released once too often")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            self._free.append(block_id)

    def ref_count(self, block_id: int) -> int:
        """How many hold this block: block tables, and the prefix cache counts as one."""
        if type(block_id) is not int:
            require_int("block_id", block_id)
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not in this pool of {self.num_blocks} blocks")
        return self._ref_counts[block_id]


class BlockTable:
    """One sequence's blocks in logical order: token at `position` lies in
    block `block_ids[position // block_size]`.

    `num_tokens` is how many tokens the table has room for by promise: what `grow`
    asked for so far, not what the last block could still take.
    """

    __slots__ = ("block_ids", "block_size", "num_tokens", "pool")

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = require_int("block_size", block_size, 1)
        self.block_ids: list[int] = []
        self.num_tokens = 0

    def grow(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens, with new blocks where the last one is full.

        All or nothing: raises OutOfBlocks, and changes nothing, if the pool has too few.
        """
        require_int("num_tokens", num_tokens, 0)
        total = self.num_tokens + num_tokens
        needed = -(-total // self.block_size) - len(self.block_ids)
        if needed > 0:
            if needed > self.pool.num_free:
                raise OutOfBlocks(needed, self.pool.num_free)
            self.block_ids += [self.pool.allocate() for _ in range(needed)]
        self.num_tokens = total

    def share(self, block_ids: Sequence[int]) -> None:
        """Begin an empty table with full blocks that others hold: a prefix-cache hit."""
        if self.block_ids:
            raise ValueError(
                f"only an empty table can begin with shared blocks, this has {len(self.block_ids)}"
            )
        for block_id in block_ids:
            self.pool.acquire(block_id)
        self.block_ids = list(block_ids)
        self.num_tokens = len(self.block_ids) * self.block_size

    def replace(self, index: int, block_id: int) -> None:
        """Hold `block_id` in place of the block at `index`, which has the same content.

        The new one is acquired before the old one is released, so neither is ever unowned.
        """
        require_int("index", index, 0, len(self.block_ids) - 1)
        self.pool.acquire(block_id)
        self.pool.release(self.block_ids[index])
        self.block_ids[index] = block_id

    def fork(self) -> "BlockTable":
        """A second table over the same blocks; every one of them gains a holder."""
        twin = type(self)(self.pool, self.block_size)
        for block_id in self.block_ids:
            self.pool.acquire(block_id)
        twin.block_ids = self.block_ids.copy()
        twin.num_tokens = self.num_tokens
        return twin

    def writable_slot(self, position: int) -> tuple[int, tuple[int, int] | None]:
        """The slot to write `position` in, and the copy that must happen first, if any.

        A block with one holder is written in place: `(slot, None)`. A shared one is
        left to the others: this table takes a new block and returns
        `(slot, (from_block, to_block))`; copy the block's slots before writing.
        Raises OutOfBlocks, changing nothing, when a copy is due and no block is free, and
        ValueError for a position that the table has no token for.
        """
        require_int("position", position)
        if not 0 <= position < self.num_tokens:
            raise ValueError(
                f"position {position} is not among this table's {self.num_tokens} tokens"
            )
        index, offset = divmod(position, self.block_size)
        block_id = self.block_ids[index]
        if self.pool.ref_count(block_id) == 1:
            return block_id * self.block_size + offset, None
        new_block = self.pool.allocate()
        self.block_ids[index] = new_block
        self.pool.release(block_id)
        return new_block * self.block_size + offset, (block_id, new_block)

    def release(self) -> None:
        """Give every block back and be empty again. Last block first, so that the
        blocks of a long prefix stay free the longest."""
        for block_id in reversed(self.block_ids):
            self.pool.release(block_id)
        self.block_ids = []
        self.num_tokens = 0
