"""Multi-head latent attention (DeepSeek-V2, 2024): one vector per token for all heads.

    x ── down ──┬─> latent, normed ──────────────────────┬─> entry (C + R): all that is cached
                └─> rotary key, turned to its position ──┘

    plain      k = [up_K latent, rotary key], v = up_V latent, for every token and head; attention
    absorbed   [up_K^T q, rotary q] attends to the entries as they are; up_V comes after the sum

Both are the same formula with other brackets: q . (up_K latent) = (up_K^T q) . latent.

T tokens, L tokens of context, E channels of x, H heads. Of each head: N channels that know no
position, R that are turned, V of its value. C channels of a latent.
"""

from typing import NamedTuple

import torch

from minikv.attention import causal_mask
from minikv.blocks import BlockTable

EPS = 1e-6
THETA = 10_000.0


class LatentWeights(NamedTuple):
    """One layer. Queries are not compressed, as in DeepSeek-V2-Lite."""

    query: torch.Tensor  # (H, N + R, E)
    down: torch.Tensor  # (C + R, E)
    norm: torch.Tensor  # (C,)
    up_key: torch.Tensor  # (H, N, C)
    up_value: torch.Tensor  # (H, V, C)
    out: torch.Tensor  # (E, H * V)


def random_weights(
    heads: int = 4, nope: int = 32, rope: int = 16, value: int = 32, latent: int = 64,
    hidden: int = 128, seed: int = 0, dtype: torch.dtype = torch.float32,
) -> LatentWeights:  # fmt: skip
    """Of these sizes: H, N, R, V, C, E."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (numbers * shape[-1] ** -0.5).to(dtype)

    return LatentWeights(
        query=2 * normal(heads, nope + rope, hidden),
        down=2 * normal(latent + rope, hidden),
        norm=1 + normal(latent),
        up_key=normal(heads, nope, latent),
        up_value=normal(heads, value, latent),
        out=normal(hidden, heads * value),
    )


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


def queries(x: torch.Tensor, positions: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """x (T, E), positions (T,) -> (T, H, N + R), the last R channels turned."""
    q = torch.einsum("te,hde->thd", x, weights.query)
    nope = weights.up_key.shape[1]
    return torch.cat([q[..., :nope], turn(q[..., nope:], positions)], -1)


def cache_entry(x: torch.Tensor, positions: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """What is cached of some tokens: x (T, E), positions (T,) -> (T, C + R).

    `weights.down` times x gives C channels of a latent and R of a key. The latent is `normed` with
    `weights.norm`. The key, which all heads share, is turned to its token's position.
    """
    latent, key = (x @ weights.down.T).tensor_split([len(weights.norm)], -1)
    return torch.cat([normed(latent, weights.norm), turn(key, positions)], -1)


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
    latent, nope = len(weights.norm), weights.up_key.shape[1]
    entries = blocks[block_ids].flatten(0, 1)[:context_len]  # (L, C + R)
    absorbed = torch.einsum("hn,hnc->hc", q[:, :nope], weights.up_key)
    wide = torch.cat([absorbed, q[:, nope:]], -1)  # (H, C + R)
    scores = wide @ entries.T * q.shape[-1] ** -0.5  # (H, L): q's own width, not that of `wide`
    mean = scores.softmax(-1) @ entries[:, :latent]  # (H, C)
    return torch.einsum("hvc,hc->hv", weights.up_value, mean)


# ── A paged store of entries ──────────────────────────────────────────────────


class LatentStore:
    """The entries of every slot: one tensor (num_blocks, block_size, C + R), no K, no V, no heads.
    Block ids and tables are those of `minikv.blocks`."""

    def __init__(self, weights: LatentWeights, num_blocks: int, block_size: int):
        width, dtype = len(weights.down), weights.down.dtype
        self.blocks = torch.zeros(num_blocks, block_size, width, dtype=dtype)
        self.slots = self.blocks.view(-1, width)


def decode(
    x: torch.Tensor, weights: LatentWeights, store: LatentStore, table: BlockTable
) -> torch.Tensor:
    """One step of one sequence, x (E,) -> (E,): its entry is written, and its query attends."""
    position = table.num_tokens
    table.grow(1)
    slot, _ = table.writable_slot(position)
    one, at = x[None], torch.tensor([position])
    store.slots[slot] = cache_entry(one, at, weights)[0]
    [q] = queries(one, at, weights)
    out = absorbed_attention(q, store.blocks, table.block_ids, position + 1, weights)
    return weights.out @ out.flatten()


# ── What it costs ─────────────────────────────────────────────────────────────


def cached_numbers(heads: int, nope: int, rope: int, value: int, latent: int) -> dict[str, int]:
    """Numbers that one token of one layer takes in a cache: K and V of each head, or an entry."""
    return {"K and V": heads * (nope + rope + value), "latents": latent + rope}


def multiplications(
    heads: int, nope: int, rope: int, value: int, latent: int, context: int
) -> dict[str, int]:
    """Of one query's attention in one layer, over a context, by what is done with it:

    "K and V": they are cached. "plain": K and V are made of cached latents. "absorbed".
    """
    own = context * heads * (nope + rope + value)
    expand = context * heads * (nope + value) * latent
    absorb = heads * (nope + value) * latent
    return {
        "K and V": own,
        "plain": expand + own,
        "absorbed": absorb + context * heads * (latent + rope + latent),
    }
