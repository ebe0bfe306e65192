"""`python -m minikv release-assignment 3 --plan plan.toml`: a week of a plan, or
without a plan a chapter, as an nbgrader assignment.

    FOLDER/nbgrader_config.py
    FOLDER/source/week03/    for you: the notebook, and a cell with the solution
    FOLDER/release/week03/   for students: no solution, and the exercise files

Students write into the exercise files and hand in the folder. In FOLDER,
`nbgrader autograde week03` runs our checks. An exercise gives the plan's
points, or its difficulty. `nbgrader generate_feedback week03` writes pages that
say what differs, and the likely cause.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC
from importlib.util import find_spec
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from minikv.course.chapters import notebook, title
from minikv.course.exercise_data.manifest import Chapter, Exercise, ReaderError, chapter_of
from minikv.course.exercise_data.plan import NO_PLAN, TermPlan, Week, read as read_plan
from minikv.course.exercise_data.skeletons import skeleton
from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.reader.unpacked import notebooks
from minikv.course.reports import markup

CONFIG = '''"""nbgrader's settings for assignments of minikv."""

from minikv.course.grading.settings import configure

c = get_config()  # noqa: F821  nbgrader defines it
c.CourseDirectory.course_id = "minikv"
configure(c)
'''
TASK = re.compile(r"### (\d\d\.\d+) .*\n+")
OPENING = """# {title}

Write your solutions of {ids} into {files}, beside this notebook, and save.
The cells below check them: what differs, the likely cause, and where to look. Hand in the whole
folder{due}. Only what you write there is graded, {points:g} points in all; cells that you add to
this notebook are not run.

The texts are those of {notebooks}: "above" is there, and so are exercises that are named here and
not asked for."""
BEGIN = """from minikv.course.grading.cells import begin, must_pass
from minikv.course.lab import check, hint, why

begin({numbers})"""
SOLUTION = """### BEGIN SOLUTION
from minikv.course.grading.cells import write_solution

write_solution({numbers})  # only the source version has these lines
### END SOLUTION"""
ASKED = """## {exercise.id} {exercise.title}

{task}

About {exercise.minutes} minutes, {points}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("number", metavar="NN", help="a week of the plan, or a chapter")
    parser.add_argument("--plan", metavar="FILE", help="which exercises, until when, which points")
    parser.add_argument(
        "--out", type=Path, default=Path("nbgrader-course"), metavar="FOLDER",
        help="nbgrader's folder of the whole course (default: nbgrader-course)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    try:
        made = assignment(args.number, args.plan)
        write_source(made, args.out)
    except ReaderError as error:
        print(markup.wrapped(str(error), width=markup.terminal_width()), file=sys.stderr)
        return 2
    name = made.name
    print(f"{args.out / 'source' / name}: the source version, {made.points:g} points.")
    commands = [["nbgrader", "generate_assignment", name, "--force"]]
    if made.week is not None and made.week.deadline is not None:
        until = f"{made.week.deadline.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        commands.append(["nbgrader", "db", "assignment", "add", name, f"--duedate={until}"])
    if find_spec("nbgrader") is None:
        then = "\n".join(f"    {shlex.join(command)}" for command in commands)
        print(
            "nbgrader is not installed here, so there is no release version yet.\n"
            f"    pip install 'minikv[class]'\n    cd {args.out}\n{then}"
        )
        return 0
    # nbgrader looks for a program of its environment on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=args.out, env=os.environ | {"PATH": path}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
    print(f"{args.out / 'release' / name}: the release version, which students get.")
    return 0


@dataclass(frozen=True)
class Assignment:
    """What is handed in together."""

    name: str
    title: str
    exercises: tuple[Exercise, ...]
    plan: TermPlan = NO_PLAN
    week: Week | None = None

    @property
    def points(self) -> float:
        return sum(map(self.plan.most, self.exercises))

    @property
    def chapters(self) -> list[Chapter]:
        return [*dict.fromkeys(exercise.chapter for exercise in self.exercises)]


def assignment(number: str, plan: str | None) -> Assignment:
    """A week of a plan, or a chapter. Raises ReaderError."""
    if plan is None:
        chapter = chapter_of(number)
        name = f"{chapter.number} · {title(chapter.number)}: assignment"
        return Assignment(f"ch{chapter.number}", name, chapter.exercises)
    read = read_plan(plan)
    week = read.week(int(number) if number.isdecimal() else 0)
    name = f"{read.name}: week {week.number}"
    return Assignment(f"week{week.number:02}", name, week.exercises, read, week)


def write_source(made: Assignment, out: Path) -> None:
    """Raises ReaderError if there is a source version already: it may have been edited."""
    folder = out / "source" / made.name
    if folder.exists():
        raise ReaderError(
            f"{folder} is there already, perhaps with changes of yours. To have it made again: "
            f"rm -r {shlex.quote(str(folder))}, and the same command"
        )
    folder.mkdir(parents=True)
    for chapter in made.chapters:
        write_whole(folder / chapter.file_name, skeleton(chapter))
    nbformat.write(source(made), folder / f"{made.name}.ipynb")
    if not (out / "nbgrader_config.py").exists():
        write_whole(out / "nbgrader_config.py", CONFIG)


def source(made: Assignment) -> nbformat.NotebookNode:
    """The notebook of the source version."""
    due = made.week.due if made.week is not None else ""
    opening = OPENING.format(
        title=made.title, points=made.points, due=f", {due}" if due else "",
        ids=", ".join(exercise.id for exercise in made.exercises),
        files=" and ".join(f"`{chapter.file_name}`" for chapter in made.chapters),
        notebooks=" and ".join(f"`notebooks/{notebook(c.number)}`" for c in made.chapters),
    )  # fmt: skip
    numbers = ", ".join(f'"{chapter.number}"' for chapter in made.chapters)
    ids = "".join(f', "{exercise.id}"' for exercise in made.exercises)
    cells = [
        new_markdown_cell(opening, id="opening"),
        _cell("begin", BEGIN.format(numbers=ids[2:]), locked=True),
        _cell("own", SOLUTION.format(numbers=numbers), solution=True),
    ]
    told = {id_: text for chapter in made.chapters for id_, text in tasks(chapter).items()}
    for exercise in made.exercises:
        name, most = exercise.id.replace(".", "-"), made.plan.most(exercise)
        text = _asked(exercise, told[exercise.id], most)
        cells.append(new_markdown_cell(text, id=f"asked-{name}"))
        partly = f", partly={most:g}" if made.plan.partial else ""
        cells.append(
            _cell(
                f"check-{name}", f'must_pass("{exercise.id}"{partly})',
                locked=True, grade=True, points=most,
            )
        )  # fmt: skip
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def tasks(chapter: Chapter) -> dict[str, str]:
    """What each exercise asks for, as the chapter's notebook says it. "Above" is there."""
    cells = json.loads(notebooks()[notebook(chapter.number)])["cells"]
    texts = ["".join(cell["source"]).replace("](../exercises/", "](") for cell in cells]
    found = [(one, text) for text in texts if (one := TASK.match(text)) is not None]
    return {one[1]: text[one.end() :] for one, text in found}


def _asked(exercise: Exercise, task: str, most: float) -> str:
    points = "1 point" if most == 1 else f"{most:g} points"
    return ASKED.format(exercise=exercise, task=task, points=points)


def _cell(name: str, text: str, **kind: object) -> nbformat.NotebookNode:
    """A code cell that nbgrader knows by this name."""
    about = {"grade": False, "locked": False, "solution": False, "task": False, **kind}
    about |= {"grade_id": name, "schema_version": 3, "cell_type": "code"}
    return new_code_cell(text, id=name, metadata={"nbgrader": about})
