"""Chapter 11's own code: the viewer of the ring, the comparison with blocks, the rung."""

import pytest
from viewer_case import check_empty, check_looks, texts

from minikv.course.chapters.ch11_ring_cache import comparison, rung
from minikv.course.chapters.ch11_ring_cache.given import filled, layout_of
from minikv.course.chapters.ch11_ring_cache.ring_viewer import RingHistory
from minikv.course.judge.checking import in_place_of
from minikv.course.workloads import running_table
from minikv.ring import Cells, cache, context_shift


def story():
    """Two sequences share a beginning, part, and one of them shifts."""
    cells = Cells(12)
    history = RingHistory(cells)
    cells.place(range(6), [0] * 6)
    history.snap("A", {0: "class"})
    cells.seq_cp(0, 1, 0, 2)
    cells.place([2], [1])
    history.snap("B shares two and has one")
    cells.seq_rm(1)
    context_shift(cells, 2)
    history.snap("B ends, A shifts")
    return cells, history


def test_a_snapshot_is_what_the_cells_said():
    cells, history = story()
    first, second, third = history.steps
    assert [cell.position for cell in first.cells] == [0, 1, 2, 3, 4, 5] + [None] * 6
    assert first.cells[0].text == "class" and first.num_used == first.used_max == 6
    assert [cell.owners for cell in second.cells[:3]] == [("A", "B")] * 2 + [("A",)]
    assert second.cells[6].owners == ("B",) and second.head == 7
    assert [(cell.position, cell.shift) for cell in third.cells[4:6]] == [(2, -2), (3, -2)]
    assert third.num_used == 4 and third.used_max == 6
    cells.seq_rm(0)
    assert third.num_used == 4  # a copy
    assert not any(step.warnings for step in history.steps)


def test_the_picture_in_words():
    _, history = story()
    picture = history.picture()
    for words in (
        "Step 0, A: 6 of 12 cells used, the last one is cell 5; head at 6.",
        "A and B: positions 0 to 1 in cells 0 to 1.",
        "B: position 2 in cell 6.",
        "A: positions 2 to 3 in cells 4 to 5, keys to be turned by -2.",
    ):
        assert words in picture.alt
    assert picture.caption == "Cells in use of 12: 6 → 7 → 4."
    assert "All 4 cells are free" in RingHistory(Cells(4)).snap("empty").describe()


def test_the_drawing_has_positions_owners_and_pending_turns():
    _, history = story()
    third = texts(history.frame(2))
    assert third.count("−2") == 2 and "head" in third
    assert third.count("×") == 3 + 1  # one in the legend
    assert texts(history.frame(1)).count("AB") == 2
    assert "shared by A and B" not in texts(story_of_one())
    assert "data:image/svg+xml" in history.picture().html()


def story_of_one():
    history = RingHistory(Cells(4))
    history.snap("nothing")
    return history.frame(0)


def test_a_long_ring_goes_over_several_rows():
    history = RingHistory(Cells(60))
    history.snap("")
    short = RingHistory(Cells(20))
    short.snap("")
    assert history.frame(0).get_figheight() > 2 * short.frame(0).get_figheight() - 1
    assert "59" in texts(history.frame(0))


def test_every_step_can_be_looked_at():
    check_looks(story()[1])
    check_empty(RingHistory(Cells(4)))
    with pytest.raises(TypeError, match="cells: must have"):
        RingHistory(object())


def test_a_contradiction_is_marked():
    cells = Cells(3)
    cells.positions[1] = 4
    step = RingHistory(cells).snap("")
    assert step.warnings == ("cell 1: position 4, but it belongs to no sequence",)


def test_layouts_go_both_ways():
    cells = filled(Cells(6), "AB.A.B", 2)
    cells.check()
    assert layout_of(cells) == "AB.A.B" and cells.head == 2
    cells.seq_cp(0, 2)
    assert layout_of(cells) == "(AC)B.(AC).B"


def test_a_part_stands_in_the_references_place_and_is_given_back():
    before = cache.turn
    with pytest.raises(RuntimeError), in_place_of("minikv.ring.cache:turn", min):
        assert cache.turn is min
        raise RuntimeError
    assert cache.turn is before


def test_the_rungs_write_the_oracles_tokens(lm):
    prompt = lm.encode("import heapq\n\n\nclass ")
    expected = lm.generate_naively(prompt, 6)
    alone, together = (run(lm, prompt, 6) for run in rung.RUNS.values())
    assert alone.token_ids == together.token_ids == expected
    assert together.answers == running_table.TOGETHER
    each = lm.config.kv_bytes_per_token(lm.dtype)
    assert alone.kv_bytes_per_token == each > together.kv_bytes_per_token
    held = [len(prompt) + i for i in range(1, 6)]
    assert alone.wasted == pytest.approx(1 - sum(held) / (5 * rung.CELLS))


def test_what_is_held_in_cells_and_in_blocks():
    assert comparison.held_in_cells(100, 8, 1) == 108
    assert comparison.held_in_blocks(100, 8, 1) == 14 * 16
    assert comparison.held_in_cells(32, 1, 1) == 33 and comparison.held_in_blocks(32, 1, 1) == 48
    assert comparison.largest_batch(True) == comparison.BLOCK
    assert comparison.largest_batch(False) == comparison.SLOTS // 2


@pytest.mark.thorough
def test_the_comparison_has_three_columns(lm):
    table = comparison.Comparison(lm, repeats=1)
    assert {len(row) for row in table.rows()} == {3}
    assert "tokens per second, one text" in repr(table)
