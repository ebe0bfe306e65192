"""Parts handed in from outside: other classes with the same public methods, the same tokens."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import NaiveBackend, drain, generate, greedy_tokens, small, step

from minikv import (
    Engine,
    InsertResult,
    MatchResult,
    OutOfBlocks,
    SamplingParams,
    Scheduler,
)
from minikv.course.chapters.ch04_paged_blocks.block_by_block import BlockByBlock


class QueuePool:
    """A block pool whose blocks come back in turn: the one that was free longest is next."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.queue = deque(range(num_blocks))
        self.holders = {}

    @property
    def num_free(self):
        return len(self.queue)

    def allocate(self):
        if not self.queue:
            raise OutOfBlocks(1, 0)
        block_id = self.queue.popleft()
        self.holders[block_id] = 1
        return block_id

    def acquire(self, block_id):
        self.holders[block_id] += 1

    def release(self, block_id):
        self.holders[block_id] -= 1
        if not self.holders[block_id]:
            del self.holders[block_id]
            self.queue.append(block_id)

    def ref_count(self, block_id):
        return self.holders.get(block_id, 0)


class TupleTable:
    """A block table that never changes its list, but makes a new tuple."""

    def __init__(self, pool, block_size):
        self.pool, self.block_size = pool, block_size
        self.block_ids = ()
        self.num_tokens = 0

    def grow(self, num_tokens):
        total = self.num_tokens + num_tokens
        missing = (total + self.block_size - 1) // self.block_size - len(self.block_ids)
        if missing > self.pool.num_free:
            raise OutOfBlocks(missing, self.pool.num_free)
        self.block_ids += tuple(self.pool.allocate() for _ in range(missing))
        self.num_tokens = total

    def share(self, block_ids):
        assert not self.block_ids
        for block_id in block_ids:
            self.pool.acquire(block_id)
        self.block_ids, self.num_tokens = tuple(block_ids), len(block_ids) * self.block_size

    def replace(self, index, block_id):
        self.pool.acquire(block_id)
        self.pool.release(self.block_ids[index])
        self.block_ids = (*self.block_ids[:index], block_id, *self.block_ids[index + 1 :])

    def fork(self):
        twin = TupleTable(self.pool, self.block_size)
        for block_id in self.block_ids:
            self.pool.acquire(block_id)
        twin.block_ids, twin.num_tokens = self.block_ids, self.num_tokens
        return twin

    def writable_slot(self, position):
        index = position // self.block_size
        old, copy = self.block_ids[index], None
        if self.pool.ref_count(old) > 1:
            new = self.pool.allocate()
            self.replace(index, new)
            self.pool.release(new)  # replace has acquired it, allocate had as well
            copy = old, new
        return self.block_ids[index] * self.block_size + position % self.block_size, copy

    def release(self):
        for block_id in self.block_ids:
            self.pool.release(block_id)
        self.block_ids, self.num_tokens = (), 0


class HashChain:
    """A prefix cache without a tree, as vLLM keeps it: a block is found by a hash of its tokens
    and of the block before it."""

    def __init__(self, pool, block_size):
        self.pool, self.block_size = pool, block_size
        self.entries = {}  # hash: entry
        self.clock = 0

    def chain(self, token_ids, salt):
        name, size = hash(("salt", salt)), self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            parent, name = name, hash((name, tuple(token_ids[start : start + size])))
            yield parent, name

    def touch(self, names):
        for name in reversed(names):
            self.clock += 1
            self.entries[name].used = self.clock

    def match(self, token_ids, salt=None):
        names = []
        for _, name in self.chain(token_ids, salt):
            if name not in self.entries:
                break
            names.append(name)
        self.touch(names)
        blocks = [self.entries[name].block_id for name in names]
        return MatchResult(tuple(names), blocks, len(names) * self.block_size)

    def insert(self, token_ids, block_ids, salt=None):
        names, existing = [], 0
        for (parent, name), block_id in zip(self.chain(token_ids, salt), block_ids, strict=False):
            if name in self.entries:
                existing += 1
            else:
                self.pool.acquire(block_id)
                self.entries[name] = SimpleNamespace(
                    block_id=block_id, parent=parent, locks=0, used=0
                )
            names.append(name)
        self.touch(names)
        blocks = [self.entries[name].block_id for name in names]
        return InsertResult(tuple(names), blocks, existing)

    def lock(self, names):
        for name in names:
            self.entries[name].locks += 1

    def unlock(self, names):
        for name in names:
            if name in self.entries:
                self.entries[name].locks -= 1

    def evict(self, num_blocks):
        freed = 0
        while freed < num_blocks:
            parents = {entry.parent for entry in self.entries.values()}
            free = [n for n, e in self.entries.items() if not e.locks and n not in parents]
            if not free:
                break
            oldest = min(free, key=lambda name: self.entries[name].used)
            self.pool.release(self.entries.pop(oldest).block_id)
            freed += 1
        return freed

    def clear(self):
        for entry in self.entries.values():
            self.pool.release(entry.block_id)
        self.entries.clear()

    def block_ids(self):
        return (entry.block_id for entry in self.entries.values())

    @property
    def num_cached_blocks(self):
        return len(self.entries)

    @property
    def num_evictable_blocks(self):
        return sum(not entry.locks for entry in self.entries.values())

    def check(self):
        assert all(entry.locks >= 0 for entry in self.entries.values())


def shortest_first(sequence):
    """A policy: short prompts overtake."""
    return len(sequence.request.prompt_ids), sequence.order


class OneAdmissionAStep(Scheduler):
    """A scheduler that lets at most one request in per step."""

    def schedule(self):
        queue, self.waiting = self.waiting, self.waiting[:1]
        try:
            return super().schedule()
        finally:
            behind = [s for s in queue[1:] if s not in self.waiting and s not in self.running]
            self.waiting = sorted([*self.waiting, *behind], key=self.policy)


class NumpySampler:
    """Greedy only, in numpy."""

    def __call__(self, logits, params, draws):
        assert len(logits) == len(params) == len(draws)
        return np.asarray(logits).argmax(-1).tolist()


PARTS = {
    "pool": {"block_pool": QueuePool},
    "table": {"block_table": TupleTable},
    "prefix cache": {"prefix_cache": HashChain},
    "policy": {"policy": shortest_first},
    "scheduler": {"scheduler": OneAdmissionAStep},
    "sampler": {"sampler": NumpySampler()},
    "attention": {"attention": NaiveBackend},
    "blockwise attention": {"attention": BlockByBlock},
    "all": {
        "block_pool": QueuePool, "block_table": TupleTable, "prefix_cache": HashChain,
        "policy": shortest_first, "scheduler": OneAdmissionAStep, "sampler": NumpySampler(),
        "attention": NaiveBackend,
    },
}  # fmt: skip


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_other_parts_give_the_same_tokens(llama, parts, preemption):
    """With hits, forks, copies, evictions and preemptions on the way."""
    long, other, third = llama.prompts(15, 9, 6, seed=17)
    prompts = [long, other, long[:12] + third, third, long, other[:8]]
    engine = Engine(llama.lm, small(num_blocks=16, preemption=preemption), **parts)
    for _ in range(2):
        params = [SamplingParams(max_tokens=14, n=1 + i % 2) for i in range(len(prompts))]
        for prompt, output in zip(prompts, generate(engine, prompts, params), strict=True):
            want = greedy_tokens(llama.lm, prompt, 14)
            assert [sample.token_ids for sample in output.samples] == [want] * len(output.samples)
        prompts.reverse()
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.hit_tokens > 0
    engine.update_weights(llama.hf.state_dict())
    assert stats.blocks_cached > 0 == engine.stats().blocks_cached
    assert engine.pool.num_free == 16


@pytest.mark.parametrize("name", ["table", "pool", "all"])
def test_other_parts_under_beam_search(llama, name):
    (prompt,) = llama.prompts(9, seed=18)
    reference = Engine(llama.lm, small()).beam_search(prompt, 3, 8)
    found = Engine(llama.lm, small(), **PARTS[name]).beam_search(prompt, 3, 8)
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in reference]


@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "qwen3"])
def test_a_naive_backend_on_other_architectures(checkpoint, name):
    pair = checkpoint(name)
    prompts = pair.prompts(20, 7, seed=19)
    engine = Engine(pair.lm, small(max_batch_tokens=9), attention=NaiveBackend)
    outputs = generate(engine, prompts, SamplingParams(max_tokens=8))
    assert [output.token_ids for output in outputs] == [pair.greedy(p, 8) for p in prompts]


def test_the_policy_is_used(llama):
    engine = Engine(llama.lm, small(max_num_seqs=1), policy=shortest_first)
    ids = [engine.add_request(p, SamplingParams(max_tokens=3)) for p in llama.prompts(9, 3, 6)]
    finished = []
    while engine.has_unfinished:
        finished += [o.request_id for o in step(engine, {}).values() if o.finish_reason]
    assert finished == [ids[1], ids[2], ids[0]]


def test_the_scheduler_is_used(llama):
    engine = Engine(llama.lm, small(), scheduler=OneAdmissionAStep)
    for prompt in llama.prompts(3, 3, 3):
        engine.add_request(prompt, SamplingParams(max_tokens=9))
    running = []
    for _ in range(3):
        step(engine)
        running.append(engine.stats().running)
    assert running == [1, 2, 3]
    drain(engine)


def test_the_sampler_is_used(llama):
    def always_seven(logits, params, draws):
        return [7] * len(draws)

    (output,) = Engine(llama.lm, small(), sampler=always_seven).generate(
        [[1, 2, 3]], SamplingParams(max_tokens=4, temperature=1.0)
    )
    assert output.token_ids == [7, 7, 7, 7]


def test_a_broken_part_is_noticed(llama):
    """`check` sees through parts from outside as well."""

    class Leaks(QueuePool):
        def release(self, block_id):
            if self.holders[block_id] > 1:
                super().release(block_id)

    with pytest.raises(AssertionError, match="reference count 1, 0 holders"):
        generate(
            Engine(llama.lm, small(), block_pool=Leaks), [[1, 2, 3]], SamplingParams(max_tokens=3)
        )
