"""Which drafts are kept. Two rules, both exact.

`keep_equal`: draw the target's own token at every position; keep drafts while they equal these
tokens; write the target's token in place of the first that does not. Every token that is written is
the target's own, drawn with the number that belongs to its position, so **the tokens are those
without speculation**, at any temperature.

`rejection_sample`: for drafts that were sampled themselves, from a distribution q that is known.
A draft x is kept with probability min(1, p(x) / q(x)). In place of the first that is not kept, a
token is drawn from max(p - q, 0), normalised (Leviathan et al., 2023; Chen et al., 2023). The
distribution of what is written is p, though the tokens are others. It keeps more: sum min(p, q) of
the drafts, where `keep_equal` keeps sum p q.
"""

from collections.abc import Callable, Sequence

import torch


def keep_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The tokens that are written: the target's own `token_ids` (k + 1, for k drafts) up to and
    with the first that differs from its draft; all of them if none does."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == token_ids[kept]:
        kept += 1
    return list(token_ids[: kept + 1])


def rejection_sample(
    p: torch.Tensor, q: torch.Tensor, drafts: Sequence[int], uniform: Callable[[], float]
) -> list[int]:
    """The tokens that are written: drafts that are kept, and one more.

    p (k + 1, vocab_size): the target's distributions, after temperature, top-k and top-p; q (k,
    vocab_size): those that the drafts were really drawn from. `uniform` gives a fresh number in
    [0, 1) at each call. Fresh means independent also of the numbers that the drafts were drawn
    with: sharing them is a bug that several engines had, and the text is biased by it.
    """
    written: list[int] = []
    for place, draft in enumerate(drafts):
        if uniform() * float(q[place, draft]) >= float(p[place, draft]):
            rest = (p[place] - q[place]).clamp(min=0)
            return [*written, draw(rest / rest.sum(), uniform())]
        written.append(draft)
    return [*written, draw(p[len(drafts)], uniform())]


def draw(p: torch.Tensor, number: float) -> int:
    """The token at a uniform number in the cumulative distribution p (vocab_size,). Raises
    ValueError if p is 0 everywhere or not a number somewhere."""
    sums = p.double().cumsum(0)
    total = float(sums[-1])
    if not total > 0:
        raise ValueError(f"p: must have a sum above 0, was {total}")
    index = int(torch.searchsorted(sums, torch.tensor(number * total), right=True))
    return min(index, int(p.nonzero()[-1]))  # rounding may leave the sum below the number
