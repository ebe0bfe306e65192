"""Finding what was written before: the longest earlier occurrence of a text's end.

The index is that of a compressor (LZ77's hash chains): a dictionary from the last few tokens to the
place behind them, and from each place to the one before that had the same tokens.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

END = -1  # no token: between two texts in one index
LONGEST = 24  # tokens of a match that are compared


class Match(NamedTuple):
    """The end of a text occurs in `token_ids` too, up to `place`."""

    token_ids: list[int]
    place: int  # of what came next
    length: int  # tokens that are equal before it


class Text:
    """Tokens that can be searched for earlier occurrences of their own end, or of another's."""

    def __init__(self, width: int, tries: int, salt: Hashable = None):
        """`width`: the shortest match, in tokens. `tries`: how many places are compared."""
        self.width, self.tries, self.salt = width, tries, salt
        self.token_ids: list[int] = []
        self._newest: dict[Hashable, int] = {}  # the last tokens: the place behind them
        self._before: list[int] = []  # by place: the one before with the same tokens; 0 for none

    def extend(self, token_ids: Iterable[int], salt: Hashable = None) -> None:
        """Add tokens. They can be found only with the same salt."""
        text, newest, before, width = self.token_ids, self._newest, self._before, self.width
        for token_id in token_ids:
            text.append(token_id)
            key = (salt, *text[-width:])
            before.append(newest.get(key, 0))
            newest[key] = len(text)

    def find_own(self) -> Match | None:
        """The longest earlier occurrence of this text's own end; of equal ones the last."""
        return self._longest(self.token_ids, self._before[-1]) if self.token_ids else None

    def find(self, other: list[int], salt: Hashable = None) -> Match | None:
        """The longest occurrence of another text's end."""
        return self._longest(other, self._newest.get((salt, *other[-self.width :]), 0))

    def _longest(self, other: list[int], place: int) -> Match | None:
        best = None
        for _ in range(self.tries):
            if place < self.width:
                break
            length = common_end(self.token_ids, place, other)
            if length >= self.width and (best is None or length > best.length):
                best = Match(self.token_ids, place, length)
            place = self._before[place - 1]
        return best


def common_end(text: list[int], place: int, other: list[int]) -> int:
    """How many tokens before `place` equal the end of another text, `LONGEST` at most."""
    most = min(LONGEST, place, len(other))
    for length in range(most):
        token_id = text[place - 1 - length]
        if token_id != other[-1 - length] or token_id == END:
            return length
    return most
