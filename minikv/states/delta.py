"""The gated delta rule: a layer's whole memory is a matrix, and each token corrects it.

Softmax attention weighs all earlier values by exp(q . k), so it needs the list of them. Leave the
exponential out, and the sum over tokens of (q . k) v is q times the sum of k v^T, one matrix S of
fixed size (Katharopoulos et al., 2020). S only ever grows fuller. So the delta rule first reads
what it says about a key, and writes the difference (Schlag et al., 2021), and a gate lets S fade
(Yang et al., 2024):

    S <- e^g S                 forget: g <= 0
    r  = v - S^T k             what S does not yet say about k
    S <- S + beta k r^T        write that: 0 < beta < 1
    o  = S^T q                 read

Keys and queries have length 1 here, and queries are divided by sqrt(key dim): see `split_heads`.
"""

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens: a triangular system of this size is solved at once


def decode(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One token of each of S sequences: its state fades by e^g; of what it then does not say about
    k, beta is written; and q reads.

    state (S, H, N, D) float32, which is changed; q, k (S, H, N), v (S, H, D), g, beta (S, H)
    -> (S, H, D).

    Worked example, N = D = 1: the state is 4, k = 1, v = 8, e^g = 0.5, beta = 0.75. It fades to 2,
    so 6 is not yet said; 0.75 of it is written, and the state is 6.5. A query of 2 reads 13.
    """
    state *= g.exp()[..., None, None]
    r = v - torch.einsum("shnd,shn->shd", state, k)
    state += torch.einsum("sh,shn,shd->shnd", beta, k, r)
    return torch.einsum("shnd,shn->shd", state, q)


def prefill(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """T tokens of one sequence, CHUNK at a time: the same numbers as token by token, but for
    rounding.

    state (H, N, D) float32, which is changed; q, k (T, H, N), v (T, H, D), g, beta (T, H)
    -> (T, H, D).
    """
    parts = (one.transpose(0, 1).split(CHUNK, 1) for one in (q, k, v, g, beta))
    outs = [chunk_at_once(state, *chunk) for chunk in zip(*parts, strict=True)]
    return torch.cat(outs, 1).transpose(0, 1)


def chunk_at_once(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """C tokens of one sequence, heads first: what `decode` makes of them one by one, with a number
    of passes over the state that does not grow with C.

    state (H, N, D) float32, which is changed; q, k (H, C, N), v (H, C, D), g, beta (H, C)
    -> (H, C, D).

    Let G_i be the sum of g up to token i, and r_j what token j has written. Then before token i
    writes, S = e^G_i (S_0 + sum over j < i of e^-G_j beta_j k_j r_j^T), so

        r_i + sum over j < i of e^(G_i - G_j) beta_j (k_i . k_j) r_j = v_i - e^G_i S_0^T k_i

    which is one triangular system for all r of the chunk (Yang et al., 2024). A query reads after
    its own token has written: there the sum is over j <= i.
    """
    total = g.cumsum(-1)  # (H, C): G
    fade = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # (H, C, C): from j to i
    weights = fade * beta[..., None, :]  # what is left at i of what j writes
    system = weights * (k @ k.transpose(-1, -2))  # its diagonal counts as 1
    kept = total.exp()[..., None]  # (H, C, 1): of the state before the chunk
    r = torch.linalg.solve_triangular(
        system, v - kept * (k @ state), upper=False, unitriangular=True
    )  # (H, C, D)
    out = kept * (q @ state) + (weights * (q @ k.transpose(-1, -2))) @ r
    state *= kept[:, -1:]
    state += (weights[:, -1, :, None] * k).transpose(-1, -2) @ r
    return out


def convolve(
    inputs: torch.Tensor, last: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix each channel with its last inputs, then SiLU: what a linear layer does before all else.

    inputs (S, T, C): T new tokens of S sequences; last (S, W - 1, C): the inputs before them, zeros
    at the start; weight (C, W). Returns (S, T, C), and the last W - 1 inputs from now on.
    """
    seen = torch.cat([last, inputs], 1)  # (S, W - 1 + T, C)
    if inputs.shape[1] == 1:  # a decode
        out = (seen * weight.T).sum(1, keepdim=True)
    else:
        out = F.conv1d(seen.transpose(1, 2), weight[:, None], groups=len(weight)).transpose(1, 2)
    return F.silu(out), seen[:, 1 - weight.shape[1] :]
