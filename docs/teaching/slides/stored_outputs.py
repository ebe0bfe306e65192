"""Sphinx directives for the slides: what a notebook has stored, shown on a slide.

Nothing is executed. A picture, a table or a printed result on a slide is what the notebook
holds, so the slides change when the notebooks are run again.
"""

import re
import tomllib
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sources import COURSE, cell_of, plan_file, readable, section

WHOSE = ": the reference's, until you pass"  # what `mine` prints


def number_of(directive: Directive) -> str:
    """A deck's file is named after its notebook: 04.md."""
    return Path(directive.state.document.current_source).stem


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
