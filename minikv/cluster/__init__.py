"""Many engines: which of them gets a request, and what that is worth, by simulation.

routing    policies: round robin, least loaded, sticky sessions, by prefix with a load
simulate   N workers, their caches, a store behind them, prefill and decode apart
"""
