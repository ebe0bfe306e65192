"""The two configurations, checked where they are made: the model's and the engine's.

Six architectures share one shape: Llama, Mistral, Ministral, Cwm, Qwen2 and Qwen3
differ only in biases, in a norm on queries and keys, in how RoPE is scaled, and in
which layers have a sliding window. Everything downstream reads ModelConfig, never config.json.
"""

import math
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from minikv.errors import parse_bytes, require_bool, require_int, require_one_of

# Of each integer of EngineConfig.
SMALLEST = dict(num_blocks=1, block_size=1, max_num_seqs=1, max_batch_tokens=1,
                min_prefix_tokens=0, host_blocks=0, state_interval=0)  # fmt: skip
CHOICES = dict(
    preemption=("recompute", "swap"), attention=("auto", "cpu", "torch", "triton"),
    kv_dtype=("auto", "float16", "bfloat16", "int8", "int4", "fp8"), kv_groups=("auto", "one"),
    retention=(None, "pinned", "conversations"),
)  # fmt: skip
DRAFTERS = ("off", "ngram", "suffix", "head", "model")


@dataclass(frozen=True)
class EngineConfig:
    """How much memory the engine has and how it shares it. Raises ValueError, naming
    the argument, for bad values.

    num_blocks, block_size: the pool; a block holds `block_size` tokens.
    max_num_seqs: sequences in one batch. max_batch_tokens: tokens in one step.
    prefix_cache: keep and share the blocks of earlier prefixes.
    min_prefix_tokens: a shorter hit is not used.
    retention: what the prefix cache evicts first: None (the least recently used), "pinned" (the
        same, but what `SamplingParams.retain_s` asks to keep goes last) or "conversations" (the
        conversation that is oldest as a whole, and pins). See `minikv.retention`.
    preemption: what happens to a victim's K and V: "recompute" them later, or "swap"
        them to the host.
    host_blocks: blocks of host memory. They hold what is swapped out and, with `prefix_cache`,
        what is evicted. See `minikv.tiers`.
    disk_path, disk_bytes: a folder for what the host has no room for, and how much.
    store: the URL of a Valkey or Redis server, "redis://127.0.0.1:6379/0", that engines share:
        full blocks are written to it at once, and every engine of the same model finds them. Below
        the disk; needs `host_blocks`. See `minikv.cluster.shared_store`.
    write_through: copy blocks to the host and the disk as soon as they are full, not when evicted.
    attention: the backend. "auto" is the fastest that works: "triton" on CUDA, "cpu" (compiled
        by Numba) for float32 and bfloat16 on a CPU, else "torch", which runs anywhere. "triton"
        also runs in Triton's interpreter, which is slow and for learning. A backend of your own is
        an argument of Engine.
    kv_dtype: how K and V are stored: "auto" (as the model computes them), "float16", "bfloat16",
        "int8", "int4" or "fp8". See `minikv.quant`.
    kv_memory: the pool's size as bytes, "256 MiB" or 268435456, in place of `num_blocks`.
    kv_groups: with "auto", layers with a sliding window give back what no later query sees. With
        "one", all layers keep K and V alike: so on a GPU and with parts of your own. A kv_dtype,
        host_blocks (tiers, swapping) and sessions need "one" for a model that has such layers, and
        say so. See `minikv.groups`.
    speculative: who drafts tokens that the model then verifies, several in one step: "off", "ngram"
        (the request's own text), "suffix" (and earlier answers), "head" (a small network on the
        model's last hidden state; bundled for tinypy), "model" (a small model), or a Drafter of
        your own. The tokens are those of "off". See `minikv.speculative`.
    draft_model: with "model", which one: a folder or a hub id, or what `minikv.load` returns, in
        float32 on a CPU. It must have the same tokens. None: the one that comes with tinypy. Its
        K and V take memory besides `kv_memory`.
    batch_invariant: every sum is computed in one order, so the logits after a text are the same bit
        for bit, whatever else is in the batch, wherever its chunks begin, and whether its K and V
        were in the prefix cache. For attention "cpu" and kv_dtype "auto"; decodes cost more.
    state_bytes, state_interval: for a model with layers that keep a state: how much memory copies
        of states may take in the prefix cache; and how many tokens of a prompt may lie between two
        copies (0: any number, for they are kept at the ends of sequences and where prompts part).
        Such a model has no kv_dtype, retention, batch_invariant or attention "triton", no
        host_blocks (tiers, swapping) and no sessions yet, and is no draft_model; each says so. See
        `minikv.states`.
    """

    num_blocks: int = 512
    block_size: int = 16
    max_num_seqs: int = 64
    max_batch_tokens: int = 2048
    prefix_cache: bool = True
    min_prefix_tokens: int = 16
    retention: str | None = None
    preemption: str = "recompute"
    host_blocks: int = 0
    disk_path: str | os.PathLike | None = None
    disk_bytes: int | str = "1 GiB"
    store: str | None = field(default=None, repr=False)  # it may hold a password
    write_through: bool = False
    attention: str = "auto"
    kv_dtype: str = "auto"
    kv_memory: str | int | None = None
    kv_groups: str = "auto"
    speculative: Any = "off"
    draft_model: Any = None
    batch_invariant: bool = False
    state_bytes: str | int = "256 MiB"
    state_interval: int = 0

    def __post_init__(self):
        for name, low in SMALLEST.items():
            object.__setattr__(self, name, require_int(name, getattr(self, name), low))
        for name, choices in CHOICES.items():
            require_one_of(name, getattr(self, name), choices)
        for name in ("prefix_cache", "write_through", "batch_invariant"):
            require_bool(name, getattr(self, name))
        parse_bytes("disk_bytes", self.disk_bytes)
        parse_bytes("state_bytes", self.state_bytes)
        if self.kv_memory is not None:
            parse_bytes("kv_memory", self.kv_memory)
        if not hasattr(self.speculative, "propose"):
            drafters = DRAFTERS if self.draft_model is None else ("model",)  # alone has one
            require_one_of("speculative", self.speculative, drafters)
        if not isinstance(self.disk_path, str | os.PathLike | None):
            raise ValueError(f"disk_path: must be a folder's path, was {self.disk_path!r}")
        if not isinstance(self.store, str | None):
            raise ValueError("store: must be the URL of a server, such as redis://127.0.0.1:6379/0")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens: must be at least max_num_seqs ({self.max_num_seqs}), so that "
                f"every sequence can decode in a step, was {self.max_batch_tokens}"
            )
        require_int("host_blocks", self.host_blocks, int(self.preemption == "swap"))
        below = self.disk_path is not None or self.store is not None or self.write_through
        if below and not (self.host_blocks and self.prefix_cache):
            raise ValueError(
                "disk_path, store, write_through: these need host_blocks and prefix_cache; "
                f"host_blocks was {self.host_blocks}, prefix_cache {self.prefix_cache}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer with grouped-query attention."""

    keeps_states: ClassVar[bool] = False  # in layers that do not attend: see `minikv.states`
    norm_offset: ClassVar[float] = 0.0  # added to the weights of all norms

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    max_context: int  # positions the model was trained for
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each query's and key's head dim (Qwen3)
    rope_theta: float
    rope_scaling: dict | None  # Llama 3.x: low- and high-frequency stretch
    windows: tuple[int | None, ...]  # sliding window of each layer that attends, in tokens
    eos_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one cached token takes: K and V, every layer that attends, every KV head."""
        return 2 * len(self.windows) * self.num_kv_heads * self.head_dim * dtype.itemsize

    def inverse_frequencies(self) -> torch.Tensor:
        """RoPE's angle per position for each pair of channels: (head_dim / 2,) float32.

        Su et al., 2021; the scaling is Llama 3.1's: slow channels are stretched
        by `factor`, fast ones left alone, those between blended.
        """
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / self.rope_theta**exponents
        if self.rope_scaling is None:
            return frequencies
        scaling = self.rope_scaling
        if scaling["rope_type"] == "linear":
            return frequencies / scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast channel, kept
        return frequencies * (keep + (1 - keep) / scaling["factor"])
