"""A reader's solution beside the reference: only the functions that the exercise asks for."""

import difflib
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Exercise
from minikv.course.exercise_data.skeletons import definition, docstring_of, targets, text_of
from minikv.course.reports.markup import WHOLE_WORDS

LEAST_COLUMN = 60  # characters: narrower columns would break most lines of code
SHADE = "background:rgba(230,159,0,.28)"  # half transparent: for light and dark pages


@dataclass(frozen=True)
class Region:
    """One function: rows of (reader's line or None, reference's line or None)."""

    path: str
    rows: list[tuple[str | None, str | None]]

    @property
    def equal(self) -> bool:
        return all(left == right for left, right in self.rows)

    def marked(self) -> Iterator[tuple[str | None, str, str | None]]:
        """The rows, with a sign between the two sides: < or > where one has no line, | where the
        lines differ."""
        for left, right in self.rows:
            differs = "<" if right is None else ">" if left is None else "|"
            yield left, " " if left == right else differs, right


class SideBySide:
    """Shows itself in two columns, or one above the other where they do not fit."""

    def __init__(self, exercise: Exercise):
        chapter = exercise.chapter
        mine = reader_files.read(chapter)
        own = {path: text_of(mine.text, node) for path, node in mine.definitions.items()}
        self.exercise = exercise
        self.regions = [
            Region(path, _align(own.get(path, ""), target.solved))
            for path, target in targets(chapter).items()
            if target.exercise == exercise.id
        ]

    def __repr__(self) -> str:
        out = []
        for region in self.regions:
            out.append(
                f"{region.path}: " + ("the same" if region.equal else "yours, the reference")
            )
            if not region.equal:
                out += _columns(region) or _stacked(region)
        return "\n".join(out)

    def _repr_html_(self) -> str:
        out = []
        for region in self.regions:
            head = " is the same as the reference" if region.equal else ""
            out.append(f"<p style='text-align:left'><b>{escape(region.path)}</b>{head}</p>")
            if region.equal:
                continue
            mine, reference = zip(*region.rows, strict=True)
            differs = [mark != " " for _, mark, _ in region.marked()]
            # As many columns as fit: two, or one on a narrow page.
            out.append(
                "<div style='display:grid;gap:0 16px;text-align:left;"
                "grid-template-columns:repeat(auto-fit,minmax(min(30em,100%),1fr))'>"
                f"{_side('yours', mine, differs)}{_side('the reference', reference, differs)}</div>"
            )
        return "".join(out)


def _columns(region: Region) -> list[str] | None:
    """The two sides beside each other, long lines broken; None if a terminal is too narrow."""
    left, right = (max(len(line or "") for line in side) for side in zip(*region.rows, strict=True))
    room = shutil.get_terminal_size((160, 24)).columns - 5
    if left + right > room:
        if room // 2 < LEAST_COLUMN:
            return None
        left = right = room // 2
    return [
        f"  {one.ljust(left)} {mark} {other}".rstrip()
        for mine, mark, reference in region.marked()
        for one, other in zip_longest(_broken(mine, left), _broken(reference, right), fillvalue="")
    ]


def _broken(line: str | None, width: int) -> list[str]:
    """In pieces of that width; those after the first are indented further than the line."""
    code = line or ""
    deeper = " " * (len(code) - len(code.lstrip()) + 8)
    return textwrap.wrap(code, width, subsequent_indent=deeper, break_on_hyphens=False) or [""]


def _stacked(region: Region) -> list[str]:
    """The reader's lines, then the reference's; * where they differ."""
    out = []
    for side, name in ((0, "yours"), (2, "the reference")):
        out.append(f"  ── {name}")
        for row in region.marked():
            line = row[side]
            if line is not None:
                out.append(f"  {' ' if row[1] == ' ' else '*'} {line}".rstrip())
    return out


def _side(name: str, lines: tuple[str | None, ...], differs: list[bool]) -> str:
    shown = "\n".join(
        f"<span style='{SHADE}'>{escape(line)}</span>" if other and line else escape(line or "")
        for line, other in zip(lines, differs, strict=True)
    )
    return (
        f"<div style='min-width:0'><b>{name}</b>"
        f"<pre style='text-align:left;white-space:pre;{WHOLE_WORDS};margin:2px 0'>{shown}</pre>"
        "</div>"
    )


def _align(mine: str, reference: str) -> list[tuple[str | None, str | None]]:
    left, right = _body(mine), _body(reference)
    rows: list[tuple[str | None, str | None]] = []
    for _, a, b, c, d in difflib.SequenceMatcher(None, left, right, False).get_opcodes():
        rows += zip_longest(left[a:b], right[c:d])
    return rows


def _body(text: str) -> list[str]:
    """The signature and the body, without the docstring, which both sides share."""
    lines = text.rstrip().splitlines()
    if not lines:
        return []
    node = definition(text)
    docstring = docstring_of(node)
    if docstring is not None and len(node.body) > 1:
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    return lines
