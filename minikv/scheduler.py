"""Continuous batching: before every step, decide which sequences compute how many tokens.

Chapter 06; the idea of scheduling by step is Orca's (Yu et al., 2022), chunked
prefill is Sarathi-Serve's (Agrawal et al., 2024).

    waiting ──admit──> running ──finish──> released into the prefix cache
       ^                  │
       └─────preempt──────┘   (recompute: drop the blocks; swap: move them to the host)

One step's token budget goes to decodes first, one token each, then to prefill chunks of
running sequences, then to admissions. A long prompt is cut to the rest of the budget, so it
never delays a decode by more than one step.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig
from minikv.errors import OutOfBlocks
from minikv.radix import MatchResult, RadixCache
from minikv.sequence import Sequence

# What it returns is compared: the smallest is served first. It must stay while a request waits.
Policy = Callable[[Sequence], Any]
COUNTERS = (
    "num_preemptions", "num_swaps_out", "num_swaps_in", "num_looked_up_tokens", "num_hit_tokens",
)  # fmt: skip


def first_come_first_served(sequence: Sequence) -> tuple[int, int]:
    """Order of arrival. The last to arrive is also the first to be preempted."""
    return sequence.order


@dataclass(slots=True)
class Plan:
    """One step. Blocks are moved before anything is written: swap_out, copies, then swap_in."""

    sequences: list[Sequence] = field(default_factory=list)  # decodes, then chunks
    num_decodes: int = 0
    num_tokens: list[int] = field(default_factory=list)  # how many tokens each computes
    slots: list[int] = field(default_factory=list)  # where each one's first token goes
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), copy-on-write
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)


class Scheduler:
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

    def add_running(self, sequence: Sequence) -> None:
        """Let a sequence that holds its blocks already run at once."""
        insort(self.running, sequence, key=self.policy)

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Begin sample `index` of a request, on the blocks of a running sample. Returns it."""
        twin = sequence.fork(index)
        if self.cache is not None and sequence.node is not None:
            self.cache.lock(sequence.node)
            twin.node = sequence.node
        sequence.request.sequences.append(twin)
        self.add_running(twin)
        return twin

    def schedule(self) -> Plan:
        """Decide the next step and reserve its blocks. An empty plan: nothing can run now.

        A running sequence with one token left to compute is a decode, unless it has yet to
        fork; all decodes get that token. The others are prefills: they get chunks, in order, of
        what is left of `max_batch_tokens`. While there is budget and nothing was preempted in this
        step, `_admit` is asked about the first that waits. If admitted, it moves to its place in
        `running` and gets a chunk at once; the first refusal ends the step's admissions.
        """
        plan = Plan()
        budget = self.config.max_batch_tokens
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            is_decode = sequence.next_slot is not None or (  # it was one in the last step, too
                sequence.num_tokens - sequence.num_computed == 1 and not sequence.must_fork
            )
            (decoding if is_decode else prefilling).append(sequence)

        preempted = self._add_decodes(decoding, prefilling, plan)
        budget -= len(decoding)
        for sequence in prefilling:
            budget -= self._add_chunk(sequence, budget, plan)
        if not preempted:  # what was freed is for those that run
            while self.waiting and budget > 0 and self._admit(self.waiting[0], plan):
                sequence = self.waiting.pop(0)
                insort(self.running, sequence, key=self.policy)
                budget -= self._add_chunk(sequence, budget, plan)
        return plan

    def commit(self, plan: Plan) -> list[Sequence]:
        """Count what a plan computed, share the blocks of its chunks, fork finished prompts.

        Returns the sequences that get a token from this step: the decodes, then each chunk
        that computed the last token of its sequence, followed by its forks. Their tokens were
        sampled in this order.
        """
        ready = plan.sequences[: plan.num_decodes]
        for sequence in ready:
            sequence.num_computed += 1
        for row in range(plan.num_decodes, len(plan.sequences)):
            sequence = plan.sequences[row]
            sequence.num_computed += plan.num_tokens[row]
            self.share_full_blocks(sequence)
            if sequence.num_computed == len(sequence.token_ids):
                ready += [sequence, *(self.fork(sequence, i) for i in sequence.samples[1:])]
                sequence.must_fork = False
        return ready

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
        self.running.remove(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        used = -(-sequence.num_computed // self.config.block_size)
        swap = plan is not None and self.config.preemption == "swap" and self.host_pool
        if swap and 0 < used <= self.host_pool.num_free:
            sequence.host_block_ids = [self.host_pool.allocate() for _ in range(used)]
            plan.swap_out.extend(
                zip(sequence.table.block_ids[:used], sequence.host_block_ids, strict=True)
            )
            self.num_swaps_out += 1
        else:
            sequence.num_computed = 0
        self._release(sequence)
        insort(self.waiting, sequence, key=self.policy)

    def remove(self, sequence: Sequence) -> None:
        """Let a finished or aborted sequence leave. Its full blocks stay in the prefix cache."""
        (self.running if sequence.table is not None else self.waiting).remove(sequence)
        seconds = sequence.request.params.retain_s
        if seconds and sequence.node is not None and sequence.finish_reason != "abort":
            self.cache.pin(sequence.node, seconds)
        self._release(sequence)
        self._drop_host_blocks(sequence)

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

    def _add_chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Plan as many tokens of a prefill as it has left and the budget allows; returns how many.

        The plan gets the sequence, the number, and the slot of the first of these tokens; nothing
        if there are none. The table has blocks for all of them. `num_computed` stays: it is
        counted when the step is done.
        """
        start = sequence.num_computed
        num_tokens = min(len(sequence.token_ids) - start, budget)
        if num_tokens > 0:
            plan.sequences.append(sequence)
            plan.num_tokens.append(num_tokens)
            plan.slots.append(sequence.table.writable_slot(start)[0])
        return num_tokens

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Admit a waiting sequence if there are seats and blocks for it. Returns whether it was.

        Seats: its own (`_seats`) and those of all that run are at most `max_num_seqs`. Blocks: for
        all its tokens, prompt and output, in a new `self.block_table(pool, block_size)`; a hit
        (`look_up`) is locked and shared first, and only the rest is needed. `_make_free` says
        whether they can be had with a headroom of one block per running sequence (one, however
        many samples it has yet to fork into). Then the table grows, and `_begin` takes over.

        If not, pool, cache and sequence are as they were: release the table, unlock the hit.
        """
        seats = sum(map(_seats, self.running)) + _seats(sequence)
        if seats > self.config.max_num_seqs:
            return False
        table = self.block_table(self.pool, self.config.block_size)
        hit = self.look_up(sequence)
        if hit is not None:
            self.cache.lock(hit.node)  # before anything is evicted to make room
            table.share(hit.block_ids)
        needed = -(-len(sequence.token_ids) // self.config.block_size) - len(table.block_ids)
        # Keep a block free for each running sequence: admitting this one must not preempt them
        # in the next step.
        if not self._make_free(needed, headroom=len(self.running)):
            table.release()
            if hit is not None:
                self.cache.unlock(hit.node)
            return False
        table.grow(len(sequence.token_ids) - table.num_tokens)
        self._begin(sequence, table, hit, plan)
        return True

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

    def look_up(self, sequence: Sequence) -> MatchResult | None:
        """The cached prefix that a waiting sequence can begin with; None if there is none that
        is worth it. Looked up at every attempt: what was found before may be evicted by now."""
        if self.cache is None or sequence.host_block_ids is not None:
            return None
        # One token at least is left to compute: without it there are no logits.
        match = self.cache.match(sequence.token_ids[:-1], sequence.request.params.cache_salt)
        return match if match.num_tokens >= max(1, self.config.min_prefix_tokens) else None

    def share_full_blocks(self, sequence: Sequence) -> None:
        """Put a running sequence's full blocks into the prefix cache, and use those that it has.

        If another sequence computed the same prefix first, its blocks replace ours,
        which are released only then.
        """
        size, table, ids = self.config.block_size, sequence.table, sequence.token_ids
        num_full = sequence.num_computed // size
        if self.cache is None or num_full == sequence.num_inserted:
            return
        if sequence.node is not None:  # nothing is evicted before it is locked again below
            self.cache.unlock(sequence.node)
        computed = ids if len(ids) // size == num_full else ids[: num_full * size]
        result = self.cache.insert(computed, table.block_ids, sequence.request.params.cache_salt)
        differs = table.block_ids[:num_full] != result.block_ids  # anywhere, after a `clear`
        for index in range(num_full if differs else 0):
            if table.block_ids[index] != result.block_ids[index]:
                table.replace(index, result.block_ids[index])
                sequence.table_version += 1
        self.cache.lock(result.node)
        sequence.node, sequence.num_inserted = result.node, num_full

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

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self.running, *self.waiting])


def _seats(sequence: Sequence) -> int:
    """Places in the batch: a request that has yet to fork will need all its samples'."""
    return sequence.request.params.n if sequence.must_fork else 1
