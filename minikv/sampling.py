"""From logits to the next token.

A draw is one uniform number, looked up in the cumulative distribution. It depends on the
request's seed, the sample and the position alone, so the other requests in the batch do not
matter.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from minikv.errors import require_bool, require_int, require_number, require_text


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the argument, for bad values.

    max_tokens: at most this many new tokens, at least 1.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: only the k likeliest tokens; 0 is all.
    top_p: only the likeliest tokens that together reach this probability; in (0, 1].
    seed: of this request's draws; None takes a random one. Sample i of n uses (seed, i).
    n: independent samples of one prompt, whose blocks they share.
    stop: strings and token ids that end a sample. A stop string is cut from the text.
    ignore_eos: continue after the model's end token.
    cache_salt: only requests of equal salt share prefixes. None and "" are different salts.
    retain_s: seconds for which an engine with `EngineConfig.retention` should keep this request's
        prefix when it has ended. Others ignore it.
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
    retain_s: int = 0

    def __post_init__(self):
        for name, low in (("max_tokens", 1), ("top_k", 0), ("n", 1), ("seed", 0), ("retain_s", 0)):
            if name != "seed" or self.seed is not None:
                object.__setattr__(self, name, require_int(name, getattr(self, name), low))
        require_number("temperature", self.temperature, " of at least 0 (greedy)", lambda x: x >= 0)
        require_number("top_p", self.top_p, " above 0 and at most 1", lambda x: 0 < x <= 1)
        single = isinstance(self.stop, str | bytes) or getattr(self.stop, "ndim", 1) == 0
        if single or not isinstance(self.stop, Iterable):
            raise ValueError(f"stop: must be a list of strings and token ids, was {self.stop!r}")
        stop = tuple(
            require_text("stop", item) if isinstance(item, str)
            else require_int("stop: a token id", item)
            for item in self.stop
        )  # fmt: skip
        if "" in stop:
            raise ValueError(f"stop: an empty string ends nothing, was {stop!r}")
        object.__setattr__(self, "stop", stop)
        require_bool("ignore_eos", self.ignore_eos)
        try:
            hash(self.cache_salt)
        except TypeError:
            raise ValueError(f"cache_salt: must be hashable, was {self.cache_salt!r}") from None
        if self.cache_salt != self.cache_salt:  # NaN
            raise ValueError(f"cache_salt: must equal itself, was {self.cache_salt!r}")

    def after(self, sequence: object, drafts: Sequence[int] = ()) -> "SamplingParams":
        """What a sampler is given for the token after a sequence and drafts behind it. Here, the
        same for all; in a subclass, it may depend on the tokens before."""
        return self


def probabilities(
    logits: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions to draw from, likeliest first: probabilities and token ids, (S, V).

    logits (S, vocab_size), one SamplingParams per row. Temperature first, then top-k, then
    top-p (Holtzman et al., 2020) over what top-k left; the token that crosses top_p is kept,
    and what is left out has probability 0. Nothing here waits for the device.
    """
    vocab_size = logits.shape[1]
    table = [(p.temperature, min(p.top_k or vocab_size, vocab_size), p.top_p) for p in params]
    rules = torch.tensor(table, dtype=torch.float64).to(logits.device, non_blocking=True)
    temperature, top_k, top_p = rules[:, :, None].unbind(1)  # (S, 1) each
    # Stable: which of two equal logits comes first must not depend on the rest of the batch.
    values, token_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    values = (values.double() - values[:, :1].double()) / temperature
    values.masked_fill_(torch.arange(vocab_size, device=logits.device) >= top_k, -torch.inf)
    p = values.softmax(-1)
    before = p.cumsum(-1) - p  # probability of all likelier tokens
    p = p.masked_fill((before >= top_p) & (top_p < 1), 0)
    return p / p.sum(-1, keepdim=True), token_ids


class Sampler:
    """Chooses one token per row."""

    def __call__(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float | None]
    ) -> torch.Tensor:
        """logits (S, vocab_size); one SamplingParams and one draw per row.

        A draw is uniform in [0, 1), or None for a greedy row. Returns S token ids on the
        device of the logits, without waiting for them. (A sampler of your own may as well
        return a list.)
        """
        # PyTorch's argmax uses no SIMD on a CPU, and takes 15 times as long as NumPy's.
        at_hand = logits.device.type == "cpu" and logits.dtype == torch.float32
        token_ids = torch.from_numpy(logits.numpy().argmax(-1)) if at_hand else logits.argmax(-1)
        rows = [row for row, draw in enumerate(draws) if draw is not None]
        if rows:
            at = torch.tensor(rows).to(logits.device, non_blocking=True)
            drawn = torch.tensor([draws[row] for row in rows], dtype=torch.float64)
            drawn = drawn.to(logits.device, non_blocking=True)
            p, candidates = probabilities(logits[at], [params[row] for row in rows])
            # Rounding may leave the sum below the draw. Of logits that are no numbers, take any.
            last = ((p > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
            index = torch.searchsorted(p.cumsum(-1), drawn[:, None], right=True).minimum(last)
            token_ids[at] = candidates.gather(1, index)[:, 0]
        return token_ids
