"""Chapter 14: references of exercises that the engine does not have, or has in a faster form."""

from collections.abc import Sequence

import torch

from minikv.blocks import BlockTable
from minikv.radix import RadixCache


def propose_ngram(token_ids: Sequence[int], width: int, most: int) -> list[int]:
    """At most `most` drafts: what came after the latest earlier occurrence of the last `width`
    tokens, which are at least 1.

    An occurrence ends before the last token; it may share tokens with the last `width`. There are
    no drafts if there is none, or if the text has fewer than `width` tokens. If the copy reaches
    the end of the text, it goes on with the drafts themselves. `token_ids` is not changed.

    Worked example, width 2: after 7 8 1 7 8 come 1 7 8 1 7 …, after 7 8 1 2 come none.
    """
    text = list(token_ids)
    for place in range(len(text) - 1, width - 1, -1):  # where the copy begins
        if text[place - width : place] == text[-width:]:
            for index in range(most):
                text.append(text[place + index])
            return text[len(token_ids) :]
    return []


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
    full = num_computed // table.block_size
    cache.insert(token_ids[: full * table.block_size], table.block_ids[:full])
    return full


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
    p, q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
    matched = sum(a * b for a, b in zip(p, q, strict=True))
    kept = q[0]  # a is the most likely token
    written = [kept * (token == 0) + (1 - kept) * a for token, a in enumerate(p)]
    return {
        "matched": matched,
        "matched distance": 0.0,
        "top": kept,
        "top distance": sum(abs(a - b) for a, b in zip(written, p, strict=True)) / 2,
        "rejection": sum(min(a, b) for a, b in zip(p, q, strict=True)),
        "right report": "2",
    }


def expected_tokens(num_drafts: int, acceptance: float) -> float:
    """Tokens that a step gives on average, if each draft is right with this probability as long as
    all before it are: the drafts that are kept, and one more.

    Worked example: 2 drafts at 0.5 give 1 + 0.5 + 0.25 = 1.75 tokens.
    """
    return sum(acceptance**place for place in range(num_drafts + 1))


def drafts_that_pay(cost: Sequence[float], acceptance: float) -> int:
    """The number of drafts with the most tokens per second; of equal ones the fewest.

    cost[n - 1] is the seconds of a step over n tokens, so at most len(cost) - 1 drafts can be
    verified. 0 is an answer: no drafts.

    Worked example: cost 1.0, 1.2, 1.6 and acceptance 0.5 give 1, 1.25 and 1.09 tokens per second:
    1 draft.
    """
    rates = [expected_tokens(k, acceptance) / seconds for k, seconds in enumerate(cost)]
    return rates.index(max(rates))


def tree_positions(parents: Sequence[int], num_context: int) -> list[int]:
    """The position in the text of each row of a tree, after `num_context` tokens.

    Row 0 is the newest token; parents[0] is -1. Row i is a draft that follows row parents[i], which
    is below i.

    Worked example: parents -1 0 0 1 after 5 tokens are at 5 6 6 7.
    """
    positions: list[int] = []
    for parent in parents:
        positions.append(num_context if parent < 0 else positions[parent] + 1)
    return positions


def tree_mask(parents: Sequence[int], num_context: int) -> torch.Tensor:
    """Which keys each row of a tree may see: (n, num_context + n) bool, for n rows as in
    `tree_positions`. The keys are those of the tokens before the tree, then of its rows.

    A row sees every token before the tree, itself, its parent, the parent of that, and so on.

    Worked example: parents -1 0 0 after 1 token: 1100, 1110, 1101.
    """
    mask = torch.zeros(len(parents), num_context + len(parents), dtype=torch.bool)
    mask[:, :num_context] = True
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] = mask[parent]
        mask[row, num_context + row] = True
    return mask
