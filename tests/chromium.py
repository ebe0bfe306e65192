"""Chromium by playwright, for tests that look at pages."""

import os
import shutil
from importlib.util import find_spec

import pytest
from waiting import PATIENCE

WAIT = 1000 * PATIENCE  # ms for one click, one picture
PROGRAMS = "chromium", "chromium-browser", "google-chrome"
PROGRAM = next(filter(None, map(shutil.which, PROGRAMS)), None)
NEEDS = {"Chromium": PROGRAM, "playwright": find_spec("playwright")}
MISSING = " and ".join(name for name, found in NEEDS.items() if found is None)


def needs_browser(otherwise):
    """A mark: without Chromium and playwright tests are skipped, with a line that says so."""
    return pytest.mark.skipif(bool(MISSING), reason=f"{otherwise}: {MISSING} not installed")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # here, since it may be missing

    root = hasattr(os, "geteuid") and os.geteuid() == 0  # whom Chromium's sandbox refuses
    arguments = ["--no-sandbox"] if root else []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=PROGRAM, args=arguments, timeout=WAIT)
        try:
            yield browser
        finally:
            browser.close()
