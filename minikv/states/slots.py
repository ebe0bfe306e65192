"""A pool, a table and a prefix cache for sequences that have a state beside their blocks.

    running sequence     its table has a slot, from its first token to its last
    fork                 a slot of its own, with a copy of the whole state
    full block           may carry a copy: the state right after its last token
    free block           carries none

A state stands for exactly the tokens that went through it, and cannot be cut. So a sequence can
begin with a cached prefix only where a copy was kept, and a hit is the longest prefix that ends
with one. Which are kept (Marconi, Pan et al., 2024):

    the last state        of each sequence, at the end of its last full block: a chat goes on there
    a junction            where a prompt parts from one that the cache knows: the next that shares
                          the beginning starts there. The first who leaves computes it again
    every `interval`      tokens of a prompt, if asked for

A copy is carried by the block of the sequence that computes it. That block gets into the prefix
cache when the step has ended, so nobody can find a copy that is not written yet.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

from minikv.backend import AttentionBackend
from minikv.blocks import BlockPool, BlockTable
from minikv.engine import Classes
from minikv.errors import require
from minikv.radix import MatchResult, RadixCache
from minikv.sequence import Sequence
from minikv.states.memory import Counts, StateMemory

_require = partial(require, part="states")


class StatePool(BlockPool):
    """Counts blocks, and the slots of a memory of states."""

    def __init__(self, num_blocks: int, memory: StateMemory):
        super().__init__(num_blocks)
        self.memory = memory
        self.cache: StateCache | None = None  # over this pool, if there is one
        self._free_slots = list(range(memory.num_slots - 1, -1, -1))
        # By block: the slot with its copy. The least recently used first.
        self.copies: OrderedDict[int, int] = OrderedDict()
        self._planned: set[int] = set()  # blocks whose copies this step writes

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def take_slot(self, source: int | None = None) -> int:
        """A slot for a sequence, with a copy of the state in `source`; None: at its start."""
        slot = self._free_slots.pop()
        if source is None:
            self.memory.zero(slot)
        else:
            self.memory.copy(source, slot)
        return slot

    def give_slot(self, slot: int) -> None:
        """Its sequence has ended, or its copy is dropped: the slot is free."""
        self._free_slots.append(slot)

    def begin_step(self) -> None:
        """What was planned before is written."""
        self._planned.clear()

    def plan_copy(self, block_id: int) -> int | None:
        """A slot for the copy that a block will carry when this step has ended. The least recently
        used copy goes for it if need be; None if all others are of this step, too."""
        if len(self.copies) == self.memory.num_copies:
            oldest = next(iter(self.copies), None)
            if oldest is None or oldest in self._planned:
                return None
            self.drop_copy(oldest)
        self.copies[block_id] = self._free_slots.pop()
        self._planned.add(block_id)
        self.memory.counts.made += 1
        return self.copies[block_id]

    def drop_copy(self, block_id: int) -> None:
        """If the block carries a copy, it does no longer."""
        if block_id in self.copies:
            self.give_slot(self.copies.pop(block_id))

    def move_copy(self, source: int, target: int) -> bool:
        """Let `target`, a block with the same tokens behind the same prefix, carry the copy of
        `source`. False if there is none to be carried, or it has one already."""
        if source not in self.copies or target in self.copies:
            return False
        self.copies[target] = self.copies.pop(source)
        return True

    def release(self, block_id: int) -> None:
        super().release(block_id)
        if self._ref_counts[block_id] == 0:
            self.drop_copy(block_id)

    def counts(self) -> Counts:
        """What there is now, and what was since the engine was made."""
        size = len(self.copies) * self.memory.slot_bytes
        return replace(self.memory.counts, copies=len(self.copies), copied_bytes=size)

    def check_slots(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError, naming what is broken, unless each slot has one holder: a table, a
        block with a copy, or nobody."""
        held: list[Any] = [one.slot for one in tables if isinstance(one, StateTable)]
        _require(None not in held, "a sequence runs without a slot")
        slots = [*held, *self.copies.values(), *self._free_slots]
        _require(
            sorted(slots) == list(range(self.memory.num_slots)), "a slot is lost or held twice"
        )
        _require(len(self.copies) <= self.memory.num_copies, "more copies than there is room for")
        _require(all(map(self.ref_count, self.copies)), "a free block carries a copy")


class StateTable(BlockTable):
    """A table of blocks, and a slot."""

    __slots__ = ("_prefix_end", "_prompt_end", "_rolling", "due", "slot")
    pool: StatePool

    def __init__(self, pool: BlockPool, block_size: int):
        super().__init__(pool, block_size)
        self.slot: int | None = None  # from the first `grow` on
        self._prefix_end: int | None = None  # the block whose copy this sequence starts with
        self.due: dict[int, bool] | None = None  # `copies_due`, from its first step on
        self._prompt_end = 0
        self._rolling: int | None = None  # index of the block with the copy of its last state

    def share(self, block_ids: Seq[int]) -> None:
        super().share(block_ids)
        self._prefix_end = self.block_ids[-1] if block_ids else None

    def grow(self, num_tokens: int) -> None:
        """The same. The slot is taken with the first blocks, not before: a sequence that is not
        admitted has none to give back."""
        super().grow(num_tokens)
        if self.slot is None:
            copy = None
            if self._prefix_end is not None:
                copy = self.pool.copies[self._prefix_end]
                self.pool.copies.move_to_end(self._prefix_end)
                self.pool.memory.counts.used += 1
            self.slot = self.pool.take_slot(copy)

    def fork(self) -> "StateTable":
        twin = super().fork()
        assert isinstance(twin, StateTable)
        twin.slot = self.pool.take_slot(self.slot)
        twin.due, twin._prompt_end = self.due, self._prompt_end
        return twin

    def replace(self, index: int, block_id: int) -> None:
        if not self.pool.move_copy(self.block_ids[index], block_id) and index == self._rolling:
            self._rolling = None  # the other block's copy is not this sequence's to drop
        super().replace(index, block_id)

    def release(self) -> None:
        super().release()
        if self.slot is not None:
            self.pool.give_slot(self.slot)
        self.slot = self._prefix_end = self.due = self._rolling = None

    def plan_copies(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        """Which copies to make while the tokens from `num_computed` to `end` are computed, as
        (position, slot): the state before the token at this position."""
        cache, start = self.pool.cache, sequence.num_computed
        planned: list[tuple[int, int]] = []
        if cache is None or sequence.request.request_id < 0:  # of a beam, which the cache never has
            return []
        if self.due is None:
            self.due = self._find_due(sequence, cache)
        due, size = dict(self.due), self.block_size
        if start >= self._prompt_end:  # while it is decoded, its last state is that of each block
            due.setdefault(end // size * size, False)
        for position in sorted(due):
            if start < position <= end:
                planned += self._plan(position, is_rolling=not due[position])
        return planned

    def _plan(self, position: int, is_rolling: bool) -> list[tuple[int, int]]:
        index = position // self.block_size - 1
        if is_rolling:
            if self._rolling is not None:
                self.pool.drop_copy(self.block_ids[self._rolling])
            self._rolling = index
        slot = self.pool.plan_copy(self.block_ids[index])
        return [] if slot is None else [(position, slot)]

    def _find_due(self, sequence: Sequence, cache: "StateCache") -> dict[int, bool]:
        """At a sequence's first step, which begins behind the prefix that it could use."""
        ids, start, size = sequence.token_ids, sequence.num_computed, self.block_size
        known, parts = cache.known(ids[:-1], sequence.request.params.cache_salt)
        self._prompt_end = len(ids) // size * size
        if sequence.num_preemptions == 0:
            self.pool.memory.counts.recomputed_tokens += max(0, known - start)
        junction = known if parts else start
        return copies_due(start, junction, len(ids), size, self.pool.memory.interval)


def copies_due(
    start: int, junction: int, num_tokens: int, block_size: int, interval: int = 0
) -> dict[int, bool]:
    """Where the state of a sequence is copied while its prompt is computed.

    start: the tokens that it need not compute, because a copy was found behind them; junction:
    where its prompt parts from one that the prefix cache has, `start` or more. Both are whole
    blocks. num_tokens: of the prompt. Returns positions in tokens, all of them ends of full blocks
    behind `start`. True is a copy that stays, because others may come who share these tokens: at
    the junction, and at multiples of `interval` (rounded down to blocks; 0: none). False is the
    last state, at the end of the last full block: it goes once the sequence has a later copy.

    Worked example, blocks of 4: a prompt of 23 tokens parts from another one after 12, and no copy
    is there: {12: True, 20: False}. The next one that shares these 12 starts there: {20: False}.
    """
    end = num_tokens // block_size * block_size
    due = {end: False} if end > start else {}
    if junction > start:
        due[junction] = True
    if every := interval // block_size * block_size:
        due |= dict.fromkeys(range(start // every * every + every, end + 1, every), True)
    return due


class StateCache(RadixCache):
    """Finds the longest prefix that ends with a copy of the state."""

    pool: StatePool

    def __init__(self, pool: BlockPool, block_size: int):
        super().__init__(pool, block_size)
        self.pool.cache = self

    def match(self, token_ids: Seq[int], salt: Hashable = None) -> MatchResult:
        found = super().match(token_ids, salt)
        end = len(found.block_ids)
        while end > 0 and found.block_ids[end - 1] not in self.pool.copies:
            end -= 1
        if end == len(found.block_ids):
            return found
        return super().match(token_ids[: end * self.block_size], salt)

    def known(self, token_ids: Seq[int], salt: Hashable) -> tuple[int, bool]:
        """Of how many tokens the blocks are here, with a copy behind them or not; and whether other
        tokens are known behind them. If not, an earlier sequence ended there, and its copy has been
        evicted."""
        found = super().match(token_ids, salt)
        return found.num_tokens, bool(found.node.children)

    def clear(self) -> None:
        """The same; and copies are of weights that may be gone, whoever still holds the blocks."""
        super().clear()
        for block_id in list(self.pool.copies):
            self.pool.drop_copy(block_id)


def classes_over(attention: AttentionBackend, memory: StateMemory) -> Classes:
    """What an engine makes its pool, its tables and its prefix cache of. `attention` is told of a
    new pool."""

    def make(num_blocks: int) -> StatePool:
        attention.states = StatePool(num_blocks, memory)
        return attention.states

    return make, StateTable, StateCache
