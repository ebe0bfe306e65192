"""A sequence's blocks in each group of layers, step by step.

    parts = GroupFilm(engine)
    parts.run(prompt_ids, max_tokens=6)
    parts.picture(steps=[0, 2]); parts.widget()

A column is a block of the text, a row a kind of layer. A `PartsSnapshot` is plain data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minikv.course.pictures import style
from minikv.course.pictures.block_viewer import Recording
from minikv.course.pictures.snapshot import counted
from minikv.engine import Engine
from minikv.sampling import SamplingParams

BOX, PITCH, ROW, LEFT, HEAD, FOOT = 0.38, 0.45, 0.5, 1.35, 0.36, 0.42  # inches
COLORS = (style.PALETTE[0], style.PALETTE[4])  # full layers, layers with a window
HELD, ROOM, NONE = "held", "room", "none"  # looks of a block
LOOKS = {HELD: "has K and V", ROOM: "room, not yet computed", NONE: "no memory"}


@dataclass(frozen=True)
class PartsSnapshot:
    """What the next step can read in each kind of layer, after a step."""

    words: str
    looks: tuple[tuple[str, ...], tuple[str, ...]]  # by block: full layers, layers with a window
    warnings: tuple[str, ...] = ()


class GroupFilm(Recording):
    """Snapshots of one sequence in an engine with groups."""

    title = "Blocks by kind of layer"
    steps: list[PartsSnapshot]

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine = engine

    def run(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Serve a prompt and take a snapshot before each step that computes; the tokens."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(list(prompt_ids), params)
        token_ids: list[int] = []
        while self.engine.has_unfinished:
            done = self.engine.stats().computed_tokens
            outputs = self.engine.step()
            num_tokens = self.engine.stats().computed_tokens - done
            for sequence in self.engine.scheduler.running:
                self.snap(sequence, num_tokens)
            token_ids = outputs[-1].token_ids if outputs else token_ids
        return token_ids

    def snap(self, sequence: Any, num_tokens: int) -> PartsSnapshot:
        """Copy what the step that has just run could read; it computed `num_tokens` tokens."""
        table, end = sequence.table, sequence.num_computed
        filled = -(-end // table.block_size)
        full = [HELD if i < filled else ROOM for i in range(len(table.block_ids))]
        has_windows = (table.pool.part_of[-1, table.block_ids] >= 0).tolist()
        windowed = [
            look if i >= table.first and has_windows[i] else NONE for i, look in enumerate(full)
        ]
        words = f"tokens {end - num_tokens} to {end - 1} are computed"
        if num_tokens == 1:
            words = f"token {end - 1} is computed"
        self.steps.append(PartsSnapshot(words, (tuple(full), tuple(windowed))))
        return self.steps[-1]

    def describe(self, i: int, before: int | None) -> str:
        full, windowed = self.steps[i].looks
        return (
            f"full layers have {counted(len(full), 'block')}; "
            f"layers with a window have {counted(len(windowed) - windowed.count(NONE), 'block')}."
        )

    def counted(self, i: int) -> dict[str, int]:
        full, windowed = self.steps[i].looks
        return {"blocks of full layers": len(full),
                "of layers with a window": len(windowed) - windowed.count(NONE)}  # fmt: skip

    def draw(self, chosen: Sequence[int]) -> Figure:
        """Panels under each other, in inches from the upper left corner."""
        panel = HEAD + 2 * ROW + 0.12
        height = len(chosen) * panel + FOOT
        figure, axes = style.canvas(height)
        for n, i in enumerate(chosen):
            y = n * panel + 0.1
            axes.text(0.1, y + 0.12, f"Step {i}: {self.steps[i].words}", fontsize=9.5,
                      weight="bold", color=style.INK, va="center")  # fmt: skip
            for row, name in enumerate(("full", "with a window")):
                middle = y + HEAD + (row + 0.5) * ROW
                axes.text(0.1, middle, name, fontsize=9.5, color=style.INK, va="center")
                for place, look in enumerate(self.steps[i].looks[row]):
                    _box(axes, LEFT + place * PITCH, middle, str(place), COLORS[row], look)
        x = 0.1
        middle = height - 0.5 * FOOT
        for look, words in LOOKS.items():
            _box(axes, x, middle, "", COLORS[1], look)
            axes.text(x + 0.48, middle, words, fontsize=9, color=style.INK, va="center")
            x += 2.3
        return figure


def _box(axes, x: float, middle: float, text: str, color: str, look: str) -> None:
    """A block: filled, pale where there is only room, a dashed outline where there is none."""
    kind: dict[str, Any] = dict(facecolor=color, edgecolor=style.INK, linewidth=0.9)
    ink = style.ink_on(color)
    if look == ROOM:
        kind |= dict(facecolor=style.tint(color, 0.2))
        ink = style.INK
    elif look == NONE:
        kind = dict(facecolor="none", edgecolor=style.FAINT, linestyle=(0, (2, 2)), linewidth=0.9)
        ink = style.FAINT
    box = FancyBboxPatch((x, middle - 0.17), BOX, 0.34, **kind,
                         boxstyle="round,pad=0,rounding_size=0.06")  # fmt: skip
    axes.add_patch(box)
    axes.text(x + BOX / 2, middle, text, fontsize=9, ha="center", va="center", color=ink)
