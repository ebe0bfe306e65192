"""Rung 09 of the ladder and of the running table."""

import importlib.util

import torch

from minikv.course.measure.running_table import TOGETHER, Run, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "the same walk, compiled for the machine you have"


def run_compiled(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The same requests on the engine's compiled kernels, where this machine has them."""
    return run_in_engine(
        lm, prompt_ids, max_tokens, requests=TOGETHER, asked_before=True, attention="cpu"
    )


def why_not(lm: LanguageModel) -> str:
    """They are for float32 on a CPU, and need Numba."""
    if importlib.util.find_spec("numba") is None:
        return "there is no Numba"
    return (
        "" if lm.device.type == "cpu" and lm.dtype == torch.float32 else "it needs float32 on a CPU"
    )


RUNS = {f"{TOGETHER} requests, compiled for the CPU": run_compiled}
