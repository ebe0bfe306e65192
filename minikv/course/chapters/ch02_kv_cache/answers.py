"""Chapter 02: the loop that a cache makes possible, PyTorch's own attention over a cache, and a
prefix that many requests share."""

import torch
import torch.nn.functional as F

from minikv.attention import causal_mask
from minikv.kv_cache import ConcatCache, PreallocatedCache
from minikv.language_model import LanguageModel


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
    new_ids, fed = [], list(prompt_ids)
    for _ in range(max_tokens):
        token_ids = torch.tensor(fed, device=lm.device)  # (T,), T is 1 after the prompt
        positions = cache.num_tokens + torch.arange(len(fed), device=lm.device)
        hidden = lm.transformer.forward(token_ids, positions, cache.attend)
        new_ids.append(int(lm.transformer.logits(hidden[-1:]).argmax()))
        fed = new_ids[-1:]
    return new_ids


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`naive_attention` by PyTorch's own function, which uses a fused kernel where it has one.

    q (T, H, D); k, v (L, K, D) with L >= T, for any T: the T queries stand at the last T of
    the L positions, and each sees the keys at its own position and before. H is a multiple of K.
    Returns (T, H, D).
    """
    mask = causal_mask(len(q), len(k)).to(q.device)  # (T, L)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1),  # (H, T, D)
        k.transpose(0, 1),  # (K, L, D)
        v.transpose(0, 1),
        attn_mask=mask,
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

    @torch.inference_mode()
    def logits(self, request_ids: list[int]) -> torch.Tensor:
        """Logits after every token of a request, (T, vocab_size), as if the model had read
        prefix + request. Only the request goes through the model, and it sees nothing of the
        requests before it. Raises ValueError when it does not fit; the next request is right.
        """
        self.cache.num_tokens = self.num_prefix  # forget the request before
        token_ids = torch.tensor(request_ids, device=self.lm.device)  # (T,)
        positions = self.num_prefix + torch.arange(len(request_ids), device=self.lm.device)
        hidden = self.lm.transformer.forward(token_ids, positions, self.cache.attend)
        return self.lm.transformer.logits(hidden)
