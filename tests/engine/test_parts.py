"""Parts handed in from outside: other classes with the same public methods, the same tokens."""

from collections import Counter

import numpy as np
import pytest
from helpers import NaiveBackend, QueuePool, assert_empty, drain, generate, naively, small, step

from minikv import Engine, OutOfBlocks, RadixCache, SamplingParams, Scheduler
from minikv.course.chapters.ch04_paged_blocks.block_by_block import BlockByBlock
from minikv.course.chapters.ch07_radix_prefix_cache.answers import ChainedCache
from minikv.events import Listener


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

    def shrink(self, num_tokens):
        self.num_tokens -= num_tokens
        kept = (self.num_tokens + self.block_size - 1) // self.block_size
        for block_id in self.block_ids[kept:]:
            self.pool.release(block_id)
        self.block_ids = self.block_ids[:kept]

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


class HashChain(ChainedCache):
    """A prefix cache without a tree, whose handles are no nodes: each comes back once let go."""

    def __init__(self, pool, block_size):
        super().__init__(pool, block_size)
        self.locks = Counter()

    def match(self, token_ids, salt=None):
        return super().match(token_ids, salt)._replace(node=tuple(token_ids))

    def insert(self, token_ids, block_ids, salt=None):
        return super().insert(token_ids, block_ids, salt)._replace(node=tuple(token_ids))

    def lock(self, node):
        self.locks[node] += 1

    def unlock(self, node):
        self.locks[node] -= 1

    def check(self):
        super().check()
        assert all(count >= 0 for count in self.locks.values())


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
        assert len(logits) == len(params) and draws == [None] * len(logits)
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


@pytest.mark.usual(parts=PARTS["all"], preemption="recompute", drafts=None)
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
            want = naively(llama.lm, prompt, 14)
            assert [sample.token_ids for sample in output.samples] == [want] * len(output.samples)
        prompts.reverse()
    stats = engine.stats()
    assert stats.preemptions > 0 or stats.speculation is not None  # which takes fewer steps
    assert stats.hit_tokens > 0
    assert not any(getattr(engine.cache, "locks", Counter()).values())
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


def test_check_notices_a_policy_whose_value_changes(llama):
    """The queue is not sorted again, so whoever should be first would wait for ever."""
    values = {0: 0, 1: 1, 2: 2}
    engine = Engine(llama.lm, small(), policy=lambda one: values[one.request.request_id])
    for prompt in llama.prompts(3, 4, 5):
        engine.add_request(prompt, SamplingParams(max_tokens=3))
    engine.check()
    values[2] = -1
    with pytest.raises(AssertionError, match=r"the policy has changed .*: \[0, 1, -1\]"):
        engine.check()
    values[2] = 2
    engine.step()
    values[0] = 7
    with pytest.raises(AssertionError, match=r"the policy has changed .*: \[7, 1, 2\]"):
        engine.check()


class Deaf(Listener):
    failing = True

    def stored(self, *unused):
        if self.failing:
            raise OSError("deaf")


class Failing(NaiveBackend):
    failing = True

    def bind(self, batch):
        attend = super().bind(batch)

        def attend_or_fail(*arguments):
            if self.failing:
                raise OSError("deaf")
            return attend(*arguments)

        return attend_or_fail


def test_an_error_names_the_part_and_the_engine_goes_on(llama):
    """Whoever was handed in: nothing is lost by it."""
    failing = {"sampler": True}
    listener = Deaf()

    def sampler(logits, params, draws):
        if failing["sampler"]:
            raise OSError("deaf")
        return logits.argmax(-1).tolist()

    (prompt,) = llama.prompts(9)
    engine = Engine(llama.lm, small(), attention=Failing, sampler=sampler, listeners=[listener])
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=6))
    for name in ("attention", "sampler", "listener"):
        with pytest.raises(OSError, match="deaf") as caught:
            drain(engine)
        assert caught.value.__notes__ == [f"in the {name} that the engine was given"]
        engine.attention.failing = False
        failing["sampler"] = name == "attention"
    listener.failing = False
    assert drain(engine)[request_id].token_ids == naively(llama.lm, prompt, 6)


@pytest.mark.parametrize("method", ["match", "insert", "lock", "unlock", "evict", "clear"])
def test_an_error_of_a_prefix_cache_names_it_and_the_engine_goes_on(llama, method):
    fails = Counter()

    def fail(*arguments, **named):
        fails[method] += 1
        if fails[method] == 2:  # the first time, all is well
            raise OSError("deaf")
        return getattr(RadixCache, method)(*arguments, **named)

    kind = type("Failing", (RadixCache,), {method: fail})
    engine, caught = Engine(llama.lm, small(num_blocks=12), prefix_cache=kind), []
    prompts = llama.prompts(17, 18, 19, 20)
    for prompt in prompts + prompts:
        request_id = engine.add_request(prompt, SamplingParams(max_tokens=6))
        while engine.has_unfinished:
            try:
                [output] = engine.step()
                if method == "clear":
                    engine.cache.clear()
            except OSError as error:
                caught.append(error.__notes__)
        assert output.request_id == request_id
        assert output.token_ids == naively(llama.lm, prompt, 6)
    assert caught == [["in the prefix cache that the engine was given"]]
    assert_empty(engine)


def test_a_policy_that_forgets_a_request_loses_that_one_alone(llama, caplog):
    places = {0: 0, 1: 1, 2: 2}
    engine = Engine(
        llama.lm, small(max_num_seqs=1), policy=lambda one: places[one.request.request_id],
        attention=Failing,
    )  # fmt: skip
    engine.attention.failing = False
    prompts = llama.prompts(5, 6, 7)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=5)) for prompt in prompts]
    engine.step()
    del places[1]
    with pytest.raises(KeyError) as caught:
        engine.add_request([1, 2, 3])
    assert caught.value.__notes__ == ["in the policy that the engine was given"]
    outputs = drain(engine)
    assert [outputs[one].finish_reason for one in ids] == ["length", "abort", "length"]
    assert "request 1 is aborted" in caplog.text
    for one in (0, 2):
        assert outputs[one].token_ids == naively(llama.lm, prompts[one], 5)
    assert_empty(engine)


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
