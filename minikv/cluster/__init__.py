"""Many engines: which of them gets a request, and what that is worth; simulated, and by Ray.

routing    policies: round robin, least loaded, sticky sessions, by prefix with a load
simulate   N workers, their caches, a store behind them, prefill and decode apart
worker     an engine that computes for others, a turn at a time
front      requests to workers, by a routing policy; those of a dead worker to another
actors     workers as Ray actors (needs `minikv[distributed]`)
serve      a front by HTTP
"""
