"""Pictures of chapter 02: what a cache gains, what appending costs, and two caches that fill."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from minikv.course.pictures.block_drawing import Pen
from minikv.course.pictures.player import Player
from minikv.course.pictures.style import FAINT, INK, PALETTE, PAPER, Picture, new_axes, tint
from minikv.course.pictures.timeline import visible
from minikv.language_model import LanguageModel

IN_PLACE, CAT = PALETTE[0], PALETTE[3]
LEFT, SIDE, TALL = 1.25, 0.3, 2.0  # inches


def speedup(ratios: torch.Tensor) -> Picture:
    """Time without a cache over time with one, (turns, new tokens)."""
    turns, count = ratios.shape
    ordered = ratios.sort(0).values
    middle = ordered[turns // 2]
    takeaway = f"{count} new tokens: {middle[-1]:.1f} times as fast with a cache"
    figure, axes = new_axes(takeaway, "new tokens", "time without / time with a cache")
    places, band = range(1, count + 1), f"least to greatest of {turns}"
    axes.fill_between(places, ordered[0], ordered[-1], color=PALETTE[6], alpha=0.5, label=band)
    axes.plot(places, middle, color=PALETTE[0], label="median")
    axes.axhline(1, color=FAINT, linewidth=1)
    axes.annotate("equally fast", (count, 1), (0, 3), textcoords="offset points", ha="right")
    axes.set(xlim=(0, count), ylim=(0, None))
    axes.legend(loc="upper left", frameon=False)
    return Picture(figure, f"The speed-up over the length of the answer. {takeaway}.")


def copies(written: Mapping[str, int], megabytes: Mapping[str, float]) -> Picture:
    """Tokens written by each way of appending, and how many megabytes that is."""
    times = written["concat"] / written["in place"]
    takeaway = f"torch.cat writes {times:.0f} tokens for each that is written in place"
    figure, axes = new_axes(takeaway, "k and v written (MB)", "", 1.8)
    for place, (name, color) in enumerate((("concat", CAT), ("in place", IN_PLACE))):
        axes.barh(-place, megabytes[name], 0.6, color=color)
        text = f"{megabytes[name]:,.1f} MB, {written[name]:,} tokens"
        axes.annotate(
            text, (megabytes[name], -place), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks([0, -1], labels=["torch.cat", "in place"])
    axes.set_xlim(0, 1.3 * megabytes["concat"])
    return Picture(figure, f"Two bars: {written['concat']:,} and {written['in place']:,} tokens.")


def append_times(cached: Sequence[int], cat: Sequence[float], place: Sequence[float]) -> Picture:
    """Milliseconds to append one token, over the number of cached tokens."""
    times = float(f"{cat[-1] / place[-1]:.2g}")  # the rest of the digits changes from run to run
    takeaway = f"At {cached[-1]:,} cached tokens torch.cat takes {times:,.0f} times as long"
    figure, axes = new_axes(takeaway, "tokens cached", "ms to append one token")
    axes.loglog(cached, cat, "o-", color=CAT, label="torch.cat, all layers")
    axes.loglog(cached, place, "s--", color=IN_PLACE, label="in place, all layers")
    axes.set_xticks(cached, labels=[f"{length:,}" for length in cached])
    low, high = 0.6 * min(*cat, *place), 1.6 * max(*cat, *place)
    ticks = [a * 10.0**b for b in range(-4, 5) for a in (1, 3) if low < a * 10.0**b < high]
    axes.set_yticks(ticks, labels=[f"{ms:g}" for ms in ticks])
    axes.set_ylim(low, high)
    axes.minorticks_off()
    axes.legend(loc="upper left", frameon=False)
    return Picture(figure, f"Two lines over the number of cached tokens. {takeaway}.")


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

    def picture(self) -> Picture:
        """The first two passes and the last one."""
        steps = [0, 1, len(self.passes) - 1]
        cat, placed = (
            sum(getattr(one, name) for one in self.passes) for name in ("by_cat", "in_place")
        )
        passes = len(self.passes)
        takeaway = f"After {passes} passes: torch.cat wrote {cat} tokens, in place {placed}"
        return Picture(self.frame(*steps, title=takeaway), f"Two caches that fill. {takeaway}.")

    def player(self) -> Player:
        return Player("two caches that fill", len(self.passes) - 1, self.frame, self.caption)

    def frame(self, *steps: int, title: str = "") -> Figure:
        top = 0.4 if title else 0.0
        pen = Pen(top + TALL * len(steps))
        if title:
            pen.text(0.1, 0.2, title, 11, weight="bold")
        for place, step in enumerate(steps):
            self._draw(pen, top + TALL * place, step)
        return pen.figure

    def caption(self, step: int) -> str:
        one = self.passes[step]
        kind = "decode" if step else "prefill"
        slots = f"{len(one.texts)} of {self.capacity} reserved slots filled"
        return f"pass {step + 1}, {kind}: {one.num_new} new, {slots}"

    def _draw(self, pen: Pen, top: float, step: int) -> None:
        one, all_ = self.passes[step], len(self.passes[step].texts)
        pen.text(0.1, top + 0.16, self.caption(step), 10)
        self._row(pen, top + 0.5, "cat: before", one.num_old, one.num_old, one.num_old, step)
        fresh = 0 if one.by_cat else all_
        self._row(pen, top + 0.92, "cat: after", all_, all_, fresh, step, lambda p: p.by_cat)
        self._row(
            pen, top + 1.5, "in place", self.capacity, all_, one.num_old, step, lambda p: p.in_place
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
