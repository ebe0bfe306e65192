"""Caches of newer models: windows, hits for several groups of layers, latents, chosen blocks.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("16.1") in the notebook, or in a terminal: python -m minikv check 16.1
"""

from collections.abc import Sequence as Seq

import torch

from minikv.attention import causal_mask
from minikv.blocks import blocks_for
from minikv.course.chapters.ch16_newer_models.choosing import SIZE
from minikv.course.chapters.ch16_newer_models.latent import EPS, THETA, LatentWeights


# ── 16.1 Behind the window ────────────────────────────────────────────────────────
def first_seen(position: int, window: int, block_size: int) -> int:
    """The first block that a query at `position`, or any later one, looks at through a window.

    A query sees its own token and the `window - 1` before it. All blocks before the answer are dead
    for the layers with this window; the sequence may still need them for others.

    Worked example, window 6, blocks of 4: a query at 13 sees 8 to 13, so block 2 is the first; one
    at 12 sees 7, too, and block 1.
    """
    raise NotImplementedError("Exercise 16.1: first_seen")


# ── 16.1 Behind the window ────────────────────────────────────────────────────────
def held_in_chunks(num_tokens: int, chunk: int, window: int, block_size: int) -> list[int]:
    """How many blocks each step of a prefill needs in the layers with a window.

    Each step computes `chunk` tokens, the last one what is left. It writes K and V of its own
    tokens, and its queries read what their window shows them. Blocks that no query of this step and
    no later one looks at are given back before it.

    Worked example, 16 tokens in chunks of 8, window 6, blocks of 4: the first step needs blocks 0
    and 1. The first query of the second one is at 8 and sees 3 to 8, so it needs blocks 0 to 3:
    [2, 4].
    """
    raise NotImplementedError("Exercise 16.1: held_in_chunks")


# ── 16.2 The longest hit for all layers ───────────────────────────────────────────
def longest_valid(has_windows: Seq[bool], window: int, block_size: int) -> int:
    """How many blocks of a cached prefix a sequence can begin with: the most that are valid for all
    layers.

    Layers that see everything have K and V of each block. `has_windows[i]` says whether the layers
    with a window still have theirs of block i. They need them only where a query after the prefix
    looks back, the first of which stands right behind it.

    Worked example, window 6, blocks of 4, + has them: of + - + + all 4 blocks are valid, because
    the query at 16 sees 11 to 16, in blocks 2 and 3. Of + - - + only 1 is: a query at 16 would miss
    block 2, one at 12 or 8 the blocks before it; one at 4 sees block 0.
    """
    raise NotImplementedError("Exercise 16.2: longest_valid")


# ── 16.3 Absorb the up-projection ─────────────────────────────────────────────────
def cache_entry(x: torch.Tensor, positions: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """What is cached of some tokens: x (T, E), positions (T,) -> (T, C + R).

    `weights.down` times x gives C channels of a latent and R of a key. The latent is `normed` with
    `weights.norm`. The key, which all heads share, is turned to its token's position.
    """
    raise NotImplementedError("Exercise 16.3: cache_entry")


# ── 16.3 Absorb the up-projection ─────────────────────────────────────────────────
def absorbed_attention(
    q: torch.Tensor,
    blocks: torch.Tensor,
    block_ids: list[int],
    context_len: int,
    weights: LatentWeights,
) -> torch.Tensor:
    """One query of each head over the entries of its context: q (H, N + R) -> (H, V). The result is
    that of `plain_attention`, but no token's K or V is made.

    The last R channels of q are turned already. blocks (num_blocks, block_size, C + R) has entries
    as `cache_entry` makes them; `block_ids` says which blocks hold the context, in order.
    weights.up_key (H, N, C) and weights.up_value (H, V, C) make a head's key and value of a latent.

    A further token of context costs at most H (2 C + R) multiplications.
    """
    raise NotImplementedError("Exercise 16.3: absorbed_attention")


def plain_attention(q: torch.Tensor, entries: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """K and V of every token and head, then attention: q (T, H, N + R), entries (L, C + R) ->
    (T, H, V). The queries stand at the last T of the L positions."""
    latents, rotary = entries.tensor_split([len(weights.norm)], -1)
    k = torch.einsum("lc,hnc->lhn", latents, weights.up_key)
    k = torch.cat([k, rotary[:, None].expand(-1, k.shape[1], -1)], -1)  # (L, H, N + R)
    v = torch.einsum("lc,hvc->lhv", latents, weights.up_value)  # (L, H, V)
    scores = torch.einsum("thd,lhd->htl", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~causal_mask(len(q), len(k)), -torch.inf)
    return torch.einsum("htl,lhv->thv", scores.softmax(-1), v)


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE: x (T, R) or (T, H, R), positions (T,) -> the same shape. Channels 2 i and 2 i + 1 are a
    pair, turned by position / 10000^(2 i / R)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half).to(x.dtype)  # (T, R / 2)
    if x.dim() == 3:
        angles = angles[:, None]  # the same for all heads
    a, b = x[..., 0::2], x[..., 1::2]
    pairs = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.stack(pairs, -1).flatten(-2)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


# ── 16.4 Which blocks a query reads: broken, fix it ───────────────────────────────
def by_bounds(q: torch.Tensor, k: torch.Tensor, most: int) -> list[list[int]]:
    """For each KV head, the blocks that may hold the largest scores.

    q: (K, G, D), the newest token's G query heads of each KV head. k: (L, K, D), the keys of the
    text, the newest one last. Returns K lists with the places of `most` blocks in ascending order,
    or of all blocks if there are fewer. Blocks have SIZE tokens; the newest token's own block is
    not chosen, because it is read anyway.

    Of a block only the least and the largest number of each channel are looked at. No key in it has
    a larger product with a query than the bound: the sum over the channels of the larger of q times
    the least and q times the largest number. A KV head's query heads read the same blocks, so the
    highest of their bounds counts.
    """
    count = (len(k) - 1) // SIZE
    blocks = (
        k[: count * SIZE].view(count, SIZE, *k.shape[1:]).permute(2, 0, 1, 3)
    )  # (K, B, SIZE, D)
    low, high = blocks.amin(2)[:, None], blocks.amax(2)[:, None]  # (K, 1, B, D)
    bounds = torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(-1)  # (K, G, B)
    best = bounds.amax((0, 1)).expand(len(q), -1)  # (K, B)
    return [sorted(one.topk(min(most, count)).indices.tolist()) for one in best]
