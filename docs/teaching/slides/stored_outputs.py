"""Sphinx directives for the slides: what a notebook has stored, shown on a slide.

Nothing is executed. A picture, a table or a printed result on a slide is what the notebook
holds, so the slides change when the notebooks are run again.
"""

import os
import re
import tomllib
from base64 import b64decode, b64encode
from functools import cache
from html import escape
from pathlib import Path

import nbformat
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

WHOSE = ": the reference's, until you pass"  # what `mine` prints
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


def number_of(directive: Directive) -> str:
    """A deck's file is named after its notebook: 04.md."""
    return Path(directive.state.document.current_source).stem


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


class Listed(Directive):
    """The items of the notebook's list behind the line that the argument begins."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines = section(number_of(self), self.arguments[0])
        container = nodes.container(classes=["long"] if len("".join(lines)) > 700 else [])
        self.state.nested_parse(StringList(lines, source=""), self.content_offset, container)
        return [container]


class Stored(Directive):
    """The stored output of a cell: its picture, or else what it printed."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        number, cell_id = number_of(self), self.arguments[0]
        outputs = cell_of(number, cell_id).get("outputs", [])
        shown = [self.picture(output.data) for output in outputs if "data" in output]
        if any(shown):
            return [picture for picture in shown if picture]
        text = "".join(output.text for output in outputs if output.output_type == "stream")
        text = text or "\n".join(output.data["text/plain"] for output in outputs)
        lines = [line for line in text.splitlines() if WHOSE not in line]
        if not lines:
            raise ValueError(f"notebook {number}: cell {cell_id!r} has no stored output to show")
        width = max(map(len, lines))
        size = "wide" if width > 90 else "narrow" if width <= 66 and len(lines) <= 10 else "medium"
        text = escape("\n".join(lines))
        return [nodes.raw("", f'<pre class="{size}"><code>{text}</code></pre>', format="html")]

    def picture(self, data: dict) -> nodes.Node | None:
        html = "".join(data.get("text/html", ""))
        if "class='film'" in html:  # its buttons and arrow keys work on the slide
            return nodes.raw("", html, format="html")
        found = re.search(r"data:image/[^'\"]+", html)
        if found is None:
            return None
        return nodes.image(uri=readable(found[0]), alt=data.get("text/plain", ""))


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


class Notes(Directive):
    """What the notebook says in these cells, as the lecturer's notes (key S)."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        number = number_of(self)
        text = "\n\n".join(cell_of(number, one).source for one in self.arguments[0].split())
        text = re.sub(r"^#+ .*$", "", text, flags=re.MULTILINE)
        text = re.sub(r"</?(details|summary)>", "", text)
        paragraphs = [nodes.paragraph(text=part) for part in text.split("\n\n") if part.strip()]
        return [
            nodes.raw("", '<aside class="notes">', format="html"),
            *paragraphs,
            nodes.raw("", "</aside>", format="html"),
        ]


@cache
def plan_file() -> Path:
    """What $PLAN names: a file, or a plan that comes along."""
    named = os.environ.get("PLAN") or "fourteen_weeks"
    for file in (Path(named), PLANS / f"{named}.toml"):
        if file.is_file():
            return file
    known = " or ".join(sorted(file.stem for file in PLANS.glob("*.toml")))
    raise ValueError(f"PLAN: must be a file, or {known}; was {named!r}")


class Due(Directive):
    """Which of the chapter's exercises are for which week of the plan in $PLAN."""

    def run(self) -> list[nodes.Node]:
        number = number_of(self)
        plan = tomllib.loads(plan_file().read_text(encoding="utf-8"))
        (file,) = COURSE.glob(f"chapters/ch{number}_*/chapter.toml")
        about = tomllib.loads(file.read_text(encoding="utf-8"))
        items = nodes.bullet_list(classes=["due"])
        for week, row in enumerate(plan["week"], 1):
            mine = [id_ for id_ in row["exercises"] if id_.startswith(f"{number}.")]
            if mine:
                until = f", until {row['deadline']:%a %d %B, %H:%M}" if "deadline" in row else ""
                told = [f"{id_} {' · '.join(about[id_]['about'].split(' · ')[:2])}" for id_ in mine]
                text = f"Week {week}{until}: {'; '.join(told)}"
                items += nodes.list_item("", nodes.paragraph(text=text))
        return [items] if items.children else []


def setup(app) -> dict[str, bool]:
    app.add_directive("listed", Listed)
    app.add_directive("stored", Stored)
    app.add_directive("notes", Notes)
    app.add_directive("due", Due)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
