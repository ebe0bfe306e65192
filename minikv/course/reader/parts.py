"""What `your_parts()` shows: what tinypy writes on the reader's parts, and what that proves."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from minikv.course.chapters import folders
from minikv.course.exercise_data.manifest import chapters
from minikv.course.judge import process
from minikv.course.reader import progress_file
from minikv.course.reports import markup

NOTHING = "No part of yours has passed its check yet. Once one has, the model runs on it here."


class Proof(NamedTuple):
    """One run of the model on some of the reader's parts."""

    which: str  # a chapter's number, or "together"
    ids: list[str]  # the exercises whose parts it called
    same: bool  # the oracle's tokens
    words: str  # what it did, or what went wrong

    def __str__(self) -> str:
        together = ["all together"] if self.which == "together" else []
        words = ": ".join(filter(None, [", ".join([*together, *self.ids]), self.words]))
        return f"{'ok  ' if self.same else 'FAIL'}  {words}"


@dataclass
class Written:
    """A text that tinypy wrote on the reader's parts."""

    text: str
    on: str  # what it was written on
    tokens: int
    seconds: float
    same: bool  # the oracle's text

    def words(self) -> str:
        judged = "the oracle's tokens" if self.same else "NOT the oracle's tokens"
        speed = f"{self.tokens / self.seconds:,.0f} tokens per second"
        return f"{self.tokens} tokens by tinypy on {self.on}: {speed}, {judged}."


@dataclass
class PartsRun:
    """What tinypy wrote on the reader's own parts, in the chapters up to `here`."""

    here: str = "99"
    written: Written | None = None
    proofs: list[Proof] = field(default_factory=list)

    def __post_init__(self):
        self.chapters = [c for number, c in chapters().items() if number <= self.here]
        self.passed = {id_ for id_ in progress_file.passed() if id_[:2] <= self.here}
        self.changed = {id_ for id_ in progress_file.changed() if id_[:2] <= self.here}
        self.failing = progress_file.failing(self.changed)

    @property
    def same(self) -> bool:
        """Whether every run gave the oracle's tokens."""
        return all(proof.same for proof in self.proofs)

    def lines(self) -> list[str]:
        """A line for each exercise that is the reader's or was, and one for all the others."""
        ran = {id_ for proof in self.proofs for id_ in proof.ids}
        lines: list[str] = []
        others: list[str] = []  # in chapters of which something is the reader's
        untouched: list[str] = []  # the other chapters
        for chapter in self.chapters:
            rest = []
            for id_ in (exercise.id for exercise in chapter.exercises):
                part = ", ".join(path for path, asks in chapter.places.items() if asks == id_)
                if id_ in self.changed:
                    checked = ", and does not pass now" if id_ in self.failing else ""
                    todo = checked or f': check("{id_}")'
                    lines.append(f"{id_} {part}: changed since it passed{todo}")
                elif id_ in self.passed:
                    lines.append(f"{id_} {part}: yours" + "; no model calls it" * (id_ not in ran))
                else:
                    rest.append(id_)
            if len(rest) == len(chapter.exercises):
                untouched.append(chapter.number)
            else:
                others += rest
        others += [f"all of {', '.join(untouched)}"] if untouched else []
        return [*lines, *([f"The reference's: {', '.join(others)}"] if others else [])]

    def __repr__(self) -> str:
        return self.text()

    def text(self, say: Callable[[str], str] = str) -> str:
        """As text, as wide as the terminal; `say` words the calls that it names."""

        def wrapped(text: str, more: str) -> str:
            return textwrap.fill(
                say(text), markup.terminal_width(), subsequent_indent=more,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip

        if not self.passed | self.changed:
            return wrapped(NOTHING, "")
        out = []
        if self.written:
            out += [self.written.text.rstrip(), "", wrapped(self.written.words(), ""), ""]
        out += [*(wrapped(line, " " * 6) for line in self.lines()), ""]
        return "\n".join([*out, *(wrapped(str(proof), " " * 6) for proof in self.proofs)])

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        if not self.passed | self.changed:
            return f"<p {left}>{NOTHING}</p>"
        out = []
        if self.written:
            out.append(f"<pre {left}>{escape(self.written.text.rstrip())}</pre>")
            out.append(f"<p {left}>{escape(self.written.words())}</p>")
        for lines in (self.lines(), map(str, self.proofs)):
            out.append(f"<p {left}>{'<br>'.join(map(markup.marked, lines))}</p>")
        return "".join(out)


def run(tell: Callable[[str], None]) -> PartsRun:
    """Run tinypy on the reader's passed parts; `tell` hears what runs, as it begins. In a
    chapter's notebook these are the parts of this chapter and of those before it."""
    notebook = markup.open_notebook()
    here = notebook.name[:2] if notebook else ""
    parts = PartsRun(here if here in folders() else "99")
    if not parts.passed:
        return parts

    def hear(message: dict) -> None:
        if "start" in message:
            tell(message["start"])
        if "written" in message:
            parts.written = Written(**message["written"])
        if "proof" in message:
            parts.proofs.append(Proof(**message["proof"]))

    ended = process.parts(sorted(parts.passed), hear)
    if ended is not None:
        parts.proofs.append(Proof("together", [], False, ended))
    return parts
