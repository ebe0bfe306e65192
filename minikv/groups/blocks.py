"""A pool, a table and a prefix cache of blocks whose parts come and go.

    in use by a sequence that may still look at it     all parts
    in use, of a prompt that is yet to be computed     full groups' parts, and all of the next chunk
    in use, but behind the window                      full groups' parts; the others may be taken
    in the prefix cache alone                          the same, or all parts where a hit may end
    free                                               no part

A sequence that continues after a prefix looks back by one window at once. So a hit may end only
where the blocks of that window have all their parts.

A long prompt gets all its blocks at once, but in window groups only what one window and one chunk
need. What it passes pays for what is next, so those blocks are promised to it: until it has passed
them, no other sequence may need them.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence as Seq
from functools import partial

import numpy as np

from minikv.blocks import BlockPool, BlockTable
from minikv.engine import Classes
from minikv.errors import OutOfBlocks, require
from minikv.groups.layout import GroupedStore
from minikv.paged import KVStore
from minikv.radix import MatchResult, RadixCache

_require = partial(require, part="groups")


def first_seen(position: int, window: int, block_size: int) -> int:
    """The first block that a query at `position`, or any later one, looks at through a window.

    A query sees its own token and the `window - 1` before it. All blocks before the answer are dead
    for the layers with this window; the sequence may still need them for others.

    Worked example, window 6, blocks of 4: a query at 13 sees 8 to 13, so block 2 is the first; one
    at 12 sees 7, too, and block 1.
    """
    return max(position - window + 1, 0) // block_size


def longest_valid(has_windows: Seq[bool], window: int, block_size: int) -> int:
    """How many blocks of a cached prefix a sequence can begin with: the most that are valid for all
    layers.

    Layers that see everything have K and V of each block. `has_windows[i]` says whether the layers
    with a window still have theirs of block i. They need them only where a query after the prefix
    looks back, the first of which stands right behind it.

    Worked example, window 6, blocks of 4, + has them: of + - + + all 4 blocks are valid, because
    the query at 16 sees 11 to 16, in blocks 2 and 3. Of + - - + only 1 is: a query at 16 would miss
    block 2, one at 12 or 8 the blocks before it; one at 4 sees block 0.
    """
    end = index = len(has_windows)
    while index > first_seen(end * block_size, window, block_size):
        index -= 1
        if not has_windows[index]:
            end = index  # what is between this block and the old end no longer matters
    return end


class GroupPool(BlockPool):
    """Blocks that have a part in each group while a sequence may look at them.

    There are more block ids than the memory has whole blocks: `num_free` says how many a sequence
    can have now, `num_whole` for how many whole blocks there is memory.
    """

    def __init__(self, store: GroupedStore, ahead: int, chunk: int):
        """`ahead`: how far a sequence may write ahead of what it has computed, in tokens. `chunk`:
        how many of a prompt's tokens it may compute in one step."""
        self.store, self.layout, self.part_of = store, store.layout, store.part_of
        self.num_groups, num_ids = self.part_of.shape
        super().__init__(num_ids)
        self.full = range(self.layout.num_full)  # groups
        self.windowed = range(self.layout.num_full, self.num_groups)
        self.sees = self.layout.window + ahead  # tokens back from the next one to be written
        self.reach = (self.sees + chunk - 2) // store.block_size + 2  # blocks of window and chunk
        self.part_of[:] = -1
        store.copies.clear()
        self._free_parts = list(range(store.num_parts - 1, -1, -1))
        self._needed = [0] * num_ids  # tables that may look at the block's window groups
        # Blocks that have window groups' parts, which no table needs: the oldest first.
        self._spare: OrderedDict[int, None] = OrderedDict()
        self.promised: set[int] = set()  # each is needed by one table, which counts on it

    @property
    def num_unused(self) -> int:
        """How many block ids have no holder."""
        return len(self._free)

    @property
    def num_whole(self) -> int:
        return min(len(self._free), self._num_parts // self.num_groups)

    @property
    def num_free(self) -> int:
        """The first `reach` blocks of a sequence are whole, the others wait for window parts."""
        rest = self._num_parts - self.reach * self.num_groups
        if rest < 0:
            return self.num_whole
        num_full = self.layout.num_full
        count = self.reach + rest // num_full if num_full else len(self._free)
        return min(len(self._free), count, self.store.num_parts // self.num_groups)

    @property
    def _num_parts(self) -> int:
        """Free, or to be had."""
        return len(self._free_parts) + len(self._spare) * len(self.windowed)

    def num_parts_of(self, block_ids: Iterable[int]) -> int:
        """Of blocks, without those that are free or can be had."""
        ids = list(block_ids)
        num_spare = sum(block_id in self._spare for block_id in ids)
        return int((self.part_of[:, ids] >= 0).sum()) - num_spare * len(self.windowed)

    def allocate(self) -> int:
        """A block with its parts in the full groups. `open` gives it the others."""
        if self.num_whole < 1:
            raise OutOfBlocks(1, 0)
        block_id = super().allocate()
        self._give(block_id, self.full)
        return block_id

    def open(self, block_id: int) -> None:
        """Let a table write a new block, and look at it."""
        self._give(block_id, self.windowed)
        self._needed[block_id] = 1

    def _give(self, block_id: int, groups: range) -> None:
        while len(self._free_parts) < len(groups):
            self._drop_window_parts(next(iter(self._spare)))
        for group in groups:  # a few: one by one is quicker than as an array
            self.part_of[group, block_id] = self._free_parts.pop()

    def release(self, block_id: int) -> None:
        super().release(block_id)
        if self._ref_counts[block_id] == 0:
            parts = self.part_of[:, block_id].tolist()
            self._free_parts += [part for part in parts if part >= 0]
            self.part_of[:, block_id] = -1
            self._needed[block_id] = 0
            self._spare.pop(block_id, None)
            self.promised.discard(block_id)

    def has_windows(self, block_id: int) -> bool:
        """Whether one more table may look at the block's parts in the window groups."""
        return bool(self.part_of[-1, block_id] >= 0) and block_id not in self.promised

    def need(self, block_id: int) -> None:
        """One more table may look at the block's window groups."""
        self._needed[block_id] += 1
        self._spare.pop(block_id, None)

    def pass_by(self, block_id: int, keep: bool) -> None:
        """One table less. `keep`: a hit may end here, so the parts stay as long as the block.
        Otherwise, without the last table, they go to the next sequence that needs memory."""
        self._needed[block_id] -= 1
        self.promised.discard(block_id)
        if self._needed[block_id] == 0 and not keep:
            self._spare[block_id] = None

    def hand_over(self, source: int, target: int) -> bool:
        """Let `target`, a block of the same tokens, have the window groups' parts of `source` if it
        lacks them. False if another table needs them where they are, or counts on them."""
        if not self.promised.isdisjoint((source, target)):
            return False
        if self.has_windows(target):
            return True
        if self._needed[source] > 1:
            return False
        groups = slice(self.layout.num_full, None)
        self.part_of[groups, target] = self.part_of[groups, source]
        self.part_of[groups, source] = -1
        return True

    def _drop_window_parts(self, block_id: int) -> None:
        del self._spare[block_id]
        parts = self.part_of[self.layout.num_full :, block_id]
        self._free_parts += parts.tolist()
        parts[:] = -1

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        held = self.part_of[self.part_of >= 0].tolist()
        all_parts = sorted([*held, *self._free_parts])
        _require(all_parts == list(range(self.store.num_parts)), "a part is lost or held twice")
        for block_id, count in enumerate(self._ref_counts):
            full, windowed = np.split(self.part_of[:, block_id] >= 0, [self.layout.num_full])
            _require(bool((full == (count > 0)).all()), f"parts of block {block_id}")
            _require(len(set(windowed.tolist())) <= 1, f"window parts of block {block_id}")
            needed, has_windows = self._needed[block_id], bool(windowed.all())
            _require(0 <= needed <= count, f"block {block_id}: {needed} tables of {count} holders")
            _require(not needed or has_windows, f"block {block_id} lacks its window")
            is_spare = block_id in self._spare
            _require(not is_spare or has_windows, f"block {block_id} has no spare")
            _require(not (is_spare and needed), f"block {block_id} is spare, and needed")
            is_promised = block_id in self.promised
            _require(not is_promised or needed == 1, f"block {block_id}: promised, and {needed}")


class GroupTable(BlockTable):
    """A table that tells its pool which blocks lie behind the sequence's window, and which it is
    to write next."""

    __slots__ = ("first", "num_open", "num_shared")
    pool: GroupPool

    def __init__(self, pool: GroupPool, block_size: int):
        super().__init__(pool, block_size)
        self.first = 0  # the first block that a later query may look at
        self.num_shared = 0  # blocks at the front that were found in the prefix cache
        self.num_open = 0  # blocks at the front that can be written, or could

    def grow(self, num_tokens: int) -> None:
        super().grow(num_tokens)
        self._open_next()

    def _open_next(self) -> None:
        """Of what is still to be written, open as much as window and chunk need."""
        end = max(self.first, self.num_shared) + self.pool.reach
        new = self.block_ids[self.num_open : end]
        for block_id in new:
            self.pool.open(block_id)
        self.num_open += len(new)
        is_long = self.num_open < len(self.block_ids)
        if is_long or self.pool.promised:
            own = self.block_ids[max(self.first, self.num_shared) : self.num_open]
            promised = self.pool.promised
            (promised.update if is_long else promised.difference_update)(own)

    def share(self, block_ids: Seq[int]) -> None:
        super().share(block_ids)
        self.num_shared = self.num_open = len(self.block_ids)
        self.first = first_seen(self.num_tokens, self.pool.sees, self.block_size)
        for block_id in self.block_ids[self.first :]:
            self.pool.need(block_id)

    def fork(self) -> "GroupTable":
        twin = super().fork()
        assert isinstance(twin, GroupTable)
        twin.first, twin.num_shared, twin.num_open = self.first, self.num_shared, self.num_open
        for block_id in twin.block_ids[twin.first :]:
            self.pool.need(block_id)
        return twin

    def replace(self, index: int, block_id: int) -> None:
        """The same, unless the other block lacks what this sequence still needs, and cannot get it
        from ours: then the table keeps its own."""
        if index < self.first:
            super().replace(index, block_id)
        elif self.pool.hand_over(self.block_ids[index], block_id):
            self.pool.need(block_id)
            self.pool.pass_by(self.block_ids[index], keep=True)
            super().replace(index, block_id)

    def writable_slot(self, position: int) -> tuple[int, tuple[int, int] | None]:
        seen = first_seen(position, self.pool.sees, self.block_size)
        if seen > self.first:
            for index in range(self.first, seen):
                # Where one hit ended, another is likely to end.
                self.pool.pass_by(self.block_ids[index], keep=index < self.num_shared)
            self.first = seen
            self._open_next()
        slot, copy = super().writable_slot(position)
        if copy is not None:
            self.pool.pass_by(copy[0], keep=True)
            self.pool.open(copy[1])
            parts = self.pool.part_of[:, copy].T.tolist()  # (from, to) by group
            self.pool.store.copies[copy] = [tuple(pair) for pair in zip(*parts, strict=True)]
        return slot, copy

    def shrink(self, num_tokens: int) -> None:
        before = self.block_ids.copy()
        super().shrink(num_tokens)
        self._leave(before[max(self.first, len(self.block_ids)) : self.num_open])
        self.num_open = min(self.num_open, len(self.block_ids))

    def release(self) -> None:
        before = self.block_ids
        super().release()
        self._leave(before[self.first : self.num_open])
        self.first = self.num_shared = self.num_open = 0

    def _leave(self, block_ids: list[int]) -> None:
        """After these blocks were released: those that others hold need not wait for this table."""
        for block_id in block_ids:
            if self.pool.ref_count(block_id) > 0:
                self.pool.pass_by(block_id, keep=True)


class GroupCache(RadixCache):
    """Finds the longest prefix that is whole for all groups."""

    pool: GroupPool

    def match(self, token_ids: Seq[int], salt: Hashable = None) -> MatchResult:
        found = super().match(token_ids, salt)
        has_windows = list(map(self.pool.has_windows, found.block_ids))
        end = longest_valid(has_windows, self.pool.sees, self.block_size)
        if end == len(found.block_ids):
            return found
        return super().match(token_ids[: end * self.block_size], salt)

    def check(self) -> None:
        super().check()
        self.pool.check()


def classes_over(store: KVStore, ahead: int, chunk: int) -> Classes:
    """What an engine makes its pool, its tables and its prefix cache of. `ahead` and `chunk` as in
    `GroupPool`."""
    assert isinstance(store, GroupedStore)
    return lambda num_blocks: GroupPool(store, ahead, chunk), GroupTable, GroupCache
