"""Chapter 05: how many blocks samples hold, a branch in the middle, and the copies of a step."""

import torch

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
    moved. Afterwards neither table sees what is written through the other. Raises ValueError
    if `table` has fewer tokens.
    """
    if not 0 <= num_tokens <= table.num_tokens:
        raise ValueError(f"num_tokens: must be 0 to {table.num_tokens}, was {num_tokens}")
    branch = type(table)(table.pool, table.block_size)
    branch.block_ids = table.block_ids[: -(-num_tokens // table.block_size)]
    for block_id in branch.block_ids:
        table.pool.acquire(block_id)
    branch.num_tokens = num_tokens
    return branch


def copy_blocks(blocks: torch.Tensor, copies: list[tuple[int, int]]) -> None:
    """Copy K and V of whole blocks, `(from_block, to_block)` each, before a step writes.

    blocks (num_layers, num_blocks, block_size, 2, K, D): all of the pool's memory, changed in
    place. `copies` are what `writable_slot` asked for, in that order, for all sequences of the
    step; most steps ask for none. A block may be a target after it has been a source; no block
    is a source after it has been a target. After the call each `to_block` holds what its
    `from_block` held before.
    """
    targets: dict[int, list[int]] = {}  # by source
    for source, target in copies:
        targets.setdefault(source, []).append(target)
    for source, wanted in targets.items():
        for target in wanted:
            blocks[:, target] = blocks[:, source]
