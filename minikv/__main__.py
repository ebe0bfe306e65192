"""`python -m minikv COMMAND`: the course and the engine from a terminal."""

import argparse
import importlib
import sys

COMMANDS = {  # name: (module of minikv.course, what it does)
    "generate": ("generate", "continue a prompt, printing it as it comes"),
    "doctor": ("doctor", "check this environment by computing with it"),
    "bench": ("bench", "measure the engine, against transformers where that makes sense"),
    "train": ("train", "train the bundled model again"),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m minikv", description=__doc__)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        # Only the command that runs is imported: the others may be slow to load.
        command = parsers.add_parser(name, help=text, description=text)
        if arguments[:1] == [name]:
            chosen = importlib.import_module(f"minikv.course.{module}")
            chosen.add_arguments(command)
    args = parser.parse_args(arguments)  # ends here for --help and for a wrong command
    return chosen.run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
