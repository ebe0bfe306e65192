"""KV groups: layers that keep K and V for different lengths of time, over one pool of memory.

A layer with a sliding window never looks back further than that. Most models of 2026 have such
layers beside a few that see everything. Here layers with the same rule form groups of equal size,
and a block of the engine has a *part* for each group: memory for `block_size` tokens in the layers
of one group. Parts of window groups are given back as soon as no later query sees them.

    layout      which layers are in which group
    blocks      a pool, a table and a prefix cache of blocks whose parts come and go
    attention   from a block id to its part, for backends that know nothing of groups
    kernels     the same, in compiled steps

The scheduler, the table of a sequence and the prefix cache go on counting blocks. Models whose
layers all see everything use nothing of this.
"""

import logging

from minikv.backend import AttentionBackend
from minikv.config import EngineConfig, ModelConfig
from minikv.groups.attention import GroupedAttention
from minikv.groups.blocks import GroupCache, GroupPool, GroupTable, classes_over
from minikv.groups.layout import GroupedStore, Layout, layout_of
from minikv.language_model import LanguageModel
from minikv.paged import KVStore

log = logging.getLogger("minikv")

__all__ = [
    "GroupCache", "GroupPool", "GroupTable", "GroupedAttention", "GroupedStore", "Layout",
    "can_give_back", "classes_over", "compiled_attention", "layout_of",
]  # fmt: skip


def can_give_back(lm: LanguageModel, config: EngineConfig) -> bool:
    """Whether an engine keeps K and V of this model in groups. Raises ValueError for settings under
    which every layer keeps K and V of all tokens, unless `kv_groups` asks for that."""
    layout = layout_of(lm.config)
    if layout is None:
        return False
    for name, usual in (("kv_dtype", "auto"), ("host_blocks", 0)):
        if (value := getattr(config, name)) != usual:
            raise ValueError(
                f"{name}: with {value!r} every layer keeps K and V of all tokens, and layers of "
                f"this model need only the last {layout.window}; leave {name} at {usual!r}, or "
                "keep them all with kv_groups='one'"
            )
    if lm.device.type != "cpu":
        log.warning("kv_groups: on a GPU every layer keeps K and V of all tokens")
        return False
    return True


def compiled_attention(config: ModelConfig, store: KVStore) -> AttentionBackend:
    """In compiled steps. Raises ImportError without Numba."""
    from minikv.groups.compiled import CompiledGroups  # here, because it needs Numba

    return CompiledGroups(config, store)
