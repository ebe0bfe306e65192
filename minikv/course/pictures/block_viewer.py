"""Block tables and their pool, seen step by step: copied from live objects, then drawn.

    history = History(pool)
    history.snap("a prompt of 7 tokens", {"A": table})     # copies what is there now
    table.grow(1)
    history.snap("the 8th token", {"A": table})
    history.picture()                                      # all steps, from left to right
    history.widget()                                       # a player

A `Snapshot` says in plain data what is drawn, so a test can ask it. It reads the public
surface alone, of the engine's own classes or of anyone's: `num_blocks`, `num_free` and
`ref_count(block_id)` of the pool; `block_ids`, `block_size` and `num_tokens` of a table.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from operator import index as as_int
from typing import Any

from matplotlib.figure import Figure

from minikv.course.pictures import block_drawing, style
from minikv.course.pictures.player import Player
from minikv.course.pictures.snapshot import SeenTable, Snapshot


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


def _copy_table(name: str, table, texts: Sequence[str]) -> SeenTable:
    check_letter("tables", name)
    try:
        block_ids = tuple(as_int(block_id) for block_id in table.block_ids)
        return SeenTable(block_ids, as_int(table.num_tokens), tuple(texts))
    except TypeError as error:
        raise TypeError(
            f"table {name}: block_ids must be a list of ints and num_tokens an int, "
            f"were {table.block_ids!r} and {table.num_tokens!r}"
        ) from error


class Recording:
    """Snapshots, in the order in which they were taken, and the ways to look at them.

    A snapshot has `words` and `warnings`. Each kind of recording defines what it copies, and
    how that is told and drawn.
    """

    title: str  # "Block tables"

    def __init__(self) -> None:
        self.steps: list = []

    def describe(self, i: int, before: int | None) -> str:
        """Step `i` in words, and what has changed since step `before`."""
        raise NotImplementedError

    def draw(self, chosen: Sequence[int]) -> Figure:
        """These steps with their words."""
        raise NotImplementedError

    def frame(self, i: int) -> Figure:
        """One step. Things keep their places from frame to frame."""
        self.taken()
        return self.draw([i])

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
        words = [
            f"Step {i}, {self.steps[i].words}: {self.describe(i, before)}"
            for before, i in self.pairs(chosen)
        ]
        alt = f"{self.title}. {' '.join(words)}"
        return style.Picture(self.draw(chosen), alt, caption or self._counts(chosen))

    def _counts(self, chosen: Sequence[int]) -> str:
        counts = [self.counted(i) for i in chosen]
        told = "; ".join(
            f"{what}: {' → '.join(str(count[what]) for count in counts)}" for what in counts[0]
        )
        return f"{told[0].upper()}{told[1:]}."

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


class History(Recording):
    """Snapshots of a pool and the block tables over it, in the order they were taken."""

    title = "Block tables"
    steps: list[Snapshot]

    def begin(self) -> int:
        held = (i for i, step in enumerate(self.steps) if step.num_free < len(step.ref_counts))
        return next(held, 0)

    def __init__(self, pool):
        super().__init__()
        check_surface("pool", pool, ("num_blocks", "num_free", "ref_count"))
        self.pool = pool

    def snap(
        self,
        words: str,
        tables: Mapping[str, Any] | None = None,
        texts: Mapping[str, Sequence[str]] | None = None,
        cached: Iterable[int] = (),
    ) -> Snapshot:
        """Copy what is there now; later changes of the live objects don't reach the copy.

        `tables` are by letter: {"A": table}. `texts` gives a table's tokens, which are
        written into its slots. `cached` names the blocks that a prefix cache holds.
        """
        tables, texts = tables or {}, texts or {}
        if unknown := texts.keys() - tables.keys():
            raise ValueError(f"texts: no table {', '.join(sorted(unknown))} to put them on")
        sizes = {step.block_size for step in self.steps if step.tables}
        sizes |= {as_int(table.block_size) for table in tables.values()}
        if len(sizes) > 1:
            raise ValueError(f"tables: one block size a history, were {sorted(sizes)}")
        counts = []
        for block_id in range(self.pool.num_blocks):
            count = self.pool.ref_count(block_id)
            try:
                counts.append(as_int(count))
            except TypeError as error:
                raise TypeError(
                    f"pool.ref_count({block_id}): must be an int, was {count!r}"
                ) from error
        step = Snapshot(
            words,
            sizes.pop() if sizes else 4,  # no table has said: nothing of it is seen
            as_int(self.pool.num_free),
            tuple(counts),
            {name: _copy_table(name, table, texts.get(name, ())) for name, table in tables.items()},
            frozenset(cached),
        )
        self.steps.append(step)
        return step

    def describe(self, i: int, before: int | None) -> str:
        return self.steps[i].describe()

    def counted(self, i: int) -> dict[str, int]:
        step = self.steps[i]
        return {f"blocks in use of {len(step.ref_counts)}": len(step.ref_counts) - step.num_free}

    def draw(self, chosen: Sequence[int]) -> Figure:
        return block_drawing.film(self.steps, chosen)

    def frame(self, i: int) -> Figure:
        return block_drawing.frame(self.taken(), range(len(self.steps))[i])
