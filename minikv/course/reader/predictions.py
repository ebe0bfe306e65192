"""The reader's number first, then beside it the measured one.

predict("blocks for 8 samples", ...)      # put your number in place of the dots
measured("blocks for 8 samples", 13)      # in a later cell
predictions()                             # all of them, at the end of the chapter
"""

import json
import math
import re
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from types import EllipsisType

from minikv.course.exercise_data.manifest import ReaderError
from minikv.course.reports import markup

Number = int | float


@dataclass
class Prediction:
    """What a reader expects, and what came out."""

    what: str
    guess: Number | None = None
    value: Number | None = None
    note: str = ""  # where the name looks mistyped

    def verdict(self) -> str:
        """How far off the guess is, in words: in per cent, or as a factor."""
        if self.guess is None or self.value is None:
            return ""
        if self.guess == self.value:
            return "exactly"
        if self.guess > 0 and self.value > 0:
            side = "too high" if self.guess > self.value else "too low"
            factor = max(self.guess / self.value, self.value / self.guess)
            if factor < 2:
                return f"{100 * abs(self.guess / self.value - 1):.0f} % {side}"
            return f"{factor:.2g} times {side}"
        return f"off by {_number(abs(self.guess - self.value))}"

    def __repr__(self) -> str:
        sentence = self._sentence()
        return f"{sentence.rstrip('.')}. {self.note}" if self.note else sentence

    def _sentence(self) -> str:
        guess = "no prediction" if self.guess is None else f"you said {self.guess!r}"
        if self.value is None:
            if self.guess is None:
                return f"{self.what}: no prediction yet. Put a number in place of the dots."
            return f"{self.what}: {guess}. Run on."
        # On a line of its own: of what is folded JupyterLab shows the first line.
        text = f"{self.what}:\n    {_number(self.value)}, {guess}"
        return f"{text} ({self.verdict()})" if self.verdict() else text


_made: dict[str, Prediction] = {}  # of this notebook; running a cell again replaces its own


def predict(what: str, guess: Number | EllipsisType | None = None) -> Prediction:
    """Keep `guess`, a number, as the reader's prediction of `what`; `...` stands for none."""
    if guess is ... or guess is None:
        guess = None
    elif isinstance(guess, bool) or not isinstance(guess, Number) or math.isnan(guess):
        raise ReaderError(f"guess: must be a number, or ... for none, was {guess!r}")
    _made[what] = Prediction(what, guess)
    known = _names_measured()
    if known and what not in known:
        near = get_close_matches(what, known, n=1)
        _made[what].note = "No cell of this notebook measures this." + (
            f' Did you mean "{near[0]}"?' if near else ""
        )
    return _made[what]


def measured(what: str, value: Number) -> Prediction:
    """Put what came out beside the prediction of `what`, if there is one."""
    value = value.item() if hasattr(value, "item") else value
    waiting = [name for name, made in _made.items() if made.value is None]
    near = [] if what in _made else get_close_matches(what, waiting, n=1, cutoff=0.8)
    note = f'The nearest name that you predicted is "{near[0]}".' if near else ""
    _made[what] = Prediction(what, _made.get(what, Prediction(what)).guess, value, note)
    return _made[what]


def _names_measured() -> list[str]:
    """Every name that a cell of the open notebook measures; [] if not all of them are known."""
    notebook = markup.open_notebook()
    if notebook is None:
        return []
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return []
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    calls = re.findall(r"\bmeasured\(\s*(.)", code)
    names = re.findall(r'\bmeasured\(\s*"([^"]+)"', code)
    return names if len(names) == len(calls) else []


class Predictions:
    """All predictions of a notebook, with what came out."""

    def __init__(self, made: list[Prediction]):
        self.made = made

    def rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (p.what, "–" if p.guess is None else repr(p.guess),
             "–" if p.value is None else _number(p.value), p.verdict())
            for p in self.made
        ]  # fmt: skip

    def __repr__(self) -> str:
        rows = [("prediction", "yours", "came out", ""), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        head = "".join(
            f"<th scope='col' style='text-align:left'>{name}</th>"
            for name in ("prediction", "yours", "came out", "")
        )
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{escape(c)}</td>" for c in row) + "</tr>"
            for row in self.rows()
        )
        return f"<!-- predictions, and what came out -->\n<table><tr>{head}</tr>{body}</table>"


def predictions() -> Predictions:
    """Every prediction made in this notebook, in order."""
    return Predictions(list(_made.values()))


def _number(value: Number) -> str:
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
