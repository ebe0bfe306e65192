"""The kernels of chapter 09 in the engine, and how fast it is with them.

speed(lm, KernelAttention.of(decode))       # tokens per second of the real engine
speed(lm, step=decode_step)                 # the same with decode steps as one program
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

import minikv
from minikv.backend import MakeBackend, TorchAttention
from minikv.batch import Batch
from minikv.course.chapters.ch09_cpu_kernels.given import weights_of
from minikv.course.workloads.timing import full_size, no_gc
from minikv.model import Attend

PROMPT_TOKENS, NEW_TOKENS, BLOCK_SIZE = 64, full_size(24, trial=4), 16


class KernelAttention(TorchAttention):
    """PyTorch's attention, but the decodes of a batch by a function of this chapter.

    `decode(q, kv, block_tables, context_lens)` takes and returns tensors, as `decode_by_group`.
    """

    def __init__(self, config, store, decode: Callable):
        super().__init__(config, store)
        self.decode = decode

    @classmethod
    def of(cls, decode: Callable) -> MakeBackend:
        return partial(cls, decode=decode)

    def bind(self, batch: Batch) -> Attend:
        if batch.num_decodes < len(batch.context_lens):
            return super().bind(batch)  # a prefill
        slots, tables, lens = batch.slot_mapping, batch.block_tables, batch.context_lens

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            k_slots, v_slots, blocks = self.layers[layer]
            k_slots.index_copy_(0, slots, k)
            v_slots.index_copy_(0, slots, v)
            return self.decode(q, blocks, tables, lens)

        return attend


def step_by(engine: minikv.Engine, lm: minikv.LanguageModel, step: Callable) -> minikv.Engine:
    """The same engine, its decode steps computed by `step`, as `decode_step`."""
    runner = engine.runner
    weights = weights_of(lm.transformer, engine.config.block_size)
    slots, compute = runner.store.slots.numpy(), runner.compute

    def compute_by_step(batch: Batch) -> torch.Tensor:
        if batch.num_decodes < len(batch.context_lens):
            return compute(batch)
        logits = torch.empty(len(batch.context_lens), lm.config.vocab_size)
        values = (
            batch.token_ids, batch.positions, batch.block_tables, batch.context_lens,
            batch.slot_mapping,
        )  # fmt: skip
        step(*(value.numpy() for value in values), weights, slots, logits.numpy())
        return logits

    vars(runner)["compute"] = compute_by_step  # in the place of the method
    return engine


def with_products(lm: minikv.LanguageModel, matmul: Callable) -> minikv.LanguageModel:
    """The same model, its matrix products computed by `matmul`."""

    def product(weight: np.ndarray) -> Callable[[torch.Tensor], torch.Tensor]:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(len(x), len(weight))
            matmul(x.contiguous().numpy(), weight, out.numpy(), False, 0, len(weight))
            return out

        return multiply

    weights, transformer = weights_of(lm.transformer, BLOCK_SIZE), copy(lm.transformer)
    names = ("qkv", "out", "gate_up", "down")
    transformer.layers = [
        replace(layer, **{name: product(getattr(weights, name)[i]) for name in names})
        for i, layer in enumerate(transformer.layers)
    ]
    vars(transformer)["head"] = product(weights.head)
    return minikv.LanguageModel(lm.name, transformer, lm.tokenizer)


def engine_by(
    lm: minikv.LanguageModel,
    backend: MakeBackend | None = None,
    step: Callable | None = None,
    **config: Any,
) -> minikv.Engine:
    """An engine whose decodes are computed by a backend, or by a whole step; else by PyTorch's
    attention, or what `config` says."""
    usual: dict[str, Any] = {"block_size": BLOCK_SIZE, "prefix_cache": False, "attention": "torch"}
    engine = minikv.Engine(lm, minikv.EngineConfig(**usual | config), attention=backend)
    return engine if step is None else step_by(engine, lm, step)


def run(engine: minikv.Engine, prompts: list[list[int]], new: int) -> tuple[list[float], list]:
    """(seconds of each decode step, the tokens of each prompt)."""
    params = minikv.SamplingParams(max_tokens=new, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    seconds: list[float] = []
    outputs: dict[int, list[int]] = {}
    with no_gc():
        while engine.has_unfinished:
            is_decode = all(sequence.num_computed for sequence in engine.scheduler.running)
            is_decode &= len(engine.scheduler.running) == len(prompts)
            started = perf_counter()
            done = engine.step()
            if is_decode:
                seconds.append(perf_counter() - started)
            outputs |= {one.request_id: list(one.token_ids) for one in done}
    return seconds, [outputs[one] for one in ids]


def speeds(
    lm: minikv.LanguageModel, contenders: dict[str, minikv.Engine], batch: int, repeats: int = 3,
) -> dict[str, float]:  # fmt: skip
    """Tokens per second while decoding, by the median step of each contender; in turns.

    Raises AssertionError if two contenders write different tokens.
    """
    text = lm.encode(WORKLOAD * 4)
    prompts = [text[i : i + PROMPT_TOKENS] for i in range(batch)]
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    first = None
    for engine in contenders.values():
        run(engine, prompts[:1], 2)  # the first run compiles
    for _ in range(repeats):
        for name, engine in contenders.items():
            seconds, tokens = run(engine, prompts, NEW_TOKENS)
            first = first or tokens
            if tokens != first:
                raise AssertionError(f"{name} writes other tokens than {next(iter(contenders))}")
            steps[name] += seconds
    return {name: batch / float(np.median(times)) for name, times in steps.items()}


WORKLOAD = "def merge(left, right):\n    result = []\n    while left and right:\n        "
