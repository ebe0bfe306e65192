"""What a number format costs in quality: bits per byte, KL and changed tokens, on given text.

    windows = held_out_windows(lm, count=12, length=384)
    exact = [lm.logits(ids) for ids in windows]
    cost = cost_of(lm, windows, exact, format_of("int4", 32), block_size=32)

K and V are stored and read back in the forward pass of a whole window, which gives the numbers
that the engine computes token by token, and takes far less time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minikv.config import ModelConfig
from minikv.language_model import LanguageModel
from minikv.quant.formats import (
    Int4,
    Int4ByChannel,
    KVFormat,
    Pieces,
    Shapes,
    VectorFormat,
    dequantise_int4,
    format_of,
    quantise_int4,
)
from minikv.quant.oracle import QuantisedOracle
from minikv.quant.store import block_bytes

GROUP = 32  # numbers that share a scale, by token or by channel: so all int4 take the same bytes


class OneRuler:
    """int4 the naive way: all numbers of a layer's K, or V, share a scale and a zero point."""

    def shapes(self, dim: int) -> Shapes:
        return {"codes": ((dim // 2,), torch.uint8)}

    def encode(self, x: torch.Tensor) -> Pieces:
        codes, scale, low = quantise_int4(x.flatten())
        return {"codes": codes.view(x.shape), "scale": scale, "low": low}

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = pieces["codes"]
        return dequantise_int4(codes.flatten(), pieces["scale"], pieces["low"]).view(codes.shape)


def hadamard(dim: int) -> torch.Tensor:
    """(dim, dim) of +-1 / sqrt(dim), orthogonal; `dim` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * dim**-0.5


@dataclass(frozen=True)
class Rotated:
    """Another format, of vectors that are rotated first, and rotated back when they are read."""

    inner: VectorFormat

    def shapes(self, dim: int) -> Shapes:
        return self.inner.shapes(dim)

    def encode(self, x: torch.Tensor) -> Pieces:
        return dict(self.inner.encode(x.float() @ hadamard(x.shape[-1])))

    def decode(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = self.inner.decode(pieces)
        return x @ hadamard(x.shape[-1])  # its own inverse


FORMATS: dict[str, KVFormat] = {
    **{name: format_of(name, GROUP) for name in ("float16", "bfloat16", "fp8", "int8")},
    "int4, K by channel": KVFormat("int4", Int4ByChannel(GROUP), Int4(GROUP), k_by_block=True),
    "int4 by token": KVFormat("int4 by token", Int4(GROUP), Int4(GROUP)),
    "int4 by token, rotated": KVFormat("rotated", Rotated(Int4(GROUP)), Rotated(Int4(GROUP))),
    "int4, one ruler for all": KVFormat("one ruler", OneRuler(), OneRuler()),
}


def bytes_per_token(kv_format: KVFormat, config: ModelConfig) -> float:
    """With all scales and zero points, in blocks of GROUP tokens."""
    return block_bytes(kv_format, config, GROUP) / GROUP


def held_out_windows(lm: LanguageModel, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of the first `count` modules that are long enough, of those that
    tinypy was not trained on."""
    from minikv.course.train import read_corpus  # here, because it reads the standard library

    windows = []
    for text in read_corpus().held_out:
        ids = lm.encode(text[: 20 * length])  # a token is a few characters
        if len(ids) >= length and len(windows) < count:
            windows.append(ids[:length])
    return windows


@dataclass(frozen=True)
class Cost:
    """What one format costs on each window: a row per window, a column per predicted token."""

    more_nats: torch.Tensor  # by which the true next token became less likely
    nats: torch.Tensor  # of the true next token, unquantised
    kl: torch.Tensor  # of the unquantised distribution from the quantised one, in nats
    same: torch.Tensor  # 1 where the likeliest token stayed the same

    def with_interval(self, name: str) -> tuple[float, float, float]:
        """(value, low, high) over all tokens, with the 95 % interval of a bootstrap of windows.

        "bits"   more bits per byte, in per cent (nats and bits, tokens and bytes cancel)
        "kl"     nats per token
        "same"   likeliest tokens that stayed the same, in per cent
        """
        top, below, times = {
            "bits": (self.more_nats.sum(1), self.nats.sum(1), 100.0),
            "kl": (self.kl.sum(1), torch.full((len(self.kl),), float(self.kl.shape[1])), 1.0),
            "same": (self.same.sum(1), torch.full((len(self.kl),), float(self.kl.shape[1])), 100.0),
        }[name]
        draw = torch.randint(len(top), (2000, len(top)), generator=torch.Generator().manual_seed(0))
        again = (times * top[draw].sum(1) / below[draw].sum(1)).sort().values
        return float(times * top.sum() / below.sum()), float(again[49]), float(again[1949])


def cost_of(
    lm: LanguageModel,
    windows: Sequence[Sequence[int]],
    exact: Sequence[torch.Tensor],
    kv_format: KVFormat,
    block_size: int,
) -> Cost:
    """exact: the logits of each window without quantising, (T, vocab_size)."""
    oracle = QuantisedOracle(lm.config, kv_format, block_size)
    rows = []
    for ids, logits in zip(windows, exact, strict=True):
        expected = logits[:-1].log_softmax(-1)
        found = lm.logits(ids, oracle)[:-1].log_softmax(-1)
        true = torch.tensor(ids[1:])[:, None]
        nats = -expected.gather(1, true)[:, 0]
        kl = F.kl_div(found, expected, log_target=True, reduction="none").sum(-1)
        same = (found.argmax(-1) == expected.argmax(-1)).float()
        rows.append((-found.gather(1, true)[:, 0] - nats, nats, kl, same))
    return Cost(*(torch.stack(column) for column in zip(*rows, strict=True)))
