"""Where each file of the repository is found on the site, and links rewritten to say so."""

import re
from os.path import normpath, relpath
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = ("http:", "https:", "mailto:", "#", "data:")
PAGES = {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}
SHOWN = (".py", "", ".toml", ".txt")  # files that get a page of their own once one links to them
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1?\2[ \t]*$", re.DOTALL | re.MULTILINE)
MARKDOWN = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
HTML = re.compile(r"""(href=)(["'])(.*?)\2""")


def page_of(file: str) -> str:
    """The page of a file, both relative to their roots: "docs/SETUP.md" -> "docs/SETUP"."""
    if file in PAGES:
        return PAGES[file]
    if file.endswith("/README.md"):
        return file.removesuffix("/README.md") + "/index"
    name, dot, kind = file.rpartition(".")
    if dot and kind in ("md", "ipynb"):
        return name
    if dot and kind == "py":
        return f"source/{name}" if not file.startswith("exercises/") else name
    return f"source/{file}"


class Links:
    """Rewrites the links of one file, and keeps which other files need a page."""

    def __init__(self, file: str, wanted: set[str]):
        self.file, self.wanted = file, wanted
        self.folder = str(Path(page_of(file)).parent)

    def resolve(self, target: str) -> tuple[str, str]:
        """(file or folder of the repository, anchor). Raises ValueError if there is none."""
        path, _, anchor = target.partition("#")
        path = normpath(Path(self.file).parent / path) if path else self.file
        if path.startswith("..") or not (ROOT / path).exists():
            raise ValueError(f"{self.file}: {target!r} leads to nothing")
        return path, anchor

    def to(self, target: str, suffix: str) -> str:
        """A link that works on the site. `suffix` is what a page's name ends in."""
        if target.startswith(OUTSIDE):
            return target
        path, anchor = self.resolve(target)
        if path.startswith("tests/"):
            return ""  # no page: words alone
        whole = ROOT / path
        if whole.suffix in (".md", ".ipynb"):
            page, suffix = page_of(path), whole.suffix if suffix == ".md" else suffix
        elif whole.is_dir() or whole.suffix in SHOWN:
            self.wanted.add(path)
            page = page_of(path) + ("/index" if whole.is_dir() else "")
            line = re.fullmatch(r"line=(\d+)", anchor)
            anchor = f"line-{int(line[1]) + 1}" if line else anchor
        else:  # a picture
            return relpath(path, self.folder)
        return relpath(page, self.folder) + suffix + (f"#{anchor}" if anchor else "")

    def in_markdown(self, text: str) -> str:
        """Links outside code blocks."""
        out, end = [], 0
        for fence in FENCE.finditer(text):
            out += [self._some(text[end : fence.start()]), fence[0]]
            end = fence.end()
        return "".join([*out, self._some(text[end:])])

    def _some(self, text: str) -> str:
        def markdown(found: re.Match) -> str:
            mark, words, target = found.groups()
            words = MARKDOWN.sub(markdown, words)
            if mark and target.startswith(OUTSIDE):
                return words  # a badge from another machine: its link says what it is
            if mark:
                return f"![{words}]({self.to(target, '')})"
            address = self.to(target, ".md")
            return f"[{words}]({address})" if address else words

        return self.in_html(MARKDOWN.sub(markdown, text))

    def in_html(self, text: str) -> str:
        return HTML.sub(lambda f: f"{f[1]}{f[2]}{self.to(f[3], '.html')}{f[2]}", text)
