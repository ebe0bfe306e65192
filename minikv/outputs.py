"""What the engine returns: token ids at once, text on demand, and counters."""

from collections import UserList
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minikv.sequence import Request, Sequence

Decode = Callable[..., str]  # (token ids, is_open=False) -> text, as `LanguageModel.decode`
REPLACEMENT = "\ufffd"  # what decoding makes of half a character, and of an open end


def find_stop(text: str, stop: tuple[str | int, ...]) -> int | None:
    """Where the first stop string begins in `text`, or None."""
    found = [text.find(item) for item in stop if isinstance(item, str)]
    return min((at for at in found if at >= 0), default=None)


def hits_stop_string(sequence: Sequence, decode: Decode) -> bool:
    """Whether the tokens since the last call completed a stop string.

    Only these tokens are decoded, behind the last tokens whose text is whole, because some
    tokenizers leave out a blank before the first token. Only their text is searched, behind as much
    of the text before as a stop string is long. So a step of a long answer takes no longer.
    """
    request, (num_read, kept, before) = sequence.request, sequence.read
    tokens = sequence.token_ids[len(request.prompt_ids) + num_read :]
    known = len(decode(kept)) if kept else 0
    text = before + decode(kept + tokens, True)[known:]
    is_open = text.endswith(REPLACEMENT)
    if len(text) > len(before) and not is_open:
        sequence.read = num_read + len(tokens), tokens, text[-request.longest_stop :]
    elif not is_open and not decode(tokens + tokens):  # special tokens have no text
        sequence.read = num_read + len(tokens), kept, before
    text = before + decode(kept + tokens)[known:] if is_open else text
    return find_stop(text, request.params.stop) is not None


def visible_text(text: str, stop: tuple[str | int, ...], finished: bool) -> str:
    """What of an answer's text may be sent.

    A stop string ends it: only what stands before the first one is visible. While the answer is
    unfinished, an end that may still change is held back, and no more: half a character, which
    decodes to one or more U+FFFD, and then whatever could begin a stop string. Token ids among
    `stop` are not looked for.

    Worked example, stop strings "END" and "class": of "a E" one character is held back, of "a cla"
    three, and of "a END b" the last five are never sent.
    """
    cut = find_stop(text, stop)
    if cut is not None:
        return text[:cut]
    if finished:
        return text
    text = text.rstrip(REPLACEMENT)
    most = len(text) + 1  # characters of a stop string that matter, however long it is
    starts = (item[:n] for item in stop if isinstance(item, str) for n in range(len(item[:most])))
    return text[: len(text) - max((len(one) for one in starts if text.endswith(one)), default=0)]


class SampleOutput:
    """One sample of a request as it stood after some step."""

    def __init__(self, sequence: Sequence, length: int, decode: Decode):
        """`length`: tokens at that time, the prompt's included."""
        self._sequence, self._length, self.decode = sequence, length, decode
        self.stop = sequence.request.params.stop  # what ends it

    @property
    def token_ids(self) -> list[int]:
        """The new tokens so far, without the prompt's."""
        return self._sequence.token_ids[len(self._sequence.request.prompt_ids) : self._length]

    @property
    def finish_reason(self) -> str | None:
        """None while unfinished; "stop" (end token, stop string or id), "length" or "abort"."""
        is_newest = self._length == len(self._sequence.token_ids)
        return self._sequence.finish_reason if is_newest else None

    @property
    def text(self) -> str:
        """The tokens as text, as far as it is final, without a stop string and what follows it."""
        finished = self.finish_reason is not None
        return visible_text(self.decode(self.token_ids, not finished), self.stop, finished)

    def __repr__(self) -> str:
        return f"SampleOutput(token_ids={self.token_ids}, finish_reason={self.finish_reason!r})"


class RequestOutput:
    """A request as it stood after some step; later steps do not change it."""

    def __init__(self, of: Request, lengths: Iterator[int], decode: Decode):
        self.request, self.request_id, self.prompt_ids = of, of.request_id, of.prompt_ids
        # One for each of `n`.
        self.samples = [SampleOutput(one, next(lengths), decode) for one in of.sequences]

    @property
    def token_ids(self) -> list[int]:
        """The first sample's new tokens."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def finish_reason(self) -> str | None:
        """The first sample's, once every sample is finished; None before."""
        reasons = [sample.finish_reason for sample in self.samples]
        return None if None in reasons else reasons[0]

    def __repr__(self) -> str:
        return f"RequestOutput(request_id={self.request_id}, samples={self.samples})"


class Outputs(UserList[RequestOutput]):
    """A list of requests as they stand now, one output for each. It is made when it is read: who
    waits for the end reads only the last of many steps."""

    def __init__(self, requests: Iterable[Any], decode: Decode | None = None):
        if decode is None:  # a part or a sum of such lists: its outputs are made already
            self.data = list(requests)
            return
        self.requests, self._decode = list[Request](requests), decode
        # A sequence never loses a token, so its length now is enough to find them later.
        self._lengths = [len(one.token_ids) for each in self.requests for one in each.sequences]

    @cached_property
    def data(self) -> list[RequestOutput]:  # type: ignore[override]
        lengths = iter(self._lengths)
        return [RequestOutput(one, lengths, self._decode) for one in self.requests]


@dataclass(frozen=True)
class Delta:
    """What a step added to a streamed request."""

    token_ids: list[int]
    text: str
    finish_reason: str | None


class SoFar:
    """How much of a sample its reader has got. Only the newest tokens are decoded.

    The text of the first `num_known` tokens is known. Some tokenizers leave out a blank before the
    first token, so decoding begins some tokens earlier, at `start`.
    """

    def __init__(self) -> None:
        self._num_tokens = self._num_chars = self._start = self._num_known = 0
        self._text = ""  # of the known tokens: whole characters

    def news(self, sample: SampleOutput) -> Delta:
        """What the sample has got since the last call."""
        token_ids, decode, reason = sample.token_ids, sample.decode, sample.finish_reason
        num_known = len(decode(token_ids[self._start : self._num_known]))  # characters
        text = self._text + decode(token_ids[self._start :], reason is None)[num_known:]
        if text != self._text and not text.endswith(REPLACEMENT):
            self._text, self._start, self._num_known = text, self._num_known, len(token_ids)
        text = visible_text(text, sample.stop, reason is not None)
        delta = Delta(token_ids[self._num_tokens :], text[self._num_chars :], reason)
        self._num_tokens, self._num_chars = len(token_ids), len(text)
        return delta


@dataclass(frozen=True)
class BeamOutput:
    """One hypothesis; `score` is its log probability / length ** length_penalty."""

    token_ids: list[int]
    text: str
    score: float


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was made, and the pool as it is now."""

    blocks_total: int
    blocks_free: int
    blocks_used: int  # held by sequences or the prefix cache
    blocks_cached: int  # of those, held by the prefix cache (sequences may share them)
    bytes_per_token: float  # of K and V in all layers, with scales if they are quantised
    running: int
    waiting: int
    looked_up_tokens: int  # tokens of admitted requests, looked up in the prefix cache
    hit_tokens: int  # of those, found
    preemptions: int
    swaps_out: int
    swaps_in: int
    steps: int
    computed_tokens: int  # tokens that went through the model
    generated_tokens: int
    model_seconds: float  # forward pass and sampling
    host_seconds: float  # all the rest of step(): scheduling and bookkeeping
    tiers: dict  # by tier below the device, if there is one: `minikv.tiers.TierStats`
    speculation: Any  # `minikv.speculative.Speculation`, or None
    states: Any  # `minikv.states.Counts`, or None

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0
