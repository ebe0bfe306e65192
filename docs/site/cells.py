"""Notebooks as the site shows them: their stored outputs, with nothing that needs a kernel."""

import json
import re
from base64 import b64decode
from hashlib import sha256
from pathlib import Path

from links import ROOT, Links
from shown import highlighted
from tasks import Exercise, hint_html

WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
EMBEDDED = re.compile(r"""src=(['"])data:image/(svg\+xml|png);base64,([^'"]+)\1""")
SUMMARY = re.compile(r"<summary>.*?</summary>", re.DOTALL)  # a click opens it: no links inside
# An exercise's heading, and what stands in a line below it on the site.
HEADING = re.compile(r"^(### \d\d\.\d+ [^·\n]+) · (\d+ min · difficulty \d of 5)$", re.MULTILINE)
NOT_RUN = "It works in the notebook, with a kernel: on this page it stands still."


def size(data: bytes) -> tuple[int, int]:
    """Width and height of an SVG or PNG, so that a page keeps its place free."""
    if data.startswith(b"\x89PNG"):
        return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    box = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', data)
    return (round(float(box[1])), round(float(box[2]))) if box else (0, 0)


class Pictures:
    """Pictures as files beside the pages, each once."""

    def __init__(self, folder: Path, address: str):
        self.folder, self.address = folder, address
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, data: bytes, kind: str) -> str:
        """Its address, seen from a page one folder deep."""
        name = f"{sha256(data).hexdigest()[:16]}.{'svg' if kind == 'svg+xml' else kind}"
        (self.folder / name).write_bytes(data)
        return f"{self.address}/{name}"

    def taken_out(self, html: str) -> str:
        """HTML whose embedded pictures have become files, which a page fetches when it is there."""

        def kept(found: re.Match) -> str:
            data = b64decode(found[3])
            width, height = size(data)
            place = f"width='{width}' height='{height}' loading='lazy'"
            return f"{place} src='{self.keep(data, found[2])}'"

        return EMBEDDED.sub(kept, html)


def source(cell: dict) -> str:
    return "".join(cell["source"])


def on_site(file: str, wanted: set[str], pictures: Pictures, exercises: dict[str, Exercise]) -> str:
    """The text of a notebook for the site."""
    notebook = json.loads((ROOT / file).read_text(encoding="utf-8"))
    links = Links(file, wanted)
    state = notebook["metadata"].pop("widgets", {}).get(STATE, {}).get("state", {})
    cells = []
    for cell in notebook["cells"]:
        if source(cell).startswith("navigation("):
            continue  # the theme has its own
        cells.append(cell)
        if cell["cell_type"] == "markdown":
            cell["source"] = HEADING.sub(r"\1\n\n\2.", links.in_markdown(source(cell)))
            continue
        cell["outputs"] = [shown(output, state, pictures, links) for output in cell["outputs"]]
        if cell["cell_type"] == "code":
            tag(cell)
            asked = re.match(r'check\("(\d\d\.\d+)"\)', source(cell))
            if asked and asked[1] in exercises:
                cells.append(folds(exercises[asked[1]], cell["outputs"], links))
                cell["outputs"] = []
    notebook["cells"] = cells
    return json.dumps(notebook, ensure_ascii=False)


def tag(cell: dict) -> None:
    """What is folded in JupyterLab is folded here."""
    folded = cell["metadata"].pop("jupyter", {})
    tags = cell["metadata"].setdefault("tags", [])
    if source(cell).startswith("from minikv.course.reader.ladder import"):
        tags.append("remove-input")
    if folded.get("outputs_hidden") and cell["outputs"]:
        tags.append("hide-output")
    if folded.get("source_hidden"):
        tags.append("hide-input")


def shown(output: dict, state: dict, pictures: Pictures, links: Links) -> dict:
    """An output in one form: HTML where there is some, with a film in place of a widget."""
    data = output.get("data")
    if data is None:
        return output
    if WIDGET in data and "text/html" not in data:
        data["text/html"] = still(state, data[WIDGET]["model_id"])
    if "text/html" in data:
        html = pictures.taken_out("".join(data["text/html"]))
        html = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)  # the site has its own
        html = SUMMARY.sub(lambda found: re.sub(r"</?a\b[^>]*>", "", found[0]), html)
        html = re.sub(r"\b0 of (\d+) exercises passed", r"\1 exercises", links.in_html(html))
        output["data"] = {"text/html": html}
    return output


def still(state: dict, model: str) -> str:
    """What a widget's stored state shows: its pictures and texts, without buttons."""
    parts: list[str] = []

    def walk(name: str) -> None:
        one = state[name]
        if one["model_name"] == "HTMLModel":
            parts.append(one["state"].get("value", ""))
        for child in one["state"].get("children", []):
            walk(child.removeprefix("IPY_MODEL_"))

    walk(model)
    return f"<div class='still'>{''.join(parts)}<p><small>{NOT_RUN}</small></p></div>"


def folds(exercise: Exercise, outputs: list[dict], links: Links) -> dict:
    """Under a check: the contract, the hints one by one, and what the check says at first."""
    address = links.to(f"../{exercise.file}", ".html")
    parts = [
        ("The contract", f"<p>From <a href='{address}'>{exercise.file}</a>:</p>"
         + highlighted(exercise.contract)),
        *((f"Hint {n} of 3", hint_html(exercise, n)) for n in (1, 2, 3)),
        ("What the check says before you begin", "".join(
            "".join(output.get("data", {}).get("text/html", "")) for output in outputs)),
    ]  # fmt: skip
    html = "".join(
        f"<details><summary>{name}<span class='sr'> of exercise {exercise.id}</span></summary>"
        f"<div>{content}</div></details>"
        for name, content in parts
    )
    box = f"<div class='exercise'>{html}</div>"
    return {
        "cell_type": "code", "execution_count": None, "source": ["folds"],
        "id": f"x{exercise.id[3:]}",
        "metadata": {"tags": ["remove-input"]},
        "outputs": [{"output_type": "display_data", "metadata": {}, "data": {"text/html": box}}],
    }  # fmt: skip
