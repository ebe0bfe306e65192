"""Chapter 13: references of exercises that the engine does not have."""

from collections.abc import Callable, Sequence

from minikv.blocks import BlockPool
from minikv.course.chapters.ch13_distributed_kv.given import Transfer
from minikv.errors import OutOfBlocks
from minikv.tiers.costs import Link
from minikv.tiers.entry import EntryError


def fetch_prefix(
    names: Sequence[bytes],
    store,
    unpack: Callable[[bytes, bytes], object],
    link: Link,
    block_bytes: int,
    block_seconds: float,
) -> list:
    """The contents of the first blocks of a prefix, from a store that other engines use, too.

    names: of the blocks that the device lacks, in order.
    store.contains(names) -> [True, False, …]   what it claims to have, in one round trip
    store.get_many(names) -> [entry, None, …]   what it has, in one round trip; None: not there
    unpack(entry, name): the content, or EntryError for an entry that is not this block's
    link.seconds(num_bytes): how long it takes to fetch that many bytes

    What the store says may be out of date when the entries are asked for, and an entry may be
    anything. Both calls raise OSError if the store does not answer: then it counts as empty.

    Only a beginning is of use. All of the beginning that the store claims is fetched if `link`
    brings it sooner than it can be computed, at `block_seconds` per block; otherwise nothing is.
    Each of the two calls is made at most once, and only if it can be of use.

    Worked example: a link of 10 ms and 1 ms per block, 3 ms to compute a block. The store claims
    blocks 0 to 7 of 9: 18 ms to fetch, 24 ms to compute, so it is asked for 8. It sends seven,
    because block 5 has been evicted. The result has 5 contents.
    """
    if not names:
        return []
    try:
        here = store.contains(names)
        count = next((i for i, is_here in enumerate(here) if not is_here), len(names))
        if count == 0 or link.seconds(count * block_bytes) >= count * block_seconds:
            return []
        entries = store.get_many(names[:count])
    except OSError:
        return []
    contents: list = []
    for name, entry in zip(names, entries, strict=False):
        if entry is None:
            break
        try:
            contents.append(unpack(entry, name))
        except EntryError:
            break
    return contents


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

    def stopped(self, number: int, num_written: int) -> None:
        """The sender says that it writes no more, and has written its first `num_written` blocks:
        all of them, or fewer if it gave up. A message about a transfer that is over is ignored."""
        transfer = self.transfers.get(number)
        if transfer is None:
            return
        if transfer.wanted and num_written == len(transfer.blocks):
            transfer.complete = True
        else:
            self.forget(number)

    def cancel(self, number: int) -> None:
        """The request is no longer wanted. The sender is told so, and will answer `stopped`; until
        then it may still write."""
        transfer = self.transfers.get(number)
        if transfer is None:
            return
        transfer.wanted = False
        if transfer.complete:
            self.forget(number)

    def died(self, sender: str) -> None:
        """A sender is dead and its connection closed: it writes no more, and says nothing more.
        What it had completed is whole."""
        for number, transfer in list(self.transfers.items()):
            if transfer.sender == sender and not transfer.complete:
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


def what_many_caches_find() -> dict[str, float]:
    """Hit rates of four workers, before anything is simulated.

    Conversations take turns, always in the same order: A, B, C, …, A, B, C, … Each turn asks for
    the 10 full blocks of its conversation, which never change; nothing is shared. A worker keeps 40
    blocks and evicts what was used longest ago. The first rounds are over, and the answers are what
    is found from then on, in per cent of the blocks asked for.

    "one worker, 13"       a single worker with 160 blocks, 13 conversations
    "round robin, 12"      four workers in turn, 12 conversations
    "round robin, 13"      four workers in turn, 13 conversations
    "by prefix, 13"        each turn goes where its conversation was, 13 conversations; new ones
                           go to the worker that has the fewest
    "shared store, 13"     four workers in turn, 13 conversations, and a store of 160 blocks behind
                           them, to which every block is written; found on the worker or in the
                           store
    "blocks fetched"       blocks per turn that go over the network to a worker, in the same case

    And with caches of unlimited size, each turn on a worker drawn at random:

    "random, second turn"  found by the second turn of a conversation
    "random, third turn"   found by the third turn
    "8 workers, second"    found by the second turn, with eight workers instead of four
    """
    return {
        "one worker, 13": 100,
        "round robin, 12": 100,
        "round robin, 13": 0,
        "by prefix, 13": 100,
        "shared store, 13": 100,
        "blocks fetched": 10,
        "random, second turn": 25,
        "random, third turn": 43.75,
        "8 workers, second": 12.5,
    }
