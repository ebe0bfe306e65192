"""What the README and the pages in docs/ say is so."""

import re
from pathlib import Path

import pytest
from PIL import Image

from minikv.course.authoring import buttons, showcase
from minikv.course.exercise_data.manifest import chapters

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def exercise_minutes():
    return sum(e.minutes for chapter in chapters().values() for e in chapter.exercises)


def reading_minutes():
    stated = r"\*\*Minutes:\*\* read (\d+) · "
    return sum(int(re.search(stated, path.read_text(encoding="utf-8"))[1]) for path in NOTEBOOKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page):
    links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_is_short_and_links_every_notebook_and_page():
    assert len(README.splitlines()) <= 130
    linked = re.findall(r"\]\((notebooks/[^)]+)\)", README)
    assert linked == [str(path.relative_to(ROOT)) for path in NOTEBOOKS]
    for page in PAGES[1:]:
        assert f"](docs/{page.name})" in README


def test_what_needs_an_address_is_there_with_it_and_not_without(tmp_path):
    """If not: python -m minikv.course buttons"""
    address = buttons.repository()
    notebook = NOTEBOOKS[4].read_text(encoding="utf-8")
    for name, written in (("README.md", buttons.in_readme), ("CITATION.cff", buttons.in_citation)):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert written(text, address) == text
        with_it = written(text, "https://github.com/someone/minikv")
        assert "someone/minikv" in with_it and written(with_it, address) == text
    with_it = buttons.in_readme(README, "https://github.com/someone/minikv")
    assert with_it.count("](https://") - README.count("](https://") == 6  # badges, with pictures
    assert "git clone https://github.com/someone/minikv " in with_it
    with_it = buttons.in_notebook(NOTEBOOKS[4].name, notebook, "https://github.com/someone/minikv")
    assert with_it.count("someone/minikv") == 4  # three links, and the cell for Colab
    assert buttons.in_notebook(NOTEBOOKS[4].name, with_it, address) == notebook
    if address is None:
        everything = [README, *(path.read_text(encoding="utf-8") for path in NOTEBOOKS)]
        assert [text for text in everything if "OWNER" in text or "colab.research" in text] == []


def test_hours_and_exercises_are_those_of_the_course():
    [hours, of_which] = re.findall(r"about (\d+) hours, of which (\d+) are exercises", README)[0]
    assert int(of_which) == round(exercise_minutes() / 60)
    assert int(hours) == round((exercise_minutes() + reading_minutes()) / 60)
    count = sum(len(chapter.exercises) for chapter in chapters().values())
    assert re.findall(r"and (\d+) exercises", README) == [str(count)]


def test_the_moving_picture_moves_and_is_small():
    path = ROOT / "docs" / "block-tables.gif"
    with Image.open(path) as picture:
        assert picture.n_frames == len(showcase.record_tables().steps) > 8
    assert path.stat().st_size < 2**20
    page = ROOT / "docs" / "cache-at-work.gif"  # in a browser: not drawn here
    with Image.open(page) as picture:
        assert picture.n_frames > 8
    assert page.stat().st_size < 500_000


def test_the_sites_film_is_the_moving_picture():
    """If not: python -m minikv.course pictures"""
    text = (ROOT / "docs" / "block-tables.html").read_text(encoding="utf-8")
    tables = showcase.record_tables()
    assert f"max='{len(tables.steps) - 1}'" in text
    assert len(text) < 100_000


def test_the_failing_check_is_what_a_check_says():
    """If not: python -m minikv.course pictures"""
    stored = (ROOT / "docs" / "failing-check.svg").read_text(encoding="utf-8")
    assert stored == showcase.failing_check()
    for words in ("FAIL", "likely cause:", "look at:"):
        assert words in stored
