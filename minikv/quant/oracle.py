"""Attention over quantised K and V as the formula has it: what every faster way must equal.

Nothing is paged and nothing is cached. K and V of the whole sequence are computed, encoded and
decoded, and naive attention reads them.
"""

import torch

from minikv.attention import causal_mask
from minikv.config import ModelConfig
from minikv.quant.formats import KVFormat


def read_back(kv_format: KVFormat, k: torch.Tensor, v: torch.Tensor, block_size: int):
    """K and V (T, K, D) as they are read after being stored. If K is stored by block, keys of an
    incomplete last block come back unchanged: only queries of that block see them."""
    v_hat = kv_format.v.decode(kv_format.v.encode(v)).to(v.dtype)
    if not kv_format.k_by_block:
        return kv_format.k.decode(kv_format.k.encode(k)).to(k.dtype), v_hat
    full = len(k) // block_size * block_size
    blocks = k[:full].unflatten(0, (-1, block_size)).transpose(1, 2)  # (blocks, K, block_size, D)
    blocks = kv_format.k.decode(kv_format.k.encode(blocks)).to(k.dtype)
    return torch.cat([blocks.transpose(1, 2).flatten(0, 1), k[full:]]), v_hat


def attend_mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    k_hat: torch.Tensor,
    v_hat: torch.Tensor,
    own_block: int | None,
    window: int | None = None,
) -> torch.Tensor:
    """Naive attention that reads `k_hat` and `v_hat`; with `own_block`, a block size, it reads `k`
    where a query and a key are in the same block.

    q (T, H, D); k, k_hat, v_hat (L, K, D) with L >= T -> (T, H, D).
    """
    group = q.shape[1] // k.shape[1]
    k, k_hat, v_hat = (x.repeat_interleave(group, dim=1).float() for x in (k, k_hat, v_hat))
    scores = torch.einsum("thd,lhd->htl", q.float(), k_hat)
    if own_block is not None:
        blocks = torch.arange(len(k), device=q.device) // own_block
        same = blocks[-len(q) :, None] == blocks
        scores = torch.where(same, torch.einsum("thd,lhd->htl", q.float(), k), scores)
    mask = causal_mask(len(q), len(k), window).to(q.device)
    weights = (scores * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v_hat).to(q.dtype)


class QuantisedOracle:
    """A "cache" for `LanguageModel.logits` that keeps nothing: each call is a whole sequence.

    lm.logits(token_ids, QuantisedOracle(lm.config, format_of("int4", 16), 16))
    """

    num_tokens = 0

    def __init__(self, config: ModelConfig, kv_format: KVFormat, block_size: int):
        self.windows, self.format, self.block_size = config.windows, kv_format, block_size

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (T, H, D), k and v (T, K, D) of the whole sequence -> (T, H, D)."""
        k_hat, v_hat = read_back(self.format, k, v, self.block_size)
        own_block = self.block_size if self.format.k_by_block else None
        return attend_mixed(q, k, k_hat, v_hat, own_block, self.windows[layer])
