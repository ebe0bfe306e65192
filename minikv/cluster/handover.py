"""Who holds which block while K and V go from a prefill worker to a decode worker.

The prefill worker writes straight into the decode worker's blocks, as RDMA does: the decode
worker's processor does not see a write, and cannot stop one. So a block has two lifetimes on each
side, and is free when both have ended:

    decode side    the request that wants the block, and the peer that may still write to it
    prefill side   the sequence that the block belongs to, and the transfers that still read it

A request may end at any time: it is aborted, or its peer is silent. A write ends when the peer says
that it has finished, or when the peer is lost: then the transport refuses whatever it would still
write, or the peer has been silent for so long that it is taken for dead. Messages may come late,
twice, or about what is long forgotten, so every hand-over has a ticket that is never used again.

Nothing here moves a byte or knows a clock: the workers in `apart` tell it what has happened.
"""

from dataclasses import dataclass
from itertools import count

from minikv.blocks import BlockPool
from minikv.errors import OutOfBlocks

Ticket = str


@dataclass
class Landing:
    """The blocks of one hand-over on the decode side. This landing is their holder."""

    peer: str  # the worker that writes
    block_ids: list[int]  # in the order of the prompt
    missing: set[tuple[int, int]]  # (layer, index of the block) that has not arrived yet
    is_wanted: bool = True  # by its request; False once that is aborted, or computed again


class Landings:
    """The decode side: blocks that other workers write into, by ticket.

    begin ─> arrived, arrived, … ─> finished: the caller gets the blocks
                                    finished with pieces missing: released
          aborted or given up ─ waits for finished or lost, then: released
    """

    def __init__(self, pool: BlockPool, num_layers: int):
        self.pool = pool
        self.num_layers = num_layers
        self.landings: dict[Ticket, Landing] = {}

    def begin(self, ticket: Ticket, peer: str, num_blocks: int) -> list[int]:
        """Take blocks that `peer` will write; returns their ids.

        All or nothing: raises OutOfBlocks, changing nothing, if the pool has too few; ValueError
        for a ticket that is in use.
        """
        if ticket in self.landings:
            raise ValueError(f"ticket: {ticket} is in use")
        if num_blocks > self.pool.num_free:
            raise OutOfBlocks(num_blocks, self.pool.num_free)
        block_ids = [self.pool.allocate() for _ in range(num_blocks)]
        missing = {(layer, i) for layer in range(self.num_layers) for i in range(num_blocks)}
        self.landings[ticket] = Landing(peer, block_ids, missing)
        return list(block_ids)

    def arrived(self, ticket: Ticket, layer: int, index: int) -> bool:
        """Note that one layer of block `index` of a landing is there, and right. Returns whether it
        was waited for: not if the ticket is unknown or aborted, or the piece came before."""
        landing = self.landings.get(ticket)
        if landing is None or not landing.is_wanted or (layer, index) not in landing.missing:
            return False
        landing.missing.remove((layer, index))
        return True

    def finished(self, ticket: Ticket) -> list[int] | None:
        """The peer will write no more for this ticket: it has sent everything, or has given up.

        Returns the block ids if the request wants them and every piece has arrived: the caller is
        their holder from now on. Otherwise the blocks are released, and None is returned. A ticket
        that is not known has been dealt with before: None.
        """
        landing = self.landings.pop(ticket, None)
        if landing is None:
            return None
        if landing.is_wanted and not landing.missing:
            return landing.block_ids
        self._release(landing)
        return None

    def aborted(self, ticket: Ticket) -> None:
        """The request does not want its blocks any more. They are kept until `finished` or `lost`:
        the peer has not heard of it yet, and may be writing to them."""
        landing = self.landings.get(ticket)
        if landing is not None:
            landing.is_wanted = False

    def given_up(self, peer: str) -> list[Ticket]:
        """The peer is silent: it may be dead, or slow and still writing. Its blocks are kept until
        `finished` or `lost`. Returns the tickets of the requests that have to be computed again."""
        wanted = [
            ticket for ticket, one in self.landings.items() if one.peer == peer and one.is_wanted
        ]
        for ticket in wanted:
            self.aborted(ticket)
        return wanted

    def lost(self, peer: str) -> None:
        """Nothing of the peer can be written any more: releases all that it was writing. Whoever
        wanted it has given it up before."""
        for ticket in [ticket for ticket, one in self.landings.items() if one.peer == peer]:
            self._release(self.landings.pop(ticket))

    def hold_again(self, pool: BlockPool) -> None:
        """Continue with a pool that was made anew and has given out nothing yet: peers write to the
        same blocks as before, so nothing else may get them."""
        ours = {block_id for one in self.landings.values() for block_id in one.block_ids}
        everything = [pool.allocate() for _ in range(pool.num_free)]
        for block_id in reversed(everything):
            if block_id not in ours:
                pool.release(block_id)
        self.pool = pool

    @property
    def num_blocks(self) -> int:
        """Blocks that are held here."""
        return sum(len(landing.block_ids) for landing in self.landings.values())

    def _release(self, landing: Landing) -> None:
        for block_id in reversed(landing.block_ids):
            self.pool.release(block_id)


class Sendings:
    """The prefill side: blocks that transfers read, by ticket.

    A sequence may finish, or be preempted, while a transfer still reads its blocks. Each transfer
    is one more holder of them. "Finished" may be said to the peer when the ticket is closed and its
    last transfer is done, for it lets the peer give the blocks to another request.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._reading: dict[int, tuple[Ticket, BlockPool, list[int]]] = {}  # by transfer
        self._closed: set[Ticket] = set()

    def post(self, ticket: Ticket, pool: BlockPool, block_ids: list[int]) -> int:
        """A transfer begins to read these blocks of a pool; returns its number. Raises ValueError
        if the ticket is closed: the peer may have given its blocks to another request."""
        if ticket in self._closed:
            raise ValueError(f"ticket: {ticket} is closed")
        for block_id in block_ids:
            pool.acquire(block_id)
        number = next(self._numbers)
        self._reading[number] = ticket, pool, list(block_ids)
        return number

    def done(self, number: int) -> Ticket | None:
        """A transfer has ended, well or not, and its blocks are released. Returns the ticket if it
        is closed and this was its last one: say "finished" now. An unknown number is ignored."""
        if number not in self._reading:
            return None
        ticket, pool, block_ids = self._reading.pop(number)
        for block_id in reversed(block_ids):
            pool.release(block_id)
        if ticket in self._closed and not self._is_reading(ticket):
            self._closed.remove(ticket)
            return ticket
        return None

    def close(self, ticket: Ticket) -> bool:
        """Nothing more will be posted. Returns True if no transfer is under way: say "finished"
        now; otherwise the last `done` returns the ticket."""
        if self._is_reading(ticket):
            self._closed.add(ticket)
            return False
        return True

    @property
    def num_transfers(self) -> int:
        """Transfers that are under way."""
        return len(self._reading)

    def block_ids(self, pool: BlockPool) -> list[int]:
        """The blocks of a pool that are read, each as often as a transfer reads it."""
        reading = [one for _, its, one in self._reading.values() if its is pool]
        return [block_id for block_ids in reading for block_id in block_ids]

    def _is_reading(self, ticket: Ticket) -> bool:
        return any(one == ticket for one, _, _ in self._reading.values())
