"""Tiers under the prefix cache, and sessions: chapter 12.

Read the files in this order: names, entry, moves, costs, host, store, disk, identity, blocks,
shared, tiers, joined, settings, folder, session. An engine imports them if
`EngineConfig.host_blocks` is set, or for a session.
"""
