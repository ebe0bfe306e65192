"""`python -m minikv COMMAND`: the course and the engine from a terminal."""

import sys

from minikv.course.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
