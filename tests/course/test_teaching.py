"""What docs/teaching says of the notebooks holds: each cell and each exercise it names exists."""

import json
import re
import sys
import tomllib
from base64 import b64decode, b64encode
from pathlib import Path

import pytest

from minikv.course.exercise_data.manifest import chapters

ROOT = Path(__file__).resolve().parents[2]
TEACHING = ROOT / "docs" / "teaching"
DECKS = sorted((TEACHING / "slides").glob("[0-9][0-9].md"))
NOTEBOOKS = {path.name[:2]: path for path in (ROOT / "notebooks").glob("*.ipynb")}

sys.path.insert(0, str(TEACHING / "slides"))

from sources import plan_file, readable  # noqa: E402


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


@pytest.mark.parametrize(("box", "sizes", "shown"), [
    ((1260, 560), [10, 17, 18, 40], [11, 18, 18, 40]),  # as large as a slide's picture
    ((1260, 1120), [20, 35, 36], [22, 36, 36]),  # too high for it: shown at half its size
    ((630, 100), [8, 8.5, 9], [8.8, 9, 9]),  # shown at twice its size
])  # fmt: skip
def test_small_labels_on_a_slide_grow_to_18_pixels_and_by_a_tenth_at_most(box, sizes, shown):
    labels = "".join(f'<text style="font-size:{size}px">a</text>' for size in sizes)
    svg = f'<svg viewBox="0 0 {box[0]} {box[1]}">{labels}</svg>'
    uri = readable(f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}")
    kind, _, data = uri.partition(",")
    assert kind == "data:image/svg+xml;base64"
    found = [float(size) for size in re.findall(r"font-size:(\S+)px", b64decode(data).decode())]
    assert found == pytest.approx(shown)
    assert readable("data:image/png;base64,AA==") == "data:image/png;base64,AA=="


def test_the_plan_of_the_slides_is_a_file_or_one_that_comes_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for named, file in (("", "fourteen_weeks.toml"), ("six_weeks", "six_weeks.toml")):
        monkeypatch.setenv("PLAN", named)
        assert plan_file().name == file and tomllib.loads(plan_file().read_text())["week"]
    monkeypatch.setenv("PLAN", "mine.toml")
    with pytest.raises(ValueError, match=r"a file, or fourteen_weeks or six_weeks; was 'mine.toml"):
        plan_file()
    Path("mine.toml").touch()
    assert plan_file() == Path("mine.toml")


def test_goals_name_every_exercise():
    goals = (TEACHING / "README.md").read_text().split("## Goals")[1]
    named = set(re.findall(r"\b\d\d\.\d\b", goals))
    there = {exercise.id for chapter in chapters().values() for exercise in chapter.exercises}
    assert there - named == set(), "docs/teaching/README.md, Goals: what is each of these for?"
    assert named - there == set(), "docs/teaching/README.md, Goals: there are no such exercises"
