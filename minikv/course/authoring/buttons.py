"""What is written into the README and the notebooks: `python -m minikv.course buttons`.

The address of the published course: into the README (badges, and the line that fetches the
course), into every notebook (a line of links under the first heading, and a cell that fetches the
course in Google Colab) and into CITATION.cff. It is `Repository` in pyproject.toml, and is written
nowhere else. Without one, all of these are left out. And under the headings of sections the routes
that take them, which are those of routes.toml.
"""

import json
import re
import tomllib
from pathlib import Path

from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.reader import routes

ROOT = Path(__file__).parents[3]
BRANCH = "main"
BADGES = re.compile(r"(<!-- badges -->\n)(?:\[!\[Open in [^\n]*\n)?")
FETCH = re.compile(r"^(?:git clone|cd)\b.*# (?:the course|a clone .+)\n", re.MULTILINE)
LINKS = re.compile(r"\nOpen in \[Colab\]\([^\n]*\n")
CITED = re.compile(r"^repository-code:.*\n", re.MULTILINE)
COLAB = """\
# In Google Colab only: install the course.
import site
import sys
import sysconfig

if "google.colab" in sys.modules:
    course = "{repository}"
    %cd -q /content
    ![ -d minikv ] || git clone --quiet --depth 1 {{course}} minikv
    %cd -q minikv/notebooks
    %pip install --quiet -c ../constraints.txt --editable .. transformers matplotlib packaging
    site.addsitedir(sysconfig.get_path("purelib"))"""


def repository() -> str | None:
    """The address of the published course; None as long as there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository")


def places(notebook: str, address: str) -> dict[str, tuple[str, str]]:
    """(address, badge) of each place that opens a notebook."""
    name = address.removeprefix("https://github.com/")
    return {
        "Colab": (
            f"https://colab.research.google.com/github/{name}/blob/{BRANCH}/notebooks/{notebook}",
            "https://colab.research.google.com/assets/colab-badge.svg",
        ),
        "Binder": (
            f"https://mybinder.org/v2/gh/{name}/{BRANCH}?urlpath=lab/tree/notebooks/{notebook}",
            "https://mybinder.org/badge_logo.svg",
        ),
        "Codespaces": (
            f"https://codespaces.new/{name}?quickstart=1",
            "https://github.com/codespaces/badge.svg",
        ),
    }


def in_readme(text: str, address: str | None) -> str:
    """The README with its badges, and the line that begins from nothing."""
    badges, fetch = "", "cd minikv       # a clone of this repository, or its archive, unpacked\n"
    if address:
        badges = " ".join(
            f"[![Open in {place}]({badge})]({link})"
            for place, (link, badge) in places("00_start_here.ipynb", address).items()
        )
        badges += "\n"
        fetch = f"git clone {address} minikv && cd minikv  # the course\n"
    return FETCH.sub(fetch, BADGES.sub(rf"\g<1>{badges}", text), count=1)


def in_citation(text: str, address: str | None) -> str:
    line = f"repository-code: {address}\n" if address else ""
    return CITED.sub("", text) + line


def in_notebook(name: str, text: str, address: str | None) -> str:
    """A notebook with its links and the marks of the routes, and with the cell for Colab before
    the first code cell."""
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["id"] != "colab"]
    heading, rest = LINKS.sub("", "".join(cells[0]["source"])).split("\n", 1)
    if address:
        links = " · ".join(f"[{at}]({link})" for at, (link, _) in places(name, address).items())
        rest = f"\nOpen in {links}\n{rest}"
        first = next(i for i, cell in enumerate(cells) if cell["cell_type"] == "code")
        cells.insert(first, _colab_cell(address))
    cells[0]["source"] = f"{heading}\n{rest}".splitlines(keepends=True)
    prose = [cell for cell in cells if cell["cell_type"] == "markdown"]
    sources = routes.marked(name[:2], ["".join(cell["source"]) for cell in prose])
    for cell, source in zip(prose, sources, strict=True):
        cell["source"] = source.splitlines(keepends=True)
    notebook["cells"] = cells
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _colab_cell(address: str) -> dict:
    source = COLAB.format(repository=address)
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": "colab",
        "metadata": {"jupyter": {"source_hidden": True}},
        "outputs": [],
        "source": source.splitlines(keepends=True),
    }


def run() -> int:
    address = repository()
    for name, written in (("README.md", in_readme), ("CITATION.cff", in_citation)):
        text = (ROOT / name).read_text(encoding="utf-8")
        write_whole(ROOT / name, written(text, address))
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = file.read_text(encoding="utf-8")
        write_whole(file, in_notebook(file.name, text, address))
    return 0
