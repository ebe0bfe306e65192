"""What holds of every recording that is drawn: of blocks, of trees, of beams, of a ring."""

import re
from html import unescape
from itertools import combinations

import pytest

from minikv.course.pictures.player import Player


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def check_paper(figure, apart=True):
    """All texts are on the paper and, if they have to be `apart`, none is on another."""
    width, height = figure.get_size_inches()
    figure.draw_without_rendering()
    boxes = []
    for text in figure.axes[0].texts:
        box = text.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        assert box.x0 >= 0 and box.x1 <= width, text
        assert box.y0 >= 0 and box.y1 <= height, text
        boxes.append((text.get_text(), box))
    for (one, a), (other, b) in combinations(boxes, 2) if apart else ():
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < 0.01 or down < 0.03, (one, other, across, down)


def check_looks(history):
    """Frames, player and picture of a history of at least three steps, each unlike the others."""
    steps, last = history.steps, len(history.steps) - 1
    frames = [history.frame(i) for i in range(last + 1)]
    assert len({tuple(frame.get_size_inches()) for frame in frames}) == 1
    player = history.widget()
    assert isinstance(player, Player) and (player.slider.min, player.slider.max) == (0, last)
    seen = set()
    for i, step in enumerate(steps):
        player.slider.value = i
        seen.add(player.picture.value)
        caption = unescape(player.caption.value)
        assert step.words in caption
        assert history.describe(i, i - 1 if i else None) in caption  # for a screen reader
    assert len(seen) == last + 1
    assert player.slider.description == f"step {last} of {last}"
    alt = f"alt='the {history.title.lower()}, step {last} of {last}'"
    assert alt in player.picture.value
    picture = history.picture(steps=[1, -1])
    assert re.findall(r"Step (\d+), ", picture.alt) == ["1", str(last)]
    assert history.describe(1, 0) in picture.alt and history.describe(last, 1) in picture.alt
    # The lines over each panel may be broken.
    said = " ".join(" ".join(texts(picture.figure)).split())
    assert all(f"Step {i}: {steps[i].words}" in said for i in (1, last))
    with pytest.raises(ValueError, match="at least one"):
        history.picture([])
    with pytest.raises(IndexError):
        history.frame(last + 1)


def check_empty(history):
    """Of a history without steps nothing can be drawn."""
    for draw in (history.picture, history.widget, lambda: history.frame(0)):
        with pytest.raises(ValueError, match="nothing to draw yet"):
            draw()
