"""The oracle of every chapter: greedy tokens, everything computed again at every step.

Nothing is kept from one step to the next, so nothing stale can be read. Whatever a later
chapter builds must write the same tokens.
"""

from collections.abc import Callable, Sequence

import torch


def generate_naively(
    logits: Callable[[list[int]], torch.Tensor], token_ids: Sequence[int], max_tokens: int
) -> list[int]:
    """Continue `token_ids` by `max_tokens` greedy tokens, end token or not; returns the new ones.

    logits(ids) computes the logits after each of T tokens, (T, vocab_size).
    """
    ids = list(token_ids)
    for _ in range(max_tokens):
        ids.append(int(logits(ids)[-1].argmax()))
    return ids[len(token_ids) :]
