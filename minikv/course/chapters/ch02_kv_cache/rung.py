"""Rung 02 of the ladder and of the running table."""

from minikv.course.workloads.running_table import Run, run_cache, run_reserved
from minikv.kv_cache import ConcatCache
from minikv.language_model import LanguageModel

IDEA = "keep the keys and values"


def run_concat(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Every step copies all that is kept."""
    return run_cache(lm, prompt_ids, max_tokens, ConcatCache(lm.config), None)


def run_preallocated(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Written in place, into room for the model's whole context."""
    return run_reserved(lm, prompt_ids, max_tokens, lm.config.max_context)


RUNS = {"cache that grows by copying": run_concat, "cache for the whole context": run_preallocated}
