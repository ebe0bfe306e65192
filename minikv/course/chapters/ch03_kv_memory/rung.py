"""Rung 03 of the ladder and of the running table."""

from minikv.course.workloads.running_table import Run, run_reserved
from minikv.language_model import LanguageModel

IDEA = "what a token costs, and what reservation wastes"


def run_limited(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """A cache with room for the longest answer that was asked for. Its last token
    is never stored."""
    return run_reserved(lm, prompt_ids, max_tokens, len(prompt_ids) + max_tokens - 1)


RUNS = {"cache for the longest answer": run_limited}
