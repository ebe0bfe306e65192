"""`python -m minikv release-assignment 04`: a chapter as an nbgrader assignment.

    FOLDER/nbgrader_config.py
    FOLDER/source/ch04/     for you: the notebook, and a cell with the solution
    FOLDER/release/ch04/    for students: no solution, and the exercise file

Students write into the exercise file and hand in the folder. In FOLDER,
`nbgrader autograde ch04` runs our checks; an exercise gives as many points as
it has stars of difficulty, or none. `nbgrader generate_feedback ch04` writes
pages that say what differs, and the likely cause.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from minikv.course.chapters import notebook, title
from minikv.course.exercise_data.manifest import Chapter, Exercise, ReaderError, chapter_of
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
OPENING = """# {number} · {title}: assignment

Write your solutions into `{file}`, which lies beside this notebook, and save it. The cells below
check it: what differs, the likely cause, and where to look. Hand in the whole folder. Only
`{file}` is graded, {points} points in all; cells that you add to this notebook are not run."""
BEGIN = """from minikv.course.grading.cells import begin, must_pass
from minikv.course.lab import check, hint, why

begin("{number}")"""
SOLUTION = """### BEGIN SOLUTION
from minikv.course.grading.cells import write_solution

write_solution("{number}")  # only the source version has these lines
### END SOLUTION"""
ASKED = """## {exercise.id} {exercise.title}

{task}

About {exercise.minutes} minutes, {points}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("chapter", metavar="NN", help="a chapter, such as 04")
    parser.add_argument(
        "--out", type=Path, default=Path("nbgrader-course"), metavar="FOLDER",
        help="nbgrader's folder of the whole course (default: nbgrader-course)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    try:
        chapter = chapter_of(args.chapter)
        write_source(chapter, args.out)
    except ReaderError as error:
        print(markup.wrapped(str(error), width=markup.terminal_width()), file=sys.stderr)
        return 2
    name = f"ch{chapter.number}"
    print(f"{args.out / 'source' / name}: the source version, {points_of(chapter)} points.")
    generate = ["nbgrader", "generate_assignment", name]
    if find_spec("nbgrader") is None:
        print(
            "nbgrader is not installed here, so there is no release version yet.\n"
            f"    pip install 'minikv[class]'\n    cd {args.out}\n    {' '.join(generate)}"
        )
        return 0
    # nbgrader looks for a program of its environment on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *generate],
        cwd=args.out, env=os.environ | {"PATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    print(f"{args.out / 'release' / name}: the release version, which students get.")
    return 0


def points_of(chapter: Chapter) -> int:
    return sum(exercise.difficulty for exercise in chapter.exercises)


def write_source(chapter: Chapter, out: Path) -> None:
    """Raises ReaderError if there is a source version already: it may have been edited."""
    folder = out / "source" / f"ch{chapter.number}"
    if folder.exists():
        raise ReaderError(f"{folder} is there already; remove it to have it made again")
    folder.mkdir(parents=True)
    write_whole(folder / chapter.file_name, skeleton(chapter))
    nbformat.write(source(chapter), folder / f"ch{chapter.number}.ipynb")
    if not (out / "nbgrader_config.py").exists():
        write_whole(out / "nbgrader_config.py", CONFIG)


def source(chapter: Chapter) -> nbformat.NotebookNode:
    """The notebook of the source version."""
    number = chapter.number
    opening = OPENING.format(
        number=number, title=title(number), file=chapter.file_name, points=points_of(chapter)
    )
    cells = [
        new_markdown_cell(opening, id="opening"),
        _cell("begin", BEGIN.format(number=number), locked=True),
        _cell("own", SOLUTION.format(number=number), solution=True),
    ]
    told = tasks(chapter)
    for exercise in chapter.exercises:
        name = exercise.id.replace(".", "-")
        cells.append(new_markdown_cell(_asked(exercise, told[exercise.id]), id=f"asked-{name}"))
        cells.append(
            _cell(
                f"check-{name}", f'must_pass("{exercise.id}")',
                locked=True, grade=True, points=exercise.difficulty,
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


def _asked(exercise: Exercise, task: str) -> str:
    points = "1 point" if exercise.difficulty == 1 else f"{exercise.difficulty} points"
    return ASKED.format(exercise=exercise, task=task, points=points)


def _cell(name: str, text: str, **kind: object) -> nbformat.NotebookNode:
    """A code cell that nbgrader knows by this name."""
    about = {"grade": False, "locked": False, "solution": False, "task": False, **kind}
    about |= {"grade_id": name, "schema_version": 3, "cell_type": "code"}
    return new_code_cell(text, id=name, metadata={"nbgrader": about})
