"""Chapter 12: the reference of an exercise that the engine does not have."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from minikv.blocks import BlockPool


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
        """Keep each block of a prefix that is not here yet. One that cannot be written is left out
        and takes no memory; the next ones are still tried, as a later store may fill the gap. If no
        block is free, the least recently used one is forgotten."""
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
