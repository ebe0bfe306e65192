"""Rung 05 of the ladder and of the running table: samples of one request share its prompt's blocks.

Attention in PyTorch.
"""

from functools import partial

from minikv.course.workloads.running_table import TOGETHER, run_in_engine

IDEA = "share a block until it is written to"
RUNS = {f"{TOGETHER} samples, shared blocks": partial(run_in_engine, samples=TOGETHER)}
