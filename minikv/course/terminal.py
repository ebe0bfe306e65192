"""The exercises from a terminal: `python -m minikv check 04.2`, and so on.

Exit status: 0 if the exercise is passed or what you asked for is shown; 1 if not, or if the
exercise file cannot be used; 2 for a wrong argument.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import minikv
from minikv.course import lab
from minikv.course.chapters import each
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import chapter_of, chapters, find
from minikv.course.exercise_data.reader_files import WorkbookError
from minikv.course.reader import progress_file
from minikv.course.reader.parts import run as run_parts
from minikv.course.reports import markup
from minikv.course.reports.report import Report, in_terminal

CODES = {"bold": "1", "red": "31", "green": "32", "blue": "34"}


@dataclass(frozen=True)
class Command:
    """One command: its arguments, and what it does."""

    act: Callable[[argparse.Namespace], int]
    arguments: tuple[tuple[str, dict], ...] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for name, options in self.arguments:
            parser.add_argument(name, **options)

    def run(self, args: argparse.Namespace) -> int:
        try:
            return self.act(args)
        except (ValueError, FileNotFoundError) as error:
            print(_wrapped(str(error)), file=sys.stderr)
            return 1 if isinstance(error, WorkbookError) else 2


def paint(text: str, color: str) -> str:
    """Coloured on a terminal, unless $NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{CODES[color]}m{text}\033[0m"


def _wrapped(text: str) -> str:
    """Its calls as commands, and in lines as wide as the terminal."""
    return markup.wrapped(in_terminal(text), width=markup.terminal_width())


def home() -> str:
    """Where the reader stands, and what comes next."""
    try:
        known, following = progress_file.entries(), progress_file.to_do_next()
    except ValueError as error:  # there is no course in this folder
        return _wrapped(str(error))
    if following is None:
        return "Every exercise that this machine can run is passed."
    file, line = reader_files.display_name(following.chapter), reader_files.line_of(following)
    total = sum(len(chapter.exercises) for chapter in chapters().values())
    return (
        f"{paint(f'{len(progress_file.passed())} of {total} exercises passed.', 'bold')} "
        f"Next: {progress_file.what_next()}\n\n"
        + ("" if known else "  begin    notebooks/00_start_here.ipynb\n")
        + f"  read     notebooks/{following.chapter.file_name[2:-3]}.ipynb\n"
        f"  write    {file}, line {line}\n"
        f"  check    python -m minikv check {following.id}"
    )


def _show(report: Report, fresh: bool = True) -> None:
    report.in_terminal = True
    print(report.text(paint, fresh))


def _check(args: argparse.Namespace) -> int:
    if "." in args.exercise:
        report = lab.check(args.exercise, own_parts=args.own_parts, trace=args.trace)
        _show(report)
        return 0 if report.passed else 1
    reports = []
    for exercise in chapter_of(args.exercise).exercises:
        reports.append(lab.check(exercise.id, own_parts=args.own_parts, trace=args.trace))
        _show(reports[-1], fresh=False)
        print()
    missing = [report.exercise for report in reports if not report.passed]
    passed = f"{len(reports) - len(missing)} of {len(reports)} exercises pass."
    print(paint(passed, "bold" if missing else "green"))
    if missing:
        print(_wrapped(f"Not yet: {', '.join(missing)}. {reports[-1].freshness()}"))
    return 1 if missing else 0


def _print(shown: object, then: str = "") -> int:
    """Show it, and what can be done then unless it is a refusal."""
    title, more, rest = in_terminal(repr(shown)).partition("\n")
    print(f"{paint(title, 'bold') if more else title}{more}{rest}")
    if isinstance(shown, lab.Refusal):
        return 1
    if then:
        print(f"\n{_wrapped(then)}")
    return 0


def _hint(args: argparse.Namespace) -> int:
    shown = lab.hint(args.exercise, args.number)
    id_ = find(args.exercise).id
    seen = progress_file.entry(id_).hints
    last = f'This is the last hint. solution("{id_}") shows the solution.'
    return _print(shown, last if seen == 3 else f'hint("{id_}") gives the next hint.')


def _why(args: argparse.Namespace) -> int:
    following = progress_file.what_next(find(args.exercise).id)
    return _print(lab.why(args.exercise), f"Next: {following}" if following else "")


def _progress(args: argparse.Namespace) -> int:
    shown = lab.progress(args.export, args.name)
    if args.export is not None:
        return _print(shown)
    *lines, summary = repr(shown).splitlines()
    for line in lines:
        print(paint(line, "green") if "✓" in line else line)
    print(paint(_wrapped(summary), "bold"))
    return 0


def _watch(args: argparse.Namespace) -> int:
    print("Checks whenever you save. Control-C ends it.")
    lab.watch(args.exercise, show=_show_with_time)
    return 0


def _show_with_time(report: Report) -> None:
    print(f"\n── {time.strftime('%H:%M:%S')} ".ljust(markup.terminal_width(), "─"))
    _show(report)


def _parts(args: argparse.Namespace) -> int:
    if args.serve:
        [(_, four)] = each("four_requests")
        return _print(four.FourRequests(minikv.load("tinypy")))

    def tell(what: str) -> None:  # in one line, each over the one before
        print(f"\r\033[K{what} …" if sys.stdout.isatty() else f"{what} …", end=end, flush=True)

    end = "" if sys.stdout.isatty() else "\n"
    found = run_parts(tell)
    print("\r\033[K" * sys.stdout.isatty() + found.text(in_terminal))
    return 0 if found.same else 1


ONE = ("exercise", {"help": "an exercise, such as 04.2", "metavar": "ID"})
MANY = (
    "exercise",
    {"help": "an exercise, such as 04.2, or a chapter, such as 04", "metavar": "ID"},
)

check = Command(
    _check,
    (
        MANY,
        ("--own-parts", {"action": "store_true", "help": "build on your own earlier solutions"}),
        ("--trace", {"action": "store_true", "help": "show the stack trace"}),
    ),
)
hint = Command(
    _hint,
    (ONE, ("number", {"nargs": "?", "type": int, "help": "1, 2 or 3; the next one if left out"})),
)
why = Command(_why, (ONE,))
diff = Command(lambda args: _print(lab.diff(args.exercise)), (ONE,))
solution = Command(
    lambda args: _print(lab.solution(args.exercise, True if args.yes else None)),
    (ONE, ("--yes", {"action": "store_true", "help": "don't ask"})),
)
progress = Command(
    _progress,
    (
        ("--export", {"metavar": "FILE", "help": "write it as an HTML page to keep"}),
        ("--name", {"default": "", "help": "your name, for that page"}),
    ),
)
reset = Command(lambda args: _print(lab.reset(args.exercise)), (MANY,))
begin = Command(lambda args: _print(lab.begin(args.exercise)), (ONE,))
watch = Command(_watch, (MANY,))
parts = Command(
    _parts,
    (("--serve", {"action": "store_true", "help": "four requests that share a prefix, on them"}),),
)
