"""Snapshots that are taken one by one, and shown as a picture or by a player."""

import re
from collections.abc import Sequence
from html import escape
from typing import TypeVar

from matplotlib.figure import Figure

from minikv.course.pictures import style
from minikv.course.pictures.player import Player
from minikv.course.pictures.scene import Scene

Taken = TypeVar("Taken")


def check_letter(what: str, name: object) -> None:
    """Raise ValueError unless `name` is one that `style` has a colour for."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Z]\d*", name):
        raise ValueError(f"{what}: a name is a letter, as in {{'A': table}}, was {name!r}")


def check_surface(what: str, thing: object, names: Sequence[str]) -> None:
    """Raise TypeError unless `thing` has all that is read of it."""
    for name in names:
        if not hasattr(thing, name):
            needed = f"{', '.join(names[:-1])} and {names[-1]}"
            raise TypeError(f"{what}: must have {needed}, lacks {name}")


class Recording:
    """Snapshots, in the order in which they were taken, and the ways to look at them.

    A snapshot has `words` and `warnings`. Each kind of recording defines what it copies, and
    how that is told and drawn.
    """

    title: str  # "Block tables"

    def __init__(self) -> None:
        self.steps: list = []

    def keep(self, step: Taken) -> Taken:
        """One step more. Returns it."""
        self.steps.append(step)
        return step

    def describe(self, i: int, before: int | None) -> str:
        """Step `i` in words, and what has changed since step `before`: here, nothing of that."""
        return self.steps[i].describe()

    def scene(self, chosen: Sequence[int], alone: bool) -> Scene:
        """What is drawn of these steps: for a film, or for frames that are shown one by one."""
        raise NotImplementedError

    def counted(self, i: int) -> dict[str, int]:
        """What the caption counts at step `i`, by name."""
        raise NotImplementedError

    def picture(self, steps: Sequence[int] | None = None, caption: str = "") -> style.Picture:
        """All steps, or those named, from left to right, line by line. `caption` is the line
        under them; by default it counts blocks."""
        indices = range(len(self.taken()))
        chosen = list(indices) if steps is None else [indices[i] for i in steps]
        if not chosen:
            raise ValueError("steps: name at least one")
        told = [
            f"Step {i}, {self.steps[i].words}: {self.describe(i, before)}"
            for before, i in self.pairs(chosen)
        ]
        alt = f"{self.title}. {' '.join(told)}"
        words = [f"Step {i}: {self.steps[i].words}" for i in chosen]
        warnings = [self.steps[i].warnings for i in chosen]
        figure = self.scene(chosen, alone=False).film(words, warnings)
        return style.Picture(figure, alt, caption or self._counts(chosen))

    def _counts(self, chosen: Sequence[int]) -> str:
        counts = [self.counted(i) for i in chosen]
        told = "; ".join(
            f"{what}: {' → '.join(str(count[what]) for count in counts)}" for what in counts[0]
        )
        return f"{told[0].upper()}{told[1:]}."

    def frame(self, i: int) -> Figure:
        """One step. Things keep their places from frame to frame."""
        every = range(len(self.taken()))
        return self.scene(every, alone=True).alone(every[i])

    def widget(self) -> Player:
        """Play, pause and a slider over the steps; `slider.value` is an index of `steps`."""
        what = f"the {self.title[0].lower()}{self.title[1:]}"
        return Player(what, len(self.taken()) - 1, self.frame, self._caption, start=self.begin())

    def begin(self) -> int:
        """The step that a player shows first."""
        return 0

    def pairs(self, chosen: Sequence[int]) -> list[tuple[int | None, int]]:
        """Pairs of steps: what each is compared with, the one shown before it, and itself."""
        first = chosen[0] - 1 if chosen[0] else None
        return list(zip([first, *chosen], chosen, strict=False))

    def taken(self) -> list:
        """The steps. Raises ValueError while there are none."""
        if not self.steps:
            raise ValueError("nothing to draw yet: take a snapshot with snap(…)")
        return self.steps

    def _caption(self, i: int) -> str:
        step = self.steps[i]
        marks = "".join(f"<br><b>⚠ {escape(warning)}</b>" for warning in step.warnings)
        unseen = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"
        told = escape(self.describe(i, i - 1 if i else None))
        return (  # the picture in words, for a screen reader only
            f"<div style='line-height:1.4'>{escape(step.words)}{marks}"
            f"<span style='{unseen}'> {told}</span></div>"
        )
