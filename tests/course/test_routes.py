"""The shorter routes: what they name exists, they take the time that they claim, and the reader's
choice decides what comes next."""

import builtins
import re
import symtable
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import minikv
from minikv.course.exercise_data.manifest import ReaderError, chapters
from minikv.course.exercise_data.reader_files import in_folder
from minikv.course.reader import progress_file, routes, start
from minikv.course.reader.overview import Overview

ROOT = Path(__file__).parents[2]
ROUTES = list(routes.routes().values())
MINUTES = re.compile(r"\*\*Minutes:\*\* read (\d+)")


def sections(number):
    """Words of each section of a notebook, by heading; and the minutes that reading all takes."""
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    text = "\n".join(
        cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"
    )
    opening, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    words = {"": len(opening.split())}
    words |= {part.partition("\n")[0]: len(part.split()) for part in rest}
    return words, int(MINUTES.search(text)[1])


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_route_names_sections_and_exercises_that_exist(route):
    known = {exercise.id for chapter in chapters().values() for exercise in chapter.exercises}
    assert route.exercises <= known
    for number, leg in route.legs.items():
        words, _ = sections(number)
        assert set(leg.take) | set(leg.skip) | set(leg.bridge) <= set(words), number
        assert not (leg.take and leg.skip)
        assert all(map(leg.reads, leg.bridge)), f"{number}: a bridge in a section that is skipped"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_route_takes_about_the_hours_that_it_claims(route):
    """Reading takes the share of a notebook's own minutes that its words are."""
    reading = 0
    for number, leg in route.legs.items():
        words, minutes = sections(number)
        read = sum(n for title, n in words.items() if not title or leg.reads(title))
        reading += minutes * read / sum(words.values())
    told = [int(number) for number in re.findall(r"\d+", route.hours)]
    slack = 1 if len(told) == 1 else 0
    assert told[0] - slack <= round((reading + route.minutes) / 60) <= told[-1] + slack


def test_the_routes_grow():
    weekend, course = ROUTES
    assert weekend.exercises < course.exercises and weekend.minutes < course.minutes


def test_marks_say_who_reads_a_section_and_can_be_written_again():
    cells = [
        "# 06 · X\n\nopening",
        "## The loop\n\nText.",
        "### 06.3 The loop\n",
        "## Summary\n\n- a",
    ]
    marked = routes.marked("06", cells)
    assert marked[1].startswith("## The loop\n\n`weekend` · `course`\n\n> *Weekend, for what you")
    assert marked[1].endswith("\n\nText.") and [marked[0], *marked[2:]] == [cells[0], *cells[2:]]
    assert routes.marked("06", marked) == marked
    assert routes.marked("06", ["## Another rule for the victim\n\nText."]) == [
        "## Another rule for the victim\n\n`everything`\n\nText."
    ]
    without = routes.marked("02", ["## The first cache\n\nText.\n\n### 02.1 Append"])
    assert without[0].startswith("## The first cache\n\n`weekend without 02.1` · `course`\n")
    assert routes.marked("13", ["## Section\n\nText."]) == ["## Section\n\nText."]


def test_progress_follows_the_readers_route(exercises, monkeypatch):
    assert routes.chosen() is None and Overview().next.id == "00.1"
    monkeypatch.setattr(progress_file, "passed", lambda: {"00.1"})
    assert Overview().next.id == "01.1"
    routes.choose("weekend")
    assert Overview().next.id == "02.2"
    assert (
        Overview()
        .headline()
        .startswith("Weekend route (»): 0 of 13 exercises passed. Everything: ")
    )
    assert "» 02.2 Prefill once" in repr(Overview()) and "· 02.1 " in repr(Overview())
    monkeypatch.setattr(progress_file, "passed", lambda: set(routes.chosen().exercises))
    assert progress_file.to_do_next("07.7").id == "07.8"
    ends = "python -m minikv parts --serve, the end of the weekend route"
    assert progress_file.what_next("07.7") == ends and f"Next: {ends}" in Overview().headline()
    routes.choose("everything")
    assert routes.chosen() is None
    with pytest.raises(ReaderError, match="weekend, course, everything, was 'holiday'"):
        routes.choose("holiday")


def test_start_says_what_a_route_asks():
    assert "takes 6 to 8 hours: notebooks 00, 02, 04, 06, 07, and 13" in start.in_words("weekend")
    assert start.in_words("everything").startswith("The whole course")


def test_start_in_a_clone_chooses_a_route_and_unpacks_nothing(tmp_path, monkeypatch, capsys):
    clone, elsewhere = tmp_path / "clone", tmp_path / "elsewhere"
    for folder in (clone / "exercises", clone / "notebooks", elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.setattr(minikv, "__file__", str(clone / "minikv" / "__init__.py"))
    before = sorted(clone.rglob("*"))
    for place, said in ((clone, "this clone is your copy"), (clone / "notebooks", "this clone is")):
        monkeypatch.chdir(place)
        assert start.run(Namespace(folder=None, route="weekend", no_lab=True, plan=None)) == 0
        assert said in " ".join(capsys.readouterr().out.split())
    new = {path.name for path in set(clone.rglob("*")) - set(before)}
    assert new == {".progress", "route"}
    with in_folder(clone / "exercises"):
        assert routes.chosen().name == "weekend"
    monkeypatch.chdir(elsewhere)
    assert start._here() == start.NEW


# ── A route's sections run without the others ────────────────────────────────

by_leg = pytest.mark.parametrize(
    "number, route",
    [
        pytest.param(number, route, id=f"{number}-{route.name}")
        for route in ROUTES
        for number in route.legs
    ],
)


def code_of(number, route):
    """The code that this route runs of a notebook: its opening, its own sections, its closing."""
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    leg, reads, found = route.legs[number], True, []
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "markdown":
            for title in re.findall(r"^## (.+)$", cell.source, re.MULTILINE):
                reads = title in routes.UNMARKED or leg.reads(title)
        elif reads:
            found.append(cell)
    return found


def names_of(source):
    """(names that a cell uses and does not make, names that it makes), functions included."""
    made, used = set(), set()

    def visit(table):
        for symbol in table.get_symbols():
            here = table.get_type() == "module"
            if here and (symbol.is_assigned() or symbol.is_imported()):
                made.add(symbol.get_name())
            elif symbol.is_referenced() and (here or symbol.is_global()):
                used.add(symbol.get_name())
        for inner in table.get_children():
            visit(inner)

    visit(symtable.symtable(source, "cell", "exec"))
    for module in re.findall(r"^from (\S+) import \*", source, re.MULTILINE):
        made |= set(import_module(module).__all__)
    return used - made, made


@by_leg
def test_a_routes_sections_use_no_name_of_those_that_it_skips(number, route):
    known = set(dir(builtins)) | {"__name__"}
    for cell in code_of(number, route):
        used, made = names_of(cell.source)
        known |= made
        assert used <= known, f"{cell.id} uses what the route has not run: {used - known}"


def test_a_name_that_is_missing_is_found():
    assert names_of("def f(x):\n    return x + shift\n\ny = [f(z) for z in w]") == (
        {"shift", "w"},
        {"f", "y"},
    )
    assert "check" in names_of("from minikv.course.lab import *")[1]


@pytest.mark.thorough
@by_leg
def test_a_routes_sections_run_alone(number, route, exercises):
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    notebook = nbformat.read(path, 4)
    notebook.cells = code_of(number, route)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}})
    client.execute()
    assert all(cell.execution_count for cell in notebook.cells)
