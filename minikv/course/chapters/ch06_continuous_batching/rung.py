"""Rung 06 of the ladder and of the running table: requests in one batch, each with its own blocks.

Attention in PyTorch.
"""

from functools import partial

from minikv.course.workloads.running_table import TOGETHER, run_in_engine

IDEA = "requests join and leave at every step"
RUNS = {f"{TOGETHER} requests, one batch": partial(run_in_engine, requests=TOGETHER)}
