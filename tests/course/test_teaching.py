"""What docs/teaching says of the notebooks holds: each cell and each exercise it names exists."""

import json
import re
from pathlib import Path

import pytest

from minikv.course.exercise_data.manifest import find

ROOT = Path(__file__).resolve().parents[2]
TEACHING = ROOT / "docs" / "teaching"
DECKS = sorted((TEACHING / "slides").glob("[0-9][0-9].md"))
NOTEBOOKS = {path.name[:2]: path for path in (ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.parametrize("deck", DECKS, ids=lambda deck: deck.stem)
def test_slides_show_stored_outputs_and_quote_prose(deck):
    cells = {cell["id"]: cell for cell in json.loads(NOTEBOOKS[deck.stem].read_text())["cells"]}
    named = re.findall(r"^```\{(\w+)\} (.*)$", deck.read_text(), flags=re.MULTILINE)
    assert deck.read_text().endswith("```{due}\n```\n"), "its last slide says what is for when"
    assert {kind for kind, _ in named} == {"listed", "stored", "notes"}
    for kind, argument in named:
        if kind == "stored":
            assert cells[argument].get("outputs"), f"{argument} has no stored output"
        elif kind == "notes":
            assert {cells[one]["cell_type"] for one in argument.split()} == {"markdown"}
        else:
            assert any(argument in "".join(cell["source"]) for cell in cells.values())


@pytest.mark.parametrize("deck", DECKS, ids=lambda deck: deck.stem)
def test_slides_begin_with_the_notebooks_title(deck):
    first = json.loads(NOTEBOOKS[deck.stem].read_text())["cells"][0]["source"]
    assert deck.read_text().splitlines()[0] == "".join(first).splitlines()[0]


def test_goals_name_exercises_that_exist():
    goals = (TEACHING / "README.md").read_text().split("## Goals")[1]
    for exercise_id in re.findall(r"\b\d\d\.\d\b", goals):
        assert find(exercise_id).id == exercise_id
