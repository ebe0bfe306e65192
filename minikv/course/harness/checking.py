"""What checks are written with: compare, and say what differs, why that may be, where to look.

    @check("04.1", "each block is handed out once")
    def _(mine):
        pool = mine.BlockPool(4)
        equal(sorted(pool.allocate() for _ in range(4)), [0, 1, 2, 3], "4 allocations of 4 blocks",
              Suspect([0, 0, 0, 0], cause="the block stays free", look="is it taken off the list?"))

A check looks at behaviour alone. What a known mistake would give is a `Suspect`: found
instead of what was expected, it names the mistake.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch

import minikv


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


@dataclass(frozen=True)
class Suspect:
    """What a known mistake would give: a value, or a callable that computes it when needed."""

    value: Any
    cause: str
    look: str


CHECKS: dict[str, list[AnyCheck]] = {}
MODEL_RUNS: dict[str, Callable[[Any, minikv.LanguageModel], str]] = {}


def check(exercise: str, name: str, cause: str | None = None, look: str | None = None):
    """Make the decorated function a check of `exercise`; shown in the order of the file."""

    def register(run: Callable[[Any], None]):
        CHECKS.setdefault(exercise, []).append(Check(exercise, name, run, cause, look))
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


@cache
def tinypy() -> minikv.LanguageModel:
    return minikv.load("tinypy")


def equal(found: Any, expected: Any, what: str, *suspects: Suspect) -> None:
    """Raise Wrong unless the two are equal. Lists, tuples, arrays and tensors are compared by
    their elements, numbers by value."""
    found_plain, expected_plain = plain(found), plain(expected)
    if found_plain == expected_plain:
        return
    for suspect in suspects:
        if found_plain == plain(_value(suspect)):
            raise Wrong(
                f"{what}: {differ(found_plain, expected_plain)}", suspect.cause, suspect.look
            )
    raise Wrong(f"{what}: {differ(found_plain, expected_plain)}")


def close(
    found: Any, expected: torch.Tensor, what: str, *suspects: Suspect, tolerance: float = 1e-4
) -> None:
    """Raise Wrong unless `found` is a tensor of the shape of `expected` with the same values,
    to `tolerance` of the largest of them (of 1, if they are smaller)."""
    if not isinstance(found, torch.Tensor):
        raise Wrong(
            f"{what}: a {type(found).__name__}, expected a tensor of shape {tuple(expected.shape)}",
            "nothing is returned" if found is None else None,
            "what stands after `return`?",
        )
    wrong = mismatch(found, expected, tolerance)
    if wrong is None:
        return
    for suspect in suspects:
        value = _value(suspect)
        if isinstance(value, torch.Tensor) and mismatch(found, value, tolerance) is None:
            raise Wrong(f"{what}: {wrong}", suspect.cause, suspect.look)
    if found.shape == expected.shape and torch.isnan(found).any():
        raise Wrong(
            f"{what}: {wrong}",
            "NaN: a softmax over nothing but -inf, 0 / 0, or memory that was never written",
            "which of these can happen here?",
        )
    raise Wrong(f"{what}: {wrong}")


def raises(
    kind: type[Exception],
    call: Callable[[], Any],
    what: str,
    cause: str | None = None,
    look: str | None = None,
) -> Exception:
    """The exception that `call` raises. Raises Wrong if it raises none, or of another kind."""
    try:
        result = call()
    except kind as error:
        return error
    except Exception as error:
        raise Wrong(
            f"{what}: {type(error).__name__} ({error}), expected {kind.__name__}", cause, look
        ) from error
    raise Wrong(
        f"{what}: no error, but {shown(plain(result))}; expected {kind.__name__}", cause, look
    )


def check_numbers(exercise: str, function: str, questions: Mapping, near: float = 0.0) -> None:
    """A check of `exercise` for each number in the dictionary that the reader's `function` returns.

    questions: key -> ((what it is, the answer, where to look), suspects …). Numbers that are the
    same but for a share of `near` count as equal.
    """

    def compare(mine: Any, key: str) -> None:
        found, ((what, expected, _), *suspects) = getattr(mine, function)(), questions[key]
        if not isinstance(found, dict) or key not in found:
            raise Wrong(
                f"{function}() has no {key!r}",
                f"a dictionary with the {len(questions)} keys of the docstring is expected",
                "how the key is written",
            )
        value = plain(found[key])
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Wrong(f"{key!r} is {value!r}", "a number is expected", "what the key stands for")
        known = (expected, *(suspect.value for suspect in suspects))
        value = next((one for one in known if abs(value - one) <= near * one), value)
        equal(value, expected, what, *suspects)

    for key, ((_, _, look), *_) in questions.items():
        check(exercise, key, look=look)(partial(compare, key=key))


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


def _value(suspect: Suspect) -> Any:
    return suspect.value() if callable(suspect.value) else suspect.value


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
