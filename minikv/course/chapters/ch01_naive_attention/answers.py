"""Chapter 01: attention for one query in plain Python, and heads packed by group."""

import math

import torch

from minikv.attention import causal_mask


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
    scale = len(query) ** -0.5
    scores = [scale * sum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    top = max(scores)  # the largest exponent becomes 0, and the weights stay the same
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [
        sum(weight * x for weight, x in zip(weights, channel, strict=True)) / total
        for channel in zip(*values, strict=True)
    ]


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
    q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # (T, K, G, D)
    scores = torch.einsum("tkgd,lkd->kgtl", q, k)  # (K, G, T, L)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("kgtl,lkd->tkgd", weights, v)  # (T, K, G, D)
    return out.flatten(1, 2)  # (T, K * G, D)
