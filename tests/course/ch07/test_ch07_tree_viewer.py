"""The viewers of the radix tree and of beams: what they draw is what the live objects said."""

import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from helpers import assert_empty, cached_prefixes, meets, small
from hypothesis import given, strategies as st
from matplotlib.patches import FancyBboxPatch
from thorough import thorough_after
from viewer_case import check_empty, check_looks, check_paper, texts

from minikv import BlockPool, BlockTable, Engine, OutOfBlocks, RadixCache
from minikv.course.chapters.ch05_copy_on_write.beam_tree import (
    BeamChanges,
    BeamHistory,
    record_beams,
)
from minikv.course.pictures import style, tree_drawing
from minikv.course.pictures.tree_viewer import TreeChanges, TreeHistory

A = (1, 2, 3, 4, 5, 6, 7, 8)  # in blocks of 2: 4 blocks
B = (1, 2, 3, 4, 9, 9)  # leaves A after 2 blocks


class Tree:
    """A cache of blocks of two tokens, and the sequences that stand on it."""

    def __init__(self, num_blocks=32):
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, 2)
        self.history = TreeHistory(self.cache)
        self.tables, self.nodes = {}, {}

    def snap(self, words="", texts=None):
        return self.history.snap(words, texts, self.tables)

    def insert(self, tokens, salt=None):
        """As a sequence does that ends at once."""
        table = BlockTable(self.pool, 2)
        table.grow(len(tokens))
        self.cache.insert(tokens, table.block_ids, salt)
        table.release()

    def begin(self, name, tokens, salt=None):
        """As a sequence does that goes on: what is cached is locked and shared."""
        match = self.cache.match(tokens, salt)
        self.cache.lock(match.node)
        self.nodes[name], self.tables[name] = match.node, BlockTable(self.pool, 2)
        self.tables[name].share(match.block_ids)

    def end(self, name):
        self.cache.unlock(self.nodes.pop(name))
        self.tables.pop(name).release()


def story():
    """Insert, match in part, insert a branch, end, evict in part, another salt."""
    tree = Tree(12)
    tree.snap("nothing is cached")
    tree.insert(A)
    tree.snap("A's prompt is inserted")
    tree.begin("B", B)
    tree.snap("B matches 2 of its blocks")
    tree.insert(B)
    tree.insert((7, 7), "a salt")
    tree.snap("B's third block, and another's")
    tree.end("B")
    tree.snap("B ends")
    tree.cache.evict(1)
    tree.snap("one block is evicted")
    tree.cache.evict(3)
    tree.snap("and three more")
    return tree.history


def between(history, i, k=None):
    """What changed up to step `i`, by tokens: (inserted, evicted, split, locks)."""
    changes = TreeChanges.between(history.steps[i - 1 if k is None else k], history.steps[i])

    def tokens(places):
        return {(place[0], sum(place[1:], ())) for place in places}

    return (
        tokens(changes.inserted), tokens(changes.evicted), tokens(changes.split),
        {sum(place[1:], ()): more for place, more in changes.locks.items()},
    )  # fmt: skip


def legend_and_rest(figure):
    """The texts of a frame without those of its legend, which are below its line."""
    line = max(line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linewidth() == 0.5)
    return [text.get_text() for text in figure.axes[0].texts if text.get_position()[1] < line]


# ── What a snapshot says ──────────────────────────────────────────────────────


def test_the_story():
    steps = story().steps
    assert [step.num_free for step in steps] == [12, 8, 8, 6, 6, 7, 10]
    assert [len(step.blocks) for step in steps] == [0, 4, 4, 6, 6, 5, 2]
    assert [step.num_evictable for step in steps] == [0, 4, 2, 4, 6, 5, 2]
    shapes = [[(node.path, node.lock_count) for node in step.nodes] for step in steps]
    a = ((1, 2), (3, 4), (5, 6), (7, 8))
    assert shapes[1] == [(a, 0)]
    assert shapes[2] == [(a[:2], 1), (a, 0)]
    assert shapes[3] == [(a[:2], 1), (a, 0), ((*a[:2], (9, 9)), 0), (((7, 7),), 0)]
    assert {node.salt for node in steps[3].nodes} == {None, "a salt"}
    assert [node.rank for node in steps[3].nodes] == [None, 1, 2, 3]
    assert {block.id: (block.state, block.holders) for block in steps[2].blocks.values()} == {
        0: ("shared", ("B",)), 1: ("shared", ("B",)), 2: ("cached", ()), 3: ("cached", ()),
    }  # fmt: skip
    assert steps[2].own_blocks("B") == ()


def test_what_changed():
    history = story()
    a = [(None, A[:end]) for end in (2, 4, 6, 8)]
    b, other = (None, B), ("a salt", (7, 7))
    assert between(history, 1) == (set(a), set(), set(), {})
    assert between(history, 2) == (set(), set(), {a[2]}, {A[:4]: 1})
    assert between(history, 3) == ({b, other}, set(), set(), {})
    assert between(history, 4) == (set(), set(), set(), {A[:4]: -1})
    assert between(history, 5) == (set(), {a[3]}, set(), {})
    assert between(history, 6) == (set(), {a[2], b, other}, set(), {})
    assert between(history, 1, 5)[0] == {a[3]}  # backwards, over several steps


def test_the_same_prefix_in_another_block_is_both():
    tree = Tree()
    tree.insert(A[:2])
    tree.snap()
    tree.pool.allocate()
    tree.cache.evict(1)
    tree.pool.allocate()
    tree.insert(A[:2])
    tree.snap()
    assert between(tree.history, 1)[:2] == ({(None, A[:2])}, {(None, A[:2])})
    assert "block 2 inserted; block 0 evicted" in tree.history.describe(1, 0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from("iiibbue"),
        st.lists(st.integers(0, 1), max_size=10),
        st.sampled_from([None, None, "salt"]),
    ),
    min_size=5,
    max_size=25,
)


MET = Counter()


def play(moves, num_blocks=24):
    """A tree after random moves, with a snapshot after each."""
    tree = Tree(num_blocks)
    for number, (move, tokens, salt) in enumerate(moves):
        try:
            if move == "i":
                tree.insert(tokens, salt)
            elif move == "b":
                tree.begin(style.letter(number), tokens, salt)
            elif move == "e":
                MET["evicted"] += tree.cache.evict(len(tokens)) > 0
            elif tree.nodes:
                tree.end(sorted(tree.nodes)[len(tokens) % len(tree.nodes)])
        except OutOfBlocks:
            pass
        tree.snap(f"move {number}")
        yield tree


@meets(MET, {"evicted": 15, "inserted": 60, "shared": 20})
@given(MOVES)
def test_what_is_said_is_what_is_there(moves):
    before = {}
    for tree in play(moves):
        tree.cache.check()
        step, now = tree.history.steps[-1], cached_prefixes(tree.cache)
        said = {
            (place[0], sum(place[1:], ())): (block.id, block.node.lock_count)
            for place, block in step.blocks.items()
        }
        assert said == now
        assert step.warnings == ()
        assert step.num_free == tree.pool.num_free
        assert step.num_evictable == tree.cache.num_evictable_blocks
        for block in step.blocks.values():
            assert block.ref_count == tree.pool.ref_count(block.id) == 1 + len(block.holders)
            assert (block.state == "shared") == bool(block.holders)
        if len(tree.history.steps) > 1:
            inserted, evicted, _, _ = between(tree.history, len(tree.history.steps) - 1)
            moved = {key for key in before.keys() & now if before[key][0] != now[key][0]}
            assert inserted == now.keys() - before.keys() | moved
            assert evicted == before.keys() - now.keys() | moved
            MET["inserted"] += len(inserted) > 0
            MET["shared"] += any(block.holders for block in step.blocks.values())
        before = now


@meets(MET, {"trees": 5})
@given(MOVES)
def test_the_turns_are_those_of_eviction(moves):
    *_, tree = [None, *play(moves)]
    if tree is None:
        return
    ranks = sorted((node.rank, node) for node in tree.history.steps[-1].nodes if node.rank)
    expected = [block_id for _, node in ranks for block_id in reversed(node.block_ids)]
    evicted = []
    tree.pool.release = lambda block_id: evicted.append(block_id)
    while tree.cache.evict(1):
        pass
    assert evicted == expected
    MET["trees"] += len(ranks) > 2


@pytest.mark.thorough
@given(MOVES)
def test_every_block_has_a_place_of_its_own_and_keeps_it(moves):
    *_, tree = [None, *play(moves)]
    if tree is None:
        return
    trees = tree.history.trees(range(len(tree.history.steps)))
    drawn = [[cell.place for run in one.runs for cell in run.cells] for one in trees]
    rows, num_rows = tree_drawing.rows_of(drawn)
    for places in drawn:
        assert len({(rows[place], len(place)) for place in places}) == len(places)
    assert all(row < max(1, num_rows) for row in rows.values())
    for one in trees:  # a node is one row, and no other block is on it
        for run in one.runs:
            row = {(rows[run.cells[-1].place], len(cell.place)) for cell in run.cells}
            others = [
                (rows[other.cells[-1].place], len(cell.place))
                for other in one.runs
                if other is not run
                for cell in other.cells
            ]
            assert row.isdisjoint(others)


def test_a_snapshot_is_a_copy():
    tree = Tree()
    tree.insert(A)
    tree.begin("B", A)
    step = tree.snap()
    words, changes = step.describe(), TreeChanges.between(step, step)
    tree.insert((*A, 9, 9))
    tree.cache.match(A[:2])
    tree.end("B")
    tree.cache.evict(3)
    assert step.describe() == words and TreeChanges.between(step, step) == changes


def test_an_engine_s_cache_can_be_watched(tinypy):
    engine = Engine(tinypy.lm, small(num_blocks=32))
    history = TreeHistory(engine.cache)
    for text in ("def fib(n):\n    return n\n", "def fib(n):\n    return 1\n"):
        engine.generate([text])
        history.snap(text, tinypy.lm.decode)
    step = history.steps[-1]
    assert step.warnings == () and {block.id for block in step.blocks.values()} == set(
        engine.cache.block_ids()
    )
    assert "".join(node.texts[0] for node in step.nodes).startswith("def fib")
    assert TreeChanges.between(*history.steps).split
    assert len(style.png(history.picture().figure)) > 10_000


# ── Bugs are said and drawn ───────────────────────────────────────────────────


def broken_cache(**how):
    """A cache of two nodes of one block, with what is named otherwise."""
    root = SimpleNamespace(parent=None, salt=None, children={})
    upper = SimpleNamespace(
        parent=root, keys=[(1, 2)], block_ids=[0], lock_count=how.get("upper_locks", 0), children={}
    )
    lower = SimpleNamespace(
        parent=upper, keys=how.get("keys", [(3, 4)]), block_ids=[how.get("block", 1)],
        lock_count=how.get("locks", 0), children={},
    )  # fmt: skip
    root.children[1, 2] = upper
    if how.get("linked", True):
        upper.children[3, 4] = lower
    if how.get("lost"):
        lower.parent = None
    pool = BlockPool(4)
    counts = how.get("counts", [1, 1, 0, 0])
    pool.ref_count = lambda block_id: counts[block_id]
    return SimpleNamespace(
        nodes=lambda: [upper, lower], unlocked=[lower, upper], pool=pool, block_size=2
    )


@pytest.mark.parametrize(
    ("how", "holders", "warning"),
    thorough_after(2, [
        ({"counts": [1, 0, 0, 0]}, {}, "block 1: free, yet in the tree"),
        ({"block": 0}, {}, "block 0: 2 times in the tree"),
        ({}, {"A": [0]}, "block 0: count 1, but held by the tree and A"),
        ({"linked": False}, {}, "the node of block 1 is not among its parent's children"),
        ({"locks": 2}, {}, "the node of block 1 is locked by 2, its parent by 0"),
        ({"keys": []}, {}, "a node of 0 keys and 1 block"),
        ({"lost": True}, {}, "1 node not below any root"),
    ]),
)  # fmt: skip
def test_a_bug_is_said_and_drawn(how, holders, warning):
    history = TreeHistory(broken_cache(**how))
    step = history.snap("a <bug>", holders=holders)
    assert step.warnings == (warning,)
    picture = history.picture()
    assert warning in picture.alt and "⚠ " + warning[:12] in str(texts(picture.figure))
    assert f"⚠ {warning}" in history.widget().caption.value.replace("&#x27;", "'")
    assert "a &lt;bug&gt;" in history.widget().caption.value


def test_a_sound_tree_of_anyones_has_no_warnings():
    history = TreeHistory(broken_cache())
    assert history.snap("").warnings == ()
    assert [node.rank for node in history.steps[0].nodes] == [2, 1]


# ── What is drawn ─────────────────────────────────────────────────────────────


def test_every_block_is_drawn_with_its_id_its_text_and_its_count():
    history = story()
    for index, step in enumerate(history.steps):
        drawn = legend_and_rest(history.frame(index))
        for place, block in step.blocks.items():
            assert str(block.id) in drawn and refs(block.ref_count) in drawn
            assert ",".join(map(str, place[-1])) in drawn
        assert drawn.count("B") == sum(len(block.holders) for block in step.blocks.values())
        ranks = [tree_drawing.ordinal(node.rank) for node in step.nodes if node.rank]
        assert [text for text in drawn if re.fullmatch(r"\d+[a-z]{2}", text)] == ranks
        assert f"pool: {step.num_free} of 12 blocks free" in " ".join(drawn)


def refs(count):
    return "1 ref" if count == 1 else f"{count} refs"


def test_the_queue_is_the_order_of_eviction():
    tree = Tree(12)
    for start in (0, 10, 20):
        tree.insert(range(start, start + 4))
    first = tree.snap()
    figure = tree.history.frame(0)
    drawn = texts(figure)
    assert "evicted next →" in drawn
    assert first.queue == [
        " ".join(map(str, node.block_ids)) for node in sorted(first.nodes, key=lambda n: n.rank)
    ]
    assert [text for text in drawn if text in first.queue] == first.queue


def test_what_happened_is_marked():
    history = story()
    drawn = [legend_and_rest(history.frame(index)) for index in range(7)]
    assert "the tree is empty" in drawn[0]
    assert "✂" in drawn[2] and "✂" not in drawn[1] and "✂" not in drawn[3]
    assert "+1 lock" in drawn[2] and "−1 lock" in drawn[4]
    assert [text.count("evicted") for text in drawn] == [0, 0, 0, 0, 0, 1, 3]
    assert "root" in drawn[1] and {"no salt", "a·salt"} <= set(drawn[3])


def test_a_sequences_own_blocks_are_named():
    tree = Tree()
    tree.insert(A)
    tree.begin("B", B)
    tree.tables["B"].grow(3)
    assert tree.snap().own_blocks("B") == (4, 5)
    drawn = legend_and_rest(tree.history.frame(0))
    assert "not in the tree:" in drawn and "4 5" in drawn
    assert "B holds 0, 1 of the tree and 4, 5 of its own." in tree.history.picture().alt


def test_locked_shared_and_evicted_are_told_apart_without_colour():
    history = story()

    for index, step in enumerate(history.steps):
        changes = TreeChanges.between(history.steps[max(0, index - 1)], step)
        figure = history.frame(index)
        found = [one for one in figure.axes[0].get_children() if isinstance(one, FancyBboxPatch)]
        # Of each, the legend has a sample; and one more for a node that is locked.
        hatched = sum(patch.get_hatch() is not None for patch in found) - 1
        assert hatched == sum(block.state == "shared" for block in step.blocks.values())
        thick = sum(patch.get_linewidth() > 2 for patch in found) - 2
        locked = sum(node.lock_count > 0 for node in step.nodes)
        assert thick == locked + len(changes.inserted)
        dashed = sum(patch.get_linestyle() not in ("-", "solid") for patch in found) - 1
        assert dashed == len(changes.evicted) + legend_and_rest(figure).count("evicted")


def test_blocks_keep_their_places():
    history = story()
    frames = [history.frame(index) for index in range(len(history.steps))]
    for before, now in pairwise(range(1, 5)):  # none of their blocks is evicted
        spots = [
            {text.get_text(): text.get_position() for text in frames[i].axes[0].texts}
            for i in (before, now)
        ]
        for block in history.steps[before].blocks.values():
            text = block.text
            assert spots[0][text] == spots[1][text]


def long_tree(depth, branches, block_texts=None):
    tree = Tree(400)
    for number in range(branches):
        shared = depth - number % (depth - 1) - 1
        tree.insert((*range(2 * shared), *[1000 + number] * (2 * depth - 2 * shared)))
        if number % 3 == 1:
            tree.begin(style.letter(number), range(2 * shared))
        tree.snap("a step whose words are too long for a panel of a film, and go on", block_texts)
    tree.cache.evict(3)
    tree.snap("three blocks are evicted", block_texts)
    return tree.history


@pytest.mark.parametrize("block_texts", [None, lambda ids: "def function(argument):\n        "])
@pytest.mark.parametrize(
    ("depth", "branches"), thorough_after(0, [(1, 1), (7, 5), (2, 6), (4, 3), (30, 2)])
)
def test_everything_fits_and_nothing_overlaps(depth, branches, block_texts):
    if depth == 1:
        history = TreeHistory(RadixCache(BlockPool(1), 2))
        history.snap("an empty tree")
    else:
        history = long_tree(depth, branches, block_texts)
    for figure in (history.frame(len(history.steps) - 1), history.picture().figure):
        check_paper(figure)


def test_in_a_long_node_blocks_that_look_alike_stand_as_one():
    tree = Tree(64)
    tree.insert(range(80))
    tree.snap()
    drawn = legend_and_rest(tree.history.frame(0))
    assert "38 blocks" in drawn and {"0", "39"} <= set(drawn)
    tree.begin("A", range(40))
    tree.snap()
    drawn = legend_and_rest(tree.history.frame(1))
    assert drawn.count("18 blocks") == 2 and {"0", "19", "20", "39"} <= set(drawn)


def test_a_tree_that_is_too_large_is_refused():
    tree = Tree(400)
    for number in range(40):
        tree.insert([number] * 4)
    tree.snap()
    with pytest.raises(ValueError, match=r"too large .* 40 rows\. Draw fewer steps"):
        tree.history.picture()


def test_branches_that_are_never_there_together_share_a_row():
    tree = Tree()
    for number in range(8):
        tree.insert([number] * 4)
        tree.snap()
        tree.cache.evict(2)
        tree.snap()
    assert tree.history.frame(0).get_size_inches()[1] < 4


# ── The picture, the player, and wrong input ──────────────────────────────────


def test_a_picture_tells_what_changed_since_the_step_beside_it():
    alt = story().picture(steps=[1, -1]).alt
    assert "evicted." in alt.split("Step 6")[1]  # against step 1
    assert "blocks 0, 1, 2, 3 inserted." in alt.split("Step 6")[0]  # against step 0


def test_the_alt_text_tells_the_tree():
    alt = story().describe(3, 2)
    assert alt.startswith("6 of 12 blocks free. 6 blocks in the tree, 4 evictable.")
    assert "At the root, blocks 0 (count 2: 1,2), 1 (count 2: 3,4); locked by 1." in alt
    assert "After block 1, block 6 (count 1: 9,9); 2nd to be evicted." in alt
    assert "At the root of salt 'a salt', block 4 (count 1: 7,7); 3rd to be evicted." in alt
    assert alt.endswith("In this step: blocks 6, 4 inserted.")


@pytest.mark.thorough
def test_every_step_can_be_looked_at(beams):
    check_looks(story())
    check_looks(beams)


@pytest.mark.parametrize(
    ("block_texts", "holders", "error", "says"),
    [
        ("def", None, TypeError, "texts: must be a function of token ids"),
        (None, {"alice": []}, ValueError, "holders: a name is a letter"),
        (None, {"A": None}, TypeError, "holders: A must be a block table or a list"),
        (None, {"A": ["x"]}, TypeError, "holders: A must be a block table or a list"),
        (None, {"A": [99]}, ValueError, "block 99 is not in this pool"),
    ],
)
def test_wrong_input_is_refused_by_name(block_texts, holders, error, says):
    with pytest.raises(error, match=says):
        TreeHistory(RadixCache(BlockPool(2), 2)).snap("", block_texts, holders)


def test_wrong_caches_and_empty_histories_are_refused():
    with pytest.raises(TypeError, match="cache: must have nodes, unlocked, pool and block_size"):
        TreeHistory(BlockPool(1))
    check_empty(TreeHistory(RadixCache(BlockPool(1), 1)))


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (22, "22nd"), (30, "30th")],
)
def test_ordinals(number, words):
    assert tree_drawing.ordinal(number) == words


# ── Beams ─────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def beams(tinypy):
    """Five steps of four beams after a prompt of ten tokens, in blocks of 4."""
    engine = Engine(tinypy.lm, small(num_blocks=64))
    history = record_beams(engine, tinypy.lm.encode("def fib(n):\n    if n"), width=4, steps=5)
    assert_empty(engine)
    return history


def test_beams_are_recorded_fork_by_fork_and_write_by_write(beams):
    assert len(beams.steps) == 1 + 2 * 5
    assert beams.steps[0].words == "the prompt: 10 tokens"
    assert beams.steps[1].words == "token 1 chosen: A → A, B, C, D"
    for number, step in enumerate(beams.steps[1:]):
        assert len(step.beams) == 4
        length = 10 + number // 2 + 1
        computed = length - (number % 2 == 0)  # the child's token has yet to be written
        assert {one.num_computed for one in step.beams.values()} == {computed}
        assert {len(one.token_ids) for one in step.beams.values()} == {length}
        assert step.num_copied == 4 * -(-computed // 4)
        assert step.num_used == len({id_ for one in step.beams.values() for id_ in one.block_ids})
        assert step.num_used + step.num_free == 64 and step.warnings == ()
        for block in step.blocks.values():
            assert block.ref_count == len(block.names)
    assert beams.steps[1].num_used == 3 and beams.steps[1].num_copied == 12


def test_a_letter_stays_with_a_lineage(beams):
    """A beam that goes on keeps its letter; one that was pruned leaves it to nobody."""
    seen = set()
    for before, step in pairwise(beams.steps):
        seen |= before.beams.keys()
        for name, one in step.beams.items():
            if name in before.beams:
                assert one.token_ids[: len(before.beams[name].token_ids)] == (
                    before.beams[name].token_ids
                )
            else:
                assert name not in seen


def test_the_words_say_what_was_copied_opened_and_pruned(beams):
    for before, step in pairwise(beams.steps):
        taken = before.num_free - step.num_free
        if "copied" in step.words:
            assert (
                f"{taken} block" in step.words
                and next(iter(step.beams.values())).num_computed % 4 != 1
            )
        elif "new block each" in step.words:
            assert taken == 4 and next(iter(step.beams.values())).num_computed % 4 == 1
        elif "in place" in step.words:
            assert taken == 0
        else:
            families = re.search("chosen: (.*)", step.words)[1]
            children = re.findall(r"(\w) → ([^;]*)", families)
            for parent, names in children:
                for name in names.split(", "):
                    told = step.beams[name].token_ids[:-1]
                    assert told == before.beams[parent].token_ids
            pruned = re.findall(r"(\w)(?=,| pruned)", families.split("; ")[0])
            lost = set(before.beams) - set(step.beams)
            assert {parent for parent, _ in children}.isdisjoint(lost)
            assert ("pruned" in families) == bool(lost)
            assert not lost or set(pruned) == lost


def test_a_block_of_beams_stays_where_it_is(beams):
    trees = beams.trees(range(len(beams.steps)))
    layout = tree_drawing.TreeLayout.alone(trees)
    spots = [tree_drawing.TreePanel(None, layout, 0, 0, one, 0).spots for one in trees]
    for before, now in pairwise(spots):
        assert all(before[place] == now[place] for place in before.keys() & now.keys())


def test_changes_are_blocks_that_came_and_went(beams):
    for before, step in pairwise(beams.steps):
        changes = BeamChanges.between(before, step)
        assert {place[-1] for place in changes.new} == step.ref_counts.keys() - before.ref_counts
        assert {place[-1] for place in changes.freed} == before.ref_counts.keys() - step.ref_counts


def test_the_beams_are_those_of_the_engine(beams, tinypy):
    engine = Engine(tinypy.lm, small(num_blocks=64))
    outputs = engine.beam_search("def fib(n):\n    if n", beam_width=4, max_tokens=5)
    last = beams.steps[-1].beams.values()
    assert [one.token_ids[10:] for one in last] == [tuple(one.token_ids) for one in outputs]
    engine = Engine(tinypy.lm, small(num_blocks=64))
    again = record_beams(engine, tinypy.lm.encode("def fib(n):\n    if n"), width=4, steps=5)
    assert again.picture().alt == beams.picture().alt


@pytest.mark.parametrize("block_size", thorough_after(0, [3, 1, 16]))
def test_beams_of_any_block_size(tinypy, block_size):
    engine = Engine(tinypy.lm, small(num_blocks=200, block_size=block_size))
    history = record_beams(engine, tinypy.lm.encode("import os\nimport"), width=3, steps=4)
    assert_empty(engine)
    for step in history.steps:
        assert step.warnings == ()
    check_paper(history.frame(8))
    check_paper(history.picture().figure)


@pytest.mark.thorough
def test_beams_drawn_block_by_block(beams):
    for index, step in enumerate(beams.steps):
        figure = beams.frame(index)
        drawn = legend_and_rest(figure)
        for block in step.blocks.values():
            assert str(block.id) in drawn and refs(block.ref_count) in drawn
        assert [name for name in drawn if name in step.beams] == sorted(step.beams, key=drawn.index)
        assert f"blocks used: {step.num_used} · copies would use: {step.num_copied}" in str(drawn)
        next_tokens = [text for text in drawn if text.startswith("+")]
        assert len(next_tokens) == (4 if index % 2 else 0)
        check_paper(figure)
    check_paper(beams.picture().figure)


def test_the_beams_alt_text(beams):
    alt = beams.describe(3, 2)
    assert alt.startswith("Blocks used: 5; copies would use: 12.")
    assert "0 by A B E C (count 4)" in alt and "Freed in this step: 2." in alt


def test_a_block_that_others_hold_too_little_is_said(beams):
    pool = BlockPool(2)
    one = SimpleNamespace(
        token_ids=[1, 2], num_computed=2, table=SimpleNamespace(block_ids=[0], block_size=4)
    )
    history = BeamHistory(pool, str)
    pool.allocate()
    step = history.snap([one, one], "two beams")
    assert step.warnings == ("block 0: count 1, but held by A and B",)
    assert "⚠ block 0" in str(texts(history.picture().figure))


@pytest.mark.parametrize(
    ("width", "steps", "prompt_ids", "says"),
    [
        (0, 1, [1], "width: must be an int of at least 1, was 0"),
        (1, True, [1], "steps: must be an int"),
        (9, 1, [1], "width: 9 beams do not fit a batch of max_num_seqs=8"),
        (1, 24, [], r"prompt_ids: 1 to 1000 tokens, there were 0"),
        (1, 24, [1] * 1001, r"prompt_ids: 1 to 1000 tokens, there were 1001"),
    ],
)
def test_wrong_searches_are_refused(tinypy, width, steps, prompt_ids, says):
    with pytest.raises(ValueError, match=says):
        record_beams(Engine(tinypy.lm, small()), prompt_ids, width, steps)


def test_a_pool_that_is_too_small_is_left_as_it_was(tinypy):
    engine = Engine(tinypy.lm, small(num_blocks=8))
    with pytest.raises(OutOfBlocks):
        record_beams(engine, tinypy.lm.encode("def fib(n):\n    if n"), width=4, steps=5)
    assert_empty(engine)


def test_wrong_beams_are_refused():
    with pytest.raises(TypeError, match="pool: must have num_free and ref_count"):
        BeamHistory([], str)
    with pytest.raises(TypeError, match="decode: must be a function"):
        BeamHistory(BlockPool(1), None)
    with pytest.raises(ValueError, match="beams: at least one"):
        BeamHistory(BlockPool(1), str).snap([], "")
    with pytest.raises(TypeError, match="beam A: must have token_ids, num_computed and table"):
        BeamHistory(BlockPool(1), str).snap([BlockTable(BlockPool(1), 2)], "")
