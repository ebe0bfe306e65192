"""Chapter 06: continuous batching. First the scheduler without a model, then in the engine."""

from collections import Counter
from types import SimpleNamespace

import pytest
from helpers import assert_empty, careful_engine, drain, generate, meets, naively, small, step
from hypothesis import given, settings, strategies as st

from minikv import (
    BlockPool,
    BlockTable,
    Engine,
    Plan,
    Request,
    Sampler,
    SamplingParams,
    Scheduler,
    engine as engine_module,
    first_come_first_served,
    runner as runner_module,
)
from minikv.batch import BatchBuilder
from minikv.course.judge.stand_ins import SchedulerBench
from minikv.outputs import Delta


class Bench(SchedulerBench):
    """With small numbers, and a look at every plan."""

    def __init__(self, *, cache=False, policy=first_come_first_served, **config):
        super().__init__(small(**config), cache=cache, policy=policy)

    def plan(self):
        ran = list(self.scheduler.running)
        plan = super().plan()
        names = [sequence.request.request_id for sequence in plan.sequences]
        assert len(set(names)) == len(names) <= self.config.max_num_seqs
        assert sum(plan.num_tokens) <= self.config.max_batch_tokens
        assert all(count >= 1 for count in plan.num_tokens)
        lead = next((i for i, n in enumerate(plan.num_tokens) if n > 1), len(names))
        for i, sequence in enumerate(plan.sequences):
            left = len(sequence.token_ids) - sequence.num_computed
            assert plan.num_tokens[i] <= left
            is_decode = left == 1 and sequence in ran and not sequence.must_fork
            assert i < lead or not is_decode, "a decode behind a chunk"
            block = sequence.table.block_ids[sequence.num_computed // self.config.block_size]
            offset = sequence.num_computed % self.config.block_size
            assert plan.slots[i] == block * self.config.block_size + offset
            assert len(sequence.token_ids) <= sequence.table.num_tokens
        return plan


# ── The budget ────────────────────────────────────────────────────────────────


def test_a_long_prompt_is_cut_to_the_budget():
    bench = Bench(max_batch_tokens=32)
    bench.add(100)
    second = bench.add(9)
    for _ in range(3):
        assert bench.step() == [(0, 32)]
        assert bench.scheduler.waiting == [second]  # it takes no block before it can use it
    assert [bench.step() for _ in range(2)] == [[(0, 4), (1, 9)], [(0, 1), (1, 1)]]


def test_a_chunk_takes_what_decodes_leave():
    bench = Bench(max_batch_tokens=16)
    bench.add(3, max_tokens=20)
    bench.add(2, max_tokens=20)
    assert bench.step() == [(0, 3), (1, 2)]
    bench.add(40)
    assert bench.step() == [(0, 1), (1, 1), (2, 14)]
    assert bench.step() == [(0, 1), (1, 1), (2, 14)]
    assert bench.step() == [(0, 1), (1, 1), (2, 12)]
    assert bench.step() == [(0, 1), (1, 1), (2, 1)]


def test_a_budget_full_of_decodes_leaves_none_for_prefill():
    bench = Bench(max_batch_tokens=2, max_num_seqs=2)
    bench.add(1, max_tokens=3)
    bench.add(1, max_tokens=5)
    bench.step()
    bench.add(4)
    assert bench.step() == [(0, 1), (1, 1)]
    assert bench.step() == [(0, 1), (1, 1)]
    assert bench.finished == [0]
    assert bench.step() == [(1, 1), (2, 1)]  # one token of the budget is a chunk of one


requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 3)), min_size=3, max_size=12
)


MET = Counter()


@meets(MET, {"preemptions": 15, "swaps": 4, "hits": 10})
@settings(max_examples=60)
@given(
    requests=requests,
    budget=st.integers(1, 40),
    seats=st.integers(1, 6),
    block_size=st.integers(1, 8),
    spare=st.integers(0, 3),
    host_blocks=st.sampled_from([24, 0, 3]),
    cache=st.booleans(),
    prefix=st.integers(0, 30),
)
def test_any_load_is_served_in_order(
    requests, budget, seats, block_size, spare, host_blocks, cache, prefix
):
    """The budget holds, decodes come first, each step does something, and nobody overtakes."""
    largest = max(-(-(prompt + new) // block_size) for prompt, new, _ in requests)
    bench = Bench(
        max_batch_tokens=max(budget, seats),
        max_num_seqs=seats,
        block_size=block_size,
        num_blocks=largest + spare,
        preemption="swap" if host_blocks else "recompute",
        host_blocks=host_blocks,
        cache=cache,
    )
    sequences = []
    for request_id, (prompt, new, pause) in enumerate(requests):
        same = range(min(prefix, prompt))  # the beginning of all
        sequences.append(bench.add(prompt, new, request_id, prefix=same))
        for _ in range(pause):
            assert bench.step() or not list(bench.scheduler)
    bench.drain()
    assert bench.admitted == sorted(bench.admitted) == list(range(len(requests)))
    assert sorted(bench.finished) == bench.admitted
    MET["preemptions"] += bench.scheduler.num_preemptions > 0
    MET["swaps"] += bench.scheduler.num_swaps_in > 0
    MET["hits"] += bench.scheduler.num_hit_tokens > 0
    for sequence in sequences:
        assert sequence.output_ids == bench.alone(sequence)
    if host_blocks:
        assert bench.scheduler.host_pool.num_free == host_blocks


# ── First come, first served ──────────────────────────────────────────────────


def test_finishing_makes_room_in_the_very_next_step():
    bench = Bench(max_num_seqs=1)
    bench.add(2, max_tokens=2)
    bench.add(2, max_tokens=2)
    assert [bench.step() for _ in range(4)] == [[(0, 2)], [(0, 1)], [(1, 2)], [(1, 1)]]


# ── Admission ─────────────────────────────────────────────────────────────────


def test_admission_counts_blocks_and_takes_none_when_it_says_no():
    bench = Bench(num_blocks=4)
    bench.add(12, max_tokens=4)
    second = bench.add(12, max_tokens=4)
    assert bench.step() == [(0, 12)]
    assert bench.pool.num_free == 1
    assert second.table is None and second.num_computed == 0
    bench.drain()
    assert bench.finished == [0, 1] and bench.scheduler.num_preemptions == 0


def test_admission_keeps_a_block_for_each_that_runs():
    """Else the next decode would have to preempt whom this step has admitted."""
    bench = Bench(num_blocks=4)
    bench.add(8, max_tokens=8)  # 2 blocks now, a third in the next step
    bench.add(8, max_tokens=1)
    assert bench.step() == [(0, 8)]
    bench.drain()
    assert bench.scheduler.num_preemptions == 0


def test_admission_evicts_what_nobody_uses():
    bench = Bench(num_blocks=4, cache=True)
    bench.cache_prefix(range(12))
    bench.add(9, max_tokens=3, request_id=5)
    assert bench.plan().num_tokens == [9]
    assert bench.cache.num_cached_blocks == 1  # two of three went, one was enough to keep


def test_a_no_evicts_nothing():
    bench = Bench(num_blocks=4, cache=True)
    bench.cache_prefix(range(8))
    held = bench.hold(2)
    bench.add(12, max_tokens=1, request_id=5)
    assert bench.plan().sequences == []
    assert bench.cache.num_cached_blocks == 2
    for block in held:
        bench.pool.release(block)
    bench.cache.evict(2)
    bench.drain()


def test_admission_with_a_hit_computes_only_the_rest():
    bench = Bench(cache=True)
    blocks = bench.cache_prefix(range(12))
    sequence = bench.add(14, request_id=5, prefix=range(12))
    assert bench.step() == [(5, 2)]
    assert sequence.num_cached == 12 and sequence.table.block_ids[:3] == blocks
    assert [bench.pool.ref_count(block) for block in blocks] == [2, 2, 2]
    assert bench.scheduler.num_hit_tokens == 12 and bench.scheduler.num_looked_up_tokens == 14


@pytest.mark.parametrize(("threshold", "computed"), [(8, 6), (9, 14), (0, 6)])
def test_a_short_hit_is_not_used(threshold, computed):
    bench = Bench(cache=True, min_prefix_tokens=threshold)
    bench.cache_prefix(range(8))
    bench.add(14, prefix=range(8))
    assert bench.plan().num_tokens == [computed]
    assert bench.cache.num_evictable_blocks == (2 if computed == 14 else 0)
    bench = Bench(cache=True, block_size=1, min_prefix_tokens=0)
    bench.cache_prefix(range(1))
    bench.add(3, prefix=range(1))
    assert bench.plan().num_tokens == [2], "one token is a hit if no more are asked for"


def test_a_cached_block_that_somebody_holds_makes_no_room():
    """It leaves the cache, and is not free."""
    bench = Bench(num_blocks=4, cache=True)
    blocks = bench.cache_prefix(range(8))
    for block in blocks:
        bench.pool.acquire(block)
    bench.add(14, max_tokens=1, request_id=5)
    assert bench.plan().sequences == [] and bench.pool.num_free == 2
    for block in blocks:
        bench.pool.release(block)
    bench.drain()
    assert bench.finished == [5]


def test_a_refused_admission_lets_go_of_its_hit():
    bench = Bench(num_blocks=4, cache=True)
    blocks = bench.cache_prefix(range(8)) + bench.hold(1)
    sequence = bench.add(14, max_tokens=2, prefix=range(8))  # needs 2 more than its hit; 1 is free
    assert bench.plan().sequences == []
    assert sequence.table is None and sequence.node is None
    assert [bench.pool.ref_count(block) for block in blocks] == [1, 1, 1]
    assert bench.cache.num_evictable_blocks == 2
    bench.pool.release(blocks[2])
    assert bench.step() == [(0, 6)]


# ── Preemption ────────────────────────────────────────────────────────────────


def two_that_collide(**config):
    """Both fit now, but not with all that they will write: the last to come has to go."""
    bench = Bench(num_blocks=5, **config)
    first, second = bench.add(7, max_tokens=9), bench.add(6, max_tokens=10)
    bench.step()
    while bench.scheduler.num_preemptions == 0:
        plan = bench.plan()
        if bench.scheduler.num_preemptions == 0:
            bench.run(plan)
    return bench, first, second, plan


def test_recompute_drops_the_blocks_of_the_last_to_come():
    bench, first, second, plan = two_that_collide()
    assert plan.sequences == [first] and plan.swap_out == []
    assert bench.scheduler.running == [first] and bench.scheduler.waiting == [second]
    assert second.table is None and second.num_computed == 0 and second.num_preemptions == 1
    assert len(second.token_ids) > 6  # but no token is lost
    bench.run(plan)
    bench.drain()
    assert bench.finished == [0, 1]


def test_swap_moves_the_computed_blocks_to_the_host():
    bench, _, second, plan = two_that_collide(preemption="swap", host_blocks=3)
    computed = second.num_computed
    used = -(-computed // 4)
    assert computed >= 6 and second.table is None
    assert len(second.host_block_ids) == used == len(plan.swap_out)
    assert [host for _, host in plan.swap_out] == second.host_block_ids
    assert bench.scheduler.host_pool.num_free == 3 - used
    assert bench.scheduler.num_swaps_out == 1
    bench.run(plan)
    while second.table is None:
        plan = bench.plan()
        if second.table is None:
            bench.run(plan)
    # Back again: the same number of blocks, and only what is new has to be computed.
    assert [device for _, device in plan.swap_in] == second.table.block_ids[:used]
    assert second.host_block_ids is None and second.num_computed == computed
    assert plan.num_tokens[plan.sequences.index(second)] == len(second.token_ids) - computed
    assert bench.scheduler.num_swaps_in == 1 and bench.scheduler.host_pool.num_free == 3
    bench.run(plan)
    bench.drain()


def test_a_full_host_means_recompute():
    bench, _, second, plan = two_that_collide(preemption="swap", host_blocks=1)
    assert plan.swap_out == [] and second.host_block_ids is None and second.num_computed == 0
    assert bench.scheduler.num_swaps_out == 0 and bench.scheduler.num_preemptions == 1
    bench.run(plan)
    bench.drain()


def test_one_block_is_swapped_as_many_are():
    bench, plan = Bench(preemption="swap", host_blocks=1), Plan()
    sequence = bench.add(3)
    bench.step()
    block_ids = list(sequence.table.block_ids)
    bench.scheduler.preempt(sequence, plan)
    assert plan.swap_out == [(block_ids[0], 0)] and sequence.num_computed == 3
    bench.drain()
    assert bench.finished == [0] and bench.scheduler.num_swaps_in == 1


def test_nobody_is_admitted_in_a_step_that_preempts():
    """The newcomer would be the next victim."""
    bench = Bench(num_blocks=5)
    bench.add(7, max_tokens=9)
    bench.add(6, max_tokens=10, request_id=5)
    bench.step()
    bench.add(1, max_tokens=1, request_id=3)  # comes before the victim, and would fit now
    while bench.scheduler.num_preemptions == 0:
        names = [name for name, _ in bench.step()]
    assert names == [0]
    bench.drain()


def test_a_prefill_can_be_the_victim():
    bench = Bench(num_blocks=8, max_batch_tokens=4, max_num_seqs=2)
    bench.add(4, max_tokens=20)
    bench.step()
    victim = bench.add(16, max_tokens=4)
    bench.step()
    assert victim.num_computed == 3 and len(victim.table.block_ids) == 4  # all reserved at once
    held = bench.hold(bench.pool.num_free)  # somebody else's
    while not victim.num_preemptions:
        assert victim.num_computed < 16
        names = [name for name, _ in bench.step()]
    assert names == [0] and victim.table is None and victim.num_computed == 0
    for block in held:
        bench.pool.release(block)
    bench.drain()
    assert bench.finished == [0, 1]


# ── Policies ──────────────────────────────────────────────────────────────────


def shortest_first(sequence):
    return len(sequence.request.prompt_ids), sequence.order


def test_a_policy_decides_who_is_admitted():
    bench = Bench(max_num_seqs=1, policy=shortest_first)
    for length in (9, 3, 6, 3):
        bench.add(length, max_tokens=2)
    bench.drain()
    assert bench.finished == [1, 3, 2, 0]


def test_a_policy_decides_who_is_preempted():
    bench = Bench(num_blocks=6, policy=lambda sequence: -sequence.request.request_id)
    bench.add(8, max_tokens=8)
    bench.add(8, max_tokens=8)
    while bench.scheduler.num_preemptions == 0:
        names = [name for name, _ in bench.step()]
    assert names == [1]  # the latest is first, so the earliest had to go
    bench.drain()
    assert bench.finished == [1, 0]


# ── The flat batch ────────────────────────────────────────────────────────────


def make_sequence(block_ids, token_ids, num_computed, block_size=4):
    sequence = Request(0, list(token_ids), SamplingParams()).sequences[0]
    sequence.table = BlockTable(BlockPool(16), block_size)
    sequence.table.block_ids = block_ids
    sequence.num_computed = num_computed
    return sequence


def test_the_batch_of_the_docstring():
    sequences = [
        make_sequence([2, 7], [0, 0, 0, 0, 0, 41], 5),
        make_sequence([0], [0, 0, 7], 2),
        make_sequence([5, 3], [0, 0, 0, 0, 9, 12, 5, 3], 4),
    ]
    batch = BatchBuilder(4, 3, 4).build(sequences, [1, 1, 4], [29, 2, 12])
    assert batch.token_ids.tolist() == [41, 7, 9, 12, 5, 3]
    assert batch.positions.tolist() == [5, 2, 4, 5, 6, 7]
    assert batch.slot_mapping.tolist() == [29, 2, 12, 13, 14, 15]
    assert batch.query_start.tolist() == batch.query_start_host.tolist() == [0, 1, 2, 6]
    assert batch.context_lens.tolist() == batch.context_lens_host.tolist() == [6, 3, 8]
    assert batch.block_tables.tolist() == [[2, 7], [0, 0], [5, 3]]
    assert batch.num_decodes == 2


@settings(max_examples=100)
@given(st.data())
def test_block_tables_are_never_out_of_date(data):
    """The builder keeps rows from step to step; sequences come, go, move and grow meanwhile."""
    builder = BatchBuilder(5, 8, 1)
    everyone = [make_sequence([i], [0] * 9, 0, block_size=1) for i in range(5)]
    for _ in range(data.draw(st.integers(1, 8))):
        sequences = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
        for sequence in sequences:
            if data.draw(st.booleans()):  # a step that needed a block: the slot tells which
                sequence.table.block_ids.append(data.draw(st.integers(0, 15)))
            if len(sequence.table.block_ids) > 8 or data.draw(st.booleans()):
                sequence.table.block_ids = sequence.table.block_ids[-8:][::-1]
                sequence.table_version += 1
            sequence.num_computed = len(sequence.table.block_ids) - 1
        slots = [sequence.table.block_ids[-1] for sequence in sequences]
        batch = builder.build(sequences, [1] * len(sequences), slots)
        for row, sequence in zip(batch.block_tables.tolist(), sequences, strict=True):
            assert row[: len(sequence.table.block_ids)] == sequence.table.block_ids


# ── In the engine ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lone_steps", range(3, 9))
def test_an_urgent_request_that_forks_moves_others_to_another_row(llama, lone_steps):
    """The long one stays alone; then an urgent one with three samples takes the rows before it."""
    urgent = set()

    def policy(sequence):
        return sequence.request.request_id not in urgent, sequence.order

    engine = careful_engine(llama.lm, small(prefix_cache=False), policy=policy)
    short = llama.prompts(5, 5, 5, seed=7)
    (prompt,) = llama.prompts(6, seed=8)
    for one in short:
        engine.add_request(one, SamplingParams(max_tokens=2))
    long_id = engine.add_request(prompt, SamplingParams(max_tokens=20))
    outputs = {}
    for _ in range(lone_steps):
        step(engine, outputs)
    urgent.add(engine.add_request(short[0], SamplingParams(max_tokens=10, n=3)))
    drain(engine, outputs)
    assert outputs[long_id].token_ids == naively(llama.lm, prompt, 20)


def test_a_prompt_that_is_cached_to_its_end_computes_at_least_a_token():
    """Without it there are no logits; and only whole blocks are shared."""
    bench = Bench(cache=True)
    tokens = list(range(12))
    bench.cache_prefix(tokens)
    bench.add(12, prefix=tokens)
    bench.add(13, prefix=tokens)
    assert bench.step() == [(0, 4), (1, 1)]
    bench.drain()


def test_every_sample_locks_what_it_shares():
    bench = SchedulerBench(small(), cache=True)
    bench.add(8, n=3)
    bench.step()
    [node] = {sequence.node for sequence in bench.scheduler.running}
    assert len(bench.scheduler.running) == node.lock_count == 3
    bench.drain()


def test_seconds_of_the_host_are_those_outside_the_model(llama, monkeypatch):
    """By a clock that goes on only in the scheduler, 1 s a plan, and in the sampler, 10 s."""

    class Slow(Scheduler):
        def schedule(self):
            clock.now += 1
            return super().schedule()

    class SlowSampler(Sampler):
        def __call__(self, *inputs):
            clock.now += 10
            return super().__call__(*inputs)

    clock = SimpleNamespace(now=100)
    for module in (engine_module, runner_module):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    engine = Engine(llama.lm, small(), scheduler=Slow, sampler=SlowSampler())
    engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
    stats = engine.stats()
    assert (stats.steps, stats.host_seconds, stats.model_seconds) == (4, 4, 40)


def test_stats_count_what_happened(llama):
    engine = Engine(llama.lm, small(prefix_cache=False))
    generate(engine, llama.prompts(10, 7, seed=2), SamplingParams(max_tokens=4))
    stats = engine.stats()
    assert (stats.steps, stats.generated_tokens) == (4, 8)
    assert stats.computed_tokens == 10 + 7 + 2 * 3  # the last token of each is never computed
    assert (stats.blocks_free, stats.blocks_used, stats.blocks_cached) == (128, 0, 0)
    assert (stats.looked_up_tokens, stats.hit_tokens, stats.hit_rate) == (17, 0, 0.0)


def test_each_turn_finds_the_answers_before_it(llama):
    """Blocks that decodes have filled, behind a hit, too."""
    engine, [text] = Engine(llama.lm, small()), llama.prompts(9)
    for turn in range(3):
        known, whole = engine.stats().hit_tokens, (len(text) - 1) // 4 * 4
        [output] = generate(engine, [text], SamplingParams(max_tokens=10))
        assert engine.stats().hit_tokens - known == (whole if turn else 0)
        text = text + output.token_ids


def test_an_aborted_prompt_leaves_what_was_computed(llama):
    engine, [prompt] = Engine(llama.lm, small(max_batch_tokens=8)), llama.prompts(32)
    request_id = engine.add_request(prompt)
    engine.step()
    engine.step()
    engine.abort(request_id)
    generate(engine, [prompt], SamplingParams(max_tokens=1))
    assert engine.stats().hit_tokens == 16


def test_samples_fork_beside_a_prompt_that_goes_on(llama):
    """Two rows of logits, two tokens from the first of them, and no block to lock yet."""
    prompts = llama.prompts(2, 20, seed=3)
    params = [SamplingParams(max_tokens=5, n=2), SamplingParams(max_tokens=5)]
    outputs = generate(Engine(llama.lm, small(max_batch_tokens=12)), prompts, params)
    found = [sample.token_ids for output in outputs for sample in output.samples]
    expected = [llama.greedy(prompt, 5) for prompt in prompts]
    assert found == [expected[0], *expected]


def test_a_stream_yields_tokens_alone_and_its_end(llama):
    """Nothing of the steps that compute a prompt, and an abort without a token."""
    engine, [prompt] = Engine(llama.lm, small(max_batch_tokens=4)), llama.prompts(14)
    stream = engine.stream(prompt, SamplingParams(max_tokens=9))
    assert len(next(stream).token_ids) == 1
    [request_id] = engine._requests
    engine.abort(request_id)
    assert list(stream) == [Delta([], "", "abort")]


def test_who_is_aborted_while_swapped_out_gives_back_the_hosts_blocks(llama):
    engine = Engine(llama.lm, small(num_blocks=5, preemption="swap", prefix_cache=False))
    ids = [engine.add_request([1 + i] * 7, SamplingParams(max_tokens=9)) for i in range(2)]
    while engine.stats().swaps_out == 0:
        engine.step()
    host = engine.scheduler.host_pool
    assert host.num_free < host.num_blocks
    engine.abort(ids[1])
    assert host.num_free == host.num_blocks
    engine.check()


class FreesBeforeRemapping(BlockTable):
    """Broken: its own copy is freed, but the table goes on naming it."""

    __slots__ = ()

    def replace(self, index, block_id):
        self.pool.release(self.block_ids[index])


def test_equal_prompts_in_one_step_share_blocks(llama):
    """The second's table must name the first's blocks before its own copies are freed."""
    (prompt,) = llama.prompts(13, seed=1)
    engine = careful_engine(llama.lm, small())
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=9)) for _ in range(3)]
    outputs = step(engine)
    assert engine.stats().steps == 1 and engine.stats().hit_tokens == 0  # all three were misses
    tables = [sequence.table.block_ids for sequence in engine.scheduler]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({table[3] for table in tables}) == 3
    assert [engine.pool.ref_count(b) for b in tables[0]] == [4, 4, 4, 1]  # three and the tree
    assert engine.stats().blocks_used == 3 + 3
    drain(engine, outputs)
    want = naively(llama.lm, prompt, 9)
    assert [outputs[i].token_ids for i in ids] == [want] * 3
    assert_empty(engine)

    broken = Engine(llama.lm, small(), block_table=FreesBeforeRemapping)
    with pytest.raises(AssertionError, match="reference count"):
        generate(broken, [prompt] * 2, SamplingParams(max_tokens=9))


class CountsEveryAdmission(Scheduler):
    """Broken: coming back after a preemption counts as a hit."""

    def _admit(self, sequence, plan):
        count, sequence.num_preemptions = sequence.num_preemptions, 0
        admitted = super()._admit(sequence, plan)
        sequence.num_preemptions = count
        return admitted


def test_recompute_is_not_a_hit(llama):
    """A preempted request may find its own blocks again; nobody shared anything."""

    def stats(scheduler):
        prompts = llama.prompts(9, 10, 11, seed=9)
        engine = Engine(llama.lm, small(num_blocks=9), scheduler=scheduler)
        generate(engine, prompts, SamplingParams(max_tokens=18))
        stats = engine.stats()
        assert stats.preemptions >= 2
        # Less was computed than prompts and outputs again for each preemption: some came back.
        return stats.hit_tokens, stats.looked_up_tokens

    assert stats(Scheduler) == (0, 9 + 10 + 11)
    assert stats(CountsEveryAdmission)[0] > 0


def test_outputs_that_are_read_late_are_those_of_their_step(llama):
    engine = careful_engine(llama.lm, small())
    for prompt in llama.prompts(5, 7, seed=3):
        engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True, n=2))
    steps = [engine.step() for _ in range(4)]
    lengths = [[len(one.token_ids) for one in output.samples] for output in steps[0] + steps[3]]
    assert lengths == [[1, 1], [1, 1], [4, 4], [4, 4]]
    assert [one.finish_reason for one in [*steps[2], *steps[3][1:]]] == [None, None, "length"]
    assert engine.step() == []
