"""What an engine is made of: the one place where that is decided.

    EngineConfig ─> fitted to the model ─> stores ─> attention ─> Runner ─> tiers, loop ─> Parts

This is the one file of the core that names a wing (`cpu`, `gpu`, `groups`, `quant`, `retention`,
`speculative`, `states`, `tiers`, `cluster`). It imports each of them only in the function that
needs it.
`minikv` gives `assemble` to `Engine`.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from minikv.backend import AttentionBackend, MakeBackend, TorchAttention
from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig, ModelConfig
from minikv.engine import Classes, Loop, Parts
from minikv.events import LowerTiers
from minikv.language_model import LanguageModel
from minikv.paged import KVStore
from minikv.radix import RadixCache
from minikv.runner import ChooseTokens, Runner

log = logging.getLogger("minikv")


@torch.inference_mode(False)  # what is allocated here is written in any mode
def assemble(
    lm: LanguageModel, config: EngineConfig, sampler: ChooseTokens,
    attention: MakeBackend | None, classes: Classes,
) -> Parts:  # fmt: skip
    """Everything that an engine keeps for good. Raises ValueError, naming the argument, for
    settings that this model cannot have."""
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
    if config.batch_invariant:
        if not hasattr(backend, "one_kernel"):
            raise ValueError(
                f"batch_invariant: only attention 'cpu' on float32, not {type(backend).__name__}"
            )
        backend.one_kernel = True
    sampler = getattr(backend, "on_one_thread", lambda choose: choose)(sampler)
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
    own = *getattr(loop, "listeners", ()), getattr(store, "open", None), tiers
    listeners = [one for one in own if one is not None]
    return Parts(config, runner, loop, tiers, listeners, sessions, classes)


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


def sessions() -> Any:
    """The module that writes and reads sessions. Imported when there is a first one."""
    from minikv import tiers

    return tiers


# ── Which attention ───────────────────────────────────────────────────────────


def backend_of(config: EngineConfig, kind: str) -> MakeBackend:
    """The backend that `config.attention` names, for K and V of a kind."""
    make = {"auto": automatic, "cpu": compiled, "torch": plain, "triton": triton}
    return partial(make[config.attention], kind)


def automatic(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Triton on CUDA, compiled kernels on a CPU in float32, otherwise PyTorch. If a faster one was
    to be expected, one line in the log says why it is not used."""
    try:
        if store.device.type == "cuda":
            return triton(kind, config, store)
        if kind == "codes" or (store.device.type == "cpu" and store.dtype == torch.float32):
            return compiled(kind, config, store)
    except (ImportError, ValueError) as error:
        say_once(f"attention is PyTorch's, which is slower: {error}")
    return plain(kind, config, store)


def plain(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    if kind == "codes":
        from minikv.quant import QuantisedAttention

        return QuantisedAttention(config, store)
    if kind == "groups":
        from minikv.groups import GroupedAttention

        return GroupedAttention(TorchAttention, config, store)
    return TorchAttention(config, store)


def triton(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ImportError without Triton."""
    from minikv.gpu import triton_attention

    return triton_attention(kind, config, store)


def compiled(kind: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Raises ValueError, saying what to do, unless the model is in float32 on a CPU and Numba
    works."""
    if store.device.type != "cpu" or store.dtype != torch.float32:
        raise ValueError(
            f"attention: 'cpu' computes float32 on a CPU, and the model is {store.dtype} on "
            f"{store.device}; leave attention at 'auto'"
        )
    if problem := numba_problem():
        raise ValueError(
            f"attention: 'cpu' needs Numba, and it does not work here ({problem}); run "
            "`pip install -r requirements.txt`, or leave attention at 'auto'"
        )
    if kind == "plain":
        from minikv.cpu import CpuAttention

        return CpuAttention(config, store)
    if kind == "groups":
        from minikv.groups import compiled_attention
    else:
        from minikv.quant import compiled_attention
    return compiled_attention(config, store)


@cache
def numba_problem() -> str:
    """Why nothing can be compiled, or "". A compiler that was installed for another NumPy or
    another processor may fail in any way."""
    try:
        import minikv.cpu  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


@cache
def say_once(message: str) -> None:
    log.warning(message)
