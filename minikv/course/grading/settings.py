"""How nbgrader treats these assignments. Only nbgrader imports this file, or what runs it.

A student hands in a notebook and an exercise file. Only the file is graded: before anything
runs, the notebook is replaced by the released one, and files that the assignment does not have
are removed. So no cell and no module of a student's runs beside a cell that gives points.
"""

from pathlib import Path
from typing import Any

import nbformat
from nbgrader.converters.autograde import Autograde
from nbgrader.preprocessors import NbGraderPreprocessor

from minikv.course.exercise_data.manifest import chapters

STUB = "# This cell is yours, to try things out. It is not graded."
KEPT = ("timestamp.txt",)  # nbgrader's own
MOST_WEEKS = 53
CELL_LIMIT = 3 * 3600  # seconds: three tries of a check, which has limits of its own, end before


class ReleasedNotebook(NbGraderPreprocessor):
    """The cells of the released notebook take the place of those that were handed in."""

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        name = resources["nbgrader"]["notebook"]
        return nbformat.read(_released(self, resources) / f"{name}.ipynb", 4), resources


class ReleasedFiles(NbGraderPreprocessor):
    """Removes files that were handed in and that the assignment does not have."""

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        released, folder = _released(self, resources), Path(resources["metadata"]["path"])
        known = {file.relative_to(released) for file in released.rglob("*")} | {*map(Path, KEPT)}
        handed_in = _handed_in(self, resources)
        for file in sorted(folder.rglob("*"), reverse=True):
            name = file.relative_to(folder)
            # nbgrader has copied what a link leads to, which may be another student's.
            linked = any((handed_in / part).is_symlink() for part in (name, *name.parents))
            if name not in known or linked or file.is_symlink():
                file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        return nb, resources


def _released(preprocessor: Any, resources: Any) -> Path:
    """The folder of the assignment's release version."""
    course = preprocessor.parent.parent.coursedir  # the exporter's, which nbgrader's command owns
    assignment = resources["nbgrader"]["assignment"]
    return Path(course.format_path(course.release_directory, ".", assignment))


def _handed_in(preprocessor: Any, resources: Any) -> Path:
    """The folder that the student has handed in."""
    course, about = preprocessor.parent.parent.coursedir, resources["nbgrader"]
    place = course.format_path(course.submitted_directory, about["student"], about["assignment"])
    return Path(place)


def configure(c: Any) -> None:
    """Fill in nbgrader's configuration object."""
    c.ClearSolutions.code_stub = {"python": STUB}
    c.ExecutePreprocessor.timeout = CELL_LIMIT
    files = {f"ch{number}": [chapter.file_name] for number, chapter in chapters().items()}
    every = [chapter.file_name for chapter in chapters().values()]
    weeks = {f"week{number:02}": every for number in range(1, MOST_WEEKS + 1)}
    c.Autograde.exclude_overwriting = files | weeks
    usual = Autograde()
    c.Autograde.sanitize_preprocessors = [ReleasedNotebook, *usual.sanitize_preprocessors]
    c.Autograde.autograde_preprocessors = [ReleasedFiles, *usual.autograde_preprocessors]
