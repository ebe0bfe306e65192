"""Finding what was written before: where a text's last few tokens last occurred.

The index is a dictionary from a few tokens to the place behind them. A place is known as soon as
something stands there.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

END = -1  # no token: between two texts in one index
LONGEST = 24  # tokens of a match that are compared


class Match(NamedTuple):
    """The end of a text occurs in `token_ids` too, up to `place`."""

    token_ids: list[int]
    place: int  # of what came next
    length: int  # tokens that are equal before it


class Text:
    """Tokens that can be searched for the end of this text, or of another."""

    def __init__(self, width: int):
        """`width`: the shortest match, in tokens."""
        self.width = width
        self.token_ids: list[int] = []
        self._places: dict[Hashable, int] = {}  # salt and `width` tokens: the last place behind

    def extend(self, token_ids: Sequence[int], salt: Hashable = None) -> None:
        """Add tokens. They can be found only with the same salt."""
        text, width, places = self.token_ids, self.width, self._places
        first = max(width, len(text))
        text += token_ids
        for place in range(first, len(text)):
            places[(salt, *text[place - width : place])] = place

    def find(self, other: list[int], salt: Hashable = None) -> Match | None:
        """The last place behind the last `width` tokens of `other`."""
        place = self._places.get((salt, *other[-self.width :]))
        if place is None:
            return None
        return Match(self.token_ids, place, common_end(self.token_ids, place, other))


def common_end(text: list[int], place: int, other: list[int]) -> int:
    """How many tokens before `place` equal the end of another text, `LONGEST` at most."""
    most = min(LONGEST, place, len(other))
    for length in range(most):
        token_id = text[place - 1 - length]
        if token_id != other[-1 - length] or token_id == END:
            return length
    return most
