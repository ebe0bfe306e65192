"""Attention as the formula has it: the oracle that every later chapter must equal.

Chapter 01. Nothing is cached, nothing is tiled; float32 inside, whatever comes in.
"""

import torch


def causal_mask(num_queries: int, num_keys: int, window: int | None = None) -> torch.Tensor:
    """Which keys each query may see: (num_queries, num_keys) bool.

    The queries are the *last* positions of the keys, so the mask of a chunk
    after a cached prefix is rectangular. `window` keeps the last `window` keys
    of each query, its own included.
    """
    query = torch.arange(num_keys - num_queries, num_keys)[:, None]
    key = torch.arange(num_keys)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v with a causal mask (Vaswani et al., 2017).

    q (T, num_heads, head_dim); k, v (L, num_kv_heads, head_dim) with L >= T; the
    queries stand at the last T of the L positions. Query heads share KV heads in
    groups of neighbours (Ainslie et al., 2023). Returns (T, num_heads, head_dim) in q's dtype;
    computes in float32, and changes neither q nor k nor v.
    """
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1).float()  # (L, H, D)
    v = v.repeat_interleave(group, dim=1).float()  # (L, H, D)
    scores = torch.einsum("thd,lhd->htl", q.float(), k) * q.shape[-1] ** -0.5  # (H, T, L)
    mask = causal_mask(len(q), len(k), window).to(q.device)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)  # (H, T, L)
    return torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)  # (T, H, D)
