"""Rung 08 of the ladder and of the running table."""

from minikv.course.workloads.running_table import TOGETHER, Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "a kernel that walks the block table"


def run_kernels(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The same with Triton's kernels instead of PyTorch's attention, on a GPU: see `why_not`."""
    return run_in_engine(
        lm, prompt_ids, max_tokens, requests=TOGETHER, asked_before=True, attention="triton"
    )


def why_not(lm: LanguageModel) -> str:
    """Without a GPU kernels are interpreted, and how long that takes says nothing about them."""
    return "" if lm.device.type == "cuda" else "there is no GPU"


RUNS = {f"{TOGETHER} requests, Triton kernels": run_kernels}
