"""Chapter 07: the prefix cache: the shape of its tree, and all else against a dictionary."""

import operator
from collections import Counter
from typing import ClassVar

import pytest
from helpers import assert_reached, cached_prefixes
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prefix_model import PrefixModel
from thorough import thorough_after

from minikv import BlockPool, RadixCache
from minikv.course.judge.stand_ins import LoggingPool
from minikv.radix import Root


class Tree:
    """A cache of blocks of two letters, filled as sequences do that end right after the insert."""

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
        (name_it(("3", "4", "5")), "another size"),
        (lambda _, node: node.keys.append(("9", "9")), "a node without blocks"),
        (lambda cache, node: cache.unlocked.pop(node), "unlocked list is off"),
        (
            lambda _, node: setattr(node, "parent", node.parent.children["5", "6"]),
            "a child of two nodes",
        ),
        (lambda cache, node: (cache.lock(node), add("lock_count", 1)(node, None)), "an ancestor"),
        (lambda cache, _: cache._roots.update(x=Root("x")), "an empty or misplaced root"),
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
    """Random operations, compared after each with a dictionary of prefixes.

    A prompt begins like one that was used before, or the tree would hardly ever be hit. `clear`
    waits for a tree of some size: a rule is drawn whenever it may be, and most often the first one
    by name.
    """

    seen: ClassVar = Counter()  # of all runs: what they met

    # Which known prompt, how much of it, and what comes behind.
    prompts = st.tuples(
        st.integers(0, 99), st.integers(0, 12), st.lists(st.sampled_from("aab"), max_size=6)
    )
    salts = st.sampled_from([None, None, None, "x"])

    @initialize(
        block_size=st.integers(1, 3),
        num_blocks=st.integers(6, 24),
        texts=st.lists(st.tuples(prompts, salts), min_size=3, max_size=6),
    )
    def begin(self, block_size, num_blocks, texts):
        self.pool = LoggingPool(num_blocks)
        self.cache = RadixCache(self.pool, block_size)
        self.model = PrefixModel(block_size)
        self.held = Counter()  # blocks of "running sequences" outside the cache
        self.locks = []  # (node, the names of its entries)
        self.known = [tuple("abaab")]  # prompts
        self.calm = 0  # operations since the last `clear`
        for parts, salt in texts:
            self.insert(parts, salt, keep=False)

    def prompt(self, parts):
        which, length, more = parts
        tokens = (*self.known[which % len(self.known)][:length], *more)
        self.known = [*self.known[-7:], tokens]
        return tokens

    @rule(parts=prompts, salt=salts)
    def match(self, parts, salt):
        self.look_up(self.prompt(parts), salt)

    def look_up(self, tokens, salt):
        nodes = len(list(self.cache.nodes()))
        result = self.cache.match(tokens, salt)
        assert result.block_ids == self.model.match(tokens, salt)
        assert result.num_tokens == len(result.block_ids) * self.cache.block_size
        self.seen["hits"] += result.num_tokens > 0
        self.seen["partial hits"] += 0 < len(result.block_ids) < len(self.model.names(tokens))
        self.seen["splits"] += len(list(self.cache.nodes())) > nodes

    @rule(parts=prompts, salt=salts, keep=st.booleans())
    def insert(self, parts, salt, keep):
        """With blocks of its own; `keep`: a sequence goes on holding those that were taken."""
        tokens = self.prompt(parts)
        names = self.model.names(tokens, salt)
        self.evict(max(0, len(names) - self.pool.num_free))
        if len(names) > self.pool.num_free:
            return
        existing = self.model.cached(tokens, salt)
        own = [self.pool.allocate() for _ in names]
        result = self.cache.insert(tokens, own, salt)
        assert result.num_existing == len(existing)
        assert result.block_ids == self.model.insert(tokens, own, salt)
        self.seen["inserts behind a hit"] += 0 < len(existing) < len(names)
        for block_id in own[: len(existing)]:
            assert self.pool.ref_count(block_id) == 1  # not taken
            self.pool.release(block_id)
        for block_id in own[len(existing) :]:
            if keep:
                self.held[block_id] += 1
            else:
                self.pool.release(block_id)

    @rule(parts=prompts, salt=salts)
    def lock(self, parts, salt):
        tokens = self.prompt(parts)
        self.look_up(tokens, salt)
        node, names = self.cache.match(tokens, salt).node, self.model.cached(tokens, salt)
        self.cache.lock(node)
        self.model.lock(names)
        self.locks.append((node, names))
        self.seen["locks on nodes"] += len(names) > 0

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 99))
    def unlock(self, which):
        node, names = self.locks.pop(which % len(self.locks))
        self.cache.unlock(node)
        self.model.unlock(names)
        self.seen["unlocked nodes"] += len(names) > 0

    @precondition(lambda self: self.cache.num_cached_blocks)
    @rule(count=st.integers(0, 4))
    def evict(self, count):
        self.pool.freed.clear()
        expected = self.model.evict(count)
        assert self.cache.evict(count) == len(expected)
        assert self.pool.freed == [block for block in expected if not self.held[block]]
        is_locked = any(self.model.locks.values())
        self.seen["evictions beside locks"] += is_locked and len(expected) > 0
        self.seen["evictions that locks end"] += is_locked and len(expected) < count

    @precondition(lambda self: +self.held)
    @rule(which=st.integers(0, 99))
    def let_go(self, which):
        block_id = sorted(+self.held)[which % len(+self.held)]
        self.pool.release(block_id)
        self.held[block_id] -= 1

    @precondition(lambda self: self.calm > 20 and self.cache.num_cached_blocks > 3)
    @rule()
    def clear(self):
        self.calm = 0
        stale = [node for node, _ in self.locks]
        self.seen["clears beside locks"] += any(self.model.locks.values())
        self.cache.clear()
        self.model.clear()
        self.locks.clear()
        for node in stale:
            self.cache.unlock(node)  # locks what is gone: no effect, no error

    @invariant()
    def the_cache_is_the_dictionary(self):
        if not hasattr(self, "cache"):
            return
        self.calm += 1
        self.cache.check()
        blocks, locks = self.model.blocks, self.model.locks
        expected = {name: (blocks[name], locks[name]) for name in blocks}
        assert cached_prefixes(self.cache) == expected
        assert self.cache.num_cached_blocks == len(blocks)
        assert self.cache.num_evictable_blocks == self.model.num_evictable
        holders = Counter(blocks.values()) + self.held
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == holders[block_id]


FLOORS = {  # of a hundred and twenty programs
    "hits": 300, "partial hits": 200, "splits": 60, "inserts behind a hit": 80,
    "locks on nodes": 120, "unlocked nodes": 50, "evictions beside locks": 40,
    "evictions that locks end": 20, "clears beside locks": 3,
}  # fmt: skip


@pytest.mark.parametrize("programs", thorough_after(1, [80, 240]))
def test_random_operations(programs):
    RadixMachine.seen.clear()
    of = settings(max_examples=programs, stateful_step_count=40)
    run_state_machine_as_test(RadixMachine, settings=of)
    assert_reached(RadixMachine.seen, {name: n * programs // 120 for name, n in FLOORS.items()})
