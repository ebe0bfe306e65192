"""Many engines: which of them gets a request, what that is worth, and a store behind all of them.

routing       policies: round robin, least loaded, sticky sessions, by prefix with a load
simulate      N workers, their caches, a store behind them, prefill and decode apart
shared_store  blocks in a Valkey or Redis server: a tier for engines
breaker       what fails is left alone for a while
local_server  a server of one's own, for as long as it is needed
worker        an engine that computes for others, a turn at a time
front         requests to workers, by a routing policy; those of a dead worker to another
actors        workers as Ray actors
serve         a front by HTTP
"""
