"""`python -m minikv COMMAND`: the course and the engine from a terminal."""

import os
import sys


def run(arguments: list[str]) -> int:
    """The exit status of a command."""
    try:
        try:
            from minikv.course.commands import main  # here, so that Control-C ends it quietly

            return main(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nEnded by Control-C.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has read all it wants: that is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def script() -> None:
    """`minikv COMMAND`, which an installation puts beside its `python`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    script()
