"""Rung 12 of the ladder and of the running table."""

IDEA = "what is evicted goes one tier down, and comes back when it is asked for"
RUNS: dict = {}  # TODO: name -> how it runs, as in an earlier rung.py
