"""The prefix cache that asks a policy what to evict, and the hint of a request."""

import itertools
import random
from collections import Counter

import pytest
from helpers import (
    LocksOnlyAncestors,
    assert_reached,
    careful_engine,
    generate,
    small,
    with_windows,
)
from thorough import thorough_after

from minikv import Engine, EngineConfig, RadixCache, SamplingParams
from minikv.course.judge.stand_ins import LoggingPool
from minikv.groups import GroupCache
from minikv.retention import (
    LONGEST,
    MOST,
    RetainingCache,
    by_age,
    pinned,
    time_to_live,
    whole_conversations,
)

ANSWER = dict(max_tokens=4, ignore_eos=True)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Case:
    """A cache over blocks of one token, which is a letter."""

    def __init__(self, num_blocks=40, policy=pinned, make=RetainingCache):
        self.pool, self.clock, self.names = LoggingPool(num_blocks), Clock(), {}
        more = (policy, self.clock) if make is RetainingCache else ()
        self.cache = make(self.pool, 1, *more)
        self.locked = []

    def insert(self, word):
        new = [self.pool.allocate() for _ in word]
        result = self.cache.insert([ord(one) for one in word], new)
        for place, block_id in enumerate(result.block_ids):
            self.names[block_id] = word[: place + 1]
        for block_id in new:
            self.pool.release(block_id)
        return result.node

    def match(self, word):
        return self.cache.match([ord(one) for one in word]).node

    def evict(self, count):
        self.pool.freed.clear()
        assert self.cache.evict(count) == len(self.pool.freed)
        self.cache.check()
        return [self.names[block_id] for block_id in self.pool.freed]


def random_case(rng, policy, make=RetainingCache):
    """What two caches free, in order, in the same random program."""
    case = Case(policy=policy, make=make)
    told = []
    for _ in range(60):
        word = "".join(rng.choice("aab") for _ in range(rng.randint(1, 6)))
        what = rng.choice(["insert", "insert", "match", "lock", "unlock", "evict", "wait"])
        if what == "insert" and len(word) <= case.pool.num_free:
            case.insert(word)
        elif what == "match":
            case.match(word)
        elif what == "lock":
            case.locked.append(case.match(word))
            case.cache.lock(case.locked[-1])
        elif what == "unlock" and case.locked:
            case.cache.unlock(case.locked.pop(rng.randrange(len(case.locked))))
        elif what == "evict":
            told.append(case.evict(rng.randint(0, 6)))
        elif what == "wait":
            case.clock.now += rng.choice([0.5, 1, 20])
    return told


@pytest.mark.parametrize("policy", thorough_after(1, [pinned, by_age, time_to_live(5)]))
def test_without_hints_every_policy_is_age(policy):
    """So a time to live that is the same for all changes nothing."""
    seen = Counter()
    for seed in range(150):
        plain = random_case(random.Random(seed), policy, RadixCache)
        assert random_case(random.Random(seed), policy) == plain, seed
        seen["evictions of several"] += sum(len(set(words)) > 1 for words in plain)
    assert_reached(seen, {"evictions of several": 250})


def test_age_takes_one_conversation_after_the_other():
    """Conversations grow in turn, and each is evicted to its end before the next is begun."""
    for seed in range(50):
        rng = random.Random(seed)
        case, words = Case(200, by_age), dict.fromkeys("ABCD", "")
        for _ in range(30):
            name = rng.choice("ABCD")
            words[name] = (words[name] or name) + rng.choice("xyz")
            case.insert(words[name])
        gone = [word[0] for _ in range(200) for word in case.evict(1)]
        assert len(gone) == sum(map(len, words.values()))
        assert sum(one != other for one, other in itertools.pairwise(gone)) <= 3


def test_pins_go_last_and_end():
    case = Case()
    for word in ("ab", "ac", "xy", "z"):
        case.insert(word)
    assert case.cache.pin(case.match("ab"), 10) and case.cache.pin(case.match("z"), 30)
    case.insert("q")
    assert case.evict(3) == ["ac", "xy", "x"]  # not a, which ab needs
    case.clock.now += 10
    assert case.evict(3) == ["ab", "a", "q"]  # ab's time is over
    assert case.evict(3) == ["z"]  # a pin is only a wish


def test_a_parent_takes_over_what_its_last_child_had():
    case = Case()
    case.insert("a")
    case.cache.lock(case.match("a"))
    case.cache.pin(case.insert("abc"), 10)
    case.cache.unlock(case.match("a"))
    assert case.evict(2) == ["abc", "ab"]
    case.insert("x")
    assert case.evict(1) == ["x"]
    case.clock.now += 10
    case.insert("x")
    assert case.evict(1) == ["a"]


def test_whoever_comes_back_ends_its_pin():
    case = Case()
    node = case.insert("ab")
    case.cache.pin(node, 50)
    case.cache.lock(node)
    case.cache.unlock(node)
    case.insert("x")
    assert case.evict(1) == ["ab"]


def test_pins_hold_a_share_of_the_pool_and_for_a_limited_time():
    case = Case(8)
    assert case.cache.pin(case.insert("abc"), 1e9)
    assert case.cache.pin(case.insert("abd"), 1e9)  # four blocks, of which they share two
    assert not case.cache.pin(case.insert("x"), 1)
    assert MOST * 8 == 4 and set(case.cache.pins.values()) == {case.clock.now + LONGEST}
    case.clock.now += LONGEST
    assert case.cache.pin(case.match("x"), 1)


@pytest.mark.parametrize(("policy", "order"), [
    (by_age, ["sab", "x", "sac", "sa", "sd", "s"]),
    (whole_conversations, ["x", "sab", "sac", "sa", "sd", "s"]),
])  # fmt: skip
def test_whole_conversations(policy, order):
    """`sab` and `sac` are branches of one conversation, `sd` is another after the same prompt."""
    case = Case(policy=policy)
    for word in ("sab", "x", "sac", "sd"):
        case.insert(word)
    assert case.evict(6) == order


@pytest.mark.parametrize(
    "policy", thorough_after(1, [whole_conversations, pinned, time_to_live(5)])
)
def test_the_order_that_is_kept_is_that_of_a_search(policy):
    """Under any program with pins, whatever the heap still has of the past."""
    for seed in range(60):
        rng, case, searched = random.Random(seed), Case(policy=policy), 0
        for _ in range(80):
            word = "".join(rng.choice("aab") for _ in range(rng.randint(1, 5)))
            if len(word) <= case.pool.num_free:
                node, seconds = case.insert(word), rng.choice([0, 0, 3, 9])
                if seconds:
                    case.cache.pin(node, seconds)
            if rng.random() < 0.3:
                case.cache.lock(case.match(word[:2]))
                case.locked.append(case.match(word[:2]))
            if case.locked and rng.random() < 0.3:
                case.cache.unlock(case.locked.pop(0))
            case.clock.now += rng.choice([0, 0.5, 4])
            case.cache.check()
            leaves = [node for node in case.cache.unlocked if not node.children]
            if leaves and rng.random() < 0.4:
                due = min(case.cache._entry(leaf, case.clock.now)[:3] for leaf in leaves)
                first = case.cache.first_leaf()
                assert case.cache._entry(first, case.clock.now)[:3] == due, seed
                case.evict(rng.randint(1, 3))
                searched += 1
        assert searched > 5


def test_the_heap_does_not_grow_with_the_uses():
    case = Case()
    for _ in range(500):
        case.cache.pin(case.insert("ab"), 5)
    assert len(case.cache.order) + len(case.cache.deadlines) < 80


def test_what_was_cleared_is_not_pinned():
    case = Case()
    node = case.insert("ab")
    case.cache.clear()
    assert not case.cache.pin(node, 5)
    case.cache.check()


@pytest.mark.parametrize("damage", [
    lambda cache, node: cache.pins.update({object(): 1.0}),
    lambda cache, node: cache.last_use.clear(),
    lambda cache, node: cache.order.clear(),
], ids=["a pin of nothing", "a leaf without a use", "a leaf that is never due"])  # fmt: skip
def test_check_finds_damage(damage):
    case = Case()
    damage(case.cache, case.insert("ab"))
    with pytest.raises(AssertionError, match="prefix cache: "):
        case.cache.check()


# ── In the engine ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host_blocks", [0, 32])
def test_a_hint_keeps_a_prefix_that_age_would_evict(llama, host_blocks):
    """With a host below, age moves the prefix there, and the pin keeps it on the device."""
    agent, *others = llama.prompts(20, 20, 20, 20)
    for seconds, cached in ((0, 20 if host_blocks else 0), (30, 20)):
        config = small(num_blocks=16, retention="pinned", host_blocks=host_blocks)
        engine = careful_engine(llama.lm, config)
        [first] = generate(engine, [agent], SamplingParams(**ANSWER, retain_s=seconds))
        for other in others:
            generate(engine, [other], SamplingParams(**ANSWER))
        [again] = generate(engine, [agent + first.token_ids], SamplingParams(**ANSWER))
        stats = engine.stats()
        assert stats.hit_tokens == cached
        if host_blocks:
            assert stats.tiers["host"].hits == (0 if seconds else 5)
        expected = llama.lm.generate_naively(agent + first.token_ids, 4)
        assert again.token_ids == expected


def test_pins_leave_the_pool_usable(llama):
    """Every request wants to be kept, and one that needs the whole pool still runs."""
    params = SamplingParams(**ANSWER, retain_s=3600)
    engine = careful_engine(llama.lm, small(num_blocks=16), prefix_cache=RetainingCache)
    for prompt in llama.prompts(12, 20, 30, 40, 60, 8, 60):
        [output] = generate(engine, [prompt], params)
        assert output.token_ids == llama.lm.generate_naively(prompt, 4)
        assert engine.cache.pins or len(prompt) > 30  # of 16 blocks, at most 8


def test_an_aborted_request_is_not_kept(llama):
    [prompt] = llama.prompts(20)
    engine = careful_engine(llama.lm, small(num_blocks=16), prefix_cache=RetainingCache)
    request_id = engine.add_request(prompt, SamplingParams(**ANSWER, retain_s=9))
    engine.step()
    engine.abort(request_id)
    assert not engine.cache.pins and engine.cache.num_cached_blocks == 5


@pytest.mark.parametrize("name", ["pinned", "conversations"])
def test_layers_with_windows(llama, name):
    """Pins over blocks that lose parts meanwhile; tokens are those of masks."""
    lm = with_windows(llama.lm, 8, None)
    engine = Engine(lm, small(num_blocks=24, retention=name))
    assert isinstance(engine.cache, RetainingCache) and isinstance(engine.cache, GroupCache)
    agents = llama.prompts(20, 13)
    for turn in range(4):
        for agent, prompt in enumerate(agents):
            [output] = generate(engine, [prompt], SamplingParams(**ANSWER, retain_s=60))
            assert output.token_ids == lm.generate_naively(prompt, 4)
            agents[agent] = prompt + output.token_ids + [1 + turn]
        generate(engine, [[2 + turn] * 40], SamplingParams(max_tokens=2, ignore_eos=True))
        engine.check()
    assert engine.cache.pins and engine.stats().hit_tokens > 100


def test_retention_needs_the_engines_own_prefix_cache(llama):
    with pytest.raises(ValueError, match=r"retention: must be one of None, 'pinned', .* was 'ttl'"):
        EngineConfig(retention="ttl")
    with pytest.raises(ValueError, match=r"retention: 'pinned' is a policy .* has none"):
        Engine(llama.lm, small(retention="pinned", prefix_cache=False))
    with pytest.raises(ValueError, match=r"retention: .* has .*LocksOnlyAncestors"):
        Engine(llama.lm, small(retention="pinned"), prefix_cache=LocksOnlyAncestors)


def test_a_cache_without_pins_ignores_the_hint(llama):
    [prompt] = llama.prompts(20)
    engine = careful_engine(llama.lm, small(num_blocks=16))
    [output] = generate(engine, [prompt], SamplingParams(**ANSWER, retain_s=9))
    assert output.token_ids == llama.lm.generate_naively(prompt, 4)


def test_a_bad_hint_is_refused():
    with pytest.raises(ValueError, match="retain_s"):
        SamplingParams(retain_s=-1)
