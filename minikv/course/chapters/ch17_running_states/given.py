"""Chapter 17: what the notebook and its checks run."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from minikv.course.judge.checking import in_place_of
from minikv.engine import Engine, EngineConfig
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams
from minikv.states import HybridConfig


def by_list(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule as a sum over all tokens: a list of what each has written, and no state.

    q, k (T, H, N), v (T, H, D), g, beta (T, H) -> (T, H, D), what is read after each token.
    """
    total, r, out = g.cumsum(0), torch.zeros_like(v), torch.zeros_like(v)
    for i in range(len(q)):
        left = beta[: i + 1] * (total[i] - total[: i + 1]).exp()  # (i + 1, H): of each write
        near, asked = (left * (k[: i + 1] * one).sum(-1) for one in (k[i], q[i]))
        r[i] = v[i] - (near[:i, :, None] * r[:i]).sum(0)
        out[i] = (asked[..., None] * r[: i + 1]).sum(0)
    return out


def random_tokens(
    count: int, heads: int, n: int, d: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k (T, H, N) of length 1, v (T, H, D), g and beta (T, H), of `count` tokens."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (
        torch.nn.functional.normalize(torch.randn(count, heads, n, generator=draw), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(count, heads, d, generator=draw)
    g, beta = -torch.rand(count, heads, generator=draw), torch.rand(count, heads, generator=draw)
    return q, k, v, g, beta


def misread_by_age(num_tokens: int, size: int, corrects: bool, g: float = 0.0) -> list[float]:
    """How wrong a state of size x size is about each of the last 64 of `num_tokens` random keys,
    the newest first: the length of the error, that of the value being 1. Mean over 200 heads.

    `corrects`: what is written is the difference (the delta rule), not the whole value.
    """
    _, keys, values, _, _ = random_tokens(num_tokens, 200, size, size)
    state = torch.zeros(200, size, size)
    for k, v in zip(keys, values, strict=True):
        state *= math.exp(g)
        said = torch.einsum("hnd,hn->hd", state, k) if corrects else 0
        state += k[..., None] * (v - said)[:, None]
    read = torch.einsum("hnd,thn->thd", state, keys[-64:])
    errors = (read - values[-64:]).norm(dim=-1) / values[-64:].norm(dim=-1)  # (64, heads)
    return errors.mean(1).flip(0).tolist()


def served_alone(lm: LanguageModel, pool: Any, texts: Sequence[str]) -> list[list[int]]:
    """Requests one after the other, on an engine whose states are counted by `pool`, a class, with
    room for 8 blocks and two copies: the 12 tokens of each."""
    assert isinstance(lm.config, HybridConfig)
    room = 2 * lm.config.state_bytes(lm.dtype)
    with in_place_of("minikv.states.slots:StatePool", pool):
        engine = Engine(lm, EngineConfig(8, 4, max_num_seqs=1, state_bytes=room, attention="torch"))
    rule = SamplingParams(max_tokens=12, ignore_eos=True)
    return [engine.generate([text], rule)[0].token_ids for text in texts]
