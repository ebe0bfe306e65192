"""Tiers under the prefix cache, and sessions: chapter 12.

Read the files in this order: names, entry, moves, costs, host, store, disk, identity, tiers, folder,
session, ring_session. `Engine` uses them if `EngineConfig.host_blocks` is set, and for sessions.
"""

from minikv.tiers.tiers import Tiers, TierStats

__all__ = ["TierStats", "Tiers"]
