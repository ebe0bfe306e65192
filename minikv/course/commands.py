"""`python -m minikv COMMAND`: the course and the engine from a terminal."""

import argparse
import sys
from pkgutil import resolve_name

COMMANDS = {  # name: (what has its add_arguments and run, within minikv.course; what it does)
    "start": (
        "reader.start",
        "notebooks and exercises in a folder of yours, and JupyterLab",
    ),
    "check": ("terminal:check", "try your solution of an exercise"),
    "hint": ("terminal:hint", "the next hint for an exercise"),
    "why": ("terminal:why", "why it works, once an exercise is passed"),
    "diff": ("terminal:diff", "your solution beside the reference, once it is passed"),
    "solution": ("terminal:solution", "the reference's solution"),
    "progress": ("terminal:progress", "what is passed, what is open, what comes next"),
    "reset": ("terminal:reset", "put an exercise back as it was, keeping a copy of yours"),
    "begin": ("terminal:begin", "copy your earlier function into the one that starts from it"),
    "watch": ("terminal:watch", "check again whenever the file is saved"),
    "parts": ("terminal:parts", "run tinypy on your own parts"),
    "update": ("reader.update", "a newer version of the course, keeping what you have written"),
    "grade": ("grading.grade", "check the exercises of a whole class"),
    "release-assignment": ("grading.release", "a chapter as an assignment of nbgrader"),
    "generate": ("generate", "continue a prompt, printing it as it comes"),
    "serve": ("serve", "an engine behind an address, for OpenAI's clients"),
    "serve-cluster": ("serve_cluster", "several engines behind one address, by Ray"),
    "doctor": ("reader.doctor", "check this environment by computing with it"),
    "bench": ("bench", "measure the engine, against transformers where that makes sense"),
    "train": ("maker.train", "train the bundled model again"),
}


FIRST = "Begin with notebooks/00_start_here.ipynb; `progress` says what comes next."


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m minikv", description=__doc__, epilog=FIRST)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (place, text) in COMMANDS.items():
        # Only the command that runs is imported: the others may be slow to load.
        command = parsers.add_parser(name, help=text, description=text)
        if arguments[:1] == [name]:
            try:
                chosen = resolve_name(f"minikv.course.{place}")
            except ModuleNotFoundError as error:
                return _missing(name, error)
            chosen.add_arguments(command)
    if not arguments:
        parser.print_help()
        return 0
    args = parser.parse_args(arguments)  # ends here for --help and for a wrong command
    try:
        return chosen.run(args)
    except ModuleNotFoundError as error:
        return _missing(args.command, error)


def _missing(command: str, error: ModuleNotFoundError) -> int:
    """`pip install minikv` brings what the engine computes with, and no more."""
    if (error.name or "minikv").startswith("minikv"):
        raise error
    extra = "serve" if command == "serve" else "course"
    print(f'{command} needs {error.name}: pip install "minikv[{extra}]"', file=sys.stderr)
    return 2
