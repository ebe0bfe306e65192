"""Distributed K and V: names, routing, hand-over, a store that is down.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("13.1") in the notebook, or in a terminal: python -m minikv check 13.1
"""

import hashlib
import json
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq

from minikv.blocks import BlockPool
from minikv.cluster import breaker, routing
from minikv.cluster.routing import Name
from minikv.course.chapters.ch13_distributed_kv.given import Transfer
from minikv.errors import OutOfBlocks


# ── 13.1 Block names that cannot collide ──────────────────────────────────────────
def identity_of(facts: dict[str, str]) -> bytes:
    """32 bytes for what K and V depend on besides the tokens: model, dtypes, layout, version.

    Equal facts give equal bytes, in whatever order they are listed and in every process. Facts that
    differ in any name or value give other bytes, and nobody can find two that do not.
    """
    raise NotImplementedError("Exercise 13.1: identity_of")


# ── 13.1 Block names that cannot collide ──────────────────────────────────────────
def spell(salt: Hashable) -> str | None:
    """A text that no other salt has, the same in every process.

    Salts are None, strings, bytes, integers, booleans, floats, and tuples of these. "1", 1, 1.0 and
    True are four salts. Anything else has no text that is the same in every process: None. That
    includes an instance of a subclass of these types, such as a member of an enum: its class
    decides what it prints.
    """
    raise NotImplementedError("Exercise 13.1: spell")


# ── 13.1 Block names that cannot collide ──────────────────────────────────────────
def block_name(parent: bytes, token_ids: Seq[int]) -> bytes:
    """The name of the block that holds these tokens and follows `parent`: 32 bytes.

    Token ids are from 0 up to 2**31, and a block may have any number of them. Equal tokens after an
    equal parent have an equal name in every process, and nobody can find others that have it.
    """
    raise NotImplementedError("Exercise 13.1: block_name")


def root_name(identity: bytes, salt: Hashable = None) -> bytes | None:
    """The name that a salt's first blocks hang from. None for a salt without a fixed spelling:
    only None, strings, bytes, numbers and tuples of these are the same in every process."""
    spelled = spell(salt)
    if spelled is None:
        return None
    return hashlib.sha256(b"root" + identity + spelled.encode()).digest()


def block_names(root: bytes, token_ids: Seq[int], block_size: int) -> list[bytes]:
    """The names of the whole blocks of a prefix, first block first."""
    names, name = [], root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        name = block_name(name, token_ids[start : start + block_size])
        names.append(name)
    return names


class ByPrefix(routing.ByPrefix):
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

    # ── 13.2 Route by prefix, with a bound ────────────────────────────────────────
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
        raise NotImplementedError("Exercise 13.2: ByPrefix.choose")

    # ── 13.2 Route by prefix, with a bound ────────────────────────────────────────
    def hits(self, names: Seq[Name]) -> dict[int, int]:
        """How many of the first blocks each worker is believed to hold. Workers that do not hold
        the first one are left out."""
        raise NotImplementedError("Exercise 13.2: ByPrefix.hits")

    # ── 13.2 Route by prefix, with a bound ────────────────────────────────────────
    def stored(self, worker: int, names: Iterable[Name]) -> None:
        """A worker holds these blocks. A block that at least three workers hold, and SHARED times
        the number of workers, those that are down too, counts as held by all that are up."""
        raise NotImplementedError("Exercise 13.2: ByPrefix.stored")


class Receiver:
    """The decode side of hand-overs. It takes blocks before K and V arrive and tells the sender
    their ids; the sender's network card writes into `memory` by itself, at any moment until the
    sender says that it has stopped, or is dead and its connection closed.

    pool: blocks of this worker. memory: what lies in each. transfers: by number, those that have
    begun and whose blocks neither a request nor the pool has taken over. A `Transfer` has `sender`,
    `blocks`, `wanted` (True at first) and `complete` (False at first).
    """

    def __init__(self, num_blocks: int):
        self.pool = BlockPool(num_blocks)
        self.memory: list = [None] * num_blocks
        self.transfers: dict[int, Transfer] = {}
        self.last = 0

    def begin(self, sender: str, num_blocks: int) -> tuple[int, list[int]]:
        """A number for the transfer, and the blocks to write. Raises OutOfBlocks if there are not
        enough; then nothing has changed."""
        if num_blocks > self.pool.num_free:
            raise OutOfBlocks(num_blocks, self.pool.num_free)
        blocks = [self.pool.allocate() for _ in range(num_blocks)]
        self.last += 1
        self.transfers[self.last] = Transfer(sender, blocks)
        return self.last, blocks

    # ── 13.3 A hand-over that survives failures: broken, fix it ───────────────────
    def stopped(self, number: int, num_written: int) -> None:
        """The sender says that it writes no more, and has written its first `num_written` blocks:
        all of them, or fewer if it gave up. A message about a transfer that is over is ignored."""
        transfer = self.transfers.get(number)
        if transfer is None:
            return
        transfer.complete = True

    # ── 13.3 A hand-over that survives failures: broken, fix it ───────────────────
    def cancel(self, number: int) -> None:
        """The request is no longer wanted. The sender is told so, and will answer `stopped`; until
        then it may still write."""
        transfer = self.transfers.get(number)
        if transfer is None:
            return
        self.forget(number)

    # ── 13.3 A hand-over that survives failures: broken, fix it ───────────────────
    def died(self, sender: str) -> None:
        """A sender is dead and its connection closed: it writes no more, and says nothing more.
        What it had completed is whole."""
        for number, transfer in list(self.transfers.items()):
            if transfer.sender == sender and transfer.wanted and not transfer.complete:
                self.forget(number)

    def take(self, number: int) -> list[int] | None:
        """The blocks of a complete transfer, once: from now on they are the request's, which
        releases them. None if it is not complete."""
        transfer = self.transfers.get(number)
        if transfer is None or not transfer.complete:
            return None
        return self.transfers.pop(number).blocks

    def forget(self, number: int) -> None:
        """Give the blocks back."""
        for block in self.transfers.pop(number).blocks:
            self.pool.release(block)


class Breaker(breaker.Breaker):
    """Says whether to call something that may fail.

        closed      every call goes through
        open        after a failure: none does, for `first` seconds
        half-open   then one does, as a trial. If it works, the breaker closes. If it fails, the
                    next trial is twice as long away, at most `most` seconds.

    Usable from several threads. A trial that reports nothing counts as a failure.

    Worked example, first = 0.5: a call fails at 0.0 s. `allows` is False until 0.5 s, then True for
    one caller. That call fails as well, at 0.6 s: the next trial is at 1.6 s.
    """

    def __init__(
        self, first: float = 0.5, most: float = 30.0, clock: Callable[[], float] = time.monotonic
    ):
        self.first, self.most, self.clock = first, most, clock
        self.wait = 0.0  # seconds from a failure to the next trial; 0: closed
        self._next_trial = 0.0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the last call failed."""
        return self.wait > 0

    # ── 13.4 A circuit breaker for the store ──────────────────────────────────────
    def allows(self) -> bool:
        """Whether to call now. After True, report with `worked` or `failed`.

        While it is open: False until the time of the next trial, then True once. With that True the
        wait is doubled, and the next trial is a whole wait from now. So no other caller goes
        through while the trial runs, nor if it never reports.
        """
        raise NotImplementedError("Exercise 13.4: Breaker.allows")

    # ── 13.4 A circuit breaker for the store ──────────────────────────────────────
    def worked(self) -> bool:
        """Close. Returns whether it was open."""
        raise NotImplementedError("Exercise 13.4: Breaker.worked")

    # ── 13.4 A circuit breaker for the store ──────────────────────────────────────
    def failed(self) -> bool:
        """Open, from now on: the next trial is a whole wait from now. If it was open, the wait is
        as long as before, because the trial has doubled it already. Returns whether it was closed.
        """
        raise NotImplementedError("Exercise 13.4: Breaker.failed")
