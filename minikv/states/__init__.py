"""Running states: layers whose memory does not grow, and cannot be cut.

    engine = Engine(minikv.load("path/of/a/Qwen3.5"))

Most layers of such a model keep no K and V but a state of fixed size: a *slot* for each sequence,
beside the blocks of the layers that attend. Blocks are shared, and forgotten one by one. A state is
overwritten by every token, so it is copied, as a whole, whenever two sequences need it: when one
forks, and for the prefix cache.

    config   the shape of such a model
    delta    the recurrence, token by token and a chunk at once
    model    a transformer with both kinds of layers
    memory   the slots
    slots    which are of running sequences, and which are copies in the prefix cache
    steps    a batch with slots, and how it is computed
    compiled decodes in one program, on a CPU

The scheduler goes on counting blocks. Models whose layers all attend use nothing of this.
"""

from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig
from minikv.engine import Classes
from minikv.errors import parse_bytes
from minikv.language_model import LanguageModel
from minikv.machine import numba_problem
from minikv.radix import RadixCache
from minikv.runner import Runner
from minikv.states.config import HybridConfig
from minikv.states.memory import Counts, StateMemory
from minikv.states.model import HybridTransformer
from minikv.states.slots import StateCache, StatePool, StateTable, classes_over
from minikv.states.steps import StateAttention, StateBuilder

__all__ = [
    "Counts", "HybridConfig", "HybridTransformer", "StateAttention", "StateBuilder", "StateCache",
    "StateMemory", "StatePool", "StateTable", "keep_states", "require_supported",
]  # fmt: skip

# What is for K and V alone so far, and how it is switched off.
UNSUPPORTED = dict(kv_dtype="auto", host_blocks=0, retention=None, batch_invariant=False)

PLAIN = BlockPool, BlockTable, RadixCache  # an engine's, if it is given no others


def require_supported(lm: LanguageModel, config: EngineConfig, classes: Classes) -> None:
    """Raises ValueError for settings that a model with linear layers cannot have."""
    for name, usual in UNSUPPORTED.items():
        if (value := getattr(config, name)) != usual:
            raise ValueError(
                f"{name}: {value!r} is for models whose layers all keep K and V, and {lm.name} has "
                f"layers with a state; leave {name} at {usual!r}"
            )
    if config.attention == "triton" or lm.device.type != "cpu":
        raise ValueError(
            f"attention: layers with a state are computed on a CPU, and {lm.name} has some; "
            f"it is on {lm.device}, with attention {config.attention!r}"
        )
    if classes != PLAIN:
        raise ValueError(
            f"block_pool, block_table, prefix_cache: {lm.name} has layers with a state, which only "
            "the engine's own classes count; leave these arguments out"
        )


def keep_states(runner: Runner, lm: LanguageModel, config: EngineConfig) -> Classes:
    """Let a runner keep states, and return what an engine's pool, tables and cache are made of.

    There are slots for all sequences that may run, and for the beams of a search beside them: twice
    as many, because a beam is forked before its parent goes.
    """
    assert isinstance(lm.config, HybridConfig)
    num_copies = parse_bytes("state_bytes", config.state_bytes) // lm.config.state_bytes(lm.dtype)
    memory = StateMemory(
        lm.config, lm.dtype, 3 * config.max_num_seqs,
        num_copies if config.prefix_cache else 0, config.state_interval,
    )  # fmt: skip
    attention = StateAttention(runner.attention, memory)
    if numba_problem() == "":
        from minikv.states.compiled import compiled_decodes

        attention.decodes = compiled_decodes(runner.attention, memory)
    runner.attention = attention
    builder = runner.builder
    runner.builder = StateBuilder(config.max_num_seqs, builder.max_blocks, builder.block_size)
    return classes_over(attention, memory)
