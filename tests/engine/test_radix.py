"""Chapter 07: the radix prefix cache, by examples and against a plain-dictionary model."""

from collections import Counter

import pytest
from helpers import cached_prefixes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minikv import RadixCache
from minikv.testing import LoggingPool, PrefixModel


class Tree:
    """A cache of blocks of two tokens, filled as finished sequences fill it: the caller's
    own hold on its blocks ends right after the insert."""

    def __init__(self, num_blocks=32):
        self.pool = LoggingPool(num_blocks)
        self.cache = RadixCache(self.pool, 2)

    def insert(self, tokens, salt=None):
        own = [self.pool.allocate() for _ in range(len(tokens) // 2)]
        result = self.cache.insert(tokens, own, salt)
        for block_id in own:
            self.pool.release(block_id)
        self.pool.freed.clear()
        self.cache.check()
        return result

    def shape(self):
        """{tokens of a node: the same of its children}, for each salt."""

        def of(node):
            return {
                tuple(token for key in child.keys for token in key): of(child)
                for child in node.children.values()
            }

        return {salt: of(root) for salt, root in self.cache._roots.items()}

    def evict_one_by_one(self):
        """What is freed, block by block."""
        while self.cache.evict(1):
            self.cache.check()
        return self.pool.freed


@pytest.fixture
def tree():
    return Tree()


# ── The shape of the tree ─────────────────────────────────────────────────────


def test_one_prefix_is_one_node(tree):
    tree.insert([1, 2, 3, 4, 5, 6])
    assert tree.shape() == {None: {(1, 2, 3, 4, 5, 6): {}}}


def test_a_rest_of_less_than_a_block_is_left_out(tree):
    result = tree.insert([1, 2, 3])
    assert tree.shape() == {None: {(1, 2): {}}}
    assert len(result.block_ids) == 1 and tree.cache.num_cached_blocks == 1
    assert tree.insert([9]).block_ids == [] and tree.cache.num_cached_blocks == 1


def test_a_common_beginning_is_split_off(tree):
    tree.insert([1, 2, 3, 4, 5, 6])
    tree.insert([1, 2, 3, 4, 7, 8])
    assert tree.shape() == {None: {(1, 2, 3, 4): {(5, 6): {}, (7, 8): {}}}}
    tree.insert([1, 2, 9, 9])
    assert tree.shape() == {None: {(1, 2): {(3, 4): {(5, 6): {}, (7, 8): {}}, (9, 9): {}}}}


def test_blocks_that_share_only_some_tokens_are_siblings(tree):
    tree.insert([1, 2])
    tree.insert([1, 3])
    assert tree.shape() == {None: {(1, 2): {}, (1, 3): {}}}


def test_an_unlocked_leaf_is_extended_in_place(tree):
    tree.insert([1, 2])
    tree.insert([1, 2, 3, 4])
    assert tree.shape() == {None: {(1, 2, 3, 4): {}}}


def test_a_locked_leaf_is_not(tree):
    node = tree.insert([1, 2]).node
    tree.cache.lock(node)
    tree.insert([1, 2, 3, 4])
    assert tree.shape() == {None: {(1, 2): {(3, 4): {}}}}
    assert tree.cache.num_evictable_blocks == 1


def test_a_node_with_children_gets_another_child(tree):
    tree.insert([1, 2, 3, 4])
    tree.insert([1, 2, 5, 6])
    tree.insert([1, 2, 3, 4, 7, 8])
    tree.insert([1, 2, 5, 6])  # nothing new
    assert tree.shape() == {None: {(1, 2): {(3, 4, 7, 8): {}, (5, 6): {}}}}


# ── Match and insert ──────────────────────────────────────────────────────────


def test_match_finds_the_longest_prefix_of_whole_blocks(tree):
    blocks = tree.insert([1, 2, 3, 4, 5, 6]).block_ids
    for tokens, count in [
        ([1, 2, 3, 4, 5, 6, 7, 8], 3),
        ([1, 2, 3, 4, 5, 6], 3),
        ([1, 2, 3, 4, 5], 2),
        ([1, 2, 3, 4, 9, 9], 2),
        ([1, 2, 9], 1),
        ([1], 0),
        ([], 0),
        ([2, 1], 0),
        ([3, 4], 0),  # in the tree, but not at the beginning
    ]:
        result = tree.cache.match(tokens)
        assert (result.block_ids, result.num_tokens) == (blocks[:count], 2 * count), tokens
        tree.cache.check()


def test_match_takes_nothing(tree):
    blocks = tree.insert([1, 2, 3, 4]).block_ids
    tree.cache.match([1, 2])
    assert [tree.pool.ref_count(b) for b in blocks] == [1, 1]
    assert (tree.cache.num_cached_blocks, tree.cache.num_evictable_blocks) == (2, 2)


def test_insert_keeps_the_blocks_that_are_there(tree):
    old = tree.insert([1, 2, 3, 4]).block_ids
    own = [tree.pool.allocate() for _ in range(3)]
    result = tree.cache.insert([1, 2, 3, 4, 5, 6], own)
    assert result.num_existing == 2
    assert result.block_ids == [*old, own[2]]
    assert [tree.pool.ref_count(b) for b in own] == [1, 1, 2]  # only the last has a new holder
    assert tree.cache.match([1, 2, 3, 4, 5, 6]).node is result.node


def test_insert_the_same_again(tree):
    first = tree.insert([1, 2, 3, 4])
    second = tree.insert([1, 2, 3, 4])
    assert second.num_existing == 2 and second.block_ids == first.block_ids
    assert tree.pool.num_free == 30


def test_insert_wants_a_block_for_each_key(tree):
    block = tree.pool.allocate()
    with pytest.raises(ValueError, match="block_ids: 2 blocks of tokens, but 1 blocks"):
        tree.cache.insert([1, 2, 3, 4], [block])
    tree.cache.check()
    assert tree.cache.num_cached_blocks == 0 and tree.pool.ref_count(block) == 1


def test_more_blocks_than_keys_are_left_alone(tree):
    own = [tree.pool.allocate() for _ in range(3)]
    assert tree.cache.insert([1, 2, 3], own).block_ids == own[:1]
    assert [tree.pool.ref_count(b) for b in own] == [2, 1, 1]


# ── Salts ─────────────────────────────────────────────────────────────────────


def test_salts_never_meet(tree):
    one, two = (tree.insert([1, 2, 3, 4], salt).block_ids for salt in ("one", "two"))
    assert not set(one) & set(two)
    assert tree.cache.match([1, 2, 3, 4], "one").block_ids == one
    assert tree.cache.match([1, 2, 3, 4], "two").block_ids == two
    for salt in (None, "", "three", 0, (1, 2)):
        assert tree.cache.match([1, 2, 3, 4], salt).num_tokens == 0
    assert set(tree.shape()) == {"one", "two"}  # looking made no roots


def test_a_salt_goes_with_its_last_block(tree):
    tree.insert([1, 2], "one")
    tree.insert([1, 2, 3, 4], "two")
    tree.cache.evict(1)
    assert set(tree.shape()) == {"two"}
    tree.cache.check()


# ── Eviction ──────────────────────────────────────────────────────────────────


def test_the_least_recently_used_goes_first(tree):
    a, b, c = (tree.insert([n, n]).block_ids[0] for n in (1, 2, 3))
    tree.cache.match([1, 1])
    assert tree.evict_one_by_one() == [b, c, a]


def test_leaves_go_before_what_they_stand_on_and_ends_before_beginnings(tree):
    first = tree.insert([1, 2, 3, 4, 5, 6]).block_ids
    second = tree.insert([1, 2, 7, 8]).block_ids
    assert tree.evict_one_by_one() == [first[2], first[1], second[1], first[0]]
    assert tree.cache.num_cached_blocks == 0 and tree.shape() == {}


def test_a_shorter_match_makes_only_its_part_younger(tree):
    a = tree.insert([1, 2, 3, 4]).block_ids
    b = tree.insert([5, 6]).block_ids
    tree.cache.match([1, 2])
    assert tree.evict_one_by_one() == [a[1], b[0], a[0]]


def test_insert_makes_younger_too(tree):
    a = tree.insert([1, 2]).block_ids
    b = tree.insert([3, 4]).block_ids
    tree.insert([1, 2])
    assert tree.evict_one_by_one() == [b[0], a[0]]


def test_lru_runs_across_salts(tree):
    a = tree.insert([1, 2], "one").block_ids
    b = tree.insert([1, 2], "two").block_ids
    tree.cache.match([1, 2], "one")
    assert tree.evict_one_by_one() == [b[0], a[0]]


def test_evict_says_how_many(tree):
    tree.insert([1, 2, 3, 4, 5, 6])
    assert tree.cache.evict(0) == 0
    assert tree.cache.evict(2) == 2
    assert tree.shape() == {None: {(1, 2): {}}}  # part of a node
    tree.cache.check()
    assert tree.cache.evict(5) == 1 and tree.cache.evict(5) == 0
    assert tree.pool.num_free == 32


def test_evicting_a_block_in_use_lets_go_of_it_without_freeing_it(tree):
    (block,) = tree.insert([1, 2]).block_ids
    tree.pool.acquire(block)
    assert tree.cache.evict(1) == 1
    assert tree.pool.ref_count(block) == 1 and tree.pool.freed == []
    assert tree.cache.match([1, 2]).num_tokens == 0


# ── Locks ─────────────────────────────────────────────────────────────────────


def test_a_lock_keeps_the_node_and_its_ancestors(tree):
    tree.insert([1, 2, 3, 4])
    tree.insert([1, 2, 5, 6])
    node = tree.cache.match([1, 2, 3, 4]).node
    tree.cache.lock(node)
    assert tree.cache.num_evictable_blocks == 1
    assert tree.cache.evict(10) == 1
    assert tree.shape() == {None: {(1, 2): {(3, 4): {}}}}
    tree.cache.check()
    tree.cache.unlock(node)
    assert tree.cache.evict(10) == 2


def test_a_lock_on_a_shorter_match_keeps_no_more_than_that(tree):
    tree.insert([1, 2, 3, 4, 5, 6])
    tree.cache.lock(tree.cache.match([1, 2, 3, 4]).node)
    assert tree.cache.num_evictable_blocks == 1
    assert tree.cache.evict(10) == 1
    assert tree.shape() == {None: {(1, 2, 3, 4): {}}}


def test_locks_nest(tree):
    node = tree.insert([1, 2]).node
    tree.cache.lock(node)
    tree.cache.lock(node)
    tree.cache.unlock(node)
    assert tree.cache.evict(1) == 0
    tree.cache.unlock(node)
    assert tree.cache.evict(1) == 1


def test_a_split_below_a_lock_keeps_it(tree):
    node = tree.insert([1, 2, 3, 4]).node
    tree.cache.lock(node)
    tree.insert([1, 2, 5, 6])  # splits the locked node
    tree.cache.check()
    assert tree.cache.evict(10) == 1
    tree.cache.unlock(node)
    assert tree.cache.num_evictable_blocks == 2
    tree.cache.check()


def test_unlocking_makes_younger(tree):
    a = tree.insert([1, 2])
    b = tree.insert([3, 4])
    tree.cache.lock(a.node)
    tree.cache.unlock(a.node)
    assert tree.evict_one_by_one() == [*b.block_ids, *a.block_ids]


def test_unlocking_once_too_often(tree):
    node = tree.insert([1, 2]).node
    with pytest.raises(ValueError, match="not locked"):
        tree.cache.unlock(node)
    tree.cache.check()


def test_a_miss_can_be_locked(tree):
    """Its node is a root; locking it keeps nothing."""
    tree.insert([1, 2])
    for salt in (None, "new"):
        node = tree.cache.match([9, 9], salt).node
        tree.cache.lock(node)
        assert tree.cache.num_evictable_blocks == 1
        tree.cache.unlock(node)
    tree.cache.check()


# ── Clear, check, arguments ───────────────────────────────────────────────────


def test_clear_forgets_even_what_is_locked(tree):
    node = tree.insert([1, 2, 3, 4]).node
    tree.insert([1, 2, 5, 6], "salt")
    tree.cache.lock(node)
    (kept, _) = tree.cache.match([1, 2, 3, 4]).block_ids
    tree.pool.acquire(kept)  # a running sequence
    tree.cache.clear()
    tree.cache.check()
    assert tree.shape() == {} and tree.cache.match([1, 2]).num_tokens == 0
    assert (tree.cache.num_cached_blocks, tree.cache.num_evictable_blocks) == (0, 0)
    assert tree.pool.num_free == 31 and tree.pool.ref_count(kept) == 1
    tree.insert([1, 2])
    tree.cache.unlock(node)  # that lock is history
    assert tree.cache.num_evictable_blocks == 1
    tree.cache.check()


def break_count(cache, node):
    cache.num_cached_blocks += 1


def break_evictable(cache, node):
    cache.num_evictable_blocks -= 1


def break_lock(cache, node):
    cache.lock(node)
    node.parent.lock_count -= 1


def break_block(cache, node):
    cache.pool.release(node.block_ids[0])


def break_twice(cache, node):
    node.block_ids[0] = node.parent.block_ids[0]


def break_key(cache, node):
    node.keys[0] = (8, 8)


def break_size(cache, node):
    node.keys[0] = (3, 4, 5)


def break_order(cache, node):
    cache.unlocked.move_to_end(node)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_count, "num_cached_blocks is off"),
        (break_evictable, "num_evictable_blocks is off"),
        (break_lock, "does not cover an ancestor|num_evictable|unlocked"),
        (break_block, "is free"),
        (break_twice, "in the tree twice"),
        (break_key, "wrong key"),
        (break_size, "another size|wrong key"),
        (break_order, "younger than its parent"),
    ],
)
def test_check_notices(tree, damage, message):
    tree.insert([1, 2, 5, 6])
    node = tree.insert([1, 2, 3, 4]).node
    tree.cache.check()
    damage(tree.cache, node)
    with pytest.raises(AssertionError, match=message):
        tree.cache.check()


# ── Against a plain dictionary ────────────────────────────────────────────────


class RadixMachine(RuleBasedStateMachine):
    """Random operations, compared after each with a dictionary of prefixes."""

    @initialize(block_size=st.integers(1, 3), num_blocks=st.integers(1, 24))
    def begin(self, block_size, num_blocks):
        self.pool = LoggingPool(num_blocks)
        self.cache = RadixCache(self.pool, block_size)
        self.model = PrefixModel(block_size)
        self.held = Counter()  # blocks of "running sequences" outside the cache
        self.locks = []  # (node, the names of its entries)

    prompts = st.lists(st.sampled_from("aab"), max_size=9).map(tuple)
    salts = st.sampled_from([None, None, "x"])

    @rule(tokens=prompts, salt=salts)
    def match(self, tokens, salt):
        result = self.cache.match(tokens, salt)
        assert result.block_ids == self.model.match(tokens, salt)
        assert result.num_tokens == len(result.block_ids) * self.cache.block_size

    @rule(tokens=prompts, salt=salts, keep=st.booleans())
    def insert(self, tokens, salt, keep):
        """With blocks of its own; `keep`: a sequence goes on holding those that were taken."""
        names, existing = self.model.names(tokens, salt), self.model.cached(tokens, salt)
        if len(names) > self.pool.num_free:
            return
        own = [self.pool.allocate() for _ in names]
        result = self.cache.insert(tokens, own, salt)
        assert result.num_existing == len(existing)
        assert result.block_ids == self.model.insert(tokens, own, salt)
        for block_id in own[: len(existing)]:
            assert self.pool.ref_count(block_id) == 1  # not taken
            self.pool.release(block_id)
        for block_id in own[len(existing) :]:
            if keep:
                self.held[block_id] += 1
            else:
                self.pool.release(block_id)

    @rule(tokens=prompts, salt=salts)
    def lock(self, tokens, salt):
        self.match(tokens, salt)
        node, names = self.cache.match(tokens, salt).node, self.model.cached(tokens, salt)
        self.cache.lock(node)
        self.model.lock(names)
        self.locks.append((node, names))

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 99))
    def unlock(self, which):
        node, names = self.locks.pop(which % len(self.locks))
        self.cache.unlock(node)
        self.model.unlock(names)

    @rule(count=st.integers(0, 8))
    def evict(self, count):
        self.pool.freed.clear()
        expected = self.model.evict(count)
        assert self.cache.evict(count) == len(expected)
        assert self.pool.freed == [block for block in expected if not self.held[block]]

    @precondition(lambda self: +self.held)
    @rule(which=st.integers(0, 99))
    def let_go(self, which):
        block_id = sorted(+self.held)[which % len(+self.held)]
        self.pool.release(block_id)
        self.held[block_id] -= 1

    @rule()
    def clear(self):
        stale = [node for node, _ in self.locks]
        self.cache.clear()
        self.model.clear()
        self.locks.clear()
        for node in stale:
            self.cache.unlock(node)  # locks what is gone: no effect, no error

    @invariant()
    def the_cache_is_the_dictionary(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        blocks, locks = self.model.blocks, self.model.locks
        expected = {name: (blocks[name], locks[name]) for name in blocks}
        assert cached_prefixes(self.cache) == expected
        assert self.cache.num_cached_blocks == len(blocks)
        assert self.cache.num_evictable_blocks == self.model.num_evictable
        holders = Counter(blocks.values()) + self.held
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == holders[block_id]


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=150, stateful_step_count=40)
