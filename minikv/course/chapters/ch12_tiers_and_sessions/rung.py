"""Rung 12 of the ladder and of the running table."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from minikv.config import EngineConfig
from minikv.course.chapters.ch12_tiers_and_sessions.given import evict_all
from minikv.course.workloads.running_table import Run, run_on
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams
from minikv.tiers import load_session, save_session

IDEA = "what is evicted goes one tier down, and a conversation outlives its process"
SETTINGS: dict[str, Any] = dict(num_blocks=64, attention="torch", kv_groups="one")  # as other rungs


def run_from_host(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The prompt was asked for before, and has been evicted to the host."""
    engine = Engine(lm, EngineConfig(host_blocks=64, **SETTINGS))
    engine.generate(prompt_ids, SamplingParams(max_tokens=1))
    evict_all(engine)
    return run_on(engine, prompt_ids, max_tokens)


def run_from_session(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The prompt comes from a session file that another engine has saved."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "session"
        save_session(Engine(lm, EngineConfig(**SETTINGS)), prompt_ids, path)
        engine = Engine(lm, EngineConfig(**SETTINGS))
        started = perf_counter()
        load_session(engine, path)
        loaded = perf_counter() - started
    run = run_on(engine, prompt_ids, max_tokens)
    return replace(run, seconds=loaded + run.seconds)


RUNS = {"back from the host": run_from_host, "from a session file": run_from_session}
