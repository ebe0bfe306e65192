"""Chapter 07: the radix prefix cache: the shape of its tree, and all else against a plain
dictionary of prefixes."""

import operator
from collections import Counter

import pytest
from helpers import cached_prefixes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minikv import BlockPool, RadixCache
from minikv.testing import LoggingPool, PrefixModel


class Tree:
    """A cache of blocks of two letters, filled as finished sequences fill it: the caller's
    own hold on its blocks ends right after the insert."""

    def __init__(self):
        self.pool = BlockPool(32)
        self.cache = RadixCache(self.pool, 2)

    def insert(self, tokens, salt=None):
        own = [self.pool.allocate() for _ in range(len(tokens) // 2)]
        result = self.cache.insert(tokens, own, salt)
        for block_id in own:
            self.pool.release(block_id)
        self.cache.check()
        return result

    def shape(self):
        """{text of a node: the same of its children}, for each salt."""

        def of(node):
            return {
                "".join(token for key in child.keys for token in key): of(child)
                for child in node.children.values()
            }

        return {salt: of(root) for salt, root in self.cache._roots.items()}


@pytest.fixture
def tree():
    return Tree()


# ── The shape of the tree, which the model below does not know ────────────────


@pytest.mark.parametrize(
    ("texts", "shape"),
    [
        (["123456"], {"123456": {}}),
        (["123", "9"], {"12": {}}),  # what is less than a block is left out
        (["123456", "123478"], {"1234": {"56": {}, "78": {}}}),
        (["123456", "123478", "1299"], {"12": {"34": {"56": {}, "78": {}}, "99": {}}}),
        (["12", "13"], {"12": {}, "13": {}}),  # a block is shared as a whole or not at all
        (["12", "1234"], {"1234": {}}),  # an unlocked leaf is extended in place
        (["1234", "1256", "123478", "1256"], {"12": {"3478": {}, "56": {}}}),
    ],
)
def test_what_is_inserted_makes_this_tree(tree, texts, shape):
    for text in texts:
        tree.insert(text)
    assert tree.shape() == {None: shape}


def test_a_locked_leaf_is_not_extended(tree):
    tree.cache.lock(tree.insert("12").node)
    tree.insert("1234")
    assert tree.shape() == {None: {"12": {"34": {}}}}
    assert tree.cache.num_evictable_blocks == 1


def test_a_root_is_there_as_long_as_its_blocks(tree):
    tree.insert("12", "one")
    tree.insert("1234", "two")
    tree.insert("1234")
    for salt in ("", "three", 0, (1, 2)):
        assert tree.cache.match("1234", salt).num_tokens == 0
    assert set(tree.shape()) == {"one", "two", None}  # looking made no roots
    tree.cache.evict(1)
    assert set(tree.shape()) == {"two", None}


def test_an_insert_begins_behind_the_last_own_block_that_ends_a_node(tree, monkeypatch):
    compared, keys = [], tree.cache._keys
    monkeypatch.setattr(tree.cache, "_keys", lambda tokens: compared.append(tokens) or keys(tokens))
    own = [tree.pool.allocate() for _ in range(4)]
    tree.cache.insert("1234", own)
    assert tree.cache.insert("12345678", own)[1:] == (own, 2)
    assert tree.shape() == {None: {"12345678": {}}}
    assert compared == ["1234", "5678"]
    tree.cache.match("1234")  # splits; the lower half ends with the same block
    assert tree.cache.insert("12345678", own)[1:] == (own, 4)
    assert compared[-1] == ""
    tree.cache.check()


def test_a_block_that_has_left_the_tree_ends_nothing(tree):
    own = [tree.pool.allocate() for _ in range(4)]
    tree.cache.insert("12345678", own)
    tree.cache.evict(1)
    assert tree.cache.insert("99", own[3:])[1:] == (own[3:], 0)
    assert tree.shape() == {None: {"123456": {}, "99": {}}}
    tree.cache.clear()
    assert tree.cache.insert("1234", own)[1:] == (own[:2], 0)
    tree.cache.check()


# ── Bad arguments, and what `check` says ──────────────────────────────────────


def test_insert_wants_a_block_for_each_key(tree):
    own = [tree.pool.allocate() for _ in range(3)]
    with pytest.raises(ValueError, match="block_ids: 2 blocks of tokens, but 1 blocks"):
        tree.cache.insert("1234", own[:1])
    tree.cache.check()
    assert tree.cache.num_cached_blocks == 0 and tree.pool.ref_count(own[0]) == 1
    assert tree.cache.insert("123", own).block_ids == own[:1]  # more are left alone
    assert [tree.pool.ref_count(b) for b in own] == [2, 1, 1]


def test_unlocking_once_too_often(tree):
    node = tree.insert("12").node
    with pytest.raises(ValueError, match="not locked"):
        tree.cache.unlock(node)
    tree.cache.check()


def add(name, number):
    return lambda cache, node: setattr(cache, name, getattr(cache, name) + number)


def break_lock(cache, node):
    cache.lock(node)
    node.parent.lock_count -= 1


def name_it(key):
    return lambda cache, node: operator.setitem(node.keys, 0, key)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (add("num_cached_blocks", 1), "num_cached_blocks is off"),
        (add("num_evictable_blocks", -1), "num_evictable_blocks is off"),
        (break_lock, "does not cover an ancestor|num_evictable|unlocked"),
        (lambda cache, node: cache.pool.release(node.block_ids[0]), "is free"),
        (
            lambda _, node: operator.setitem(node.block_ids, 0, node.parent.block_ids[0]),
            "in the tree twice",
        ),
        (name_it(("8", "8")), "wrong key"),
        (name_it(("3", "4", "5")), "another size|wrong key"),
        (lambda cache, node: cache.unlocked.move_to_end(node), "younger than its parent"),
    ],
)
def test_check_notices(tree, damage, message):
    tree.insert("1256")
    node = tree.insert("1234").node
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
