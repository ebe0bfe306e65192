"""Speculative decoding: drafts, their verification, and a block table that shrinks.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("14.1") in the notebook, or in a terminal: python -m minikv check 14.1
"""

from collections.abc import Callable, Sequence

import torch

from minikv import blocks
from minikv.errors import OutOfBlocks, require_int
from minikv.radix import RadixCache


# ── 14.1 Which drafts are kept ────────────────────────────────────────────────────
def keep_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The tokens that are written: the target's own `token_ids` (k + 1, for k drafts) up to and
    with the first that differs from its draft; all of them if none does."""
    raise NotImplementedError("Exercise 14.1: keep_equal")


class BlockTable(blocks.BlockTable):
    """One sequence's blocks in logical order: the token at `position` lies in block
    `block_ids[position // block_size]`.

    `num_tokens` is the number of tokens that room was asked for, with `grow` or `share`, and not
    taken back, with `shrink`. What else would fit into the last block is not counted.
    """

    def grow(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens; take new blocks where the last one is full.

        All or nothing: raises OutOfBlocks, and changes nothing, if the pool has too few. Raises
        ValueError for a negative number.
        """
        require_int("num_tokens", num_tokens, 0)
        total = self.num_tokens + num_tokens
        needed = -(-total // self.block_size) - len(self.block_ids)
        if needed > 0:
            if needed > self.pool.num_free:
                raise OutOfBlocks(needed, self.pool.num_free)
            self.block_ids += [self.pool.allocate() for _ in range(needed)]
        self.num_tokens = total

    # ── 14.2 A table that shrinks ─────────────────────────────────────────────────
    def shrink(self, num_tokens: int) -> None:
        """Take back the room of the last `num_tokens` tokens; release the blocks that have no token
        left. What was written stays in the other blocks until it is overwritten.

        All or nothing: raises ValueError, and changes nothing, if the table has too few tokens.
        """
        raise NotImplementedError("Exercise 14.2: BlockTable.shrink")


# ── 14.3 What came after, the last time ───────────────────────────────────────────
def propose_ngram(token_ids: Sequence[int], width: int, most: int) -> list[int]:
    """At most `most` drafts: what came after the latest earlier occurrence of the last `width`
    tokens, which are at least 1.

    An occurrence ends before the last token; it may share tokens with the last `width`. There are
    no drafts if there is none, or if the text has fewer than `width` tokens. If the copy reaches
    the end of the text, it goes on with the drafts themselves. `token_ids` is not changed.

    Worked example, width 2: after 7 8 1 7 8 come 1 7 8 1 7 …, after 7 8 1 2 come none.
    """
    raise NotImplementedError("Exercise 14.3: propose_ngram")


# ── 14.4 Published too early: broken, fix it ──────────────────────────────────────
def settle(
    table: BlockTable, cache: RadixCache, token_ids: Sequence[int], num_computed: int
) -> int:
    """After a verification: give back what only wrong drafts needed, and publish full blocks.

    table: has room for all tokens that were computed in the step, wrong drafts included.
    token_ids: all tokens that are verified. The last one is new: its K and V are computed by the
    next step. num_computed: how many of `token_ids`, from the first on, have their K and V in the
    table's blocks.

    Afterwards the table has room for these `num_computed` tokens, and the cache holds every block
    that is full of them. Returns the number of these blocks.
    """
    table.shrink(table.num_tokens - num_computed)
    full = len(token_ids) // table.block_size
    cache.insert(token_ids[: full * table.block_size], table.block_ids[:full])
    return full


# ── 14.5 Rejection sampling ───────────────────────────────────────────────────────
def rejection_sample(
    p: torch.Tensor, q: torch.Tensor, drafts: Sequence[int], uniform: Callable[[], float]
) -> list[int]:
    """The tokens that are written: drafts that are kept, and one more.

    p (k + 1, vocab_size): the target's distributions, after temperature, top-k and top-p; q (k,
    vocab_size): those that the drafts were really drawn from. `uniform` gives a fresh number in
    [0, 1) at each call. Fresh means independent also of the numbers that the drafts were drawn
    with: sharing them is a bug that several engines had, and the text is biased by it.
    """
    raise NotImplementedError("Exercise 14.5: rejection_sample")


def draw(p: torch.Tensor, number: float) -> int:
    """The token at a uniform number in the cumulative distribution p (vocab_size,). Raises
    ValueError if p is 0 everywhere or not a number somewhere."""
    sums = p.double().cumsum(0)
    total = float(sums[-1])
    if not total > 0:
        raise ValueError(f"p: must have a sum above 0, was {total}")
    index = int(torch.searchsorted(sums, torch.tensor(number * total), right=True))
    return min(index, int(p.nonzero()[-1]))  # rounding may leave the sum below the number


# ── 14.6 Two bug reports ──────────────────────────────────────────────────────────
def two_reports() -> dict[str, float | str]:
    """Which of two bug reports is right? The target's distribution over a, b, c is p = 0.5, 0.3,
    0.2. The drafter draws a, b or c from q = 0.2, 0.2, 0.6.

    "matched": engine 1 draws a token from p, and keeps the draft if it is that token; otherwise it
        writes the token drawn. How likely is a draft kept?
    "matched distance": the total variation distance between p and what engine 1 writes: half of the
        sum of |written - p| over a, b, c.
    "top": engine 2 keeps the draft if it is the target's most likely token; otherwise it writes a
        token drawn from p. How likely is a draft kept?
    "top distance": its distance from p.
    "rejection": how likely does rejection sampling keep a draft?
    "right report": "1" if only the report "engine 1 is biased" is right, "2" if only "engine 2 is
        biased" is, "both" or "neither".
    """
    raise NotImplementedError("Exercise 14.6: two_reports")


# ── 14.7 When to stop drafting ────────────────────────────────────────────────────
def expected_tokens(num_drafts: int, acceptance: float) -> float:
    """Tokens that a step gives on average, if each draft is right with this probability as long as
    all before it are: the drafts that are kept, and one more.

    Worked example: 2 drafts at 0.5 give 1 + 0.5 + 0.25 = 1.75 tokens.
    """
    raise NotImplementedError("Exercise 14.7: expected_tokens")


# ── 14.7 When to stop drafting ────────────────────────────────────────────────────
def drafts_that_pay(cost: Sequence[float], acceptance: float) -> int:
    """The number of drafts with the most tokens per second; of equal ones the fewest.

    cost[n - 1] is the seconds of a step over n tokens, so at most len(cost) - 1 drafts can be
    verified. 0 is an answer: no drafts.

    Worked example: cost 1.0, 1.2, 1.6 and acceptance 0.5 give 1, 1.25 and 1.09 tokens per second:
    1 draft.
    """
    raise NotImplementedError("Exercise 14.7: drafts_that_pay")


# ── 14.8 A mask for a tree ────────────────────────────────────────────────────────
def tree_positions(parents: Sequence[int], num_context: int) -> list[int]:
    """The position in the text of each row of a tree, after `num_context` tokens.

    Row 0 is the newest token; parents[0] is -1. Row i is a draft that follows row parents[i], which
    is below i.

    Worked example: parents -1 0 0 1 after 5 tokens are at 5 6 6 7.
    """
    raise NotImplementedError("Exercise 14.8: tree_positions")


# ── 14.8 A mask for a tree ────────────────────────────────────────────────────────
def tree_mask(parents: Sequence[int], num_context: int) -> torch.Tensor:
    """Which keys each row of a tree may see: (n, num_context + n) bool, for n rows as in
    `tree_positions`. The keys are those of the tokens before the tree, then of its rows.

    A row sees every token before the tree, itself, its parent, the parent of that, and so on.

    Worked example: parents -1 0 0 after 1 token: 1100, 1110, 1101.
    """
    raise NotImplementedError("Exercise 14.8: tree_mask")
