"""Pictures of chapter 09: which block is read when, and how fast K and V can be read.

walks = [walk("by head", answers, [kernel], q, kv, tables, lens)]   # what it really reads, watched
walks_widget(walks)                                                 # on the pool, over time
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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


def walks_widget(walks: Seq[Walk]) -> Player:
    """Play, pause and a slider over the fetches: all walks above each other, on one clock. It
    begins at the end, where each block says how often it was fetched."""

    def caption(step: int) -> str:
        said = []
        for one in walks:
            done = sum(min(step, len(reads)) for reads in one.threads)
            total = sum(map(len, one.threads))
            state = "done" if done == total else f"{done} of {total} fetches"
            said.append(f"{one.way}: {state}, {done * one.read_bytes:,} bytes; ends at {one.last}")
        return f"<div style='line-height:1.4'>{'<br>'.join(said)}</div>"

    last = max(one.last for one in walks)
    return Player("the walks", last, lambda step: walks_frame(walks, step), caption, start=last)


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


def rates_picture(rates: Mapping[str, float]) -> style.Picture:
    """Tokens per second whose K and V are read, a bar for each way of `kv_rates`."""
    figure, axes = style.new_axes("Reading K and V, without computing", "tokens per µs", "",
                                  height=0.9 + 0.36 * len(rates))  # fmt: skip
    for place, rate in enumerate(rates.values()):
        axes.barh(place, rate / 1e6, 0.7, color=style.tint(style.PALETTE[0], 0.7))
        axes.text(rate / 1e6, place, f" {rate / 1e6:.1f}", va="center", fontsize=9.5)
    axes.set_yticks(range(len(rates)), labels=list(rates))
    axes.set(ylim=(len(rates) - 0.5, -0.5), xlim=(0, 1.1e-6 * max(rates.values())))
    told = "; ".join(f"{way}: {rate / 1e6:.1f}" for way, rate in rates.items())
    return style.Picture(figure, f"Tokens per µs whose K and V are read. {told}.")
