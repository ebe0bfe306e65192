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
from minikv.course.exercise_data.manifest import Chapter, Exercise, chapters
from minikv.course.grading.reading import printable

# Who handed it in, and their number there; what Canvas adds, a number for each file among it.
PLATFORM = re.compile(
    r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_(?P<kind>[a-z]+)_?|"
    r"(?P<login>[^_]+)(_LATE)?_(?P<user>\d+)_\d+_"
)
EXERCISES = re.compile(r"(ch\d\d_[a-z0-9_]+?)( ?\(\d+\)|[-_]\d+)?\.py")
MOST_IN_A_ZIP = 1_000  # files that are looked at
MOST_NAMED = 5  # files that are no exercises


@dataclass(frozen=True)
class Student:
    """One student's hand-in: the files of `folder`, or in `zip`. Without a folder, nothing."""

    name: str
    folder: Path | None
    id: str = ""  # on the platform
    on_canvas: bool = False
    together: bool = False  # the folder holds all students' files, each named with an id
    zip: Path | None = None

    def files(self) -> dict[str, str]:
        """Where each file is, and its name without what a platform has put before it."""
        if self.folder is None:
            return {}
        if self.folder.is_symlink():
            raise OSError(f"{self.folder.name} is a link, and no folder")
        if self.zip is not None:
            with _opened(self.zip) as archive:
                inside = archive.namelist()[:MOST_IN_A_ZIP]
            return {name: Path(name).name for name in inside if not name.endswith("/")}
        names = os.listdir(self.folder)
        if not self.together:
            return {name: name for name in names}
        known = filter(None, map(PLATFORM.match, names))
        return {one.string: one.string[one.end() :] for one in known if _id(one) == self.id}

    def meant(self, chapter: Chapter) -> str:
        """Where the file is that holds a chapter; "" without one. Raises OSError if there are
        several."""
        found = [place for place, name in self.files().items() if _meant(name) == chapter.file_name]
        if len(found) > 1:
            raise OSError(f"which one is meant: {', '.join(sorted(found))}?")
        return (found or [""])[0]

    def others(self) -> list[str]:
        """The names of some files that are no chapter's: one may be, by another name."""
        known = {chapter.file_name for chapter in chapters().values()}
        names = {name for name in self.files().values() if _meant(name) not in known}
        named = sorted(shown(name) for name in names if not name.startswith("."))
        return named[:MOST_NAMED] + ["…"] * (len(named) > MOST_NAMED)

    def file(self, exercise: Exercise) -> bytes | None:
        """The file that holds an exercise; None if there is none. Raises OSError for one that
        cannot be read, or not at once."""
        name = self.meant(exercise.chapter)
        if not name or self.folder is None:
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


def _meant(name: str) -> str:
    """The exercise file that a name stands for; "" if it is no such name."""
    one = EXERCISES.fullmatch(name)
    return f"{one[1]}.py" if one else ""


def _id(known: re.Match) -> str:
    return known["id"] or known["user"]


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
    known = PLATFORM.fullmatch(folder.name)
    one = _named(known, folder) if known else Student(shown(folder.name), folder)
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
        if any(map(_meant, names)):
            return replace(one, folder=place)
        there += [str(place / name) for name in names]
    if not there:
        raise ValueError(f"{folder}: is no folder with a hand-in")
    return replace(one, zip=_only_zip(there))


def _named(known: re.Match, folder: Path) -> Student:
    """Who is told by the name of a file or folder."""
    name = known["name"] or known["login"]
    return Student(shown(name), folder, _id(known), on_canvas=known["user"] is not None)


def _only_zip(names: Iterable[str]) -> Path | None:
    zips = [Path(name) for name in names if name.lower().endswith(".zip")]
    return zips[0] if len(zips) == 1 else None


def students_in(
    folders: Iterable[Path], roster: Mapping[str, str]
) -> Iterator[Student | ValueError]:
    """All students of these folders, by names of their own, and those of the roster who handed
    in nothing; errors about folders that hold none, and about who is not in the roster."""
    found: list[Student] = []
    for folder in _one_of_each(map(Path, map(os.path.abspath, folders))):
        try:
            found += _in_download(folder) or [find_student(folder)]
        except ValueError as error:
            yield error
    count = Counter(one.name for one in found)
    rest = dict.fromkeys(roster.values())
    for one in found:
        more = one.id and f"{one.name} {one.id}"
        name = one.name if count[one.name] == 1 else more or shown(one.folder or "")
        if roster and name not in roster and name not in rest:
            yield ValueError(f"roster: has no name {name!r}, which the tables therefore keep")
        yield replace(one, name=(known := roster.get(name, name)))
        rest.pop(known, None)
    if found:
        yield from (Student(name, None) for name in rest)


def _one_of_each(folders: Iterable[Path]) -> Iterable[Path]:
    """As given, but of a student's folders in one download, one by one, that of the files."""
    chosen: dict[object, Path] = {}
    for folder in folders:
        known = PLATFORM.fullmatch(folder.name)
        whose = (folder.parent, _id(known)) if known else folder
        if whose not in chosen or (known and known["kind"] == "file"):
            chosen[whose] = folder
    return chosen.values()


def _in_download(folder: Path) -> list[Student]:
    """The students in the one folder that a platform's archive unpacks to; none in another."""
    try:
        names = sorted(os.listdir(folder)) if not folder.is_symlink() else []
    except OSError:
        return []
    theirs: dict[str, list[re.Match]] = {}
    for known in filter(None, map(PLATFORM.match, names)):
        theirs.setdefault(_id(known), []).append(known)
    return [_one_of_many(folder, files) for files in theirs.values()]


def _one_of_many(folder: Path, known: list[re.Match]) -> Student:
    """A student by what is named with their id. Moodle has a text, too, where it asks for one."""
    known.sort(key=lambda one: one["kind"] not in (None, "file"))
    first = folder / known[0].string
    if first.is_dir():
        with suppress(ValueError):  # it is empty
            return find_student(first)
        return _named(known[0], first)
    one = replace(_named(known[0], folder), together=True)
    has_any = any(_meant(one.string[one.end() :]) for one in known)
    return one if has_any else replace(one, zip=_only_zip(str(folder / k.string) for k in known))


def shown(name: str | Path) -> str:
    """A file's name, with an escape for each byte that is no UTF-8, or that would do something."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))
