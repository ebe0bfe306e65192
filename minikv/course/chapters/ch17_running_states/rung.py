"""Rung 17 of the ladder and of the running table."""

from dataclasses import replace

from minikv.course.workloads.running_table import Run, run_in_engine
from minikv.language_model import LanguageModel
from minikv.states import HybridConfig

IDEA = "a state of fixed size in place of K and V, and which copies of it to keep"


def why_not(lm: LanguageModel) -> str:
    return "" if lm.config.keeps_states else "all layers of this model keep K and V"


def run_states(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """One request, as on rung 04. To K and V of the layers that attend comes each token's share of
    the state, at the end of the text."""
    assert isinstance(lm.config, HybridConfig)
    run = run_in_engine(lm, prompt_ids, max_tokens)
    share = lm.config.state_bytes(lm.dtype) / (len(prompt_ids) + max_tokens)
    return replace(run, kv_bytes_per_token=round(run.kv_bytes_per_token + share))


RUNS = {"one request, states": run_states}
