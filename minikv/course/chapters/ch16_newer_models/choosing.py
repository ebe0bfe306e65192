"""Chapter 16: attention over a few chosen blocks, and what that costs in quality."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from minikv.attention import naive_attention
from minikv.language_model import LanguageModel
from minikv.paged import blockwise_attention

SIZE = 16  # tokens of a block

# Which of the full blocks before the newest one a query reads: q (G, D) of a group's heads, k
# (L, D) of their KV head, and how many to choose -> their places in the text.
Choose = Callable[[torch.Tensor, torch.Tensor, int], list[int]]


def by_bounds(q: torch.Tensor, k: torch.Tensor, most: int) -> list[int]:
    """The blocks that may hold the largest scores. Of each block only the least and the largest
    number of each channel of K are looked at: no key in it can score more than they allow."""
    blocks = k[: (len(k) - 1) // SIZE * SIZE].view(-1, SIZE, k.shape[-1])
    low, high = blocks.amin(1), blocks.amax(1)  # (B, D)
    bounds = torch.maximum(q[:, None] * low, q[:, None] * high).sum(-1)  # (G, B)
    return sorted(bounds.amax(0).topk(min(most, len(blocks))).indices.tolist())


def the_latest(q: torch.Tensor, k: torch.Tensor, most: int) -> list[int]:
    """What a window of whole blocks shows."""
    blocks = (len(k) - 1) // SIZE
    return list(range(max(0, blocks - most), blocks))


@torch.inference_mode()
def divergence(
    lm: LanguageModel, token_ids: list[int], num_new: int, choose: Choose, most: int
) -> float:
    """Of the last `num_new` tokens of a text: the mean KL of what comes next, in bits, if each
    layer's query reads its own block and `most` chosen ones, instead of all."""
    c, model = lm.config, lm.transformer
    ids, positions = torch.tensor(token_ids), torch.arange(len(token_ids))
    blocks, group = -(-len(token_ids) // SIZE), c.num_heads // c.num_kv_heads
    kv = torch.zeros(c.num_layers, blocks, SIZE, 2, c.num_kv_heads, c.head_dim)
    slots = kv.view(c.num_layers, -1, 2, c.num_kv_heads, c.head_dim)

    def keep(layer, q, k, v):
        slots[layer, : len(k)] = torch.stack([k, v], 1)
        return naive_attention(q, k, v)

    first = len(token_ids) - num_new
    right = model.logits(model.forward(ids, positions, keep)[first:]).log_softmax(-1)

    def chosen(length: int):
        def attend(layer, q, k, v):
            slots[layer, length - 1] = torch.cat([k, v])
            out = []
            for head, own in enumerate(q[0].split(group)):
                places = choose(own, slots[layer, :length, 0, head], most)
                table = [*places, (length - 1) // SIZE]
                seen = len(places) * SIZE + (length - 1) % SIZE + 1
                of_head = kv[layer, ..., head : head + 1, :]
                out.append(blockwise_attention(own, of_head, table, seen))
            return torch.cat(out)[None]

        return attend

    rows = [
        model.logits(model.forward(ids[at : at + 1], positions[at : at + 1], chosen(at + 1)))
        for at in range(first, len(token_ids))
    ]
    kl = F.kl_div(torch.cat(rows).log_softmax(-1), right, log_target=True, reduction="none")
    return float(kl.sum(-1).mean()) / math.log(2)
