"""What quantised K and V cost in quality, measured on a model and its text.

Three metrics, because one alone misleads. *Bits per byte* measure what the model was trained for,
but may change by luck: an error makes some tokens likelier. *KL per token* cannot improve by luck:
it is 0 for equal distributions and above 0 otherwise. *Same arg max* is the share of tokens after
which greedy decoding chooses the same token.

A window is a whole sequence. Its K and V are encoded and decoded as an engine would store them, and
the plain formula (`minikv.quant.oracle`) reads them. All schemes see the same windows, so
differences are paired. Confidence intervals come from drawing windows again (bootstrap), because
tokens of one text are not independent.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from minikv.config import ModelConfig
from minikv.language_model import LanguageModel
from minikv.quant.formats import Int4, dequantise_int4, format_of, quantise_int4
from minikv.quant.oracle import attend_mixed, read_back
from minikv.quant.store import block_bytes

KV = tuple[torch.Tensor, torch.Tensor]


class Way(Protocol):
    """A way to store K and V, ours or another engine's."""

    @property
    def name(self) -> str: ...

    def bytes_per_token(self, config: ModelConfig, block_size: int, /) -> float: ...

    def logits(self, lm: LanguageModel, ids: Seq[int], block_size: int) -> torch.Tensor:
        """The logits (T, V) of a whole sequence."""
        ...


@dataclass(frozen=True)
class Scheme:
    """A way to store K and V: what comes back of them, (T, K, D) each, and its bytes."""

    name: str
    read: Callable[[torch.Tensor, torch.Tensor, int], KV]  # k, v, block size
    bytes_per_token: Callable[[ModelConfig, int], float]
    exact_own_block: bool = False  # a query reads the keys of its own block in full precision
    rotated: bool = False  # Q, K and V are turned by a Hadamard matrix, and the output back

    def logits(self, lm: LanguageModel, ids: Seq[int], block_size: int) -> torch.Tensor:
        return lm.logits(ids, SchemeOracle(lm.config, self, block_size))


def engine_scheme(kv_dtype: str, name: str = "") -> Scheme:
    """What `EngineConfig(kv_dtype=…)` does."""

    def read(k: torch.Tensor, v: torch.Tensor, block_size: int) -> KV:
        return read_back(format_of(kv_dtype, block_size), k, v, block_size)

    def size(config: ModelConfig, block_size: int) -> float:
        return block_bytes(format_of(kv_dtype, block_size), config, block_size) / block_size

    return Scheme(name or kv_dtype, read, size, exact_own_block=kv_dtype == "int4")


def _float32(k: torch.Tensor, v: torch.Tensor, block_size: int) -> KV:
    return k, v


def _int4_by_token(k: torch.Tensor, v: torch.Tensor, block_size: int) -> KV:
    return Int4().decode(Int4().encode(k)), Int4().decode(Int4().encode(v))


def _int4_one_scale(k: torch.Tensor, v: torch.Tensor, block_size: int) -> KV:
    pair = [dequantise_int4(*quantise_int4(x.flatten())).view_as(x) for x in (k, v)]
    return pair[0], pair[1]


def _int4_by_token_bytes(config: ModelConfig, block_size: int) -> float:
    vectors = 2 * config.num_layers * config.num_kv_heads
    return vectors * (config.head_dim / 2 + 4 * Int4().groups(config.head_dim))


def _halves(config: ModelConfig, block_size: int) -> float:
    return config.num_layers * config.num_kv_heads * config.head_dim


SCHEMES = (
    Scheme("float32", _float32, lambda config, _: config.kv_bytes_per_token(torch.float32)),
    engine_scheme("float16"),
    engine_scheme("bfloat16"),
    engine_scheme("fp8"),
    engine_scheme("int8"),
    engine_scheme("int4", "int4, K by channel"),
    Scheme(
        "int4, by token, own block exact",
        _int4_by_token,
        _int4_by_token_bytes,
        exact_own_block=True,
    ),
    Scheme("int4, by token", _int4_by_token, _int4_by_token_bytes),
    Scheme("int4, by token, rotated", _int4_by_token, _int4_by_token_bytes, rotated=True),
    Scheme("int4, one scale", _int4_one_scale, _halves),
)


def hadamard(size: int) -> torch.Tensor:
    """An orthogonal matrix (size, size) of entries +-1 / sqrt(size): each channel of x H is made
    of all channels of x, so one large channel is spread over all of them.

    (q H) . (k H) = q . k, for H H^T = 1. Sylvester's construction; `size` is a power of 2.
    """
    if size & (size - 1):
        raise ValueError(f"size: must be a power of 2, was {size}")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


class SchemeOracle:
    """A "cache" for `LanguageModel.logits` that keeps nothing: each call is a whole sequence."""

    num_tokens = 0

    def __init__(self, config: ModelConfig, scheme: Scheme, block_size: int):
        self.windows, self.scheme, self.block_size = config.windows, scheme, block_size
        self.turn = hadamard(config.head_dim) if scheme.rotated else None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (T, H, D), k and v (T, K, D) of the whole sequence -> (T, H, D)."""
        if self.turn is not None:
            q, k, v = q @ self.turn, k @ self.turn, v @ self.turn
        k_hat, v_hat = self.scheme.read(k, v, self.block_size)
        own_block = self.block_size if self.scheme.exact_own_block else None
        out = attend_mixed(q, k, k_hat, v_hat, own_block, self.windows[layer])
        return out if self.turn is None else out @ self.turn.T


@dataclass
class Window:
    """One text, stored in one way. Tensors have an entry per token, from the second one on: (T -
    1,)."""

    num_bytes: int
    nats: torch.Tensor  # -log p of the token that came
    kl: torch.Tensor  # of this way's distribution from float32's
    same: torch.Tensor  # whether the likeliest token is float32's


class Estimate(NamedTuple):
    """A figure and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g}..{self.high:.4g})"


def cut(
    lm: LanguageModel, texts: Iterable[str], length: int, shortest: int = 64
) -> list[list[int]]:
    """The first `length` tokens of each text, after an end-of-text token; texts of fewer than
    `shortest` tokens are left out."""
    ids = [[0, *lm.encode(text)][:length] for text in texts]
    return [one for one in ids if len(one) >= shortest]


def measure(
    lm: LanguageModel,
    windows: Seq[Seq[int]],
    ways: Seq[Way] = SCHEMES,
    block_size: int = 16,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, list[Window]]:
    """Every way on every window, by the way's name. `progress` is called after each pair."""
    found: dict[str, list[Window]] = {way.name: [] for way in ways}
    for ids in windows:
        target = torch.tensor(ids[1:])
        num_bytes = len(lm.decode(ids[1:]).encode())
        exact = lm.logits(ids)[:-1].log_softmax(-1)
        for way in ways:
            log_p = way.logits(lm, ids, block_size)[:-1].log_softmax(-1)
            found[way.name].append(
                Window(
                    num_bytes,
                    -log_p.gather(1, target[:, None])[:, 0].double(),
                    (exact.exp() * (exact - log_p)).sum(-1).double(),
                    log_p.argmax(-1) == exact.argmax(-1),
                )
            )
            progress()
    return found


def bits_per_byte(windows: Seq[Window]) -> Estimate:
    return _bootstrap([(w.nats.sum().item() / math.log(2), w.num_bytes) for w in windows])


def change_of_bits(windows: Seq[Window], exact: Seq[Window]) -> Estimate:
    """By how many percent bits per byte change against `exact`: the same windows, paired."""
    pairs = zip(windows, exact, strict=True)
    sums = [(100 * (w.nats.sum() - e.nats.sum()).item(), e.nats.sum().item()) for w, e in pairs]
    return _bootstrap(sums)


def kl_per_token(windows: Seq[Window]) -> Estimate:
    return _bootstrap([(w.kl.sum().item(), len(w.kl)) for w in windows])


def times_kl(windows: Seq[Window], others: Seq[Window]) -> Estimate:
    """How many times the KL of `others`: the same windows, paired."""
    pairs = zip(windows, others, strict=True)
    return _bootstrap([(one.kl.sum().item(), other.kl.sum().item()) for one, other in pairs])


def same_arg_max(windows: Seq[Window]) -> Estimate:
    """In percent of the tokens."""
    return _bootstrap([(100 * w.same.sum().item(), len(w.same)) for w in windows])


def _bootstrap(sums: Seq[tuple[float, float]], draws: int = 1000) -> Estimate:
    """A ratio of sums over windows, and the range of 95 % of its values if windows are drawn
    again."""

    def ratio(chosen: Iterable[tuple[float, float]]) -> float:
        above, below = map(sum, zip(*chosen, strict=True))
        return above / below

    rng = random.Random(0)
    drawn = sorted(ratio(rng.choices(sums, k=len(sums))) for _ in range(draws))
    return Estimate(ratio(sums), drawn[draws // 40], drawn[-draws // 40 - 1])
