"""Rung 13 of the ladder and of the running table."""

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from minikv.config import EngineConfig
from minikv.course.measure.running_table import Run
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams
from minikv.tiers import tiers_of

IDEA = "many engines: a prefix is computed once, and found by all of them"
SETTINGS: dict[str, Any] = dict(num_blocks=64, host_blocks=64, attention="torch", kv_groups="one")


def run_from_another(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Another engine has computed the prompt, and left its blocks where this one finds them."""
    with TemporaryDirectory() as folder:
        path = Path(folder)
        first = Engine(lm, EngineConfig(disk_path=path, **SETTINGS))
        first.generate(prompt_ids, SamplingParams(max_tokens=1))
        assert first.cache is not None
        first.cache.evict(first.config.num_blocks)
        tiers_of(first).flush()
        engine = Engine(lm, EngineConfig(disk_path=path, **SETTINGS))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        started = perf_counter()
        [output] = engine.generate([prompt_ids], params)
        seconds = perf_counter() - started
    size = engine.config.block_size
    stored = range(len(prompt_ids), len(prompt_ids) + max_tokens - 1)  # tokens, step by step
    reserved = sum(-(-tokens // size) * size for tokens in stored)
    wasted = 1 - sum(stored) / reserved if reserved else None
    return Run(output.token_ids, seconds, round(engine.store.bytes_per_token), wasted)


RUNS = {"computed by another engine": run_from_another}
