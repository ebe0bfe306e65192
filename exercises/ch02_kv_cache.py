"""KV cache: keep keys and values, prefill once, append in place, continue a prefix.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("02.1") in the notebook, or in a terminal: python -m minikv check 02.1
"""

import torch
import torch.nn.functional as F

from minikv.attention import causal_mask, naive_attention
from minikv.config import ModelConfig
from minikv.language_model import LanguageModel


class ConcatCache:
    """Appends by `torch.cat`: every step copies all that came before, so n steps copy O(n^2)."""

    def __init__(self, config: ModelConfig):
        self.windows = config.windows
        self.k: list[torch.Tensor | None] = [None] * config.num_layers  # (L, K, D) each
        self.v: list[torch.Tensor | None] = [None] * config.num_layers

    @property
    def num_tokens(self) -> int:
        return 0 if self.k[-1] is None else len(self.k[-1])

    # ── 02.1 Append by concatenation ──────────────────────────────────────────────
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """q (T, H, D), k, v (T, K, D) of the T tokens after the cached ones -> (T, H, D).

        Appends to this layer's entry of `k` and `v`, None at first, and attends over all that is
        kept. `windows` has each layer's sliding window, or None.
        """
        raise NotImplementedError("Exercise 02.1: ConcatCache.attend")


# ── 02.2 Prefill once, then one token per step ────────────────────────────────────
@torch.inference_mode()
def generate_with_cache(
    lm: LanguageModel,
    cache: ConcatCache,
    prompt_ids: list[int],
    max_tokens: int,
) -> list[int]:
    """Greedy tokens, each computed once: a prefill of the whole prompt, then one token per step.

    `cache` is a ConcatCache, or anything else with `num_tokens` and `attend`. The prompt, of at
    least one token, follows the tokens that are already in it: its first token stands at position
    cache.num_tokens. `max_tokens` is at least 1, and exactly that number of new tokens is
    returned, end token or not. The last of them is never fed.

    One pass is `hidden = lm.transformer.forward(token_ids (T,), positions (T,), cache.attend)`,
    hidden (T, hidden_size); `lm.transformer.logits(hidden)` has one row for each row it is given.
    """
    raise NotImplementedError("Exercise 02.2: generate_with_cache")


class PreallocatedCache:
    """Writes in place into storage for `capacity` tokens, all reserved at the start."""

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):  # fmt: skip
        shape = (config.num_layers, 2, capacity, config.num_kv_heads, config.head_dim)
        self.kv = torch.empty(shape, dtype=dtype, device=device)  # [:, 0] holds k, [:, 1] v
        self.windows = config.windows
        self.capacity = capacity
        self.num_tokens = 0

    # ── 02.3 Write in place ───────────────────────────────────────────────────────
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """q (T, H, D), k, v (T, K, D) of the T tokens after the cached ones -> (T, H, D).

        Writes them into the slots after the first `num_tokens`, the same ones in every layer, and
        attends over all slots written so far. The last layer of a pass, and no other, moves
        `num_tokens`. A slot that was never written may hold NaN. `windows` has each layer's
        sliding window, or None. Raises ValueError if the T tokens do not fit, and then changes
        nothing.
        """
        raise NotImplementedError("Exercise 02.3: PreallocatedCache.attend")


# ── 02.4 A chunk after a prefix: broken, fix it ───────────────────────────────────
def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`naive_attention` by PyTorch's own function, which uses a fused kernel where it has one.

    q (T, H, D); k, v (L, K, D) with L >= T, for any T: the T queries stand at the last T of
    the L positions, and each sees the keys at its own position and before. H is a multiple of K.
    Returns (T, H, D).
    """
    is_chunk = len(q) > 1  # a single query is the last and sees all
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1),  # (H, T, D)
        k.transpose(0, 1),  # (K, L, D)
        v.transpose(0, 1),
        is_causal=is_chunk,
        enable_gqa=True,
    )
    return out.transpose(0, 1)  # (T, H, D)


class SharedPrefix:
    """The beginning of a prompt, computed once. Every request continues from there.

    A prefix cache (chapter 07) does this for every prefix it has seen; this does it for one.
    """

    def __init__(self, lm: LanguageModel, prefix_ids: list[int], capacity: int):
        """`capacity`: tokens of the prefix plus those of the longest request."""
        self.lm = lm
        self.num_prefix = len(prefix_ids)
        self.cache = PreallocatedCache(lm.config, capacity, lm.dtype, lm.device)
        lm.logits(prefix_ids, self.cache)

    # ── 02.5 The request after the first: broken, fix it ──────────────────────────
    @torch.inference_mode()
    def logits(self, request_ids: list[int]) -> torch.Tensor:
        """Logits after every token of a request, (T, vocab_size), as if the model had read
        prefix + request. Only the request goes through the model, and it sees nothing of the
        requests before it. Raises ValueError when it does not fit; the next request is right.
        """
        token_ids = torch.tensor(request_ids, device=self.lm.device)  # (T,)
        positions = torch.arange(len(request_ids), device=self.lm.device)
        hidden = self.lm.transformer.forward(token_ids, positions, self.cache.attend)
        return self.lm.transformer.logits(hidden)
