"""Rung 05 of the ladder and of the running table."""

from minikv.course.measure.running_table import TOGETHER, Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "share a block until it is written to"


def run_samples(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Several samples of one request share its prompt's blocks. Attention in PyTorch."""
    return run_in_engine(lm, prompt_ids, max_tokens, samples=TOGETHER)


RUNS = {f"{TOGETHER} samples, shared blocks": run_samples}
