"""Rung 04 of the ladder and of the running table: the whole engine, on its attention in PyTorch.

What is reserved are the blocks in use.
"""

from minikv.course.workloads.running_table import run_in_engine

IDEA = "blocks of a fixed size, and a table that finds them"
RUNS = {"paged blocks, in the engine": run_in_engine}
