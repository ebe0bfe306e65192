"""Rung 17 of the ladder and of the running table."""

IDEA = "TODO: the one new idea, in one line"
RUNS: dict = {}  # TODO: name -> how it runs, as in an earlier rung.py
