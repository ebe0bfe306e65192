"""A reader's solution beside the reference: only the regions that the exercise asks for."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from minikv.course.harness import reader_files
from minikv.course.harness.manifest import Exercise, chapter_of
from minikv.course.harness.skeletons import definition, definitions, docstring_of, targets, text_of

SIGNS = {" ": "", "<": "‹", ">": "›", "|": "≠"}  # of a terminal: on a page


@dataclass(frozen=True)
class Region:
    """One function: rows of (reader's line or None, reference's line or None)."""

    path: str
    rows: list[tuple[str | None, str | None]]

    @property
    def equal(self) -> bool:
        return all(left == right for left, right in self.rows)

    def marked(self) -> Iterator[tuple[str | None, str, str | None]]:
        """The rows, with what the two sides of each are to each other between them."""
        for left, right in self.rows:
            differs = "<" if right is None else ">" if left is None else "|"
            yield left, " " if left == right else differs, right


class SideBySide:
    """Shows itself as a table in a notebook, as two columns in a terminal."""

    def __init__(self, exercise: Exercise):
        chapter = chapter_of(exercise.id)
        text = reader_files.read(chapter)
        found = definitions(reader_files.parse(chapter, text))
        self.exercise = exercise
        self.regions = [
            Region(path, _align(text_of(text, found[path]) if path in found else "", target.solved))
            for path, target in targets(chapter).items()
            if target.exercise == exercise.id
        ]

    def __repr__(self) -> str:
        out = []
        for region in self.regions:
            same = "the same" if region.equal else "yours left, the reference right"
            out.append(f"{region.path}: {same}")
            if region.equal:
                continue
            width = max((len(left) for left, _ in region.rows if left), default=0)
            for left, mark, right in region.marked():
                out.append(f"  {(left or '').ljust(width)} {mark} {right or ''}".rstrip())
        return "\n".join(out)

    def _repr_html_(self) -> str:
        out = []
        for region in self.regions:
            head = " is the same as the reference" if region.equal else ""
            out.append(f"<p style='text-align:left'><b>{escape(region.path)}</b>{head}</p>")
            if region.equal:
                continue
            out.append(
                "<table style='border-collapse:collapse;font-family:monospace;font-size:12px'>"
                "<tr><th style='text-align:left'>yours</th><th></th>"
                "<th style='text-align:left'>the reference</th></tr>"
            )
            for left, mark, right in region.marked():
                differs, sign = mark != " ", SIGNS[mark]
                out.append(f"<tr>{_cell(left, differs)}<td>{sign}</td>{_cell(right, differs)}</tr>")
            out.append("</table>")
        return "".join(out)


def _cell(text: str | None, differs: bool) -> str:
    # Half transparent, so that it is legible on a light and on a dark page.
    shade = "background:rgba(230,159,0,.28);" if differs and text else ""
    style = f"text-align:left;white-space:pre-wrap;vertical-align:top;padding:0 8px;{shade}"
    return f"<td style='{style}'>{escape(text or '')}</td>"


def _align(mine: str, reference: str) -> list[tuple[str | None, str | None]]:
    left, right = _body(mine), _body(reference)
    rows: list[tuple[str | None, str | None]] = []
    for _, a, b, c, d in difflib.SequenceMatcher(None, left, right, False).get_opcodes():
        rows += zip_longest(left[a:b], right[c:d])
    return rows


def _body(text: str) -> list[str]:
    """The signature and the body, without the docstring, which is the same for all."""
    lines = text.rstrip().splitlines()
    if not lines:
        return []
    node = definition(text)
    docstring = docstring_of(node)
    if docstring is not None and len(node.body) > 1:
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    return lines
