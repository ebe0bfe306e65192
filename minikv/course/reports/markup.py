"""What a reader's pages are made of: paragraphs, badges, and links that open a file.

Every page stands on its own: it has no style sheet, takes its text colour from the theme
around it, and never says anything by colour alone. In JupyterLab a link opens the exercise
file beside the notebook, at the line. Anywhere else it is an ordinary link.
"""

import json
import os
import re
import shutil
import textwrap
from html import escape
from pathlib import Path

from minikv.course.exercise_data import reader_files

# Of Okabe and Ito's palette. Black can be read on all of them.
GREEN, VERMILION, SKY, ORANGE = "#009E73", "#D55E00", "#56B4E9", "#E69F00"
INK = "#1a1a1a"
ORDINARY_WIDTH = 100  # columns of text
WHOLE_WORDS = "word-break:normal;overflow-wrap:normal;overflow-x:auto"  # JupyterLab breaks them


# ── Text ──────────────────────────────────────────────────────────────────────


def terminal_width() -> int:
    """Columns of text in this terminal, 100 at most."""
    return min(ORDINARY_WIDTH, shutil.get_terminal_size((ORDINARY_WIDTH, 24)).columns)


def wrapped(text: str, indent: str = "", width: int = ORDINARY_WIDTH) -> str:
    """Each line of `text` wrapped; what did not fit continues two columns further right."""
    return "\n".join(
        textwrap.fill(
            line, width, initial_indent=indent, subsequent_indent=indent + _margin(line) + "  ",
            break_long_words=False, break_on_hyphens=False, replace_whitespace=False,
        )
        for line in text.splitlines()
    )  # fmt: skip


def filled(text: str, width: int) -> str:
    """Paragraphs in lines of this width, and tables of two columns. What is indented stays."""
    return "\n\n".join(_filled(block, width) for block in text.strip().split("\n\n"))


def _filled(block: str, width: int) -> str:
    if block.startswith(" "):
        return block
    items: list[str] = []
    for line in block.splitlines():
        if items and (line.startswith(" ") or "  " not in items[-1]):
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    columns = [re.match(r"\S.*?\s{2,}|", one) for one in items]
    return "\n".join(
        textwrap.fill(one, width, subsequent_indent=" " * (found.end() if found else 0),
                      break_long_words=False, break_on_hyphens=False)
        for one, found in zip(items, columns, strict=True)
    )  # fmt: skip


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def ago(seconds: float) -> str:
    """A time that has passed, in words: "12 minutes ago"."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def hours(minutes: int) -> str:
    """ "45 min", "2 h", "14 h 30 min"."""
    whole, rest = divmod(minutes, 60)
    return " ".join([f"{whole} h"] * bool(whole) + [f"{rest} min"] * bool(rest or not whole))


# ── HTML ──────────────────────────────────────────────────────────────────────


def marked(text: str) -> str:
    """Plain text as HTML. What stands in `backquotes` is code, and a place in an exercise file
    is a link to it."""
    text = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text)).replace("\n", "<br>")
    folder = re.escape(reader_files.folder().name)
    return re.sub(
        rf"{folder}/(ch\d\d_\w+\.py)(?:, line (\d+))?",
        lambda place: link(reader_files.folder() / place[1], int(place[2] or 1), place[0]),
        text,
    )


def paragraphs(text: str) -> str:
    """Plain text with blank lines between paragraphs, as HTML."""
    blocks = textwrap.dedent(text).strip().split("\n\n")
    return "".join(
        f"<p style='text-align:left'>{marked(' '.join(block.split()))}</p>" for block in blocks
    )


def badge(text: str, color: str) -> str:
    """A word on a coloured ground, never broken in two."""
    style = f"background:{color};color:{INK};padding:1px 7px;border-radius:3px;white-space:nowrap"
    return f"<b style='{style}'>{escape(text)}</b>"


def block(color: str, *parts: str) -> str:
    """Lines of HTML, one under the other, beside a coloured bar."""
    style = f"border-left:4px solid {color};padding:2px 12px;max-width:60em;text-align:left"
    lines = "".join(f"<div style='margin:3px 0'>{part}</div>" for part in parts if part)
    return f"<div style='{style}'>{lines}</div>"


def folded(summary: str, content: str, is_open: bool = False) -> str:
    """HTML under a line that opens it."""
    return (
        f"<details{' open' if is_open else ''}><summary>{summary}</summary>"
        f"<div style='margin:2px 0 6px 18px'>{content}</div></details>"
    )


def preformatted(text: str) -> str:
    return f"<pre style='text-align:left;white-space:pre-wrap;{WHOLE_WORDS}'>{escape(text)}</pre>"


# ── Links and buttons ─────────────────────────────────────────────────────────


def open_notebook() -> Path | None:
    """The notebook for which JupyterLab started this process; None if there is no such page.

    Notebooks that are only run and stored have none.
    """
    name = os.environ.get("JPY_SESSION_NAME", "")
    return Path(name) if name.endswith(".ipynb") else None


def server_root() -> Path | None:
    """The folder that JupyterLab shows, if a notebook is open in it; else None."""
    if open_notebook() is None:
        return None
    from jupyter_core.paths import jupyter_runtime_dir

    server = Path(jupyter_runtime_dir(), f"jpserver-{os.environ.get('JPY_PARENT_PID')}.json")
    try:
        return Path(json.loads(server.read_text(encoding="utf-8"))["root_dir"]).resolve()
    except (OSError, ValueError, KeyError):  # a kernel on another machine
        return None


def link(file: Path, line: int, text: str) -> str:
    """`text`, which is HTML, as a link to a line of a file."""
    command = _opens_beside(file, line)
    if command:
        return f"<a href='#' {command}>{text}</a>"
    place = Path(os.path.relpath(file)).as_posix() + (f"#line={line - 1}" if line > 1 else "")
    return f'<a href="{escape(place)}">{text}</a>'


def open_button(file: Path, line: int) -> str:
    """A button that opens a file beside the notebook, at a line; nothing where none can."""
    command = _opens_beside(file, line)
    return command and _button(f"Open the file beside, line {line}", f"Opens {file.name}", command)


def reload_button(file: Path) -> str:
    """A button that opens a file as it is on the disk; nothing where none can."""
    command = _opens_beside(file, 1, "docmanager:reload")
    return command and _button("Load the file again", f"Loads {file.name} from the disk", command)


def check_button() -> str:
    """A button that runs its own cell again. It saves nothing: an editor that shows an older text
    than the disk would write it back."""
    return _button("Check", "Checks the file as it was saved", _command("notebook:run-cell"))


def _opens_beside(file: Path, line: int, then: str = "rendermime:handle-local-link") -> str:
    root, file = server_root(), file.resolve()
    if root is None or not file.is_relative_to(root):
        return ""
    # The usual second command finds the file open, wherever that is, and goes to the line.
    return _command(
        "docmanager:open", then,
        path=file.relative_to(root).as_posix(), factory="Editor",
        options={"mode": "split-right"}, id=f"#line={line - 1}",
    )  # fmt: skip


def _command(*commands: str, **arguments: object) -> str:
    """The attributes by which JupyterLab runs its commands at a click, all with one set of
    arguments."""
    given = json.dumps({"commands": commands, "args": arguments})
    return (
        "data-commandlinker-command='apputils:run-all-enabled' "
        f'data-commandlinker-args="{escape(given)}"'
    )


def _button(text: str, tooltip: str, command: str) -> str:
    classes = "jupyter-widgets jupyter-button widget-button"  # as the buttons of the panel
    return (
        f"<button type='button' class='{classes}' style='width:auto;margin:2px' "
        f"title='{escape(tooltip)}' {command}>{escape(text)}</button>"
    )
