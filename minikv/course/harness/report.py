"""What a check has to say, as text, as coloured text, and as a compact table."""

import re
import textwrap
from dataclasses import dataclass, field
from html import escape

from minikv.course.harness.manifest import Exercise, chapters, find

FLAGS = {"sure": "yes"}  # options that a terminal calls otherwise


@dataclass
class Line:
    """The result of one check."""

    name: str
    ok: bool
    what: str | None = None  # what differed
    cause: str | None = None
    look: str | None = None
    origin: str | None = None  # of an exception: file and line


@dataclass
class Report:
    """The result of one exercise: "passed", "not started" or "failed"."""

    exercise: str
    status: str
    total: int  # checks there are
    lines: list[Line] = field(default_factory=list)
    place: str | None = None  # where in the file, and what stands there
    printed: str = ""  # what the reader's code wrote
    trace: str | None = None
    seconds: float = 0.0
    model: str | None = None  # what tinypy did on the reader's part
    tries: int = 0
    minutes: float = 0.0  # since the first try
    fingerprint: str | None = None  # of the code that was checked
    in_terminal: bool = False
    show_trace: bool = False

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    # ── Words ─────────────────────────────────────────────────────────────────

    def headline(self) -> str:
        if self.status == "not started":
            return "not started"
        if self.passed:
            count = f"{self.total} checks, {self.seconds:.1f} s"
            if self.tries > 1:
                count += f", your {_ordinal(self.tries)} try, {max(1, round(self.minutes))} min"
            return f"passed  ({count})"
        if not self.lines:
            return "cannot run"
        return f"{sum(line.ok for line in self.lines)} of {self.total}"

    def next_steps(self) -> str:
        exercise = find(self.exercise)
        if not self.passed:
            steps = [f'hint("{self.exercise}") for a hint']
            if self.trace:
                steps.append(f'check("{self.exercise}", trace=True) for the stack trace')
            return " · ".join(steps)
        following = next_exercise(exercise)
        steps = [f'why("{self.exercise}"): why it works', f'diff("{self.exercise}")']
        if following is not None:
            steps.append(f"{following.id} {following.title}")
        return "Next: " + " · ".join(steps)

    def rows(self) -> list[tuple[str, str, list[tuple[str, str]]]]:
        """(mark, name, details (label, text)) of each check, a repeated cause only named."""
        rows: list[tuple[str, str, list[tuple[str, str]]]] = []
        seen: set[str | None] = set()
        for line in self.lines:
            known = {line.cause or line.origin} - {None}
            if line.ok:
                rows.append(("ok", line.name, []))
            elif known & seen:
                rows.append(("FAIL", line.name + "  (same cause)", []))
            else:
                details = [("", line.what), ("likely cause", line.cause), ("look at", line.look)]
                rows.append(("FAIL", line.name, [(k, v) for k, v in details if v]))
            seen |= known
        return rows

    def text(self, paint=lambda text, color: text) -> str:
        exercise = find(self.exercise)
        colour = {"passed": "green", "not started": "blue"}.get(self.status, "red")
        title = f"{exercise.id} {exercise.title}".ljust(32)
        parts = [f"{paint(title, 'bold')}  {paint(self.headline(), colour)}"]
        if self.place:
            parts.append(_wrapped(self.place, "  " if self.lines else ""))
        if not self.passed:
            for mark, name, details in self.rows():
                painted = paint(mark.ljust(4), "green" if mark == "ok" else "red")
                parts.append(f"  {painted}  {name}")
                parts += [_wrapped(f"{k}: {v}" if k else v, " " * 10) for k, v in details]
        if self.model:
            parts.append(_wrapped(self.model, ""))
        if self.printed:
            parts.append("  your code printed:")
            parts.append(textwrap.indent(self.printed.rstrip(), "    | "))
        if self.trace and self.show_trace:
            parts.append(self.trace.rstrip())
        parts.append(self.next_steps())
        return in_terminal("\n".join(parts)) if self.in_terminal else "\n".join(parts)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        exercise = find(self.exercise)
        mark = {"passed": "✓", "not started": "○"}.get(self.status, "✗")
        out = [
            "<table style='border-collapse:collapse;max-width:60em'>",
            "<tr><td colspan='2' style='text-align:left;border-bottom:1px solid'>"
            f"<b>{mark} {exercise.id} {escape(exercise.title)}</b> &nbsp; "
            f"{escape(self.headline())}</td></tr>",
        ]

        def row(left: str, right: str) -> None:
            cell = "style='text-align:left;vertical-align:top;padding:2px 8px'"
            out.append(f"<tr><td {cell}>{left}</td><td {cell}>{right}</td></tr>")

        if self.place:
            row("", marked(self.place))
        if not self.passed:
            for state, name, details in self.rows():
                right = escape(name) if state == "ok" else f"<b>{escape(name)}</b>"
                for label, text in details:
                    label = f"<i>{label}:</i> " if label else ""
                    right += f"<br>{label}{marked(text)}"
                row("✓ ok" if state == "ok" else "<b>✗ FAIL</b>", right)
        if self.model:
            row("", marked(self.model))
        if self.printed:
            row("printed", f"<pre style='text-align:left'>{escape(self.printed)}</pre>")
        if self.trace and self.show_trace:
            row("trace", f"<pre style='text-align:left'>{escape(self.trace)}</pre>")
        if self.passed:
            works = paragraphs(exercise.works)
            row("", f"<details><summary>Why it works</summary>{works}</details>")
        row("", escape(self.next_steps()))
        return "".join(out) + "</table>"


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


def next_exercise(exercise: Exercise) -> Exercise | None:
    everything = [e for chapter in chapters().values() for e in chapter.exercises]
    place = everything.index(exercise) + 1
    return everything[place] if place < len(everything) else None


def paragraphs(text: str) -> str:
    """Plain text with blank lines between paragraphs, as HTML."""
    blocks = textwrap.dedent(text).strip().split("\n\n")
    return "".join(
        f"<p style='text-align:left'>{marked(' '.join(block.split()))}</p>" for block in blocks
    )


def marked(text: str) -> str:
    """Plain text as HTML; what stands in `backquotes` is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text)).replace("\n", "<br>")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _wrapped(text: str, indent: str) -> str:
    """Wrapped at 100 columns; the second line of a paragraph is set in."""
    return "\n".join(
        textwrap.fill(
            part, 100, initial_indent=indent, subsequent_indent=indent + "  ",
            break_long_words=False, break_on_hyphens=False,
        )
        for part in text.splitlines()
    )  # fmt: skip
