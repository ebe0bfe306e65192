"""Rung 06 of the ladder and of the running table."""

from minikv.course.measure.running_table import TOGETHER, Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "requests join and leave at every step"


def run_together(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Several requests in one batch, each with blocks of its own. Attention is PyTorch's, as on
    the rungs around it."""
    return run_in_engine(lm, prompt_ids, max_tokens, requests=TOGETHER, attention="torch")


RUNS = {f"{TOGETHER} requests, one batch": run_together}
