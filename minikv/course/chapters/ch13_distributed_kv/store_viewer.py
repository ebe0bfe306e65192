"""Blocks between engines and what lies between them, step by step.

    flow = StoreFlow({"prompt 1": first_ids, "prompt 2": second_ids})
    flow.snap("A computes prompt 1", {"engine A": engine_a, "engine B": None})
    flow.picture(); flow.widget()

A column is a block of the prompts; blocks that both begin with are one column. A row is an engine's
device, or the store. Where a block is, the engines' tiers say. A `FlowSnapshot` is plain data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minikv.course.pictures import style
from minikv.course.pictures.block_viewer import Recording
from minikv.course.pictures.snapshot import plural

STORE = "the store"
BOX, PITCH, ROW, LEFT, HEAD = 0.28, 0.33, 0.42, 0.8, 0.32  # inches
Key = tuple[int, ...]  # all tokens up to the end of a block


@dataclass(frozen=True)
class FlowSnapshot:
    """Who holds which blocks, at one moment."""

    words: str
    held: Mapping[str, frozenset[Key]]  # by row
    warnings: tuple[str, ...] = ()


class StoreFlow(Recording):
    """Snapshots of some engines and of the store between them."""

    title = "Blocks between engines"
    steps: list[FlowSnapshot]

    def __init__(self, texts: Mapping[str, Sequence[int]], block_size: int = 16):
        super().__init__()
        self.texts, self.block_size = texts, block_size
        self.keys: dict[Key, str] = {}  # what is written into each block
        for place, ids in enumerate(texts.values(), 1):
            for end in range(block_size, len(ids), block_size):
                key = tuple(ids[:end])
                self.keys[key] = f"{self.keys[key]} {place}" if key in self.keys else str(place)

    def snap(self, words: str, engines: Mapping[str, Any]) -> FlowSnapshot:
        """Copy where all blocks are now. An engine that does not run is None."""
        held: dict[str, set[Key]] = {name: set() for name in engines}
        held[STORE] = set()
        for name, engine in engines.items():
            for ids in self.texts.values() if engine is not None else ():
                for i, tiers in enumerate(engine.tiers.everywhere(ids, None), 1):
                    key = tuple(ids[: i * self.block_size])
                    if "device" in tiers:
                        held[name].add(key)
                    if "disk" in tiers or "store" in tiers:
                        held[STORE].add(key)
        step = FlowSnapshot(words, {row: frozenset(keys) for row, keys in held.items()})
        self.steps.append(step)
        return step

    def describe(self, i: int, before: int | None) -> str:
        held = self.steps[i].held
        return ", ".join(f"{row} {plural(len(keys), 'block')}" for row, keys in held.items()) + "."

    def counted(self, i: int) -> dict[str, int]:
        return {f"blocks in {row}": len(keys) for row, keys in self.steps[i].held.items()}

    def draw(self, chosen: Sequence[int]) -> Figure:
        return self._drawn(chosen)

    def frame(self, i: int) -> Figure:
        self.taken()
        return self._drawn([i])

    def _drawn(self, chosen: Sequence[int]) -> Figure:
        """Panels two by two, in inches from the upper left corner."""
        rows = list(self.steps[0].held)
        rows.insert(1, rows.pop(rows.index(STORE)))  # between the engines
        panel = (LEFT + len(self.keys) * PITCH, HEAD + len(rows) * ROW + 0.1)
        across = 2 if len(chosen) > 1 and 2 * panel[0] + 0.3 < style.WIDTH else 1
        down = -(-len(chosen) // across)
        height = down * panel[1] + 0.1
        figure = Figure(figsize=(style.WIDTH, height), facecolor=style.PAPER)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, style.WIDTH)
        axes.set_ylim(height, 0)
        axes.axis("off")
        for n, i in enumerate(chosen):
            x, y = (n % across) * (panel[0] + 0.3) + 0.1, (n // across) * panel[1] + 0.1
            axes.text(x, y + 0.13, f"{i}  {self.steps[i].words}", fontsize=8.5, weight="bold",
                      color=style.INK, va="center")  # fmt: skip
            before = self.steps[i - 1].held if i else {}
            for r, row in enumerate(rows):
                middle = y + HEAD + (r + 0.5) * ROW
                axes.text(x, middle, row, fontsize=8, color=style.INK, va="center")
                for c, (key, text) in enumerate(self.keys.items()):
                    here = key in self.steps[i].held[row]
                    new = here and key not in before.get(row, frozenset())
                    _box(axes, x + LEFT + c * PITCH, middle, text, r, here, new)
        return figure


def _box(axes, x: float, middle: float, text: str, row: int, here: bool, new: bool) -> None:
    """A block: filled where it is, dashed where it is not, with a thick line if it has just
    come."""
    color = style.PALETTE[(0, 5, 4)[row % 3]]
    look: dict[str, Any] = dict(facecolor="none", edgecolor=style.EDGE, linestyle=(0, (2, 2)))
    if here:
        look = dict(facecolor=color, edgecolor=style.INK)
    line = 2.4 if new else 0.8
    box = FancyBboxPatch((x, middle - 0.15), BOX, 0.3, linewidth=line, **look,
                         boxstyle="round,pad=0,rounding_size=0.05")  # fmt: skip
    axes.add_patch(box)
    ink = style.ink_on(color) if here else style.FAINT
    axes.text(x + BOX / 2, middle, text, fontsize=7.5, ha="center", va="center", color=ink)
