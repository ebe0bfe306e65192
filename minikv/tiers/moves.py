"""A block's way down and back: the order of copies, holds and releases.

A block of a prefix is at a `Place`: on the device, on the host, or on both. Two rules keep it safe.
Nothing is released before its copy is made, so a failure loses no block. And a block that is about
to be read is held first, because making room for it might evict it.
"""

from collections.abc import Callable

from minikv.blocks import BlockPool

Copy = Callable[[int, int], None]  # from a block of one pool to a block of the other


class Place:
    """Where the K and V of one block are. Each block named here has a holder for it."""

    __slots__ = ("device", "host")

    def __init__(self, device: int | None = None, host: int | None = None):
        self.device, self.host = device, host


def demote(place: Place, device: BlockPool, host: BlockPool, copy: Copy) -> None:
    """Move a block one tier down, from the device to the host; its device block is released.

    `copy(from_block, to_block)` copies K and V from the device to the host. A block that is on the
    host already (write-through) is not copied again. All or nothing: raises ValueError if the block
    is not on the device or is held there by others too, and OutOfBlocks if the host has no room;
    what `copy` raises, KeyboardInterrupt too, is raised again.

    Worked example: device block 3 has one holder, host block 0 is free. copy(3, 0) is called while
    both have a holder. Afterwards the place says device None, host 0, and device block 3 is free.
    """
    if place.device is None or device.ref_count(place.device) != 1:
        raise ValueError(f"device block {place.device}: must have one holder, the prefix cache")
    if place.host is None:
        block_id = host.allocate()
        try:
            copy(place.device, block_id)
        except BaseException:
            host.release(block_id)
            raise
        place.host = block_id
    released, place.device = place.device, None
    device.release(released)


def promote(
    place: Place, device: BlockPool, host: BlockPool, copy: Copy, keep: bool = False
) -> None:
    """Bring a block back from the host to the device; with `keep` it stays on the host as well.

    `copy(from_block, to_block)` copies from the host to the device. A block that is on the device
    already is not copied; without `keep` it still leaves the host. `device.allocate` may first
    demote another block to make room, and a full host then evicts the oldest of its blocks that
    has one holder. All or nothing, as in `demote`: raises ValueError if the block is not on the
    host, and OutOfBlocks if the device has no room; what `copy` raises is raised again.
    """
    if place.host is None:
        raise ValueError("host block None: there is nothing to bring back")
    if place.device is None:
        host.acquire(place.host)
        try:
            block_id = device.allocate()
            try:
                copy(place.host, block_id)
            except BaseException:
                device.release(block_id)
                raise
            place.device = block_id
        finally:
            host.release(place.host)
    if not keep:
        released, place.host = place.host, None
        host.release(released)
