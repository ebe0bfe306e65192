"""What a class has handed in, as it lies in a folder: one per student, or a platform's download.

    ada/ch04_paged_blocks.py                                        a folder of your own
    Ada Lovelace_4711_assignsubmission_file/ch04_paged_blocks.py    Moodle, "in folders"
    Ada Lovelace_4711_assignsubmission_file_ch04_paged_blocks.py    Moodle, without
    lovelaceada_LATE_4711_2342_ch04_paged_blocks-1.py               Canvas

A browser's `ch04_paged_blocks (1).py` is that file, too, and so is one in a student's zip.
"""

import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Chapter, Exercise
from minikv.course.grading.reading import printable

# Who handed it in, and their number there; what Canvas adds, and what both put before a file.
PLATFORM = re.compile(
    r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_[a-z]+_?|"
    r"(?P<login>[^_]+)(_LATE)?_(?P<user>\d+)_\d+_"
)
EXERCISES = re.compile(r"(ch\d\d_[a-z0-9_]+?)( ?\(\d+\)|[-_]\d+)?\.py")
MOST_IN_A_ZIP = 1_000  # files that are looked at


@dataclass(frozen=True)
class Student:
    """One student's hand-in: the files of `folder` whose names begin with `before`, or in `zip`."""

    name: str
    folder: Path
    before: str = ""
    zip: Path | None = None
    id: str = ""  # on the platform

    def meant(self, chapter: Chapter) -> str:
        """The name of the file that holds a chapter; "" without one. Raises OSError if there are
        several."""
        if self.folder.is_symlink():
            raise OSError(f"{self.folder.name} is a link, and no folder")
        before = "" if self.zip else self.before
        found = [name for name in self._names() if _is_of(chapter, Path(name).name, before)]
        if len(found) > 1:
            raise OSError(f"which one is meant: {', '.join(sorted(found))}?")
        return (found or [""])[0]

    def _names(self) -> list[str]:
        if self.zip is None:
            return os.listdir(self.folder)
        with _opened(self.zip) as archive:
            return archive.namelist()[:MOST_IN_A_ZIP]

    def file(self, exercise: Exercise) -> bytes | None:
        """The file that holds an exercise; None if there is none. Raises OSError for one that
        cannot be read, or not at once."""
        name = self.meant(exercise.chapter)
        if not name:
            return None
        if self.zip is not None:
            with _opened(self.zip) as archive, archive.open(name) as member:
                return member.read(reader_files.LONGEST_FILE + 1)
        path = self.folder / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(f"{path.name} is a folder, a link or a pipe, and no file")
        with path.open("rb") as file:
            return file.read(reader_files.LONGEST_FILE + 1)

    def text(self, exercise: Exercise) -> str:
        """What a person could read in it; nothing of a file that is too long to be run."""
        try:
            file = self.file(exercise) or b""
        except OSError:
            return ""
        return "" if len(file) > reader_files.LONGEST_FILE else file.decode("utf-8", "replace")


def _is_of(chapter: Chapter, name: str, before: str) -> bool:
    one = EXERCISES.fullmatch(name.removeprefix(before)) if name.startswith(before) else None
    return one is not None and f"{one[1]}.py" == chapter.file_name


class _opened:
    """A zip, whose damage is an OSError as that of any file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> zipfile.ZipFile:
        try:
            self.archive = zipfile.ZipFile(self.path)
        except zipfile.BadZipFile as error:
            raise OSError(f"{self.path.name}: {error}") from None
        return self.archive

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.archive.close()
        # Encrypted, of a method that Python does not know, or damaged further in.
        if isinstance(error, RuntimeError | NotImplementedError | zipfile.BadZipFile | EOFError):
            raise OSError(f"{self.path.name}: {error}") from None


def find_student(folder: Path) -> Student:
    """The student whose folder this is. Raises ValueError for one that is empty. One that cannot
    be read is a student's: their reports say why."""
    folder = Path(os.path.abspath(folder))
    one = Student(shown(folder.name), folder)
    known = PLATFORM.fullmatch(folder.name)
    if known:
        one = replace(one, name=shown(known["name"] or known["login"]), id=known["id"] or "")
    there: list[str] = []
    for place in (folder, folder / "exercises"):
        if place.is_symlink():
            return replace(one, folder=place)  # somebody else's work, or none: the reports say so
        try:
            names = os.listdir(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return replace(one, folder=place)
        if any(map(EXERCISES.fullmatch, names)):
            return replace(one, folder=place)
        there += [str(place / name) for name in names]
    if not there:
        raise ValueError(f"{folder}: is no folder with a hand-in")
    zips = [Path(name) for name in there if name.lower().endswith(".zip")]
    return replace(one, zip=zips[0]) if len(zips) == 1 else one


def students_in(
    folders: Iterable[Path], roster: Mapping[str, str]
) -> Iterator[Student | ValueError]:
    """All students of these folders, by names of their own; errors about those that hold none."""
    found: list[Student] = []
    for folder in map(Path, map(os.path.abspath, folders)):
        try:
            found += _in_download(folder) or [find_student(folder)]
        except ValueError as error:
            yield error
    count = Counter(one.name for one in found)
    for one in found:
        more = one.id and f"{one.name} {one.id}"
        name = one.name if count[one.name] == 1 else more or shown(one.folder)
        yield replace(one, name=roster.get(name, name))


def _in_download(folder: Path) -> list[Student]:
    """The students in the one folder that a platform's archive unpacks to; none in another."""
    try:
        names = sorted(os.listdir(folder)) if not folder.is_symlink() else []
    except OSError:
        return []
    found: dict[str, Student] = {}
    for name in names:
        known = PLATFORM.match(name)
        place = folder / name
        if known is None:
            continue
        who, id_ = shown(known["name"] or known["login"]), known["id"] or known["user"]
        zips = place if name.lower().endswith(".zip") else None
        if place.is_dir():
            found[name] = Student(who, place, id=id_)
            with suppress(ValueError):  # it is empty
                found[name] = find_student(place)
        elif zips is None or known[0] not in found:
            found[known[0]] = Student(who, folder, known[0], zips, id_)
    return [*found.values()]


def shown(name: str | Path) -> str:
    """A file's name, with an escape for each byte that is no UTF-8, or that would do something."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))
