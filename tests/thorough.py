"""What `make test` leaves to `make test-all`, of parameters that differ little."""

from collections.abc import Iterable

import pytest


def thorough_after(count: int, values: Iterable) -> list:
    """Parameters of which `make test` takes the first `count`, and `make test-all` all."""
    mark = pytest.mark.thorough
    return [
        value if place < count else pytest.param(value, marks=mark)
        for place, value in enumerate(values)
    ]
