"""The form of every notebook that has exercises: each is set as the manifest says, and
nothing is given away or claimed without being computed."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from minikv.course.exercise_data.manifest import chapters
from minikv.course.exercise_data.skeletons import docstring_of, targets

FOLDER = Path(__file__).parents[2] / "notebooks"
# A measured quantity, typed by hand: a number with a unit that only a measurement gives.
FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|×|ms\b|µs\b|(?:tokens|requests)(?:/s| a second))")


@pytest.fixture(params=chapters().values(), ids=lambda chapter: chapter.number)
def chapter(request):
    return request.param


@pytest.fixture
def cells(chapter):
    path = FOLDER / f"{chapter.number}_{chapter.name}.ipynb"
    return nbformat.read(path, as_version=4).cells


def shown(cell):
    """Everything a reader sees of a cell."""
    texts = [cell.source]
    for output in cell.get("outputs", []):
        texts += [output.get("text", ""), *map(str, output.get("data", {}).values())]
    return "\n".join(texts)


def find(cells, kind, text):
    """The places of the cells of a kind that hold a text."""
    return [i for i, cell in enumerate(cells) if cell.cell_type == kind and text in cell.source]


def find_one(cells, kind, text):
    """The place of the only one."""
    places = find(cells, kind, text)
    assert len(places) == 1, f"{len(places)} {kind} cells have {text!r}; the notebook needs one"
    return places[0]


def test_every_exercise_is_set_once_in_order(chapter, cells):
    places = []
    for e in chapter.exercises:
        title = f"### {e.id} {e.title} · {e.minutes} min · difficulty {e.difficulty} of 5"
        heading = find_one(cells, "markdown", title)
        assert re.search(r"^\*\*Why it matters\.\*\* .{20}", cells[heading].source, re.MULTILINE)
        assert f"](../exercises/{chapter.file_name})" in cells[heading].source
        check = find_one(cells, "code", f'check("{e.id}")')
        assert cells[check].source.strip() == f'check("{e.id}")'
        places += [heading, check]
    assert places == sorted(places)


def test_the_stored_pages_show_the_exercises_unsolved(chapter, cells):
    for exercise in chapter.exercises:
        check = find_one(cells, "code", f'check("{exercise.id}")')
        assert "not started" in shown(cells[check])
    [parts] = find(cells, "code", "your_parts()") or find(cells, "code", "closing(")
    assert "No part of yours has passed" in shown(cells[parts])


def test_no_solution_stands_before_its_exercise(chapter, cells):
    for path, target in targets(chapter).items():
        if target.is_bug:
            continue
        [node] = ast.parse(target.solved).body
        body = node.body[1:] if docstring_of(node) else node.body
        lines = target.solved.splitlines()[body[0].lineno - 1 :]
        telling = max((line.strip() for line in lines), key=len)
        check = find_one(cells, "code", f'check("{target.exercise}")')
        for cell in cells[: check + 1]:
            assert telling not in shown(cell), f"{path} is given away by {cell.source[:80]}"


def test_predictions_are_asked_for_and_answered(cells):
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    asked = re.findall(r"""predict\(\s*(f?["'].+?["']|\w+), \.\.\.\)""", source)
    answered = re.findall(r"""measured\(\s*(f?["'].+?["']|\w+),""", source)
    assert len(asked) >= 2 and sorted(asked) == sorted(answered)
    assert find(cells, "code", "predictions()") or find(cells, "code", "closing(")


def test_figures_in_prose_are_computed_or_cited(cells):
    """A figure in prose stands in a cell that cites where it is from, quotes it, or is code."""
    for cell in cells:
        if cell.cell_type != "markdown" or "http" in cell.source:
            continue
        prose = re.sub(r"`[^`]*`|\$[^$]*\$|“[^”]*”|\"[^\"]*\"", "", cell.source)
        assert not FIGURE.search(prose), FIGURE.search(prose)
