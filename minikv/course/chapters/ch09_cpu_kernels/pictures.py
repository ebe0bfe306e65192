"""Pictures of chapter 09: which bytes are read when, and what this CPU can do at best.

walks = walks_of(kernels, q, kv, tables, lens)   # what the kernels really read, watched
walks_picture(walks)                             # a row per thread, a column per read
walks_widget(walks)                              # the same over time, on the pool
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from minikv.course.chapters.ch08_triton_paged_attention.pictures import Roof
from minikv.course.chapters.ch09_cpu_kernels.watch import Watch, Watched, plainly
from minikv.course.pictures import style
from minikv.course.pictures.player import Player

# ── What is read when ─────────────────────────────────────────────────────────────────────


class Read(NamedTuple):
    """A block of one KV head is fetched, and used until the next one is."""

    block: int
    kv_head: int
    sequence: int


@dataclass(frozen=True)
class Walk:
    """What a kernel fetches, in order, if a thread's cache has room for one block of a KV head."""

    way: str  # in words
    threads: list[list[Read]]
    num_blocks: int  # of the pool
    kv_heads: int
    read_bytes: int  # of one read

    @property
    def last(self) -> int:
        return max(map(len, self.threads))

    @property
    def num_bytes(self) -> int:
        return self.read_bytes * sum(map(len, self.threads))


def walk(
    way: str, module: ModuleType, calls: Seq[Callable], q, kv, tables, lens, num_bytes: int = 4
) -> Walk:
    """Watch `calls`, one for each thread, each a function of (q, kv, tables, lens, out).

    The kernels of `module` run as plain Python, so the arrays should be small.
    """
    num_blocks, block_size, _, kv_heads, dim = kv.shape
    block = block_size * 2 * kv_heads * dim
    owner: dict[int, int] = {}
    for row, length in enumerate(lens.tolist()):
        owner |= dict.fromkeys(tables[row, : -(-length // block_size)].tolist(), row)
    threads = []
    for call in calls:
        watch = Watch()
        with plainly(module):
            call(q, Watched(kv, "kv", watch), tables, lens, np.empty_like(q))
        reads: list[Read] = []
        for element in watch.reads["kv"]:
            read = Read(element // block, element // dim % kv_heads, owner[element // block])
            if not reads or reads[-1] != read:
                reads.append(read)
        threads.append(reads)
    return Walk(way, threads, num_blocks, kv_heads, block_size * 2 * dim * num_bytes)


def walks_picture(walks: Seq[Walk]) -> style.Picture:
    """A row for each thread, a column for each fetch; the number is the block's id."""
    rows = sum(len(walk.threads) for walk in walks)
    figure, axes = style.canvas(0.35 + 0.32 * len(walks) + 0.34 * rows + 0.5)
    last = max(walk.last for walk in walks)
    left, wide = 0.95, (style.WIDTH - 1.05) / last
    y = 0.1
    for one in walks:
        text = f"{one.way}: {sum(map(len, one.threads))} fetches, {one.num_bytes:,} bytes"
        axes.text(
            0.1, y + 0.17, text, fontsize=9.5, fontweight="bold", va="center", color=style.INK
        )
        y += 0.32
        for number, reads in enumerate(one.threads):
            axes.text(
                0.1, y + 0.14, f"thread {number}", fontsize=8.5, va="center", color=style.FAINT
            )
            for place, read in enumerate(reads):
                _draw_read(axes, left + place * wide, y, wide, read, f"{read.block}")
            y += 0.34
    axes.annotate("", (style.WIDTH - 0.1, y + 0.08), (left, y + 0.08),
                  arrowprops=dict(arrowstyle="->", color=style.FAINT))  # fmt: skip
    axes.text(left, y + 0.26, "time, one fetch after another", fontsize=8.5, va="center",
              color=style.FAINT)  # fmt: skip
    axes.text(style.WIDTH - 0.1, y + 0.26, "with a dark edge below: KV head 1", fontsize=8.5,
              va="center", ha="right", color=style.FAINT)  # fmt: skip
    blocks: dict[int, dict[int, None]] = {}
    for read in walks[0].threads[0]:
        blocks.setdefault(read.sequence, {})[read.block] = None
    for place, (row, held) in enumerate(sorted(blocks.items())):
        x = left + place * (style.WIDTH - left) / len(blocks)
        _draw_read(axes, x, y + 0.42, 0.24, Read(0, 0, row), style.letter(row), 0.22)
        axes.text(x + 0.3, y + 0.53, f"sequence {style.letter(row)}: blocks "
                  f"{', '.join(map(str, held))}", fontsize=8.5, va="center",
                  color=style.INK)  # fmt: skip
    told = "; ".join(
        f"{one.way}: {len(one.threads)} thread{'s' * (len(one.threads) > 1)}, "
        f"{sum(map(len, one.threads))} fetches, the longest row {one.last}"
        for one in walks
    )
    return style.Picture(figure, f"Which block each thread fetches, in order. {told}.")


def _draw_read(axes, x, y, wide, read: Read, text: str, high: float = 0.28) -> None:
    color = style.tint(style.color(read.sequence), 0.55)
    axes.add_patch(
        Rectangle((x, y), wide * 0.94, high, facecolor=color, edgecolor=style.INK, linewidth=0.6)
    )
    if read.kv_head:
        axes.add_patch(Rectangle((x, y + high), wide * 0.94, -0.2 * high, facecolor=style.INK))
    axes.text(x + wide * 0.47, y + 0.42 * high, text, fontsize=8.3, ha="center", va="center",
              color=style.INK)  # fmt: skip


def walks_widget(walks: Seq[Walk]) -> Player:
    """Play, pause and a slider over the fetches: all walks above each other, on one clock."""

    def caption(step: int) -> str:
        said = []
        for one in walks:
            done = sum(min(step, len(reads)) for reads in one.threads)
            total = sum(map(len, one.threads))
            state = "done" if done == total else f"{done} of {total} fetches"
            said.append(f"{one.way}: {state}, {done * one.read_bytes:,} bytes")
        return f"<div style='line-height:1.4'>{'<br>'.join(said)}</div>"

    last = max(one.last for one in walks)
    return Player("the walks", last, lambda step: walks_frame(walks, step), caption)


def walks_frame(walks: Seq[Walk], step: int) -> Figure:
    """The pool under each walk: what is being fetched in this step, and what has been."""
    figure, axes = style.canvas(0.1 + 0.98 * len(walks))
    size = min(0.62, (style.WIDTH - 0.2) / walks[0].num_blocks)
    for place, one in enumerate(walks):
        y = 0.1 + 0.98 * place
        axes.text(0.1, y + 0.1, one.way, fontsize=9.5, fontweight="bold", va="center")
        now = {(r[step - 1].block, r[step - 1].kv_head): (t, r[step - 1])
               for t, r in enumerate(one.threads) if 0 < step <= len(r)}  # fmt: skip
        before: dict[tuple[int, int], int] = {}
        owner: dict[int, int] = {}
        for reads in one.threads:
            for read in reads[: max(0, step)]:
                key = read.block, read.kv_head
                before[key] = before.get(key, 0) + 1
            owner |= {read.block: read.sequence for read in reads}
        for block in range(one.num_blocks):
            x = 0.1 + block * size
            axes.text(x + size / 2, y + 0.29, str(block), fontsize=7, ha="center", va="center",
                      color=style.FAINT)  # fmt: skip
            for head in range(one.kv_heads):
                key, top = (block, head), y + 0.37 + 0.25 * head
                shade = style.color(owner[block]) if block in owner else None
                strength = 0.85 if key in now else 0.3 if key in before else 0.0
                face = "none" if shade is None else style.tint(shade, strength)
                axes.add_patch(
                    Rectangle((x, top), size * 0.92, 0.23, facecolor=face,
                              edgecolor=style.INK if key in now else style.FAINT,
                              linewidth=2 if key in now else 0.6)
                )  # fmt: skip
                count = before.get(key, 0)
                name = style.letter(owner[block]) if block in owner else ""
                text = f"{name} {count}×" if count else name
                text = f"{name} t{now[key][0]}" if key in now else text
                ink = style.ink_on(shade) if shade and key in now else style.INK
                axes.text(x + size * 0.46, top + 0.115, text, fontsize=7.5, ha="center",
                          va="center", color=ink)  # fmt: skip
    return figure


# ── How fast ──────────────────────────────────────────────────────────────────────────────


def rates_picture(sizes: Seq[int], rates: Seq[float], stages: dict[str, int]) -> style.Picture:
    """Bytes per second by how much is read again and again; the caches' sizes as lines."""
    best, last = max(rates) / 1e9, rates[-1] / 1e9
    title = f"Reading: up to {best:,.0f} GB/s from a cache, {last:,.0f} GB/s of {_size(sizes[-1])}"
    figure, axes = style.new_axes(title, "bytes read, over and over", "GB/s", height=3.2)
    axes.plot(sizes, [rate / 1e9 for rate in rates], "o-", color=style.PALETTE[0], markersize=5)
    axes.set(xscale="log", ylim=(0, 1.15 * best))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))
    for name, size in stages.items():
        if sizes[0] <= size <= sizes[-1]:
            axes.axvline(size, color=style.FAINT, linewidth=0.8, linestyle=":")
            axes.text(size, 1.13 * best, f" {name}", fontsize=8.5, va="top", color=style.FAINT)
    told = "; ".join(f"{_size(s)} {r / 1e9:.0f}" for s, r in zip(sizes, rates, strict=True))
    return style.Picture(figure, f"GB/s by size of what is read. {told}.")


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}"
        value /= 1024
    return f"{value:,.0f} GiB"


class Point(NamedTuple):
    """A kernel's run: what it moved and computed, and how long that took."""

    name: str
    batch: int
    num_bytes: float
    operations: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.operations / self.num_bytes

    @property
    def rate(self) -> float:
        return self.operations / self.seconds


def cpu_roofline(roofs: dict[str, Roof], points: Seq[Point]) -> style.Picture:
    """Attained over attainable operations per second (Williams et al., 2009), measured both."""
    upper = next(iter(roofs.values()))
    most = max(point.batch for point in points)
    shares = {p.name: p.rate / upper.attainable(p.intensity) for p in points if p.batch == most}
    least, best = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    title = f"Batch {most}, share of the roof: {shares[least]:.0%} ({least}), {shares[best]:.0%} "
    title += f"({best})"
    figure, axes = style.new_axes(
        title, "operations per byte that must be read", "GFLOP/s: 10⁹ operations per second",
        height=4.4,
    )  # fmt: skip
    places_of = [point.intensity for point in points]
    ends = [min(places_of) / 2, 4 * max(places_of)]
    for (name, roof), line in zip(roofs.items(), ("-", "--"), strict=False):
        places = [ends[0], min(max(roof.bend, ends[0]), ends[1]), ends[1]]
        axes.plot(places, [roof.attainable(x) / 1e9 for x in places], line, color=style.PALETTE[0],
                  linewidth=2, label=name)  # fmt: skip
    marks = dict(zip(dict.fromkeys(point.name for point in points), "osD^", strict=False))
    for place, (name, mark) in enumerate(marks.items()):
        of = [point for point in points if point.name == name]
        axes.plot([p.intensity for p in of], [p.rate / 1e9 for p in of], mark, linestyle=":",
                  color=style.PALETTE[(3, 5, 1, 4)[place]], markersize=7, label=name)  # fmt: skip
        above = max(points, key=lambda point: point.rate).name == name
        for at in dict.fromkeys(point.intensity for point in of):  # one label for marks that meet
            met = [point for point in of if point.intensity == at]
            at_y = (max if above else min)(point.rate for point in met) / 1e9
            axes.annotate(", ".join(f"{point.batch}" for point in met), (at, at_y),
                          (7, 5) if above else (7, -12), textcoords="offset points",
                          fontsize=8.5, color=style.INK)  # fmt: skip
    lowest = min(point.rate for point in points) / 1e9
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(lowest / 2, 2 * upper.rate / 1e9))
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    told = "; ".join(
        f"{p.name}, batch {p.batch}: {p.intensity:.1f} operations per byte, {p.rate / 1e9:.1f} "
        "GFLOP/s"
        for p in points
    )
    return style.Picture(figure, f"Rooflines on log scales. {told}.", "Numbers: the batch.")
