"""What a reader does with the exercises, from a notebook cell; `terminal` does the same there.

from minikv.course.lab import check, hint, why, diff, solution, progress, reset, watch
check("04.2")
"""

import inspect
import time
from html import escape

from minikv.course.harness import parts, process, progress_file, reader_files
from minikv.course.harness.diff import SideBySide
from minikv.course.harness.files import write_whole
from minikv.course.harness.manifest import Chapter, Exercise, chapter_of, chapters, find
from minikv.course.harness.mine import mine, own_engine
from minikv.course.harness.predictions import measured, predict, predictions
from minikv.course.harness.report import Report, paragraphs
from minikv.course.harness.skeletons import definitions, fill, reference, skeleton, targets

__all__ = [
    "check", "diff", "hint", "measured", "mine", "own_engine", "predict", "predictions",
    "progress", "reset", "sandbox", "solution", "source", "watch", "why", "your_parts",
]  # fmt: skip


class Page:
    """Text that a cell shows: as it is, and as paragraphs in a notebook."""

    def __init__(self, title: str, text: str, code: bool = False):
        self.title, self.text, self.code = title, text, code

    def __repr__(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text

    def _repr_html_(self) -> str:
        head = f"<p style='text-align:left'><b>{escape(self.title)}</b></p>" if self.title else ""
        if self.code:
            return f"{head}<pre style='text-align:left'>{escape(self.text)}</pre>"
        return head + paragraphs(self.text)


def check(exercise_id: str, own_parts: bool = False, trace: bool = False) -> Report:
    """Try your solution of an exercise.

    `own_parts`: build on your own solutions of the exercises passed so far, instead of the
    reference's. `trace`: show the stack trace of what went wrong.
    """
    exercise = find(exercise_id)
    own = progress_file.passed() - {exercise.id} if own_parts else set()
    report = process.run(exercise, own)
    progress_file.note(report, alone=not own)
    report.show_trace = trace
    return report


def hint(exercise_id: str, number: int | None = None) -> Page:
    """The next hint, each stronger than the one before; or hint 1, 2 or 3."""
    exercise = find(exercise_id)
    entry = progress_file.entry(exercise.id)
    if number is None:
        number = min(entry.hints + 1, len(exercise.hints))
    if number not in (1, 2, 3):
        raise ValueError(f"number: must be 1, 2 or 3, was {number!r}")
    entry.hints = max(entry.hints, number)
    progress_file.save(exercise.id, entry)
    title = f"{exercise.id} {exercise.title}, hint {number} of {len(exercise.hints)}"
    return Page(title, inspect.cleandoc(exercise.hints[number - 1]), code=number == 3)


def why(exercise_id: str) -> Page:
    """Why it works. Once the exercise is passed."""
    exercise = find(exercise_id)
    if not _may_see(exercise):
        return Page("", f'This gives it away: pass check("{exercise.id}") first.')
    title = f"{exercise.id} {exercise.title}: why it works"
    return Page(title, inspect.cleandoc(exercise.works))


def diff(exercise_id: str) -> SideBySide | Page:
    """Your solution beside the reference. Once the exercise is passed."""
    exercise = find(exercise_id)
    if not _may_see(exercise):
        return Page("", f'This shows the reference: pass check("{exercise.id}") first.')
    return SideBySide(exercise)


def solution(exercise_id: str, sure: bool | None = None) -> Page:
    """The reference's solution. Asks first, once an exercise."""
    exercise = find(exercise_id)
    if not _may_see(exercise):
        if sure is None:
            sure = _ask(f"Show the solution of {exercise.id} {exercise.title}? [y/N] ")
        if not sure:
            return Page(
                "",
                f'Not shown. hint("{exercise.id}") gives a hint; '
                f'solution("{exercise.id}", sure=True) shows the solution.',
            )
        entry = progress_file.entry(exercise.id)
        entry.seen_solution = True
        progress_file.save(exercise.id, entry)
    asked = targets(chapter_of(exercise.id)).values()
    texts = [target.solved.rstrip() for target in asked if target.exercise == exercise.id]
    return Page(f"{exercise.id} {exercise.title}", "\n\n\n".join(texts), code=True)


def _may_see(exercise: Exercise) -> bool:
    entry = progress_file.entry(exercise.id)
    return entry.solved or entry.seen_solution


def _ask(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, NotImplementedError, RuntimeError):  # nobody there to answer
        return False


def _name(chapter: Chapter) -> str:
    name = f"{chapter.number} {chapter.name.replace('_', ' ')}"
    return f"{name} ({chapter.cannot_run})" if chapter.cannot_run else name


class Overview:
    """Which exercises are passed, which are open, and what comes next."""

    def __init__(self):
        self.entries = progress_file.entries()
        everything = [e for chapter in chapters().values() for e in chapter.exercises]
        self.passed = [e for e in everything if self._entry(e).passed is not None]
        self.open = [e for e in everything if e not in self.passed]

    def _entry(self, exercise: Exercise) -> progress_file.Entry:
        return self.entries.get(exercise.id, progress_file.Entry())

    def state(self, exercise: Exercise) -> str:
        entry = self._entry(exercise)
        if entry.passed is not None:
            return "passed"
        return f"tried {entry.tries} ×" if entry.tries else "open"

    def headline(self) -> str:
        total = len(self.passed) + len(self.open)
        if not self.open:
            return f"All {total} exercises are passed."
        done = f"{len(self.passed)} of {total} exercises passed. "
        following = next((e for e in self.open if not chapter_of(e.id).cannot_run), None)
        if following is None:
            return done + (chapter_of(self.open[0].id).cannot_run or "")
        return done + f"Next: {following.id} {following.title}, {following.minutes} min"

    def __repr__(self) -> str:
        out = []
        for chapter in chapters().values():
            out.append(_name(chapter))
            for exercise in chapter.exercises:
                mark = "✓" if exercise in self.passed else "·"
                title = f"{exercise.id} {exercise.title}".ljust(44)
                out.append(f"  {mark} {title} {exercise.kind:8} {self.state(exercise)}")
        return "\n".join([*out, self.headline()])

    def _repr_html_(self) -> str:
        cell = "style='text-align:left;padding:1px 8px'"
        out = ["<table style='border-collapse:collapse'>"]
        for chapter in chapters().values():
            name = escape(_name(chapter))
            out.append(f"<tr><th colspan='5' style='text-align:left'>{name}</th></tr>")
            for exercise in chapter.exercises:
                mark = "✓" if exercise in self.passed else "·"
                cells = (
                    mark, f"{exercise.id} {exercise.title}", exercise.kind,
                    f"{exercise.minutes} min", self.state(exercise),
                )  # fmt: skip
                out.append(
                    "<tr>" + "".join(f"<td {cell}>{escape(c)}</td>" for c in cells) + "</tr>"
                )
        return "".join(out) + f"</table><p style='text-align:left'>{escape(self.headline())}</p>"


def progress() -> Overview:
    """What is passed, what is open, and what comes next."""
    return Overview()


def reset(exercise_id: str) -> Page:
    """Put an exercise back as it was, or with a chapter's number its whole file.

    What you have written is kept in a copy, whose place is told.
    """
    chapter = chapter_of(exercise_id)
    file = reader_files.folder() / chapter.file_name
    whole = "." not in str(exercise_id)
    exercises = chapter.exercises if whole else (find(exercise_id),)
    saved = ""
    if file.exists():
        copy = progress_file.back_up(file)
        saved = f" What was there is kept in {copy.relative_to(reader_files.folder().parent)}."
    text = skeleton(chapter)
    if not whole and file.exists():
        mine = file.read_text(encoding="utf-8")
        found = definitions(reader_files.parse(chapter, mine))
        fresh = {
            path: target.skeleton
            for path, target in targets(chapter).items()
            if target.exercise == exercises[0].id
        }
        gone = [path for path in fresh if path not in found]
        if gone:
            raise reader_files.WorkbookError(
                f"{reader_files.display_name(chapter)} has no {', '.join(gone)} to put back; "
                f'reset("{chapter.number}") makes the whole file new, and keeps a copy'
            )
        text = fill(mine, fresh)
    write_whole(file, text)
    for exercise in exercises:
        entry = progress_file.entry(exercise.id)
        entry.passed = None
        progress_file.save(exercise.id, entry)
    what = f"chapter {chapter.number}" if whole else exercises[0].id
    return Page("", f"{what} is as it was at the beginning.{saved}")


def watch(exercise_id: str, show=None, every: float = 0.5) -> None:
    """Check again whenever the file is saved, until it passes or you interrupt.

    With a chapter's number, its first exercise that is not passed, and then the next.
    """
    chapter = chapter_of(exercise_id)
    file = reader_files.folder() / chapter.file_name
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


def sandbox(**classes):
    """Buttons over a pool, block tables and a prefix cache, and a drawing of what each one does:
    of the engine's classes or of yours, as in `sandbox(block_table=mine("04.2"))`."""
    from minikv.course.sandbox import sandbox as opened  # imports what draws: not in a terminal

    return opened(**classes)


def your_parts() -> parts.Parts:
    """Run tinypy on your own parts, of every exercise passed so far, and compare its tokens
    with the oracle's."""
    found = parts.run(lambda what: print(what, end=" … ", flush=True))
    if found.proofs:
        print()
    return found


def source(target: str):
    """The reference's own source, "module:name" or "module:Class.method", for a notebook."""
    from IPython.display import Code

    module, _, path = target.partition(":")
    return Code(reference(module).text(path).rstrip(), language="python")
