"""What clients send, as OpenAI's clients spell it.

A field that is null is taken as left out. Beside OpenAI's fields there are `top_k`, `ignore_eos`,
`repetition_penalty`, `cache_salt` (only requests of the same salt share a prefix) and `retain_s`:
for so many seconds, 600 at most, the prefix cache should keep this text for whoever goes on from
it, if the engine has `EngineConfig(retention=…)`, as that of `minikv serve` has. Agents send it
with a request that may end in a tool call. A field that is not here is refused, unless its value
asks for what is done anyway (`NEUTRAL`), or it changes nothing about the text (`HINTS`): routers
and clients send such fields with every request.

The temperature is 0, greedy, if none is given. OpenAI's is 1.

What a request can cost is bounded by its length: a whole number has 64 bits, `stop` has MAX_STOPS
entries of LONGEST characters at most, and a token id has one spelling. What is refused is refused
at the first thing that is wrong.
"""

from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from minikv.sampling import SamplingParams
from minikv.serving.scores import Asked, Token

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"), "min_p": (0,),
    "min_tokens": (0,), "modalities": (["text"],), "no_stop_trim": (False,),
    "reasoning_effort": ("none",), "response_format": ({"type": "text"},),
    "return_hidden_states": (False,), "skip_special_tokens": (True,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,),
    "verbosity": ("medium",),
}  # fmt: skip
HINTS = {
    "metadata", "parallel_tool_calls", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store",
}  # fmt: skip


MAX_STOPS = 16  # OpenAI's take 4
LONGEST = 1000  # characters of a string that is looked for, or names something

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(max_length=LONGEST)]


class Lenient(BaseModel):
    """Types are as in JSON: "1" is no number, and true is none."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every chunk, as vLLM has it


class Options(Lenient):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: Int | None = None
    n: Annotated[Int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    stop: Any = None  # a string, or strings and token ids
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None  # the session, for sticky routing
    prompt_cache_key: Name | None = None  # likewise
    ignore_eos: bool | None = None
    cache_salt: Name | None = None
    retain_s: Int | None = None
    logit_bias: Any = None  # numbers, by token id
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # A logit that is divided or multiplied by it stays a number, in any format.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None

    @model_validator(mode="after")
    def _nothing_unknown(self) -> "Options":
        for name, value in (self.model_extra or {}).items():
            if not (value is None or name in HINTS or value in NEUTRAL.get(name, ())):
                raise ValueError(f"{name}: is not supported here")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only a stream has them; set stream")
        return self

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: Any) -> Any:
        stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list):
            raise ValueError(f"stop: must be a string or a list, was {ascii(stop)[:80]}")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop: at most {MAX_STOPS} are looked for, were {len(stops)}")
        longest = max((len(one) for one in stops if isinstance(one, str)), default=0)
        if longest > LONGEST:
            raise ValueError(f"stop: a string has at most {LONGEST} characters, had {longest}")
        return stops

    def params(self, max_tokens: int, cache_salt: str | None) -> SamplingParams:
        """The engine's form. `max_tokens` if the client gives none. Raises ValueError, naming the
        argument."""
        names = ("temperature", "top_p", "top_k", "seed", "ignore_eos", "retain_s")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        max_tokens = max_tokens if self.max_tokens is None else self.max_tokens
        max_tokens += self.only_echoes  # the engine's least
        given |= {"n": self.num_samples, "max_tokens": max_tokens, "stop": tuple(self.stop or ())}
        given["cache_salt"] = cache_salt
        penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
        more = {name: getattr(self, name) for name in penalties if getattr(self, name) is not None}
        bias = tuple(_bias(*one) for one in _items(self.logit_bias))
        more |= {"logprobs": self.num_logprobs, "scores_prompt": self.scores_prompt}
        asked = Asked(**given, **more, logit_bias=bias)
        return SamplingParams(**given) if asked == Asked(**given) else asked

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are asked for; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens have log-probabilities, too."""
        return False

    @property
    def only_echoes(self) -> bool:
        """Whether the prompt is all that is answered."""
        return False

    @property
    def num_samples(self) -> int:
        """Of each prompt, to compute."""
        return self.n or 1

    def answered(self, samples: Seq[list[int]]) -> list[int]:
        """Which of the samples of all prompts are answered, by their tokens."""
        return list(range(len(samples)))


def _items(logit_bias: Any) -> Any:
    if not isinstance(logit_bias, dict | None):
        raise ValueError(f"logit_bias: must be an object, was {ascii(logit_bias)[:80]}")
    return (logit_bias or {}).items()


def _bias(token_id: str, bias: Any) -> tuple[int, float]:
    """Of each id one spelling is taken, so that none is counted twice."""
    if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 9) or (
        token_id != str(int(token_id))
    ):
        raise ValueError(f"logit_bias: must have token ids, had {ascii(token_id)[:80]}")
    if type(bias) not in (int, float) or not -100 <= bias <= 100:
        raise ValueError(f"logit_bias: must be from -100 to 100, was {ascii(bias)[:80]}")
    return int(token_id), float(bias)


class CompletionRequest(Options):
    """`prompt`: text or token ids, or a list of several. `echo`: begin the text with it, and
    `logprobs` with its; then `max_tokens` may be 0.
    `best_of`: compute so many samples, and answer the `n` likeliest."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Int | None = None

    @model_validator(mode="after")
    def _best_of_enough(self) -> "CompletionRequest":
        number, least = self.best_of, self.n or 1
        if number is not None and number < least:
            raise ValueError(f"best_of: must be at least n, which is {least}, was {number}")
        if number is not None and number > least and self.stream:
            raise ValueError(
                f"best_of: a stream cannot wait for the best of {number} samples; let it be n, "
                f"which is {least}, or do not stream"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        is_ranked = self.num_samples > (self.n or 1)
        return 0 if is_ranked and self.logprobs is None else self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def only_echoes(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def num_samples(self) -> int:
        return self.best_of or self.n or 1

    def answered(self, samples: Seq[list[int]]) -> list[int]:
        """Of each prompt's samples the `n` whose tokens have the highest mean log-probability, the
        best first."""
        each, number = self.num_samples, self.n or 1
        if number == each:
            return super().answered(samples)

        def mean(index: int) -> float:
            tokens = samples[index]
            return sum(one.logprob for one in tokens if isinstance(one, Token)) / len(tokens)

        groups = [range(first, first + each) for first in range(0, len(samples), each)]
        return [one for group in groups for one in sorted(group, key=mean, reverse=True)[:number]]

    @property
    def prompts(self) -> list[Any]:
        """Each for the engine to check."""
        several = isinstance(self.prompt, list) and self.prompt
        if several and all(isinstance(one, str | list) for one in self.prompt):
            return self.prompt
        return [self.prompt]


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = Field(
        None, validate_default=True
    )

    @field_validator("content")
    @classmethod
    def _text(cls, content: str | list[Part] | None) -> str:
        """Parts are joined."""
        return (
            "".join(part.text for part in content) if isinstance(content, list) else content or ""
        )


class ChatRequest(Options):
    messages: Annotated[list[Message], Field(fail_fast=True)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if not self.messages:
            raise ValueError("messages: is empty")
        if self.max_completion_tokens is not None:  # the newer name
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: need logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Lenient):
    """Either of the two."""

    model: str | None = None
    prompt: Any = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None


def in_words(error: ValidationError) -> str:
    """The first thing that is wrong, with its name."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{name}: is missing"
    return f"{name or 'the body'}: {first['msg']}, was {ascii(first['input'])[:80]}"
