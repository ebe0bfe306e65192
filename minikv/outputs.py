"""What the engine returns: token ids at once, text on demand, and counters."""

from collections import UserList
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minikv.sequence import Request, Sequence

REPLACEMENT = "\ufffd"  # what decoding makes of half a character


def find_stop(text: str, stop: tuple[str | int, ...]) -> int | None:
    """Where the first stop string begins in `text`, or None."""
    found = [text.find(item) for item in stop if isinstance(item, str)]
    return min((at for at in found if at >= 0), default=None)


def hits_stop_string(sequence: Sequence, decode: Callable[[list[int]], str]) -> bool:
    """Whether the newest token completed a stop string.

    The end of the text is searched first, then all of it, because the end alone may decode
    differently.
    """
    longest = sequence.request.longest_stop  # bytes; every token but a special one has at least 1
    output, stop = sequence.output_ids, sequence.request.params.stop
    width = longest + 4
    tail = decode(output[-width:])
    while len(tail) < longest and width < len(output):  # special tokens have no text
        width *= 2
        tail = decode(output[-width:])
    return find_stop(tail, stop) is not None and find_stop(decode(output), stop) is not None


def visible_text(text: str, stop: tuple[str | int, ...], finished: bool) -> str:
    """`text` without its stop string; while unfinished also without an end that may still
    change: half a character, or what could be the beginning of a stop string."""
    cut = find_stop(text, stop)
    if cut is not None:
        return text[:cut]
    if finished:
        return text
    text = text.rstrip(REPLACEMENT)
    starts = [item[:n] for item in stop if isinstance(item, str) for n in range(len(item))]
    return text[: len(text) - max((len(one) for one in starts if text.endswith(one)), default=0)]


class SampleOutput:
    """One sample of a request as it stood after some step."""

    __slots__ = ("_length", "_sequence", "decode")

    def __init__(self, sequence: Sequence, length: int, decode: Callable[[list[int]], str]):
        """`length`: tokens at that time, the prompt's included."""
        self._sequence, self._length, self.decode = sequence, length, decode

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
        return visible_text(self.decode(self.token_ids), self.stop, self.finish_reason is not None)

    @property
    def stop(self) -> tuple[str | int, ...]:
        """What ends it."""
        return self._sequence.request.params.stop

    def __repr__(self) -> str:
        return f"SampleOutput(token_ids={self.token_ids}, finish_reason={self.finish_reason!r})"


@dataclass(slots=True, eq=False)
class RequestOutput:
    """A request as it stood after some step; later steps do not change it."""

    request: Request
    samples: list[SampleOutput]  # one for each of `n`

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

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

    def __init__(self, requests: Iterable[Request], decode: Callable[[list[int]], str]):
        self.requests, self._decode = list(requests), decode
        # A sequence never loses a token, so its length now is enough to find them later.
        self._lengths = [len(one.token_ids) for each in self.requests for one in each.sequences]

    @cached_property
    def data(self) -> list[RequestOutput]:  # type: ignore[override]
        lengths, outputs = iter(self._lengths), []
        for request in self.requests:
            samples = [SampleOutput(one, next(lengths), self._decode) for one in request.sequences]
            outputs.append(RequestOutput(request, samples))
        return outputs


@dataclass(frozen=True)
class BeamOutput:
    """One hypothesis; `score` is its log probability / length ** length_penalty."""

    token_ids: list[int]
    text: str
    score: float


@dataclass(frozen=True)
class Delta:
    """What a step added to a streamed request."""

    token_ids: list[int]
    text: str
    finish_reason: str | None


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

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0
