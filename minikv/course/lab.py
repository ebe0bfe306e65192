"""What a reader does with the exercises from a notebook cell; `terminal` has the same commands.

from minikv.course.lab import check, hint, why, diff, solution, progress, reset, watch
check("04.2")
"""

import inspect
import sys
import time
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Exercise, ReaderError, chapter_of, find
from minikv.course.exercise_data.skeletons import (
    body_of,
    fill,
    indented,
    is_unwritten,
    lines_of,
    reference,
    skeleton,
    targets,
)
from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.judge import process
from minikv.course.reader import parts, progress_file
from minikv.course.reader.ladder import navigation
from minikv.course.reader.mine import mine, own_engine, used_below
from minikv.course.reader.overview import Overview
from minikv.course.reader.predictions import measured, predict, predictions
from minikv.course.reports import markup
from minikv.course.reports.diff import SideBySide
from minikv.course.reports.report import Report

__all__ = [
    "begin", "check", "closing", "diff", "hint", "measured", "mine", "own_engine", "predict",
    "predictions", "progress", "reset", "solution", "source", "watch", "why",
    "your_parts",
]  # fmt: skip


# So that a cell of the reader's own can import what is written, `from exercises.ch04_… import …`.
with suppress(ReaderError):
    if str(reader_files.folder().parent) not in sys.path:
        sys.path.append(str(reader_files.folder().parent))


class Page:
    """Text that a cell shows: wrapped in a terminal, and as paragraphs in a notebook. Of `code`
    the lines are kept, and those of `python` are never wrapped, so that they can be copied."""

    def __init__(
        self, title: str, text: str, code: bool = False, python: bool = False, button: str = ""
    ):
        self.title, self.text, self.code, self.button = title, text, code or python, button
        self.python = python

    def __repr__(self) -> str:
        text = self.text
        if not self.code:  # a paragraph is one line, to be broken where the terminal ends
            text = "\n\n".join(" ".join(block.split()) for block in text.split("\n\n"))
        if not self.python:
            text = markup.wrapped(text, width=markup.terminal_width())
        return f"{self.title}\n{text}" if self.title else text

    def _repr_html_(self) -> str:
        head = f"<p style='text-align:left'><b>{escape(self.title)}</b></p>" if self.title else ""
        if self.code:
            return head + markup.preformatted(self.text)
        return head + markup.paragraphs(self.text) + self.button


class Refusal(Page):
    """Why what was asked for is not shown, and what to do instead."""

    def __init__(self, text: str):
        super().__init__("", text)


def check(exercise_id: str, own_parts: bool = False, trace: bool = False) -> Report:
    """Try your solution of an exercise. In JupyterLab the report has buttons for all that follows.

    `own_parts`: build on your own solutions of the exercises passed so far, instead of the
    reference's. `trace`: show the stack trace of what went wrong.
    """
    exercise = find(exercise_id)
    own = progress_file.passed() - {exercise.id} if own_parts else set()
    saved = reader_files.saved_at(exercise.chapter)
    report = Report.of(process.run(exercise, own))
    report.saved, report.show_trace = saved, trace
    progress_file.note(report, alone=not own)
    report.used_below = report.passed and not report.unchanged and used_below(exercise.id)
    if markup.server_root() is not None:
        report.panel = _show_with_buttons
    return report


def _show_with_buttons(report: Report) -> None:
    from minikv.course.reader.panel import Action, Panel  # ipywidgets, which a terminal spares

    exercise = find(report.exercise)
    id_ = exercise.id
    giving_away = "This shows the reference's solution. Click again to see it."
    if _may_see(exercise):
        giving_away = ""
    putting_back = (
        f"This puts {id_} back as it was, and keeps a copy of what you have written. "
        "Click again to do it."
    )
    new, earlier = exercise.begins or ("", "")
    copying = f"This copies the body of your {earlier} into {new}. Click again to do it."
    actions = [
        *(
            Action(f"Hint {n}", "Each hint says more", partial(hint, id_, n))
            for n in range(1, len(exercise.hints) + 1)
        ),
        Action("Why", "Why it works, once the exercise is passed", partial(why, id_)),
        Action("Diff", "Your solution beside the reference, once passed", partial(diff, id_)),
        Action("Solution", "The reference", partial(solution, id_, True), giving_away),
        Action("Reset", "Start this exercise again", partial(reset, id_), putting_back, True),
    ]
    if earlier and report.status == "not started":
        actions.insert(0, Action("Begin", f"Start from {earlier}", partial(begin, id_), copying))
    panel = Panel(id_, actions, partial(_file_buttons, exercise))
    panel.display(report.html(_file_buttons(exercise, report.at)), repr(report))


def _file_buttons(exercise: Exercise, at: int | None = None) -> str:
    """The buttons that check the exercise's file and open it, at the function with line `at`."""
    file, line = reader_files.path_of(exercise.chapter), reader_files.line_of(exercise, at)
    return markup.check_button() + markup.open_button(file, line)


def hint(exercise_id: str, number: int | None = None) -> Page:
    """The next hint, each stronger than the one before; or hint 1, 2 or 3."""
    exercise = find(exercise_id)
    entry = progress_file.entry(exercise.id)
    if number is None:
        number = min(entry.hints + 1, len(exercise.hints))
    if number not in (1, 2, 3):
        raise ReaderError(f"number: must be 1, 2 or 3, was {number!r}")
    entry.hints = max(entry.hints, number)
    progress_file.save(exercise.id, entry)
    title = f"{exercise.id} {exercise.title}, hint {number} of {len(exercise.hints)}"
    return Page(title, inspect.cleandoc(exercise.hints[number - 1]), code=number == 3)


def why(exercise_id: str) -> Page:
    """Why it works, once the exercise is passed."""
    exercise = find(exercise_id)
    if not _may_see(exercise):
        return Refusal(f'`why` opens once check("{exercise.id}") passes.')
    title = f"{exercise.id} {exercise.title}: why it works"
    return Page(title, inspect.cleandoc(exercise.works))


def diff(exercise_id: str) -> SideBySide | Page:
    """Your solution beside the reference, once the exercise is passed."""
    exercise = find(exercise_id)
    if not _may_see(exercise):
        return Refusal(f'`diff` opens once check("{exercise.id}") passes.')
    if not reader_files.read(exercise.chapter).progress_of(exercise).started:
        return Refusal(
            "There is nothing of yours to compare. "
            f'solution("{exercise.id}") shows the reference alone.'
        )
    return SideBySide(exercise)


def solution(exercise_id: str, sure: bool | None = None) -> Page:
    """The reference's solution. Asks before it shows an exercise's for the first time."""
    exercise = find(exercise_id)
    if not _may_see(exercise):
        if sure is None:
            sure = _ask(f"Show the solution of {exercise.id} {exercise.title}? [y/N] ")
        if not sure:
            return Refusal(
                f'Not shown. hint("{exercise.id}") gives a hint; '
                f'solution("{exercise.id}", sure=True) shows the solution.'
            )
        entry = progress_file.entry(exercise.id)
        entry.seen_solution = True
        progress_file.save(exercise.id, entry)
    asked = targets(exercise.chapter).values()
    texts = [target.solved.rstrip() for target in asked if target.exercise == exercise.id]
    return Page(f"{exercise.id} {exercise.title}", "\n\n\n".join(texts), python=True)


def _may_see(exercise: Exercise) -> bool:
    entry = progress_file.entry(exercise.id)
    return entry.solved or entry.seen_solution


def _ask(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, NotImplementedError, RuntimeError):  # there is nobody to answer
        return False


def progress(export: str | None = None, name: str = "") -> Overview | Page:
    """What is passed, what is open, and what comes next.

    With `export`, a file's name, write it there as an HTML page to keep; `name` is yours.
    """
    if export is None:
        return Overview()
    file = Path(export).with_suffix(".html")
    Overview().write_page(file, name)
    return Page("", f"Written to {file.resolve()}. A browser opens and prints it.")


def reset(exercise_id: str) -> Page:
    """Put an exercise back as it was, or its whole file if you give a chapter's number.

    What you have written is kept in a copy; the answer says where.
    """
    chapter = chapter_of(exercise_id)
    file = reader_files.path_of(chapter)
    whole = "." not in str(exercise_id)
    exercises = chapter.exercises if whole else (find(exercise_id),)
    saved = ""
    if file.exists():
        copy = progress_file.back_up(file)
        saved = (
            f" What was there is kept in {copy.relative_to(reader_files.folder().parent)}."
            " An editor that has the file open must load it again, before it saves."
        )
    text = skeleton(chapter)
    if not whole and file.exists():
        mine = reader_files.read(chapter)
        fresh = {
            path: target.skeleton
            for path, target in targets(chapter).items()
            if target.exercise == exercises[0].id
        }
        gone = [path for path in fresh if path not in mine.definitions]
        if gone:
            raise reader_files.WorkbookError(
                f"{reader_files.display_name(chapter)} has no {', '.join(gone)} to put back; "
                f'reset("{chapter.number}") makes the whole file again, and keeps a copy'
            )
        text = fill(mine.text, fresh)
    write_whole(file, text)
    for exercise in exercises:
        entry = progress_file.entry(exercise.id)
        entry.passed = None
        progress_file.save(exercise.id, entry)
    what = f"chapter {chapter.number}" if whole else exercises[0].id
    said = f"{what} is as it was at the beginning.{saved}"
    return Page("", said, button=markup.reload_button(file))


def begin(exercise_id: str) -> Page:
    """Copy the body of your own earlier function into the one that the exercise asks for, where
    the exercise starts from it."""
    exercise = find(exercise_id)
    if exercise.begins is None:
        raise ReaderError(f"{exercise.id} does not start from an earlier function")
    new, earlier = exercise.begins
    chapter = exercise.chapter
    file, mine = reader_files.path_of(chapter), reader_files.read(chapter)
    found = mine.definitions
    gone = [path for path in exercise.begins if path not in found]
    if gone:
        raise reader_files.WorkbookError(
            f"{reader_files.display_name(chapter)} has no {' and no '.join(gone)}"
        )
    if is_unwritten(found[earlier]):
        return Refusal(f"There is nothing to copy: {earlier} is not written yet.")
    if not is_unwritten(found[new]):
        return Refusal(
            f'{new} has a body already. reset("{exercise.id}") empties it, and keeps a copy.'
        )
    [stub] = found[new].body[-1:]
    lines = lines_of(mine.text)
    body = indented(lines_of(body_of(mine.text, found[earlier])), lines, stub)
    lines[stub.lineno - 1 : stub.end_lineno] = body
    write_whole(file, "\n".join(lines) + "\n")
    said = (
        f"{new} has a copy of your {earlier} now. Change what is different. "
        "An editor that has the file open must load it again, before it saves."
    )
    return Page("", said, button=markup.reload_button(file))


def watch(exercise_id: str, show=None, every: float = 0.5) -> None:
    """Check again whenever the file is saved, until it passes or you interrupt.

    With a chapter's number, check its first exercise that is not passed, and then the next.
    """
    chapter = chapter_of(exercise_id)
    file = reader_files.path_of(chapter)
    show = show or _show_in_place
    whole = "." not in str(exercise_id)
    exercises = chapter.exercises if whole else (find(exercise_id),)
    seen = None
    try:
        while True:
            stamp = file.stat().st_mtime_ns if file.exists() else 0
            if stamp == seen:
                time.sleep(every)
                continue
            todo = [e for e in exercises if e.id not in progress_file.passed()] or exercises[-1:]
            report = check(todo[0].id)
            show(report)
            if report.passed and len(todo) == 1:
                return
            # After a pass the next exercise is looked at without waiting for a change.
            seen = None if report.passed else stamp
    except KeyboardInterrupt:
        return


def _show_in_place(report: Report) -> None:
    from IPython.display import clear_output, display

    clear_output(wait=True)
    display(report)


def your_parts() -> parts.PartsRun:
    """Run tinypy on your own parts, of every exercise passed so far, and compare its tokens
    with the oracle's."""
    from IPython.display import clear_output

    found = parts.run(lambda what: print(what, end=" … ", flush=True))
    if found.proofs:
        clear_output(wait=True)  # that line, and all that this cell has shown so far
    return found


class Closing:
    """What a notebook ends with, one below the other."""

    def __init__(self, *parts):
        self.parts = parts

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.parts))

    def _repr_html_(self) -> str:
        return "".join(part._repr_html_() for part in self.parts)


def closing(here: int, *tables) -> Closing:
    """The last cell of a notebook: tinypy on your parts, your predictions beside what came out,
    `tables` if it has any, and the links to what comes before and after it."""
    return Closing(your_parts(), predictions(), *tables, navigation(here))


def source(target: str):
    """The reference's source of "module:name" or "module:Class.method", for a notebook."""
    from IPython.display import Code

    module, _, path = target.partition(":")
    return Code(reference(module).text(path).rstrip(), language="python")
