"""Many engines: which of them gets a request, what that gains, and how K and V travel.

routing       policies: round robin, least loaded, sticky sessions, by prefix and load
simulate      N workers, their caches, a store behind them, prefill and decode apart
shared_store  blocks in a Valkey or Redis server: `EngineConfig.store`
breaker       what fails is left alone for a while
local_server  a server of this process's own, for as long as it is needed
worker        an engine that computes for others, some steps at a time
front         sends requests to workers by a routing policy, and those of a dead worker to others
split         prefill on some workers, decode on others
actors        workers as Ray actors; `ray_cluster` is what they run on

`minikv.serving` serves a front over HTTP.
"""

from minikv.cluster.shared_store import SharedStore

__all__ = ["SharedStore"]
