"""The engine's own errors, and the checks that values from outside go through."""

import re
from collections.abc import Callable, Collection, Sequence
from numbers import Integral, Real
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")  # each 1,024 times the one before


class CheckpointError(ValueError):
    """A checkpoint that cannot be read. The message says what is missing or not supported."""


class OutOfBlocks(Exception):
    """The pool cannot give what was asked. Nothing was changed: free something and try again."""

    def __init__(self, needed: int, free: int):
        super().__init__(f"blocks needed: {needed}, free: {free}")
        self.needed, self.free = needed, free


def blame(role: str, call: Callable, *arguments: Any, **named: Any) -> Any:
    """`call(…)` of a part that somebody may have handed in. An error gets a note that says in which
    part it was raised."""
    try:
        return call(*arguments, **named)
    except Exception as error:
        error.add_note(f"in the {role} that the engine was given")
        raise


def require(condition: Any, broken: str, part: str = "") -> None:
    """Raises AssertionError, saying what is broken of which part, unless the condition holds."""
    if not condition:
        raise AssertionError(f"{part}: {broken}" if part else broken)


def require_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int. Raises ValueError, naming the argument, unless it is an integer from
    `low` to `high`. NumPy's integers are; True and 2.0 are not."""
    is_int = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if is_int and (low is None or value >= low) and (high is None or value <= high):
        return int(value)
    fits = (
        "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
    )
    raise ValueError(f"{name}: must be an int{fits}, was {value!r}")


def require_ids(name: str, value: Any, vocab_size: int) -> list[int]:
    """`value` as a list of token ids. Raises ValueError, naming the argument, unless it is a
    sequence of integers below `vocab_size`. A flat tensor or array of integers is one."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"{name}: must be a list of token ids, was {value!r}")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)  # the usual case, for which one by one would be slow
    return [require_int(f"{name}: a token id", token_id, 0, vocab_size - 1) for token_id in ids]


def require_text(name: str, value: str) -> str:
    """`value` itself. Raises ValueError, naming the argument and the character, for half of a
    surrogate pair, which no encoding has."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what, where = value[error.start], error.start
        raise ValueError(f"{name}: character {where} is {what!r}, which is no text") from None
    return value


def require_one_of(name: str, value: Any, choices: Collection) -> Any:
    """`value` itself. Raises ValueError, naming the argument, unless it is one of the choices."""
    if value not in list(choices):
        raise ValueError(f"{name}: must be one of {', '.join(map(repr, choices))}, was {value!r}")
    return value


def require_bool(name: str, value: Any) -> bool:
    """`value` itself. Raises ValueError, naming the argument, unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, was {value!r}")
    return value


def require_number(
    name: str, value: Any, allowed: str = "", fits: Callable[[float], bool] = lambda x: True
) -> float:
    """`value` as a float. Raises ValueError, naming the argument, unless it is a finite number
    that `fits`; `allowed` says in words which numbers do."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not abs(value) <= 1e308 or not fits(value):
        raise ValueError(f"{name}: must be a finite number{allowed}, was {value!r}")
    return float(value)


def parse_bytes(name: str, value: Any) -> int:
    """The number of bytes that "256 MiB" or an int means. Raises ValueError, naming the argument,
    for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(rf"([1-9]\d*) ?({'|'.join(UNITS)})", value if type(value) is str else "")
    if found is None:
        raise ValueError(
            f'{name}: must be a number of bytes, such as 268435456 or "256 MiB", was {value!r}'
        )
    return int(found[1]) * 1024 ** UNITS.index(found[2])
