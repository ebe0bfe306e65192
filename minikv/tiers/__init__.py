"""Tiers under the prefix cache, and sessions: chapter 12.

Read the files in this order: names, entry, moves, costs, host, store, disk, identity, blocks,
shared, tiers, folder, session. `minikv.assembly` imports them for an engine with
`EngineConfig.host_blocks`, or for a session.
"""

from minikv.tiers.blocks import drop_open, parts_of
from minikv.tiers.entry import MAGIC
from minikv.tiers.identity import bytes_of, model_fingerprint
from minikv.tiers.names import Name, block_names, identity_of, name_new, root_name
from minikv.tiers.session import blocks_of_prefix, load_session, put_prefix, save_session
from minikv.tiers.tiers import Tiers, tiers_of

__all__ = [
    "MAGIC", "Name", "Tiers", "block_names", "blocks_of_prefix", "bytes_of", "drop_open",
    "identity_of", "load_session", "model_fingerprint", "name_new", "parts_of", "put_prefix",
    "root_name", "save_session", "tiers_of",
]  # fmt: skip
