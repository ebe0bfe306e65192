"""The README's pictures, made from live objects: `python -m minikv.course pictures`.

`docs/block-tables.gif` is chapter 04's and 05's player, `docs/block-tables.html` the same with
buttons, for the site, and `docs/failing-check.svg` what a check says of a wrong solution.
`docs/cache-at-work.gif` is the page of `python -m minikv serve` in Chromium; without one it stays
as it is.
"""

import io
import os
import shutil
from html import escape
from pathlib import Path
from unittest.mock import patch

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

import minikv
from minikv.course.exercise_data.manifest import find
from minikv.course.exercise_data.mistakes import mistake_named, text_of_mistake
from minikv.course.judge.examine import examine
from minikv.course.pictures import style
from minikv.course.pictures.block_viewer import History
from minikv.course.reports.report import Report

FOLDER = Path(__file__).parents[3] / "docs"
EXERCISE, MISTAKE = "05.1", "never tells the pool"
SECONDS = 1.4  # that a frame of the GIF stays
FONT = ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans-Bold.ttf"), 18)
COLORS = {"bold": "#ffffff", "red": "#ff7b72", "green": "#7ee787", "blue": "#79c0ff"}
LINE, CHARACTER, MARGIN = 19, 8.43, 16  # pixels of the SVG, for a font of 14


def record_tables() -> History:
    """Requests and a fork in one pool: blocks are taken, shared, copied and given back."""
    lm = minikv.load("tinypy")
    pool = minikv.BlockPool(8)
    history = History(pool)
    held: dict[str, minikv.BlockTable] = {}
    texts: dict[str, list[str]] = {}

    def snap(words: str) -> None:
        shown = {name: texts[name][: table.num_tokens] for name, table in held.items()}
        history.snap(words, held, shown)

    def begin(name: str, prompt: str, new: int) -> None:
        ids = lm.encode(prompt)
        texts[name] = [lm.decode([i]) for i in ids + lm.generate_naively(ids, new)]
        held[name] = minikv.BlockTable(pool, block_size=4)
        held[name].grow(len(ids))
        snap(f"{name} begins: {len(ids)} prompt tokens")

    def write(name: str, words: str) -> None:
        held[name].grow(1)
        _, copy = held[name].writable_slot(held[name].num_tokens - 1)
        snap(f"{words}: the shared block is copied first" if copy else words)

    snap("An empty pool of 8 blocks, each with 4 slots")
    begin("A", "class Stack:\n    def", 6)
    for _ in range(3):
        write("A", "A writes a token")
    begin("B", "import os\nimport sys", 4)
    held["C"], texts["C"] = held["B"].fork(), texts["B"]
    snap("C is a fork of B: it shares B's blocks")
    write("C", "C writes a token")
    write("B", "B writes a token")
    for _ in range(2):
        write("A", "A writes a token")
    held.pop("A").release()
    snap("A is done: its blocks are free again")
    begin("D", "def fib(n):\n    return", 0)
    return history


def gif(history: History) -> bytes:
    """The frames of a history one after another, for ever."""
    frames = []
    for step in range(len(history.steps)):
        drawn = Image.open(io.BytesIO(style.png(history.frame(step), dpi=100)))
        page = Image.new("RGB", (drawn.width, drawn.height + 44), style.PAPER)
        page.paste(drawn, (0, 44))
        ImageDraw.Draw(page).text((10, 12), history.steps[step].words, style.INK, FONT)
        frames.append(page.quantize(64, dither=Image.Dither.NONE))
    out = io.BytesIO()
    frames[0].save(
        out, "GIF", save_all=True, append_images=frames[1:], duration=int(1000 * SECONDS), loop=0
    )
    return out.getvalue()


def film(history: History) -> str:
    """The same as HTML with buttons. It stands at the fork, which tells what blocks are for."""
    player = history.widget()
    words = [step.words for step in history.steps]
    player.slider.value = next(i for i, told in enumerate(words) if "is a fork" in told)
    return player.film() + "\n"


def failing_check() -> str:
    """An SVG of a terminal: what the check of EXERCISE says of a known mistake."""
    exercise = find(EXERCISE)
    mistake = mistake_named(exercise, MISTAKE)
    report = Report.of(examine(exercise, text_of_mistake(exercise, mistake)))
    report.in_terminal = True
    with patch.dict(os.environ, COLUMNS="80"):  # whatever the terminal that it is made in
        text = report.text(lambda text, color: f"\0{color}\1{text}\2")
    lines = [f"$ python -m minikv check {EXERCISE}", *text.splitlines()]
    bare = [_plain(line) for line in lines]
    width = 2 * MARGIN + CHARACTER * max(map(len, bare))
    height = 2 * MARGIN + LINE * len(lines)
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (i + 0.75):.0f}" xml:space="preserve">'
        f"{_spans(line)}</text>"
        for i, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}"'
            f' viewBox="0 0 {width:.0f} {height}" font-family="ui-monospace, SFMono-Regular, '
            'Menlo, Consolas, monospace" font-size="14" fill="#d0d7de" role="img">',
            f"<title>{escape(bare[0])}</title>",
            '<rect width="100%" height="100%" rx="8" fill="#161b22"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _plain(line: str) -> str:
    """A line without the marks of its colours."""
    for color in COLORS:
        line = line.replace(f"\0{color}\1", "")
    return line.replace("\2", "")


def _spans(line: str) -> str:
    """A line with its colours as SVG."""
    line = escape(line)
    for color, code in COLORS.items():
        line = line.replace(f"\0{color}\1", f'<tspan fill="{code}">')
    return line.replace("\2", "</tspan>")


def page_film(chromium: str) -> bytes:
    """Two requests share a prompt, a third one begins with other text, and later one finds what the
    first have left."""
    from playwright.sync_api import sync_playwright

    from minikv.serving import EngineLoop
    from minikv.serving.app import make_app
    from minikv.serving.server import served

    frames: list[Image.Image] = []
    engine = minikv.Engine(minikv.load("tinypy"), minikv.EngineConfig(num_blocks=96))
    with (
        EngineLoop(engine) as loop,
        served(make_app(loop, "tinypy")) as (host, port),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 620}, color_scheme="dark")

        def shoot(number: int) -> None:
            for _ in range(number):
                page.wait_for_timeout(350)
                frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))

        page.goto(f"http://{host}:{port}/")
        page.wait_for_selector("#pool .block")
        page.fill("#tokens", "70")
        shoot(1)
        page.click("#twice")
        shoot(4)
        stack = page.input_value("#prompt")
        page.fill("#prompt", "import os\n\ndef walk(path):\n")
        page.keyboard.press("Control+Enter")
        shoot(9)
        page.fill("#prompt", stack)
        page.keyboard.press("Control+Enter")
        shoot(4)
        browser.close()
    # One palette, with the rare colours, too: then a frame holds only what has changed.
    middle = frames[len(frames) // 2]
    palette = middle.quantize(64, method=Image.Quantize.MAXCOVERAGE)
    drawn = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in frames]
    out = io.BytesIO()
    drawn[0].save(out, "GIF", save_all=True, append_images=drawn[1:], duration=600, loop=0)
    return out.getvalue()


def run() -> int:
    FOLDER.mkdir(exist_ok=True)
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is not None:
        (FOLDER / "cache-at-work.gif").write_bytes(page_film(chromium))
    tables = record_tables()
    (FOLDER / "block-tables.gif").write_bytes(gif(tables))
    (FOLDER / "block-tables.html").write_text(film(tables), encoding="utf-8")
    (FOLDER / "failing-check.svg").write_text(failing_check(), encoding="utf-8")
    return 0
