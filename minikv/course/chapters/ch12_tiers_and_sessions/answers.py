"""Chapter 12: references of exercises that the engine does not have."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from minikv.blocks import BlockPool


def what_two_tiers_find() -> dict[str, float]:
    """Hit rates of a device with 60 blocks and a host behind it, before anything is simulated.

    12 conversations take turns, always in the same order: A, B, … L, A, B, … Each turn asks for the
    10 full blocks of its conversation, which never change. Nothing is shared. Each tier evicts what
    was used longest ago. Every conversation has had its first turn; all later turns count, and all
    answers but the last are in per cent of the blocks asked for.

    write-back      a block is in one tier. What is evicted from the device is written to the host;
                    what is fetched from the host leaves it.
    write-through   a block is written to the host as soon as it is there, and stays. What is
                    evicted from the device is already below, and is dropped.

    "device alone"         found on the device, without a host
    "write-back, 80"       found in both tiers together, with 80 blocks of host
    "on the device"        the part of it that is found on the device
    "write-through, 80"    found in both tiers together, with 80 blocks of host
    "write-through, 120"   the same, with 120 blocks of host
    "random order"         found on the device, without a host, if each turn is that of a
                           conversation drawn at random, all equally likely
    "blocks written down"  blocks that a turn writes to the host on average: write-back, 80 blocks
    """
    return {
        "device alone": 0,
        "write-back, 80": 100,
        "on the device": 0,
        "write-through, 80": 0,
        "write-through, 120": 100,
        "random order": 100 * 60 / 120,
        "blocks written down": 10,
    }


class HostTier:
    """K and V of blocks below the device. A block is named by all tokens up to its end, so that a
    name is found only after the same beginning.

    names: of a prefix, block by block. contents: its blocks, as many as names.
    `blocks` holds the block of each name that is here, the least recently used name first, and
    `memory` what was written to each block. write(memory, block, content) writes there, or raises
    OSError and writes nothing.
    """

    def __init__(self, num_blocks: int, write: Callable[[list, int, object], None]):
        self.pool = BlockPool(num_blocks)
        self.memory: list = [None] * num_blocks
        self.blocks: OrderedDict[str, int] = OrderedDict()
        self.write = write

    def store(self, names: Sequence[str], contents: Sequence[object]) -> None:
        """Keep each block of a prefix that is not here yet. One that cannot be written is left out,
        and the next ones are still tried: a later store may fill the gap. If no block is free, the
        least recently used one is forgotten."""
        for name, content in zip(names, contents, strict=True):
            if name in self.blocks:
                continue
            if self.pool.num_free == 0:
                self.pool.release(self.blocks.popitem(last=False)[1])
            block = self.pool.allocate()
            try:
                self.write(self.memory, block, content)
            except OSError:
                self.pool.release(block)
                continue
            self.blocks[name] = block

    def find(self, names: Sequence[str]) -> int:
        """How many blocks of a prefix can be used from here: those before the first that is
        missing."""
        count = 0
        while count < len(names) and names[count] in self.blocks:
            count += 1
        return count

    def load(self, names: Sequence[str]) -> list:
        """The contents of the blocks that `find` counts. They then count as the most recently used,
        the first block as the newest: a prefix loses its end before its beginning."""
        count = self.find(names)
        for name in reversed(names[:count]):
            self.blocks.move_to_end(name)
        return [self.memory[self.blocks[name]] for name in names[:count]]
