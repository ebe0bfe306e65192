"""`python -m minikv.course COMMAND`: for those who write the course."""

import argparse
import sys

from minikv.course.authoring import buttons, new_chapter
from minikv.course.exercise_data import skeletons


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m minikv.course", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new_chapter.add_arguments(commands.add_parser("new", help="lay out an empty chapter"))
    commands.add_parser("skeletons", help="write the exercise files from the reference")
    commands.add_parser("pictures", help="make the README's pictures again, from live objects")
    commands.add_parser("buttons", help="write the links that open the course with one click")
    args = parser.parse_args(arguments)
    if args.command == "new":
        return new_chapter.run(args)
    if args.command == "buttons":
        return buttons.run()
    if args.command == "pictures":
        from minikv.course.authoring import showcase  # here: it draws, and loads the model

        return showcase.run()
    skeletons.write_all()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
