"""What `your_parts()` shows: what tinypy writes on the reader's parts, and what that proves."""

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from minikv.course.harness import process, progress_file
from minikv.course.harness.manifest import Chapter, chapters
from minikv.course.harness.report import marked

NOTHING = "None of your parts has passed its check yet. Once one has, this line runs tinypy on it."


class Proof(NamedTuple):
    """One run of the model on some of the reader's parts."""

    which: str  # a chapter's number, or "together"
    ids: list[str]  # the exercises whose parts it ran on
    same: bool  # the oracle's tokens
    words: str  # what it did, or what went wrong


class Row(NamedTuple):
    """One exercise of a chapter that is begun."""

    id: str
    part: str
    whose: str


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
class Parts:
    """What tinypy wrote on the reader's own parts."""

    written: Written | None = None
    proofs: list[Proof] = field(default_factory=list)

    def __post_init__(self):
        self.passed, self.changed = progress_file.passed(), progress_file.changed()

    @property
    def same(self) -> bool:
        """Whether every run gave the oracle's tokens."""
        return all(proof.same for proof in self.proofs)

    def begun(self) -> list[Chapter]:
        """The chapters of which an exercise is passed."""
        numbers = {id_[:2] for id_ in self.passed | self.changed}
        return [chapter for number, chapter in chapters().items() if number in numbers]

    def rows(self, chapter: Chapter) -> list[Row]:
        ran = {id_ for proof in self.proofs for id_ in proof.ids}
        rows = []
        for exercise in chapter.exercises:
            places = chapter.places.items()
            part = ", ".join(path for path, id_ in places if id_ == exercise.id)
            whose = "the reference's"
            if exercise.id in self.changed:
                whose += f', changed since it passed: check("{exercise.id}")'
            elif exercise.id in self.passed:
                whose = "yours" if exercise.id in ran else "yours, no part of a run"
            rows.append(Row(exercise.id, part, whose))
        return rows

    def __repr__(self) -> str:
        return self.text()

    def text(self, say: Callable[[str], str] = str) -> str:
        """As text, as wide as the terminal; `say` words the calls that it names."""
        if not self.begun():
            return NOTHING
        width = min(100, shutil.get_terminal_size((100, 24)).columns)

        def wrapped(text: str, indent: str, more: str) -> str:
            return textwrap.fill(
                say(text), width, initial_indent=indent, subsequent_indent=more,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip

        def proved(which: str) -> list[str]:
            return [wrapped(_proved(p), "  ", " " * 8) for p in self.proofs_of(which)]

        out = []
        if self.written:
            out += [self.written.text.rstrip(), "", wrapped(self.written.words(), "", ""), ""]
        for chapter in self.begun():
            out.append(f"{chapter.number} {chapter.name.replace('_', ' ')}")
            for id_, part, whose in self.rows(chapter):
                out.append(wrapped(f"{id_} {part}: {whose}", "  ", " " * 8))
            out += proved(chapter.number)
        if self.proofs_of("together"):
            out += ["all together", *proved("together")]
        return "\n".join(out)

    def proofs_of(self, which: str) -> list[Proof]:
        return [proof for proof in self.proofs if proof.which == which]

    def _repr_html_(self) -> str:
        if not self.begun():
            return f"<p style='text-align:left'>{NOTHING}</p>"
        left, cell = "style='text-align:left'", "style='text-align:left;padding:1px 8px'"
        out = []
        if self.written:
            out.append(f"<pre {left}>{escape(self.written.text.rstrip())}</pre>")
            out.append(f"<p {left}>{escape(self.written.words())}</p>")
        out.append("<table style='border-collapse:collapse;max-width:60em'>")

        def heading(text: str) -> None:
            out.append(f"<tr><th colspan='3' {left}>{escape(text)}</th></tr>")

        def proved(which: str) -> None:
            for proof in self.proofs_of(which):
                out.append(f"<tr><td colspan='3' {cell}>{escape(_proved(proof))}</td></tr>")

        for chapter in self.begun():
            heading(f"{chapter.number} {chapter.name.replace('_', ' ')}")
            for row in self.rows(chapter):
                columns = "".join(f"<td {cell}>{marked(text)}</td>" for text in row)
                out.append(f"<tr>{columns}</tr>")
            proved(chapter.number)
        if self.proofs_of("together"):
            heading("all together")
            proved("together")
        return "".join(out) + "</table>"


def _proved(proof: Proof) -> str:
    words = ": ".join(filter(None, [", ".join(proof.ids), proof.words]))
    return f"{'ok  ' if proof.same else 'FAIL'}  {words}"


def run(tell: Callable[[str], None]) -> Parts:
    """Run tinypy on the reader's passed parts; `tell` hears what runs, as it begins."""
    parts = Parts()
    if not parts.passed:
        return parts

    def hear(message: dict) -> None:
        if "start" in message:
            tell(message["start"])
        if "written" in message:
            parts.written = Written(**message["written"])
        if "proof" in message:
            parts.proofs.append(Proof(**message["proof"]))

    ended = process.parts(hear)
    if ended is not None:
        parts.proofs.append(Proof("together", [], False, ended))
    return parts
