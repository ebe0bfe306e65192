"""Chapter 16: attention over a few chosen blocks, and what that costs in quality."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.attention import naive_attention
from minikv.language_model import LanguageModel
from minikv.paged import blockwise_attention

SIZE = 16  # tokens of a block

# Which of the whole blocks before the newest one a step reads: q (K, G, D) of the newest token, a
# group of query heads for each KV head; k (L, K, D), and how many to choose -> a list for each KV
# head, of places in the text.
Choose = Callable[[torch.Tensor, torch.Tensor, int], list[list[int]]]


def by_bounds(q: torch.Tensor, k: torch.Tensor, most: int) -> list[list[int]]:
    """For each KV head, the blocks that may hold the largest scores.

    q: (K, G, D), the newest token's G query heads of each KV head. k: (L, K, D), the keys of the
    text, the newest one last. Returns K lists with the places of `most` blocks in ascending order,
    or of all blocks if there are fewer. Blocks have SIZE tokens; the newest token's own block is
    not chosen, because it is read anyway.

    Of a block only the least and the largest number of each channel are looked at. No key in it has
    a larger product with a query than the bound: the sum over the channels of the larger of q times
    the least and q times the largest number. A KV head's query heads read the same blocks, so the
    highest of their bounds counts.
    """
    count = (len(k) - 1) // SIZE
    blocks = (
        k[: count * SIZE].view(count, SIZE, *k.shape[1:]).permute(2, 0, 1, 3)
    )  # (K, B, SIZE, D)
    low, high = blocks.amin(2)[:, None], blocks.amax(2)[:, None]  # (K, 1, B, D)
    bounds = torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(-1)  # (K, G, B)
    best = bounds.amax(1)  # (K, B)
    return [sorted(one.topk(min(most, count)).indices.tolist()) for one in best]


def the_latest(q: torch.Tensor, k: torch.Tensor, most: int) -> list[list[int]]:
    """What a window of whole blocks shows."""
    blocks = (len(k) - 1) // SIZE
    return [list(range(max(0, blocks - most), blocks))] * k.shape[1]


@torch.inference_mode()
def divergence(
    lm: LanguageModel, texts: Iterable[Sequence[int]], num_new: int, choose: Choose, most: int
) -> float:
    """Of the last `num_new` tokens of each text: the mean KL of what comes next, in bits, if each
    layer's query reads its own block and `most` chosen ones, instead of all."""
    found = [
        F.kl_div(_reading(lm, ids, num_new, choose, most), _whole(lm, ids, num_new)[1],
                 log_target=True, reduction="none").sum(-1)
        for ids in map(tuple, texts)
    ]  # fmt: skip
    return float(torch.cat(found).mean()) / math.log(2)


@cache
def _whole(lm: LanguageModel, ids: tuple[int, ...], num_new: int) -> tuple[Tensor, Tensor]:
    """A text in full attention: K and V in blocks (layers, blocks, SIZE, 2, K, D), and log
    probabilities after each of the last tokens."""
    c, model = lm.config, lm.transformer
    kv = torch.zeros(c.num_layers, -(-len(ids) // SIZE), SIZE, 2, c.num_kv_heads, c.head_dim)

    def keep(layer, q, k, v):
        kv[layer].view(-1, *kv.shape[3:])[: len(k)] = torch.stack([k, v], 1)
        return naive_attention(q, k, v)

    hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), keep)
    return kv, model.logits(hidden[len(ids) - num_new :]).log_softmax(-1)


def _reading(
    lm: LanguageModel, ids: tuple[int, ...], num_new: int, choose: Choose, most: int
) -> Tensor:
    """Log probabilities after each of the last tokens, whose queries read chosen blocks."""
    c, model = lm.config, lm.transformer
    kv, tokens = _whole(lm, ids, num_new)[0].clone(), torch.tensor(ids)
    slots, group = kv.view(c.num_layers, -1, *kv.shape[3:]), c.num_heads // c.num_kv_heads

    def attend(layer, q, k, v):
        slots[layer, at] = torch.cat([k, v])
        out, groups = [], q[0].unflatten(0, (-1, group))
        chosen = choose(groups, slots[layer, : at + 1, 0], most)
        for head, (own, places) in enumerate(zip(groups, chosen, strict=True)):
            table = [*places, at // SIZE]
            seen = len(places) * SIZE + at % SIZE + 1
            out.append(blockwise_attention(own, kv[layer, ..., head : head + 1, :], table, seen))
        return torch.cat(out)[None]

    rows = []
    for at in range(len(ids) - num_new, len(ids)):
        hidden = model.forward(tokens[at : at + 1], torch.tensor([at]), attend)
        rows.append(model.logits(hidden))
    return torch.cat(rows).log_softmax(-1)
