"""A reader's own copy of the notebooks and exercises, beside an installed course.

FOLDER/
  README.md                    where to begin
  AGENTS.md                    what an assistant that writes code may do here
  notebooks/   exercises/      the reader's, from the first moment on
  docs/                        the page that the notebooks link
  engine/                      the package's source, for reading: what runs is the installed one
  .minikv/                     what the course has put there, so that an update can tell it
                               from what the reader has written
"""

import hashlib
import json
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import minikv
from minikv.course.exercise_data.manifest import ReaderError, chapters
from minikv.course.exercise_data.reader_files import MARK
from minikv.course.exercise_data.skeletons import skeleton
from minikv.course.exercise_data.whole_files import write_whole

PACKAGE = Path(minikv.__file__).parent
REAL_ENGINES = "docs/REAL_ENGINES.md"
EXERCISES_DOC = '"""Your exercises: `chNN_name.py`, one file per chapter."""\n'
README = """# Your copy of the minikv course

- `notebooks/` is the lecture: begin with `notebooks/00_start_here.ipynb`.
- `exercises/` is yours to write, one file per chapter. Nothing overwrites it.
- `engine/` is the source of the installed engine, for reading.

In this folder, with the Python that the course is installed in:

    python -m minikv start          JupyterLab on the first notebook
    python -m minikv                where you stand, and what comes next
    python -m minikv check 04.2     tests what you have saved
    python -m minikv update         after an update of the package; keeps your work
"""
# Links of the notebooks to sources, which are elsewhere in a reader's folder.
MOVED = {"](../minikv/": "](../engine/minikv/", "](../kernels/": "](../engine/kernels/"}


@cache
def notebooks() -> dict[str, str]:
    """The text of every notebook, by its name. A wheel has them inside of the package.

    Outputs that answer a prediction are left out: the reader predicts, and then runs the cells.
    """
    found = {}
    for file in sorted(_shipped("notebooks").glob("*.ipynb")):
        notebook = json.loads(file.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["metadata"].get("jupyter", {}).pop("outputs_hidden", False):
                cell["outputs"], cell["execution_count"] = [], None
        text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
        for old, new in MOVED.items():
            text = text.replace(old, new)
        found[file.name] = text
    return found


def _shipped(name: str) -> Path:
    """A file or folder that a wheel has inside of the package, and a checkout beside it."""
    inside = PACKAGE / name
    return inside if inside.exists() else PACKAGE.parent / name


def skeletons() -> dict[str, str]:
    """The text of every exercise file, by its name."""
    return {chapter.file_name: skeleton(chapter) for chapter in chapters().values()}


def version_of(folder: Path) -> str | None:
    """The version of the course that the folder's files are of; None for any other folder."""
    try:
        return _record(folder)["version"]
    except FileNotFoundError:
        return None


def unpack(folder: Path) -> list[str]:
    """Put the course into `folder`, or back into it what is missing there; what is there stays.

    Returns the names of the files written. Raises ReaderError where it would mix with something
    else.
    """
    begun = version_of(folder)
    if begun not in (None, minikv.__version__):
        raise ReaderError(
            f"{folder} has version {begun} of the course, and {minikv.__version__} is installed; "
            "`minikv update`, called in that folder, brings it up to date"
        )
    wanted = _files()
    if begun is None:
        ours = {*wanted, "minikv"} - {"README.md", "AGENTS.md"}  # a reader's own may stay
        strange = sorted(name for name in ours if (folder / name).exists())
        if strange:
            raise ReaderError(
                f"{folder} has a {strange[0]} already, which `minikv start` has not put there; "
                "name an empty folder, or a new one"
            )
    missing = [name for name in wanted if not (folder / name).exists()]
    for name in missing:
        _write(folder / name, wanted[name])
    if begun is None:
        record(folder)
    _write_engine(folder)
    return missing


def record(folder: Path) -> None:
    """Remember what the course of this version puts into the folder."""
    (folder / MARK).mkdir(exist_ok=True)
    shutil.rmtree(folder / MARK / "exercises", ignore_errors=True)
    for name, text in skeletons().items():
        _write(folder / MARK / "exercises" / name, text)
    known = {name: digest(text) for name, text in notebooks().items()}
    text = json.dumps({"version": minikv.__version__, "notebooks": known}, indent=1) + "\n"
    write_whole(folder / MARK / "course.json", text)


def renew_notebooks(folder: Path) -> list[str]:
    """Replace the notebooks by those of the installed version. One that differs from what the
    course had put there is kept in a folder beside them. Returns what there is to say."""
    kept = _record(folder)
    aside = folder / "notebooks" / f"of_{kept['version']}"
    said = []
    for name, text in notebooks().items():
        file = folder / "notebooks" / name
        mine = file.read_text(encoding="utf-8", errors="replace") if file.exists() else None
        if mine == text:
            continue
        if mine is not None and digest(mine) != kept["notebooks"].get(name):
            aside.mkdir(exist_ok=True)
            copy = aside / name
            while copy.exists():
                copy = copy.with_stem(f"{copy.stem}~")
            file.replace(copy)
            said.append(f"{name}: new; yours is {copy.relative_to(folder).as_posix()}")
        _write(file, text)
    _write_engine(folder)
    return said


def begun_with(folder: Path) -> dict[str, str]:
    """The exercise files as the course had put them into the folder, by name."""
    files = sorted((folder / MARK / "exercises").glob("ch[0-9][0-9]_*.py"))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _files() -> dict[str, str]:
    return {
        **{f"notebooks/{name}": text for name, text in notebooks().items()},
        **{f"exercises/{name}": text for name, text in skeletons().items()},
        "exercises/__init__.py": EXERCISES_DOC,
        REAL_ENGINES: _shipped(REAL_ENGINES).read_text(encoding="utf-8"),
        "README.md": README,
        "AGENTS.md": Path(__file__).with_name("AGENTS.md").read_text(encoding="utf-8"),
    }


def _record(folder: Path) -> dict:
    """What `record` has written there. Raises ReaderError where that is damaged."""
    file = folder / MARK / "course.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {"version": str(found["version"]), "notebooks": dict(found["notebooks"])}
    except (ValueError, TypeError, KeyError):
        raise ReaderError(
            f"{file} is damaged, so nobody knows which version of the course this folder has; "
            "`minikv start` in a new folder, and copy your exercises and .progress into it"
        ) from None


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)


def _write_engine(folder: Path) -> None:
    """The source of the installed version, anew."""
    shutil.rmtree(folder / "engine", ignore_errors=True)
    leave_out = shutil.ignore_patterns("__pycache__", "models", "notebooks", "results")
    kernels = find_spec("minikv_kernels")
    assert kernels and kernels.origin
    for package, name in ((PACKAGE, "minikv"), (Path(kernels.origin).parent, "kernels")):
        shutil.copytree(package, folder / "engine" / name, ignore=leave_out)
