"""Unlucky scheduling, as a plug-in of pytest: a busy machine, a slow disk, a slow store.

    PYTHONPATH=tests .venv/bin/python -m pytest -p delays tests/serving

At random it puts to sleep: tests, between two of their lines; the product's threads, between two of
theirs; disk and store, before they answer. $MINIKV_DELAYS is another seed; a test draws alike under
the same one, but for the order of its threads. A failure shows that a race exists, not how often it
is lost.
"""

import os
import random
import sys
import threading
from pathlib import Path
from time import sleep  # a test may replace that of the module

import pytest

from minikv.cluster.shared_store import SharedStore
from minikv.tiers.disk import DiskTier

TESTS = str(Path(__file__).parent)
THREADS = tuple(f"{os.sep}minikv{os.sep}{name}{os.sep}" for name in ("serving", "cluster", "tiers"))
SECONDS = {"test": 0.1, "thread": 0.03, "tier": 0.1}
SHARE = 0.15  # of all lines, and of all answers
MOST = 1.5  # seconds in a test, of each kind

left = dict.fromkeys(SECONDS, 0.0)
draw = random.Random()


def maybe(kind):
    if left[kind] > 0 and draw.random() < SHARE:
        left[kind] -= SECONDS[kind]
        sleep(SECONDS[kind])


def at_lines(kind):
    def trace(frame, event, argument):
        if event == "line":
            maybe(kind)
        return trace

    return trace


between = {kind: at_lines(kind) for kind in ("test", "thread")}


def of_tests(frame, event, argument):
    return between["test"] if frame.f_code.co_filename.startswith(TESTS) else None


def of_threads(frame, event, argument):
    here = any(part in frame.f_code.co_filename for part in THREADS)
    return between["thread"] if here else None


def slow(tier, name):
    call = getattr(tier, name)

    def later(self, *arguments):
        maybe("tier")
        return call(self, *arguments)

    setattr(tier, name, later)


def pytest_configure():
    for tier in (DiskTier, SharedStore):
        for name in ("contains", "get_many", "put_many"):
            if hasattr(tier, name):
                slow(tier, name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    draw.seed(f"{os.environ.get('MINIKV_DELAYS', '0')} {item.nodeid}")
    left.update(dict.fromkeys(SECONDS, MOST))
    threading.settrace(of_threads)
    sys.settrace(of_tests)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        left.update(dict.fromkeys(SECONDS, 0.0))
