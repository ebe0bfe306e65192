"""Chapter 13: the reference of an exercise that the engine does not have."""

from minikv.blocks import BlockPool
from minikv.course.chapters.ch13_distributed_kv.given import Transfer
from minikv.errors import OutOfBlocks


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
