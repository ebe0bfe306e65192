"""The exercises as the chapters' manifests and the skeletons have them, read and never run."""

import ast
import inspect
import json
import re
import tomllib
from dataclasses import dataclass
from html import escape

from links import ROOT

MATTERS = re.compile(r"^### (\d\d\.\d+) .*\n+\*\*Why it matters\.\*\* (.+)", re.MULTILINE)
MARK = re.compile(r"^ *# ── (\d\d\.\d+) .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    about: str  # why it matters, how long it takes
    hints: tuple[str, ...]
    contract: str  # what the skeleton has of it: signatures and docstrings
    file: str


def contracts(text: str) -> dict[str, str]:
    """What stands under each exercise's mark in a skeleton, without the line that raises."""
    found: dict[str, list[str]] = {}
    lines = text.splitlines()
    spans = [
        (node.decorator_list[0].lineno if node.decorator_list else node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    for mark in MARK.finditer(text):
        line = text.count("\n", 0, mark.end()) + 1
        after = [(start, -end) for start, end in spans if start >= line]
        if not after:
            continue
        start, end = min(after)
        piece = [row for row in lines[start - 1 : -end] if "raise NotImplementedError(" not in row]
        found.setdefault(mark[1], []).append(inspect.cleandoc("\n" + "\n".join(piece)))
    return {id_: "\n\n\n".join(pieces) for id_, pieces in found.items()}


def all_exercises() -> dict[str, Exercise]:
    """Every exercise by its id."""
    found = {}
    for path in sorted(ROOT.glob("minikv/course/chapters/ch*/chapter.toml")):
        file = f"exercises/{path.parent.name}.py"
        skeleton = contracts((ROOT / file).read_text(encoding="utf-8"))
        notebook = ROOT / f"notebooks/{path.parent.name[2:]}.ipynb"
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        texts = "\n".join("".join(cell["source"]) for cell in cells)
        matters = dict(MATTERS.findall(texts))
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
        for id_, one in manifest.items():
            if isinstance(one, dict):
                hints = tuple(one[f"hint_{number}"].strip("\n") for number in (1, 2, 3))
                title, *about = one["about"].split(" · ")[:-1]
                said = f"{matters[id_]} {', '.join(about)}."
                found[id_] = Exercise(id_, title, said, hints, skeleton[id_], file)
    return found


def marked(text: str) -> str:
    """Plain text as HTML: what stands in backquotes is code, and *so* is stressed."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    return re.sub(r"(?<![\w*])\*(\w[\w ]*)\*(?![\w*])", r"<em>\1</em>", text)


def hint_html(exercise: Exercise, number: int) -> str:
    text = exercise.hints[number - 1]
    if number == 3:
        return f"<pre>{escape(text, quote=False)}</pre>"
    return "".join(f"<p>{marked(' '.join(p.split()))}</p>" for p in text.split("\n\n"))
