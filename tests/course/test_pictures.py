"""How pictures reach a page: with their words, in a form that every viewer shows."""

import re
from base64 import b64decode
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbval.plugin import get_sanitize_patterns

from minikv.course.pictures import style


def picture(marks=3, caption="Counts per step."):
    figure, axes = style.new_axes("It's 1 & 2 < 3", "step: number", "count")
    axes.plot(range(marks), range(marks), "o-")
    return style.Picture(figure, "A line: it's 1 & 2 < 3.", caption)


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def drawn(html):
    """The attributes of the only image, and what it is made of."""
    [image] = [attrs for tag, attrs in Tags(html).tags if tag == "img"]
    kind, data = re.fullmatch(r"data:image/([a-z+]+);base64,(.*)", image["src"]).groups()
    return image, kind, b64decode(data)


def test_a_picture_comes_with_its_words():
    data, _ = picture()._repr_mimebundle_()
    image, kind, svg = drawn(data["text/html"])
    assert image["alt"] == data["text/plain"] == "A line: it's 1 & 2 < 3."
    assert kind == "svg+xml" and b"step: number" in svg and b"<script" not in svg
    assert "<figcaption>Counts per step.</figcaption>" in data["text/html"]
    assert "figcaption" not in picture(caption="").html()
    assert data["image/png"].startswith(b"\x89PNG")


def test_the_same_drawing_is_the_same_bytes():
    assert style.svg(picture().figure) == style.svg(picture().figure)
    assert b"<dc:date>" not in style.svg(picture().figure)


def test_very_many_marks_are_pixels():
    figure, axes = style.new_axes("", "", "")
    for x in range(3000):
        axes.plot([x], [x % 7], "o")
    _, kind, data = drawn(style.Picture(figure, "").html())
    assert kind == "png" and data.startswith(b"\x89PNG")


def test_the_alt_text_is_in_an_exported_page():
    data, _ = picture()._repr_mimebundle_()
    output = nbformat.v4.new_output("execute_result", data | {"image/png": ""})
    cell = nbformat.v4.new_code_cell("draw()", outputs=[output])
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    image, _, _ = drawn(page)
    assert image["alt"] == "A line: it's 1 & 2 < 3." and "No description" not in page


@pytest.mark.parametrize("marks", [3, 4])
def test_nbval_compares_the_words_and_not_the_bytes(marks):
    patterns = get_sanitize_patterns((Path(__file__).parents[1] / "nbval.cfg").read_text())
    first, second = picture().html(), picture(marks).html()
    for regex, replace in patterns:
        first, second = re.sub(regex, replace, first), re.sub(regex, replace, second)
    assert first == second and len(first) < 500
    assert "A line: it's 1 & 2 < 3." in unescape(first)
