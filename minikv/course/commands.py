"""`python -m minikv COMMAND`: the course and the engine from a terminal."""

import argparse
import shutil
import sys
import textwrap
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import NoReturn

# What each group is for, and name: (what has its add_arguments and run, within minikv.course;
# what it does).
GROUPS = {
    "For you": {
        "start": ("reader.start", "your copy of the notebooks and exercises, in JupyterLab"),
        "check": ("terminal:check", "try your solution of an exercise"),
        "hint": ("terminal:hint", "the next hint for an exercise"),
        "why": ("terminal:why", "why it works, once an exercise is passed"),
        "diff": ("terminal:diff", "your solution and the reference, once it is passed"),
        "solution": ("terminal:solution", "the reference's solution"),
        "progress": ("terminal:progress", "what is passed, what is open, what comes next"),
        "reset": ("terminal:reset", "put an exercise back, keeping a copy of yours"),
        "begin": ("terminal:begin", "copy your earlier function where one starts from it"),
        "watch": ("terminal:watch", "check again whenever the file is saved"),
        "parts": ("terminal:parts", "run tinypy on your own parts"),
        "capstone": ("chapters.ch15_serving.capstone", "an engine of yours under a mixed load"),
        "update": ("reader.update", "a newer version of the course, keeping your work"),
        "doctor": ("reader.doctor", "check this environment by computing with it"),
    },
    "For a class": {
        "grade": ("grading.grade", "check the exercises of a whole class"),
        "release-assignment": ("grading.release", "a week or a chapter, for nbgrader"),
    },
    "The engine": {
        "generate": ("generate", "continue a prompt, printing it as it comes"),
        "serve": ("serve", "engines behind an address, for OpenAI's clients"),
        "bench": ("bench", "measure the engine, and others beside it"),
        "train": ("authoring.train", "train the bundled model again"),
    },
}
COMMANDS = {name: told for group in GROUPS.values() for name, told in group.items()}


def listing() -> str:
    """Every command and what it does, group by group."""
    width = max(map(len, COMMANDS))
    lines = []
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name.ljust(width)}  {text}" for name, (_, text) in commands.items()]
    return "\n".join(lines[1:])


def main(arguments: list[str]) -> int:
    if not arguments:
        from minikv.course.terminal import home  # here: a command of the engine needs none of it

        print(f"{home()}\n\n{listing()}")
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        return _unknown(arguments[0])
    parser = Parser(
        prog="python -m minikv",
        usage="%(prog)s COMMAND …",
        description="The course and the engine from a terminal.",
        epilog=f"{listing()}\n\n`%(prog)s COMMAND --help` says more about a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = parser.add_subparsers(dest="command", required=True, help=argparse.SUPPRESS)
    for name, (place, text) in COMMANDS.items():
        # Only the command that runs is imported: the others may be slow to load.
        command = parsers.add_parser(name, prog=f"python -m minikv {name}", description=text)
        if arguments[:1] == [name]:
            try:
                chosen = resolve_name(f"minikv.course.{place}")
            except ModuleNotFoundError as error:
                return _missing(name, error)
            chosen.add_arguments(command)
    args = parser.parse_args(arguments)  # ends here for --help
    try:
        return chosen.run(args)
    except ModuleNotFoundError as error:
        return _missing(args.command, error)


class Parser(argparse.ArgumentParser):
    """One whose errors are in lines as wide as the terminal."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        width = shutil.get_terminal_size().columns - 2
        self.exit(2, f"{textwrap.fill(f'{self.prog}: error: {message}', width)}\n")


def _unknown(command: str) -> int:
    near = get_close_matches(command, COMMANDS, n=1)
    more = f" Did you mean {near[0]}?" if near else ""
    print(f'There is no command "{command}".{more}', file=sys.stderr)
    print("`python -m minikv --help` lists all of them.", file=sys.stderr)
    return 2


def _missing(command: str, error: ModuleNotFoundError) -> int:
    """`pip install minikv` brings what the engine computes with, and no more."""
    if (error.name or "minikv").startswith("minikv"):
        raise error
    extra = "serve" if command.startswith("serve") else "course"
    print(f'{command} needs {error.name}: pip install "minikv[{extra}]"', file=sys.stderr)
    return 2
