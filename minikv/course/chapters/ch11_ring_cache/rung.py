"""Rung 11 of the ladder and of the running table."""

from time import perf_counter

from minikv.course.workloads.running_table import TOGETHER, Run
from minikv.language_model import LanguageModel
from minikv.ring import RingCache, greedy

IDEA = "one buffer, keys that move, and text without end"
CELLS = 512


def run_ring(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """One sequence in a ring of cells."""
    return run_in_ring(lm, prompt_ids, max_tokens, 1)


def run_together(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Several sequences in one ring. The prompt's cells belong to all of them."""
    return run_in_ring(lm, prompt_ids, max_tokens, TOGETHER)


def run_in_ring(lm: LanguageModel, prompt_ids: list[int], max_tokens: int, num_seqs: int) -> Run:
    cache, seqs = RingCache(lm.config, CELLS), list(range(num_seqs))
    started = perf_counter()
    tokens = [greedy(cache.append(lm, prompt_ids)[-1])]
    for seq in seqs[1:]:
        cache.seq_cp(0, seq)
    seen = stored = 0
    while len(tokens) < max_tokens:
        position = len(prompt_ids) + len(tokens) - 1
        logits = cache.decode(lm, tokens[-1:] * num_seqs, [position] * num_seqs, seqs)
        [token] = {greedy(row) for row in logits}  # equal requests, greedy
        tokens.append(token)
        seen, stored = seen + num_seqs * (position + 1), stored + cache.num_used
    return Run(
        tokens,
        perf_counter() - started,
        round(lm.config.kv_bytes_per_token(lm.dtype) * (stored / seen if seen else 1)),
        1 - stored / (CELLS * (max_tokens - 1)) if seen else None,
        num_seqs,
    )


RUNS = {"one ring of cells": run_ring, f"{TOGETHER} sequences, one ring": run_together}
