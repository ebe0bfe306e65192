"""Who guesses the next tokens. A drafter that is wrong may cost time, never a token."""

from collections.abc import Callable, Sequence as Seq
from typing import NamedTuple, Protocol

import torch

from minikv.sequence import Sequence
from minikv.speculative.decide import LEVELS
from minikv.speculative.text import END, Match, Text


class Proposal(NamedTuple):
    """What may come next. `levels` says how well each token is founded, as a whole number from 0
    on. What a level is worth is learned while running."""

    token_ids: list[int]
    levels: Seq[int] = range(LEVELS)


class Drafter(Protocol):
    """Whoever inherits must write `propose` or `propose_all`."""

    reads_hidden: bool = False  # `propose_all` gets hidden states

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """At most `most` tokens after `sequence.token_ids`, or None. Asked in the steps that decode
        the sequence, as long as drafts pay; what is not worth verifying is not verified."""
        return None

    def propose_all(
        self, sequences: list[Sequence], most: list[int], hidden: torch.Tensor
    ) -> list[Proposal | None]:
        """`propose` for several sequences at once. hidden (S, hidden_size): the target's last
        hidden states, which the newest token of each sequence was drawn from."""
        return [self.propose(one, limit) for one, limit in zip(sequences, most, strict=True)]

    def accepted(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many drafts of a sequence were verified, and so many of them were right. Its
        `token_ids` have the new tokens."""
        return

    def left(self, sequence: Sequence) -> None:
        """A sequence has ended and will not be asked for again."""
        return

    def start_over(self) -> None:
        """Forget every sequence: something was interrupted. Those that live will be proposed for
        again, with all tokens that they have."""
        return


# guess(depth, newest (S,)) -> the most likely next token of each of S sequences, and its chance,
# (S,) each. `newest` is what was guessed last; at depth 0, nothing.
Guess = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def in_a_row(guess: Guess, most: list[int], depth: int, least: float) -> list[Proposal | None]:
    """At most `depth` drafts for each sequence, each guessed after the one before, as long as the
    chance that all of them are right is at least `least`."""
    token_ids: list[list[int]] = [[] for _ in most]
    levels: list[list[int]] = [[] for _ in most]
    alive, limits, newest = torch.ones(len(most)), torch.tensor(most), torch.empty(0)
    for place in range(min(depth, max(most))):
        p, newest = guess(place, newest)
        alive = alive * p * (place < limits)
        if not (alive >= least).any():
            break
        for row, (draft, sure, reach) in enumerate(
            zip(newest.tolist(), p.tolist(), alive.tolist(), strict=True)
        ):
            if reach >= least:
                token_ids[row].append(draft)
                levels[row].append(int(sure * LEVELS))
    return list(map(Proposal, token_ids, levels))


class Followed:
    """A sequence's text, and the place in some text where what comes next is expected."""

    __slots__ = ("match", "own")

    def __init__(self, own: Text):
        self.own = own
        self.match: Match | None = None

    def catch_up(self, token_ids: list[int]) -> None:
        """Add the tokens that are new. A match goes on while they are what it said."""
        new = token_ids[len(self.own.token_ids) :]
        match, at = self.match, 0
        if match is not None:
            text, place, length = match
            while at < len(new) and place + at < len(text) and text[place + at] == new[at]:
                at += 1
            self.match = Match(text, place + at, length + at) if at == len(new) else None
        self.own.extend(new)

    def next(self, most: int) -> list[int]:
        """What the match says. Text that repeats its own end goes on repeating it."""
        assert self.match is not None
        text, place, _ = self.match
        drafts = text[place : place + most]
        if text is self.own.token_ids:
            return (drafts * most)[:most]
        return drafts[: drafts.index(END)] if END in drafts else drafts


class NgramDrafter(Drafter):
    """Prompt lookup: what came after the last tokens when they last occurred in the request's own
    text (Saxena, 2023; vLLM's "ngram")."""

    width = 3

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self.followed: dict[Sequence, Followed] = {}

    def left(self, sequence: Sequence) -> None:
        self.followed.pop(sequence, None)

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        followed = self.followed.get(sequence)
        if followed is None:
            followed = self.followed[sequence] = Followed(Text(self.width))
        followed.catch_up(sequence.token_ids)
        if followed.match is None:
            followed.match = self.search(sequence, followed.own)
        match = followed.match
        if match is None:
            return None
        return Proposal(followed.next(most), range(match.length, match.length + most))

    def search(self, sequence: Sequence, own: Text) -> Match | None:
        return own.find(own.token_ids)


class SuffixDrafter(NgramDrafter):
    """The longest match of the request's own text and of earlier answers (Oliaro et al.,
    SuffixDecoding, 2024). Of each text the last place behind the same two tokens is looked at: the
    longest of eight was right no more often.

    Answers are found only by requests of the same salt, as cached prefixes are: how fast a text is
    written would tell what others have read. The newest answers of `memory` to 2 `memory` tokens
    are kept.
    """

    width = 2

    def __init__(self, memory: int = 16_384):
        self.memory = memory
        super().__init__()

    def start_over(self) -> None:
        super().start_over()
        self.answers = [Text(self.width), Text(self.width)]

    def left(self, sequence: Sequence) -> None:
        super().left(sequence)
        newer, _ = self.answers
        overlap = self.width  # of the prompt, so that an answer's first tokens can be found
        first = max(0, len(sequence.request.prompt_ids) - overlap)
        newer.extend([*sequence.token_ids[first:], END], sequence.request.params.cache_salt)
        if len(newer.token_ids) >= self.memory:
            self.answers = [Text(self.width), newer]

    def search(self, sequence: Sequence, own: Text) -> Match | None:
        salt, end = sequence.request.params.cache_salt, own.token_ids
        matches = [own.find(end), *(text.find(end, salt) for text in self.answers)]
        found = [match for match in matches if match is not None]
        return max(found, key=lambda match: match.length, default=None)
