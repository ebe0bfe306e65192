"""SelfExtend: exact positions for near tokens, grouped positions (p // G) for distant ones.

Jin et al., 2024. A model trained on L positions then sees only distances that it knows, although
the text is up to G times as long. There are two ways: dividing positions in the ring, as llama.cpp
does it, or merging two attentions by one softmax, as in the paper.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.config import ModelConfig
from minikv.errors import require_int, require_one_of
from minikv.language_model import LanguageModel
from minikv.ring.attention import in_window, merged_attention
from minikv.ring.cache import RingCache
from minikv.ring.shift import turn
from minikv.ring.window import RollingCache


class SelfExtendRing:
    """One sequence of a ring whose older tokens stand in groups of `group` to a position.

    Whenever `width` tokens have exact positions, these are divided by `group`, and the text
    continues right after them (llama.cpp's `--grp-attn-n` and `--grp-attn-w`). So a token has 0 to
    `width` - 1 neighbours at exact positions, and n tokens take about n / group positions.
    """

    def __init__(self, cache: RingCache, group: int, width: int, seq: int = 0):
        """Raises ValueError unless `group` divides `width` and the sequence is empty."""
        self.cache, self.seq = cache, require_int("seq", seq, 0)
        self.group = require_int("group", group, 1)
        self.width = require_multiple("width", width, group)
        if cache.seq_pos_max(seq) != -1:
            raise ValueError(
                f"seq: {seq} must be empty, has {cache.seq_pos_max(seq) + 1} positions"
            )
        self.grouped = 0  # positions before this one are grouped

    def append(self, lm: LanguageModel, token_ids: Sequence[int]) -> Tensor:
        """Logits after each of the next T tokens, (T, vocab_size) float32."""
        rows, done = [], 0
        while done < len(token_ids):
            self.compress()
            exact = self.cache.seq_pos_max(self.seq) + 1 - self.grouped
            chunk = token_ids[done : done + self.width - exact]
            rows.append(self.cache.append(lm, chunk, self.seq))
            done += len(chunk)
        return torch.cat(rows)

    def compress(self) -> None:
        """Group the exact positions if there are `width` of them.

        They begin at `grouped`, a multiple of width / group. To divide them as positions of the
        text they are first moved to where the text had them, grouped * group.
        """
        end = self.cache.seq_pos_max(self.seq) + 1
        if end - self.grouped < self.width:
            return
        start = self.grouped * self.group
        if start > self.grouped:
            self.cache.seq_add(self.seq, self.grouped, None, start - self.grouped)
        self.cache.seq_div(self.seq, start, None, self.group)
        self.grouped += self.width // self.group


class SelfExtendCache(RollingCache):
    """One sequence of at most `capacity` tokens, all kept, seen through two attentions.

    A key is near if it is one of a query's last `neighbours` tokens, its own included; then both
    have their true positions. Otherwise both have grouped positions, and the query is moved on by
    neighbours - neighbours // group, so that distances keep growing across the border.

    border: "rolling", the paper's, as above; "steps", llama.cpp's: near are the keys since the
    last multiple of `neighbours`.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        group: int,
        neighbours: int,
        border: str = "rolling",
    ):
        super().__init__(config, None, capacity)
        self.group = require_int("group", group, 1)
        self.neighbours = require_multiple("neighbours", neighbours, group)
        self.border = require_one_of("border", border, ("rolling", "steps"))
        self.frequencies = config.inverse_frequencies()

    def far_positions(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """For queries at these positions (T,): the first near position of each, and where it
        stands for far keys, (T,) each."""
        width, group = self.neighbours, self.group
        if self.border == "steps":
            first_near = queries - queries % width
            return first_near, first_near // group + queries % width
        return queries - width + 1, queries // group + width - width // group

    def attend_over(
        self, layer: int, q: Tensor, queries: Tensor, k: Tensor, v: Tensor, positions: Tensor
    ) -> Tensor:
        """As in `RollingCache`; far scores come from q and k turned to grouped positions."""
        visible = in_window(queries, positions, self.windows[layer])  # (T, N)
        first_near, grouped = self.far_positions(queries)
        is_near = positions >= first_near[:, None]  # (T, N)
        far_q = turn(q, (grouped - queries).to(q.device), self.frequencies)
        to = positions // self.group - positions  # (N,), 0 or less
        far_k = turn(k, to.to(k.device), self.frequencies)
        return merged_attention(
            (q, k), (far_q, far_k), v, is_near.to(q.device), visible.to(q.device)
        )


def require_multiple(name: str, value: int, of: int) -> int:
    """`value`, which must be a positive multiple of `of`. Raises ValueError otherwise."""
    if require_int(name, value, 1) % of:
        raise ValueError(f"{name}: must be a multiple of the group, {of}, was {value}")
    return value
