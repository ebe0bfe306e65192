"""Other engines' quantised K and V, as rows of `bench kv-quality`, where they are installed.

`transformers` brings a cache in fp8 and takes its int4 from other packages; llama.cpp reads its own
formats q8_0 and q4_0. Both get the same weights in float32, and the same tokens.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import minikv
from minikv.checkpoint import read_weights
from minikv.course.bench import llama_cpp, peers
from minikv.quant.quality import Way

CHUNK = 16  # tokens that `transformers` gets at a time: they read each other's K and V exactly


@dataclass(frozen=True)
class TransformersCache:
    """`QuantizedCache`: groups of `group` channels of a token and head, with a scale and a zero
    point in float32. The newest `newest` tokens stay in float32, and when there are so many, all of
    the cache is quantised again."""

    name: str
    model: Any
    backend: str
    group: int = 0  # 0 for fp8, which has one scale for all
    newest: int = 0

    def bytes_per_token(self, config: minikv.ModelConfig, block_size: int) -> float:
        """Of those that are quantised."""
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return numbers * (1 / 2 + 8 / self.group) if self.group else numbers

    def options(self) -> dict[str, int]:
        if not self.group:
            return {}
        return {"nbits": 4, "q_group_size": self.group, "residual_length": self.newest}

    @torch.inference_mode()
    def logits(self, lm: minikv.LanguageModel, ids: Sequence[int], block_size: int) -> torch.Tensor:
        from transformers import QuantizedCache

        cache = QuantizedCache(self.backend, self.model.config, **self.options())
        rows = [
            self.model(torch.tensor([ids[start : start + CHUNK]]), past_key_values=cache).logits[0]
            for start in range(0, len(ids), CHUNK)
        ]
        return torch.cat(rows)


@dataclass(frozen=True)
class LlamaCppCache:
    """K and V in llama.cpp's blocks of 32 numbers with a scale in float16."""

    kv_type: str
    bits: int
    context: llama_cpp.Context

    @property
    def name(self) -> str:
        return f"llama.cpp, {self.kv_type}"

    def bytes_per_token(self, config: minikv.ModelConfig, block_size: int) -> float:
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return numbers * (self.bits / 8 + 2 / 32)

    def logits(self, lm: minikv.LanguageModel, ids: Sequence[int], block_size: int) -> torch.Tensor:
        self.context.seq_rm(0, 0, None)
        return self.context.append(ids)


def transformers_ways() -> tuple[list[Way], list[str]]:
    """Its caches, with a note for each that cannot run here."""
    _, model = peers.load_pair("tinypy")
    ways: list[Way] = [TransformersCache("transformers, fp8", model, "fp8")]
    notes = []
    for backend, module, package in (
        ("quanto", "optimum.quanto", "optimum-quanto"), ("hqq", "hqq", "hqq"),
    ):  # fmt: skip
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            notes.append(f"not measured: transformers, {backend} needs pip install {package}")
            continue
        for group, newest in ((64, 128), (32, 16)):  # its defaults, and as ours
            name = f"transformers, {backend}, groups of {group}, newest {newest} exact"
            ways.append(TransformersCache(name, model, backend, group, newest))
    return ways, notes


@contextmanager
def others() -> Iterator[tuple[list[Way], list[str]]]:
    """The ways of other engines that are installed, and notes about those that are not."""
    ways, notes = transformers_ways()
    config, weights = minikv.load("tinypy").config, read_weights(minikv.BUNDLED["tinypy"])
    with ExitStack() as stack:
        try:
            make = stack.enter_context(llama_cpp.contexts(config, weights))
            for kv_type, bits in (("q8_0", 8), ("q4_0", 4)):
                ways.append(LlamaCppCache(kv_type, bits, make(kv_type, config.max_context)))
        except ValueError as error:
            notes.append(f"not measured: {error}")
        yield ways, notes
