"""Rung 14 of the ladder and of the running table."""

from minikv.course.workloads.running_table import Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "guess many tokens, check them in one step, throw away what was wrong"


def run_ngram(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """One request, as on rung 04, with drafts from its own text."""
    return run_in_engine(lm, prompt_ids, max_tokens, speculative="ngram")


RUNS = {"one request, n-gram drafts": run_ngram}
