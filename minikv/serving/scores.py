"""What a request may ask of the logits beside a token: log-probabilities, a bias, and penalties.

    logits ── logit_bias, penalties ── the engine's sampler ── token ids ── as `Token`, if asked for

A prompt's log-probabilities are computed before the engine gets it (`Scoring`), and come with the
first token of its answer. Penalties depend on the tokens before. A sampler is given neither, so the
params of a request with one of the two say to which sequence a row of logits belongs, and behind
which drafts it stands (`SamplingParams.after`).

A `Token` is an id that also says how likely it was. It goes wherever ids go, from an engine's
thread or another process to the reader, and needs no path of its own.
"""

from array import array
from collections.abc import Iterable, Sequence as Seq
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from minikv.kv_cache import PreallocatedCache
from minikv.runner import ChooseTokens, Runner
from minikv.sampling import SamplingParams
from minikv.sequence import Sequence

PIECE = 128  # tokens of a prompt that is scored


@dataclass(frozen=True)
class Asked(SamplingParams):
    """What a request may ask for beside `SamplingParams`.

    logprobs: so many of the likeliest tokens are told with each new token; None: not even
        the new token's log-probability.
    logit_bias: (token id, what is added to its logit).
    frequency_penalty: what a token's logit loses for each time that the answer has it already.
    presence_penalty: what it loses if the answer has it at all.
    repetition_penalty: by this the logit of a token of prompt or answer is divided if it is
        positive, and multiplied if it is negative (Keskar et al., 2019). Before the other two.
    scores_prompt: with `logprobs`, the prompt's tokens are told with the first new token, if
        the code that gives the request to the engine has a `Scoring` compute them first.
    """

    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    scores_prompt: bool = False
    # Of the row of logits that a sampler gets with this: set by `after`.
    sequence: Sequence | None = field(default=None, init=False, repr=False, compare=False)
    drafts: Seq[int] = field(default=(), init=False, repr=False, compare=False)
    told: Seq[int] = field(default=(), init=False, repr=False, compare=False)  # of the prompt
    # `logit_bias` as token ids and what is added, both (N,): taken apart once, not at each token.
    bias: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        super().__post_init__()
        if self.logit_bias:
            ids, values = zip(*self.logit_bias, strict=True)
            vars(self)["bias"] = torch.tensor(ids), torch.tensor(values, dtype=torch.float32)

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    def after(self, sequence: Any, drafts: Seq[int] = ()) -> "Asked":
        if self.penalties == (1, 0, 0) and not self.scores_prompt:
            return self
        twin = copy(self)
        vars(twin).update(sequence=sequence, drafts=drafts)
        return twin


class Token(int):
    """A token id. logprob: its natural log-probability, of the model's own distribution: without
    bias, penalties, temperature, top_k and top_p. top: (token id, the same), likeliest first.
    prompt: with the first token of an answer, if asked for, those of the prompt: a `Token` each,
    but for its first, before which there is nothing."""

    logprob: float
    top: list[tuple[int, float]]
    prompt: Seq[int] = ()


class Seen:
    """The tokens of a sequence, each once, and how often its answer has each."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of the sequence, that were counted
        self.ids, self.counts = array("q"), array("f")
        self.places: dict[int, int] = {}

    def add(self, token_ids: Iterable[int], number: int = 1) -> None:
        """`number`: 0 for tokens of the prompt, which the answer may not have."""
        for token_id in token_ids:
            place = self.places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += number

    def with_drafts(self, token_ids: Iterable[int]) -> "Seen":
        """A copy with more tokens."""
        twin = Seen()
        twin.ids, twin.counts = self.ids[:], self.counts[:]
        twin.places = self.places.copy()
        twin.add(token_ids)
        return twin


class Scored:
    """A sampler that gives requests which are `Asked` what they ask for."""

    def __init__(self, runner: Runner):
        """It is put around the sampler of `runner`."""
        choose = runner.sampler
        self.choose: ChooseTokens = choose.choose if isinstance(choose, Scored) else choose
        self._seen: dict[Sequence, Seen] = {}
        self._last: list[int] = []  # what was chosen the last time

    def __call__(
        self, logits: torch.Tensor, params: Seq[SamplingParams], draws: Seq[float | None]
    ) -> torch.Tensor | list[int]:
        asked = [(row, one) for row, one in enumerate(params) if isinstance(one, Asked)]
        if not asked:
            return self.choose(logits, params, draws)
        changed = logits.clone()
        for row, one in asked:
            if one.bias is not None:
                ids, values = (part.to(logits.device, non_blocking=True) for part in one.bias)
                changed[row].index_add_(0, ids, values.to(logits.dtype))
        if penalised := [pair for pair in asked if pair[1].penalties != (1, 0, 0)]:
            self._penalise(changed, penalised)
        found = self.choose(changed, params, draws)
        token_ids = found.tolist() if isinstance(found, torch.Tensor) else [*found]
        self._last = [*token_ids]
        for row, one in asked:
            if one.logprobs is None:
                continue
            token = token_ids[row] = _told(token_ids[row], logits[row], one.logprobs)
            # `num_tokens` counts a token that is still on its way.
            if one.told and one.sequence and one.sequence.num_tokens == len(one.told):
                token.prompt = one.told
        return token_ids

    def _penalise(self, logits: torch.Tensor, asked: Seq[tuple[int, Asked]]) -> None:
        """In place: logits (S, vocab_size)."""
        self._seen = {one: seen for one, seen in self._seen.items() if one.finish_reason is None}
        seen = [self._tokens_before(one) for _, one in asked]
        sizes = [len(one.ids) for one in seen]  # their sum is N
        table = (
            np.repeat([row for row, _ in asked], sizes),
            np.concatenate([np.array(one.ids) for one in seen]),
            np.concatenate([np.array(one.counts) for one in seen]),
            np.repeat(np.array([one.penalties for _, one in asked], np.float32), sizes, 0),
        )
        rows, ids, counts, penalties = (torch.from_numpy(part).to(logits.device) for part in table)
        repetition, frequency, presence = penalties.T  # (N,) each
        values = logits[rows, ids].float()
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= counts * frequency + (counts > 0) * presence
        logits[rows, ids] = values.to(logits.dtype)

    def _tokens_before(self, asked: Asked) -> Seen:
        """The tokens before the one that is to be chosen. Of the sequence itself, only those are
        counted that it has got since the last time."""
        sequence, drafts = asked.sequence, asked.drafts
        assert sequence is not None
        seen = self._seen.setdefault(sequence, Seen())
        if seen.num_tokens == 0:
            prompt = sequence.request.prompt_ids
            if asked.repetition_penalty != 1:
                seen.add(prompt, 0)
            seen.num_tokens = len(prompt)
        seen.add(sequence.token_ids[seen.num_tokens :])
        seen.num_tokens = len(sequence.token_ids)
        if sequence.device_row is not None:  # planned ahead: its newest token is still on its way
            drafts = [self._last[sequence.device_row], *drafts]
        return seen.with_drafts(drafts) if drafts else seen


class Scoring:
    """A prompt's tokens, told, as params for its request. It is computed once more, apart from the
    engine, which keeps no logits but the last: piece by piece, with a cache of its own. Between
    two pieces the engine may take a step, so nobody waits for a whole prompt."""

    def __init__(self, runner: Runner, ids: list[int], params: Asked):
        self._model, self._ids = runner.transformer, ids
        self._cache: PreallocatedCache | None = None  # made when its turn has come
        self._told, self._number = ids[:1], params.logprobs or 0
        self.params = copy(params)
        vars(self.params)["told"] = self._told

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one piece. Returns whether it was the last."""
        model, ids, start = self._model, self._ids, len(self._told) - 1
        if self._cache is None:
            self._cache = PreallocatedCache(model.config, len(ids), model.dtype, model.device)
        piece = ids[start : min(start + PIECE, len(ids) - 1)]
        if piece:
            positions = torch.arange(start, start + len(piece), device=model.device)
            tokens = torch.tensor(piece, device=model.device)
            logits = model.logits(model.forward(tokens, positions, self._cache.attend))
            rows = zip(ids[start + 1 : start + 1 + PIECE], logits, strict=True)
            self._told += [_told(token_id, row, self._number) for token_id, row in rows]
        return len(self._told) == len(ids)


def _told(token_id: int, logits: torch.Tensor, number: int) -> Token:
    """logits (vocab_size,)."""
    logprobs = logits.float().log_softmax(-1)
    token = Token(token_id)
    token.logprob = logprobs[token_id].item()
    values, ids = logprobs.topk(min(number, len(logprobs)))
    token.top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return token
