"""What `make test` leaves to `make test-all`, of parameters that differ little."""

from collections.abc import Iterable

import pytest


def thorough_after(count: int, values: Iterable) -> list:
    """Parameters of which `make test` takes the first `count`, and `make test-all` all."""
    mark, of = pytest.mark.thorough, lambda one: one if isinstance(one, tuple) else (one,)
    return [
        value if place < count else pytest.param(*of(value), marks=mark)
        for place, value in enumerate(values)
    ]
