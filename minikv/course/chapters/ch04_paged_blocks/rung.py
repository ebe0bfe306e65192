"""Rung 04: the whole engine, with attention in PyTorch. What is reserved are the blocks in use."""

from minikv.course.workloads.running_table import run_in_engine

IDEA = "blocks of a fixed size, and a table that finds them"
RUNS = {"paged blocks, in the engine": run_in_engine}
