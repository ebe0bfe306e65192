"""The ladder at the top of every notebook: the chapters so far, with links to each.

Notebooks and exercises are looked for when a cell runs, so a new chapter appears in the
notebooks of its neighbours without a change in them.
"""

from html import escape

from minikv.course.chapters import each, notebook, title
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import chapters
from minikv.course.pictures.style import BESIDE_EDITOR
from minikv.course.reader.overview import Overview
from minikv.course.reader.routes import routes
from minikv.course.reports import markup
from minikv.course.reports.markup import GREEN, SKY, badge

# The parts of the course, by their first chapter.
PARTS = {
    "00": "Before you build",
    "01": "One sequence",
    "04": "Memory in blocks",
    "06": "Many requests",
    "08": "Kernels",
    "10": "Smaller, longer, farther",
}

ROUTES = "Routes: " + "; ".join(
    f"{route.name}, {route.hours} hours" for route in routes().values()
) + "; everything. A mark under a heading says which routes read the section."  # fmt: skip


def rungs() -> dict[str, tuple[str, str]]:
    """(title, idea) of every chapter by its number: "04" -> ("Paged blocks", "blocks of …")."""
    return {number: (title(number), module.IDEA) for number, module in each("rung")}


def _linked(number: str, text: str) -> str:
    return f'<a href="{notebook(number)}">{escape(text)}</a>'


class Navigation:
    """The notebook before and the one after, the first one, and this chapter's exercises."""

    def __init__(self, here: int):
        self.number = f"{here:02}"
        self.rungs = rungs()
        if self.number not in self.rungs:
            there = ", ".join(self.rungs)
            raise ValueError(f"here: there is no chapter {here}; there are {there}")
        numbers = list(self.rungs)
        place = numbers.index(self.number)
        self.before = numbers[place - 1] if place else None
        self.after = numbers[place + 1] if place + 1 < len(numbers) else None
        self.chapter = chapters().get(self.number)

    def _name(self, number: str) -> str:
        return f"{number} {self.rungs[number][0]}"

    def __repr__(self) -> str:
        parts = {
            "previous": self.before and notebook(self.before),
            "next": self.after and notebook(self.after),
            "exercises": self.chapter and reader_files.display_name(self.chapter),
        }
        return " · ".join(f"{what}: {file}" for what, file in parts.items() if file)

    def _repr_html_(self) -> str:
        parts = [
            self.before and _linked(self.before, f"← {self._name(self.before)}"),
            self.number != "00" and _linked("00", "Contents"),
            self.chapter
            and markup.link(
                reader_files.path_of(self.chapter), 1, f"Exercises: {self.chapter.file_name}"
            ),
            self.after and _linked(self.after, f"{self._name(self.after)} →"),
        ]
        line = " &nbsp;·&nbsp; ".join(part for part in parts if part)
        return f"<p style='text-align:left;margin:6px 0'>{line}</p>"


class Ladder(Navigation):
    """All chapters, in the parts of the course, with what is passed of each."""

    def __init__(self, here: int):
        super().__init__(here)
        self.overview = Overview()

    def _parts(self) -> list[tuple[str, list[str]]]:
        """(name, numbers of its chapters) of each part that has chapters."""
        spans = zip(PARTS, [*PARTS, "99"][1:], strict=True)
        parts = [
            (PARTS[first], [n for n in self.rungs if first <= n < end]) for first, end in spans
        ]
        return [(name, numbers) for name, numbers in parts if numbers]

    def _state(self, *numbers: str) -> str:
        """How many exercises of these chapters are passed, and how long all of them take."""
        some = [chapters()[number] for number in numbers if number in chapters()]
        return self.overview.count(*some) if some else "no exercises"

    def _is_whole(self, number: str) -> bool:
        """Whether every exercise of a chapter is passed."""
        chapter = chapters().get(number)
        return chapter is not None and len(self.overview.passed(chapter)) == len(chapter.exercises)

    def __repr__(self) -> str:
        lines = []
        for part, numbers in self._parts():
            lines.append(part)
            for number in numbers:
                mark = "✓" if self._is_whole(number) else "▶" if number == self.number else " "
                name, idea = self.rungs[number]
                lines.append(f" {mark} {number} {name.ljust(23)}  {idea}  ({self._state(number)})")
        return "\n".join([*lines, ROUTES, super().__repr__()])

    def _repr_html_(self) -> str:
        """The part that the reader is in is open; all are in the first notebook, the contents."""
        out = []
        for part, numbers in self._parts():
            summary = f"<b>{escape(part)}</b> <small>· {self._state(*numbers)}</small>"
            lines = "".join(
                f"<li style='margin:1px 0'>{self._line(number)}</li>" for number in numbers
            )
            listed = f"<ul style='list-style:none;margin:0;padding:0'>{lines}</ul>"
            is_open = self.number in numbers or self.number == "00"
            out.append(markup.folded(summary, listed, is_open))
        marks = f"<p><small>{escape(ROUTES)}</small></p>"
        out = [super()._repr_html_(), *out, marks, BESIDE_EDITOR]
        return f"<div style='text-align:left'>{''.join(out)}</div>"

    def _line(self, number: str) -> str:
        name, idea = self.rungs[number]
        here = number == self.number
        head = f"<b>{number} {escape(name)}</b>" if here else _linked(number, f"{number} {name}")
        marks = [badge("you are here", SKY)] * here
        marks += [badge("✓ all passed", GREEN)] * self._is_whole(number)
        taken = "".join(f" · {name}" for name, route in routes().items() if number in route.legs)
        state = f"<small>· {self._state(number)}{taken}</small>"
        return " ".join([head, *marks, escape(idea), state])


def ladder(here: int) -> Ladder:
    """Every chapter, as links, with the one that you are in."""
    return Ladder(here)


def navigation(here: int) -> Navigation:
    """Links to the notebooks before and after this one, and to its exercises."""
    return Navigation(here)
