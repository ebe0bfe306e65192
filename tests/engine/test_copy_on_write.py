"""Chapter 05: forks share blocks until one of them writes."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from minikv import BlockPool, BlockTable, OutOfBlocks


def make_table(pool, num_tokens, block_size=4):
    table = BlockTable(pool, block_size)
    table.grow(num_tokens)
    return table


def state(pool, *tables):
    """All that an operation could have changed."""
    counts = [pool.ref_count(block) for block in range(pool.num_blocks)]
    return counts, pool.num_free, [(list(t.block_ids), t.num_tokens) for t in tables]


def test_a_fork_shares_every_block():
    pool = BlockPool(4)
    table = make_table(pool, 10)
    fork = table.fork()
    assert (fork.block_ids, fork.num_tokens) == (table.block_ids, 10)
    assert [pool.ref_count(b) for b in table.block_ids] == [2, 2, 2]
    assert pool.num_free == 1  # forking took nothing


def test_each_grows_on_its_own():
    pool = BlockPool(6)
    table = make_table(pool, 8)
    fork = table.fork()
    table.grow(4)
    fork.grow(1)
    assert table.block_ids[:2] == fork.block_ids[:2]
    assert table.block_ids[2] != fork.block_ids[2]
    assert (table.num_tokens, fork.num_tokens) == (12, 9)


def test_one_owner_writes_in_place():
    pool = BlockPool(2)
    table = make_table(pool, 6)
    before = state(pool, table)
    assert table.writable_slot(5) == (table.block_ids[1] * 4 + 1, None)
    assert state(pool, table) == before


def test_two_owners_the_first_writer_copies_and_the_second_writes_in_place():
    pool = BlockPool(4)
    table = make_table(pool, 6)
    fork = table.fork()
    full, shared = table.block_ids
    slot, copy = fork.writable_slot(5)
    new = fork.block_ids[1]
    assert new not in (full, shared)
    assert (slot, copy) == (new * 4 + 1, (shared, new))
    assert table.block_ids == [full, shared] and fork.block_ids == [full, new]
    assert [pool.ref_count(b) for b in (full, shared, new)] == [2, 1, 1]
    assert fork.writable_slot(5) == (slot, None)  # once is enough
    assert table.writable_slot(5) == (shared * 4 + 1, None)  # alone again


def test_three_owners_copy_twice():
    pool = BlockPool(3)
    tables = [make_table(pool, 3)]
    tables += [tables[0].fork(), tables[0].fork()]
    (shared,) = tables[0].block_ids
    copies = [table.writable_slot(2)[1] for table in tables]
    assert copies == [(shared, tables[0].block_ids[0]), (shared, tables[1].block_ids[0]), None]
    assert len({table.block_ids[0] for table in tables}) == 3
    assert pool.num_free == 0


def test_a_fork_of_a_fork():
    pool = BlockPool(8)
    first = make_table(pool, 5)
    second = first.fork()
    third = second.fork()
    assert [pool.ref_count(b) for b in first.block_ids] == [3, 3]
    second.writable_slot(4)  # takes its own second block; the third's is still the first's
    assert third.block_ids == first.block_ids != second.block_ids
    fourth = second.fork()
    assert fourth.writable_slot(0)[1] == (first.block_ids[0], fourth.block_ids[0])
    assert pool.ref_count(first.block_ids[0]) == 3
    for table in (first, second, third, fourth):
        table.release()
    assert pool.num_free == 8


def test_a_shared_block_is_copied_wherever_it_stands():
    """A write to an earlier block copies only that block."""
    pool = BlockPool(5)
    table = make_table(pool, 8)
    fork = table.fork()
    first, second = table.block_ids
    slot, copy = table.writable_slot(1)
    assert copy == (first, table.block_ids[0]) and slot == table.block_ids[0] * 4 + 1
    assert table.block_ids[1] == second and fork.block_ids == [first, second]


def test_with_an_empty_pool_nothing_changes():
    pool = BlockPool(2)
    table = make_table(pool, 7)
    fork = table.fork()
    before = state(pool, table, fork)
    for one in (table, fork):
        with pytest.raises(OutOfBlocks, match="blocks needed: 1, free: 0"):
            one.writable_slot(6)
    assert state(pool, table, fork) == before
    fork.release()
    assert table.writable_slot(6) == (table.block_ids[1] * 4 + 2, None)


def test_a_holder_of_another_kind_counts_too():
    """The prefix cache holds a block by `acquire`; its block is not written either."""
    pool = BlockPool(2)
    table = make_table(pool, 4)
    (cached,) = table.block_ids
    pool.acquire(cached)
    assert table.writable_slot(3)[1] == (cached, table.block_ids[0])
    assert pool.ref_count(cached) == 1


class TablesMachine(RuleBasedStateMachine):
    """Random tables, forks and writes against plain dictionaries.

    The model: which table holds which blocks (`holders`), what each table should read at
    each position (`contents`), and the memory itself (`slots`), which is written only where
    `writable_slot` said, after the copies it asked for.
    """

    tables = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
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

    @rule(target=tables, num_tokens=st.integers(0, 12))
    def new(self, num_tokens):
        name = self.enter(BlockTable(self.pool, self.block_size), {})
        self.grow(name, num_tokens)
        return name

    @rule(name=tables, num_tokens=st.integers(0, 12))
    def grow(self, name, num_tokens):
        table, before = self.live[name], list(self.live[name].block_ids)
        needed = -(-(table.num_tokens + num_tokens) // self.block_size) - len(before)
        free = self.num_free()
        if needed > free:
            with pytest.raises(OutOfBlocks):
                table.grow(num_tokens)
            assert table.block_ids == before
            return
        table.grow(num_tokens)
        added = table.block_ids[len(before) :]
        assert table.block_ids[: len(before)] == before and len(added) == max(0, needed)
        assert all(self.count(block) == 0 for block in added)
        self.holders[name].update(added)

    @rule(name=tables, where=st.integers(0, 10**6), value=st.integers())
    def write(self, name, where, value):
        table = self.live[name]
        if not table.num_tokens:
            return
        position = where % table.num_tokens
        old = table.block_ids[position // self.block_size]
        shared = self.count(old) > 1
        if shared and self.num_free() == 0:
            with pytest.raises(OutOfBlocks):
                table.writable_slot(position)
            return
        slot, copy = table.writable_slot(position)
        new = table.block_ids[position // self.block_size]
        assert copy == ((old, new) if shared else None)
        assert shared or new == old
        if shared:
            assert self.count(new) == 0
            self.holders[name].subtract([old])
            self.holders[name].update([new])
            for offset in range(self.block_size):
                self.slots.pop(new * self.block_size + offset, None)
                if old * self.block_size + offset in self.slots:
                    value_there = self.slots[old * self.block_size + offset]
                    self.slots[new * self.block_size + offset] = value_there
        assert slot == new * self.block_size + position % self.block_size
        self.slots[slot] = self.contents[name][position] = value

    @rule(target=tables, name=tables)
    def fork(self, name):
        fork = self.live[name].fork()
        assert fork.block_ids == self.live[name].block_ids
        return self.enter(fork, dict(self.contents[name]))

    @precondition(lambda self: self.live)
    @rule(target=tables, name=tables, blocks=st.integers(0, 3))
    def share(self, name, blocks):
        """Another table begins with the first full blocks of this one."""
        owner = self.live[name]
        count = min(blocks, owner.num_tokens // self.block_size)
        table = BlockTable(self.pool, self.block_size)
        table.share(owner.block_ids[:count])
        kept = {p: v for p, v in self.contents[name].items() if p < count * self.block_size}
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


TestTablesMachine = TablesMachine.TestCase
TestTablesMachine.settings = settings(max_examples=60, stateful_step_count=40)


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
    first = machine.new(num_tokens=2)
    machine.write(first, 0, 1)
    fork = machine.fork(first)
    with pytest.raises(AssertionError):
        machine.write(fork, 0, 2)
