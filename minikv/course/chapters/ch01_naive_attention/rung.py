"""Rung 01 of the ladder and of the running table."""

from time import perf_counter

from minikv.course.workloads.running_table import Run
from minikv.language_model import LanguageModel

IDEA = "compute everything again, at every step"


def run_naive(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Nothing is kept, everything is computed at every step."""
    started = perf_counter()
    token_ids = lm.generate_naively(prompt_ids, max_tokens)
    return Run(token_ids, perf_counter() - started, 0, None)


RUNS = {"naive attention": run_naive}
