"""Chapter 05: forks share blocks until one of them writes."""

from collections import Counter
from typing import ClassVar

import pytest
from helpers import assert_reached
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minikv import BlockPool, BlockTable, OutOfBlocks


class TablesMachine(RuleBasedStateMachine):
    """Random tables, forks and writes against plain dictionaries.

    The model: which table holds which blocks (`holders`), what each table should read at
    each position (`contents`), and the memory itself (`slots`), which is written only where
    `writable_slot` said, after the copies it asked for.
    """

    tables = Bundle("tables")
    seen: ClassVar = Counter()  # of all runs: what they met

    @initialize(num_blocks=st.integers(3, 24), block_size=st.integers(1, 6))
    def begin(self, num_blocks, block_size):
        self.pool, self.block_size = BlockPool(num_blocks), block_size
        self.holders: dict[int, Counter] = {}  # by table, a number: its blocks
        self.contents: dict[int, dict[int, int]] = {}  # by table: position -> value
        self.live: dict[int, BlockTable] = {}
        self.slots: dict[int, int] = {}
        self.clock = 0

    def count(self, block):
        return sum(blocks[block] for blocks in self.holders.values())

    def enter(self, table, contents):
        self.clock += 1
        self.live[self.clock] = table
        self.contents[self.clock] = contents
        self.holders[self.clock] = Counter(table.block_ids)
        return self.clock

    @precondition(lambda self: len(self.live) < 3)  # else there would be little but these
    @rule(target=tables, num_tokens=st.integers(1, 20), value=st.integers())
    def new(self, num_tokens, value):
        name = self.enter(BlockTable(self.pool, self.block_size), {})
        self.grow(name, num_tokens)
        self.write(name, 0, num_tokens, value)
        return name

    @rule(name=tables, num_tokens=st.integers(0, 12))
    def grow(self, name, num_tokens):
        table, before = self.live[name], list(self.live[name].block_ids)
        length = table.num_tokens
        needed = -(-(table.num_tokens + num_tokens) // self.block_size) - len(before)
        free = self.num_free()
        if needed > free:
            with pytest.raises(OutOfBlocks, match=f"blocks needed: {needed}, free: {free}"):
                table.grow(num_tokens)
            assert (table.block_ids, table.num_tokens) == (before, length)
            self.seen["refused growth"] += 1
            return
        table.grow(num_tokens)
        assert table.num_tokens == length + num_tokens
        added = table.block_ids[len(before) :]
        assert table.block_ids[: len(before)] == before and len(added) == max(0, needed)
        assert all(self.count(block) == 0 for block in added)
        self.holders[name].update(added)

    @rule(name=tables, share=st.floats(0, 1))
    def shrink(self, name, share):
        table, before = self.live[name], list(self.live[name].block_ids)
        num_tokens = round(share * table.num_tokens)
        with pytest.raises(ValueError, match="num_tokens"):
            table.shrink(table.num_tokens + 1)
        left = table.num_tokens - num_tokens
        table.shrink(num_tokens)
        assert table.num_tokens == left
        assert table.block_ids == before[: -(-left // self.block_size)]
        self.holders[name].subtract(before[len(table.block_ids) :])
        self.seen["shrunk by blocks"] += 0 < len(table.block_ids) < len(before)
        self.contents[name] = {p: v for p, v in self.contents[name].items() if p < left}

    @rule(name=tables, num_tokens=st.integers(0, 30))
    def grow_and_shrink(self, name, num_tokens):
        """As if it had never grown: the pool gives out the same blocks afterwards."""
        table = self.live[name]
        before = list(table.block_ids), table.num_tokens, list(self.pool._free)
        try:
            table.grow(num_tokens)
        except OutOfBlocks:
            return
        table.shrink(num_tokens)
        assert (table.block_ids, table.num_tokens, self.pool._free) == before

    @rule(name=tables, where=st.integers(0, 99), count=st.integers(1, 6), value=st.integers())
    def write(self, name, where, count, value):
        """At some positions, one behind the other."""
        num_tokens = self.live[name].num_tokens
        start = where % max(1, num_tokens)
        for position in range(start, min(start + count, num_tokens)):
            self.write_at(name, position, value + position)

    def write_at(self, name, position, value):
        table = self.live[name]
        old = table.block_ids[position // self.block_size]
        shared = self.count(old) > 1
        if shared and self.num_free() == 0:
            with pytest.raises(OutOfBlocks, match="blocks needed: 1, free: 0"):
                table.writable_slot(position)
            assert table.block_ids[position // self.block_size] == old
            self.seen["refused copies"] += 1
            return
        slot, copy = table.writable_slot(position)
        new = table.block_ids[position // self.block_size]
        assert copy == ((old, new) if shared else None)
        assert shared or new == old
        if shared:
            self.copy(name, old, new)
            self.seen["copies"] += any(at // self.block_size == old for at in self.slots)
        assert slot == new * self.block_size + position % self.block_size
        self.slots[slot] = self.contents[name][position] = value

    def copy(self, name, old, new):
        """What a table has in place of a block was free, and gets what is in it."""
        assert self.count(new) == 0
        self.holders[name].subtract([old])
        self.holders[name].update([new])
        for offset in range(self.block_size):
            self.slots.pop(new * self.block_size + offset, None)
            if old * self.block_size + offset in self.slots:
                value_there = self.slots[old * self.block_size + offset]
                self.slots[new * self.block_size + offset] = value_there

    @rule(name=tables, where=st.integers(0, 99))
    def replace(self, name, where):
        """By a block with the same content, which another holder lets go of."""
        table = self.live[name]
        with pytest.raises(ValueError, match="index"):
            table.replace(len(table.block_ids), 0)
        if not table.block_ids or not self.num_free():
            return
        index = where % len(table.block_ids)
        old, new = table.block_ids[index], self.pool.allocate()
        self.copy(name, old, new)
        table.replace(index, new)
        assert table.block_ids[index] == new
        self.pool.release(new)
        self.seen["replaced"] += 1

    @rule(target=tables, name=tables, writes=st.integers(0, 3))
    def fork(self, name, writes):
        """The fork, or what it was made of, writes over its newest tokens next."""
        fork = self.live[name].fork()
        assert fork.block_ids == self.live[name].block_ids
        assert fork.num_tokens == self.live[name].num_tokens
        twin = self.enter(fork, dict(self.contents[name]))
        self.write([twin, name][writes % 2], max(0, fork.num_tokens - writes), writes, twin)
        return twin

    @precondition(lambda self: self.live)
    @rule(target=tables, name=tables, blocks=st.integers(0, 3))
    def share(self, name, blocks):
        """Another table begins with the first full blocks of this one."""
        owner = self.live[name]
        count = min(blocks, owner.num_tokens // self.block_size)
        table = BlockTable(self.pool, self.block_size)
        table.share(owner.block_ids[:count])
        assert table.num_tokens == count * self.block_size
        kept = {p: v for p, v in self.contents[name].items() if p < count * self.block_size}
        self.seen["shared"] += count > 0
        return self.enter(table, kept)

    @rule(target=tables, name=consumes(tables))
    def release(self, name):
        self.live.pop(name).release()
        del self.holders[name], self.contents[name]
        return multiple()

    def num_free(self):
        held = {b for blocks in self.holders.values() for b, n in blocks.items() if n}
        return self.pool.num_blocks - len(held)

    @invariant()
    def counts_are_those_of_the_model(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_free == self.num_free()
        for block in range(self.pool.num_blocks):
            assert self.pool.ref_count(block) == self.count(block)

    @invariant()
    def every_table_reads_what_it_wrote(self):
        for name, table in getattr(self, "live", {}).items():
            assert +self.holders[name] == Counter(table.block_ids)
            for position, value in self.contents[name].items():
                block = table.block_ids[position // self.block_size]
                assert self.slots[block * self.block_size + position % self.block_size] == value

    def teardown(self):
        for table in getattr(self, "live", {}).values():
            table.release()
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_blocks


def test_random_operations():
    TablesMachine.seen.clear()
    run_state_machine_as_test(
        TablesMachine, settings=settings(max_examples=60, stateful_step_count=40)
    )
    assert_reached(
        TablesMachine.seen,
        {
            "copies": 40, "refused copies": 30, "replaced": 30, "shared": 30,
            "shrunk by blocks": 20, "refused growth": 40,
        },
    )  # fmt: skip


class WritesInPlace(BlockTable):
    """Broken: it never copies."""

    __slots__ = ()

    def writable_slot(self, position):
        block_id = self.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size, None


def test_the_machine_notices_writes_without_copies(monkeypatch):
    monkeypatch.setitem(globals(), "BlockTable", WritesInPlace)
    machine = TablesMachine()
    machine.begin(num_blocks=4, block_size=2)
    first = machine.new(num_tokens=2, value=0)
    machine.write(first, 0, 1, 1)
    fork = machine.fork(first, 0)
    with pytest.raises(AssertionError):
        machine.write(fork, 0, 1, 2)
