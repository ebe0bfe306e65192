"""Long random traces through a real engine: every invariant after every operation, the
oracle's tokens for every request, and in the cache exactly what a plain dictionary says.

Among what this finds are bugs that real engines shipped: an evicted block keeps its old prefix; a
hit is not looked up again when its request's turn comes, or is not locked; what is swapped out
never returns; salts are mixed up; a weight update leaves K and V of the old weights; a copy or a
swap forgets a block; positions do not go on after a hit; a chunk's mask forgets the prefix.
"""

import functools
from collections import Counter
from functools import partial

import pytest
from helpers import (
    Clairvoyant,
    assert_kv,
    cached_prefixes,
    careful_engine,
    drafting_engine,
    greedy_tokens,
    make_model,
    naive_kv,
    run_ahead,
    small,
    with_weights,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from thorough import thorough_after

from minikv import Engine, OutOfBlocks, RadixCache, SamplingParams
from minikv.checkpoint import read_weights

MAX_STEPS = 600  # more than any trace needs to drain


@functools.cache
def alone(lm, prompt, params):
    """What a request gives with an engine to itself."""
    output = Engine(lm, small(prefix_cache=False)).generate([list(prompt)], params)[0]
    return [(sample.token_ids, sample.finish_reason) for sample in output.samples]


@functools.cache
def beams_alone(lm, prompt, width, max_tokens):
    return Engine(lm, small()).beam_search(list(prompt), width, max_tokens)


class Added:
    """A request as the machine knows it."""

    def __init__(self, request, prompt, params, lm):
        self.request, self.prompt, self.params = request, prompt, params
        self.lm = lm  # None once the weights changed under it: its tokens are of two models
        self.output = None

    def expected(self):
        params = self.params
        if params.temperature > 0:
            return alone(self.lm, self.prompt, params)
        tokens, reason = greedy_tokens(self.lm, list(self.prompt), params.max_tokens), "length"
        for i, token in enumerate(tokens):
            if token in params.stop:
                tokens, reason = tokens[: i + 1], "stop"
                break
        return [(tokens, reason)] * params.n


class EngineMachine(RuleBasedStateMachine):
    """The model of the cache is a set: (salt, prefix of whole blocks). Nothing is in it but
    what running and finished sequences computed since the last `clear`; nothing that was in
    it goes but by eviction; what a running sequence has computed is in it."""

    def __init__(self, models, seen):
        super().__init__()
        self.models = models  # by name: two models of one kind, and their weights
        self.seen = seen  # how often things happened, over all traces

    @initialize(
        name=st.sampled_from(["llama", "qwen2-window"]),
        way=st.sampled_from(["in turns", "ahead", "drafting"]),
        block_size=st.integers(1, 5),
        capacity=st.sampled_from([24, 32, 48]),  # tokens
        seats=st.integers(2, 6),
        budget=st.integers(1, 24),
        threshold=st.sampled_from([0, 0, 1, 6]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        host_blocks=st.sampled_from([0, 2, 8, 24]),
    )
    def begin(
        self, name, way, block_size, capacity, seats, budget, threshold, prefix_cache,
        host_blocks,
    ):  # fmt: skip
        self.lms, self.states = self.models[name]
        self.runs_ahead, self.weights = way == "ahead", 0
        self.seen[name, way] += 1
        num_blocks = -(-capacity // block_size)
        self.config = small(
            block_size=block_size, num_blocks=num_blocks, max_num_seqs=seats,
            max_batch_tokens=max(seats, budget), min_prefix_tokens=threshold,
            prefix_cache=prefix_cache, preemption="swap" if host_blocks else "recompute",
            host_blocks=host_blocks,
        )  # fmt: skip
        machine = self

        class CountingCache(RadixCache):
            def evict(self, num_blocks):
                freed = super().evict(num_blocks)
                machine.evicted += freed
                machine.seen["evicted blocks"] += freed
                return freed

        make = (
            partial(drafting_engine, drafter=Clairvoyant()) if way == "drafting" else careful_engine
        )
        self.engine = make(self.lms[0], self.config, prefix_cache=CountingCache)
        if self.runs_ahead:
            run_ahead(self.engine)
        self.added: dict[int, Added] = {}
        self.known = set()  # what should be cached
        self.writers: list[Added] = []  # whose blocks may be in the cache
        self.evicted = 0
        self.loose = set()  # sequences that ran when the cache was cleared under them

    @property
    def lm(self):
        return self.lms[self.weights]

    @property
    def unfinished(self):
        return [added for added in self.added.values() if added.output is None]

    # ── What may happen ───────────────────────────────────────────────────────

    tokens = st.lists(st.integers(1, 3), min_size=1, max_size=14).map(tuple)
    widths = st.sampled_from([1, 1, 2, 3])

    @rule(
        prompts=st.lists(tokens, min_size=1, max_size=3),
        max_tokens=st.integers(1, 18),
        n=widths,
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        seed=st.integers(0, 2),
        stop=st.sampled_from([(), (), (), tuple(range(0, 300, 9))]),
        salt=st.sampled_from([None, None, None, "salt"]),
        follow=st.booleans(),
    )
    def add(self, prompts, max_tokens, n, temperature, seed, stop, salt, follow):
        """Some requests at once. `follow`: they are the next turn of a finished one, so that
        its output is looked up too."""
        done = [a for a in self.added.values() if a.output is not None]
        if follow and done:
            turn = done[-1].prompt + tuple(done[-1].output.token_ids)
            prompts = [turn + prompt[:3] for prompt in prompts]
        params = SamplingParams(
            max_tokens=max_tokens, n=n, temperature=temperature, seed=seed, stop=stop,
            cache_salt=salt,
        )  # fmt: skip
        config = self.config
        for prompt in prompts:
            needed = -(-(len(prompt) + max_tokens) // config.block_size)
            if needed > config.num_blocks or n > config.max_num_seqs:
                with pytest.raises(ValueError):
                    self.engine.add_request(list(prompt), params)
                continue
            request_id = self.engine.add_request(list(prompt), params)
            (request,) = (s.request for s in self.engine.scheduler if s.order == (request_id, 0))
            self.added[request_id] = Added(request, prompt, params, self.lm)
            self.writers.append(self.added[request_id])

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(steps=st.integers(1, 3))
    def step(self, steps):
        for _ in range(steps):
            self.one_step()
            self.engine.check()

    def one_step(self):
        for output in self.engine.step():
            if output.finish_reason is not None:
                self.finish(output)

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(steps=st.integers(4, 12))
    def many_steps(self, steps):
        self.step(steps)

    def finish(self, output):
        added = self.added[output.request_id]
        added.output = output
        self.seen["finished requests"] += 1
        self.seen["samples beside the first"] += len(output.samples) - 1
        if added.lm is not None:
            found = [(sample.token_ids, sample.finish_reason) for sample in output.samples]
            assert found == added.expected()

    @precondition(lambda self: self.unfinished)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        added = self.unfinished[which % len(self.unfinished)]
        self.engine.abort(added.request.request_id)
        del self.added[added.request.request_id]
        self.seen["aborts"] += 1

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(countdown=st.integers(0, 1))
    def interrupt(self, countdown):
        """After a step that fails in the middle, everything is computed again."""
        self.engine.attention.interrupt(OSError("the cable was pulled"), countdown)
        try:
            self.one_step()
            # Ahead, a step that only reads what was launched before has nothing to fail in.
            assert self.runs_ahead
        except OSError:
            self.forget()
        self.engine.attention.interrupt(None, 0)

    @rule(prompt=tokens, width=widths, max_tokens=st.integers(1, 5))
    def beam_search(self, prompt, width, max_tokens):
        try:
            found = self.engine.beam_search(list(prompt), width, max_tokens)
        except OutOfBlocks:
            return
        except ValueError:
            size = -(-(len(prompt) + max_tokens) // self.config.block_size)
            assert size > self.config.num_blocks or width > self.config.max_num_seqs
            return
        self.seen["beam searches"] += 1
        expected = beams_alone(self.lm, prompt, width, max_tokens)
        assert [beam.token_ids for beam in found] == [beam.token_ids for beam in expected]

    @precondition(lambda self: self.config.prefix_cache)
    @rule(num_blocks=st.integers(0, 6))
    def evict(self, num_blocks):
        evictable = self.engine.cache.num_evictable_blocks
        assert self.engine.cache.evict(num_blocks) == min(num_blocks, evictable)

    @precondition(lambda self: self.config.prefix_cache)
    @rule()
    def clear(self):
        self.engine.cache.clear()
        self.forget()
        self.loose = {s for s in self.engine.scheduler if s.table is not None}

    @rule()
    def update_weights(self):
        self.weights = 1 - self.weights
        self.engine.update_weights(self.states[self.weights])
        self.forget()
        for added in self.unfinished:
            if any(sequence.num_output for sequence in added.request.sequences):
                added.lm = None
            else:
                added.lm = self.lm

    # ── What must hold ────────────────────────────────────────────────────────

    def forget(self):
        """The cache was cleared: only who is still there can fill it."""
        self.known, self.writers, self.loose = set(), self.unfinished, set()

    def prefixes(self, sequence, num_tokens):
        size, tokens = self.config.block_size, tuple(sequence.token_ids)
        salt = sequence.request.params.cache_salt
        return {(salt, tokens[:end]) for end in range(size, num_tokens + 1, size)}

    @invariant()
    def nothing_is_broken(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        stats = self.engine.stats()
        assert stats.blocks_free + stats.blocks_used == stats.blocks_total
        assert stats.running <= self.config.max_num_seqs
        assert stats.hit_tokens <= stats.looked_up_tokens

    @invariant()
    def the_cache_holds_what_it_should(self):
        if not hasattr(self, "engine") or self.engine.cache is None:
            return
        found = set(cached_prefixes(self.engine.cache))
        allowed, required = set(self.known), set()
        for added in self.writers:
            for sequence in added.request.sequences:
                known = len(added.prompt) + sequence.num_output
                # Ahead, the token that ends a sequence has gone through the model as well.
                allowed |= self.prefixes(sequence, known - (not self.runs_ahead))
                if sequence.table is None:
                    self.loose.discard(sequence)
                elif sequence not in self.loose:
                    # Ahead, what the step under way computes is shared when it is read.
                    under_way = sequence.num_computed == len(sequence.token_ids)
                    required |= self.prefixes(sequence, sequence.num_computed - under_way)
        assert found <= allowed
        assert required <= found
        if not self.evicted:
            assert self.known <= found
        self.known, self.evicted = found, 0

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for _ in range(MAX_STEPS):
            if not engine.has_unfinished:
                break
            self.step(1)
        assert not engine.has_unfinished, engine.stats()
        assert not self.unfinished
        if engine.cache is not None:
            # What is cached are the keys and values of those tokens, under these weights.
            prefixes = cached_prefixes(engine.cache)
            inner = {
                (salt, tokens[:end]) for salt, tokens in prefixes for end in range(len(tokens))
            }
            for salt, tokens in prefixes.keys() - inner:
                size = self.config.block_size
                ends = range(size, len(tokens) + 1, size)
                blocks = [prefixes[salt, tokens[:end]][0] for end in ends]
                assert_kv(engine.store, blocks, naive_kv(self.lm, tokens))
            assert all(locks == 0 for _, locks in prefixes.values())
            engine.cache.evict(len(prefixes))
        assert engine.pool.num_free == engine.pool.num_blocks
        engine.check()
        stats = engine.stats()
        self.seen["traces"] += 1
        self.seen["hit tokens"] += stats.hit_tokens
        self.seen["preemptions"] += stats.preemptions
        self.seen["swaps in"] += stats.swaps_in
        self.seen["steps"] += stats.steps
        if stats.speculation is not None:
            self.seen["accepted drafts"] += stats.speculation.accepted
            self.seen["wrong drafts"] += stats.speculation.drafts - stats.speculation.accepted


@pytest.mark.parametrize("traces", thorough_after(1, [30, 100]))
def test_random_traces(checkpoint, traces):
    models = {}
    for name in ("llama", "qwen2-window"):
        pair = checkpoint(name)
        other = {k: v.detach() for k, v in make_model(name, seed=99).state_dict().items()}
        states = [read_weights(pair.folder), other]
        models[name] = [pair.lm, with_weights(pair.lm, other)], states
    seen = Counter()
    run_state_machine_as_test(
        lambda: EngineMachine(models, seen),
        settings=settings(max_examples=traces, stateful_step_count=40),
    )
    if traces >= 100:  # fewer may miss a kind
        assert len(seen) == 18 and min(seen.values()) > 1, seen
