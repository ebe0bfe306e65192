"""Text longer than the cache: what each way to forget costs, and what many K-shifts do to K.

    lm = with_config(minikv.load("tinypy"), max_context=8192)
    ids = lm.encode(text)[:8192]
    nats = nats_per_token(context_shift_logits(lm, ids, num_cells=1024), ids)
    bits_per_byte(nats, token_bytes(lm, ids), bins=8)

The `…_logits` functions all return the logits after each of T tokens, (T, vocab_size), and differ
in what a token sees. Positions go up to T, so the model needs a table of that length.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.language_model import LanguageModel
from minikv.ring import RingCache, RollingCache, SelfExtendCache, SinkCache, context_shift, turn

CHUNK = 256  # tokens in one step


def full_logits(lm: LanguageModel, ids: Sequence[int]) -> Tensor:
    """Every token sees all before it, at its true position."""
    return _in_chunks(lm, ids, RollingCache(lm.config, num_tokens_max=len(ids)))


def window_logits(lm: LanguageModel, ids: Sequence[int], window: int) -> Tensor:
    """Every token sees the last `window` tokens."""
    return RollingCache(lm.config, window).append(lm, ids)


def sink_logits(lm: LanguageModel, ids: Sequence[int], num_sinks: int, window: int) -> Tensor:
    """Every token sees the first `num_sinks` tokens and the last `window`."""
    return SinkCache(lm.config, num_sinks, window).append(lm, ids)


def self_extend_logits(
    lm: LanguageModel, ids: Sequence[int], group: int, neighbours: int
) -> Tensor:
    """Every token sees all before it; those beyond `neighbours` at positions p // group."""
    return _in_chunks(lm, ids, SelfExtendCache(lm.config, len(ids), group, neighbours))


def context_shift_logits(
    lm: LanguageModel, ids: Sequence[int], num_cells: int, n_keep: int = 0
) -> Tensor:
    """A ring of `num_cells`; when it is full, half of what follows the first `n_keep` goes."""
    cache = RingCache(lm.config, num_cells, contiguous=False)
    rows, done = [], 0
    while done < len(ids):
        if cache.num_free == 0:
            context_shift(cache, n_keep)
        chunk = ids[done : done + min(cache.num_free, CHUNK)]
        rows.append(cache.append(lm, chunk))
        done += len(chunk)
    return torch.cat(rows)


def fresh_logits(lm: LanguageModel, ids: Sequence[int], num_tokens: int) -> Tensor:
    """What context shift avoids: whenever `num_tokens` are full, the second half is computed
    again from scratch, at positions that begin at 0, and the text goes on behind it."""
    step = num_tokens // 2
    rows = [lm.logits(ids[:num_tokens])]
    for end in range(num_tokens + step, len(ids) + step, step):
        start = end - num_tokens
        rows.append(lm.logits(ids[start:end])[num_tokens - step :])
    return torch.cat(rows)[: len(ids)]


def _in_chunks(lm: LanguageModel, ids: Sequence[int], cache: RollingCache) -> Tensor:
    return torch.cat([cache.append(lm, ids[i : i + CHUNK]) for i in range(0, len(ids), CHUNK)])


# ── Bits per byte, by position ────────────────────────────────────────────────


def nats_per_token(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """-log p of each token but the first: (T - 1,). logits (T, vocab_size), (T,) token ids."""
    return F.cross_entropy(logits[:-1], torch.tensor(ids)[1:], reduction="none")


def token_bytes(lm: LanguageModel, ids: Sequence[int]) -> Tensor:
    """How many bytes of text each token is, (T,); for a byte-level tokenizer."""
    if lm.tokenizer is None:
        raise ValueError(f"lm: {lm.name} has no tokenizer to tell how long its tokens are")
    lengths = {token_id: len(piece) for piece, token_id in lm.tokenizer.get_vocab().items()}
    return torch.tensor([lengths[token_id] for token_id in ids])


def bits_per_byte(nats: Tensor, num_bytes: Tensor, bins: int = 1) -> Tensor:
    """Bits per byte in `bins` stretches of equally many tokens, (bins,) float64.

    nats (T - 1,) of the tokens 1 … T - 1, num_bytes (T,).
    """
    spans = zip(nats.double().tensor_split(bins), num_bytes[1:].tensor_split(bins), strict=True)
    return torch.stack([n.sum() / math.log(2) / b.sum() for n, b in spans])


# ── What a shift does ─────────────────────────────────────────────────────────


def shift_errors(
    k: Tensor, frequencies: Tensor, dtype: torch.dtype, counts: Sequence[int], delta: int = 1
) -> list[float]:
    """The relative error of K after so many shifts by `delta`, stored in `dtype` between.

    k (N, K, D) float32, as the model made it; frequencies (D / 2,). The reference is k turned once,
    in float64. Returns |K - reference| / |reference| for each of `counts`, which must ascend.
    """
    stored, done, errors = k.to(dtype), 0, []
    deltas = torch.full((len(k),), delta)
    for count in counts:
        for _ in range(count - done):
            stored = turn(stored, deltas, frequencies)
        done = count
        exact = _turn_exactly(k, count * delta, frequencies)
        errors.append(float((stored.double() - exact).norm() / exact.norm()))
    return errors


def _turn_exactly(k: Tensor, delta: int, frequencies: Tensor) -> Tensor:
    """`turn` in float64, as complex numbers: channel i with channel i + D / 2."""
    a, b = k.double().chunk(2, -1)
    turned = torch.complex(a, b) * torch.exp(1j * delta * frequencies.double())
    return torch.cat([turned.real, turned.imag], -1)
