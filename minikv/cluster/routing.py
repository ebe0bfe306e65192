"""Which worker gets a request: the one that holds its prefix, unless it has too much to do.

    router = ByPrefix(num_workers=4, block_size=16)
    ticket = router.route(names, num_tokens)  # names: of the prompt's whole blocks, in order
    …                                         # ticket.worker computes the prompt
    router.computed(ticket)

A router knows what it has sent and what it was told: `computed` when a prompt is done, `stored` and
`removed` when a worker has new blocks or has evicted some, `lost` and `back` when a worker has died
and when another has taken its place. It derives the loads, in prompt tokens that are still to be
computed, and what each worker probably holds. A wrong belief costs time, but never changes a token,
because the worker looks up the blocks itself.

Other routers balance hit and load, too. llm-d and NVIDIA Dynamo add weighted scores; SGLang's
router sends to the longest match until the loads are too far apart. Here both are in one unit,
tokens: those that wait at a worker, and those of this prompt that it would have to compute.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence as Seq
from typing import NamedTuple

from minikv.errors import require_int

Name = Hashable  # of a block: stands for the block and all before it


class Ticket(NamedTuple):
    """A request on its way."""

    worker: int
    num_tokens: int  # that the worker has to compute, as far as the router knows


class Router:
    """Keeps the loads. A policy is one method: `choose`."""

    RECENT = 50  # requests per worker that `sent` looks back

    def __init__(self, num_workers: int, block_size: int = 16):
        require_int("num_workers", num_workers, 1)
        self.loads: list[float] = [0] * num_workers  # tokens to be computed
        self.sent = [0] * num_workers  # tokens of the recent requests, computed or not
        self.recent: deque[Ticket] = deque()
        self.block_size = require_int("block_size", block_size, 1)
        self.up = [True] * num_workers  # those that are down get nothing

    def route(self, names: Seq[Name], num_tokens: int, session: Hashable = None) -> Ticket:
        """Choose a worker for a prompt of `num_tokens`, and count it there."""
        worker, num_hits = self.choose(names, num_tokens, session)
        ticket = Ticket(worker, num_tokens - num_hits * self.block_size)
        self.loads[worker] += ticket.num_tokens
        self.sent[worker] += ticket.num_tokens
        self.recent.append(ticket)
        if len(self.recent) > self.RECENT * len(self.loads):
            oldest = self.recent.popleft()
            self.sent[oldest.worker] -= oldest.num_tokens
        return ticket

    def choose(
        self, names: Seq[Name], num_tokens: int, session: Hashable
    ) -> tuple[int, int]:  # (worker, blocks that it is believed to hold)
        raise NotImplementedError

    def hits(self, names: Seq[Name]) -> dict[int, int]:
        """How many of the first blocks each worker is believed to hold: none, unless the router
        knows of blocks."""
        return {}

    def computed(self, ticket: Ticket) -> None:
        """The prompt is computed, or its request ended before that."""
        self.loads[ticket.worker] -= ticket.num_tokens

    def stored(self, worker: int, names: Iterable[Name]) -> None:
        """A worker holds these blocks. Only a router that knows of blocks listens."""

    def removed(self, worker: int, names: Iterable[Name]) -> None:
        """A worker has evicted these blocks. Only a router that knows of blocks listens."""

    def lost(self, worker: int) -> None:
        """A worker has died, and what it held is lost. It gets nothing until it is `back`."""
        self.up[worker] = False

    def back(self, worker: int) -> None:
        """A new, empty worker has taken the place of the lost one."""
        self.up[worker] = True

    def least_loaded(self) -> int:
        """The worker with the least to compute; among equals, that with the least recent work.
        Raises ValueError if all are down."""
        up = [one for one, is_up in enumerate(self.up) if is_up]
        return min(up, key=lambda one: (self.loads[one], self.sent[one]))


class RoundRobin(Router):
    """One worker after the other, whatever their loads."""

    def __init__(self, num_workers: int, block_size: int = 16):
        super().__init__(num_workers, block_size)
        self.last = -1

    def choose(self, names: Seq[Name], num_tokens: int, session: Hashable) -> tuple[int, int]:
        number = len(self.loads)
        others = ((self.last + i) % number for i in range(1, number + 1))
        self.last = next(one for one in others if self.up[one])
        return self.last, 0


class LeastLoaded(Router):
    """The worker with the fewest tokens to compute."""

    def choose(self, names: Seq[Name], num_tokens: int, session: Hashable) -> tuple[int, int]:
        return self.least_loaded(), 0


class Sticky(Router):
    """A session stays with its first worker, unless that one has `bound` times the mean load.

    A session that had to move stays where it went.
    """

    def __init__(self, num_workers: int, block_size: int = 16, bound: float = 2.0):
        super().__init__(num_workers, block_size)
        self.bound = bound
        self.sessions: dict[Hashable, int] = {}

    def choose(self, names: Seq[Name], num_tokens: int, session: Hashable) -> tuple[int, int]:
        worker = self.sessions.get(session) if session is not None else None
        limit = self.bound * (sum(self.loads) + num_tokens) / len(self.loads)
        busy = worker is not None and self.loads[worker] + num_tokens > max(limit, num_tokens)
        if worker is None or busy or not self.up[worker]:
            worker = self.least_loaded()
        if session is not None:
            self.sessions[session] = worker
        return worker, 0


class ByPrefix(Router):
    """The worker that will have computed the prompt first: tokens that wait there, and tokens of
    the prompt that it does not hold.

    So a worker with the whole prefix gets the request until its queue is longer than what the
    prefix saves. Then another one computes the prefix, and from there on two hold it: a prefix that
    many requests ask for spreads by itself. A prompt counts as held from the moment it is sent.
    Equal prompts that arrive together still go to different workers, if these have nothing to do:
    waiting for the first would take as long as computing it again.

    A worker that has lately had more than `bound` times the mean gets no credit for the prefixes
    that it holds.

    loads: tokens that wait at each worker. sent: tokens that each worker has had lately. up:
    whether each worker lives. These three are the caller's to change. holders: a dict from the name
    of a block to the set of workers that are believed to hold it. WAITING: what a waiting token
    counts, where one that is held counts 1. SHARED: the share of all workers from which on a block
    counts as held by every one; 1 is never.
    """

    WAITING, SHARED = 1.0, 1.0

    def __init__(self, num_workers: int, block_size: int = 16, bound: float = 1.5):
        super().__init__(num_workers, block_size)
        self.bound = bound
        self.holders: dict[Name, set[int]] = {}

    def choose(self, names: Seq[Name], num_tokens: int, session: Hashable) -> tuple[int, int]:
        """The worker for a prompt of `num_tokens`, and how many of its blocks need no computing
        there; the worker is believed to hold all of `names` from now on (`stored`).

        The candidates are the workers that hold a beginning of the prompt (`hits`) and the least
        loaded one (`least_loaded()`, which raises ValueError if none is up). A worker with `sent`
        above `bound` times the mean counts as one that holds nothing, also in what is returned; the
        mean is that of `sent` over all workers, with this prompt added. The candidate with the
        smallest WAITING times load minus tokens held, its blocks times `block_size`, gets the
        prompt; among equals it is the one with the least `sent`, and then the one with the lowest
        number. At least one token is computed: the number returned is at most
        (num_tokens - 1) // block_size.
        """
        most = self.bound * (sum(self.sent) + num_tokens) / len(self.sent)
        hits = {one: n for one, n in self.hits(names).items() if self.sent[one] <= most}
        hits.setdefault(self.least_loaded(), 0)

        def left(one: int) -> float:
            return self.WAITING * self.loads[one] - hits[one] * self.block_size

        worker = min(hits, key=lambda one: (left(one), self.sent[one], one))
        self.stored(worker, names)
        return worker, min(hits[worker], (num_tokens - 1) // self.block_size)

    def hits(self, names: Seq[Name]) -> dict[int, int]:
        """How many of the first blocks each worker is believed to hold. Workers that do not hold
        the first one are left out."""
        hits: dict[int, int] = {}
        alive: set[int] | None = None
        for place, name in enumerate(names, 1):
            holders = self.holders.get(name, set())
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            for worker in alive:
                hits[worker] = place
        return hits

    def stored(self, worker: int, names: Iterable[Name]) -> None:
        """A worker holds these blocks. A block that at least three workers hold, and SHARED times
        the number of workers, those that are down too, counts as held by all that are up."""
        up = {one for one, is_up in enumerate(self.up) if is_up}
        for name in names:
            holders = self.holders.setdefault(name, set())
            holders.add(worker)
            if len(holders) >= max(3, self.SHARED * len(self.up)):
                holders |= up

    def removed(self, worker: int, names: Iterable[Name]) -> None:
        for name in names:
            holders = self.holders.get(name)
            if holders is not None:
                holders.discard(worker)
                if not holders:
                    del self.holders[name]

    def lost(self, worker: int) -> None:
        super().lost(worker)
        self.removed(worker, list(self.holders))


class ByOwnPrefix(ByPrefix):
    """ByPrefix with two corrections. It is the default of `serve`.

    A block that a quarter of the workers hold belongs to a system prompt. It would draw each new
    conversation to the few workers that have it, until these reach the bound and lose the
    conversations that they hold. If all workers count as holders, only the rest of the prompt
    decides. Where that is wrong, the worker computes the blocks, once.

    Waiting tokens count half. Waiting delays one prompt, but computing what another worker holds
    takes time from all prompts.
    """

    WAITING, SHARED = 1 / 2, 1 / 4


# Chapter 13 compares these. The last one corrects the faults of the one before.
EVERY_POLICY: dict[str, type[Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "sticky sessions": Sticky,
    "by prefix": ByPrefix,
    "by own prefix": ByOwnPrefix,
}
