"""What a request may ask of the logits beside a token: log-probabilities, and a bias.

    logits ── + logit_bias ── the engine's sampler ── token ids ── as `Token`, if they are asked for

A `Token` is an id that also says how likely it was. It goes wherever ids go, from an engine's
thread or another process to the reader, and needs no path of its own.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from minikv.runner import ChooseTokens
from minikv.sampling import SamplingParams


@dataclass(frozen=True)
class Asked(SamplingParams):
    """logprobs: so many of the likeliest tokens are told with each new one; None: not even its own
    log-probability. logit_bias: (token id, what is added to its logit)."""

    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


class Token(int):
    """A token id. logprob: its natural log-probability, of the model's own distribution: without
    bias, temperature, top_k and top_p. top: (token id, the same), likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


class Scored:
    """A sampler that gives requests which are `Asked` what they ask for."""

    def __init__(self, choose: ChooseTokens):
        """`choose`: the sampler around which it is put."""
        inner = choose.choose if isinstance(choose, Scored) else choose
        self.choose: ChooseTokens = inner

    def __call__(
        self, logits: torch.Tensor, params: Seq[SamplingParams], draws: Seq[float | None]
    ) -> torch.Tensor | list[int]:
        asked = [(row, one) for row, one in enumerate(params) if isinstance(one, Asked)]
        if not asked:
            return self.choose(logits, params, draws)
        biased = logits.clone()
        for row, one in asked:
            for token_id, bias in one.logit_bias:
                biased[row, token_id] += bias
        found = self.choose(biased, params, draws)
        token_ids = found.tolist() if isinstance(found, torch.Tensor) else [*found]
        for row, one in asked:
            if one.logprobs is not None:
                token_ids[row] = _told(token_ids[row], logits[row], one.logprobs)
        return token_ids


def _told(token_id: int, logits: torch.Tensor, number: int) -> Token:
    """logits (vocab_size,)."""
    logprobs = logits.float().log_softmax(-1)
    token = Token(token_id)
    token.logprob = logprobs[token_id].item()
    values, ids = logprobs.topk(min(number, len(logprobs)))
    token.top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return token
