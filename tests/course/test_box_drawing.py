"""Blocks as boxes in rows: every look has its ink, and a box keeps its place from step to step."""

from dataclasses import dataclass

import pytest
from matplotlib.patches import FancyBboxPatch
from thorough import thorough_after
from viewer_case import check_empty, check_looks, check_paper, texts

from minikv.course.pictures import style
from minikv.course.pictures.box_drawing import Board, Box, BoxRecording

LOOKS = ("filled", "pale", "hatched", "absent")


@dataclass(frozen=True)
class Shown:
    words: str
    board: Board
    warnings: tuple[str, ...] = ()


class Blocks(BoxRecording):
    title, rows = "Blocks", ("device", "a long name")
    meanings = {"here": Box("", style.PALETTE[0]), "gone": Box("", style.PAPER, "absent")}  # noqa: RUF012

    def describe(self, i, before):
        return f"{len(self.steps[i].board.boxes)} boxes."

    def counted(self, i):
        return {"boxes": len(self.steps[i].board.boxes)}

    def boards(self, chosen):
        return [self.steps[i].board for i in chosen]


def recording(columns=6, text="a text that is too long"):
    """In each step another look, and a row more from the second on."""
    blocks = Blocks()
    for n, look in enumerate(LOOKS):
        boxes = {
            (row, column): Box(text, style.color(row), look, column == n, (("1", "#0072B2"),), "A")
            for row in range(1 + bool(n))
            for column in range(columns)
        }
        lines = {(1, 0): (0, 0)} if n else {}
        blocks.steps.append(Shown(f"step of {look} boxes", Board(boxes, lines)))
    return blocks


def boxes_of(figure):
    return [one for one in figure.axes[0].get_children() if isinstance(one, FancyBboxPatch)]


def test_every_step_can_be_looked_at():
    check_looks(recording())
    check_empty(Blocks())


@pytest.mark.parametrize(
    ("columns", "text"), thorough_after(2, [(6, "four"), (1, ""), (3, "x"), (14, "0")])
)
def test_nothing_leaves_the_paper_or_covers_a_word(columns, text):
    for figure in (recording(columns, text).frame(2), recording(columns, text).picture().figure):
        check_paper(figure)


def test_looks_are_told_apart_without_colour():
    looks = []
    for i in range(4):
        large = [one for one in boxes_of(recording().frame(i)) if one.get_height() > 0.2]
        first = (large[0].get_x(), large[0].get_y())
        here = [one for one in large if (one.get_x(), one.get_y()) == first]
        is_hatched = any(one.get_hatch() for one in here)
        looks.append(
            (here[-1].get_facecolor(), is_hatched, here[-1].get_linestyle() in ("-", "solid"))
        )
    faces, hatched, solid = zip(*looks, strict=True)
    assert len(set(faces)) == 4
    assert hatched == (False, False, True, False) and solid == (True, True, True, False)


def test_a_box_keeps_its_place_and_a_new_one_has_a_thick_outline():
    frames = [boxes_of(recording(text="x").frame(i)) for i in (0, 1)]
    before, after = ([one for one in boxes if one.get_height() > 0.2] for boxes in frames)
    assert len(before) == 6 and len(after) == 12
    for old, now in zip(before, after, strict=False):
        assert (old.get_x(), old.get_y()) == (now.get_x(), now.get_y())
    thick = [[one.get_linewidth() > 2 for one in boxes] for boxes in (before, after[:6])]
    assert thick == [[place == n for place in range(6)] for n in (0, 1)]


def test_a_text_that_does_not_fit_is_cut_and_a_line_leads_to_its_box():
    figure = recording().frame(1)
    assert texts(figure).count("a text t…") == 12
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [4, 2]  # and the legend's
