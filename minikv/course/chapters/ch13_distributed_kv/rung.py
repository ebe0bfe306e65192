"""Rung 13 of the ladder and of the running table."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minikv.config import EngineConfig
from minikv.course.chapters.ch12_tiers_and_sessions.given import evict_all
from minikv.course.workloads.running_table import Run, run_on
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
        evict_all(first)
        tiers_of(first).flush()
        engine = Engine(lm, EngineConfig(disk_path=path, **SETTINGS))
        return run_on(engine, prompt_ids, max_tokens)


RUNS = {"computed by another engine": run_from_another}
