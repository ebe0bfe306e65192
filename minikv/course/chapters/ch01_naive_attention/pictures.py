"""Pictures of chapter 01: tables of squares, one layer, heads in groups, turns, and repeated work.

Each function takes what the notebook has computed and returns a Picture; `RepeatedWork` is a
player.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from minikv.course.pictures.player import Player
from minikv.course.pictures.style import (
    FAINT,
    INK,
    PALETTE,
    PAPER,
    WIDTH,
    Picture,
    canvas,
    ink_on,
    tint,
)
from minikv.course.pictures.timeline import visible

BLUE, ORANGE, GREEN, YELLOW = PALETTE[0], PALETTE[3], PALETTE[5], PALETTE[4]
HIDDEN = tint(FAINT, 0.25)  # a score that the mask throws away
CENTERED: dict[str, Any] = dict(ha="center", va="center")


def panels(title: str, count: int, height: float, **options) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=PAPER)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure, figure.subplots(1, count, squeeze=False, **options)[0]


def titled(title: str, width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = canvas(height, width)
    axes.text(0.1, 0.5, title, fontsize=11, fontweight="bold", color=INK, va="center")
    return figure, axes


def squares(axes, shades, texts=None, x=0.0, y=0.0, size=8) -> None:
    """One square for each shades[i][j], None is an outline; the upper left one is around (x, y)."""
    for i, row in enumerate(shades):
        for j, shade in enumerate(row):
            face = PAPER if shade is None else shade
            corner = (x + j - 0.5, y + i - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fc=face, ec=FAINT, lw=0.5))
            if texts is not None:
                style = dict(CENTERED, fontsize=size, color=ink_on(face))
                axes.text(x + j, y + i, texts[i][j], **style)


def fit(axes, columns: int, rows: int) -> None:
    axes.set(xlim=(-0.55, columns - 0.45), ylim=(rows - 0.45, -0.55), aspect="equal")


def label(axes, rows=(), columns=(), first=0, size=8) -> None:
    """Names beside and below the squares; nothing else of the axes is left."""
    places = range(first, first + len(rows))
    axes.set_yticks(places, [visible(name) for name in rows], fontsize=size)
    axes.set_xticks(range(len(columns)), [visible(name) for name in columns], fontsize=size)
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


# ── One layer ─────────────────────────────────────────────────────────────────


def layer() -> Picture:
    """One layer of the transformer, and where `attend` is called."""
    title = "One layer: rows meet in attend, and nowhere else"
    figure, axes = titled(title, 25, 6.3)
    middle, above = 3.6, 1.6

    def box(x, width, text, shade, height=1.5):
        style = dict(boxstyle="round,pad=0.05,rounding_size=0.2", ec=INK, lw=0.9)
        corner = (x, middle - height / 2)
        axes.add_patch(FancyBboxPatch(corner, width, height, fc=shade, **style))
        axes.text(x + width / 2, middle, text, fontsize=8.5, color=INK, **CENTERED)

    def arrow(path):
        *start, end = path
        axes.plot(*zip(*path, strict=True), color=INK, lw=1, zorder=0)
        style = dict(arrowstyle="-|>", color=INK, lw=1, shrinkA=0, shrinkB=0)
        axes.annotate("", end, start[-1], arrowprops=style, zorder=0)

    alone = tint(BLUE, 0.25)
    box(2.1, 1.6, "norm", alone)
    box(4.4, 2.6, "$W_q$, $W_k$, $W_v$", alone)
    box(7.7, 2.2, "rotate\nq and k", alone)
    box(11.9, 2.9, "attend\n(layer, q, k, v)", tint(ORANGE, 0.5), height=2.3)
    box(15.7, 1.3, "$W_o$", alone)
    box(18.9, 3.2, "norm, MLP", alone)
    for x, end in ((0.9, 2.1), (3.75, 4.4), (7.05, 7.7), (9.95, 11.85), (14.85, 15.65),
                   (17.05, 17.65), (18.25, 18.85), (22.15, 22.75), (23.35, 24.2)):  # fmt: skip
        arrow([(x, middle), (end, middle)])
    for start, plus in ((1.3, 17.95), (18.55, 23.05)):  # what skips the boxes and is added
        arrow([(start, middle), (start, above), (plus, above), (plus, middle - 0.3)])
        axes.plot(plus, middle, "o", ms=11, mfc=PAPER, mec=INK, mew=0.9)
        axes.text(plus, middle, "+", fontsize=10, color=INK, **CENTERED)
    for x, text in ((0.5, "x"), (10.85, "q, k, v"), (24.5, "x")):
        axes.text(x, middle - (0.45 if "q" in text else 0), text, fontsize=9, color=INK, **CENTERED)
    for x, text, shade in (
        (0.2, "each row by itself", alone),
        (11.9, "a row meets the rows before it", tint(ORANGE, 0.5)),
    ):
        axes.add_patch(Rectangle((x, 5.4), 0.5, 0.5, fc=shade, ec=INK, lw=0.6))
        axes.text(x + 0.75, 5.65, text, fontsize=8.5, color=INK, va="center")
    return Picture(
        figure,
        f"{title}. x goes through norm, three matrices, rotation of q and k, "
        "attend and an output matrix, and is added to x; then the same around the MLP.",
    )


# ── The formula on four tokens ────────────────────────────────────────────────


def four_tokens(names, q, k, products, masked, weights, v, result) -> Picture:
    """Attention in tables of squares, from the vectors to the result."""
    share = 100 * float(weights[3, 0] + weights[3, 2])
    title = f"'+' looks for names: {share:.0f}% of its weight goes to x and y"
    figure, axes = titled(title, 28.4, 7.2)
    x, top = 1.3, 2.6

    def table(name, numbers):
        nonlocal x
        depth = numbers.masked_fill(numbers == -torch.inf, 0).abs()
        depth = 0.75 * depth / depth.max()
        shades = [
            [HIDDEN if n == -torch.inf else tint(BLUE, d) for n, d in zip(*row, strict=True)]
            for row in zip(numbers.tolist(), depth.tolist(), strict=True)
        ]
        texts = [
            ["-∞" if n == -torch.inf else f"{round(n, 2):.2g}" for n in row]
            for row in numbers.tolist()
        ]
        squares(axes, shades, texts, x, top, size=7)
        columns = numbers.shape[1]
        style = dict(CENTERED, fontsize=8.5, color=INK)
        axes.text(x + (columns - 1) / 2, top - 1, name, **style)
        for j in range(columns if columns == len(names) else 0):
            axes.text(x + j, top + 4, names[j], **style)
        x += columns

    def between(text, width, arrow=True):
        nonlocal x
        if arrow:
            ends = (x + width - 0.7, top + 1.5), (x - 0.3, top + 1.5)
            axes.annotate("", *ends, arrowprops=dict(arrowstyle="-|>", color=INK, lw=1))
        height = top + (0.85 if arrow else 1.5)
        axes.text(x - 0.5 + width / 2, height, text, fontsize=8, color=INK, **CENTERED)
        x += width

    for i, name in enumerate(names):
        axes.text(x - 0.9, top + i, name, fontsize=8.5, color=INK, **CENTERED)
    table("q", q)
    between("·", 0.6, arrow=False)
    table("k", k)
    between("", 1.2)
    table("q · k", products)
    between("÷ √2,\nmask", 1.8)
    table("scores", masked)
    between("soft-\nmax", 1.8)
    table("weights", weights)
    between("·", 0.6, arrow=False)
    table("v", v)
    between("", 1.2)
    table("result", result)
    return Picture(figure, f"{title}. Tables of squares: q and k, their products, the scores with "
                   "-∞ where the mask hides a key, the weights, v, and the result.")  # fmt: skip


# ── Masks and heads ───────────────────────────────────────────────────────────


def masks(shapes: dict[str, torch.Tensor]) -> Picture:
    """Masks (queries, keys) by name, the queries at the last positions."""
    title = "A chunk sees a rectangle: the last rows of the triangle"
    figure, row = panels(title, len(shapes), 2.9)
    for axes, (name, mask) in zip(row, shapes.items(), strict=True):
        num_queries, num_keys = mask.shape
        first = num_keys - num_queries
        shades = [[tint(BLUE, 0.7) if sees else None for sees in line] for line in mask.tolist()]
        squares(axes, shades, y=first)
        fit(axes, num_keys, num_keys)
        positions = [str(position) for position in range(num_keys)]
        label(axes, positions[first:], positions, first=first)
        axes.tick_params(axis="x", rotation=0)
        axes.set_title(name, fontsize=9, color=INK)
        axes.set_xlabel("position of the key", fontsize=9)
    row[0].set_ylabel("position of the query", fontsize=9)
    sizes = "; ".join(f"{name}, {tuple(mask.shape)}" for name, mask in shapes.items())
    return Picture(figure, f"{title}. Masks, filled where a query may see a key: {sizes}.")


def shared_heads() -> Picture:
    """Which KV head each of four query heads reads: multi-head, grouped-query, multi-query."""
    kinds = [("multi-head", 4), ("grouped-query, as in tinypy", 2), ("multi-query", 1)]
    title = "Neighbouring query heads share a KV head, so there is less to keep"
    figure, row = panels(title, len(kinds), 2.5)
    for axes, (name, kv_heads) in zip(row, kinds, strict=True):
        for head in range(4):
            kv_head = head // (4 // kv_heads)
            low = 1.5 + (kv_head - (kv_heads - 1) / 2) * (4 / kv_heads)
            axes.plot([0, 2], [head, low], color=FAINT, lw=1.2, zorder=0)
            for x, y, text in ((0, head, f"q{head}"), (2, low, f"kv{kv_head}")):
                shade = tint((BLUE, ORANGE, GREEN, YELLOW)[kv_head], 0.55)
                box = dict(boxstyle="round,pad=0.35", fc=shade, ec=INK, lw=0.7)
                axes.text(x, y, text, bbox=box, fontsize=9, color=INK, **CENTERED)
        axes.set(xlim=(-0.5, 2.5), ylim=(3.6, -0.6))
        axes.axis("off")
        axes.set_title(f"{name}: {kv_heads} KV head{'s' * (kv_heads > 1)}", fontsize=9, color=INK)
    alt = "Three panels: four query heads, each joined to the KV head that it reads."
    return Picture(figure, f"{alt} {title}.")


def two_heads(tokens, heads: dict[str, torch.Tensor], outlined: torch.Tensor) -> Picture:
    """Weights (queries, keys) of two heads, by name; in the second, some squares are outlined."""
    title = "Two heads of tinypy: one looks at the token before, one at what followed last time"
    figure, row = panels(title, 2, 4.7)
    for axes, (name, weights) in zip(row, heads.items(), strict=True):
        shades = [
            [tint(BLUE, x) if j <= i else None for j, x in enumerate(line)]
            for i, line in enumerate(weights.tolist())
        ]
        squares(axes, shades)
        fit(axes, len(tokens), len(tokens))
        label(axes, tokens, tokens, size=7)
        axes.set_title(name, fontsize=9, color=INK)
        axes.set_xlabel("key", fontsize=9)
    row[0].set_ylabel("query", fontsize=9)
    for i, j in outlined.nonzero().tolist():
        outline = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, ec=INK, lw=1.6, zorder=3)
        row[1].add_patch(outline)
    alt = f"Attention weights over {len(tokens)} tokens of Python: {'; '.join(heads)}."
    return Picture(figure, f"{alt} {title}.")


# ── RoPE ──────────────────────────────────────────────────────────────────────


def arrow(axes, angle: float, shade, text: str) -> None:
    tip = (math.cos(angle), math.sin(angle))
    style = dict(arrowstyle="-|>", color=shade, lw=1.6, shrinkA=0, shrinkB=0)
    axes.annotate("", tip, (0, 0), arrowprops=style)
    axes.text(1.18 * tip[0], 1.18 * tip[1], text, fontsize=8, color=INK, **CENTERED)


def dial(axes, title: str) -> None:
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.35, 1.35), aspect="equal")
    axes.axis("off")
    axes.set_title(title, fontsize=9, color=INK)


def speeds_of_pairs(speeds: torch.Tensor) -> Picture:
    """Three pairs of channels at the positions 0 to 5; `speeds` in radians per token."""
    last = len(speeds) - 1
    ends = f"from {speeds[0]:.0f} radian per token to {speeds[-1]:.5f}"
    title = f"Each pair turns at its own speed: {ends}"
    figure, row = panels(title, 3, 2.7)
    for axes, pair in zip(row, (0, len(speeds) // 8, last), strict=True):
        for position in range(6):
            text = ("" if position else "  0 to 5") if pair == last else str(position)
            shade = tint(BLUE, 0.3 + 0.14 * position)
            arrow(axes, position * float(speeds[pair]), shade, text)
        name = f"pair {pair}{', the last' if pair == last else ''}"
        dial(axes, f"{name}: {speeds[pair]:.2g} rad per token")
    return Picture(figure, f"Arrows at positions 0 to 5 for three pairs of channels. {title}.")


def turning_together(speed: float, distances, products, elsewhere) -> Picture:
    """One pair of query and key at two places in a text, and q · k over the distance.

    products: q · k with the key at position 0; elsewhere: (name, the same with another key).
    """
    title = "Query and key turn together: the angle between them depends on their distance"
    figure, row = panels(title, 3, 2.7, width_ratios=[1, 1, 1.6])
    for axes, key_at in zip(row, (0, 100), strict=False):
        query_at = key_at + 7
        arrow(axes, key_at * speed, ORANGE, "k")
        arrow(axes, query_at * speed + 0.4, BLUE, "q")
        dial(axes, f"query at {query_at}, key at {key_at}")
    name, others = elsewhere
    axes = row[2]
    axes.plot(distances, products, "-", color=BLUE, lw=1.2, label="key at 0")
    axes.plot(distances[::4], others[::4], "o", color=ORANGE, ms=4, mfc="none", label=name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("distance (tokens)", fontsize=9)
    axes.set_ylabel("q · k, all pairs", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(frameon=False, fontsize=8)
    alt = f"{title}. On the right, q · k over the distance is one curve for both places."
    return Picture(figure, alt)


# ── Repeated work ─────────────────────────────────────────────────────────────


class RepeatedWork:
    """Naive generation as attention matrices, one per pass; numbers say how often a score
    has been computed by then."""

    def __init__(self, prompt: list[str], new: list[str]):
        """The texts of the tokens. The last new token is never fed."""
        self.prompt, self.tokens, self.passes = len(prompt), (prompt + new)[:-1], len(new)
        self.rows = [self.prompt + number for number in range(self.passes)]

    def draw(self, axes, number: int) -> None:
        length = self.rows[number]
        shades, texts = [], []
        for row in range(length):
            times = number + 1 - max(0, row - self.prompt + 1)
            shade = tint(BLUE, 0.8) if times == 1 else tint(ORANGE, min(1, 0.14 * times))
            shades.append([shade] * (row + 1) + [HIDDEN] * (length - row - 1))
            texts.append([str(times)] * (row + 1) + [""] * (length - row - 1))
        squares(axes, shades, texts)
        label(axes, self.tokens[:length])
        fit(axes, len(self.tokens), len(self.tokens))
        new = length if number == 0 else 1
        axes.set_title(f"pass {number + 1}: {length} rows, {new} new", fontsize=9, color=INK)

    def frame(self, step: int) -> Figure:
        computed = sum(self.rows[:step])
        first_time = self.rows[step - 1] if step else 0
        title = f"{step} of {self.passes} tokens written, {computed} rows computed for them"
        figure, (matrix, bars) = panels(title, 2, 3.6, width_ratios=[3, 2])
        if step:
            self.draw(matrix, step - 1)
        else:
            matrix.axis("off")
        for place, (count, shade) in enumerate(
            [(first_time, BLUE), (computed - first_time, ORANGE)]
        ):
            bars.bar(place, count, color=tint(shade, 0.8), edgecolor=INK, linewidth=0.7)
            bars.text(place, count, f"{count}", ha="center", va="bottom", fontsize=9)
        bars.set_xticks([0, 1], ["for the first time", "again"])
        bars.set(ylim=(0, 1.1 * sum(self.rows)), ylabel="token rows so far")
        bars.spines[["top", "right"]].set_visible(False)
        return figure

    def player(self) -> Player:
        def caption(step):
            if step == 0:
                return "nothing computed yet"
            fed = self.rows[step - 1]
            return f"pass {step}: reads {fed} tokens, the last is {visible(self.tokens[fed - 1])!r}"

        return Player("naive generation", self.passes, self.frame, caption, start=self.passes)
