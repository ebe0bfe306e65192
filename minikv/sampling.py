"""From logits to the next token.

A draw is one uniform number from the request's own generator, looked up in the
cumulative distribution: which other requests share the batch cannot matter.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from minikv.config import require_int


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the argument, for bad values.

    max_tokens: at most this many new tokens, at least 1.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: only the k likeliest tokens; 0 is all.
    top_p: only the likeliest tokens that together reach this probability; in (0, 1].
    seed: of this request's draws; None takes a fresh one. Sample i of n uses (seed, i).
    n: independent samples of one prompt, whose blocks they share.
    stop: strings and token ids that end a sample. A stop string is cut from the text.
    ignore_eos: go on after the model's end token.
    cache_salt: prefixes are shared only between requests of equal salt.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str | int, ...] = ()
    ignore_eos: bool = False
    cache_salt: Hashable = None

    def __post_init__(self):
        require_int("max_tokens", self.max_tokens, 1)
        require_int("top_k", self.top_k, 0)
        require_int("n", self.n, 1)
        if self.seed is not None:
            require_int("seed", self.seed, 0)
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name}: must be a number, was {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature: must be finite and at least 0 (greedy), was {self.temperature!r}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be above 0 and at most 1, was {self.top_p!r}")
        if isinstance(self.stop, str | bytes) or not isinstance(self.stop, Iterable):
            raise ValueError(
                f"stop: must be a sequence of strings and token ids, was {self.stop!r}"
            )
        object.__setattr__(self, "stop", tuple(self.stop))
        for item in self.stop:
            if isinstance(item, bool) or not isinstance(item, str | int) or item == "":
                raise ValueError(
                    f"stop: holds {item!r}; only non-empty strings and token ids may stand there"
                )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos: must be True or False, was {self.ignore_eos!r}")
        try:
            hash(self.cache_salt)
        except TypeError:
            raise ValueError(f"cache_salt: must be hashable, was {self.cache_salt!r}") from None
        if self.cache_salt != self.cache_salt:  # NaN
            raise ValueError(f"cache_salt: must equal itself, was {self.cache_salt!r}")


def probabilities(
    logits: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions to draw from, likeliest first: probabilities and their token ids, (S, V).

    logits (S, vocab_size), one SamplingParams a row. Temperature first, then top-k, then
    top-p (Holtzman et al., 2020) over what top-k left; the token that crosses top_p is kept,
    and what is left out has probability 0. Nothing here waits for the device.
    """
    vocab_size = logits.shape[1]
    table = [(p.temperature, p.top_k or vocab_size, p.top_p) for p in params]
    rules = torch.tensor(table, dtype=torch.float64).to(logits.device, non_blocking=True)
    temperature, top_k, top_p = rules[:, :, None].unbind(1)  # (S, 1) each
    # Stable: which of two equal logits comes first must not depend on the company.
    values, token_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    values = (values.double() - values[:, :1].double()) / temperature
    values.masked_fill_(torch.arange(vocab_size, device=logits.device) >= top_k, -torch.inf)
    p = values.softmax(-1)
    before = p.cumsum(-1) - p  # probability of all likelier tokens
    p = p.masked_fill((before >= top_p) & (top_p < 1), 0)
    return p / p.sum(-1, keepdim=True), token_ids


class Sampler:
    """Chooses one token a row."""

    def __call__(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float | None]
    ) -> torch.Tensor:
        """logits (S, vocab_size); one SamplingParams and one draw a row.

        A draw is uniform in [0, 1), or None for a greedy row. Returns S token ids on the
        device of the logits, without waiting for them. (A sampler of your own may as well
        return a list.)
        """
        token_ids = logits.argmax(-1)
        rows = [row for row, draw in enumerate(draws) if draw is not None]
        if rows:
            at = torch.tensor(rows).to(logits.device, non_blocking=True)
            drawn = torch.tensor([draws[row] for row in rows], dtype=torch.float64)
            drawn = drawn.to(logits.device, non_blocking=True)
            p, candidates = probabilities(logits[at], [params[row] for row in rows])
            last = (p > 0).sum(-1, keepdim=True) - 1  # rounding may leave the sum below the draw
            index = torch.searchsorted(p.cumsum(-1), drawn[:, None], right=True).minimum(last)
            token_ids[at] = candidates.gather(1, index)[:, 0]
        return token_ids
