"""Rung 07 of the ladder and of the running table: the same, sent before.

So the prompt is in the prefix cache. Attention in PyTorch.
"""

from functools import partial

from minikv.course.workloads.running_table import TOGETHER, run_in_engine

IDEA = "find what an earlier request has computed"
RUNS = {
    f"{TOGETHER} requests, prompt cached": partial(
        run_in_engine, requests=TOGETHER, asked_before=True
    )
}
