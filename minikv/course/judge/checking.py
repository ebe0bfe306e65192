"""What checks are written with, besides scenarios: a function that compares by hand.

    @check("05.5", "tinypy: a branch writes what it would write alone", look="…")
    def _(mine):
        if found != expected:
            raise Wrong("sample 2 goes on with …")

For where another oracle serves better: a run of the real model, a compiler, addresses.

Such a function runs beside the reader's code, which could change what it compares. So it hands
what it has found to `witness`: where the verdict is made, the function runs once on the reference,
and a pass is one only if both have handed over the same.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch

import minikv
from minikv.course.judge.plain_data import kept


class Wrong(Exception):
    """What a solution does differently from what is asked."""

    def __init__(self, what: str, cause: str | None = None, look: str | None = None):
        super().__init__(what)
        self.what, self.cause, self.look = what, cause, look


class AnyCheck(Protocol):
    """One line of an exercise's report: a `Check`, or a group of programs that are played."""

    @property
    def name(self) -> str: ...

    @property
    def cause(self) -> str | None: ...

    @property
    def look(self) -> str | None: ...

    def run(self, mine: Any, /) -> Any:
        """Try it on the reader's module."""


@dataclass(frozen=True)
class Check:
    """A line that is a function, which raises `Wrong`."""

    exercise: str
    name: str
    run: Callable[[Any], None]  # on the reader's module
    cause: str | None  # where nothing more precise is known
    look: str | None
    hands_over: bool = True  # False: it calls no `witness`
    waits: str | None = None  # what is said where a line above it fails: it is then not tried


CHECKS: dict[str, list[AnyCheck]] = {}
MODEL_RUNS: dict[str, Callable[[Any, minikv.LanguageModel], str]] = {}


def check(
    exercise: str,
    name: str,
    cause: str | None = None,
    look: str | None = None,
    hands_over: bool = True,
    waits: str | None = None,
):
    """Make the decorated function a check of `exercise`; shown in the order of the file. One that
    hands nothing over to `witness` can say so: then it need not run on the reference. One that
    `waits` is tried only if all lines above it are right."""

    def register(run: Callable[[Any], None]):
        made = Check(exercise, name, run, cause, look, hands_over, waits)
        CHECKS.setdefault(exercise, []).append(made)
        return run

    return register


def runs_model(*exercises: str):
    """Make the decorated function what runs tinypy on the parts of these exercises.

    It returns what it did as a sentence with figures, and raises AssertionError if the
    tokens are not the oracle's.
    """

    def register(run: Callable[[Any, minikv.LanguageModel], str]):
        MODEL_RUNS.update(dict.fromkeys(exercises, run))
        return run

    return register


# Whoever measures the reader's time hears here when a compiler begins (True) and ends (False).
COMPILING: list[Callable[[bool], None]] = []

_witnessed: list[Any] = []


def witness(*found: Any) -> None:
    """Hand over what the reader's code gave: numbers, texts and tensors that are the same for
    every right solution."""
    _witnessed.extend(kept(one) for one in found)


@contextmanager
def witnesses() -> Iterator[list[Any]]:
    """All that is handed over inside."""
    _witnessed.clear()
    found: list[Any] = []
    try:
        yield found
    finally:
        found += _witnessed
        _witnessed.clear()


def same_as_oracle(lm: minikv.LanguageModel, prompt: list[int], found: list[int]) -> None:
    """For runs of a model: raises AssertionError if these are not the tokens after `prompt`."""
    expected = lm.generate_naively(prompt, len(found))
    witness(found)
    if found != expected:
        raise AssertionError(f"{lm.decode(found)!r} is not the oracle's {lm.decode(expected)!r}")


@cache
def tinypy() -> minikv.LanguageModel:
    return minikv.load("tinypy")


@contextmanager
def in_place_of(target: str, part: Any) -> Iterator[None]:
    """In here the module's name stands for `part`: target is "minikv.ring.cache:turn"."""
    module, _, name = target.partition(":")
    home = import_module(module)
    before = getattr(home, name)
    setattr(home, name, part)
    try:
        yield
    finally:
        setattr(home, name, before)


def plain(value: Any) -> Any:
    """A value as lists, dicts, sets, strings and Python numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def shown(value: Any, longest: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 2] + " …"


def differ(found: Any, expected: Any) -> str:
    """How two plain values differ, in words."""
    if isinstance(found, list) and isinstance(expected, list) and len(repr(expected)) > 60:
        pairs = enumerate(zip(found, expected, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is not None:
            return (
                f"at index {first} it is {shown(found[first])}, expected {shown(expected[first])}"
            )
        return f"{len(found)} items, expected {len(expected)}"
    return f"{shown(found)}, expected {shown(expected)}"


def mismatch(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """How two tensors differ, in words; None if they don't."""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    found, expected = found.detach().double(), expected.detach().double()
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    same = (found == expected) | (found.isnan() & expected.isnan())
    far = ~(same | ((found - expected).abs() <= tolerance * scale))
    if not far.any():
        return None
    place = tuple(int(i) for i in far.nonzero()[0])
    here, there = float(found[place]), float(expected[place])
    digits = 4 if math.isclose(round(here, 2), round(there, 2)) else 2
    return (
        f"at {list(place) if place else 'its value'} it is {here:.{digits}f}, expected "
        f"{there:.{digits}f}; {int(far.sum())} of {far.numel()} values differ"
    )
