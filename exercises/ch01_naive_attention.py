"""Naive attention: the formula, the mask, heads in groups, and RoPE.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("01.1") in the notebook, or in a terminal: python -m minikv check 01.1
"""

import math

import torch


# ── 01.1 One query, one head ──────────────────────────────────────────────────────
def attend_one_query(
    query: list[float], keys: list[list[float]], values: list[list[float]]
) -> list[float]:
    """Attention for one query and one head, in plain Python: no tensors, no mask.

    query: D numbers. keys: L lists of D numbers. values: L lists, all of one width.
    Returns the weighted mean of the values, a list of that width. The arguments stay unchanged.

        score[i]  = query · keys[i] / sqrt(D)
        weight[i] = exp(score[i]) / (exp(score[0]) + … + exp(score[L - 1]))
        result    = weight[0] values[0] + … + weight[L - 1] values[L - 1]

    Scores may be as large as 10,000 or as low as -10,000, and math.exp(710) raises
    OverflowError: compute the weights in a way that cannot overflow.

    Two equal keys get half the weight each:

        attend_one_query([1.0, 2.0], [[3.0, 0.0], [3.0, 0.0]], [[10.0], [20.0]]) == [15.0]
    """
    raise NotImplementedError("Exercise 01.1: attend_one_query")


# ── 01.2 The causal mask ──────────────────────────────────────────────────────────
def causal_mask(num_queries: int, num_keys: int, window: int | None = None) -> torch.Tensor:
    """Which keys each query may see: (num_queries, num_keys) bool.

    The queries are the *last* positions of the keys, so the mask of a chunk
    after a cached prefix is rectangular. `window` keeps the last `window` keys
    of each query, its own included.
    """
    raise NotImplementedError("Exercise 01.2: causal_mask")


# ── 01.3 Attention with many heads ────────────────────────────────────────────────
def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v with a causal mask (Vaswani et al., 2017).

    q (T, num_heads, head_dim); k, v (L, num_kv_heads, head_dim) with L >= T; the
    queries stand at the last T of the L positions. Query heads share KV heads in
    groups of neighbours (Ainslie et al., 2023). Returns (T, num_heads, head_dim) in q's dtype;
    computes in float32, and changes neither q nor k nor v.
    """
    raise NotImplementedError("Exercise 01.3: naive_attention")


# ── 01.4 Grouped heads without copies: broken, fix it ─────────────────────────────
def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Naive attention that does not repeat k and v: the query heads of a group lie side by side.

    q (T, num_heads, head_dim); k, v (L, num_kv_heads, head_dim) with L >= T, all float32; the
    queries stand at the last T of the L positions. Returns (T, num_heads, head_dim), equal to
    `naive_attention(q, k, v, window)`, and does not modify q, k or v. In the letters below, K is
    the number of KV heads and G the number of query heads per group, so num_heads = K * G.
    """
    mask = causal_mask(len(q), len(k), window)
    q = q.unflatten(1, (-1, k.shape[1])) * q.shape[-1] ** -0.5  # (T, G, K, D)
    scores = torch.einsum("tgkd,lkd->kgtl", q, k)  # (K, G, T, L)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("kgtl,lkd->tgkd", weights, v)  # (T, G, K, D)
    return out.flatten(1, 2)  # (T, G * K, D)


# ── 01.5 Rotate by position ───────────────────────────────────────────────────────
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al., 2021): turn channel pairs (i, i + D / 2) by the position's angle.

    x (T, heads, D), which is not changed; cos, sin (T, 1, D), the first half of sin negated.
    Adding the angles of two turns is turning by their sum, so q . k depends on distance alone.
    """
    raise NotImplementedError("Exercise 01.5: rotate")
