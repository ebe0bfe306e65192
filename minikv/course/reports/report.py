"""What a check has to say: as text, as coloured text, and as a page."""

import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from html import escape

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.judge.result import Result
from minikv.course.reports import markup
from minikv.course.reports.markup import GREEN, SKY, VERMILION, badge, folded, marked, wrapped

FLAGS = {"sure": "yes"}  # options that a terminal calls otherwise
LONGEST = 500  # characters of what differed, in one check
STYLES = {  # status: (symbol, colour in a terminal, colour on a page)
    "passed": ("✓", "green", GREEN),
    "not started": ("○", "blue", SKY),
    "failed": ("✗", "red", VERMILION),
    "not finished": ("?", "blue", SKY),
    "cannot run": ("✗", "red", VERMILION),
}


@dataclass
class Row:
    """One check as it is told: a cause that was named before is not told again."""

    ok: bool
    name: str
    details: list[tuple[str, str]] = field(default_factory=list)  # (label, text)


@dataclass(repr=False)
class Report(Result):
    """What a reader is told of a result."""

    tries: int = 0
    minutes: float = 0.0  # from the first try to the pass
    saved: float | None = None  # when the file was saved, in seconds since 1970
    unchanged: bool = False  # it has not been saved since the check before this one
    used_below: bool = False  # by cells of the open notebook, which ran on the reference
    following: str | None = None  # what to do next, in words
    in_terminal: bool = False
    show_trace: bool = False
    # Shows this report in JupyterLab, with buttons; elsewhere None.
    panel: Callable[["Report"], None] | None = None

    @classmethod
    def of(cls, result: Result) -> "Report":
        """A report of this result."""
        return cls(**{one.name: getattr(result, one.name) for one in fields(Result)})

    # ── Words ─────────────────────────────────────────────────────────────────

    @property
    def state(self) -> str:
        """The status, or "cannot run" where no check could begin."""
        return "cannot run" if self.status == "failed" and not self.lines else self.status

    def count(self) -> str:
        if self.passed:
            count = f"all {self.total} checks, {self.seconds:.1f} s"
            if self.tries > 1:
                count += f", your {_ordinal(self.tries)} try, {max(1, round(self.minutes))} min"
            return count
        if self.state != "failed":
            return ""
        return f"{sum(line.ok for line in self.lines)} of {self.total} checks pass"

    def headline(self) -> str:
        return ": ".join(filter(None, (self.state, self.count())))

    def freshness(self) -> str:
        """Which version of the file was checked. An editor may hold a newer one."""
        live = self.in_terminal or self.panel is not None
        saves = "Ctrl+S in the editor saves"
        if self.status == "not started" and not live:  # the same on every stored page
            return f"If you have written it, save it first: {saves}."
        if self.saved is None:
            return ""
        name = reader_files.display_name(chapter_of(self.exercise))
        when = markup.ago(time.time() - self.saved)
        if self.status == "not started":
            return f"{name} was saved {when}. If you have written more since: {saves}."
        if self.unchanged and not self.passed:
            return f"Nothing has been saved since your last check: {name}, {when}. {saves}."
        return f"{name}, as saved {when} ({saves})"

    def next_steps(self) -> str:
        if not self.passed:
            steps = [f'hint("{self.exercise}") for a hint']
            if self.trace:
                steps.append(f'check("{self.exercise}", trace=True) for the stack trace')
            return " · ".join(steps)
        steps = [f'why("{self.exercise}"): why it works', f'diff("{self.exercise}")']
        return "Next: " + " · ".join([*steps, *self._following()])

    def _following(self) -> list[str]:
        return [self.following] if self.following else []

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        seen: set[str | None] = set()
        for line in self.lines:
            known = {line.cause or line.origin} - {None}
            if line.ok:
                rows.append(Row(True, line.name))
            elif known & seen:
                rows.append(Row(False, f"{line.name}  (same cause)"))
            else:
                look = None if not known and line.look in seen else line.look
                details = [
                    ("", _cut(line.what)),
                    ("likely cause", line.cause),
                    ("look at", look),
                    ("also shipped by", line.shipped),
                ]
                rows.append(Row(False, line.name, [(k, v) for k, v in details if v]))
            seen |= known | {line.look}
        return rows

    def advice(self) -> str:
        """What several failures are to be met with, if they are not known to have one cause."""
        told = [row for row in self.rows() if row.details]
        return "Fix the first, then check again: the others may follow from it." * (len(told) > 1)

    def text(self, paint=lambda text, color: text, fresh: bool = True) -> str:
        """`fresh`: say which version of the file was checked."""
        exercise = find(self.exercise)
        titles = exercise.chapter.exercises if self.in_terminal else ()
        column = max(32, *(len(f"{one.id} {one.title}") for one in titles), 0)
        width = markup.terminal_width() if self.in_terminal else markup.ORDINARY_WIDTH

        def told(text: str | None, indent: str = "") -> list[str]:
            calls = in_terminal(text or "") if self.in_terminal else text or ""
            return [wrapped(calls, indent, width)] if text else []

        symbol, color, _ = STYLES[self.state]
        title = f"{exercise.id} {exercise.title}".ljust(column)
        headline = f"{symbol} {self.headline()}"
        if self.in_terminal and column + 2 + len(headline) > width:
            title = f"{title.rstrip()}\n"
        parts = [f"{paint(title, 'bold')}  {paint(headline, color)}"]
        parts += told(self.place, "  " if self.lines else "")
        if not self.passed:
            for row in self.rows():
                mark = paint("ok  ", "green") if row.ok else paint("FAIL", "red")
                name = wrapped(row.name, width=width - 8) if self.in_terminal else row.name
                parts.append(f"  {mark}  {name.replace(chr(10), chr(10) + ' ' * 8)}")
                for label, text in row.details:
                    parts += told(f"{label}: {text}" if label else text, " " * 10)
        parts += [*told(self.advice()), *told(self.model)]
        if self.printed:
            parts.append("  your code printed:")
            parts.append(textwrap.indent(self.printed.rstrip(), "    | "))
        if self.trace and self.show_trace:
            parts.append(self.trace.rstrip())
        parts += told(self.freshness()) if fresh else []
        return "\n".join([*parts, *told(self.next_steps())])

    def __repr__(self) -> str:
        return self.text()

    # ── A page ────────────────────────────────────────────────────────────────

    def _ipython_display_(self) -> None:
        if self.panel is None:
            raise NotImplementedError  # then what follows is shown
        self.panel(self)

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, buttons: str = "") -> str:
        """With `buttons`, nothing is said about what they do."""
        exercise = find(self.exercise)
        symbol, _, color = STYLES[self.state]
        title = f"<b>{exercise.id} {escape(exercise.title)}</b>"
        parts = [f"{badge(f'{symbol} {self.state}', color)} {title} &nbsp; {escape(self.count())}"]
        fresh = marked(self.freshness())
        prominent = fresh and self.unchanged and not self.passed
        if prominent:
            parts.append(f"<b>{fresh}</b>")
        parts.append(marked(self.place or ""))
        if not self.passed:
            parts += [*self._rows_html(), escape(self.advice())]
        parts.append(marked(self.model or ""))
        if self.used_below:
            parts.append("Run the cells below again: they run on your code now.")
        if self.printed:
            parts.append(f"Your code printed:{markup.preformatted(self.printed)}")
        if self.trace and (self.panel or self.show_trace):
            trace = markup.preformatted(self.trace)
            parts.append(folded("Stack trace", trace, self.show_trace))
        if self.passed:
            parts.append(folded("Why it works", markup.paragraphs(exercise.works)))
            if self._following():
                parts.append(f"Next: {escape(self._following()[0])}")
        if fresh and not prominent:
            parts.append(f"<small>{fresh}</small>")
        if buttons:
            parts.append(buttons)
        elif self.passed:
            parts.append(marked(f'`diff("{exercise.id}")`: your solution beside the reference'))
        else:
            parts.append(escape(self.next_steps()))
        return markup.block(color, *parts)

    def _rows_html(self) -> list[str]:
        """The first failure open, the others folded, and what passes in one line."""
        out, is_open = [], True
        for row in self.rows():
            if row.ok:
                continue
            summary = f"{badge('✗ FAIL', VERMILION)} <b>{escape(row.name)}</b>"
            lines = [f"<i>{k}:</i> {marked(v)}" if k else marked(v) for k, v in row.details]
            out.append(folded(summary, "<br>".join(lines), is_open) if lines else summary)
            is_open = False
        passing = [escape(row.name) for row in self.rows() if row.ok]
        if passing:
            number = "1 check passes" if len(passing) == 1 else f"{len(passing)} checks pass"
            out.append(folded(f"{badge('✓ ok', GREEN)} {number}", "<br>".join(passing)))
        return out


def in_terminal(text: str) -> str:
    """The calls that a text names, as commands: hint("04.1") is `python -m minikv hint 04.1`."""
    return re.sub(
        r'\b(\w+)\("([\d.]+)"(?:, (\w+)=True)?\)',
        lambda call: (
            f"python -m minikv {call[1]} {call[2]}"
            + (f" --{FLAGS.get(call[3], call[3])}" if call[3] else "")
        ),
        text,
    )


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= LONGEST else f"{text[:LONGEST]} …"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
