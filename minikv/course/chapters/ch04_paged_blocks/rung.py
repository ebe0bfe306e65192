"""Rung 04 of the ladder and of the running table."""

from minikv.course.measure.running_table import Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "blocks of a fixed size, and a table that finds them"


def run_engine(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The whole engine, on its attention in PyTorch. What is reserved are the blocks in use."""
    return run_in_engine(lm, prompt_ids, max_tokens)


RUNS = {"paged blocks, in the engine": run_engine}
