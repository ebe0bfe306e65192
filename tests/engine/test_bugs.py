"""Bugs that real engines shipped. Where it is cheap, the bug itself is built here, and
must be caught by the same check."""

import pytest
import torch
from helpers import (
    LocksOnlyAncestors,
    NaiveBackend,
    RecordingSampler,
    assert_empty,
    assert_kv,
    cached_prefixes,
    careful_engine,
    drain,
    generate,
    greedy_tokens,
    make_model,
    naive_kv,
    small,
    step,
    with_weights,
)

from minikv import (
    BlockTable,
    Engine,
    RadixCache,
    SamplingParams,
    Scheduler,
    TorchAttention,
)

ONE = SamplingParams(max_tokens=1)


class FreesBeforeRemapping(BlockTable):
    """Broken: its own copy is freed, but the table goes on naming it."""

    __slots__ = ()

    def replace(self, index, block_id):
        self.pool.release(self.block_ids[index])


def test_two_equal_prompts_in_one_step(llama):
    """The second finds the first's blocks in the tree: its table must name those before its
    own copies are freed."""
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
    want = greedy_tokens(llama.lm, prompt, 9)
    assert [outputs[i].token_ids for i in ids] == [want] * 3
    assert_empty(engine)

    broken = Engine(llama.lm, small(), block_table=FreesBeforeRemapping)
    with pytest.raises(AssertionError, match="reference count"):
        generate(broken, [prompt] * 2, SamplingParams(max_tokens=9))


def test_lock_covers_the_matched_node(llama):
    """While a request stands on a hit, none of it can be evicted."""

    def evictable_while_running(cache):
        prompt, other = llama.prompts(16, 6, seed=2)
        engine = Engine(llama.lm, small(), prefix_cache=cache)
        engine.generate([prompt], ONE)
        engine.add_request(prompt + other, SamplingParams(max_tokens=6))
        engine.step()
        assert engine.stats().hit_tokens == 16
        evicted = engine.cache.evict(100)
        (output,) = drain(engine).values()
        assert output.token_ids == greedy_tokens(llama.lm, prompt + other, 6)
        return evicted

    assert evictable_while_running(RadixCache) == 0
    assert evictable_while_running(LocksOnlyAncestors) > 0


class KeepsIdentity(RadixCache):
    """Broken: an evicted block goes back to the pool, but its prefix still leads to it."""

    def __init__(self, pool, block_size):
        super().__init__(pool, block_size)
        self.ghosts = {}

    def evict(self, num_blocks):
        self.ghosts |= cached_prefixes(self)
        return super().evict(num_blocks)

    def match(self, token_ids, salt=None):
        result, size = super().match(token_ids, salt), self.block_size
        found = [self.ghosts.get((salt, tuple(token_ids[:end]))) for end in
                 range(size, len(token_ids) + 1, size)]  # fmt: skip
        blocks = [ghost[0] for ghost in found if ghost is not None]
        if len(blocks) <= len(result.block_ids):
            return result
        return result._replace(block_ids=blocks, num_tokens=len(blocks) * size)


def test_a_reused_block_loses_its_old_identity(llama):
    """After its block was given to others, the old prefix is a miss, and computed anew."""
    first, second = llama.prompts(12, 15, seed=3)

    def serve(**parts):
        engine = careful_engine(llama.lm, small(num_blocks=4), **parts)
        (before,) = generate(engine, [first], ONE)
        old = set(cached_prefixes(engine.cache))
        generate(engine, [second], ONE)  # needs all four blocks
        assert not old & set(cached_prefixes(engine.cache))
        hits = engine.stats().hit_tokens
        (after,) = generate(engine, [first], ONE)
        assert engine.stats().hit_tokens == hits == 0
        assert before.token_ids == after.token_ids == greedy_tokens(llama.lm, first, 1)

    serve()
    with pytest.raises(AssertionError):
        serve(prefix_cache=KeepsIdentity)


class MatchesEverything(RadixCache):
    """Broken: it also finds the block that would leave nothing to compute."""

    def match(self, token_ids, salt=None):
        longest = super().match(token_ids, salt)
        for token in range(300):
            longer = super().match([*token_ids, token], salt)
            if longer.num_tokens > longest.num_tokens:
                return longer
        return longest


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_full_hit_computes_at_least_one_token(llama, block_size):
    """Else there would be no logits."""
    (prompt,) = llama.prompts(12, seed=4)
    config = small(block_size=block_size)
    engine = careful_engine(llama.lm, config)
    (miss,) = generate(engine, [prompt], SamplingParams(max_tokens=5))
    computed = engine.stats().computed_tokens
    (hit,) = generate(engine, [prompt], ONE)
    assert engine.stats().hit_tokens == 12 - block_size
    assert engine.stats().computed_tokens - computed == block_size
    assert hit.token_ids == miss.token_ids[:1] == greedy_tokens(llama.lm, prompt, 1)

    broken = Engine(llama.lm, config, prefix_cache=MatchesEverything)
    with pytest.raises((RuntimeError, LookupError)):  # no logits, no progress
        for _ in range(2):
            generate(broken, [prompt], SamplingParams(max_tokens=5))


class RemembersMatches(RadixCache):
    """Broken: the first answer to a lookup is given for ever."""

    def __init__(self, pool, block_size):
        super().__init__(pool, block_size)
        self.answers = {}

    def match(self, token_ids, salt=None):
        name = salt, tuple(token_ids)
        if name not in self.answers:
            self.answers[name] = super().match(token_ids, salt)
        return self.answers[name]


def test_hits_are_looked_up_again(llama):
    """A hit of a request that could not be admitted, or was preempted, may be gone when
    its turn comes."""

    def refused(**parts):
        prefix, rest, other = llama.prompts(12, 9, 7, seed=5)
        engine = careful_engine(llama.lm, small(num_blocks=8), **parts)
        generate(engine, [prefix], ONE)  # 3 blocks stay cached
        running = engine.add_request(other, SamplingParams(max_tokens=9))
        outputs = step(engine)
        held = [engine.pool.allocate() for _ in range(2)]
        waiting = engine.add_request(prefix + rest, SamplingParams(max_tokens=3))
        engine.step()
        (sequence,) = engine.scheduler.waiting  # it found its 12 tokens, but no room for the rest
        assert engine.cache.evict(3) == 3
        for block_id in held:
            engine.pool.release(block_id)
        drain(engine, outputs)
        assert sequence.num_cached == 0 and engine.stats().hit_tokens == 0
        assert outputs[waiting].token_ids == greedy_tokens(llama.lm, prefix + rest, 3)
        assert outputs[running].token_ids == greedy_tokens(llama.lm, other, 9)

    def preempted(**parts):
        prefix, rest, other = llama.prompts(8, 6, 11, seed=6)
        engine = careful_engine(llama.lm, small(num_blocks=8), **parts)
        generate(engine, [prefix], ONE)
        ids = [
            engine.add_request(other, SamplingParams(max_tokens=17)),
            engine.add_request(prefix + rest, SamplingParams(max_tokens=15)),
        ]
        outputs = {}
        while not engine.stats().preemptions:
            step(engine, outputs)
        engine.cache.evict(100)
        drain(engine, outputs)
        assert engine.stats().hit_tokens == 8  # the first lookup's
        for i, prompt, count in zip(ids, (other, prefix + rest), (17, 15), strict=True):
            assert outputs[i].token_ids == greedy_tokens(llama.lm, prompt, count)

    for scenario in (refused, preempted):
        scenario()
    with pytest.raises((AssertionError, ValueError)):
        refused(prefix_cache=RemembersMatches)


class NeverSwapsIn(Scheduler):
    """Broken: a swapped-out sequence is never let in again."""

    def _admit(self, sequence, plan):
        return sequence.host_block_ids is None and super()._admit(sequence, plan)


def test_a_swapped_out_request_does_not_block_the_queue(llama):
    """It returns when there is room, those behind it follow, and if it is aborted its host
    blocks are free at once. A queue that cannot move is an error that says so, not a hang."""

    def until_swapped(**parts):
        config = small(num_blocks=8, preemption="swap", host_blocks=4, max_num_seqs=2)
        engine = careful_engine(llama.lm, config, **parts)
        prompts = llama.prompts(9, 9, 14, 3, seed=7)
        ids = [engine.add_request(p, SamplingParams(max_tokens=16)) for p in prompts]
        outputs = {}
        while not engine.stats().swaps_out:
            step(engine, outputs)
        return engine, prompts, ids, outputs

    engine, prompts, ids, outputs = until_swapped()
    assert engine.scheduler.host_pool.num_free < 4
    drain(engine, outputs, limit=200)
    expected = [greedy_tokens(llama.lm, prompt, 16) for prompt in prompts]
    assert [outputs[i].token_ids for i in ids] == expected
    assert engine.stats().swaps_in >= 1
    assert_empty(engine)

    engine, prompts, ids, outputs = until_swapped()
    engine.abort(ids[1])
    assert engine.scheduler.host_pool.num_free == 4
    drain(engine, outputs, limit=200)
    assert [outputs[i].token_ids for i in (ids[0], *ids[2:])] == [expected[0], *expected[2:]]

    engine, *_ = until_swapped(scheduler=NeverSwapsIn)
    with pytest.raises(RuntimeError, match="no request can run: the first in the queue"):
        drain(engine, limit=200)


class SaltsAsTokens(RadixCache):
    """Broken: the salt is put in front of the text."""

    def match(self, token_ids, salt=None):
        result = super().match([*(salt or ()), *token_ids])
        return result._replace(
            block_ids=result.block_ids[len(salt or ()) // self.block_size :],
            num_tokens=max(0, result.num_tokens - len(salt or ())),
        )

    def insert(self, token_ids, block_ids, salt=None):
        return super().insert(token_ids, block_ids)


def test_salts(llama):
    """Another salt misses and the same salt hits; text and salt cannot collide."""
    (prompt,) = llama.prompts(16, seed=8)
    head, tail = tuple(prompt[:4]), prompt[4:]

    def hits(cache=RadixCache, *requests):
        engine = Engine(llama.lm, small(), prefix_cache=cache)
        found = []
        for tokens, salt in requests:
            before = engine.stats().hit_tokens
            params = SamplingParams(max_tokens=3, cache_salt=salt)
            (output,) = generate(engine, [tokens], params)
            assert output.token_ids == greedy_tokens(llama.lm, tokens, 3)
            found.append(engine.stats().hit_tokens - before)
        return found

    tenants = [(prompt, "a"), (prompt, "b"), (prompt, None), (prompt, "a"), (prompt, "b")]
    assert hits(RadixCache, *tenants, (prompt, None)) == [0, 0, 0, 12, 12, 12]
    requests = [(prompt, None), (tail, head), (tail, None), (tail, head)]
    assert hits(RadixCache, *requests) == [0, 0, 0, 8]
    assert hits(RadixCache, (tail, head), (prompt, None), (prompt, ())) == [0, 0, 0]
    with pytest.raises(AssertionError):
        assert hits(SaltsAsTokens, (prompt, None), (tail, head)) == [0, 0]


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


class ForgetsTheRunning(Engine):
    """Broken: new weights, an empty cache, but running requests keep K and V of the old ones."""

    def update_weights(self, state_dict):
        self.runner.transformer = with_weights(self.lm, state_dict).transformer
        self.cache.clear()


def test_a_weight_update_drops_every_cached_prefix(llama):
    """Those of finished requests, and those of running ones once they end."""
    state = {k: v.detach() for k, v in make_model("llama", seed=11).state_dict().items()}
    new = with_weights(llama.lm, state)

    def after_update(engine_class):
        done, running, waiting = llama.prompts(16, 18, 9, seed=11)
        engine = engine_class(llama.lm, small(num_blocks=16, max_num_seqs=2))
        generate(engine, [done], ONE)
        for prompt in (running, running, waiting):
            engine.add_request(prompt, SamplingParams(max_tokens=10))
        outputs = {}
        for _ in range(4):
            step(engine, outputs)
        engine.update_weights(state)
        assert engine.stats().blocks_cached == 0
        drain(engine, outputs)
        follow_up = running + next(iter(outputs.values())).token_ids
        found = [o.token_ids for o in generate(engine, [done, follow_up, waiting], ONE)]
        return found, [greedy_tokens(new, prompt, 1) for prompt in (done, follow_up, waiting)], (
            engine, outputs[max(outputs)].token_ids, waiting
        )  # fmt: skip

    found, expected, (engine, tokens, waiting) = after_update(Engine)
    assert found == expected
    assert tokens == greedy_tokens(new, waiting, 10)  # it had not begun: all new weights
    for (_, prefix), (block_id, _) in cached_prefixes(engine.cache).items():
        kv = naive_kv(new, prefix)[:, -4:]
        assert_kv(engine.store, [block_id], kv)
    with pytest.raises(AssertionError):
        _, _, (engine, _, _) = after_update(ForgetsTheRunning)
        for (_, prefix), (block_id, _) in cached_prefixes(engine.cache).items():
            assert_kv(engine.store, [block_id], naive_kv(new, prefix)[:, -4:])


def skips_copies(plan):
    """Broken: a shared block is replaced, but what was in it stays behind."""
    plan.copies.clear()


def skips_swaps(plan):
    """Broken: a swapped-out sequence comes back to whatever the blocks hold."""
    plan.swap_in.clear()


def test_what_is_stored_for_a_block_travels_with_it(llama):
    """Through fork, copy-on-write, swap and eviction, a block's content is that of its tokens.

    That content is K and V. Scales of quantised K and V belong in the same `KVStore`, moved by
    the same `copy_to`, and then under this test.
    """

    def run(broken=lambda plan: None):
        engine = Engine(llama.lm, small(num_blocks=18, preemption="swap", host_blocks=12))
        prompts = llama.prompts(10, 13, 6, seed=12)
        prompts[2] = prompts[0][:8] + prompts[2]
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, SamplingParams(max_tokens=16, n=3, temperature=1.0, seed=i))
        copies = evicted = 0
        move, evict = engine.runner.move_blocks, engine.cache.evict

        def count_copies(plan):
            nonlocal copies
            copies += len(plan.copies)
            broken(plan)
            move(plan)

        def count_evicted(num_blocks):
            nonlocal evicted
            evicted += evict(num_blocks)
            return num_blocks

        engine.runner.move_blocks, engine.cache.evict = count_copies, count_evicted
        while engine.has_unfinished:
            step(engine)
            for sequence in engine.scheduler:
                kv = naive_kv(llama.lm, sequence.token_ids[: sequence.num_computed or 1])
                if sequence.host_block_ids is not None:
                    assert_kv(engine.runner.host_store, sequence.host_block_ids, kv)
                elif sequence.table is not None:
                    assert_kv(engine.store, sequence.table.block_ids, kv)
        for (_, prefix), (block_id, _) in cached_prefixes(engine.cache).items():
            assert_kv(engine.store, [block_id], naive_kv(llama.lm, prefix)[:, -4:])
        stats = engine.stats()
        assert min(stats.swaps_out, stats.swaps_in, copies, evicted, stats.hit_tokens) > 0

    run()
    for broken in (skips_copies, skips_swaps):
        with pytest.raises(AssertionError):
            run(broken)


def hit_and_miss(pair, backend, budget=64):
    """Logits of a prompt's last token without and with a cached prefix, and the oracle's."""
    (prompt,) = pair.prompts(37, seed=13)
    found = []
    for warm in ([], [prompt[:32]]):
        sampler = RecordingSampler()
        config = small(max_batch_tokens=budget)
        engine = Engine(pair.lm, config, attention=backend, sampler=sampler)
        for one in warm:
            generate(engine, [one], ONE)
        generate(engine, [prompt], ONE)
        assert engine.stats().hit_tokens == 32 * len(warm)
        found.append(sampler.calls[-1][0])
    return *found, pair.lm.logits(prompt)[-1]


class SquareMask(NaiveBackend):
    """Broken: query i of a chunk sees the first i keys, wherever the chunk stands."""

    square_mask = True


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_chunk_after_a_prefix_needs_a_rectangular_mask(checkpoint, name):
    """Whether the prefix was cached or is the prompt's own beginning."""
    pair = checkpoint(name)
    for backend in (TorchAttention, NaiveBackend):
        for budget in (64, 10):
            miss, hit, expected = hit_and_miss(pair, backend, budget)
            torch.testing.assert_close(miss, expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(hit, expected, rtol=1e-3, atol=1e-3)
    miss, hit, expected = hit_and_miss(pair, SquareMask)
    torch.testing.assert_close(miss, expected, rtol=1e-3, atol=1e-3)  # one chunk: it is a square
    assert (hit - expected).abs().max() > 0.1


def test_positions_reset_and_continue(llama):
    """A new request begins at position 0; after a hit the first new token stands at the number
    of cached tokens; decode goes on from there."""

    seen = []

    class Watching(TorchAttention):
        def bind(self, batch):
            seen.append(batch.positions.tolist())
            return super().bind(batch)

    engine = Engine(llama.lm, small(max_batch_tokens=8), attention=Watching)
    first, second = llama.prompts(9, 6, seed=14)
    three = SamplingParams(max_tokens=3)
    generate(engine, [first], three)
    assert seen == [[*range(8)], [8], [9], [10]]
    seen.clear()
    generate(engine, [second], three)
    assert seen == [[*range(6)], [6], [7]]
    seen.clear()
    generate(engine, [first[:8] + second], three)  # two blocks are cached
    assert seen == [[*range(8, 14)], [14], [15]]
    seen.clear()
    generate(engine, [first[:4] + second, second], three)  # one block each
    assert seen == [[*range(4, 10), 4, 5], [10, 6], [11, 7]]


class IgnoresTheHit(NaiveBackend):
    """Broken: the lookup succeeds, tokens are saved, and attention never looks there."""

    ignore_prefix = True


def test_logits_on_a_hit_equal_logits_on_a_miss(pair):
    """Counters cannot tell whether a hit was really read; logits can."""
    miss, hit, expected = hit_and_miss(pair, TorchAttention)
    torch.testing.assert_close(miss, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(hit, miss, rtol=1e-3, atol=1e-3)
    miss, hit, _ = hit_and_miss(pair, IgnoresTheHit)
    assert (hit - miss).abs().max() > 0.05
