"""A chapter as a reader meets it: JupyterLab in a browser, the notebook, the panel, the editor.

Only these tests see that the page's widgets move and can be read, in both themes, and that
its links and buttons do in JupyterLab what they are for. What every chapter has is tried in one.
Under it stand the players of the others, for these differ. Cells that none of this needs are not
run: nbval runs them. Without Chromium or playwright the tests are skipped, with a line that says
why. `MINIKV_SCREENSHOTS` names a folder for the pictures; otherwise they go where pytest keeps
its temporary files. Every wait has a limit, and whatever was started is ended.
"""

import ast
import json
import os
import secrets
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.request import urlopen

import pytest
from chromium import WAIT, needs_browser
from thorough import thorough_after
from waiting import PATIENCE, until

from minikv.course.exercise_data.manifest import chapter_of

ROOT = Path(__file__).parents[2]
# The one whose page is opened.
CHAPTER = chapter_of("07")
# By chapter: one with this name.
PLAYERS = {
    "04": "the block tables",
    "07": "the radix tree",
    "09": "the walks",
    "10": "a block with an outlier",
    "11": "the ring",
    "12": "the tiers",
}
BEGIN = 300_000  # ms until the page of a notebook is there
POLLING = 100  # ms: playwright's own way asks for a picture of the page each time
RUN = 300_000  # ms for some cells of the notebook, on a slow machine that does other things too
pytestmark = [pytest.mark.thorough, needs_browser("JupyterLab was not tried in a browser")]

SELECT = """cells => {
    const notebook = jupyterapp.shell.currentWidget.content;
    notebook.deselectAll();
    notebook.activeCellIndex = cells[0];
    cells.forEach(index => notebook.select(notebook.widgets[index]));
}"""
# Some code cells are done when each has been run, or one has failed. The answer is read from the
# page's own model, so that no cell need be in view.
DONE = """indices => {
    const all = jupyterapp.shell.currentWidget.content.widgets;
    const cells = indices.map(index => all[index]);
    const errors = cells.flatMap(cell => cell.model.outputs.toJSON())
        .filter(output => output.output_type === 'error');
    if (errors.length) return errors.map(error => `${error.ename}: ${error.evalue}`).join('; ');
    return cells.every(cell => cell.model.executionCount) && 'all have run';
}"""
IDLE = "() => jupyterapp.shell.currentWidget?.sessionContext?.kernelDisplayStatus === 'idle'"
# How much a text differs from what it stands on, from 1 to 21 (WCAG 2); 4.5 can be read.
CONTRAST = """text => {
    const numbers = css => css.match(/[\\d.]+/g).map(Number);
    const lightness = css => {
        const [r, g, b] = numbers(css).map(x => x / 255)
            .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    let paper = text;
    while (numbers(getComputedStyle(paper).backgroundColor)[3] === 0) paper = paper.parentElement;
    const both = [getComputedStyle(text).color, getComputedStyle(paper).backgroundColor]
        .map(lightness).sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05);
}"""
CONTRASTS = f"texts => texts.map(text => [text.innerText, ({CONTRAST})(text)])"
# Those of some boxes that scroll sideways.
SIDEWAYS = (
    "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.className)"
)
# The upper left pixel of an image.
CORNER = """image => {
    const canvas = new OffscreenCanvas(4, 4).getContext('2d');
    canvas.drawImage(image, 0, 0);
    return [...canvas.getImageData(3, 3, 1, 1).data];
}"""
# The document in front, and the line of its cursor from 1, if it is a file.
IN_FRONT = """() => {
    const widget = jupyterapp.shell.currentWidget;
    const line = widget.content.editor?.getCursorPosition().line;
    return [widget.context.path, line === undefined ? null : line + 1];
}"""
# All pixels of an image, or nothing while it is being loaded. Its address tells nothing: that
# changes with its tooltip, too.
PIXELS = """image => {
    if (!image.complete || !image.naturalWidth) return null;
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    canvas.getContext('2d').drawImage(image, 0, 0);
    return canvas.toDataURL();
}"""
MOVED = f"""([box, before, caption, words]) => {{
    const now = ({PIXELS})(box.querySelector("img"));
    return now && now !== before && caption.textContent !== words;
}}"""


def stored_cells(number):
    file = ROOT / "notebooks" / f"{number}_{chapter_of(number).name}.ipynb"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def place(cells, words):
    """The first code cell with these words in it."""
    return next(
        i for i, cell in enumerate(cells) if cell["cell_type"] == "code" and words in cell["source"]
    )


def last(cells):
    """The words of the cell that ends the notebook."""
    return next(cell["source"] for cell in reversed(cells) if not cell["id"].startswith("of-"))


def names(source):
    """Those that a cell takes from others, that it makes, and those whose object it may change."""
    used, made, changed = set(), set(), set()
    for node in ast.walk(ast.parse(source)):
        changes = None
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            changes = called if isinstance(called, ast.Attribute) else None  # x.add(…), in a line
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            changes = node  # x.y = … or x[i] = …
        if changes is not None:
            changed |= {inner.id for inner in ast.walk(changes) if isinstance(inner, ast.Name)}
    return used - made, made, changed


def needed(cells, last):
    """The code cells that have to run for the cell `last`, and that cell."""
    found, missing = [], set()
    for i in range(last, -1, -1):
        source = cells[i]["source"]
        if cells[i]["cell_type"] == "code" and "google.colab" not in source:
            used, made, changed = names(source)
            if i == last or missing & (made | changed) or "*" in made:
                found.insert(0, i)
                missing = missing - made | used
    return found


@cache
def opened():
    """(the cells of the notebook that is opened, by chapter which have to run for its player)."""
    cells, to_run = stored_cells(CHAPTER.number), {}
    for number in PLAYERS:
        theirs = stored_cells(number)
        indices = needed(theirs, place(theirs, "widget("))
        if number != CHAPTER.number:
            own = [theirs[i] | {"id": f"of-{number}-{i}"} for i in indices]
            indices = list(range(len(cells), len(cells) + len(own)))
            cells += own
        to_run[number] = indices
    return cells, to_run


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of what a reader opens, so that nothing is written into the checkout, with the other
    players in the notebook that is opened. What that one stores is left out: whatever these tests
    see was made in this JupyterLab."""
    folder = tmp_path_factory.mktemp("course")
    for name in ("notebooks", "exercises"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*", "__pyc*"))
    file = folder / "notebooks" / f"{CHAPTER.number}_{CHAPTER.name}.ipynb"
    notebook = json.loads(file.read_text(encoding="utf-8"))
    notebook["cells"] = [
        cell | {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else cell
        for cell in opened()[0]
    ]
    file.write_text(json.dumps(notebook), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def address(course, tmp_path_factory):
    """A server of its own: its settings are JupyterLab's own, whatever its user's are."""
    home = tmp_path_factory.mktemp("jupyter")
    token = secrets.token_hex(16)
    own = {
        name: str(home / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(home), "JUPYTERLAB_WORKSPACES_DIR": str(home)}
    own |= {"MINIKV_EXERCISES": str(course / "exercises")}
    own |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/quick'}"}
    own |= {"OMP_NUM_THREADS": "1"}  # on a busy machine threads would wait for each other
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
            "--ip=127.0.0.1",  # at the first free port from 8888 on
            f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={course}",
            "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None",
            # Should pytest itself be killed, it does not stay for ever.
            "--ServerApp.shutdown_no_activity_timeout=600",
            "--MappingKernelManager.cull_idle_timeout=600",
        ],
        env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:

        def where():
            """Where it answers, from the file that it writes when it begins."""
            assert server.poll() is None, "JupyterLab ended by itself"
            with suppress(OSError, ValueError):
                [told] = home.rglob("jpserver-*.json")
                here = f"http://127.0.0.1:{json.loads(told.read_text())['port']}"
                with urlopen(f"{here}/api?token={token}", timeout=PATIENCE):
                    return here

        here = until(where, 3 * PATIENCE)
        yield f"{here}/lab/workspaces/{{}}/tree/notebooks/{{}}?token={token}"
    finally:
        server.terminate()  # and it ends its kernels
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture(scope="module")
def page(browser, address, screenshots):
    """The chapter's notebook, run as far as these tests look at it."""
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    page.set_default_timeout(WAIT)
    notebook = f"{CHAPTER.number}_{CHAPTER.name}.ipynb"
    cells, _ = opened()
    shown = ("ladder(here=", f'check("{CHAPTER.exercises[0].id}")', last(cells))
    try:
        page.goto(address.format(CHAPTER.name, notebook), timeout=BEGIN)
        page.locator(".jp-Notebook").wait_for(timeout=BEGIN)
        page.wait_for_function(IDLE, timeout=BEGIN, polling=POLLING)
        run(page, sorted({i for words in shown for i in needed(cells, place(cells, words))}))
    except Exception:
        page.screenshot(path=screenshots / "not_run.png")
        raise
    yield page
    page.evaluate("() => jupyterapp.serviceManager.sessions.shutdownAll()")
    page.close()


def run(page, indices):
    """Those of these cells that have not been run yet."""
    indices = [i for i in indices if page.evaluate(DONE, [i]) is False]
    if not indices:
        return
    page.evaluate(SELECT, indices)
    page.evaluate("() => void jupyterapp.commands.execute('notebook:run-cell')")
    done = page.wait_for_function(DONE, arg=indices, timeout=RUN, polling=POLLING)
    assert done.json_value() == "all have run"
    page.wait_for_function(IDLE, timeout=RUN, polling=POLLING)


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    named = os.environ.get("MINIKV_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def choose(page, menu, *path):
    """Through the menus, as a reader does."""
    page.locator("#jp-MainMenu").get_by_role("menuitem", name=menu, exact=True).click()
    for name in path:
        page.locator(f".lm-Menu-itemLabel:text-is('{name}')").click()


def in_theme(page, name):
    themed = page.locator(f"body[data-jp-theme-name='JupyterLab {name}']")
    if not themed.count():
        choose(page, "Settings", "Theme", f"JupyterLab {name}")
        themed.wait_for(state="attached")


def cell_in_view(page, index):
    """The chapter's notebook in front, with this cell in view."""
    notebook = f"notebooks/{CHAPTER.number}_{CHAPTER.name}.ipynb"
    page.evaluate("path => void jupyterapp.commands.execute('docmanager:open', {path})", notebook)
    page.wait_for_function(f"path => ({IN_FRONT})()[0] === path", arg=notebook)
    page.evaluate("at => void jupyterapp.shell.currentWidget.content.scrollToItem(at)", index)
    # Where JupyterLab draws it, if it has not.
    cell = page.locator(f".jp-NotebookPanel:visible [data-windowed-list-index='{index}']")
    cell.scroll_into_view_if_needed()
    return cell


def check_cell(page):
    """The cell under the chapter's first exercise, in view."""
    return cell_in_view(page, place(opened()[0], f'check("{CHAPTER.exercises[0].id}")'))


@pytest.mark.parametrize("number", thorough_after(1, PLAYERS))
@pytest.mark.parametrize("theme", thorough_after(1, ["Light", "Dark"]))
def test_every_player_moves_its_picture(page, screenshots, theme, number):
    in_theme(page, theme)
    cells = opened()[1][number]
    run(page, cells)
    player = cell_in_view(page, cells[-1])
    image, handle = player.locator("figure img"), player.locator(".noUi-handle")
    box = player.locator(".widget-html:has(figure)")  # each step has an image of its own
    caption = player.locator(".widget-html").first
    handle.scroll_into_view_if_needed()
    assert image.get_attribute("alt").startswith(f"{PLAYERS[number]}, step ")
    for key in ("Home", "ArrowRight"):
        shown = [
            box.element_handle(), image.evaluate(PIXELS),
            caption.element_handle(), caption.text_content(),
        ]  # fmt: skip
        before = handle.get_attribute("aria-valuenow")
        handle.press(key)
        assert handle.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
        if handle.get_attribute("aria-valuenow") != before:
            page.wait_for_function(MOVED, arg=shown)
        else:
            assert key == "Home"  # it stood there already
    assert player.locator(".widget-box").evaluate_all(SIDEWAYS) == []
    assert caption.locator("div").last.evaluate(CONTRAST) > 4.5
    assert image.evaluate(CORNER) == [255, 255, 255, 255]  # white paper, whatever the theme
    page.screenshot(path=screenshots / f"player_{number}_{theme.lower()}.png")


@pytest.mark.parametrize("theme", thorough_after(1, ["Dark", "Light"]))
def test_the_report_and_the_ladder_can_be_read(page, screenshots, theme):
    in_theme(page, theme)
    report = check_cell(page).locator(".jp-OutputArea-output").first
    report.get_by_text("not started").first.wait_for()
    for words, contrast in report.locator("b, a, button").evaluate_all(CONTRASTS):
        assert contrast > 4.5, words
    page.screenshot(path=screenshots / f"report_{theme.lower()}.png")
    ladder = cell_in_view(page, place(opened()[0], "ladder(here="))
    words_of_it = ladder.locator(".jp-OutputArea-output a, .jp-OutputArea-output b")
    for words, contrast in words_of_it.evaluate_all(CONTRASTS):
        assert contrast > 4.5, words
    page.screenshot(path=screenshots / f"ladder_{theme.lower()}.png")


def test_a_hint_opens_under_the_report_and_folds_again(page, screenshots):
    cell = check_cell(page)
    shown = cell.get_by_text("hint 1 of 3")
    hint = cell.get_by_role("button", name="Hint 1", exact=True)
    hint.click()
    shown.wait_for()
    page.screenshot(path=screenshots / "hint.png")
    hint.click()
    shown.wait_for(state="detached")
    for name in ("Hint 2", "Hint 3", "Why", "Diff", "Solution", "Reset"):
        assert cell.get_by_role("button", name=name, exact=True).get_attribute("title")
    cell.get_by_role("button", name="Reset", exact=True).click()
    cell.get_by_role("button", name="Reset: sure?").wait_for()
    hint.click()  # another button: nothing is reset
    cell.get_by_role("button", name="Reset", exact=True).wait_for()


@pytest.mark.thorough
def test_a_narrow_page_does_not_scroll_sideways(page, screenshots):
    at = place(opened()[0], "ladder(")
    page.set_viewport_size({"width": 880, "height": 1000})
    try:
        cell_in_view(page, at)
        page.wait_for_timeout(1000)
        page.screenshot(path=screenshots / f"narrow_{at}.png")
        wide = page.locator(
            ".jp-NotebookPanel:visible .jp-WindowedPanel-outer, .widget-html figure"
        )
        assert wide.evaluate_all(SIDEWAYS) == []
    finally:
        page.set_viewport_size({"width": 1500, "height": 1000})


def test_the_file_opens_beside_and_check_reads_what_is_saved(page, course, screenshots):
    name, file = CHAPTER.file_name, course / "exercises" / CHAPTER.file_name
    button = check_cell(page).get_by_role("button", name="Open the file beside")
    line = int(button.text_content().rpartition(" ")[2])
    left = page.locator(".jp-NotebookPanel:visible").bounding_box()
    button.click()
    page.wait_for_function(f"() => String(({IN_FRONT})()) === 'exercises/{name},{line}'")
    editor = page.locator(".jp-FileEditor:visible .cm-content")
    beside = editor.bounding_box()
    now = page.locator(".jp-NotebookPanel:visible").bounding_box()
    assert beside["x"] > now["x"] + now["width"] - 1 and now["width"] < left["width"]
    editor.press("Control+End")
    editor.press_sequentially("# written, and not saved")
    assert "not saved" not in file.read_text()
    editor.press("Control+s")
    page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    page.screenshot(path=screenshots / "beside.png")
    cell = check_cell(page)
    cell.evaluate("cell => cell.querySelector('.jp-OutputArea-output').id = 'before'")
    cell.get_by_role("button", name="Check", exact=True).click()
    page.locator("#before").wait_for(state="detached")  # the cell has run again
    cell.locator(".jp-OutputArea-output", has_text="not started").wait_for()
    assert "# written, and not saved" in file.read_text()
    page.evaluate("""path => [...jupyterapp.shell.widgets('main')]
        .filter(widget => widget.context.path === path).forEach(widget => widget.close())""",
        f"exercises/{name}",
    )  # fmt: skip


def test_a_folded_output_unfolds_when_its_cell_runs(page):
    cells = opened()[0]
    at = place(cells, "def sent_twice(")
    check_cell(page)
    for has_run in (False, True):
        if has_run:
            run(page, needed(cells, at))
        now = page.evaluate("""() => jupyterapp.shell.currentWidget.content.widgets
            .map(cell => [Boolean(cell.outputHidden), Boolean(cell.model.executionCount)])""")
        assert now[at] == [not has_run, has_run]
        for cell, (hidden, executed) in zip(cells, now, strict=True):
            folded = bool(cell["metadata"].get("jupyter", {}).get("outputs_hidden"))
            assert hidden == (folded and not executed)


def test_the_link_opens_the_exercises_in_the_editor(page, screenshots):
    link = f"exercises/{CHAPTER.file_name}"
    page.locator(".jp-RenderedMarkdown a", has_text=link).first.click()
    # The editor is there before its text is.
    check = f"python -m minikv check {CHAPTER.exercises[0].id}"
    page.locator(".jp-FileEditor .cm-content", has_text=check).wait_for()
    page.screenshot(path=screenshots / "editor.png")


def test_the_last_cell_leads_to_the_notebook_before(page, screenshots):
    cell = cell_in_view(page, place(opened()[0], last(opened()[0])))
    page.screenshot(path=screenshots / "navigation.png")
    link = cell.locator(".jp-OutputArea-output a", has_text="←")
    number = link.text_content().split()[1]
    link.click()
    page.wait_for_function(f"() => ({IN_FRONT})()[0].startsWith('notebooks/{number}_')")
    page.evaluate("() => jupyterapp.shell.currentWidget.close()")
