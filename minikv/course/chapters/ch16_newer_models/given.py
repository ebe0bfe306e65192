"""Chapter 16: what the notebook runs."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from minikv.engine import Engine, EngineConfig
from minikv.groups import GroupPool
from minikv.language_model import LanguageModel
from minikv.radix import RadixCache
from minikv.sampling import SamplingParams


def with_windows(lm: LanguageModel, *windows: int | None) -> LanguageModel:
    """The same weights with these windows, layer by layer. They were not trained with them."""
    transformer = copy(lm.transformer)
    transformer.config = replace(lm.config, windows=windows)
    return LanguageModel(lm.name, transformer, lm.tokenizer)


def without_model(lm: LanguageModel, **config: Any) -> Engine:
    """An engine that counts its blocks as always and computes nothing: every token is 0."""
    engine = Engine(lm, EngineConfig(prefix_cache=False, **config))
    vars(engine.runner)["compute"] = lambda batch: torch.zeros(len(batch.context_lens), 1)
    return engine


def held_by_step(
    lm: LanguageModel, prompt_ids: Sequence[int], max_tokens: int, **config: Any
) -> tuple[list[int], list[int]]:
    """One request: after each step the tokens whose K and V would be computed, and the bytes of
    memory that no other sequence can have."""
    engine = without_model(lm, **config)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(list(prompt_ids), params)
    computed: list[int] = []
    held: list[int] = []
    while engine.has_unfinished:
        engine.step()
        if engine.has_unfinished:
            stats = engine.stats()
            computed.append(stats.computed_tokens)
            tokens = stats.blocks_used * engine.config.block_size
            held.append(round(tokens * engine.store.bytes_per_token))
    return computed, held


def most_at_once(lm: LanguageModel, prompts: Sequence[list[int]], **config: Any) -> int:
    """How many sequences decode in one step, at most."""
    engine = without_model(lm, **config)
    for prompt_ids in prompts:
        engine.add_request(prompt_ids, SamplingParams(max_tokens=64, ignore_eos=True))
    most = 0
    while engine.stats().waiting:  # later on there are only fewer
        engine.step()
        most = max(most, engine.stats().running)
    return most


def windows_of(engine: Engine, token_ids: Sequence[int]) -> str:
    """Of the blocks of a text that the prefix cache holds: + has K and V in layers with a window,
    - only in those that see everything."""
    assert isinstance(engine.pool, GroupPool) and engine.cache is not None
    block_ids = RadixCache.match(engine.cache, token_ids).block_ids
    return "".join("+" if engine.pool.has_windows(block_id) else "-" for block_id in block_ids)
