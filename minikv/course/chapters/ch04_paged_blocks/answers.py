"""Chapter 04: slots by the table, and many sequences in one call."""

import torch


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
    slots = []
    for position in range(start, end):
        index, offset = divmod(position, block_size)
        slots.append(block_ids[index] * block_size + offset)
    return slots


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
    visible = keys < context_lens[:, None]  # (S, L)
    scores = q @ k.transpose(2, 3)  # (S, K, G, L)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    return (scores.softmax(-1) @ v).view(rows, heads, dim)
