"""What an engine is made of: the one place where that is decided.

    EngineConfig ─> fitted to the model ─> stores ─> attention ─> Runner ─> tiers, loop ─> Parts

This is the one file of the core that names a wing (`machine`, `gpu`, `groups`, `quant`,
`retention`, `speculative`, `states`, `tiers`, `cluster`). It imports each of them only in the
function that needs it. Its last line gives `assemble` to `Engine`.
"""

from collections.abc import Callable

import torch

from minikv.backend import MakeBackend
from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig
from minikv.engine import Classes, Engine, Loop, Parts
from minikv.events import LowerTiers
from minikv.language_model import LanguageModel
from minikv.paged import KVStore
from minikv.radix import RadixCache
from minikv.runner import ChooseTokens, Runner


@torch.inference_mode(False)  # what is allocated here is written in any mode
def assemble(
    lm: LanguageModel, config: EngineConfig, sampler: ChooseTokens,
    attention: MakeBackend | None, classes: Classes,
) -> Parts:  # fmt: skip
    """Everything that an engine keeps for good. Raises ValueError, naming the argument, for
    settings that this model cannot have."""
    from minikv.machine import backend_of

    if config.kv_dtype != "auto" or config.kv_memory is not None:
        from minikv.quant import resolve

        config = resolve(config, lm)
    if lm.config.keeps_states:
        from minikv.states import require_supported

        require_supported(lm, config, classes)
    kind = kind_of_store(lm, config, attention, classes)
    make: Callable[..., KVStore] = KVStore
    if kind == "codes":
        from minikv.quant import store_maker

        make = store_maker(config)
    elif kind == "groups":
        from minikv.groups import GroupedStore

        make = GroupedStore
    store = make(lm.config, config.num_blocks, config.block_size, lm.device, lm.dtype)
    host_store = make(lm.config, config.host_blocks, config.block_size, "cpu", lm.dtype)
    backend = (attention or backend_of(config, kind))(lm.config, store)
    runner, loop = Runner(lm, config, sampler, store, host_store, backend), Loop()
    if lm.device.type == "cuda":
        from minikv.gpu import run_ahead

        runner, loop = run_ahead(runner, config.max_num_seqs)
    if config.speculative != "off":
        from minikv.speculative import speculate

        loop = speculate(lm, runner, config, backend_of(config, "plain"))
    if kind == "groups":
        from minikv.groups import classes_over

        classes = classes_over(store, loop.ahead, config.max_batch_tokens)
    if lm.config.keeps_states:
        from minikv.states import keep_states

        classes = keep_states(runner, lm, config)
    if config.retention is not None:
        from minikv.retention import with_policy

        classes = with_policy(classes, config)
    tiers = tiers_below(runner, config) if config.host_blocks and config.prefix_cache else None
    listeners = [one for one in (*loop.listeners, store.open, tiers) if one is not None]
    return Parts(config, runner, loop, tiers, listeners, classes)


def kind_of_store(
    lm: LanguageModel, config: EngineConfig, attention: MakeBackend | None, classes: Classes
) -> str:
    """How K and V are kept: "groups" where layers with a window can give back what they no longer
    see; else "codes" in a `kv_dtype`, or "plain". Raises ValueError for settings that exclude each
    other."""
    kind = "plain" if config.kv_dtype == "auto" else "codes"
    usual = attention is None and classes == (BlockPool, BlockTable, RadixCache)
    if config.kv_groups == "one" or not any(lm.config.windows) or not usual:
        return kind
    from minikv.groups import can_give_back

    return "groups" if can_give_back(lm, config) else kind


def tiers_below(runner: Runner, config: EngineConfig) -> LowerTiers:
    """The host, the disk and the shared store below a device."""
    from minikv.tiers import Tiers

    if config.store is None:
        return Tiers(runner, config)
    from minikv.cluster import SharedStore

    return Tiers(runner, config, SharedStore(config.store))


Engine.assemble = staticmethod(assemble)  # the engine itself names none of its wings
