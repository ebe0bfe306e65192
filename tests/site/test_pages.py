"""How the site's pages are made of what the repository stores."""

import base64
import json
import sys
import zlib
from pathlib import Path

import pytest

import minikv
from minikv.course.exercise_data.manifest import chapters
from minikv.course.pictures import film

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import api  # noqa: E402
from cells import EMBEDDED, WIDGET, Pictures, shown  # noqa: E402
from links import Links  # noqa: E402
from tasks import all_exercises, marked  # noqa: E402

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(8) + bytes([0, 0, 0, 3, 0, 0, 0, 2])).decode()


def test_exercises_are_those_of_the_manifests():
    """The site reads the manifests' text; here they are imported."""
    expected = {one.id: one for chapter in chapters().values() for one in chapter.exercises}
    found = all_exercises()
    assert found.keys() == expected.keys()
    for id_, one in found.items():
        assert one.title == expected[id_].title
        assert [" ".join(hint.split()) for hint in one.hints] == [
            " ".join(hint.split()) for hint in expected[id_].hints
        ]


def test_the_reference_names_everything_public_and_nothing_private():
    names = [name for _, some in api.public_names() for name in some]
    assert sorted(names) == sorted(minikv.__all__)
    page = api.page()
    assert ".. py:method:: allocate() -> int" in page and ":: _" not in page


@pytest.mark.parametrize(
    ("file", "link", "expected"),
    [
        ("README.md", "docs/SETUP.md", "docs/SETUP.md"),
        ("README.md", "exercises/ch02_kv_cache.py", "exercises/ch02_kv_cache.md"),
        ("docs/ENGINE.md", "../minikv/blocks.py", "../source/minikv/blocks.md"),
        ("docs/ENGINE.md", "../minikv/gpu", "../source/minikv/gpu/index.md"),
        ("notebooks/04_paged_blocks.ipynb", "05_copy_on_write.ipynb", "05_copy_on_write.ipynb"),
        ("CONTRIBUTING.md", "https://example.org/x", "https://example.org/x"),
    ],
)
def test_links_lead_to_pages(file, link, expected):
    assert Links(file, set()).in_markdown(f"see [it]({link}).") == f"see [it]({expected})."


def test_sources_of_tests_are_not_published():
    wanted = set()
    text = Links("CONTRIBUTING.md", wanted).in_markdown("[a test](tests/course/test_house.py)")
    assert (text, wanted) == ("a test", set())


def test_links_in_html_lead_to_lines_of_a_page():
    links = Links("notebooks/04_paged_blocks.ipynb", set())
    html = '<a href="../exercises/ch04_paged_blocks.py#line=31">'
    expected = '<a href="../exercises/ch04_paged_blocks.html#line-32">'
    assert links.in_html(html) == expected


def test_code_keeps_what_looks_like_a_link():
    text = "```\n[a](nowhere.md)\n```\n"
    assert Links("README.md", set()).in_markdown(text) == text


def test_a_link_to_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"nowhere\.md"):
        Links("README.md", set()).in_markdown("[a](nowhere.md)")


def test_hints_keep_what_looks_like_html():
    assert marked("`a < b` is *not* 2 * 3 * x") == "<code>a &lt; b</code> is <em>not</em> 2 * 3 * x"


@pytest.fixture
def links():
    return Links("notebooks/04_paged_blocks.ipynb", set())


def test_embedded_pictures_become_files(tmp_path, links):
    html = f"<img alt='three by two' src='data:image/png;base64,{PIXEL}'>"
    output = {"data": {"text/html": html, "image/png": PIXEL, "text/plain": "words"}}
    [(kind, text)] = shown(output, {}, Pictures(tmp_path, "../p"), links)["data"].items()
    [file] = tmp_path.iterdir()
    assert kind == "text/html" and file.read_bytes() == base64.b64decode(PIXEL)
    expected = (
        f"<img alt='three by two' width='3' height='2' loading='lazy' src='../p/{file.name}'>"
    )
    assert text == expected


def test_a_widget_without_a_film_is_shown_as_it_was_stored(tmp_path, links):
    state = {
        "top": {"model_name": "VBoxModel", "state": {"children": ["IPY_MODEL_a", "IPY_MODEL_b"]}},
        "a": {"model_name": "HTMLModel", "state": {"value": "<b>a step</b>"}},
        "b": {
            "model_name": "HTMLModel",
            "state": {"value": f"<img alt='the ring' src='data:image/png;base64,{PIXEL}'>"},
        },
    }
    output = {"data": {WIDGET: {"model_id": "top"}, "text/plain": "A player"}}
    html = shown(output, state, Pictures(tmp_path, "../p"), links)["data"]["text/html"]
    assert "<b>a step</b>" in html and "alt='the ring'" in html
    assert not EMBEDDED.search(html)


def test_a_widget_with_a_film_is_the_film(tmp_path, links):
    html = film.html("the ring", [b"<svg>\n1</svg>", b"<svg>\n2</svg>"], ["a", "b"], [], 0, 400)
    output = {"data": {WIDGET: {"model_id": "gone"}, "text/html": html}}
    text = shown(output, {}, Pictures(tmp_path, "../p"), links)["data"]["text/html"]
    assert "data-frames" in text and "<script>" in text and not EMBEDDED.search(text)


def test_a_film_stores_each_line_once_and_gives_every_frame_back():
    same = "\n".join(f"<path d='M {i}'/>" for i in range(500))
    frames = [f"<svg>\n{same}\n<text>{step}</text>\n</svg>".encode() for step in range(40)]
    data = film.packed(frames, captions=["é"])
    stored = json.loads(zlib.decompress(base64.b64decode(data)))
    assert stored["captions"] == ["é"] and len(stored["lines"]) == 500 + 2 + 40
    back = [
        "\n".join(line for first, n in runs for line in stored["lines"][first : first + n])
        for runs in stored["frames"]
    ]
    assert [text.encode() for text in back] == frames
    assert len(data) < 6000
