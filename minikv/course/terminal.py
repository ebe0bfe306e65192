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

from minikv.course import lab
from minikv.course.exercises.manifest import chapter_of, find
from minikv.course.exercises.reader_files import WorkbookError
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
            print(in_terminal(str(error)), file=sys.stderr)
            return 1 if isinstance(error, WorkbookError) else 2


def paint(text: str, color: str) -> str:
    """Coloured on a terminal, unless $NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{CODES[color]}m{text}\033[0m"


def _show(report: Report) -> None:
    report.in_terminal = True
    print(report.text(paint))


def _check(args: argparse.Namespace) -> int:
    exercises = (
        [find(args.exercise)] if "." in args.exercise else chapter_of(args.exercise).exercises
    )
    passed = True
    for exercise in exercises:
        report = lab.check(exercise.id, own_parts=args.own_parts, trace=args.trace)
        _show(report)
        passed = passed and report.passed
    return 0 if passed else 1


def _print(shown: object) -> int:
    print(in_terminal(repr(shown)))
    return 1 if isinstance(shown, lab.Refusal) else 0


def _progress(args: argparse.Namespace) -> int:
    return _print(lab.progress(args.export, args.name))


def _watch(args: argparse.Namespace) -> int:
    print("Checks whenever you save. Control-C ends it.")
    lab.watch(args.exercise, show=_show_with_time)
    return 0


def _show_with_time(report: Report) -> None:
    print(f"\n── {time.strftime('%H:%M:%S')} ".ljust(markup.terminal_width(), "─"))
    _show(report)


def _parts(args: argparse.Namespace) -> int:
    parts = lab.your_parts()
    print(parts.text(in_terminal))
    return 0 if parts.same else 1


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
    lambda args: _print(lab.hint(args.exercise, args.number)),
    (ONE, ("number", {"nargs": "?", "type": int, "help": "1, 2 or 3; the next one if left out"})),
)
why = Command(lambda args: _print(lab.why(args.exercise)), (ONE,))
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
parts = Command(_parts)
