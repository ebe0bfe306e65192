"""Rung 09 of the ladder and of the running table: the engine's compiled kernels."""

import importlib.util
from functools import partial

import torch

from minikv.course.workloads.running_table import TOGETHER, run_in_engine
from minikv.language_model import LanguageModel

IDEA = "the same walk, compiled for the machine you have"
RUNS = {
    f"{TOGETHER} requests, compiled for the CPU": partial(
        run_in_engine, requests=TOGETHER, asked_before=True, attention="cpu"
    )
}


def why_not(lm: LanguageModel) -> str:
    """They are for float32 on a CPU, and need Numba."""
    if importlib.util.find_spec("numba") is None:
        return "there is no Numba"
    return (
        "" if lm.device.type == "cpu" and lm.dtype == torch.float32 else "it needs float32 on a CPU"
    )
