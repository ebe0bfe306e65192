"""The ways to open the course with one click: `python -m minikv.course buttons`.

Writes them into the README, as badges, and into every notebook: a line of links under the first
heading, and a cell that fetches the course in Google Colab. The address of the repository is
that of pyproject.toml, and nowhere else.
"""

import json
import re
import tomllib
from pathlib import Path

from minikv.course.exercises.files import write_whole

ROOT = Path(__file__).parents[3]
BRANCH = "main"
BADGES = re.compile(r"^\[!\[Open in Colab\]\([^\n]*$", re.MULTILINE)
LINKS = re.compile(r"\nOpen in \[Colab\]\([^\n]*\n")
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
    %pip install --quiet -r ../requirements.txt
    %pip install --quiet --no-deps --editable ..
    site.addsitedir(sysconfig.get_path("purelib"))"""


def repository() -> str:
    """The address of the published course."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"]


def places(notebook: str) -> dict[str, tuple[str, str]]:
    """(address, badge) of each place that opens a notebook."""
    name = repository().removeprefix("https://github.com/")
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


def in_readme(text: str) -> str:
    """The README with its badges."""
    badges = " ".join(
        f"[![Open in {place}]({badge})]({address})"
        for place, (address, badge) in places("00_start_here.ipynb").items()
    )
    return BADGES.sub(badges, text)


def in_notebook(name: str, text: str) -> str:
    """A notebook with its links, and with the cell for Colab before the first code cell."""
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["id"] != "colab"]
    links = " · ".join(f"[{place}]({address})" for place, (address, _) in places(name).items())
    heading, rest = LINKS.sub("", "".join(cells[0]["source"])).split("\n", 1)
    opening = f"{heading}\n\nOpen in {links}\n{rest}"
    cells[0]["source"] = opening.splitlines(keepends=True)
    first = next(i for i, cell in enumerate(cells) if cell["cell_type"] == "code")
    cells.insert(first, _colab_cell())
    notebook["cells"] = cells
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _colab_cell() -> dict:
    source = COLAB.format(repository=repository())
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": "colab",
        "metadata": {"jupyter": {"source_hidden": True}},
        "outputs": [],
        "source": source.splitlines(keepends=True),
    }


def run() -> int:
    readme = ROOT / "README.md"
    write_whole(readme, in_readme(readme.read_text(encoding="utf-8")))
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        write_whole(file, in_notebook(file.name, file.read_text(encoding="utf-8")))
    return 0
