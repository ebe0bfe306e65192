"""What stands in for a whole engine or a pool in checks and tests: a scheduler that serves requests
without a model, and a pool that logs."""

from collections.abc import Sequence as Seq

from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig
from minikv.radix import RadixCache
from minikv.sampling import SamplingParams
from minikv.scheduler import Plan, Policy, Scheduler, first_come_first_served
from minikv.sequence import Request, Sequence


class SchedulerBench:
    """A scheduler, and what an engine does between two plans: move, compute, append, finish.

        bench = SchedulerBench(EngineConfig(num_blocks=8, block_size=4))
        bench.add(7, max_tokens=3)
        bench.step()  # [(0, 7)]: request 0 computes 7 tokens

    In place of K and V a slot holds a number, made of its token and of the number before it as
    the block table finds it. The next token is made of all numbers of a sequence. So a
    sequence that reads or writes a wrong slot gets other tokens than `alone` returns.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: type[Scheduler] = Scheduler,
        *,
        cache: bool = False,
        policy: Policy = first_come_first_served,
    ):
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.cache = RadixCache(self.pool, config.block_size) if cache else None
        self.scheduler = scheduler(config, self.pool, self.cache, policy=policy)
        self.memory: dict[int, int] = {}  # slot: number
        self.host_memory: dict[int, int] = {}
        self.num_requests = self.num_steps = 0
        self.admitted: list[int] = []  # request ids, in the order of their first step
        self.finished: list[int] = []

    # ── Requests ──────────────────────────────────────────────────────────────

    def sequence(
        self,
        num_prompt: int,
        max_tokens: int = 4,
        request_id: int | None = None,
        *,
        n: int = 1,
        prefix: Seq[int] = (),
    ) -> Sequence:
        """A new request's sequence, which the scheduler does not know yet. The prompt begins
        with `prefix`; the tokens after it are different in every request."""
        request_id = self.num_requests if request_id is None else request_id
        self.num_requests += 1
        own = [1000 * request_id + i for i in range(len(prefix), num_prompt)]
        params = SamplingParams(max_tokens=max_tokens, n=n)
        return Request(request_id, [*prefix, *own], params).sequences[0]

    def add(self, *arguments, **more) -> Sequence:
        """Let a new request wait; the arguments are those of `sequence`."""
        sequence = self.sequence(*arguments, **more)
        self.scheduler.add(sequence)
        return sequence

    def start(self, sequence: Sequence, num_computed: int) -> None:
        """Let a sequence run at once, with blocks for all its tokens, some of them computed."""
        sequence.table = BlockTable(self.pool, self.config.block_size)
        sequence.table.grow(len(sequence.token_ids))
        self._write(sequence.table, sequence.token_ids, 0, num_computed)
        sequence.num_computed = num_computed
        self.scheduler.add_running(sequence)

    def hold(self, num_blocks: int) -> list[int]:
        """Take blocks out of the pool, as if others used them."""
        return [self.pool.allocate() for _ in range(num_blocks)]

    def cache_prefix(self, token_ids: Seq[int]) -> list[int]:
        """Put whole blocks of tokens into the prefix cache; returns the blocks."""
        if self.cache is None:
            raise ValueError("prefix_cache: there is none here")
        table = BlockTable(self.pool, self.config.block_size)
        table.grow(len(token_ids))
        self._write(table, token_ids, 0, len(token_ids))
        self.cache.insert(token_ids, table.block_ids)
        block_ids = list(table.block_ids)
        table.release()
        return block_ids

    # ── One step ──────────────────────────────────────────────────────────────

    def plan(self) -> Plan:
        plan = self.scheduler.schedule()
        ids = [sequence.request.request_id for sequence in plan.sequences]
        self.admitted += [one for one in dict.fromkeys(ids) if one not in self.admitted]
        return plan

    def run(self, plan: Plan) -> None:
        """What an engine does with a plan."""
        self._copy(self.memory, self.host_memory, plan.swap_out)
        self._copy(self.memory, self.memory, plan.copies)
        self._copy(self.host_memory, self.memory, plan.swap_in)
        for sequence, count, slot in zip(plan.sequences, plan.num_tokens, plan.slots, strict=True):
            self._write(sequence.table, sequence.token_ids, sequence.num_computed, count, slot)
        for sequence in self.scheduler.commit(plan):
            self.scheduler.share_full_blocks(sequence)
            self._append(sequence)
        self.num_steps += 1

    def step(self) -> list[tuple[int, int]]:
        """Plan and run; returns (request id, number of tokens) of each that computes."""
        plan = self.plan()
        ids = [sequence.request.request_id for sequence in plan.sequences]
        self.run(plan)
        return list(zip(ids, plan.num_tokens, strict=True))

    def drain(self, limit: int = 2000) -> None:
        """Step until all are finished. Raises AssertionError if that has no end or leaks blocks."""
        while list(self.scheduler):
            assert self.num_steps < limit, "no end in sight"
            assert self.step(), "a step without a sequence"
        evictable = self.cache.num_evictable_blocks if self.cache is not None else 0
        assert self.pool.num_free + evictable == self.pool.num_blocks, "blocks are still held"

    # ── Numbers in place of K and V ───────────────────────────────────────────

    def alone(self, sequence: Sequence) -> list[int]:
        """The tokens that this sample writes if nothing goes wrong, to the last of them."""
        request = sequence.request
        numbers: list[int] = []
        tokens = list(request.prompt_ids)
        while len(tokens) < request.max_length:
            for token_id in tokens[len(numbers) :]:
                numbers.append(_number(numbers[-1] if numbers else 0, token_id))
            tokens.append(_next_token(numbers, sequence.index))
        return tokens[len(request.prompt_ids) :]

    def _slot(self, table: BlockTable, position: int) -> int:
        index, offset = divmod(position, self.config.block_size)
        return table.block_ids[index] * self.config.block_size + offset

    def _write(
        self, table: BlockTable, token_ids: Seq[int], start: int, count: int, slot: int = -1
    ) -> None:
        """Compute `count` tokens; the first goes to `slot`, if that is given."""
        for position in range(start, start + count):
            before = self.memory.get(self._slot(table, position - 1), 0) if position else 0
            to = slot if position == start and slot != -1 else self._slot(table, position)
            self.memory[to] = _number(before, token_ids[position])

    def _copy(self, source: dict, target: dict, pairs: Seq[tuple[int, int]]) -> None:
        """Move blocks; all are read before the first is written."""
        size = self.config.block_size
        read = [[source.get(one * size + i, 0) for i in range(size)] for one, _ in pairs]
        for (_, other), numbers in zip(pairs, read, strict=True):
            target.update({other * size + i: number for i, number in enumerate(numbers)})

    def _append(self, sequence: Sequence) -> None:
        table, request = sequence.table, sequence.request
        read = [self.memory.get(self._slot(table, i), 0) for i in range(sequence.num_computed)]
        sequence.token_ids.append(_next_token(read, sequence.index))
        if len(sequence.token_ids) == request.max_length:
            sequence.finish_reason = "length"
            self.scheduler.remove(sequence)
            if all(one.finish_reason for one in request.sequences):
                self.finished.append(request.request_id)


def _number(before: int, token_id: int) -> int:
    return hash((before, token_id))


def _next_token(numbers: list[int], sample: int) -> int:
    """A small letter."""
    return ord("a") + hash((sample, *numbers)) % 26


class LoggingPool(BlockPool):
    """A pool that remembers in which order blocks became free."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.freed: list[int] = []

    def release(self, block_id: int) -> None:
        super().release(block_id)
        if self.ref_count(block_id) == 0:
            self.freed.append(block_id)
