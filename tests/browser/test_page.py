"""The page at `/` in a browser: what an engine does is seen, in both themes, at two widths.

`MINIKV_SCREENSHOTS` names a folder for the pictures. Without Chromium or playwright the tests are
skipped, with a line that says why.
"""

import os
import re
from pathlib import Path

import pytest
from chromium import WAIT, needs_browser
from cluster_case import Fragile
from serving_case import CONFIG, KEY, Cluster, OneEngine, server
from thorough import thorough_after
from waiting import until

from minikv import Engine, EngineConfig

pytestmark = needs_browser("the page was not tried in a browser")


@pytest.fixture
def open_page(browser):
    """`open_page(url, **context)`: the page, once it is live. It asks nobody else for anything."""
    opened, wrong = [], []

    def open_one(url, state="live", **context):
        # The tests' own scripts are no part of the page, whose policy would forbid them.
        page = browser.new_context(bypass_csp=True, **context).new_page()
        opened.append(page)
        page.set_default_timeout(WAIT)
        # Seeds in turn, with which no sample ends early.
        page.add_init_script("let n = 0; Math.random = () => (n++ % 2 ? 0.75 : 0.25)")
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda one: one.url.startswith((url, "data:")) or wrong.append(one.url))
        page.goto(f"{url}/")
        page.wait_for_function("state => document.querySelector('#state').textContent === state",
                               arg=state)  # fmt: skip
        return page

    yield open_one
    for page in opened:
        page.context.close()
    assert not wrong


def shoot(page, name):
    folder = os.environ.get("MINIKV_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder, f"page-{name}.png"), full_page=True)


def run(page, prompt, tokens, temperature="0"):
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", temperature)
    page.keyboard.press("Control+Enter")


def answer(page):
    """The text of the newest one, once it is whole."""
    page.wait_for_function(
        "/ended by|stopped|fail/.test(document.querySelector('article p')?.textContent)"
    )
    return page.text_content("article pre"), page.text_content("article p")


def test_an_answer_streams_in_with_its_times(tinypy, open_page):
    engine = Engine(tinypy.lm, CONFIG)
    prompt = "def fib(n):\n" * 6
    expected = tinypy.lm.decode(tinypy.lm.generate_naively(num := tinypy.lm.encode(prompt), 12))
    with server(tinypy.lm, keys=(), served_by=OneEngine(tinypy.lm, engine)) as at:
        page = open_page(at.url)
        for cached in (0, (len(num) - 1) // 16 * 16):
            run(page, prompt, 12)
            text, says = answer(page)
            assert text == prompt + expected
            found = re.match(
                r"first token after ([\d.]+) ms, then ([\d.]+) ms per token; (.*)", says
            )
            assert 0 < float(found[1]) < WAIT and float(found[2]) >= 0
            assert found[3] == (
                f"12 tokens, {cached} of {len(num)} prompt tokens were cached; ended by length"
            )


@pytest.mark.thorough
def test_two_tabs_that_share_a_prompt_show_blocks_being_shared(tinypy, open_page):
    with server(tinypy.lm, keys=()) as at:
        tabs = [open_page(at.url), open_page(at.url)]
        for tab in tabs:
            run(tab, "import os\nimport sys\n" * 8, 900, temperature="1")
        for tab in tabs:
            tab.wait_for_function("document.querySelectorAll('#pool .shared.tree').length > 1")
            assert tab.locator("#requests li").count() == 2
            assert re.search(r"\([1-9]\d* shared\)", tab.text_content("#pool-says"))
        tabs[0].focus("#pool")  # by keyboard
        tabs[0].keyboard.press("ArrowRight")
        says = tabs[0].text_content("#block-says")
        assert re.search(r"^Block 0: held by request \d+ and request \d+ and the radix tree", says)
        tabs[0].keyboard.press("Escape")
        assert "stopped after" in answer(tabs[0])[1]
        tabs[1].keyboard.press("Escape")
        for tab in tabs:  # the other one's end, and what it leaves behind
            tab.wait_for_function("document.querySelectorAll('#requests li').length === 0")
            tab.wait_for_function("document.querySelectorAll('#pool .tree').length > 2")
            assert not tab.locator("#pool .shared").count()
            assert tab.locator("#tree div").count() >= 1
    tabs[0].wait_for_function("/gone/.test(document.querySelector('#state').textContent)")


@pytest.mark.thorough
def test_evicted_blocks_are_marked_for_a_while(tinypy, open_page):
    config = EngineConfig(num_blocks=12, attention="torch")
    by = OneEngine(tinypy.lm, Engine(tinypy.lm, config))
    with server(tinypy.lm, keys=(), served_by=by) as at:
        page = open_page(at.url)
        run(page, "import os\n" * 40, 2)
        answer(page)
        page.select_option("#pace", "0.5")
        until(lambda: [view.pace for view in by.target._watchers] == [0.5])
        run(page, "def walk(path):\n" * 20, 9)
        page.wait_for_selector("#pool .evicted")
        page.keyboard.press("Escape")


@pytest.mark.parametrize(
    ("scheme", "width"),
    thorough_after(1, [("light", 390), ("dark", 1280), ("light", 1280), ("dark", 390)]),
)
def test_it_fits_and_can_be_read(tinypy, open_page, scheme, width):
    with server(tinypy.lm, keys=()) as at:
        page = open_page(at.url, viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.select_option("#pace", "0.5")
        page.click("#twice")
        page.wait_for_selector("#pool .shared")
        page.wait_for_function("document.querySelectorAll('#tree div').length > 1")
        shoot(page, f"{scheme}-{width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper, ink = page.evaluate(
            "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name])"
        )
        light, dark = [sum(map(int, re.findall(r"\d+", one))) for one in (paper, ink)]
        assert (light > 600 > 300 > dark) if scheme == "light" else (dark > 600 > 300 > light)
        page.keyboard.press("Escape")


@pytest.mark.thorough
def test_a_server_with_keys_asks_for_one(tinypy, open_page):
    with server(tinypy.lm) as at:
        page = open_page(at.url, state="this server asks for a key")
        assert not page.text_content("#model")
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        page.wait_for_selector("#pool .block")
        assert page.locator("#pace-label").is_hidden()
        run(page, "x = 1\n", 5)
        assert "5 tokens" in answer(page)[1]


@pytest.mark.thorough
def test_a_cluster_shows_its_workers(tinypy, open_page):
    by = Cluster(tinypy.lm, [Fragile(tinypy.lm, CONFIG) for _ in range(2)])
    with server(tinypy.lm, keys=(), served_by=by) as at:
        page = open_page(at.url)
        page.wait_for_selector("#workers tr")
        assert page.locator("#engine").is_hidden()
        assert "a pool and a tree of its own" in page.text_content("#workers")
        run(page, "x = 1\n", 5)
        assert "5 tokens" in answer(page)[1]
        page.wait_for_function("/ of 256/.test(document.querySelector('#workers').textContent)")
        assert page.locator("#workers tr").count() == 3
