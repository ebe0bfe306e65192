"""Attention with a mask that is given: it comes from the cells, not from the order of the rows."""

import torch


def attention_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q (T, H, D), k (N, K, D) -> q k^T / sqrt(D), (K, H / K, T, N) float32."""
    q = q.float().unflatten(1, (k.shape[1], -1))  # (T, K, H / K, D)
    return torch.einsum("tkgd,nkd->kgtn", q, k.float()) * q.shape[-1] ** -0.5


def mix_values(scores: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax over what is visible, then the mean of v: scores (K, H / K, T, N), v (N, K, D),
    visible (T, N) bool -> (T, H, D) float32. Each query must see a key."""
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)  # (K, H / K, T, N)
    return torch.einsum("kgtn,nkd->tkgd", weights, v.float()).flatten(1, 2)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v over what each query sees.

    q (T, H, D); k, v (N, K, D); visible (T, N) bool. Returns (T, H, D) in q's dtype.
    """
    return mix_values(attention_scores(q, k), v, visible).to(q.dtype)


def merged_attention(
    near: tuple[torch.Tensor, torch.Tensor],
    far: tuple[torch.Tensor, torch.Tensor],
    v: torch.Tensor,
    is_near: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Two attentions with one softmax: a key's score comes from one pair of q and k if it is near
    and from another pair, turned to other positions, if it is far.

    near, far: q (T, H, D) and k (N, K, D) each; v (N, K, D); is_near, visible (T, N) bool.
    Returns (T, H, D) in q's dtype.
    """
    scores = torch.where(is_near, attention_scores(*near), attention_scores(*far))
    return mix_values(scores, v, visible).to(near[0].dtype)


def in_window(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which positions a query may see: not later than its own, and among the last `window`.

    query (T,), key (N,) -> (T, N) bool.
    """
    distance = query[:, None] - key  # (T, N)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
