"""The reference of `minikv`'s public names, from the text of its files: nothing is imported."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from links import ROOT
from tasks import marked

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign
ENTRY = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)", re.DOTALL)
TITLE = "The engine's names"
OPENING = """Everything that ``import minikv`` offers, in the order in which the engine's files are
read. Signatures and texts are those of the code. Names that begin with an underscore are private
and left out."""


def public_names() -> list[tuple[str, list[str]]]:
    """(file, names) of what `minikv/__init__.py` passes on, in the order its docstring gives."""
    tree = ast.parse((ROOT / "minikv/__init__.py").read_text(encoding="utf-8"))
    found = {
        node.module.removeprefix("minikv."): [alias.name for alias in node.names]
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and node.module not in ("minikv.assembly", "minikv.version")
    }
    # The core's files as they are read; then a wing's, of which `minikv` hands something on.
    order = re.findall(r"\w+", (ast.get_docstring(tree) or "").split("\n\n")[-1])
    order += sorted(set(found) - set(order))
    return [(_file_of(name), found[name]) for name in sorted(found, key=order.index)]


def _file_of(name: str) -> str:
    file = f"minikv/{name}.py"
    return file if (ROOT / file).exists() else f"minikv/{name}/__init__.py"


def definitions(tree: ast.Module) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return found


def prose(doc: str | None) -> str:
    """A docstring as HTML: paragraphs, lists of `name: what it is`, and indented text as it is."""
    out = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(doc or "")):
        if part.startswith("    ") or "─" in part:
            out.append(f"<pre tabindex='0'>{marked(inspect.cleandoc(part))}</pre>")
            continue
        lead: list[str] = []
        entries: list[str] = []
        for line in part.splitlines():
            if ENTRY.fullmatch(line):
                entries.append(line)
            elif entries and line:
                entries[-1] += f" {line.strip()}"
            else:
                lead.append(line)
        if any(lead):
            out.append(f"<p>{marked(' '.join(lead))}</p>")
        if entries:
            pairs = [ENTRY.fullmatch(entry).groups() for entry in entries]  # type: ignore[union-attr]
            rows = (f"<dt>{name}</dt><dd>{marked(text)}</dd>" for name, text in pairs)
            out.append(f"<dl class='entries'>{''.join(rows)}</dl>")
    return "".join(out)


def raw(html: str, indent: str) -> list[str]:
    if not html:
        return []
    lines = [f"{indent}   {line}" if line else "" for line in html.splitlines()]
    return ["", f"{indent}.. raw:: html", "", *lines, ""]


def signature(node: ast.FunctionDef, method: bool) -> str:
    arguments = ast.unparse(node.args)
    if method:
        arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({arguments}){returns}"


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    return {ast.unparse(one).partition("(")[0] for one in node.decorator_list}


def class_signature(node: ast.ClassDef) -> str:
    """What it is made with: `__init__`'s arguments, or the fields of a dataclass."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return signature(inner, True).partition(" -> ")[0]
    if "dataclass" not in decorators(node) and "NamedTuple" not in map(ast.unparse, node.bases):
        return ""
    fields = [
        ast.unparse(inner)
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
        and not inner.target.id.startswith("_")
    ]  # fmt: skip
    return f"({', '.join(re.sub(r' = field.*', ' = …', one) for one in fields)})"


def fields(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """The annotated names of a class, with the comments behind them."""
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            name = inner.target.id
            if not name.startswith("_"):
                yield f"   .. py:attribute:: {name}"
                yield f"      :type: {ast.unparse(inner.annotation)}"
                comment = lines[inner.end_lineno - 1].partition("  # ")[2]
                yield from raw(f"<p>{marked(comment)}</p>" if comment else "", "      ")
                yield ""


def class_text(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    yield f".. py:class:: {node.name}{class_signature(node)}"
    made_by = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    yield from raw(prose(ast.get_docstring(node)), "   ")
    for init in made_by:
        yield from raw(prose(ast.get_docstring(init)), "   ")
    yield ""
    yield from fields(node, lines)
    for inner in node.body:
        if not isinstance(inner, ast.FunctionDef) or inner.name.startswith("_"):
            continue
        marks = decorators(inner)
        if any(mark.endswith(".setter") for mark in marks):
            continue
        if marks & {"property", "cached_property", "functools.cached_property"}:
            yield f"   .. py:property:: {inner.name}"
            if inner.returns:
                yield f"      :type: {ast.unparse(inner.returns)}"
        else:
            yield f"   .. py:method:: {inner.name}{signature(inner, 'staticmethod' not in marks)}"
            yield from (f"      :{m}:" for m in ("staticmethod", "classmethod") if m in marks)
        yield from raw(prose(ast.get_docstring(inner)), "      ")
        yield ""


def page() -> str:
    """The whole reference, as reStructuredText."""
    out = [TITLE, "=" * len(TITLE), "", OPENING, "", ".. py:module:: minikv", ""]
    for file, names in public_names():
        text = (ROOT / file).read_text(encoding="utf-8")
        tree, title = ast.parse(text), Path(file).stem
        out += [title, "-" * len(title), *raw(prose(ast.get_docstring(tree)), ""), ""]
        found = definitions(tree)
        for name in names:
            node = found[name]
            if isinstance(node, ast.ClassDef):
                out += class_text(node, text.splitlines())
            elif isinstance(node, ast.FunctionDef):
                out += [f".. py:function:: {name}{signature(node, False)}"]
                out += [*raw(prose(ast.get_docstring(node)), "   "), ""]
            else:
                out += [f".. py:data:: {name}", f"   :value: {ast.unparse(node.value)}", ""]
    return "\n".join(out) + "\n"
