"""The reader's own parts in this process: what the cells of a notebook go on with.

    slot_mapping = mine("04.3")      # yours once 04.3 is passed, the reference's until then

A file is read anew at every call, so a cell gets what is saved now. Only code that has passed
its check runs here; a check runs everything else, in a process of its own.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import minikv
from minikv.course.chapters import each
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import (
    Chapter,
    Exercise,
    Function,
    chapter_of,
    chapters,
    find,
)
from minikv.course.exercise_data.skeletons import reference, reference_part
from minikv.course.reader import progress_file
from minikv.course.reports import markup


def mine(*exercise_ids: str) -> Any:
    """What these exercises ask for: yours if it has passed its check, else the reference's.

    One function or class, or a tuple of them in the order of the exercises. A class has your
    methods where they have passed, and the reference's elsewhere. For a kernel you get the
    function that starts it. Prints whose each one is.
    """
    if not exercise_ids:
        raise ValueError('mine: name at least one exercise, as in mine("04.2")')
    asked: dict[tuple[str, str], list[str]] = {}  # (chapter, name): the exercises that ask for it
    for exercise in map(find, exercise_ids):
        if why := exercise.chapter.cannot_run:
            raise ValueError(f"{exercise.id}: {why}")
        for name in _names(exercise):
            asked.setdefault((exercise.chapter.number, name), []).append(exercise.id)
    parts = PassedParts({number for number, _ in asked})
    for (number, name), ids in asked.items():
        print(f"{name}: {parts.whose(chapters()[number], name, ids)}")
    found = [parts.get(chapters()[number], name) for number, name in asked]
    return found[0] if len(found) == 1 else tuple(found)


def own_engine(
    lm: minikv.LanguageModel, config: minikv.EngineConfig | None = None, **more: Any
) -> minikv.Engine:
    """`minikv.Engine(lm, config, **more)`, on your parts where they have passed their checks, and
    on the parts in `more`. Prints whose its parts are."""
    [(_, together)] = each("together")
    parts = PassedParts({chapter.number for chapter in engine_chapters()})
    given = together.ATTENTION if "attention" in more else ()
    homes = {name: home for name, home in together.PARTS.items() if name not in given}
    print(f"engine: {parts.whose_engine(homes)}")
    attention = [id_ for name in together.ATTENTION for id_ in parts.writers(together.PARTS[name])]
    with parts.installed():
        in_place = together.parts_in_place()
        if not parts.own & {*attention}:
            del in_place["attention"]  # the engine's own is faster
        engine = minikv.Engine(lm, config, **in_place | more)
    for name in ("step", "beam_search"):  # some parts are looked for only when they are needed
        setattr(engine, name, _with(parts, getattr(engine, name)))
    return engine


def used_below(exercise_id: str) -> bool:
    """Whether the open notebook has cells below this exercise's check that run on it."""
    notebook = markup.open_notebook()
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"] if notebook else []
    except (OSError, ValueError):  # on another machine, or being written
        return False
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    at = next((i for i, text in enumerate(code) if f'check("{exercise_id}"' in text), len(code))
    uses = re.compile(rf'\bmine\([^)]*"{re.escape(exercise_id)}"|\bown_engine\(')
    return any(map(uses.search, code[at + 1 :]))


def _with(parts: "PassedParts", method: Callable) -> Callable:
    """`method`, with the reader's parts in the reference's places while it runs."""

    def run(*args: Any, **options: Any) -> Any:
        with parts.installed():
            return method(*args, **options)

    return run


def engine_chapters() -> list[Chapter]:
    """The chapters whose parts make one engine, on any machine."""
    return [one for one in chapters().values() if one.in_engine and one.needs is None]


def _names(exercise: Exercise) -> list[str]:
    """What a cell uses of an exercise: its functions and classes, in the order of the file. For
    a kernel it is the function that starts it, which the chapter gives."""
    chapter = exercise.chapter
    names: dict[str, None] = {}
    for path, id_ in chapter.places.items():
        if id_ == exercise.id:
            names[path.partition(".")[0]] = None
    for given, piece in chapter.pieces.items():
        if isinstance(piece, Function) and piece.write is None:
            tree = ast.parse(reference(piece.module).text(given))
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            names = {given if name in used else name: None for name in names}
    return list(names)


class PassedParts:
    """The reader's passed parts of some chapters, loaded from the files as they are now."""

    def __init__(self, numbers: set[str]):
        """With a chapter of the engine, the earlier ones too: they write methods of the same
        classes."""
        self.changed = progress_file.changed()
        self.passed = progress_file.passed() | self.changed
        self.own: set[str] = set()  # exercises whose parts are loaded
        self.broken: dict[str, str] = {}  # chapters whose file fails, and how
        self._modules: dict[str, ModuleType] = {}
        self._swaps: list[reader_files.Swap] = []
        engine = {chapter.number for chapter in engine_chapters()}
        if numbers & engine:
            numbers = numbers | {number for number in engine if number < max(numbers)}
        self.chapters = [chapters()[number] for number in sorted(numbers)]
        for chapter in self.chapters:  # all, before any of the reference is swapped
            for path in chapter.places:
                reference_part(chapter, path)
        try:
            for chapter in self.chapters:
                self._load(chapter)
        finally:
            reader_files.give_back(self._swaps)

    def _load(self, chapter: Chapter) -> None:
        """Its passed parts, and leave them in the reference's places."""
        ids = {id_ for id_ in self.passed if chapter_of(id_) is chapter}
        if not ids:
            return
        kept = ids - self.changed
        try:
            file = reader_files.read(chapter)
            if not kept:
                return
            module = file.load(keep=kept)
            for part in list(vars(module).values()):
                # A kernel, which Triton's interpreter reads when it first runs: by then the file
                # may be another.
                if hasattr(part, "rewrite") and not isinstance(part, type):
                    part.rewrite()
        except KeyboardInterrupt:
            raise
        except reader_files.WorkbookError as error:
            self.broken[chapter.number] = str(error)
        except BaseException as error:  # sys.exit() at its end, too
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            name = reader_files.display_name(chapter)
            self.broken[chapter.number] = f"{name} cannot be imported: {what}"
        else:
            self._swaps += reader_files.borrow(chapter, module, kept)
            self._modules[chapter.number] = module
            self.own |= kept

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In here they stand in the reference's places."""
        for holder, name, _, own in self._swaps:
            setattr(holder, name, own)
        try:
            yield
        finally:
            reader_files.give_back(self._swaps)

    def get(self, chapter: Chapter, name: str) -> Any:
        """A function or class of the chapter's file."""
        piece = chapter.pieces[name]
        if isinstance(piece, Function) and piece.write is None and chapter.number in self._modules:
            return getattr(self._modules[chapter.number], name)
        with self.installed():
            return getattr(sys.modules[piece.module], name)

    def writers(self, home: str) -> list[str]:
        """The exercises of these chapters that write a part of the reference, "module:name"."""
        found: dict[str, None] = {}
        for chapter in self.chapters:
            for path, id_ in chapter.places.items():
                if chapter.pieces[path.partition(".")[0]].target == home:
                    found[id_] = None
        return sorted(found)

    def whose(self, chapter: Chapter, name: str, asked: list[str]) -> str:
        """Whose a part is, in words; the exercises in `asked` are what a cell asks for."""
        writers = self.writers(chapter.pieces[name].target) or asked
        yours = [id_ for id_ in writers if id_ in self.own]
        missing = [id_ for id_ in dict.fromkeys([*writers, *asked]) if id_ not in self.own]
        rest = self._why_not([id_ for id_ in missing if id_ in asked or id_ in self.passed])
        if not yours:
            return f"the reference's, {rest}"
        return f"yours ({', '.join(yours)})" + (f"; else the reference's, {rest}" if rest else "")

    def whose_engine(self, homes: dict[str, str]) -> str:
        """Whose the engine's parts are, in words."""
        yours, missing = [], []
        for name, home in homes.items():
            writers = self.writers(home)
            own = [id_ for id_ in writers if id_ in self.own]
            yours += [f"{name} ({', '.join(own)})"] if own else []
            missing += [id_ for id_ in writers if id_ in self.passed - self.own]
        if not yours and not missing:
            return "on the reference's parts, until you pass exercises that write some"
        said = [f"yours are {', '.join(yours)}"] if yours else []
        said.append("the rest is the reference's" if yours else "on the reference's parts")
        return "; ".join(said) + (f", {self._why_not(missing)}" if missing else "")

    def _why_not(self, ids: list[str]) -> str:
        """Why the parts of these exercises are the reference's, and what would change that."""
        why: dict[str, None] = {}
        for id_ in ids:
            number = chapter_of(id_).number
            if number in self.broken and id_ in self.passed:
                why[self.broken[number]] = None
            elif id_ in self.changed:
                why[f'your {id_} has changed since it passed: check("{id_}")'] = None
        unsolved = [id_ for id_ in ids if id_ not in self.passed]
        if unsolved:
            why[f"until you pass {', '.join(unsolved)}"] = None
        return "; ".join(why)
