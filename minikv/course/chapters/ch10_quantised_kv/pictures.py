"""Pictures of chapter 10: rulers, a block before and after, channels of K, what formats cost.

OutlierFilm(block, channel=9).widget()    # a player: one channel grows, step by step
"""

import math
from collections.abc import Mapping

import torch
from matplotlib.figure import Figure

from minikv.course.chapters.ch10_quantised_kv.answers import int4_along
from minikv.course.pictures import style
from minikv.course.pictures.player import Player

FACTORS = (1, 2, 4, 8, 16, 32)  # of an outlier
Interval = tuple[float, float, float]  # value, low, high


def rulers_picture(x: torch.Tensor, rulers: Mapping[str, torch.Tensor]) -> style.Picture:
    """Numbers between two rulers, each with its marks. A line leads from each number to the mark
    that stands for it."""
    lost = {name: float((x[:, None] - marks).abs().amin(1).max()) for name, marks in rulers.items()}
    parts = ", ".join(f"{name.partition(':')[0]} {error:.2f}" for name, error in lost.items())
    title = f"The largest distance to a mark: {parts}"
    figure, axes = style.new_axes(title, "value of a number, or of a mark", "", height=3.0)
    for y, marks in zip((2, 0), rulers.values(), strict=True):
        axes.plot([float(marks.min()), float(marks.max())], [y, y], color=style.FAINT, linewidth=1)
        axes.plot(marks.tolist(), [y] * len(marks), "|", color=style.INK, markersize=13)
        near = marks[(x[:, None] - marks).abs().argmin(1)]
        for number, mark in zip(x.tolist(), near.tolist(), strict=True):
            axes.plot([number, mark], [1, y], color=style.FAINT, linewidth=0.8)
        axes.plot(near.tolist(), [y] * len(x), "s", color=style.PALETTE[3], markersize=5)
    axes.plot(x.tolist(), [1] * len(x), "o", color=style.PALETTE[0], markersize=7)
    first, second = rulers
    axes.set_yticks([2, 1, 0], labels=[first, "the numbers", second])
    axes.set_ylim(-0.5, 2.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    words = "; ".join(
        f"{name}, from {float(marks.min()):.2f} to {float(marks.max()):.2f}"
        for name, marks in rulers.items()
    )
    numbers = ", ".join(f"{float(number):g}" for number in x)
    caption = "Circles: the numbers. Squares: the marks that stand for them."
    return style.Picture(figure, f"{title}. The numbers {numbers}. {words}.", caption)


class OutlierFilm:
    """A block (tokens, channels), one channel of which grows by each of FACTORS, in 4 bits by token
    and by channel."""

    def __init__(self, block: torch.Tensor, channel: int):
        self.channel, self.steps = channel, []
        for factor in FACTORS:
            x = block.clone()
            x[:, channel] *= factor
            self.steps.append((x, int4_along(x, -1), int4_along(x, -2)))

    def errors(self, step: int) -> tuple[float, float]:
        """Root mean square of the other channels' errors, by token and by channel."""
        x, *read = self.steps[step]
        others = [i for i in range(x.shape[1]) if i != self.channel]
        by_token, by_channel = ((y - x)[:, others].square().mean().sqrt() for y in read)
        return float(by_token), float(by_channel)

    def describe(self, step: int) -> str:
        by_token, by_channel = self.errors(step)
        return (
            f"Channel {self.channel} times {FACTORS[step]}: the other channels' error is "
            f"{by_token:.3f} by token, {by_channel:.3f} by channel."
        )

    def _frame(self, step: int) -> Figure:
        figure = Figure(figsize=(style.WIDTH, 1.95), layout="constrained", facecolor=style.PAPER)
        row = figure.subplots(1, 5)
        most = 4 * float(self.steps[0][0].abs().median())
        worst = 2 * self.errors(len(FACTORS) - 1)[0]  # one scale for all steps
        names = ("before", "by token: after", "error", "by channel: after", "error")
        limits = (most, most, worst, most, worst)
        x, by_token, by_channel = self.steps[step]
        parts = (x, by_token, by_token - x, by_channel, by_channel - x)
        for axes, part, name, limit in zip(row, parts, names, limits, strict=True):
            axes.imshow(part.abs().numpy(), cmap="Greys", vmin=0, vmax=limit, aspect="auto")
            axes.set(xticks=[self.channel], yticks=[])
            axes.tick_params(labelsize=7)
            axes.set_title(f"{name} (black: {limit:.2g})", fontsize=7.5, color=style.INK)
            axes.set_xlabel("channel", fontsize=7, color=style.INK)
        row[0].set_ylabel(f"tokens, times {FACTORS[step]}", fontsize=8, color=style.INK)
        return figure

    def widget(self) -> Player:
        """Play, pause and a slider over the factors."""
        return Player(
            "a block with an outlier", last=len(FACTORS) - 1, caption=self.describe,
            frame=self._frame,
        )  # fmt: skip


def channels_picture(parts: Mapping[str, torch.Tensor]) -> style.Picture:
    """For each name a tensor (tokens, channels): the range of every channel over the tokens."""
    wide = {
        name: (float((x.amax(0) - x.amin(0)).mean()), float(x.amax() - x.amin()))
        for name, x in parts.items()
    }
    words = "; ".join(
        f"{name}: a channel spans {one:.1f} on average, all together {whole:.1f}"
        for name, (one, whole) in wide.items()
    )
    figure = Figure(
        figsize=(style.WIDTH, 1.9 * len(parts) + 0.4), layout="constrained", facecolor=style.PAPER
    )
    for axes, (name, x) in zip(
        figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts.items(), strict=True
    ):
        axes.vlines(
            range(x.shape[1]),
            x.amin(0).tolist(),
            x.amax(0).tolist(),
            color=style.PALETTE[0],
            linewidth=3,
        )
        axes.plot(x.mean(0).tolist(), ".", color=style.INK, markersize=4)
        axes.axhline(0, color=style.FAINT, linewidth=0.6)
        axes.set_ylabel(name, color=style.INK)
        axes.spines[["top", "right"]].set_visible(False)
        one, whole = wide[name]
        axes.set_title(f"{name}: a channel spans {one:.1f} on average, all together {whole:.1f}",
                       loc="left", fontsize=10, fontweight="bold", color=style.INK)  # fmt: skip
    axes.set_xlabel("channel", color=style.INK)
    caption = "A bar from the least to the greatest number of a channel over the tokens, a dot for "
    return style.Picture(figure, f"Ranges of channels. {words}.", f"{caption}its mean.")


def quality_picture(costs: Mapping[str, tuple[float, Interval]]) -> style.Picture:
    """Bytes per token and KL with its interval, by format."""
    of_int4 = [cost[0] for name, (_, cost) in costs.items() if name.startswith("int4")]
    title = f"The forms of int4 cost a KL of {min(of_int4):.2g} to {max(of_int4):.2g}"
    figure, axes = style.new_axes(
        title, "bytes per token, scales included", "KL per token (nats)", height=3.8
    )
    for index, (size, (value, low, high)) in enumerate(costs.values()):
        color = style.color(index)
        axes.errorbar(size, value, [[value - low], [high - value]], fmt="o", capsize=3,
                      color=color, markeredgecolor=style.INK, ecolor=style.INK)  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(580, 1750)
    least, most = map(math.log10, axes.get_ylim())
    line = 11 * (most - least) / 190  # a line of text, in decades, about
    lead = {"arrowstyle": "-", "color": style.FAINT, "relpos": (0, 0.5)}
    columns: dict[int, list[tuple[float, str]]] = {}  # formats of nearly the same size
    for name, (size, (value, _, _)) in costs.items():
        columns.setdefault(round(size / 170), []).append((math.log10(value), name))
    for column in map(sorted, columns.values()):  # labels of a column stay clear of each other
        right = max(costs[name][0] for _, name in column) + 25
        places, below = [], -math.inf
        for place, _ in column:
            below = max(place, below + line)
            places.append(below)
        for (_, name), place in zip(column, places, strict=True):
            size, (value, _, _) = costs[name]
            axes.annotate(f"{name}  {value:.2g}", (size, value), (right, 10**place),
                          va="center", fontsize=8, color=style.INK,
                          arrowprops=lead)  # fmt: skip
    words = "; ".join(
        f"{name}: {size:,.0f} bytes, KL {value:.2g} ({low:.2g} to {high:.2g})"
        for name, (size, (value, low, high)) in costs.items()
    )
    caption = (
        "Bars: 95 % intervals of a bootstrap over the windows. The scale of KL is logarithmic."
    )
    return style.Picture(figure, f"{title}. {words}.", caption)
