"""Attention over paged keys and values: where they are stored, and how they are read.

Chapter 04. `KVStore` is the memory that block ids point into. `blockwise_attention`
is the algorithm on one sequence, a block at a time, as a kernel does it.
"""

from typing import Any

import torch

from minikv.blocks import BlockPool
from minikv.config import ModelConfig


class KVStore:
    """K and V of every slot: one tensor (num_layers, num_blocks, block_size, 2, K, D).

    K and V of a token lie side by side, so a token is written by one copy, and a
    block is contiguous in memory. Allocated once.
    """

    open: Any = None  # a listener: blocks whose keys wait until they are full, if it has such

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int,
        device: torch.device | str, dtype: torch.dtype,
    ):  # fmt: skip
        token = (2, config.num_kv_heads, config.head_dim)
        shape = (len(config.windows), num_blocks, block_size, *token)
        self.block_size, self.device, self.dtype = block_size, torch.device(device), dtype
        self.bytes_per_token: float = config.kv_bytes_per_token(dtype)
        self.blocks = torch.zeros(shape, device=device, dtype=dtype)
        self.slots = self.blocks.view(shape[0], num_blocks * block_size, *token)
        self.parts = {"kv": self.blocks}  # all that it keeps of a block, by name

    def num_free(self, pool: BlockPool) -> int:
        """How many more blocks it has memory for, in all layers."""
        return pool.num_free

    def num_cached(self, cache) -> int:
        """How many blocks' memory a prefix cache holds."""
        return cache.num_cached_blocks

    def copy_to(self, other: "KVStore", pairs: list[tuple[int, int]]) -> None:
        """Copy blocks `(from, to)`, all layers, into `other` or within this store.

        All are read before any is written.
        """
        if pairs:
            source, target = torch.tensor(pairs).T
            copied = self.blocks[:, source.to(self.blocks.device, non_blocking=True)]
            target = target.to(other.blocks.device, non_blocking=True)
            other.blocks[:, target] = copied.to(other.blocks.device)


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
    heads, dim = q.shape
    block_size, kv_heads = kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    q = q.float().view(kv_heads, group, dim) * dim**-0.5
    top = torch.full((kv_heads, group, 1), -torch.inf)
    total = torch.zeros(kv_heads, group, 1)
    out = torch.zeros(kv_heads, group, dim)
    for i, block_id in enumerate(block_ids[: -(-context_len // block_size)]):
        filled = min(block_size, context_len - i * block_size)
        k, v = kv[block_id, :filled].float().unbind(1)  # (filled, K, D) each
        scores = torch.einsum("kgd,tkd->kgt", q, k)  # (K, G, filled)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.einsum("kgt,tkd->kgd", weights, v)
        top = new_top
    return (out / total).view(heads, dim)
