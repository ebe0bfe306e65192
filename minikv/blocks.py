"""Paged memory: a pool of fixed-size blocks, and a table of blocks for each sequence.

Chapters 04 and 05; the idea is vLLM's PagedAttention (Kwon et al., 2023). These
classes count and name blocks. The keys and values themselves lie in `paged.KVStore`, where
slot `block_id * block_size + position % block_size` belongs to a position.
"""

from collections.abc import Sequence

from minikv.errors import OutOfBlocks, require_int


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks `num_tokens` tokens need; the last one may not be full."""
    return -(-num_tokens // block_size)


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

    def allocate(self) -> int:
        """Take a free block; its reference count is now 1. Raises OutOfBlocks if there is none."""
        if not self._free:
            raise OutOfBlocks(1, 0)
        block_id = self._free.pop()
        self._ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """Add a holder to a block in use. Raises ValueError for a free or unknown block."""
        if self.ref_count(block_id) == 0:
            raise ValueError(f"block {block_id} is free: allocate it before it can be shared")
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Remove a holder; without the last one the block is free. Raises ValueError if it is
        free already."""
        count = self.ref_count(block_id)
        if count == 0:
            raise ValueError(f"block {block_id} is free already: it was released once too often")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            self._free.append(block_id)

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has: block tables, plus 1 if the prefix cache holds it."""
        if type(block_id) is not int:
            require_int("block_id", block_id)
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not in this pool of {self.num_blocks} blocks")
        return self._ref_counts[block_id]


class BlockTable:
    """One sequence's blocks in logical order: the token at `position` lies in block
    `block_ids[position // block_size]`.

    `num_tokens` is the number of tokens that room was asked for, with `grow` or `share`, and not
    taken back, with `shrink`. What else would fit into the last block is not counted.
    """

    __slots__ = ("block_ids", "block_size", "num_tokens", "pool")

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = require_int("block_size", block_size, 1)
        self.block_ids: list[int] = []
        self.num_tokens = 0

    def grow(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens; take new blocks where the last one is full.

        All or nothing: raises OutOfBlocks, and changes nothing, if the pool has too few. Raises
        ValueError for a negative number.
        """
        require_int("num_tokens", num_tokens, 0)
        total = self.num_tokens + num_tokens
        needed = -(-total // self.block_size) - len(self.block_ids)
        if needed > 0:
            if needed > self.pool.num_free:
                raise OutOfBlocks(needed, self.pool.num_free)
            self.block_ids += [self.pool.allocate() for _ in range(needed)]
        self.num_tokens = total

    def shrink(self, num_tokens: int) -> None:
        """Take back the room of the last `num_tokens` tokens; release the blocks that have no token
        left. What was written stays in the other blocks until it is overwritten.

        All or nothing: raises ValueError, and changes nothing, if the table has too few tokens.
        """
        require_int("num_tokens", num_tokens, 0, self.num_tokens)
        total = self.num_tokens - num_tokens
        kept = -(-total // self.block_size)
        for block_id in reversed(self.block_ids[kept:]):
            self.pool.release(block_id)
        del self.block_ids[kept:]
        self.num_tokens = total

    def share(self, block_ids: Sequence[int]) -> None:
        """Begin an empty table with full blocks that others hold, after a prefix-cache hit.

        Each block gains a holder, and `num_tokens` becomes the number of tokens in them.
        """
        if self.block_ids:
            raise ValueError(f"only an empty table can share: it has {len(self.block_ids)} blocks")
        for block_id in block_ids:
            self.pool.acquire(block_id)
            self.block_ids.append(block_id)  # at once: if the next id is bad, this one can be freed
        self.num_tokens = len(self.block_ids) * self.block_size

    def replace(self, index: int, block_id: int) -> None:
        """Hold `block_id` in place of the block at `index`, which has the same content.

        The new one is acquired before the old one is released, so neither is free in between.
        """
        require_int("index", index, 0, len(self.block_ids) - 1)
        self.pool.acquire(block_id)
        self.pool.release(self.block_ids[index])
        self.block_ids[index] = block_id

    def fork(self) -> "BlockTable":
        """Return a second table over the same blocks; each block gains a holder. From then on
        each of the two can grow and be released without affecting the other."""
        twin = type(self)(self.pool, self.block_size)
        for block_id in self.block_ids:
            self.pool.acquire(block_id)
        twin.block_ids = self.block_ids.copy()
        twin.num_tokens = self.num_tokens
        return twin

    def writable_slot(self, position: int) -> tuple[int, tuple[int, int] | None]:
        """The slot to write `position` in, and the copy that must happen first, if any.

        A block with one holder is written in place: `(slot, None)`. A shared block is left
        to its other holders: this table takes a new block in its place and returns
        `(slot, (from_block, to_block))`. Copy the block's slots before you write.
        Raises OutOfBlocks, changing nothing, if a copy is due and no block is free, and
        ValueError for a position below 0 or from `num_tokens` on.
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
        """Release every block, the last one first, and be empty again."""
        for block_id in reversed(self.block_ids):
            self.pool.release(block_id)
        self.block_ids = []
        self.num_tokens = 0
