"""Chapter 14: drafts that branch, verified in one pass; and what a drafter gives on this model.

row       0        1      2       3            the newest token, and drafts
parent   -1        0      0       1            row 3 follows row 1; rows 1 and 2 are two guesses
                                               at the same place
position  c      c + 1  c + 1   c + 2          of c tokens before them
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
import torch.nn.functional as F

import minikv
from minikv.course.chapters.ch14_speculative_decoding.answers import tree_mask, tree_positions
from minikv.course.workloads.corpus import read_corpus
from minikv.course.workloads.timing import REPEATS
from minikv.kv_cache import PreallocatedCache
from minikv.language_model import LanguageModel
from minikv.speculative import Speculation


@torch.inference_mode()
def tree_logits(
    lm: LanguageModel, cache: PreallocatedCache, tokens: Sequence[int], parents: Sequence[int],
    mask_of: Callable = tree_mask, positions_of: Callable = tree_positions,
) -> torch.Tensor:  # fmt: skip
    """Logits after each row of a tree, (n, vocab_size), in one pass. The cache holds what comes
    before; K and V of all rows are written behind it, in the order of the rows."""
    start, end = cache.num_tokens, cache.num_tokens + len(tokens)
    mask = torch.as_tensor(mask_of(parents, start))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.kv[layer, :, start:end] = torch.stack([k, v])
        k, v = cache.kv[layer, :, :end].transpose(1, 2)  # (K, end, D) each
        q = q.transpose(0, 1)  # (H, n, D)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)

    positions = torch.tensor(positions_of(parents, start))
    hidden = lm.transformer.forward(torch.tensor(tokens), positions, attend)
    return lm.transformer.logits(hidden)


def keep_path(cache: PreallocatedCache, path: Sequence[int]) -> None:
    """Move K and V of the kept rows together. What else the tree wrote is overwritten later."""
    start, end = cache.num_tokens, cache.num_tokens + len(path)
    cache.kv[:, :, start:end] = cache.kv[:, :, start + torch.tensor(path)]
    cache.num_tokens = end


def continuations(lm: LanguageModel, count: int, num_tokens: int) -> list[list[int]]:
    """Held-out source, each piece with what the model writes after it, greedily."""
    ids = lm.encode("".join(read_corpus().held_out))
    prompts = [ids[i * len(ids) // count :][:96] for i in range(count)]
    params = minikv.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    outputs = minikv.Engine(lm).generate(prompts, params)
    return [prompt + out.token_ids for prompt, out in zip(prompts, outputs, strict=True)]


def times_as_fast(
    lm: LanguageModel, texts: list[list[int]], drafter: str, attention: str
) -> tuple[float, Speculation]:
    """How many times as fast an engine continues the texts with a drafter as without it, one after
    the other, by the least time of some runs each; and what the drafter did."""
    names = ["off", drafter]
    configs = [minikv.EngineConfig(speculative=name, attention=attention) for name in names]
    engines = [minikv.Engine(lm, config) for config in configs]
    seconds: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for engine, taken in zip(engines, seconds, strict=True):
            started = perf_counter()
            for text in texts:
                params = minikv.SamplingParams(max_tokens=len(text) - 96, ignore_eos=True)
                [output] = engine.generate([text[:96]], params)
                if output.token_ids != text[96:]:
                    raise AssertionError("a draft changed a token")
            taken.append(perf_counter() - started)
    return min(seconds[0]) / min(seconds[1]), engines[1].stats().speculation
