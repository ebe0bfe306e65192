"""Rung 07: the same, sent before, so the prefix cache has the prompt. Attention in PyTorch."""

from functools import partial

from minikv.course.workloads.running_table import TOGETHER, run_in_engine

IDEA = "find what an earlier request has computed"
RUNS = {
    f"{TOGETHER} requests, prompt cached": partial(
        run_in_engine, requests=TOGETHER, asked_before=True
    )
}
