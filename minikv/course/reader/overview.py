"""How far a reader has come: in a notebook, in a terminal, and as a page to keep."""

import time
from html import escape
from pathlib import Path

from minikv.course.chapters import notebook, title
from minikv.course.exercise_data.manifest import Chapter, Exercise, chapters
from minikv.course.exercise_data.plan import TermPlan
from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.reader import progress_file, routes
from minikv.course.reports.markup import GREEN, badge, folded, hours, terminal_width, wrapped

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em;
       color: #1a1a1a; background: #ffffff; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid #d0d0d0; }}
td.number, th.number {{ text-align: right; }}
@media print {{ body {{ margin: 0; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{chapters}
<p>Made by <code>progress(export=…)</code> on {date}. Minutes are the course's estimate for each
exercise. This page repeats what one computer has recorded; it proves nothing.</p>
</body>
</html>
"""


class Overview:
    """Which exercises are passed, which are open, and what comes next."""

    def __init__(self) -> None:
        self.entries = progress_file.entries()
        self.changed = progress_file.changed()
        self.next, self.what_next = progress_file.to_do_next(), progress_file.what_next()
        self.route = routes.chosen()

    def _entry(self, exercise: Exercise) -> progress_file.Entry:
        return self.entries.get(exercise.id, progress_file.Entry())

    def passed(self, *some: Chapter) -> list[Exercise]:
        """The exercises passed, of these chapters or of all."""
        return [
            exercise
            for chapter in some or chapters().values()
            for exercise in chapter.exercises
            if self._is_passed(exercise)
        ]

    def _is_passed(self, exercise: Exercise) -> bool:
        return self._entry(exercise).passed is not None and exercise.id not in self.changed

    def state(self, exercise: Exercise) -> str:
        entry = self._entry(exercise)
        if exercise.id in self.changed:
            failing = exercise.id in progress_file.failing({exercise.id})
            return "changed: fails now" if failing else "changed: check again"
        if entry.passed is not None:
            return "passed"
        return f"tried {entry.tries} ×" if entry.tries else "open"

    def count(self, *some: Chapter) -> str:
        """ "3 of 6 exercises passed, 45 min of 1 h 45 min"."""
        everything = [e for chapter in some or chapters().values() for e in chapter.exercises]
        done = self.passed(*some)
        whole = hours(sum(e.minutes for e in everything))
        minutes = f"{hours(sum(e.minutes for e in done))} of {whole}" if done else whole
        return f"{len(done)} of {len(everything)} exercises passed, {minutes}"

    def on_route(self) -> str:
        """ "Weekend route (»): 3 of 12 exercises passed. Everything: "; "" without a route."""
        if self.route is None:
            return ""
        ids = self.route.exercises
        passed = {exercise.id for exercise in self.passed()}
        done = f"{len(passed & ids)} of {len(ids)} exercises passed"
        if isinstance(self.route, TermPlan):
            now = self._week(self.route, passed)
            return f"{self.route.name} (»): {done}.{now} Everything: "
        return f"{self.route.name.capitalize()} route (»): {done}. Everything: "

    def _week(self, plan: TermPlan, passed: set[str]) -> str:
        """The plan's first week with something open: " Week 3, until …: 04.1, 04.2, 30 min."."""
        for week in plan.weeks:
            ids = [exercise.id for exercise in week.exercises if exercise.id not in passed]
            if ids:
                name = ", ".join(filter(None, (f"Week {week.number}", week.due)))
                return f" {name}: {', '.join(ids)}, {hours(week.minutes)}."
        return ""

    def headline(self) -> str:
        """What is passed in all, and the next exercise in the chapter that was worked on last."""
        return self.on_route() + self.plain_headline()

    def plain_headline(self) -> str:
        """The same of all exercises, whatever the route."""
        if self.next is not None:
            return f"{self.count()}. Next: {self.what_next}"
        waiting = [c.cannot_run for c in chapters().values() if c.cannot_run]
        return f"{self.count()}. " + ("; ".join(waiting) if waiting else "Nothing is left to do.")

    def _line(self, exercise: Exercise) -> tuple[str, ...]:
        ours = self.route is not None and exercise.id in self.route.exercises
        mark = "✓" if self._is_passed(exercise) else "»" if ours else "·"
        name = f"{exercise.id} {exercise.title}"
        return mark, name, exercise.kind, f"{exercise.minutes} min", self.state(exercise)

    def _is_open(self, chapter: Chapter) -> bool:
        """Whether its exercises are listed at once: the reader is in the middle of it."""
        if self.next in chapter.exercises:
            return True
        tried = any(self._entry(exercise).tries for exercise in chapter.exercises)
        return tried and len(self.passed(chapter)) < len(chapter.exercises)

    def __repr__(self) -> str:
        out = []
        for chapter in chapters().values():
            name = f"{chapter.number} {title(chapter.number)}"
            out.append(f"{name.ljust(26)}  {self.count(chapter)}")
            if chapter.cannot_run:
                out.append(wrapped(chapter.cannot_run, "  ", terminal_width()))
            for exercise in chapter.exercises if self._is_open(chapter) else ():
                mark, name, kind, minutes, state = self._line(exercise)
                out.append(f"  {mark} {name.ljust(43)} {kind:7} {minutes:>6}  {state}")
        route = self.on_route().removesuffix(" Everything: ")
        return "\n".join([*out, *([route] if route else []), self.plain_headline()])

    def _repr_html_(self) -> str:
        out = []
        for chapter in chapters().values():
            whole = len(self.passed(chapter)) == len(chapter.exercises)
            mark = badge("✓ all", GREEN) + " " if whole else ""
            name = f'<a href="{notebook(chapter.number)}">{escape(_name(chapter))}</a>'
            head = f"{mark}<b>{name}</b> &nbsp; {self.count(chapter)}"
            out.append(folded(head, self._table(chapter), self._is_open(chapter)))
        head = f"<p><b>{escape(self.headline())}</b></p>"
        return f"<div style='text-align:left'>{head}{''.join(out)}</div>"

    def _table(self, chapter: Chapter) -> str:
        cell = "style='text-align:left;padding:1px 8px'"
        head = "".join(
            f"<th scope='col' {cell}>{name}</th>"
            for name in ("", "exercise", "kind", "minutes", "state")
        )
        rows = ""
        for exercise in chapter.exercises:
            cells = (f"<td {cell}>{escape(text)}</td>" for text in self._line(exercise))
            rows += f"<tr>{''.join(cells)}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    # ── A page to keep ────────────────────────────────────────────────────────

    def write_page(self, file: Path, name: str) -> None:
        """One HTML file that needs nothing else: the exercises passed, of a reader with a name."""
        if not file.parent.is_dir():
            raise FileNotFoundError(f"export: there is no folder {file.parent}")
        heading = "minikv: exercises passed" + (f" by {name}" if name else "")
        parts = [self._page_of(chapter) for chapter in chapters().values()]
        text = PAGE.format(
            title=escape(heading),
            summary=self.count(),
            chapters="\n".join(filter(None, parts)),
            date=time.strftime("%d %B %Y"),
        )
        write_whole(file, text)

    def _page_of(self, chapter: Chapter) -> str:
        done = self.passed(chapter)
        if not done:
            return ""
        rows = []
        for exercise in done:
            entry = self._entry(exercise)
            day = time.strftime("%d %B %Y", time.localtime(entry.passed))
            hints = f"{entry.hints} hint{'' if entry.hints == 1 else 's'}"
            help_ = "solution seen" if entry.seen_solution else hints
            rows.append(
                f"<tr><td>{exercise.id} {escape(exercise.title)}</td><td>{day}</td>"
                f"<td>{escape(entry.version or '–')}</td>"
                f"<td class='number'>{exercise.minutes}</td>"
                f"<td class='number'>{entry.tries}</td><td>{help_}</td></tr>"
            )
        return (
            f"<h2>{escape(_name(chapter))}</h2>\n<p>{self.count(chapter)}</p>\n"
            "<table><thead><tr><th scope='col'>exercise</th><th scope='col'>passed</th>"
            "<th scope='col'>of version</th>"
            "<th scope='col' class='number'>minutes</th><th scope='col' class='number'>tries</th>"
            "<th scope='col'>help</th></tr></thead>\n<tbody>" + "\n".join(rows) + "</tbody></table>"
        )


def _name(chapter: Chapter) -> str:
    name = f"{chapter.number} {title(chapter.number)}"
    return f"{name} ({chapter.cannot_run})" if chapter.cannot_run else name
