"""minikv: a small, readable LLM inference engine that keeps its KV cache in the open.

    import minikv
    lm = minikv.load("tinypy")
    engine = minikv.Engine(lm)
    print(engine.generate(["def fib(n):"])[0].text)

Read the files in this order: each uses only those before it. docs/ENGINE.md says what is in them.

    program, version, errors, attention, oracle, config, kv_cache, blocks, paged, fast, model,
    language_model, sampling, radix, sequence, batch, backend, scheduler, events,
    runner, outputs, beam, invariants, validation, engine, assembly
"""

import minikv.program  # noqa: F401  before all others
from minikv.assembly import assemble as assemble  # which completes `Engine`
from minikv.attention import causal_mask, naive_attention
from minikv.backend import AttentionBackend, TorchAttention
from minikv.blocks import BlockPool, BlockTable
from minikv.checkpoint import BUNDLED, load
from minikv.config import EngineConfig, ModelConfig
from minikv.engine import Engine
from minikv.errors import CheckpointError, OutOfBlocks
from minikv.kv_cache import ConcatCache, PreallocatedCache
from minikv.language_model import LanguageModel
from minikv.outputs import BeamOutput, Delta, RequestOutput, SampleOutput, Stats
from minikv.paged import KVStore, blockwise_attention
from minikv.radix import InsertResult, MatchResult, RadixCache
from minikv.sampling import Sampler, SamplingParams
from minikv.scheduler import Plan, Scheduler, first_come_first_served
from minikv.sequence import Request, Sequence
from minikv.version import __version__ as __version__

__all__ = [
    "BUNDLED", "AttentionBackend", "BeamOutput", "BlockPool", "BlockTable", "CheckpointError",
    "ConcatCache", "Delta", "Engine", "EngineConfig", "InsertResult", "KVStore", "LanguageModel",
    "MatchResult", "ModelConfig", "OutOfBlocks", "Plan", "PreallocatedCache", "RadixCache",
    "Request", "RequestOutput", "SampleOutput", "Sampler", "SamplingParams", "Scheduler",
    "Sequence", "Stats", "TorchAttention", "blockwise_attention", "causal_mask",
    "first_come_first_served", "load", "naive_attention",
]  # fmt: skip
