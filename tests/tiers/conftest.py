"""Engines with tiers and little room, all closed at the end of a test."""

import pytest
from helpers import small

from minikv import Engine


@pytest.fixture
def engine_of(llama):
    """Make engines: `engine_of(host_blocks=8)`."""
    made = []

    def make(lm=None, **config) -> Engine:
        made.append(Engine(lm or llama.lm, small(**{"attention": "torch", **config})))
        return made[-1]

    yield make
    for engine in made:
        if engine.tiers is not None and engine.tiers.disk is not None:
            engine.tiers.disk.close()
