"""The host's blocks in two sizes over one pool: small ones, and runs of them, which are large ones.

    blocks   0 1 2 3 | 4 5 6 7 | 8 9 10 11     groups of `length` = 4 neighbours
             a run   | S S . . | free          S: a small block with a name

A run is a whole group: it is named, evicted and written as one. Its blocks are found by their own
names and read one by one, so a prompt that needs only the first three gets those. A small block
comes from a group that is broken already, as long as there is one.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from minikv.blocks import BlockPool
from minikv.tiers.host import HostPool, Leaving
from minikv.tiers.names import Name


class RunPool(HostPool):
    """A HostPool that also has runs of `length` blocks. `leaving` is called once for a run, with
    its first block."""

    def __init__(
        self, num_blocks: int, length: int, leaving: Leaving = lambda block_id, name: None
    ):
        super().__init__(num_blocks, leaving)
        self.length = length
        self._whole = list(range(num_blocks // length - 1, -1, -1))  # groups without any holder
        self._free = list(range(num_blocks // length * length, num_blocks))  # of broken groups
        self._num_free_in: dict[int, int] = {}  # broken group: free blocks, if there are any
        self._runs: dict[int, int] = {}  # group that is a run: holders of its blocks

    @property
    def num_free(self) -> int:
        idle = sum(self._size(block_id) for block_id in self._idle)
        return len(self._free) + len(self._whole) * self.length + idle

    def add_run(self, names: Seq[Name]) -> int | None:
        """Name a run without a holder, for content that the caller copies now; returns its first
        block. None if there is no room, or if one of the names is in use.

        Room is made in the least recently used group. A small block that has one of the names loses
        it, so that there is only one copy.
        """
        taken = [self._blocks[name] for name in names if name in self._blocks]
        if any(block_id not in self._idle or self._is_run(block_id) for block_id in taken):
            return None
        group = self._whole[-1] if self._whole else self._oldest_group()
        if group is None:
            return None
        for block_id in taken:
            self._forget(block_id)
        for block_id in [b for b in self._idle if b // self.length == group]:
            self.leaving(block_id, self._names[block_id])
            self._forget(block_id)
        self._whole.remove(group)
        self._runs[group] = 0
        first = group * self.length
        for block_id, name in enumerate(names, first):
            self._blocks[name], self._names[block_id] = block_id, name
        self._idle[first] = None
        return first

    def run_of(self, block_id: int) -> list[Name] | None:
        """The names of the run that a block is part of, in order; None for a small block."""
        if not self._is_run(block_id):
            return None
        first = self._unit(block_id)
        return [self._names[one] for one in range(first, first + self.length)]

    def touch(self, name: Name) -> None:
        unit = self._unit(self._blocks[name])
        if unit in self._idle:
            self._idle.move_to_end(unit)

    def allocate(self) -> int:
        while not self._free and (self._whole or self._idle):
            if self._whole:
                self._break(self._whole.pop())
            else:
                block_id = next(iter(self._idle))
                self.leaving(block_id, self._names[block_id])
                self._forget(block_id)
        block_id = BlockPool.allocate(self)
        self._count(block_id, -1)
        return block_id

    def acquire(self, block_id: int) -> None:
        if self._is_run(block_id):
            self._ref_counts[block_id] += 1
            self._runs[block_id // self.length] += 1
            self._idle.pop(self._unit(block_id), None)
        else:
            super().acquire(block_id)

    def release(self, block_id: int) -> None:
        if self.ref_count(block_id) > 0 and self._is_run(block_id):
            group = block_id // self.length
            self._ref_counts[block_id] -= 1
            self._runs[group] -= 1
            if self._runs[group] == 0:
                self._idle[self._unit(block_id)] = None
            return
        free = len(self._free)
        super().release(block_id)
        if len(self._free) > free:
            self._count(block_id, 1)

    def _after_plan(self, late: list[int]) -> None:
        for block_id in late:
            self._free.append(block_id)
            self._count(block_id, 1)

    def forget_all(self) -> None:
        """As in HostPool. A run in use becomes small blocks."""
        for group in [group for group, holders in self._runs.items() if holders]:
            del self._runs[group]
            first = group * self.length
            for block_id in range(first, first + self.length):
                if self._ref_counts[block_id] == 0:
                    self._free.append(block_id)
                    self._count(block_id, 1)
        super().forget_all()

    def check(self) -> None:
        groups = [*self._whole, *self._runs]
        if len(set(groups)) != len(groups):
            raise AssertionError("host: a group is free and a run, or free twice")
        whole = {b for g in self._whole for b in self._members(g)}
        free, idle = {*self._free, *whole}, {b for one in self._idle for b in self._blocks_of(one)}
        if len(free) != len(self._free) + len(whole) or free & idle:
            raise AssertionError("host: a block is free twice")
        in_runs = {b for g in self._runs for b in self._members(g)}
        unheld = {i for i, count in enumerate(self._ref_counts) if count == 0}
        late = set(self._late or ())
        if unheld - in_runs != (free | idle | late) - in_runs or free & in_runs:
            raise AssertionError("host: free blocks and reference counts differ")
        if {block: name for name, block in self._blocks.items()} != self._names:
            raise AssertionError("host: names and blocks differ")
        if not idle | in_runs <= self._names.keys() or free & self._names.keys():
            raise AssertionError("host: an idle block has no name, or a free one has")
        for group, holders in self._runs.items():
            if holders != sum(self._ref_counts[b] for b in self._members(group)):
                raise AssertionError("host: the holders of a run are counted wrongly")
            if (holders == 0) != (group * self.length in self._idle):
                raise AssertionError("host: a run in use is idle, or the other way round")
        counted = {g: sum(b in free for b in self._members(g)) for g in {b // self.length for b in
                   self._free if b < self.num_blocks // self.length * self.length}}  # fmt: skip
        if counted != self._num_free_in or self.length in counted.values():
            raise AssertionError("host: the free blocks of a group are counted wrongly")

    # ── Groups ────────────────────────────────────────────────────────────────

    def _members(self, group: int) -> range:
        return range(group * self.length, (group + 1) * self.length)

    def _is_run(self, block_id: int) -> bool:
        return block_id // self.length in self._runs

    def _unit(self, block_id: int) -> int:
        """The first block of its run; a small block is a unit by itself."""
        return block_id // self.length * self.length if self._is_run(block_id) else block_id

    def _size(self, unit: int) -> int:
        return self.length if self._is_run(unit) else 1

    def _blocks_of(self, unit: int) -> Iterator[int]:
        return iter(range(unit, unit + self._size(unit)))

    def _forget(self, block_id: int) -> None:
        """Free an idle block or run."""
        if not self._is_run(block_id):
            super()._forget(block_id)
            self._count(block_id, 1)
            return
        del self._idle[block_id], self._runs[block_id // self.length]
        for one in self._members(block_id // self.length):
            del self._blocks[self._names.pop(one)]
        self._whole.append(block_id // self.length)

    def _break(self, group: int) -> None:
        """Let a whole group's blocks be allocated one by one."""
        self._free += reversed(self._members(group))
        self._num_free_in[group] = self.length

    def _count(self, block_id: int, change: int) -> None:
        """Note that a block has become free, or is no longer free. A group whose blocks are all
        free becomes whole again."""
        group = block_id // self.length
        if group >= self.num_blocks // self.length:
            return  # the rest behind the last group
        count = self._num_free_in[group] = self._num_free_in.get(group, 0) + change
        if count == self.length and change > 0:
            for one in self._members(group):
                self._free.remove(one)
            self._whole.append(group)
        if count in (0, self.length):
            del self._num_free_in[group]

    def _oldest_group(self) -> int | None:
        """The least recently used of the groups without a holder; None if there is none."""
        counts = dict(self._num_free_in)
        for unit in self._idle:
            group = unit // self.length
            counts[group] = counts.get(group, 0) + self._size(unit)
            if counts[group] == self.length:
                return group
        return None
