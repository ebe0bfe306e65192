"""`python -m minikv update`: a newer version of the course that keeps what a reader has written.

    python -m minikv update                # in a git checkout: fetch, fast-forward, carry over
    minikv update                          # after `pip install -U minikv`, in your course's folder

Each definition is merged by itself from three texts: the skeleton that the reader began
with, the reader's file, and the new skeleton. Where both have changed a definition, the
reader's stays if its signature is still the one that the exercise asks for; otherwise the
new skeleton takes its place. The command lists what it could not keep; a copy of the old
file holds all of it.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import minikv
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import ReaderError
from minikv.course.exercise_data.skeletons import (
    AnyFunction,
    Def,
    definition,
    definitions,
    docstring_of,
    fill,
    first_line,
    indented,
    last_line,
    lines_of,
    text_of,
)
from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.reader import progress_file, unpacked
from minikv.course.reports import markup


class UpdateError(Exception):
    """The update cannot be made, and nothing was changed. The sentence says why and what to do."""


# ── One file ──────────────────────────────────────────────────────────────────


@dataclass
class Merge:
    """One file, merged."""

    text: str
    kept: list[str] = field(default_factory=list)  # the reader's own, by path
    lost: list[str] = field(default_factory=list)  # sentences: what was not kept, and why


class Pieces:
    """A file taken apart."""

    def __init__(self, text: str):
        tree = ast.parse(text)
        self.nodes = definitions(tree)
        self.text = {path: text_of(text, node) for path, node in self.nodes.items()}
        lines = lines_of(text)
        self.heads = {  # of classes: everything before the first method
            path: _head(lines, node)
            for path, node in self.nodes.items()
            if isinstance(node, ast.ClassDef)
        }
        self.functions = {path: self.text[path] for path in self.nodes if path not in self.heads}
        self.comments = [  # outside of functions
            line.strip()
            for number, line in enumerate(lines, start=1)
            if line.lstrip().startswith("#")
            and not any(
                node.lineno <= number <= last_line(node)
                for node in self.nodes.values()
                if isinstance(node, AnyFunction)
            )
        ]
        self.loose = [  # imports, constants and whatever else is at the top level
            "\n".join(lines[node.lineno - 1 : node.end_lineno])
            for node in tree.body
            if not isinstance(node, Def) and node is not docstring_of(tree)
        ]


def _head(lines: list[str], node: ast.ClassDef) -> str:
    methods = [item for item in node.body if isinstance(item, AnyFunction)]
    end = first_line(methods[0]) - 1 if methods else node.end_lineno
    head = lines[first_line(node) - 1 : end]
    while head and (not head[-1].strip() or head[-1].lstrip().startswith("# ──")):
        head.pop()  # the line above the first exercise
    return "\n".join(head)


def merge(base: str, mine: str, theirs: str) -> Merge:
    """Bring the changes from `base` to `mine` into `theirs`. All three must be valid Python."""
    old, own, new = Pieces(base), Pieces(mine), Pieces(theirs)
    if base == theirs:  # the course has not changed this file
        return Merge(mine, [path for path in own.text if own.text[path] != old.text.get(path)])
    merged = Merge(theirs)
    filled: dict[str, str] = {}
    added: list[str] = []
    for path, text in own.functions.items():
        owner = path.rpartition(".")[0]
        if text == old.functions.get(path) or text == new.functions.get(path):
            continue
        if path in new.functions:
            if old.functions.get(path) != new.functions[path]:
                wanted, written = _signature(new.functions[path]), _signature(text)
                if wanted != written:
                    merged.lost.append(f"{path}: it is now {wanted}, yours was {written}")
                    continue
                text = _with_docstring_of(text, new.functions[path])
            filled[path] = text
        elif path in old.functions:
            merged.lost.append(f"{path}: the course does not have it any more")
            continue
        elif owner in new.heads:
            merged.text = _with_method(merged.text, owner, text)
        elif owner:
            continue  # goes with its class
        else:
            added.append(text)
        merged.kept.append(path)
    for path, head in own.heads.items():
        if path not in new.heads:
            if path in old.heads:
                merged.lost.append(f"{path}: the course does not have it any more")
            else:
                added.append(own.text[path])
                merged.kept.append(path)
        elif head != old.heads.get(path) and head != new.heads[path]:
            if old.heads.get(path) == new.heads[path]:
                merged.text = merged.text.replace(new.heads[path], head, 1)
                merged.kept.append(f"the head of {path}")
            else:
                merged.lost.append(f"the head of {path}: you and the course have changed it")
    for path in old.functions:
        if path not in own.functions and path in new.functions:
            merged.lost.append(f"{path}: you had taken it out; it is there again")
    merged.lost += [
        f"a comment outside of functions: {line}"
        for line in own.comments
        if line not in old.comments and line not in new.comments
    ]
    merged.text = fill(merged.text, filled)
    loose = [text for text in own.loose if text not in old.loose and text not in new.loose]
    if loose or added:
        merged.text = fill(merged.text, {"": "\n\n\n".join(["\n".join(loose), *added]).strip()})
        merged.kept += [lines_of(text)[0] for text in loose]
    return merged


def _signature(text: str) -> str:
    """Name, parameters and defaults. Annotations may differ."""
    node = definition(text)
    if isinstance(node, ast.ClassDef):
        raise ValueError(f"class {node.name} has no signature")
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"{node.name}({ast.unparse(node.args)})"


def _with_docstring_of(mine: str, theirs: str) -> str:
    """The reader's function under the new docstring, since that is the contract."""
    written, asked = docstring_of(definition(mine)), docstring_of(definition(theirs))
    if written is None or asked is None:
        return mine
    lines = lines_of(mine)
    docstring = lines_of(theirs)[asked.lineno - 1 : asked.end_lineno]
    lines[written.lineno - 1 : written.end_lineno] = docstring
    return "\n".join(lines) + "\n"


def _with_method(text: str, owner: str, method: str) -> str:
    lines, node = lines_of(text), definitions(ast.parse(text))[owner]
    new = indented(lines_of(method.rstrip()), lines, node.body[0])
    lines[node.end_lineno : node.end_lineno] = ["", *new]
    return "\n".join(lines) + "\n"


# ── All files ─────────────────────────────────────────────────────────────────


def merge_all(
    base: Mapping[str, str], mine: Mapping[str, str], theirs: Mapping[str, str]
) -> dict[str, Merge]:
    """Every file of `theirs` that the reader has changed, by file name. Raises UpdateError."""
    merges = {}
    for name, text in mine.items():
        if text == base.get(name) or name not in base:
            continue
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise UpdateError(
                f"exercises/{name}, line {getattr(error, 'lineno', '?')}: Python cannot read this "
                f"({getattr(error, 'msg', error)}); fix it or reset it, then update again"
            ) from None
        if name in theirs:
            merges[name] = merge(base[name], text, theirs[name])
        else:
            merges[name] = Merge("", lost=[f"{name}: the course does not have this file any more"])
    return merges


def put_back(merges: Mapping[str, Merge], copies: Mapping[str, Path]) -> list[str]:
    """Write the merged files; returns what there is to say about each."""
    said = []
    for name, merged in merges.items():
        if merged.text:
            write_whole(reader_files.folder() / name, merged.text)
        said.append(f"{name}: kept {', '.join(merged.kept) or 'nothing'}")
        said += [f"  NOT kept: {sentence}" for sentence in merged.lost]
        if merged.lost:
            said.append(f"  your file as it was: {copies[name]}")
    return said or ["You have written nothing yet: the skeletons are the new ones."]


def read_folder(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("ch[0-9][0-9]_*.py"))
    return {file.name: reader_files.text_in(file) for file in files}


# ── The two ways ────────────────────────────────────────────────────────────


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the folder says which of the two ways it is."""


def run(args: argparse.Namespace) -> int:
    try:
        if unpacked.version_of(reader_files.course_folder()) is None:
            lines = update_checkout()
        else:
            lines = update_unpacked(reader_files.course_folder())
    except (UpdateError, ReaderError) as error:
        print(markup.wrapped(str(error), width=markup.terminal_width()), file=sys.stderr)
        return 1
    print(markup.wrapped("\n".join(lines), width=markup.terminal_width()))
    return 0


def update_unpacked(folder: Path) -> list[str]:
    """Bring a folder that `minikv start` has made to the version that is installed."""
    if unpacked.version_of(folder) == minikv.__version__:
        return [
            f"This folder has version {minikv.__version__}, which is the installed one; "
            "`pip install --upgrade minikv` looks for a newer one."
        ]
    exercises, theirs = folder / "exercises", unpacked.skeletons()
    base, mine = unpacked.begun_with(folder), read_folder(exercises)
    merges = merge_all(base, mine, theirs)
    copies = {name: progress_file.back_up(exercises / name).relative_to(folder) for name in merges}
    for name, text in theirs.items():
        if name not in merges:
            write_whole(exercises / name, text)
    lines = put_back(merges, copies) + unpacked.renew_notebooks(folder)
    unpacked.record(folder)
    return lines


def update_checkout() -> list[str]:
    """Fetch the branch that this checkout follows, fast-forward, and carry the exercises over."""
    folder = reader_files.folder()
    root = folder.parent
    upstream = _git(root, "rev-parse", "--abbrev-ref", "@{upstream}", what="follows no branch")
    _git(root, "fetch", what="cannot fetch")
    if _git(root, "rev-parse", "HEAD") == _git(root, "rev-parse", upstream):
        return ["This is the newest version."]
    changed = _git(root, "diff", "--name-only", "HEAD").splitlines()
    others = [name for name in changed if not name.startswith(f"{folder.name}/")]
    if others:
        raise UpdateError(
            f"{', '.join(others)}: changed, though not an exercise. Set the changes aside "
            "(git stash) and update again."
        )
    base_commit = _git(root, "merge-base", "HEAD", upstream)
    if base_commit != _git(root, "rev-parse", "HEAD"):
        raise UpdateError(
            "This checkout has commits of its own, so git alone can bring both together: "
            "git merge @{upstream}"
        )
    base, theirs = (_tree(root, commit, folder.name) for commit in ("HEAD", upstream))
    mine = read_folder(folder)
    merges = merge_all(base, mine, theirs)
    copies = {name: progress_file.back_up(folder / name).relative_to(root) for name in merges}
    _git(root, "checkout", "HEAD", "--", folder.name)
    try:
        _git(root, "merge", "--ff-only", upstream, what="cannot go to the new version")
    except UpdateError:
        for name in merges:
            write_whole(folder / name, mine[name])
        raise
    lines = put_back(merges, copies)
    if _git(root, "diff", "--name-only", base_commit, "--", "requirements.txt", "pyproject.toml"):
        lines.append("The packages that the course needs have changed: run make setup.")
    return lines


def _tree(root: Path, commit: str, folder: str) -> dict[str, str]:
    names = _git(root, "ls-tree", "--name-only", f"{commit}:{folder}").splitlines()
    return {
        name: _git(root, "show", f"{commit}:{folder}/{name}", strip=False)
        for name in names
        if name.startswith("ch") and name.endswith(".py")
    }


def _git(root: Path, *arguments: str, what: str = "failed", strip: bool = True) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8"
        )
    except FileNotFoundError:
        raise UpdateError("git is not installed, and this checkout was made with it") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise UpdateError(f"{root.name} {what}: git: {reason[0] if reason else arguments[0]}")
    return done.stdout.strip() if strip else done.stdout
