"""Python text with colours, and pages made of a file's text."""

import ast
import json
import re
from html import escape
from pathlib import Path

from links import ROOT, page_of
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, TextLexer
from tasks import Exercise, hint_html

NO_SEARCH = "---\norphan: true\nnosearch: true\n---\n"  # words of the course alone are found


def highlighted(text: str, anchors: bool = False, python: bool = True) -> str:
    """`text` as Sphinx shows code. With anchors, line 12 is found at `#line-12`."""
    more = {"linenos": "inline", "lineanchors": "line"} if anchors else {}
    lexer = PythonLexer() if python else TextLexer()
    html = highlight(text, lexer, HtmlFormatter(wrapcode=False, **more))
    html = re.sub(r'<a id="(line-\d+)"[^>]*></a>', r'<span id="\1"></span>', html)
    html = html.replace("<pre>", "<pre tabindex='0'>")  # it scrolls, so the keyboard reaches it
    return f"<div class='highlight-python notranslate'>{html}</div>"


def first_line(path: Path) -> str:
    """What a module, or a file of data, says it is."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return text.partition("\n")[0].removeprefix("# ")
    doc = ast.get_docstring(ast.parse(text)) or ""
    return doc.split("\n\n")[0].replace("\n", " ")


def file_page(file: str) -> str:
    """A page with a file's whole text, which the site's contents leave out."""
    return f"{NO_SEARCH}# {file}\n{_text(file)}"


def title_of(folder: str) -> str:
    """What a chapter is called in the first line of its notebook: "CPU kernels"."""
    notebook = json.loads((ROOT / f"notebooks/{folder[2:]}.ipynb").read_text(encoding="utf-8"))
    return "".join(notebook["cells"][0]["source"]).split("\n")[0].partition(" · ")[2]


def exercise_page(file: str, exercises: list[Exercise]) -> str:
    """A page with a chapter's exercises: what each asks for, its hints, and the file itself."""
    name = Path(file).stem
    out = [
        f"# Exercises {name[2:4]} · {title_of(name)}\n",
        f"They are in `{file}`. The [notebook](../notebooks/{name[2:]}.ipynb) leads to each.\n",
    ]
    for one in exercises:
        out += [
            f"## {one.id} {one.title}\n",
            f"{one.about}\n",
            f"```{{raw}} html\n{highlighted(one.contract)}\n{folded_hints(one)}\n```\n",
        ]
    return "\n".join([*out, f"## The file\n\n`{file}`, as you find it.\n", _text(file)])


def folded_hints(one: Exercise) -> str:
    html = "".join(
        f"<details><summary>Hint {n} of 3<span class='sr'> of exercise {one.id}</span></summary>"
        f"<div>{hint_html(one, n)}</div></details>"
        for n in (1, 2, 3)
    )
    return f"<div class='exercise'>{html}</div>"


def _text(file: str) -> str:
    path = ROOT / file
    html = highlighted(path.read_text(encoding="utf-8"), True, path.suffix == ".py")
    return f"\n```{{raw}} html\n{html}\n```\n"


def folder_page(file: str, wanted: set[str]) -> str:
    """A page that lists the modules of a folder, and its mistakes."""
    rows = []
    for path in sorted([*(ROOT / file).glob("*.py"), *(ROOT / file).glob("*.toml")]):
        name = path.relative_to(ROOT).as_posix()
        if path.name != "__init__.py":
            wanted.add(name)
            # The page lies in the folder's own folder, beside those of its files.
            page = Path(page_of(name)).name
            rows.append(f"- [{path.name}]({page}.md): {escape(first_line(path), False)}")
    return f"{NO_SEARCH}# {file}\n\n" + "\n".join(rows) + "\n"
