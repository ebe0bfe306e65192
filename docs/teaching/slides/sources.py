"""What the slides are made of: cells of notebooks, their pictures, and a lecturer's plan."""

import os
import re
from base64 import b64decode, b64encode
from functools import cache
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS, COURSE = ROOT / "notebooks", ROOT / "minikv" / "course"
PLANS = COURSE / "plans"
AREA = 1260, 560  # pixels that most pictures have on a slide of 1280 x 720
READABLE, MOST_GROWTH = 18, 1.1  # pixels; what labels may grow without meeting each other


@cache
def cells_of(number: str) -> dict[str, nbformat.NotebookNode]:
    """The cells of notebook `number`, by id."""
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


def cell_of(number: str, cell_id: str) -> nbformat.NotebookNode:
    cells = cells_of(number)
    if cell_id not in cells:
        raise ValueError(f"notebook {number} has no cell {cell_id!r}; it has {', '.join(cells)}")
    return cells[cell_id]


def section(number: str, start: str) -> list[str]:
    """The lines of notebook `number` after the line that begins with `start`, up to an empty line
    that no list item follows."""
    for cell in cells_of(number).values():
        lines = cell.source.splitlines() if cell.cell_type == "markdown" else []
        for index, line in enumerate(lines):
            if line.startswith(start):
                rest = lines[index + 1 :]
                return [line for line in rest if line.startswith("- ")]
    raise ValueError(f"notebook {number} has no line that begins with {start!r}")


def readable(uri: str) -> str:
    """A picture whose labels are a little larger where the last row could not read them."""
    kind, _, data = uri.partition("svg+xml;base64,")
    svg = b64decode(data).decode() if data else ""
    if (box := re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)) is None:
        return uri
    least = READABLE / min(AREA[0] / float(box[1]), AREA[1] / float(box[2]))

    def larger(match: re.Match) -> str:
        size = float(match[1])
        return f"font-size:{max(size, min(least, size * MOST_GROWTH)):.2f}px"

    svg = re.sub(r"font-size:([\d.]+)px", larger, svg)
    return f"{kind}svg+xml;base64,{b64encode(svg.encode()).decode()}"


def plan_file() -> Path:
    """What $PLAN names: a file, or a plan that comes along."""
    named = os.environ.get("PLAN") or "fourteen_weeks"
    for file in (Path(named), PLANS / f"{named}.toml"):
        if file.is_file():
            return file
    known = " or ".join(sorted(file.stem for file in PLANS.glob("*.toml")))
    raise ValueError(f"PLAN: must be a file, or {known}; was {named!r}")
