"""Chapter 10: the axis of a scale, attention that reads codes, blocks with scales."""

import torch

from minikv.quant.formats import (
    dequantise_int4,
    dequantise_int8,
    quantise_int4,
    quantise_int8,
    unpack,
)


def int4_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x stored in 4 bits and read back, with a scale and a zero point for each line along `dim`.

    x (..., T, D), tokens and channels -> the same shape, float32.

        dim = -1    by token: the D numbers of a token share a scale and a zero point
        dim = -2    by channel: the T numbers of a channel share them

    `quantise_int4` gives codes, scale and low of each vector in the last dimension, and
    `dequantise_int4` reads them.

    Worked example: x = [[0, 1], [15, 16]]. By token, lines are (0, 1) and (15, 16): 16 marks over
    1 each. By channel, lines are (0, 15) and (1, 16): 16 marks over 15 each.
    """
    lines = x.transpose(dim, -1)
    return dequantise_int4(*quantise_int4(lines)).transpose(dim, -1)


def better_axis(x: torch.Tensor) -> int:
    """-1 (by token) or -2 (by channel): along which of them 4 bits read x back more closely.

    x (..., T, D). "More closely" means a smaller mean of the squared errors, over all of x. If both
    are equal: -1, because a token can be stored by itself as soon as it arrives.

    Worked example: x = [[0, 100, 2], [1, 101, 3]] has a large channel: -2. Its transpose has a
    large token: -1.
    """
    errors = {dim: float((int4_along(x, dim) - x).square().mean()) for dim in (-1, -2)}
    return -2 if errors[-2] < errors[-1] else -1


def attend_int8(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    block_ids: list[int],
    context_len: int,
) -> torch.Tensor:
    """One query over the int8 blocks of its context: q (H, D) -> (H, D) float32.

    k_codes, v_codes (num_blocks, K, block_size, D) int8 and k_scale, v_scale
    (num_blocks, K, block_size) bfloat16 are one layer's storage. The sequence's tokens are in
    blocks `block_ids`, in this order; there are `context_len` of them, at least 1. Later slots
    hold no tokens, whatever is in them: even NaN. Query head h belongs to KV head h // (H / K).

    Codes are read a block at a time: no tensor of floats is ever larger than one block. A key is
    scale * code, so q . k = scale * (q . code); a value is scale * code, so w v = (w scale) code.

    With m the largest score so far, s the sum of exp(score - m) and o the sum of exp(score - m) v,
    a block with scores x and maximum m' changes them to

        M = max(m, m')    s = s e^(m - M) + sum e^(x - M)    o = o e^(m - M) + sum e^(x - M) v

    and the result is o / s.
    """
    heads, dim = q.shape
    _, kv_heads, block_size, _ = k_codes.shape
    q = q.float().view(kv_heads, -1, dim) * dim**-0.5  # (K, G, D)
    top = torch.full((kv_heads, heads // kv_heads, 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for i, block_id in enumerate(block_ids[: -(-context_len // block_size)]):
        filled = min(block_size, context_len - i * block_size)
        scores = q @ k_codes[block_id, :, :filled].float().mT  # (K, G, filled), of codes
        scores = scores * k_scale[block_id, :, None, :filled].float()
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top)
        total = total * shrink + weights.sum(-1, keepdim=True)
        scaled = weights * v_scale[block_id, :, None, :filled].float()
        out = out * shrink + scaled @ v_codes[block_id, :, :filled].float()
        top = new_top
    return (out / total).view(heads, dim)


def scores_by_channel(
    q: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, low: torch.Tensor
) -> torch.Tensor:
    """Scores of one query with all keys of a full int4 block: q (H, D) -> (H, T) float32.

    packed (K, T, D / 2) uint8 holds two codes per byte; `unpack(packed)` gives the codes
    (K, T, D), 0 to 15. scale and low (K, D) bfloat16: one of each for a channel, so number d of a
    key is low[d] + scale[d] * code[d]. Query head h belongs to KV head h // (H / K). A score is
    q . k / root of D, as before the softmax, computed in float32.

    No key is made: scale and low are the same for all T tokens, so each of them meets q once. No
    sum and no product but `@` gives as many floats as the block has numbers.

    Worked example: codes [1, 0] and [0, 2], packed as [1] and [32], with scale [10, 1] and low
    [0, 100] are the keys [10, 100] and [0, 102]. With q = [1, 2] the scores are 210 and 204, each
    divided by the root of 2.
    """
    q = q.float().view(len(low), -1, q.shape[-1]) * q.shape[-1] ** -0.5  # (K, G, D)
    of_codes = (q * scale[:, None].float()) @ unpack(packed).float().mT  # (K, G, T)
    return (of_codes + q @ low[:, :, None].float()).flatten(0, 1)


class Int8Blocks:
    """K and V of one layer in blocks: int8 codes, and a scale for each token and KV head.

    codes["k"], codes["v"]      (num_blocks, K, block_size, D) int8
    scales["k"], scales["v"]    a list with a tensor (K, block_size) bfloat16 for each block

    Tables, counts and slots are the engine's, as in chapter 05: `copy` is what the engine calls
    when `writable_slot` asks for a copy.
    """

    def __init__(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int):
        self.block_size = block_size
        shape = (num_blocks, kv_heads, block_size, head_dim)
        self.codes = {name: torch.zeros(shape, dtype=torch.int8) for name in ("k", "v")}
        self.scales = {
            name: [torch.zeros(shape[1:3], dtype=torch.bfloat16) for _ in range(num_blocks)]
            for name in ("k", "v")
        }

    def write(self, slot: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Quantise K and V of one token, (K, D) each, and store them in a slot."""
        block_id, offset = divmod(slot, self.block_size)
        for name, x in (("k", k), ("v", v)):
            codes, scale = quantise_int8(x)
            self.codes[name][block_id, :, offset] = codes
            self.scales[name][block_id][:, offset] = scale

    def read(self, block_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a block, (K, block_size, D) float32 each."""
        k, v = (
            dequantise_int8(self.codes[name][block_id], self.scales[name][block_id])
            for name in ("k", "v")
        )
        return k, v

    def copy(self, source: int, target: int) -> None:
        """Make block `target` read as block `source` does now. From then on a write to either of
        them changes only that one. What `target` held before is lost."""
        for name in ("k", "v"):
            self.codes[name][target] = self.codes[name][source]
            self.scales[name][target] = self.scales[name][source].clone()
