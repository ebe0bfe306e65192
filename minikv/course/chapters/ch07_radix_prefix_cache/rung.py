"""Rung 07 of the ladder and of the running table."""

from minikv.course.measure.running_table import TOGETHER, Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "find what an earlier request has computed"


def run_again(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The same, sent before: the prompt is in the prefix cache. Attention is PyTorch's,
    as on rung 06, so that only the cache differs."""
    return run_in_engine(
        lm, prompt_ids, max_tokens, requests=TOGETHER, asked_before=True, attention="torch"
    )


RUNS = {f"{TOGETHER} requests, prompt cached": run_again}
