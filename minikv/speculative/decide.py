"""How many drafts pay: what a longer step costs, against the time that it may save.

    a sequence's tokens of a step = 1 + the chances of its drafts
    its time per token            = cost of the step / its tokens

A draft's chance is that of being kept: that it and all before it are right. The mean of the time
per token over all sequences is to be the least. So every sequence counts alike: one that gets ten
tokens at once does not make up for many that wait for it. No drafts at all is one of the choices.
Both the chances and the costs are measured while running.
"""

from collections.abc import Iterable, Iterator, Sequence

MOST, TOGETHER = 15, 64  # drafts of a sequence in one step; of all
LEVELS = 32  # of a proposal that are told apart
HOPELESS = 0.1  # a draft of less chance is not looked at
GAIN = 1.1  # what drafts must promise at least: the step after them is slower, too, by a tenth


class Chances:
    """How often a draft of each level was right, when those before it were."""

    FORGET = 0.98  # what an old observation counts after a new one

    def __init__(self) -> None:
        self._right, self._seen = [0.0] * LEVELS, [0.0] * LEVELS  # drafts, by level

    def of_drafts(self, levels: Sequence[int], count: int) -> Iterator[float]:
        """The chances of the first `count` drafts of a proposal, one after the other. Two drafts
        that were right as often as those of all levels are added to those of each."""
        usual = (1 + sum(self._right)) / (2 + sum(self._seen))
        for level in levels[:count]:
            level = min(level, LEVELS - 1)
            yield (self._right[level] + 2 * usual) / (self._seen[level] + 2)

    def note(self, level: int, is_right: bool) -> None:
        level = min(level, LEVELS - 1)
        self._right[level] = self._right[level] * self.FORGET + is_right
        self._seen[level] = self._seen[level] * self.FORGET + 1

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
    """Seconds of a step by the number of its tokens: a straight line through the last hundred steps
    or so. Contexts grow, and other programs come and go, so what is old is forgotten.

    Before a draft was verified, a row is thought to be cheap. If it were thought to be dear, no
    draft would be verified, and what a row costs would never be measured."""

    FORGET = 0.99  # what an old step counts after a new one
    ROW = 0.1  # of what a token of a step costs: another one, before that is known
    DOUBT = 1.0  # how soon it is known: so many squares of a difference in tokens
    HICCUP = 2.0  # times as long as expected, and more is not believed

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = 0.0  # of the steps, and their means
        self._squares = self._products = 0.0  # of differences from these means
        self.row = 0.0  # seconds that one more token costs

    def note(self, num_tokens: int, seconds: float) -> float:
        """A step. Returns what is believed of its seconds."""
        if self._weight > 0:
            seconds = min(seconds, self.HICCUP * self.of(num_tokens))
        self._weight = self._weight * self.FORGET + 1
        more = num_tokens - self._tokens
        self._tokens += more / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        self._squares = self._squares * self.FORGET + more * (num_tokens - self._tokens)
        self._products = self._products * self.FORGET + more * (seconds - self._seconds)
        a_token = self._seconds / self._tokens
        row = (self._products + self.DOUBT * self.ROW * a_token) / (self._squares + self.DOUBT)
        self.row = min(max(row, 0.0), a_token)  # the step itself costs something, too
        return seconds

    def of(self, num_tokens: int) -> float:
        """0 if nothing is known."""
        return self._seconds + self.row * (num_tokens - self._tokens)


class Account:
    """Whether to ask the drafter at all, in units of a step without drafts.

    What the tokens of a step are worth comes in, what the step costs goes out, asking and drafts in
    vain included: without drafts both are 1. To this 0.005 steps are added each time, so if drafts
    never pay, looking for them takes 0.5 % of the time, and if they pay again, that is found out.
    """

    SHARE, FIRST, MOST = 0.005, 1.0, 8.0
    HICCUP = 4.0  # a step that lost more was interrupted, or so it seems the first time

    def __init__(self) -> None:
        self.steps = self.FIRST
        self.last = 0.0  # what the last step that lost something gained

    @property
    def is_open(self) -> bool:
        return self.steps >= 0

    def note(self, gained: float = 0.0) -> None:
        """A step, and how much more than one without drafts it gave than it cost."""
        believed = max(gained, min(-self.HICCUP, 2 * self.last))
        self.last = min(gained, 0.0) or self.last
        self.steps = min(self.MOST, self.steps + self.SHARE + believed)


def how_many(
    chances: Iterable[Iterable[float]], step: float, row: float, budget: int
) -> tuple[list[int], float]:
    """How many drafts of each sequence to verify, and what a token that they give is worth, in
    steps without drafts.

    chances: of each sequence's drafts, in order, the chance that it is right if those before it
    are. step: seconds without drafts; row: more with each of them. At most `budget` are verified.

    Worked example: one sequence, a step of 1 ms and 0.25 ms more with each draft, chances 0.8, 0.5,
    0.5: 1 / 1, 1.25 / 1.8, 1.5 / 2.2 and 1.75 / 2.4 ms per token. So verify 2. Beside a second
    sequence, which has none, the mean is 1, 0.97, 1.09, 1.24 ms: less than GAIN is saved, verify 0.
    """
    places, kept_at, saved_at, counts = [], [], [], []
    for place, of_drafts in enumerate(chances):
        counts.append(0)
        kept = tokens = 1.0
        for chance in of_drafts:
            kept *= chance
            if kept < HOPELESS:
                break
            places.append(place)
            kept_at.append(kept)
            saved_at.append(1 / tokens - 1 / (tokens + kept))  # of a step; less with each draft
            tokens += kept
    best_first = sorted(range(len(places)), key=saved_at.__getitem__, reverse=True)[:budget]
    steps = least = float(len(counts))  # for one token of each sequence, and the time of these
    more, best, worth = 0.0, 0, 0.0
    for count, draft in enumerate(best_first if step > 0 else (), 1):
        steps -= saved_at[draft]
        more += kept_at[draft]
        time = GAIN * steps * (1 + count * row / step)
        if time < least:
            least, best, worth = time, count, (len(counts) / steps - 1) / more
    for draft in best_first[:best]:
        counts[places[draft]] += 1
    return counts, worth
