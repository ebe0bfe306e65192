"""Makes the files in `exercises/` from the reference. They are never edited by hand.

    python -m minikv.course skeletons    # writes exercises/chNN_name.py for every chapter

A skeleton is the reference's own text. What an exercise asks for has lost its body or
has a bug in it; the rest is unchanged. A test makes all skeletons again and compares.
"""

import ast
import importlib
import importlib.util
import linecache
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minikv.course.exercise_data.manifest import (
    OURS,
    Chapter,
    Class,
    Exercise,
    Function,
    chapter_of,
    chapters,
)

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
Def = AnyFunction | ast.ClassDef
ARROW = " => "
EXERCISES = Path(__file__).parents[3] / "exercises"


@dataclass(frozen=True)
class Target:
    """One function or method that an exercise asks for."""

    exercise: str
    path: str  # in the skeleton: "BlockPool.allocate"
    reference: object  # what the reference has there; None if the chapter cannot run here
    solved: str  # the reference's text, with the skeleton's name, from column 0
    skeleton: str  # the same without its body, or with its bug
    is_bug: bool


# ── Text of definitions ───────────────────────────────────────────────────────


def lines_of(text: str) -> list[str]:
    """Its lines as Python counts them. (`splitlines` also ends one at a form feed or U+2028.)"""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def first_line(node: Def) -> int:
    """Where a definition begins, decorators included, counted from 1."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def definitions(tree: ast.Module) -> dict[str, Def]:
    """Functions, classes and methods of a module by path: "f", "C", "C.m"."""
    found: dict[str, Def] = {}
    for node in tree.body:
        if isinstance(node, Def):
            found[node.name] = node
            if isinstance(node, ast.ClassDef):
                inner = [item for item in node.body if isinstance(item, AnyFunction)]
                found |= {f"{node.name}.{item.name}": item for item in inner}
    return found


def definition(text: str) -> Def:
    """The one definition that `text` is. Raises ValueError if it is anything else."""
    [node] = ast.parse(text).body
    if not isinstance(node, Def):
        raise ValueError(f"neither a function nor a class: {text!r}")
    return node


def last_line(node: ast.stmt) -> int:
    """Where a statement ends, counted from 1."""
    return node.lineno if node.end_lineno is None else node.end_lineno


def text_of(source: str, node: Def) -> str:
    """The text of one definition, moved to column 0."""
    lines = lines_of(source)[first_line(node) - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n"


def docstring_of(node: Def | ast.Module) -> ast.Expr | None:
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    return first if isinstance(first.value.value, str) else None


def without_body(text: str, exercise: Exercise | str, path: str) -> str:
    """A function's decorators, signature and docstring; its new body names the exercise."""
    node = definition(text)
    docstring = docstring_of(node)
    end = docstring.end_lineno if docstring else node.body[0].lineno - 1
    kept = lines_of(text)[:end]
    return "\n".join([*kept, f'    raise NotImplementedError("Exercise {exercise}: {path}")', ""])


def is_unwritten(node: Def) -> bool:
    """Whether a function has nothing but its docstring and the skeleton's `raise`."""
    body = node.body[1:] if docstring_of(node) else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Raise):
        return False
    raised = ast.unparse(body[0])
    return raised.startswith("raise NotImplementedError('Exercise ")


def body_of(text: str, node: Def) -> str:
    """The lines of a function after its docstring, from column 0."""
    docstring = docstring_of(node)
    begin = last_line(docstring) if docstring else node.body[0].lineno - 1
    lines = lines_of(text)[begin : node.end_lineno]
    return textwrap.dedent("\n".join(lines)).strip("\n")


def indented(new: list[str], lines: list[str], node: ast.stmt) -> list[str]:
    """`new` as far from the left as `node` in `lines`, by the same tabs or blanks."""
    margin = lines[node.lineno - 1][: node.col_offset].lstrip("\f")
    return [margin + line if line.strip() else line for line in new]


def fill(text: str, sources: dict[str, str]) -> str:
    """`text` with definitions replaced, each by path; a source under "" goes below the imports.

    Raises ValueError if there is no such definition.
    """
    for path, source in sources.items():
        lines, tree = lines_of(text), ast.parse(text)
        if path == "":
            imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
            at = max(map(last_line, imports), default=0)
            lines[at:at] = ["", *lines_of(textwrap.dedent(source).strip())]
        else:
            node = definitions(tree).get(path)
            if node is None:
                raise ValueError(f"there is no {path} to fill in")
            new = indented(lines_of(textwrap.dedent(source).strip()), lines, node)
            lines[first_line(node) - 1 : node.end_lineno] = new
        text = "\n".join(lines) + "\n"
    return text


# ── From the reference to a skeleton ──────────────────────────────────────────


class Reference:
    """A module of the reference, read as text."""

    def __init__(self, name: str):
        self.name = name
        spec = importlib.util.find_spec(name)  # text alone: not every machine can import it
        if spec is None or spec.origin is None:
            raise ValueError(f"there is no module {name} with a file")
        self.source = Path(spec.origin).read_text(encoding="utf-8")
        self.tree = ast.parse(self.source)
        self.definitions = definitions(self.tree)

    def definition(self, path: str) -> Def:
        if path not in self.definitions:
            raise ValueError(f"{self.name} has no {path}")
        return self.definitions[path]

    def text(self, path: str) -> str:
        return text_of(self.source, self.definition(path))

    def imports(self) -> dict[str, tuple[str, str | None]]:
        """The names that the module imports: name -> (module, name there or None)."""
        found: dict[str, tuple[str, str | None]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                found |= {alias.asname or alias.name: (alias.name, None) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                if node.module is None:
                    raise ValueError(f"{self.name}: {ast.unparse(node)} means nothing elsewhere")
                for alias in node.names:
                    found[alias.asname or alias.name] = (node.module, alias.name)
        return found

    def globals(self) -> set[str]:
        """The names that the module defines at its top level."""
        names = {path for path in self.definitions if "." not in path}
        for node in self.tree.body:
            if isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return names


@cache
def reference(name: str) -> Reference:
    return Reference(name)


def edited(text: str, edit: str) -> str:
    """`text` after what an `edit` says (see `mistakes`). Raises ValueError unless each place is
    there once."""
    for old, new in changes(edit):
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is {text.count(old)} times in the reference, expected once")
        text = text.replace(old, new)
    return text


def changes(edit: str) -> Iterator[tuple[str, str]]:
    """(old, new) of each place."""
    lines = edit.strip("\n").split("\n")
    if all(ARROW in line for line in lines):
        for line in lines:
            old, _, new = line.partition(ARROW)
            yield old, new
        return
    olds, news = list[str](), list[str]()
    for line in [*lines, ""]:
        if not line:
            yield "".join(olds), "".join(news)
            olds, news = [], []
        elif line[0] not in " -+":
            raise ValueError(f"neither `old{ARROW}new` nor a line of a diff: {line!r}")
        else:
            olds += [line[1:] + "\n"] if line[0] in " -" else []
            news += [line[1:] + "\n"] if line[0] in " +" else []


@cache
def reference_part(chapter: Chapter, path: str) -> Any:
    """What the reference has at a path of the skeleton; None if the chapter cannot run here."""
    if chapter.cannot_run:
        return None
    name, _, method = path.partition(".")
    whole = getattr(importlib.import_module(chapter.pieces[name].module), name)
    return vars(whole).get(method) if method else whole


@cache
def targets(chapter: Chapter) -> dict[str, Target]:
    """What the chapter's exercises ask for, by path, in the order of the file."""
    return {target.path: target for target in _targets(chapter)}


def _targets(chapter: Chapter) -> Iterator[Target]:
    for name, piece in chapter.pieces.items():
        with _named(chapter, piece):
            ref = reference(piece.module)
            ref.definition(name)
            if isinstance(piece, Function):
                paths = [] if piece.write is None else [name]
            else:
                paths = [f"{name}.{method}" for method in piece.write]
            for path in sorted(paths, key=lambda path: ref.definition(path).lineno):
                yield _target(chapter, path, ref.text(path))


@contextmanager
def _named(chapter: Chapter, piece: Function | Class) -> Iterator[None]:
    """An error about a piece of the manifest, with file, exercise and target."""
    try:
        yield
    except (ImportError, ValueError) as error:
        file = resources.files(chapter.package) / "chapter.toml"
        asked = [piece.write] if isinstance(piece, Function) else [*piece.write.values()]
        where = [*sorted({*filter(None, asked)}), f"target {piece.target}"]
        raise ValueError(f"{OURS}{file}, {', '.join(where)}: {error}") from None


def _target(chapter: Chapter, path: str, solved: str) -> Target:
    id_, value = chapter.places[path], reference_part(chapter, path)
    if path not in chapter.bugs:
        return Target(id_, path, value, solved, without_body(solved, id_, path), False)
    try:
        return Target(id_, path, value, solved, edited(solved, chapter.bugs[path]), True)
    except ValueError as error:
        raise ValueError(f"bug of {path}: {error}") from None


@cache
def skeleton(chapter: Chapter) -> str:
    """The text of `exercises/chNN_name.py` as a reader first sees it."""
    asked = targets(chapter)
    titles = {exercise.id: exercise.title for exercise in chapter.exercises}
    pieces: list[str] = []
    used: list[tuple[Reference, ast.AST, set[str]]] = []
    for name, piece in chapter.pieces.items():
        ref = reference(piece.module)
        if isinstance(piece, Function):
            text = ref.text(name)
            used.append((ref, ast.parse(text), set()))
            if piece.write is not None:
                text = _banner(asked[name], titles, 0) + asked[name].skeleton
            pieces.append(text)
        else:
            with _named(chapter, piece):
                pieces.append(_class_text(piece, ref, name, asked, titles))
            # Inherited members need none of their names here.
            bases = {ref.name.rpartition(".")[2]} if piece.show is not None else set()
            used.append((ref, ast.parse(_class_source(piece, ref, name)), bases))
    head = _head(chapter) + _imports(used, {*chapter.pieces})
    return "\n\n\n".join(piece.rstrip() for piece in [head, *pieces]) + "\n"


def solved(chapter: Chapter) -> str:
    """The same file with every part written, as the reference has it."""
    return fill(skeleton(chapter), {path: t.solved for path, t in targets(chapter).items()})


def _head(chapter: Chapter) -> str:
    first = chapter.exercises[0].id
    return (
        f'"""{chapter.doc.strip()}\n\n'
        "Write what raises NotImplementedError, fix what is marked as broken; the rest is given.\n"
        f'Then check("{first}") in the notebook, or in a terminal: python -m minikv check {first}\n'
        '"""\n\n'
    )


def _banner(target: Target, titles: dict[str, str], indent: int) -> str:
    broken = ": broken, fix it" if target.is_bug else ""
    line = f"# ── {target.exercise} {titles[target.exercise]}{broken} "
    return line.ljust(84 - indent, "─") + "\n"


def _members(piece: Class, ref: Reference, name: str) -> list[ast.stmt]:
    node = ref.definitions[name]
    body = node.body[1:] if docstring_of(node) else node.body
    if piece.show is None:
        return body
    wanted = {*piece.show, *piece.write}
    methods: list[ast.stmt] = [
        item for item in body if isinstance(item, ast.FunctionDef) and item.name in wanted
    ]
    unknown = wanted - {getattr(item, "name", "") for item in methods}
    if unknown:
        raise ValueError(f"{ref.name}:{name} has no {sorted(unknown)} to show")
    return methods


def _class_source(piece: Class, ref: Reference, name: str) -> str:
    """The class with only the members that are shown, all of them complete."""
    lines = lines_of(ref.source)
    node = ref.definitions[name]
    assert isinstance(node, ast.ClassDef)
    bases = [] if piece.show is not None else [ast.unparse(base) for base in node.bases]
    parts = [f"class {name}({', '.join(bases)}):"]
    for item in _members(piece, ref, name):
        start = first_line(item) if isinstance(item, Def) else item.lineno
        parts += lines[start - 1 : item.end_lineno]
    return "\n".join(parts)


def _class_text(piece: Class, ref: Reference, name: str, asked, titles) -> str:
    node, lines = ref.definitions[name], lines_of(ref.source)
    docstring = docstring_of(node)
    if piece.show is not None:
        head = f"class {name}({ref.name.rpartition('.')[2]}.{name}):"
    else:
        [head] = lines[node.lineno - 1 : node.body[0].lineno - 1]
    decorators = lines[first_line(node) - 1 : node.lineno - 1]
    parts = ["\n".join([*decorators, head])]
    if docstring:
        parts[0] += "\n" + "\n".join(lines[docstring.lineno - 1 : docstring.end_lineno])
    for item in _members(piece, ref, name):
        target = asked.get(f"{name}.{getattr(item, 'name', '')}")
        if target is not None:
            text = textwrap.indent(_banner(target, titles, 4) + target.skeleton, "    ").rstrip()
        else:
            start = first_line(item) if isinstance(item, Def) else item.lineno
            text = "\n".join(lines[start - 1 : item.end_lineno])
        if isinstance(item, Def):
            parts.append(text)
        else:  # fields stand together
            parts[-1] += "\n" + text
    return "\n\n".join(parts)


def _imports(used: list[tuple[Reference, ast.AST, set[str]]], own: set[str]) -> str:
    """Import statements for every name that the reference's text uses and the file lacks."""
    plain: set[str] = set()
    names_from: dict[str, set[str]] = {}
    for ref, tree, bases in used:
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - own
        for name in names & set(ref.imports()):
            module, inner = ref.imports()[name]
            if inner is None:
                alias = "" if name == module else f" as {name}"
                plain.add(f"import {module}{alias}")
            else:
                alias = "" if name == inner else f" as {name}"
                names_from.setdefault(module, set()).add(inner + alias)
        for name in names & ref.globals():
            names_from.setdefault(ref.name, set()).add(name)
        for base in bases:
            names_from.setdefault(ref.name.rpartition(".")[0], set()).add(base)
    lines = {line: line.split()[1] for line in plain}
    for module, wanted in names_from.items():
        aliased = {name for name in wanted if " as " in name}  # each on a line of its own
        for names in [wanted - aliased, *({name} for name in aliased)]:
            if names:
                line = f"from {module} import {', '.join(sorted(names, key=_import_order))}"
                lines[line] = module
    # Of the standard library, of installed packages, ours.
    sections: tuple[list[tuple[bool, str, str]], ...] = ([], [], [])
    for line, module in lines.items():
        top = module.partition(".")[0]
        place = 0 if top in sys.stdlib_module_names else 2 if top.startswith("minikv") else 1
        sections[place].append((line.startswith("from"), module, line))
    return "\n\n".join("\n".join(line for *_, line in sorted(s)) for s in sections if s)


def _import_order(name: str) -> tuple:
    """Constants, then classes, then the rest, as the linter sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


# ── For notebooks and for authors of the course ───────────────────────────────


def broken(exercise_id: str):
    """The broken function or class of a debug exercise, to show its symptom; a namespace of
    them if there are several, with the functions that the chapter gives."""
    chapter = chapter_of(exercise_id)
    owners = [
        path.partition(".")[0]
        for path, target in targets(chapter).items()
        if target.exercise == exercise_id and target.is_bug
    ]
    file = f"broken {exercise_id}"
    namespace = {"__name__": file}
    others = {p: t.solved for p, t in targets(chapter).items() if t.exercise != exercise_id}
    text = fill(skeleton(chapter), others)
    lines = [f"{line}\n" for line in lines_of(text)]  # Triton reads a kernel's text
    linecache.cache[file] = (len(text), None, lines, file)
    exec(compile(text, file, "exec"), namespace)
    owners += [
        name
        for name, piece in chapter.pieces.items()
        if isinstance(piece, Function) and piece.write is None
    ]
    found = {name: namespace[name] for name in owners}
    return SimpleNamespace(**found) if len(found) > 1 else found[owners[0]]


def write_all(folder: Path = EXERCISES) -> None:
    """Write every chapter's file into `folder`."""
    for chapter in chapters().values():
        (folder / chapter.file_name).write_text(skeleton(chapter), encoding="utf-8")
