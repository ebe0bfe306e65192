"""Models for all tests: one small random checkpoint of each architecture, and the bundled one."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import ARCHITECTURES, Pair, make_model, small, with_weights
from tiers_case import fetch_everything

import minikv
import minikv_kernels  # noqa: F401  before transformers, which imports triton: settles the interpreter

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Whatever a test draws at random, it draws the same alone and behind any others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def quick_interpreter():
    """Triton's interpreter replaces the functions of `tl` once, not for each function called."""
    from minikv.course.chapters.ch08_triton_paged_attention.watch import language_patched_once
    from minikv_kernels.mode import INTERPRETED

    with language_patched_once() if INTERPRETED else nullcontext():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(name)`: the `Pair` of that architecture, or of "tinypy"; made once."""
    pairs = {}

    def get(name: str) -> Pair:
        if name not in pairs:
            folder = minikv.BUNDLED.get(name)
            if folder is None:
                folder = tmp_path_factory.mktemp(name)
                make_model(name, seed=len(name)).save_pretrained(folder)
            pairs[name] = Pair(name, folder)
        return pairs[name]

    return get


@pytest.fixture(scope="session", params=[*ARCHITECTURES, "tinypy"])
def pair(request, checkpoint):
    """Every architecture in turn."""
    return checkpoint(request.param)


@pytest.fixture(scope="session")
def llama(checkpoint):
    """The plainest model, for tests that do not depend on one."""
    return checkpoint("llama")


@pytest.fixture(scope="session")
def tinypy(checkpoint):
    """The bundled model: the one with a tokenizer."""
    return checkpoint("tinypy")


@pytest.fixture(scope="session")
def other_state(llama):
    """Other weights of llama's shapes."""
    return {name: tensor * 1.01 for name, tensor in llama.hf.state_dict().items()}


@pytest.fixture(scope="session")
def other_lm(llama, other_state):
    return with_weights(llama.lm, other_state)


@pytest.fixture
def engine_of(llama):
    """Make engines, `engine_of(host_blocks=8)`, which fetch all that is found, however long that
    may take. Their tiers are closed at the end of a test."""
    made = []

    def make(lm=None, **config) -> minikv.Engine:
        made.append(minikv.Engine(lm or llama.lm, small(**{"attention": "torch", **config})))
        if made[-1].tiers is not None:
            fetch_everything(made[-1])
        return made[-1]

    yield make
    for tiers in (engine.tiers for engine in made if engine.tiers is not None):
        for tier in (tiers.disk, tiers.shared):
            if tier is not None:
                tier.close()
