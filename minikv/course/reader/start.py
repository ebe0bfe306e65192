"""`minikv start [FOLDER]`: put the notebooks and exercises into a folder of yours, and open them.

    minikv start             # minikv-course in this folder, or the course that you are in
    minikv start ~/kv        # another folder
    minikv start --plan plan.toml  # a lecturer's plan: what is for which week
    minikv start --route weekend   # a shorter route: `progress` follows it, and headings are marked

What is in the folder already is never overwritten: start again and continue. A clone of the
repository is a copy of the course already, so nothing is unpacked into it.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from minikv.course.exercise_data.manifest import ReaderError
from minikv.course.exercise_data.plan import FILE
from minikv.course.exercise_data.reader_files import MARK, course_folder, in_folder
from minikv.course.reader import routes, unpacked
from minikv.course.reports import markup

FIRST = "notebooks/00_start_here.ipynb"
NEW = Path("minikv-course")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=f"default: {NEW}")
    ways = [*routes.routes(), routes.EVERYTHING]
    parser.add_argument("--route", choices=ways, help="what `progress` follows")
    parser.add_argument(
        "--plan", metavar="FILE", help="a lecturer's plan, which goes before a route"
    )
    parser.add_argument("--no-lab", action="store_true", help="only unpack")


def run(args: argparse.Namespace) -> int:
    folder = (args.folder or _here()).absolute()
    try:
        say = [put_into(folder)]
        with in_folder(folder / "exercises"):
            if args.route:
                routes.choose(args.route)
                say.append(in_words(args.route))
            if args.plan:
                routes.follow(args.plan)
                say.append(f"{folder / FILE} is your plan; `progress` says what is next, and when.")
        for text in say:
            print(markup.wrapped(text, width=markup.terminal_width()))
    except ReaderError as error:
        print(markup.wrapped(str(error), width=markup.terminal_width()), file=sys.stderr)
        return 1
    if args.no_lab:
        return 0
    return open_lab(folder)


def in_words(name: str) -> str:
    """What a route asks of its reader."""
    if name not in routes.routes():
        return "The whole course: every notebook, from top to bottom."
    route = routes.routes()[name]
    return (
        f"The {name} route takes {route.hours} hours: notebooks {', '.join(route.legs)}, and "
        f"{len(route.exercises)} exercises. Read the sections marked `{name}`, and run the cells "
        "of the others without reading them: Run > Run All Above Selected Cell."
    )


def _here() -> Path:
    """The course that this process is in, or a new folder."""
    try:
        found = course_folder()
    except ReaderError:
        return NEW
    return found if Path.cwd().is_relative_to(found) else NEW


def put_into(folder: Path) -> str:
    """Unpack, unless the folder is a clone, and return what there is to say about it."""
    new = not (folder / MARK).is_dir()
    if new and folder == _here():
        return f"{folder}: this clone is your copy of the course, so nothing was unpacked."
    written = unpacked.unpack(folder)
    notebooks = [str(folder / name) for name in written if name.endswith(".ipynb")]
    if notebooks:
        _trust(notebooks)
    if new:
        return (
            f"{folder} is your copy of the course: {len(notebooks)} notebooks, and the exercises "
            "that you will write. `minikv start` there continues it."
        )
    if not written:
        return f"{folder}: your copy of the course, as you left it."
    return f"{folder}: your copy of the course; put back what was missing: {', '.join(written)}."


def _trust(notebooks: list[str]) -> None:
    """JupyterLab shows the pictures of a stored page only if it trusts the notebook."""
    command = [sys.executable, "-P", "-m", "jupyter", "trust", *notebooks]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def open_lab(folder: Path) -> int:
    """JupyterLab on the first notebook, until Control-C."""
    import jupyterlab  # noqa: F401  it is no part of `pip install minikv`

    command = [
        sys.executable, "-P", "-m", "jupyterlab", "-y",
        "--log-level=ERROR", "--LabApp.log_level=ERROR",
        f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{FIRST}",
        # No questions about news and updates, over the first page.
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    if hasattr(os, "getuid") and os.getuid() == 0:
        command.append("--allow-root")
    # torch's threads spin while they wait for each other; asleep, they wait at little cost.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    print("JupyterLab opens in the browser; or open the address below. Control-C ends it.")
    try:
        return subprocess.run(command, cwd=folder, env=environment).returncode
    except KeyboardInterrupt:
        return 0
