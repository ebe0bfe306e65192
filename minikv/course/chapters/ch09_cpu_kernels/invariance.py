"""Chapter 09: the same text, other bits. Attention of a step in parts, and a tie of two tokens."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

import minikv
from minikv.checkpoint.files import read_weights
from minikv.language_model import LanguageModel
from minikv.model import Transformer

PART = 16  # keys


def attend_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: Iterable[int]
) -> torch.Tensor:
    """One query over its context, part by part: q (D,), k and v (L, D) -> (D,), all float32.

    `starts` are the places where parts begin, in order, the first of them 0. Each part is summed by
    itself, so cores could compute them side by side. Then their sums are added, in order, with the
    running softmax of chapter 04.
    """
    borders = [*starts, len(k)]
    top, total, out = torch.tensor(-torch.inf), torch.zeros(()), torch.zeros_like(q)
    for start, end in pairwise(borders):
        scores = (k[start:end] * q).sum(-1) * len(q) ** -0.5
        new_top = torch.maximum(top, scores.max())
        weights, shrink = torch.exp(scores - new_top), torch.exp(top - new_top)
        total = total * shrink + weights.sum()
        out = out * shrink + (weights[:, None] * v[start:end]).sum(0)
        top = new_top
    return out / total


def attend_step(
    queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Attention of one step over several sequences, one head, float32.

    queries[s] (T, D) are the new tokens of sequence s, keys[s] and values[s] (L, D) its whole
    context; the first L - T of them were computed by earlier steps, or found in the prefix cache.
    Query t sees the keys up to its own. Returns (T, D) for each sequence.

    The bits of a row depend on its text alone: on q, k and v up to this token. They do not depend
    on the other sequences of the step, on where a chunk begins, or on what was cached.
    """
    part = PART
    found = []
    for q, k, v in zip(queries, keys, values, strict=True):
        num_cached, rows = len(k) - len(q), []
        for row, query in enumerate(q):
            seen = num_cached + row + 1
            starts = range(0, seen, part)
            rows.append(attend_in_parts(query, k[:seen], v[:seen], starts))
        found.append(torch.stack(rows))
    return found


# ── The engine, asked the same in several ways ────────────────────────────────

WAYS = ("cold", "warm", "in a batch", "in chunks")


def logits_of(lm: LanguageModel, prompt: Sequence[int], way: str, **settings) -> torch.Tensor:
    """The logits (V,) after a prompt, as an engine computes them: with an empty prefix cache, with
    all of the prompt cached but its end, beside seven other prompts, or in chunks of 16."""
    rows: list[torch.Tensor] = []

    def choose(logits, params, draws):
        rows.append(logits[0].clone())
        return minikv.Sampler()(logits, params, draws)

    if way == "in chunks":
        settings |= {"max_batch_tokens": 16, "max_num_seqs": 1}
    engine = minikv.Engine(lm, minikv.EngineConfig(**settings), sampler=choose)
    prompts = [list(prompt)]
    if way == "in a batch":
        prompts += [[2 + i, *prompt[: 9 * i]] for i in range(1, 8)]
    for _ in range(2 if way == "warm" else 1):
        engine.generate(prompts, minikv.SamplingParams(max_tokens=1, ignore_eos=True))
    return rows[-1 if way == "warm" else 0]


def with_tie(lm: LanguageModel, prompt: Sequence[int], seed: int) -> LanguageModel:
    """The same model but for one row of its head: after this prompt the second best token has the
    logit of the best one, exactly.

    Its row is that of the best token plus a random vector at a right angle to the hidden state. So
    the difference between the two logits is 0 but for rounding.
    """
    first, second = lm.logits(prompt)[-1].topk(2).indices.tolist()
    state = dict(read_weights(minikv.BUNDLED[lm.name]))
    model = lm.transformer
    hidden = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), model.attend_naively)[
        -1
    ].double()
    other = torch.randn(len(hidden), generator=torch.Generator().manual_seed(seed)).double()
    other -= hidden * (hidden @ other) / (hidden @ hidden)
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    head = head.to(torch.float32, copy=True)  # tinypy's are stored as bfloat16
    head[second] = head[first] + (other * head[first].norm() / other.norm()).float()
    state["lm_head.weight"] = head
    return LanguageModel(lm.name, Transformer(lm.config, state, lm.device, lm.dtype), lm.tokenizer)


def find_tie(lm: LanguageModel, prompt: Sequence[int], most: int = 40) -> LanguageModel:
    """A model with a tie that goes one way with a cold cache, and the other with a warm one."""
    for seed in range(most):
        tied = with_tie(lm, prompt, seed)
        cold, warm = (int(logits_of(tied, prompt, way).argmax()) for way in ("cold", "warm"))
        if cold != warm:
            return tied
    raise RuntimeError(f"none of {most} ties went another way with a warm cache")
