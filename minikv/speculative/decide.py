"""How many drafts pay: what a longer step costs, against the tokens that it may give.

    tokens per second of a step with d drafts = (decodes + chances of the d best drafts) / cost(d)

A draft's chance is that of being kept: that it and all before it are right. The drafts of the whole
batch are sorted by it, and the d with the best rate is taken, 0 included. Both the chances and the
costs are measured while running.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from statistics import median

MOST = 15  # drafts of a sequence in one step
LEVELS = 32  # of a proposal that are told apart
HOPELESS = 0.1  # a draft of less chance is not looked at
GAIN = 1.05  # what drafts must promise at least: the estimates are not better than that


class Chances:
    """How often a draft of each level was right, when those before it were."""

    FORGET = 0.98  # what an old observation counts after a new one

    def __init__(self) -> None:
        # Before anything is known: longer matches are better.
        self._right = [2 * (level + 1) / (level + 2) for level in range(LEVELS)]
        self._seen = [2.0] * LEVELS
        self.of = [right / 2 for right in self._right]  # by level

    def note(self, level: int, is_right: bool) -> None:
        level = min(level, LEVELS - 1)
        self._right[level] = self._right[level] * self.FORGET + is_right
        self._seen[level] = self._seen[level] * self.FORGET + 1
        self.of[level] = self._right[level] / self._seen[level]

    def compare(
        self, levels: Sequence[int], drafts: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Note a proposal, verified or not, once it is known what came: each draft up to the first
        that is wrong."""
        for level, draft, token_id in zip(levels, drafts, token_ids, strict=False):
            self.note(level, draft == token_id)
            if draft != token_id:
                return


class Costs:
    """Seconds of a step by the number of its tokens.

    Of each size the median of the last few is taken; between two known sizes the line. What is not
    known is taken to be cheap, so that it is tried: below the smallest size the cost goes to 0 in
    proportion, above the largest it stays. What is old is forgotten: contexts grow, and other
    programs come and go.
    """

    KEEP, FORGET_AFTER = 5, 400  # samples of a size; steps

    def __init__(self) -> None:
        self._samples: dict[int, tuple[float, ...]] = {}
        self._medians: dict[int, float] = {}
        self._when: dict[int, int] = {}
        self._steps = 0
        self._sizes = [0]
        self._seconds = [0.0]

    def note(self, num_tokens: int, seconds: float) -> None:
        self._steps += 1
        size = rounded(num_tokens)
        samples = self._samples.get(size, ())
        if len(samples) == self.KEEP and self._steps % 4:
            return  # it is known well enough, and this takes microseconds
        self._samples[size] = samples = (*samples, seconds)[-self.KEEP :]
        self._medians[size], self._when[size] = median(samples), self._steps
        for old in [s for s, when in self._when.items() if self._steps - when > self.FORGET_AFTER]:
            del self._samples[old], self._medians[old], self._when[old]
        self._sizes = [0, *sorted(self._samples)]
        self._seconds = [0.0, *(self._medians[size] for size in self._sizes[1:])]

    def of(self, num_tokens: int) -> float:
        """0 if nothing is known."""
        at = bisect(self._sizes, num_tokens)
        if at == len(self._sizes):
            return self._seconds[-1]
        low, high = self._sizes[at - 1], self._sizes[at]
        part = (num_tokens - low) / (high - low)
        return self._seconds[at - 1] * (1 - part) + self._seconds[at] * part


class Account:
    """Whether to ask the drafter at all, in units of a step without drafts.

    What the tokens of a step are worth comes in, what the step costs goes out, asking and drafts in
    vain included: without drafts both are 1. A hundredth of all steps is added, so if drafts never
    pay, looking for them takes a hundredth of the time, and if they pay again, that is found out.
    After a step that asked in vain, the next one does not ask.
    """

    SHARE, FIRST, MOST = 0.01, 2.0, 8.0
    HICCUP = 4.0  # a step that lost more was interrupted by something else

    def __init__(self) -> None:
        self.steps, self.rests = self.FIRST, False

    @property
    def is_open(self) -> bool:
        return self.steps >= 0 and not self.rests

    def note(self, gained: float = 0.0, in_vain: bool = False) -> None:
        """A step, and how much more than one without drafts it gave than it cost. `in_vain`: it
        asked, and verified nothing."""
        self.rests = in_vain
        self.steps = min(self.MOST, self.steps + self.SHARE + max(gained, -self.HICCUP))


def rounded(num_tokens: int) -> int:
    """To five binary digits: 1, 2, …, 31, 32, 34, 36, …, 62, 64, 68, …"""
    shift = max(0, num_tokens.bit_length() - 5)
    return num_tokens >> shift << shift


def how_many(
    chances: Sequence[Sequence[float]],
    cost: Callable[[int], float],
    num_tokens: int,
    num_decodes: int,
    budget: int,
) -> list[int]:
    """How many drafts of each sequence to verify.

    chances: of each sequence's drafts, in order, the chance that it is right if those before it
    are. cost(n): seconds of a step of n tokens. The plan without drafts has `num_tokens`, of which
    `num_decodes` give a token each; at most `budget` drafts may be added.

    Worked example: one sequence, cost 1 ms and 0.25 ms more with each draft, chances 0.8, 0.5, 0.5:
    1 / 1, 1.8 / 1.25, 2.2 / 1.5 and 2.4 / 1.75 tokens per ms. So verify 2.
    """
    candidates = []
    for row, row_chances in enumerate(chances):
        kept = 1.0
        for chance in row_chances:
            kept *= chance
            if kept < HOPELESS:
                break
            candidates.append((kept, row))
    candidates.sort(reverse=True)
    best, most = 0, num_decodes * GAIN
    seconds = cost(num_tokens)
    tokens = float(num_decodes)
    for count, (kept, _) in enumerate(candidates[:budget], 1):
        tokens += kept
        rate = tokens * seconds / cost(num_tokens + count) if seconds > 0 else tokens
        if rate > most:
            best, most = count, rate
    counts = [0] * len(chances)
    for _, row in candidates[:best]:
        counts[row] += 1
    return counts
