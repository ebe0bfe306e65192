"""The host's blocks: a pool whose free blocks remember what is in them.

A block without a holder is free, even if its content has a name. Such a named block is allocated
for something else only when no other block is free, the least recently used first. So swapped-out
sequences and evicted prefixes share one memory, and none of it is reserved for either.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minikv.blocks import BlockPool
from minikv.tiers.names import Name

Leaving = Callable[[int, Name], None]


class HostPool(BlockPool):
    """A BlockPool with names. `leaving(block_id, name)` is called before a named block is allocated
    for something else: the last moment to read it."""

    def __init__(self, num_blocks: int, leaving: Leaving = lambda block_id, name: None):
        super().__init__(num_blocks)
        self.leaving = leaving
        self._blocks: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named and free, oldest first
        # While a step is planned: blocks that are free once it has run (see `plan`).
        self._late: list[int] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_named(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: Name) -> bool:
        return name in self._blocks

    def __iter__(self) -> Iterator[tuple[Name, int]]:
        """Every name and its block."""
        return iter(self._blocks.items())

    def find(self, name: Name) -> int | None:
        """The block of this name."""
        return self._blocks.get(name)

    def remember(self, block_id: int, name: Name) -> None:
        """Name the content of a block that the caller holds."""
        if self.ref_count(block_id) == 0 or name in self._blocks or block_id in self._names:
            raise ValueError(f"block {block_id} is free, or it or the name is taken")
        self._blocks[name], self._names[block_id] = block_id, name

    def touch(self, name: Name) -> None:
        """Make a name the most recently used."""
        if self._blocks[name] in self._idle:
            self._idle.move_to_end(self._blocks[name])

    @contextmanager
    def plan(self) -> Iterator[None]:
        """While a step is planned, no block that becomes free is allocated again: the copies to the
        host come before the plan runs, which may still have to read the block to swap in a
        sequence."""
        late = self._late = []
        try:
            yield
        finally:
            self._late = None
            self._free += late

    def allocate(self) -> int:
        """As in BlockPool; when all others are in use, the oldest named block loses its name."""
        if not self._free and self._idle:
            block_id = next(iter(self._idle))
            self.leaving(block_id, self._names[block_id])
            self._forget(block_id)
        return super().allocate()

    def acquire(self, block_id: int) -> None:
        """As in BlockPool; a free block that has a name can be held again."""
        if block_id in self._idle:
            del self._idle[block_id]
            self._ref_counts[block_id] = 1
        else:
            super().acquire(block_id)

    def release(self, block_id: int) -> None:
        """As in BlockPool; a named block keeps its content as long as there is room."""
        super().release(block_id)
        if self.ref_count(block_id) > 0:
            return
        if block_id in self._names:
            self._free.pop()
            self._idle[block_id] = None
        elif self._late is not None:
            self._late.append(self._free.pop())

    def forget_all(self) -> None:
        """Forget all names; `leaving` is not called. Blocks in use stay in use."""
        for block_id in list(self._idle):
            self._forget(block_id)
        self._blocks.clear()
        self._names.clear()

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free) or free & idle:
            raise AssertionError("host: a block is free twice")
        if {i for i, count in enumerate(self._ref_counts) if count == 0} != free | idle:
            raise AssertionError("host: free blocks and reference counts differ")
        if {block: name for name, block in self._blocks.items()} != self._names:
            raise AssertionError("host: names and blocks differ")
        if not idle <= self._names.keys() or free & self._names.keys():
            raise AssertionError("host: an idle block has no name, or a free one has")

    def _forget(self, block_id: int) -> None:
        del self._idle[block_id], self._blocks[self._names.pop(block_id)]
        self._free.append(block_id)
