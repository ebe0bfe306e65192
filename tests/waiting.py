"""How tests wait: for what they need, and not for a time."""

import time

PATIENCE = 120.0  # seconds after which what a test waits for never comes, on any machine


def until(condition, patience=PATIENCE):
    """Wait until `condition()` is true, and return what it gives, or raise AssertionError."""
    end = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {patience:g} s"
        time.sleep(0.01)
    return found
