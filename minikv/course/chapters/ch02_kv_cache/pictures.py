"""Pictures of chapter 02: what a cache gains, and two caches that fill."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from minikv.course.pictures.player import Player
from minikv.course.pictures.scene import Pen
from minikv.course.pictures.style import FAINT, INK, PALETTE, PAPER, Picture, new_axes, tint
from minikv.course.pictures.timeline import visible
from minikv.language_model import LanguageModel

IN_PLACE = PALETTE[0]
LEFT, SIDE, TALL = 1.25, 0.3, 1.6  # inches


def speedup(ratios: torch.Tensor) -> Picture:
    """Time without a cache over time with one, up to each new token."""
    count = len(ratios)
    takeaway = f"{count} new tokens: {ratios[-1]:.1f} times as fast with a cache"
    figure, axes = new_axes(takeaway, "new tokens", "time without / time with a cache")
    axes.plot(range(1, count + 1), ratios, color=PALETTE[0])
    axes.axhline(1, color=FAINT, linewidth=1)
    axes.annotate("equally fast", (count, 1), (0, 3), textcoords="offset points", ha="right")
    axes.set(xlim=(0, count), ylim=(0, None))
    return Picture(figure, f"The speed-up over the length of the answer. {takeaway}.")


# ── Two caches that fill ──────────────────────────────────────────────────────


@dataclass(frozen=True)
class Pass:
    """What a pass found and left in layer 0 of both caches."""

    texts: list[str]  # of all tokens so far
    num_new: int
    by_cat: int  # tokens written
    in_place: int

    @property
    def num_old(self) -> int:
        return len(self.texts) - self.num_new


class Film:
    """A prompt and its greedy answer in two caches, a growing one and a preallocated one.

    What is drawn has been seen in the caches' memory: a tensor at another address has been
    written anew, and a slot whose content differs has been written.
    """

    def __init__(self, lm: LanguageModel, prompt: str, grown, placed, passes: int = 8):
        self.capacity, self.passes = placed.capacity, []
        placed.kv[0].fill_(7.0)  # reserved memory may still hold an earlier film's numbers
        texts: list[str] = []
        fed = lm.encode(prompt)
        for _ in range(passes):
            old = grown.k[0]
            before = placed.kv[0].clone()
            lm.logits(fed, grown)
            logits = lm.logits(fed, placed)
            texts = [*texts, *(lm.decode([token]) for token in fed)]
            anew = old is not None and grown.k[0].data_ptr() != old.data_ptr()
            differs = placed.kv[0].view(torch.int32) != before.view(torch.int32)  # NaN too
            slots = differs.flatten(2).any(-1).any(0)  # (capacity,)
            by_cat = len(grown.k[0]) if anew else 0
            self.passes.append(Pass(texts, len(fed), by_cat, int(slots.sum())))
            fed = [int(logits[-1].argmax())]

    def player(self) -> Player:
        last = len(self.passes) - 1
        return Player("two caches that fill", last, self.frame, self.caption, start=last)

    def frame(self, step: int) -> Figure:
        pen = Pen(TALL)
        self._draw(pen, step)
        return pen.figure

    def caption(self, step: int) -> str:
        one = self.passes[step]
        kind = "decode" if step else "prefill"
        slots = f"{len(one.texts)} of {self.capacity} reserved slots filled"
        return f"pass {step + 1}, {kind}: {one.num_new} new, {slots}"

    def _draw(self, pen: Pen, step: int) -> None:
        one, all_ = self.passes[step], len(self.passes[step].texts)
        self._row(pen, 0.25, "cat: before", one.num_old, one.num_old, one.num_old, step)
        fresh = 0 if one.by_cat else all_
        self._row(pen, 0.67, "cat: after", all_, all_, fresh, step, lambda p: p.by_cat)
        self._row(
            pen, 1.25, "in place", self.capacity, all_, one.num_old, step, lambda p: p.in_place
        )

    def _row(
        self, pen: Pen, y: float, label: str, num_slots: int, filled: int, written_from: int,
        step: int, written: Callable[[Pass], int] | None = None,
    ) -> None:  # fmt: skip
        pen.text(LEFT - 0.12, y, label, 9, "right", weight="bold")
        for slot in range(num_slots):
            x, fresh = LEFT + slot * SIDE, written_from <= slot < filled
            face = tint(IN_PLACE, 0.45 if fresh else 0.15) if slot < filled else PAPER
            edge = INK if slot < filled else FAINT
            box = x + 0.02, y - SIDE / 2 + 0.02, SIDE - 0.04, SIDE - 0.04
            pen.square(*box, face, edge, line=2.0 if fresh else 0.6)
            if slot < filled:
                text, weight = self.passes[step].texts[slot], "bold" if fresh else "normal"
                pen.text(x + SIDE / 2, y, visible(text, 3), 7.4, "center", weight=weight)
        if written is not None:
            counts = [written(one) for one in self.passes[: step + 1]]
            words = f"{counts[-1]} written\n{sum(counts)} in all"
            pen.text(LEFT + (self.capacity + 0.3) * SIDE, y, words, 9)
