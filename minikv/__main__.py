"""`python -m minikv COMMAND`: the course and the engine from a terminal."""

import codecs
import io
import os
import signal
import sys

# What stands for a character that the terminal has not, if "?" would say too little.
INSTEAD = {"✓": "+", "✗": "x", "·": ".", "…": "...", "─": "-", "–": "-", "→": "->", "×": "x"}


def run(arguments: list[str]) -> int:
    """The exit status of a command."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `program` has left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    codecs.register_error("minikv", _instead)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="minikv")
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


def _instead(error: UnicodeError) -> tuple[str, int]:
    """How to write what the encoding of a terminal or pipe cannot."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(INSTEAD.get(letter, "?") for letter in text), error.end


def script() -> None:
    """`minikv COMMAND`, which an installation puts beside its `python`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    script()
