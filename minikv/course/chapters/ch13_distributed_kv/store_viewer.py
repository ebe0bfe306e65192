"""Blocks between engines and what lies between them, step by step.

    flow = StoreFlow({"prompt 1": first_ids, "prompt 2": second_ids})
    flow.snap("A computes prompt 1", {"engine A": engine_a, "engine B": None})
    flow.picture(); flow.widget()

A column is a block of the prompts; blocks that both begin with are one column. A row is an engine's
device, or the store. Where a block is, the engines' tiers say. A `FlowSnapshot` is plain data.

Blocks that an engine has fetched are hatched, on paper, with letters in a white field; those that
it has computed are filled. So they also differ in print and without colours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minikv.course.pictures import style
from minikv.course.pictures.block_viewer import Recording
from minikv.course.pictures.snapshot import counted

STORE = "the store"
BOX, PITCH, ROW, LEFT, HEAD, FOOT = 0.28, 0.33, 0.42, 0.8, 0.32, 0.4  # inches
COLORS = tuple(style.PALETTE[i] for i in (0, 5, 4))  # by row
Key = tuple[int, ...]  # all tokens up to the end of a block


@dataclass(frozen=True)
class FlowSnapshot:
    """Who holds which blocks, at one moment."""

    words: str
    held: Mapping[str, frozenset[Key]]  # by row
    fetched: Mapping[str, frozenset[Key]]  # those of `held` that came from the store, by engine
    num_fetched: int  # since the snapshot before
    warnings: tuple[str, ...] = ()


class StoreFlow(Recording):
    """Snapshots of some engines and of the store between them."""

    title = "Blocks between engines"
    steps: list[FlowSnapshot]

    def __init__(self, texts: Mapping[str, Sequence[int]], block_size: int = 16):
        super().__init__()
        self.texts, self.block_size = texts, block_size
        self.hits: dict[str, tuple[ref, int]] = {}  # of each row: its engine, and its hits so far
        self.keys: dict[Key, str] = {}  # what is written into each block
        for place, ids in enumerate(texts.values(), 1):
            for end in range(block_size, len(ids), block_size):
                key = tuple(ids[:end])
                self.keys[key] = f"{self.keys[key]} {place}" if key in self.keys else str(place)

    def snap(self, words: str, engines: Mapping[str, Any]) -> FlowSnapshot:
        """Copy where all blocks are now. An engine that does not run is None. Between two snapshots
        an engine serves at most one of the prompts: the first blocks that are new are then those
        that it has fetched."""
        held: dict[str, frozenset[Key]] = {}
        fetched: dict[str, frozenset[Key]] = {}
        stored: set[Key] = set()
        before = self.steps[-1] if self.steps else None
        num_fetched = 0
        for row, engine in engines.items():
            here, below = self._places(engine) if engine is not None else ([], set())
            stored |= below
            known = before.held[row] if before else frozenset()
            count = self._count_fetched(row, engine) if engine is not None else 0
            came = [key for key in here if key not in known][:count]
            stay = before.fetched[row] if before else frozenset()
            held[row] = frozenset(here)
            fetched[row] = (stay & held[row]) | frozenset(came)
            num_fetched += len(came)
        held[STORE] = frozenset(stored)
        self.steps.append(FlowSnapshot(words, held, fetched, num_fetched))
        return self.steps[-1]

    def _places(self, engine: Any) -> tuple[list[Key], set[Key]]:
        """The blocks on the engine's device, in order, and those it knows to be in the store."""
        here: dict[Key, None] = {}
        below: set[Key] = set()
        for ids in self.texts.values():
            for i, tiers in enumerate(engine.tiers.everywhere(ids, None), 1):
                key = tuple(ids[: i * self.block_size])
                if "device" in tiers:
                    here[key] = None
                if "disk" in tiers or "store" in tiers:
                    below.add(key)
        return list(here), below

    def _count_fetched(self, row: str, engine: Any) -> int:
        """How many blocks this engine has fetched since the last snapshot."""
        tiers = engine.stats().tiers
        hits = sum(tiers[name].hits for name in ("disk", "store") if name in tiers)
        known, before = self.hits.get(row, (None, 0))
        self.hits[row] = ref(engine), hits
        return hits - before if known is not None and known() is engine else hits

    def describe(self, i: int, before: int | None) -> str:
        held = self.steps[i].held
        told = ", ".join(f"{row} {counted(len(keys), 'block')}" for row, keys in held.items())
        return f"{told}; {self.steps[i].num_fetched} fetched."

    def counted(self, i: int) -> dict[str, int]:
        counts = {f"blocks in {row}": len(keys) for row, keys in self.steps[i].held.items()}
        return counts | {"fetched in this step": self.steps[i].num_fetched}

    def draw(self, chosen: Sequence[int]) -> Figure:
        """Panels two by two, in inches from the upper left corner."""
        rows = list(self.steps[0].held)
        rows.insert(1, rows.pop(rows.index(STORE)))  # between the engines
        panel = (LEFT + len(self.keys) * PITCH, HEAD + len(rows) * ROW + 0.1)
        across = 2 if len(chosen) > 1 and 2 * panel[0] + 0.3 < style.WIDTH else 1
        down = -(-len(chosen) // across)
        beside = across == 1 and panel[0] + 2.5 < style.WIDTH  # room for the legend at the right
        height = down * panel[1] + 0.1 + (0 if beside else FOOT)
        figure, axes = style.canvas(height)
        for n, i in enumerate(chosen):
            x, y = (n % across) * (panel[0] + 0.3) + 0.1, (n // across) * panel[1] + 0.1
            axes.text(x, y + 0.13, f"Step {i}: {self.steps[i].words}", fontsize=8.5,
                      weight="bold", color=style.INK, va="center")  # fmt: skip
            step, before = self.steps[i], self.steps[i - 1].held if i else {}
            for r, row in enumerate(rows):
                middle = y + HEAD + (r + 0.5) * ROW
                axes.text(x, middle, row, fontsize=8, color=style.INK, va="center")
                for c, (key, text) in enumerate(self.keys.items()):
                    look = "absent" if key not in step.held[row] else "computed"
                    if key in step.fetched.get(row, frozenset()):
                        look = "fetched"
                    new = look != "absent" and key not in before.get(row, frozenset())
                    _box(axes, x + LEFT + c * PITCH, middle, text, COLORS[r % 3], look, new)
        if beside:
            _legend(axes, panel[0] + 0.6, HEAD, 0, 0.38)
        else:
            _legend(axes, 0.1, height - 0.5 * FOOT, 2.1, 0)
        return figure


def _box(
    axes, x: float, middle: float, text: str, color: str, look: str, new: bool = False
) -> None:
    """A block: filled, hatched if it was fetched, dashed where it is not; with a thick line if it
    has just come."""
    kind: dict[str, Any] = dict(facecolor=color, edgecolor=style.INK)
    ink, field = style.ink_on(color), None
    if look == "absent":
        kind = dict(facecolor="none", edgecolor=style.EDGE, linestyle=(0, (2, 2)))
        ink = style.FAINT
    elif look == "fetched":
        kind = dict(facecolor=style.PAPER, edgecolor=style.INK)
        ink, field = style.INK, dict(facecolor=style.PAPER, edgecolor="none", pad=0.8)
        axes.add_patch(_outline(x, middle, facecolor="none", edgecolor=color, hatch="//////",
                                linewidth=0, zorder=1.5))  # fmt: skip
    axes.add_patch(_outline(x, middle, linewidth=2.4 if new else 0.8, **kind))
    axes.text(
        x + BOX / 2, middle, text, fontsize=7.5, ha="center", va="center", color=ink, bbox=field
    )


def _outline(x: float, middle: float, **look: Any) -> FancyBboxPatch:
    return FancyBboxPatch(
        (x, middle - 0.15), BOX, 0.3, **look, boxstyle="round,pad=0,rounding_size=0.05"
    )


def _legend(axes, x: float, middle: float, right: float, down: float) -> None:
    """A box of each look, with its name; each that far to the right of, or below, the last."""
    for words, color, look, new in (
        ("computed, or written", style.PALETTE[7], "computed", False),
        ("fetched from the store", style.PALETTE[7], "fetched", False),
        ("not there", style.PALETTE[7], "absent", False),
        ("thick: came in this step", style.PAPER, "computed", True),
    ):
        _box(axes, x, middle, "", color, look, new)
        axes.text(x + 0.36, middle, words, fontsize=8, color=style.INK, va="center")
        x, middle = x + right, middle + down
