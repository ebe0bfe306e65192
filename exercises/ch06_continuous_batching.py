"""Continuous batching: which sequences compute how many tokens, and which give way.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("06.1") in the notebook, or in a terminal: python -m minikv check 06.1
"""

from bisect import insort

from minikv import scheduler
from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig
from minikv.errors import OutOfBlocks
from minikv.radix import MatchResult, RadixCache
from minikv.scheduler import Plan, Policy, _seats, first_come_first_served
from minikv.sequence import Sequence


class Scheduler(scheduler.Scheduler):
    """Owns the waiting and the running sequences, and gives and takes their blocks.

    `host_pool` counts the blocks of host memory; it is None unless preemption is "swap".
    """

    def __init__(
        self, config: EngineConfig, pool: BlockPool, cache: RadixCache | None, *,
        block_table: type[BlockTable] = BlockTable, policy: Policy = first_come_first_served,
    ):  # fmt: skip
        self.config, self.pool, self.cache = config, pool, cache
        self.block_table, self.policy = block_table, policy
        self.host_pool = BlockPool(config.host_blocks) if config.host_blocks else None
        self.waiting: list[Sequence] = []  # both in the policy's order
        self.running: list[Sequence] = []
        self.num_preemptions = self.num_swaps_out = self.num_swaps_in = 0
        self.num_looked_up_tokens = self.num_hit_tokens = 0  # see COUNTERS

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for admission."""
        insort(self.waiting, sequence, key=self.policy)

    # ── 06.3 The loop ─────────────────────────────────────────────────────────────
    def schedule(self) -> Plan:
        """Decide the next step and reserve its blocks. An empty plan: nothing can run now.

        A running sequence with one token left to compute is a decode, unless it has yet to
        fork; all decodes get that token. The others are prefills: they get chunks, in order, of
        what is left of `max_batch_tokens`. While there is budget and nothing was preempted in this
        step, `_admit` is asked about the first that waits. If admitted, it moves to its place in
        `running` and gets a chunk at once; the first refusal ends the step's admissions.
        """
        raise NotImplementedError("Exercise 06.3: Scheduler.schedule")

    # ── 06.4 Preemption ───────────────────────────────────────────────────────────
    def preempt(self, sequence: Sequence, plan: Plan | None = None) -> None:
        """Take a running sequence's blocks and put it back among the waiting.

        It goes to its place in the policy's order; `num_preemptions`, its own and the scheduler's,
        go up by one; what it holds is given back (`_release`).

        Swap: if `config.preemption` is "swap", and there is a plan, a block with computed tokens,
        and room in `host_pool` (otherwise None) for all such blocks, they are moved there.
        `host_block_ids` names the host's blocks, `plan.swap_out` gets a pair (device block, host
        block) for each, in order, and `num_swaps_out` goes up by one. Otherwise it is recomputed:
        `num_computed` is 0.
        """
        raise NotImplementedError("Exercise 06.4: Scheduler.preempt")

    def _add_decodes(
        self, decoding: list[Sequence], prefilling: list[Sequence], plan: Plan
    ) -> bool:
        """Plan one token for each of `decoding`, in order. While no block can be had for one, the
        last in the policy's order is preempted and leaves its list. Returns whether any was."""
        block_size, slots = self.config.block_size, plan.slots
        preempted = False
        for sequence in decoding:  # it may lose its last ones meanwhile
            slot = sequence.next_slot
            while slot is None and sequence.table is not None:
                slot = self._reserve_one(sequence, plan)
                if slot is None:  # the last in the policy's order gives way, perhaps this one
                    victim = max(decoding[-1:] + prefilling[-1:], key=self.policy)
                    (decoding if victim is decoding[-1] else prefilling).pop()
                    self.preempt(victim, plan)
                    preempted = True
            if slot is not None:
                slots.append(slot)
                slot += 1
                sequence.next_slot = slot if slot % block_size else None
        plan.sequences.extend(decoding)
        plan.num_decodes = len(decoding)
        plan.num_tokens.extend([1] * len(decoding))
        return preempted

    def _reserve_one(self, sequence: Sequence, plan: Plan) -> int | None:
        """The slot for a decode's one token, with room up to the end of its block; None if no
        block can be had."""
        table, position, size = sequence.table, sequence.num_computed, self.config.block_size
        while True:
            try:
                end = (position // size + 1) * size
                table.grow(max(0, end - table.num_tokens))
                slot, copy = table.writable_slot(position)
                plan.copies += [copy] if copy is not None else []
                return slot
            except OutOfBlocks as shortage:
                if not self._make_free(shortage.needed):
                    return None

    # ── 06.1 A chunk of a prompt ──────────────────────────────────────────────────
    def _add_chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Plan as many tokens of a prefill as it has left and the budget allows; returns how many.

        The plan gets the sequence, the number, and the slot of the first of these tokens; nothing
        if there are none. The table has blocks for all of them. `num_computed` stays: it is
        counted when the step is done.
        """
        raise NotImplementedError("Exercise 06.1: Scheduler._add_chunk")

    # ── 06.2 Admission ────────────────────────────────────────────────────────────
    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Admit a waiting sequence if there are seats and blocks for it. Returns whether it was.

        Seats: its own (`_seats`) and those of all that run are at most `max_num_seqs`. Blocks: for
        all its tokens, prompt and output, in a new `self.block_table(pool, block_size)`; a hit
        (`look_up`) is locked and shared first, and only the rest is needed. `_make_free` says
        whether they can be had with a headroom of one block per running sequence (one, however
        many samples it has yet to fork into). Then the table grows, and `_begin` takes over.

        If not, pool, cache and sequence are as they were: release the table, unlock the hit.
        """
        raise NotImplementedError("Exercise 06.2: Scheduler._admit")

    def _begin(
        self, sequence: Sequence, table: BlockTable, hit: MatchResult | None, plan: Plan
    ) -> None:
        """Give an admitted sequence its table, and let it continue where it was swapped out (its
        host blocks are given back) or after the prefix that the cache had."""
        num_hit = hit.num_tokens if hit is not None else 0
        if sequence.host_block_ids is not None:
            used = len(sequence.host_block_ids)
            plan.swap_in.extend(zip(sequence.host_block_ids, table.block_ids[:used], strict=True))
            self._drop_host_blocks(sequence)
            self.num_swaps_in += 1
        else:
            sequence.num_computed = num_hit
            if sequence.num_preemptions == 0:  # finding its own blocks again is not a hit
                sequence.num_cached = num_hit
                self.num_looked_up_tokens += len(sequence.token_ids)
                self.num_hit_tokens += num_hit
        sequence.table, sequence.node = table, hit.node if hit is not None else None
        sequence.num_inserted = num_hit // self.config.block_size
        sequence.table_version += 1

    def _make_free(self, num_blocks: int, headroom: int = 0) -> bool:
        """Evict until `num_blocks` are free. Returns False if that is not possible with
        `headroom` blocks to spare."""
        evictable = self.cache.num_evictable_blocks if self.cache is not None else 0
        if num_blocks + headroom > self.pool.num_free + evictable:
            return False
        while num_blocks > self.pool.num_free:
            # After a `clear` a sequence may still hold an evicted block: ask the pool.
            if not self.cache.evict(num_blocks - self.pool.num_free):
                return False
        return True

    def _release(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            sequence.table.release()
            sequence.table = sequence.next_slot = None
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
            sequence.node = None
        sequence.num_inserted = 0

    def _drop_host_blocks(self, sequence: Sequence) -> None:
        for block_id in sequence.host_block_ids or ():
            self.host_pool.release(block_id)
        sequence.host_block_ids = None


class FreesTheMost(Scheduler):
    """Preempts the sequence that holds the most blocks, even the first to arrive: one victim
    frees as much as several small ones. It may be the largest of all that run, or of those that
    have no slot yet in this step. Either way, also with several samples and with swap, every
    request gets the tokens that it would get alone."""

    # ── 06.5 The largest gives way: broken, fix it ────────────────────────────────
    def _add_decodes(
        self, decoding: list[Sequence], prefilling: list[Sequence], plan: Plan
    ) -> bool:
        """One token for each of `decoding`, in order. While there is no block for one, the
        sequence that holds the most is preempted and leaves its list.
        Returns whether any was preempted."""
        preempted = False
        while len(plan.slots) < len(decoding):
            sequence = decoding[len(plan.slots)]
            slot = self._reserve_one(sequence, plan)
            if slot is not None:
                plan.slots.append(slot)
                continue
            victims = decoding + prefilling
            victim = max(victims, key=lambda one: len(one.table.block_ids))
            (decoding if victim in decoding else prefilling).remove(victim)
            self.preempt(victim, plan)
            preempted = True
        plan.sequences.extend(decoding)
        plan.num_decodes = len(decoding)
        plan.num_tokens.extend([1] * len(decoding))
        return preempted
