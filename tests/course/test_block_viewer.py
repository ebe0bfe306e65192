"""The viewer of block tables: what it draws is what the live objects said, wrong or right."""

from collections import Counter
from itertools import pairwise

import pytest
from helpers import meets
from hypothesis import given, strategies as st
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle
from thorough import thorough_after
from viewer_case import check_empty, check_looks, check_paper, texts

from minikv.blocks import BlockPool, BlockTable, OutOfBlocks
from minikv.course.pictures import block_drawing, scene, style
from minikv.course.pictures.block_viewer import History


class AnyTable:
    """A reader's table, with whatever is in it."""

    def __init__(self, block_ids, num_tokens, block_size=4):
        self.block_ids, self.num_tokens, self.block_size = block_ids, num_tokens, block_size


class AnyPool:
    """A reader's pool, with whatever counts it keeps."""

    def __init__(self, *counts, num_free=None):
        self.num_blocks, self._counts = len(counts), counts
        self.num_free = counts.count(0) if num_free is None else num_free

    def ref_count(self, block_id):
        return self._counts[block_id]


def walk_through():
    """Chapter 04's: 7 prompt tokens on blocks 7 and 1, the 9th token opens block 3."""
    pool = BlockPool(10)
    for block_id in [pool.allocate() for _ in range(10)][::-1]:
        if block_id not in (7, 1, 3):
            pool.release(block_id)
    for block_id in (3, 1, 7):
        pool.release(block_id)
    history, table = History(pool), BlockTable(pool, 4)
    history.snap("before anything")
    for tokens in (7, 1, 1):
        table.grow(tokens)
        history.snap(f"{tokens} more", {"A": table})
    return history


def fork():
    """Chapter 05's: A and B share a prompt of 7 tokens; A copies, B writes in place; A ends."""
    pool = BlockPool(6)
    history, a = History(pool), BlockTable(pool, 4)
    a.grow(7)
    history.snap("prefill", {"A": a})
    tables = {"A": a, "B": a.fork()}
    history.snap("fork", tables)
    for table in tables.values():
        table.grow(1)
        table.writable_slot(7)
        history.snap("a write", tables)
    a.release()
    history.snap("A ends", tables)
    return history


def states(step):
    return [block.state for block in step.blocks]


def film(history):
    return history.picture().figure


# ── What a snapshot says ──────────────────────────────────────────────────────


def test_the_walk_through():
    history = walk_through()
    assert [step.num_free for step in history.steps] == [10, 8, 8, 7]
    filled = [[len(names) for names in step.blocks[1].slots] for step in history.steps]
    assert filled == [[0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    last = history.steps[-1]
    assert last.tables["A"].block_ids == (7, 1, 3)
    assert [last.filled("A", index) for index in range(3)] == [4, 4, 1]
    assert [block.id for block in last.blocks if block.state == "used"] == [1, 3, 7]
    assert last.filled_slots - history.steps[2].filled_slots == {(3, 0)}
    assert "7 (4 of 4 filled), 1 (4 of 4 filled), 3 (1 of 4 filled)" in last.describe()


def test_a_slot_is_new_to_whoever_takes_it_over_and_not_to_whoever_shares_it():
    pool = BlockPool(2)
    history = History(pool)
    a, b = (BlockTable(pool, block_size=2) for _ in "AB")

    def new(tables, cached=()):
        history.snap("", tables, cached=cached)
        return history.steps[-1].filled_slots - history.steps[-2].filled_slots

    history.snap("", {})
    a.grow(2)
    block = a.block_ids[0]
    assert new({"A": a}) == {(block, 0), (block, 1)}
    b.share(a.block_ids)
    assert new({"A": a, "B": b}) == new({"B": b}) == set()  # A's table is no longer shown
    assert new({}, cached={block}) == new({"A": a}) == set()  # cached, and used again
    a.release(), b.release()
    b.grow(1)
    assert b.block_ids == [block]
    assert new({"B": b}) == {(block, 0)}


def test_copy_on_write():
    history = fork()
    assert [states(step)[:3] for step in history.steps] == [
        ["used", "used", "free"],
        ["shared", "shared", "free"],
        ["shared", "used", "used"],
        ["shared", "used", "used"],
        ["used", "used", "free"],
    ]
    assert history.steps[1].blocks[1].slots == (("A", "B"),) * 3 + ((),)
    assert history.steps[1].blocks[0].ref_count == 2
    assert "Block 0 is shared by A and B, count 2." in history.steps[1].describe()
    assert not any(step.warnings for step in history.steps)


MET = Counter()


@meets(MET, {"shared": 8, "copied": 3})
@given(
    block_size=st.integers(1, 16),
    moves=st.lists(st.tuples(st.sampled_from("gfwr"), st.integers(0, 3)), max_size=25),
)
def test_what_is_said_is_what_is_there(block_size, moves):
    pool = BlockPool(12)
    history, tables = History(pool), {"A": BlockTable(pool, block_size)}
    for move, which in moves:
        name = sorted(tables)[which % len(tables)]
        table = tables[name]
        try:
            if move == "g":
                table.grow(which * block_size // 2 + 1)
            elif move == "f" and len(tables) < 4:
                tables[style.letter(len(tables))] = table.fork()
            elif move == "w" and table.num_tokens:
                MET["copied"] += table.writable_slot(table.num_tokens - 1)[1] is not None
            elif move == "r":
                table.release()
        except OutOfBlocks:
            pass
    step = history.snap("now", tables)
    assert step.warnings == () and step.num_free == states(step).count("free")
    MET["shared"] += any(block.ref_count > 1 for block in step.blocks)
    seen = Counter()
    for block in step.blocks:
        assert block.ref_count == pool.ref_count(block.id) == len(block.named_by)
        for offset, names in enumerate(block.slots):
            seen.update((name, block.id * block_size + offset) for name in names)
    slots = Counter(
        (name, table.block_ids[position // block_size] * block_size + position % block_size)
        for name, table in tables.items()
        for position in range(table.num_tokens)
    )
    assert seen == slots


def test_a_snapshot_is_a_copy():
    pool = BlockPool(6)
    history, table = History(pool), BlockTable(pool, 4)
    table.grow(5)
    before = history.snap("before", {"A": table})
    words = before.describe()
    table.grow(9)
    table.block_ids.append(99)
    pool.num_blocks = 3
    assert before.tables["A"].block_ids == (0, 1) and before.describe() == words
    assert states(before) == ["used", "used", "free", "free", "free", "free"]


def test_held_and_cached_are_told_from_free():
    step = History(AnyPool(1, 1, 0, 2)).snap("", {"A": AnyTable([3], 2)}, cached=[1, 3])
    assert states(step) == ["held", "cached", "free", "used"]
    assert step.warnings == ()  # count 2: A's table and the cache
    assert "Cached and unused: 1." in step.describe()
    assert "In use, by no table here: 0." in step.describe()


@pytest.mark.parametrize(
    ("pool", "tables", "warning"),
    thorough_after(2, [
        (AnyPool(1, 0), {"A": AnyTable([0, 1], 7)}, "block 1: free, yet in the table of A"),
        (AnyPool(1), {"A": AnyTable([0], 4), "B": AnyTable([0], 4)},
         "block 0: count 1, but in 2 tables here: A and B"),
        (AnyPool(2), {"A": AnyTable([0], 1)}, "block 0: count 2, but in 1 table here: A"),
        (AnyPool(2), {"A": AnyTable([0, 0], 5)}, "block 0: more than once in the table of A"),
        (AnyPool(0), {"A": AnyTable([5], 1)}, "A: names block 5, which the pool does not have"),
        (AnyPool(1), {"A": AnyTable([0], 6)}, "A: 6 tokens, but room for 4"),
        (AnyPool(0, 0, num_free=1), {}, "the pool says 1 are free, but 2 have count 0"),
    ]),
)  # fmt: skip
def test_a_bug_is_said_and_drawn(pool, tables, warning):
    history = History(pool)
    step = history.snap("a <bug>", tables)
    assert step.warnings == (warning,)
    assert warning in history.picture().alt and "⚠ " + warning[:12] in str(texts(film(history)))
    assert f"⚠ {warning}" in history.widget().caption.value
    assert "a &lt;bug&gt;" in history.widget().caption.value


def test_the_count_is_the_pools():
    history = History(AnyPool(7, 0, 0))
    history.snap("", {"A": AnyTable([0, 1], 6), "B": AnyTable([1], 2)})
    first, second, _ = history.steps[0].blocks
    assert (first.ref_count, first.state) == (7, "used")
    assert (second.ref_count, second.state, second.slots[0]) == (0, "shared", ("A", "B"))
    assert "7" in texts(history.frame(0))


# ── What is drawn ─────────────────────────────────────────────────────────────


def test_every_filled_slot_has_its_letter():
    history = fork()
    legend = Counter(["A", "A", "A"])  # its samples
    for index, step in enumerate(history.steps):
        drawn = Counter(texts(history.frame(index))) - legend
        for name, table in step.tables.items():
            # Its chip, its logical slots, and the physical ones that it does not share.
            own = sum(slot == (name,) for block in step.blocks for slot in block.slots)
            assert drawn[name] == 1 + table.num_tokens + own
            for place in range(len(table.block_ids)):
                assert f"{step.filled(name, place)} of 4" in drawn


def test_the_legend_keeps_its_place():
    history = fork()
    words = [text for i in range(len(history.steps)) for text in history.frame(i).axes[0].texts]
    assert len({text.get_position() for text in words if text.get_text() == "free block"}) == 1


def test_a_table_keeps_its_lane():
    pool = BlockPool(8)
    tables = {name: BlockTable(pool, 4) for name in "ABC"}
    history = History(pool)
    for names in ("AB", "B", "BC"):
        history.snap(names, {name: tables[name] for name in names})
    lanes = block_drawing.TableLayout(history.steps, 0.2, 16).lanes
    assert lanes == [{"A": 0, "B": 1}, {"B": 1}, {"B": 1, "C": 0}]


@pytest.mark.parametrize(
    ("num_blocks", "block_size"),
    thorough_after(0, [(4, 1), (64, 16), (4, 3), (4, 16), (24, 4), (24, 16), (64, 1)]),
)
def test_everything_fits_on_the_paper(num_blocks, block_size):
    pool = BlockPool(num_blocks)
    tables = {name: BlockTable(pool, block_size) for name in "ABCD"[: num_blocks // 4]}
    for table in tables.values():
        table.grow(3 * block_size)
    history = History(pool)
    history.snap("now", tables)
    history.snap("and then, with a title that is too long for a panel of a film", tables)
    for figure in (history.frame(1), film(history)):
        check_paper(figure, apart=False)


def test_of_a_large_pool_only_what_is_used_is_drawn():
    pool = BlockPool(512)
    history, table = History(pool), BlockTable(pool, 2)
    table.grow(64)
    history.snap("32 blocks", {"A": table})
    assert "… and 480 free" in texts(history.frame(0))
    table.grow(256)  # more than are drawn
    history.snap("160 blocks", {"A": table})
    shown = texts(history.frame(1))
    assert "… and 96 in use and 352 free" in shown and "→ …" in shown


def test_what_is_shared_has_the_colours_and_the_names_of_all():
    step = fork().steps[1]
    assert [block_drawing.held_by(block) for block in step.blocks[:3]] == ["2 AB", "2 AB", "0"]
    [axes] = fork().frame(1).axes
    faces = Counter(to_hex(patch.get_facecolor()).upper() for patch in axes.get_children()
                    if isinstance(patch, Rectangle))  # fmt: skip
    chip_and_slots = 1 + 2 * 7  # of each table; the physical ones are stripes
    assert faces[style.color(1)] == chip_and_slots + 1  # and one in the legend


def test_many_who_share_a_block_are_counted():
    pool = BlockPool(1)
    first = BlockTable(pool, 4)
    first.grow(4)
    tables = {"A": first} | {name: first.fork() for name in "BCDEFG"}
    step = History(pool).snap("seven", tables)
    assert block_drawing.held_by(step.blocks[0]) == "7 ABCD+3"


def test_what_was_freed_is_marked_with_who_had_it():
    pool = BlockPool(2)
    history, tables = History(pool), {name: BlockTable(pool, 4) for name in "AB"}
    for table in tables.values():
        table.grow(2)
    history.snap("both run", tables)
    tables.pop("B").release()
    history.snap("B is preempted", tables)
    drawn = texts(film(history))
    assert {"was B", "B has left", "freed in this step"} <= set(drawn)


def test_the_legend_explains_what_is_drawn_and_no_more():
    alone, shared = texts(film(walk_through())), texts(film(fork()))
    assert "shared by A and B" in shared and "shared by A and B" not in alone
    assert "free block" in alone and "refs" in alone


def test_the_caption_counts_blocks():
    history = fork()
    assert history.picture().caption == "Blocks in use of 6: 2 → 2 → 3 → 3 → 2."
    assert history.picture([1, 2], caption="A copies first.").caption == "A copies first."


def test_token_texts_stand_in_their_slots():
    pool = BlockPool(4)
    history, table = History(pool), BlockTable(pool, 4)
    table.grow(3)
    history.snap("", {"A": table}, texts={"A": ["def", " fib", "\n", "not yet there"]})
    drawn = texts(history.frame(0))
    assert {"def", "·fib", "↵"} <= set(drawn) and not any("not" in text for text in drawn)


@pytest.mark.parametrize("panels", thorough_after(1, [2, 1, 3]))
def test_token_texts_keep_apart(panels):
    pool = BlockPool(9)
    history, table = History(pool), BlockTable(pool, 4)
    table.grow(20)
    for _ in range(panels):
        history.snap("", {"A": table}, texts={"A": ["    ", "return", ".", "a", "\n    "] * 4})
    figure = film(history)
    style.legible(figure)
    assert figure.get_figwidth() == scene.WIDTH  # the paper that was laid out
    drawn = [one for one in figure.axes[0].texts if one.get_family() == ["monospace"]]
    boxes = sorted((one.get_window_extent() for one in drawn), key=lambda box: (box.y0, box.x0))
    rows = [(a, b) for a, b in pairwise(boxes) if abs(a.y0 - b.y0) < a.height / 2 and a.x0 < b.x0]
    assert len(drawn) == 20 * panels and len(rows) > 10
    assert all(a.x1 < b.x0 for a, b in rows)


def test_a_sequence_keeps_its_colour_everywhere():
    assert [scene.number_of(style.letter(index)) for index in range(80)] == list(range(80))
    assert style.color(0) == style.color(len(style.PALETTE))
    assert len(letters := [style.letter(i) for i in range(100)]) == len(set(letters))


def test_what_fills_blocks_can_be_told_apart_in_grey():
    fills = (style.PAPER, scene.CACHED, scene.HELD, style.FAINT)
    grey = [sum(to_rgb(fill)) / 3 for fill in fills]
    assert all(before - after > 0.12 for before, after in pairwise(grey))


# ── The player, and wrong input ───────────────────────────────────────────────


@pytest.mark.thorough
def test_every_step_can_be_looked_at():
    for history in (walk_through(), fork()):
        check_looks(history)
    player = fork().widget()
    assert "run this cell" in repr(player)
    assert player.slider.tooltip and player.slider.description == "step 0 of 4"
    assert all(button.description and button.tooltip for button in player.buttons.values())


def test_the_players_buttons_move_it():
    player = fork().widget()
    back, play, forth = (player.buttons[name] for name in ("back", "play", "next"))
    forth.click(), forth.click(), back.click()
    assert player.slider.value == 1
    back.click(), back.click()
    assert player.slider.value == 0  # the slider's end
    play.click()
    assert player.play.playing and play.description == "⏸ Pause"
    forth.click()
    assert not player.play.playing and play.description == "▶ Play" and player.slider.value == 1
    player.slider.value = 4
    play.click()  # at the end: from the beginning
    assert player.play.playing and player.slider.value == 0


@pytest.mark.parametrize(
    ("tables", "texts", "error", "says"),
    [
        ({"alice": AnyTable([0], 1)}, None, ValueError, "a name is a letter"),
        ({"A": AnyTable([0], 1), "B": AnyTable([0], 1, 8)}, None, ValueError, "one block size"),
        ({"A": AnyTable(None, 1)}, None, TypeError, "table A: block_ids"),
        ({"A": AnyTable([None], 1)}, None, TypeError, r"table A: block_ids .* \[None\]"),
        ({"A": AnyTable([0], "1")}, None, TypeError, "table A: .*num_tokens"),
        ({"A": AnyTable([0], 1)}, {"B": ["x"]}, ValueError, "texts: no table B"),
    ],
)
def test_wrong_tables_are_refused_by_name(tables, texts, error, says):
    with pytest.raises(error, match=says):
        History(AnyPool(1)).snap("", tables, texts)


def test_wrong_pools_and_empty_histories_are_refused():
    with pytest.raises(TypeError, match="lacks num_blocks"):
        History([1, 2])
    with pytest.raises(TypeError, match=r"ref_count\(1\): must be an int, was None"):
        History(AnyPool(0, None)).snap("")
    check_empty(History(AnyPool(0)))
