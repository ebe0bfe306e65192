"""Many engines: which of them gets a request, and what that is worth, by simulation.

routing    policies: round robin, least loaded, sticky sessions, by prefix with a load
simulate   N workers, their caches, a store behind them, prefill and decode apart
handover   who holds which block while K and V go from one worker to another
apart      prefill and decode on different workers, for real; `front` gives them requests
connector  how K and V get there; also zmq_connector and nixl_connector
"""
