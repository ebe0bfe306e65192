"""How pictures reach a page: with their words, in a form that every viewer shows."""

import re
from base64 import b64decode
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import nbformat
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from nbconvert import HTMLExporter
from nbval.plugin import get_sanitize_patterns
from thorough import thorough_after

from minikv.course.pictures import style

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
ON_PAGE = 676  # pixels of a picture on a page of 686: the site's text column at 1280


class Word(NamedTuple):
    text: str
    pixels: float  # high, on that page
    inside: bool  # from the first letter to the last


def letters(svg):
    """Every text of a picture that stands upright and in one size."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        style_, moved = node.get("style", ""), node.get("transform", "")
        size = re.search(r"([\d.]+)px", style_)
        place = re.fullmatch(r"rotate\(-?0 (\S+) (\S+)\)|translate\((\S+) (\S+)\)", moved)
        if size is None or place is None:
            continue
        x, base = map(float, filter(None, place.groups()))
        text = "".join(node.itertext())
        font = FontProperties(
            family="DejaVu Sans Mono" if "Mono" in style_ else "DejaVu Sans",
            size=float(size[1]), weight="bold" if "700" in style_ or "bold" in style_ else "normal",
        )  # fmt: skip
        long, _, _ = TextToPath().get_text_width_height_descent(text, font, False)
        anchor = re.search(r"text-anchor:\s*(\w+)", style_)
        before = {"start": 0, "middle": long / 2, "end": long}[anchor[1] if anchor else "start"]
        left = x - before
        inside = left > -1 and left + long < width + 1 and 0 < base < height + 1
        yield Word(text, float(size[1]) * ON_PAGE / width, inside)


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
    data = picture()._repr_mimebundle_()
    image, kind, svg = drawn(data["text/html"])
    assert image["alt"] == data["text/plain"] == "A line: it's 1 & 2 < 3."
    assert kind == "svg+xml" and b"step: number" in svg and b"<script" not in svg
    assert "<figcaption>Counts per step.</figcaption>" in data["text/html"]
    assert "figcaption" not in picture(caption="").html()
    assert set(data) == {"text/html", "text/plain"}


def test_the_same_drawing_is_the_same_bytes():
    assert style.svg(picture().figure) == style.svg(picture().figure)
    assert b"<dc:date>" not in style.svg(picture().figure)


def test_very_many_marks_are_pixels():
    figure, axes = style.new_axes("", "", "")
    axes.plot(range(style.MOST_POINTS), range(style.MOST_POINTS), "o")
    _, kind, data = drawn(style.Picture(figure, "").html())
    assert kind == "png" and data.startswith(b"\x89PNG")


def test_letters_can_be_read_on_a_narrow_page_and_titles_stay_inside():
    figure, axes = style.new_axes("long words " * 12, "", "")
    axes.text(0.5, 0.5, "small", fontsize=3)
    words = list(letters(style.svg(figure)))
    assert {"small", "long words"} <= {word.text[:10].strip() for word in words}
    assert [word for word in words if word.pixels < 9 or not word.inside] == []


@pytest.mark.parametrize("path", thorough_after(4, NOTEBOOKS), ids=lambda path: path.stem[:2])
def test_in_stored_figures_letters_can_be_read_and_stay_inside(path):
    """Of each picture and of each film's first frame. Exponents and pixels are not looked at."""
    text = path.read_text(encoding="utf-8")
    wrong = []
    for cell in nbformat.reads(text, as_version=4).cells:
        for output in cell.get("outputs", []):
            html = output.get("data", {}).get("text/html", "")
            for svg in re.findall(r"data:image/svg\+xml;base64,([^'\"]+)", html):
                wrong += [
                    f"{cell.id}: {word.text!r}, {word.pixels:.1f} px"
                    for word in letters(b64decode(svg))
                    if word.pixels < 9 or not word.inside
                ]
    assert wrong == []


def test_the_alt_text_is_in_an_exported_page():
    output = nbformat.v4.new_output("execute_result", picture()._repr_mimebundle_())
    cell = nbformat.v4.new_code_cell("draw()", outputs=[output])
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    image, _, _ = drawn(page)
    assert image["alt"] == "A line: it's 1 & 2 < 3." and "No description" not in page


@pytest.mark.parametrize("marks", thorough_after(1, [3, 4]))
def test_nbval_compares_the_words_and_not_the_bytes(marks):
    patterns = get_sanitize_patterns((Path(__file__).parents[1] / "nbval.cfg").read_text())
    first, second = picture().html(), picture(marks).html()
    for regex, replace in patterns:
        first, second = re.sub(regex, replace, first), re.sub(regex, replace, second)
    assert first == second and len(first) < 500
    assert "A line: it's 1 & 2 < 3." in unescape(first)
