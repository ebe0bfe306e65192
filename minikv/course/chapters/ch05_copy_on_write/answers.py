"""Chapter 05: how many blocks samples hold, and a branch in the middle."""

from minikv.blocks import BlockTable


def blocks_for_samples(n: int, num_prompt: int, num_new: int, block_size: int) -> tuple[int, int]:
    """Blocks that `n` samples of one prompt hold together: (shared, copied).

    The prompt has `num_prompt` tokens, at least 1. After them each sample has stored `num_new`
    tokens of its own, the same number for all, perhaps 0.

    shared    every sample began as a fork, and shared blocks were copied on first write
    copied    every sample has all its blocks to itself

    Worked for 2 samples of a prompt of 7 tokens, blocks of 4: (2, 4) before either has stored
    a token, (3, 4) when both have stored one, (5, 6) when both have stored two.
    """
    each = -(-(num_prompt + num_new) // block_size)
    full = num_prompt // block_size  # never written to again
    shared = full + n * (each - full) if num_new > 0 else each
    return shared, n * each


def copy_prefix(table: BlockTable, num_tokens: int) -> BlockTable:
    """A second table over the first `num_tokens` tokens of `table`: a conversation branches off.

    K and V of these tokens are read through both tables; none of it is computed again or
    moved. Afterwards neither table sees what is written through the other, and either may end
    first. Raises ValueError for fewer than 0 tokens, or more than `table` has.
    """
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError(f"num_tokens: must be 0 to {table.num_tokens}, was {num_tokens}")
    branch = type(table)(table.pool, table.block_size)
    branch.block_ids = table.block_ids[: -(-num_tokens // table.block_size)]
    for block_id in branch.block_ids:
        table.pool.acquire(block_id)
    branch.num_tokens = num_tokens
    return branch
