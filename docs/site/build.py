"""Builds the site from what the repository stores: no notebook is run, nothing is imported.

    python docs/site/build.py [folder]      build/site by default

The pages are laid out in a folder of their own, in which links lead to pages, pictures are files
and notebooks have lost what needs a kernel. Sphinx makes HTML of that, and a warning is a failure.
"""

import os
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import api
from cells import Pictures, on_site
from links import FENCE, OUTSIDE, ROOT, Links, page_of
from shown import exercise_page, file_page, folder_page, title_of
from tasks import all_exercises

HERE = Path(__file__).parent
FRONT = ("docs/SETUP.md", "docs/GLOSSARY.md", "docs/NOTATION.md", "docs/CHEATSHEET.md")
ENGINE = (
    "docs/ENGINE.md",
    "docs/BENCHMARKS.md",
    "minikv/models/tinypy/README.md",
    "minikv/models/tinypy-hybrid/README.md",
    "minikv/models/tinypy-states/README.md",
)
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md")
# Lines of the README that a page of the site does not need.
ONLY_README = re.compile(r"<!-- only README -->\n.*?<!-- end -->\n", re.DOTALL)


def markdown_files() -> list[str]:
    """All of docs/, also what comes in later, a folder's README first. A folder with a `conf.py`
    is read by a builder of its own: the slides' sources, and this one."""
    paths = [
        path
        for path in ROOT.glob("docs/**/*.md")
        if not any((folder / "conf.py").exists() for folder in path.parents)
    ]
    paths.sort(key=lambda path: (path.parent, path.name != "README.md", path.name))
    return [path.relative_to(ROOT).as_posix() for path in paths]


def contents(notebooks: list[str], exercises: list[str]) -> str:
    """The site's contents, part by part; what docs/ has besides comes in a part of its own."""
    known = {*FRONT, *ENGINE}
    more = [file for file in markdown_files() if file not in known]
    folders: dict[str, list[str]] = {}
    for file in more:
        folder = Path(file).parent
        folders.setdefault("More" if folder == Path("docs") else folder.name, []).append(file)
    parts = [
        ("Notebooks", [page_of(file) for file in notebooks]),
        ("Keep at hand", [page_of(file) for file in FRONT]),
        ("The engine", [page_of(ENGINE[0]), "api", *map(page_of, ENGINE[1:])]),
        *((name.capitalize(), list(map(page_of, files))) for name, files in folders.items()),
        ("Exercises", [f"{numbered(file)} <{page_of(file)}>" for file in exercises]),
        ("Project", list(map(page_of, PROJECT))),
    ]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {name}\n:maxdepth: 1\n\n"
        + "\n".join(page.replace("<", "</") if "<" in page else f"/{page}" for page in pages)
        + "\n```\n"
        for name, pages in parts
    )  # fmt: skip


def numbered(file: str) -> str:
    """ "exercises/ch02_kv_cache.py" -> "02 · KV cache", as the notebook is called."""
    name = Path(file).stem
    return f"{name[2:4]} · {title_of(name)}"


def write(folder: Path, page: str, text: str) -> None:
    path = folder / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def front(readme: str) -> str:
    """The README as the front page: its moving picture has buttons, and stops."""
    film = (ROOT / "docs/block-tables.html").read_text(encoding="utf-8")
    begin = (
        "<p class='begin'><a href='notebooks/00_start_here.html'>Read the first notebook</a>"
        "<a href='docs/SETUP.html'>Run it on your machine</a></p>"
    )
    moving = re.compile(r"!\[[^\]]*\]\(docs/block-tables\.gif\)")
    text, count = moving.subn("", readme)
    # What it is, for whom and how long is seen first; then the film.
    before, start, after = text.partition("## Start\n")
    if count != 1 or not start:
        raise ValueError("README.md: the front page needs docs/block-tables.gif and ## Start")
    head, line, rest = before.partition("\n**For** ")
    facts = facts_of(readme)
    title, tag = head.split("\n\n", 2)[:2]
    more = head.split("\n\n", 2)[2]
    return (
        f"{title}\n\n{tag}\n\n```{{raw}} html\n{facts}{begin}\n```\n{line}{rest}\n"
        f"```{{raw}} html\n{film}```\n{more}\n\n{start}{after}"
    )


def facts_of(readme: str) -> str:
    """ "14 chapters · 81 exercises · about 41 hours · no GPU", from the README's own figures."""
    [exercises] = re.findall(r"and (\d+) exercises", readme)
    [hours] = re.findall(r"about (\d+) hours, of which", readme)
    chapters = len(list(ROOT.glob("notebooks/*.ipynb")))
    told = f"{chapters} chapters · {exercises} exercises · about {hours} hours · no GPU needed"
    return f"<p class='facts'>{told}</p>"


def with_anchors(glossary: str) -> str:
    """Each word can be linked to, and all of them stand at the top, by the alphabet."""
    words: list[tuple[str, str]] = []

    def anchored(row: re.Match) -> str:
        place = "word-" + re.sub(r"\W+", "-", row[1].lower()).strip("-")
        place += "-too" * sum(
            place == other for _, other in words
        )  # a head of attention, of a ring
        words.append((row[1], place))
        return f"| <span id='{place}'></span>{row[1]} |"

    text = re.sub(r"^\| (?!word |---)([^|]+) \|", anchored, glossary, flags=re.MULTILINE)
    links = " · ".join(
        f"<a href='#{place}'>{escape(word.replace('`', ''))}</a>"
        for word, place in sorted(words, key=lambda one: one[0].lower().lstrip("`*"))
    )
    first, rest = text.split("\n## ", 1)
    return f"{first}\n```{{raw}} html\n<p class='words'>{links}</p>\n```\n\n## {rest}"


def front_matter_gone(text: str) -> str:
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)


def copy_pictures(folder: Path, text: str, file: str) -> None:
    """The pictures that a page names lie where they lie in the repository."""
    for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if target.startswith(OUTSIDE):
            continue
        path, _ = Links(file, set()).resolve(target)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)


def without_keys(file: str, text: str) -> str:
    """A page for students: no exam, and no answers, unless $KEYS is set."""
    if os.environ.get("KEYS") or Path(file).name not in ("EXAM.md", "QUIZ.md"):
        return text
    if file.endswith("EXAM.md"):
        return f"{text.splitlines()[0]}\n\nIt is in the repository, for lecturers: `{file}`.\n"
    text = re.sub(r"\s*<details>.*?</details>", "", text, flags=re.DOTALL)
    return re.sub(r"The answers are folded, and\n.*\n", "Your lecturer has the answers.\n", text)


def lay_out(folder: Path) -> None:
    """Everything that Sphinx reads."""
    notebooks = [f"notebooks/{path.name}" for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
    exercises = [f"exercises/{path.name}" for path in sorted(ROOT.glob("exercises/ch*.py"))]
    shutil.copytree(HERE / "static", folder / "_static")
    shutil.copy(HERE / "conf.py", folder)
    wanted: set[str] = set()
    pictures = Pictures(folder / "_static" / "pictures", "../_static/pictures")
    known = all_exercises()
    for file in notebooks:
        write(folder, file, on_site(file, wanted, pictures, known))
        text = "\n".join(re.findall(r"!\[[^\]]*\]\([^)\s]+\)", (ROOT / file).read_text()))
        copy_pictures(folder, text, file)
    for file in ("README.md", *markdown_files(), *ENGINE[2:], *PROJECT):
        text = without_keys(file, front_matter_gone((ROOT / file).read_text(encoding="utf-8")))
        text = ONLY_README.sub("", text)
        copy_pictures(folder, text, file)
        text = Links(file, wanted).in_markdown(text)
        if file == "docs/GLOSSARY.md":
            text = with_anchors(text)
        if file == "README.md":
            text = front(text) + contents(notebooks, exercises)
        write(folder, f"{page_of(file)}.md", text)
    write(folder, "api.rst", api.page())
    for file in exercises:
        mine = [one for one in known.values() if one.file == file]
        write(
            folder,
            f"{page_of(file)}.md",
            Links(file, wanted).in_markdown(exercise_page(file, mine)),
        )
    made: set[str] = set(exercises)
    while left := sorted(wanted - made):
        made.update(left)
        for file in left:
            if (ROOT / file).is_dir():
                write(folder, f"{page_of(file)}/index.md", folder_page(file, wanted))
            else:
                write(folder, f"{page_of(file)}.md", file_page(file))


def version() -> str:
    return re.findall(r'__version__ = "(.+)"', (ROOT / "minikv/version.py").read_text())[0]


def main(out: Path) -> int:
    """Sphinx's exit status."""
    pages = out.with_name(f"{out.name}-pages")
    for folder in (pages, out):
        shutil.rmtree(folder, ignore_errors=True)
    pages.mkdir(parents=True)
    lay_out(pages)
    settings = {"MINIKV_ROOT": str(ROOT), "MINIKV_VERSION": version()}
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto"]
    done = subprocess.run(
        [*command, "-b", "html", str(pages), str(out)], env=os.environ | settings, check=False
    )
    for page in out.rglob("*.html"):
        page.write_text(corrected(page.read_text(encoding="utf-8")), encoding="utf-8")
    return done.returncode


FOLD = re.compile(
    r'<details class="admonition (hide[^"]*)">\s*<summary aria-label="Toggle hidden content">\s*'
    r"<p[^>]*>.*?</p>\s*<p[^>]*>.*?</p>\s*</summary>"
)
# The theme prints a page's title once more: a second h1, and the page's own is printed anyway.
PRINTED_TITLE = re.compile(r'(<div id="jb-print-docs-body" class="onlyprint">)\s*<h1>.*?</h1>')
FOLDED = {"above-input": "Show the code", "below-input": "Show what comes out"}


def corrected(html: str) -> str:
    """MyST-NB's folds as HTML allows them: one line of text, which is also what is read out."""

    def plain(found: re.Match) -> str:
        [words] = [FOLDED[name] for name in found[1].split() if name in FOLDED]
        return f'<details class="{found[1]}"><summary>{words}</summary>'

    return PRINTED_TITLE.sub(r"\1", FOLD.sub(plain, html))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()))
