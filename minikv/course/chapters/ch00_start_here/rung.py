"""Rung 00 of the ladder and of the running table."""

IDEA = "prefill and decode, seen on a real model"

RUNS: dict = {}  # this chapter measures rungs of others
