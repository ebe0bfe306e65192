"""Pictures of chapter 08: what each program of a decode reads, and how fast it could read it.

    launches = [make(q, kv, tables, lens, tile) for make in (Launch.by_head, Launch.grouped)]
    launches_picture(launches)          # one row per program, one column per turn

A `Launch` is arithmetic: it says what the kernels do on any machine, without running them.
In the interpreter `watch` sees what they really load, and `Launch.agrees` compares the two.
"""

from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.patches import FancyBboxPatch, Rectangle

from minikv.course.pictures import style


def num_splits(lens: Seq[int], rows: int, min_split: int) -> list[int]:
    """Splits of each sequence: what `count_splits` of kernels/splits.py counts on the device.

    rows: how many splits the scratch memory of a launch has room for. min_split: tokens.
    """
    share = max(-(-sum(lens) // rows), min_split)
    return [max(n // share, 1) for n in lens]


# ── Who reads what ────────────────────────────────────────────────────────────


class Program(NamedTuple):
    """One program, and the keys [start, end) of its sequence that it reads."""

    place: tuple[int, int]  # in the grid: axes 0 and 1
    sequence: int
    kv_head: int
    start: int
    end: int


@dataclass(frozen=True)
class Launch:
    """The programs of one decode launch, in the order of the grid."""

    way: str  # in words
    axes: str  # what a program's numbers on axes 0 and 1 stand for
    programs: tuple[Program, ...]
    tables: tuple[tuple[int, ...], ...]  # physical blocks of each sequence
    num_blocks: int  # of the pool
    block_size: int
    num_kv_heads: int
    tile: int  # keys that a program reads at a time
    token_bytes: int  # K and V of a token, one KV head

    @classmethod
    def by_head(cls, q, kv, tables, lens, tile: int) -> "Launch":
        """One program per sequence and query head, in a grid (sequences, query heads).

        q (S, H, D), kv (blocks, block size, 2, K, D), tables (S, B), lens (S,): tensors, as
        `paged_decode` takes them.
        """
        num_heads, group = q.shape[1], q.shape[1] // kv.shape[3]
        programs = [
            Program((row, head), row, head // group, 0, n)
            for row, n in enumerate(lens.tolist())
            for head in range(num_heads)
        ]
        way = "one program per query head"
        return cls._of(way, "sequence, query head", programs, kv, tables, lens, tile)

    @classmethod
    def grouped(cls, q, kv, tables, lens, tile: int) -> "Launch":
        """One program per sequence and KV head, in a grid (sequences, KV heads)."""
        programs = [
            Program((row, kv_head), row, kv_head, 0, n)
            for row, n in enumerate(lens.tolist())
            for kv_head in range(kv.shape[3])
        ]
        way = "one program per KV head"
        return cls._of(way, "sequence, KV head", programs, kv, tables, lens, tile)

    @classmethod
    def split(cls, q, kv, tables, lens, tile: int, rows: int, min_split: int) -> "Launch":
        """One program per split and KV head, in a grid (KV heads, splits): `paged_decode` in
        float32. (In 16 bits it puts several KV heads into one program.)

        rows, min_split: as in `num_splits`. Programs that have nothing to do are left out.
        """
        host = lens.tolist()
        items = []  # (sequence, start, end)
        for row, count in enumerate(num_splits(host, rows, min_split)):
            span = -(-host[row] // (count * tile)) * tile  # whole tiles
            for split in range(count):
                items.append((row, split * span, min((split + 1) * span, host[row])))
        programs = [
            Program((kv_head, item), row, kv_head, start, end)
            for kv_head in range(kv.shape[3])
            for item, (row, start, end) in enumerate(items)
        ]
        way = "long contexts split"
        return cls._of(way, "KV head, split of the batch", programs, kv, tables, lens, tile)

    @classmethod
    def _of(cls, way, axes, programs, kv, tables, lens, tile) -> "Launch":
        num_blocks, block_size, _, num_kv_heads, head_dim = kv.shape
        rows = zip(tables.tolist(), lens.tolist(), strict=True)
        held = tuple(tuple(row[: -(-n // block_size)]) for row, n in rows)
        token = 2 * head_dim * kv.itemsize
        programs = tuple(programs)
        return cls(way, axes, programs, held, num_blocks, block_size, num_kv_heads, tile, token)

    def turns(self, program: Program) -> int:
        """How many tiles it reads, one after the other."""
        return -(-max(program.end - program.start, 0) // self.tile)

    @cached_property
    def num_turns(self) -> int:
        """Until the last program is done, if all of them run at once."""
        return max(map(self.turns, self.programs))

    def keys(self, program: Program, turn: int) -> range:
        """The keys that it reads in that turn; none once it is done."""
        start = program.start + turn * self.tile
        return range(start, min(start + self.tile, program.end))

    def blocks(self, program: Program, turn: int | None = None) -> list[int]:
        """The physical blocks that it reads, in all or in one turn."""
        keys = range(program.start, program.end) if turn is None else self.keys(program, turn)
        if not keys:
            return []
        first, last = keys[0] // self.block_size, keys[-1] // self.block_size
        return list(self.tables[program.sequence][first : last + 1])

    @property
    def at_work(self) -> float:
        """The share of all programs' turns in which they read, mean until the last is done."""
        return sum(map(self.turns, self.programs)) / (len(self.programs) * self.num_turns)

    @property
    def num_bytes(self) -> int:
        """Of K and V that all programs together read."""
        return self.token_bytes * sum(max(end - start, 0) for *_, start, end in self.programs)

    def agrees(self, loads: "Loads") -> bool:
        """Whether every program has read the blocks that it should, of its own KV head."""
        expected = {
            program.place: {(block, program.kv_head) for block in self.blocks(program)}
            for program in self.programs
        }
        expected = {place: found for place, found in expected.items() if found}
        return loads.by_program == expected and loads.num_bytes == self.num_bytes


# ── What was really loaded ────────────────────────────────────────────────────


@dataclass
class Loads:
    """What interpreted programs have loaded of a pool (blocks, block size, 2, KV heads, dim)."""

    shape: tuple[int, ...]
    itemsize: int
    num_bytes: int = 0  # as often as they were loaded
    by_program: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)

    def note(self, index: tuple[int, int], offsets: np.ndarray) -> None:
        """offsets: in elements from the pool's beginning."""
        block, _, _, kv_head, _ = np.unravel_index(offsets, self.shape)
        found = set(zip(block.tolist(), kv_head.tolist(), strict=True))
        self.by_program.setdefault(index, set()).update(found)
        self.num_bytes += len(offsets) * self.itemsize


@contextmanager
def watch(kv: torch.Tensor) -> Iterator[Loads]:
    """Note what kernels load of a layer's pool while this lasts. In the interpreter only: it
    hands every load of a program, with its addresses, to one function, which is replaced."""
    from triton.runtime.interpreter import interpreter_builder as builder

    from minikv.course.chapters.ch08_triton_paged_attention.watch import language_patched_once

    loads, first = Loads(tuple(kv.shape), kv.itemsize), kv.data_ptr()
    load = builder.create_masked_load

    def noted(pointers, mask, *others):
        offsets = (pointers.data[mask.data].astype(np.int64) - first) // kv.itemsize
        inside = offsets[(offsets >= 0) & (offsets < kv.numel())]
        if len(inside):
            loads.note(builder.grid_idx[:2], inside)
        return load(pointers, mask, *others)

    builder.create_masked_load = noted
    try:
        with language_patched_once():
            yield loads
    finally:
        del builder.create_masked_load  # the class's own is there again


# ── A grid, its tiles and their mask ──────────────────────────────────────────


def grid_picture(size: int, tile: int) -> style.Picture:
    """Programs over `size` elements, `tile` each: the elements of each program, and those that
    the mask leaves out. Each program writes its number into memory that held -1.
    """
    programs = -(-size // tile)
    figure, axes = style.canvas(2.3)
    step = min(0.5, (style.WIDTH - 1.5) / (programs * tile + 0.4 * programs))
    last = programs * tile - size
    title = f"{size} elements, {tile} per program: {programs} programs"
    title += f", and a mask for the last {last}" if last else ""
    axes.text(0.1, 0.2, title, fontsize=11, fontweight="bold", va="center", color=style.INK)
    for y, words in ((0.62, "program_id"), (1.03, "index"), (1.48, "index < size"),
                     (1.96, "memory")):  # fmt: skip
        axes.text(0.1, y, words, fontsize=9, va="center", color=style.INK, family="monospace")
    for program in range(programs):
        left = 1.35 + program * (tile + 0.4) * step
        color = style.color(program)
        axes.add_patch(
            FancyBboxPatch((left - 0.05, 0.44), tile * step + 0.06, 1.26, linewidth=1.2,
                           boxstyle="round,pad=0,rounding_size=0.06", edgecolor=style.INK,
                           facecolor=style.tint(color, 0.18))
        )  # fmt: skip
        axes.text(left + tile * step / 2, 0.62, str(program), fontsize=10, fontweight="bold",
                  ha="center", va="center", color=style.INK)  # fmt: skip
        for lane in range(tile):
            index, x = program * tile + lane, left + (lane + 0.5) * step
            ours = index < size
            axes.text(x, 1.03, str(index), fontsize=10, ha="center", va="center", color=style.INK)
            axes.text(x, 1.48, "yes" if ours else "no", fontsize=9, ha="center", va="center",
                      color=style.INK, fontweight="normal" if ours else "bold")  # fmt: skip
            axes.add_patch(
                Rectangle((x - 0.42 * step, 1.8), 0.84 * step, 0.32, edgecolor=style.INK,
                          facecolor=color if ours else style.PAPER, linewidth=0.8,
                          linestyle="-" if ours else ":")
            )  # fmt: skip
            axes.text(x, 1.96, str(program) if ours else "-1", fontsize=9, ha="center",
                      va="center", color=style.ink_on(color) if ours else style.INK)  # fmt: skip
    alt = f"{title}. " + " ".join(
        f"Program {p}: elements {p * tile} to {min((p + 1) * tile, size) - 1}"
        + (f"; {(p + 1) * tile - size} masked." if (p + 1) * tile > size else ".")
        for p in range(programs)
    )
    return style.Picture(figure, alt)


# ── Launches: one row per program ─────────────────────────────────────────────────

ROW, LEFT = 0.17, 1.45  # inches: a program; the labels of the rows


def launches_picture(launches: Seq[Launch]) -> style.Picture:
    """Every program of each launch in a row: the physical blocks that it reads, turn by turn."""
    most = max(launch.num_turns for launch in launches)
    wide = (style.WIDTH - LEFT - 0.1) / most
    figure, axes = style.canvas(
        0.75 + sum(0.58 + ROW * len(launch.programs) for launch in launches) + 0.1
    )
    first, *_, last = [*launches] * 2
    title = f"{_capital(last.way)}: {last.num_turns} turns"
    if last is not first:
        title += f" instead of {first.num_turns}"
    axes.text(0.1, 0.2, title, fontsize=11, fontweight="bold", va="center", color=style.INK)
    y, words = 0.45, []
    for launch in launches:
        words.append(
            f"{_capital(launch.way)}: {len(launch.programs)} programs, {launch.num_turns} turns, "
            f"at work {launch.at_work:.0%} of them, {launch.num_bytes / 1000:,.0f} kB read"
        )
        axes.text(0.1, y + 0.13, words[-1], fontsize=9.5, va="center", color=style.INK)
        axes.text(0.1, y + 0.32, f"left: program_id 0, 1 = {launch.axes}", fontsize=8.3,
                  va="center", color=style.FAINT)  # fmt: skip
        y += 0.44
        for program in launch.programs:
            _draw_row(axes, launch, program, y, wide, most)
            y += ROW
        y += 0.14
    for turn in range(0, most + 1, 5 if most > 8 else 1):
        axes.text(LEFT + turn * wide, y + 0.02, str(turn), fontsize=8, ha="center", va="center",
                  color=style.INK)  # fmt: skip
    axes.text(style.WIDTH - 0.1, y + 0.2, f"turn ({launches[0].tile} keys each; the numbers are "
              "physical blocks)", fontsize=9, ha="right", va="center", color=style.INK)  # fmt: skip
    alt = f"One row per program, one column per turn. {title}. {'. '.join(words)}."
    return style.Picture(figure, alt)


def _draw_row(axes, launch: Launch, program: Program, y: float, wide: float, most: int) -> None:
    name, color = style.letter(program.sequence), style.color(program.sequence)
    label = f"{program.place[0]}, {program.place[1]}"
    axes.text(0.1, y + ROW / 2, label, fontsize=8.3, va="center", color=style.FAINT)
    axes.text(LEFT - 0.08, y + ROW / 2, f"{name}, KV head {program.kv_head}", fontsize=8.3,
              ha="right", va="center", color=style.INK)  # fmt: skip
    axes.plot([LEFT, LEFT + wide * most], [y + ROW / 2] * 2, color=style.FAINT, linewidth=0.4,
              linestyle=":", zorder=0)  # fmt: skip
    for turn in range(launch.turns(program)):
        x = LEFT + turn * wide
        axes.add_patch(
            Rectangle((x + 0.01, y + 0.01), wide - 0.02, ROW - 0.02, linewidth=0.5,
                      facecolor=style.tint(color, 0.3), edgecolor=style.INK)
        )  # fmt: skip
        blocks = " ".join(map(str, launch.blocks(program, turn)))
        if 0.078 * len(blocks) < wide:
            axes.text(x + wide / 2, y + ROW / 2, blocks, fontsize=8.3, ha="center", va="center",
                      color=style.INK)  # fmt: skip


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


# ── The tiles of a chunk ──────────────────────────────────────────────────────


class Tiles(NamedTuple):
    """How the keys of one tile of queries are read: [0, full) without a mask, [full, end) with."""

    first: int  # position of the tile's first query
    full: int
    end: int


def chunk_tiles(context: int, num_queries: int, tile_queries: int, tile_keys: int) -> list[Tiles]:
    """What kernels/paged_prefill.py does with a chunk of queries at the end of its context."""
    tiles = []
    for at in range(0, num_queries, tile_queries):
        first = context - num_queries + at
        full = (first + 1) // tile_keys * tile_keys
        tiles.append(Tiles(first, full, min(first + tile_queries, context)))
    return tiles


def chunk_picture(
    context: int, num_queries: int, tile_queries: int, tile_keys: int
) -> style.Picture:
    """A chunk's rectangular mask; which tiles of keys are read with it, without it, or never."""
    tiles = chunk_tiles(context, num_queries, tile_queries, tile_keys)
    size = min(0.26, (style.WIDTH - 2.6) / context)
    figure, axes = style.canvas(0.75 + size * num_queries + 0.55)
    left, top, counts = 1.0, 0.75, {"without a mask": 0, "with a mask": 0, "never": 0}
    for query in range(num_queries):
        position = context - num_queries + query
        axes.text(left - 0.08, top + (query + 0.5) * size, f"query {position}", fontsize=7.5,
                  ha="right", va="center", color=style.INK)  # fmt: skip
        for key in range(context):
            seen = key <= position
            axes.add_patch(
                Rectangle((left + key * size + 0.02, top + query * size + 0.02), size - 0.04,
                          size - 0.04, facecolor=style.PALETTE[0] if seen else style.PAPER,
                          edgecolor=style.FAINT, linewidth=0.5)
            )  # fmt: skip
    for row, tile in enumerate(tiles):
        high = min(tile_queries, num_queries - row * tile_queries)
        for start in range(0, context, tile_keys):
            kind = "without a mask" if start < tile.full else "with a mask"
            kind = kind if start < tile.end else "never"
            counts[kind] += 1
            corner = left + start * size, top + row * tile_queries * size
            wide = min(tile_keys, context - start) * size
            look: dict[str, Any] = {
                "without a mask": dict(edgecolor=style.INK, linewidth=2.2),
                "with a mask": dict(edgecolor=style.PALETTE[3], linewidth=2.2, linestyle="--"),
                "never": dict(edgecolor=style.FAINT, linewidth=1, hatch="///"),
            }[kind]
            layer = 2 + 2 * (kind != "never")
            axes.add_patch(
                Rectangle(corner, wide, high * size, facecolor="none", zorder=layer, **look)
            )
    for key in range(0, context + 1, tile_keys):
        axes.text(left + key * size, top - 0.1, str(key), fontsize=7.5, ha="center", va="center",
                  color=style.INK)  # fmt: skip
    title = (
        f"Of {sum(counts.values())} tiles, {counts['without a mask']} need no mask and "
        f"{counts['never']} {'is' if counts['never'] == 1 else 'are'} never read"
    )
    axes.text(0.1, 0.2, title, fontsize=11, fontweight="bold", va="center", color=style.INK)
    axes.text(left, top - 0.27, f"key: {context} in the context, tiles of {tile_keys}; the chunk: "
              f"{num_queries} queries, {tile_queries} per tile", fontsize=8.5, va="center",
              color=style.INK)  # fmt: skip
    x, y = 0.3, top + num_queries * size + 0.3
    for kind, color, line, hatch in (
        ("read without a mask", style.INK, "-", None),
        ("read with a mask", style.PALETTE[3], "--", None),
        ("never read", style.FAINT, "-", "///"),
    ):
        axes.add_patch(
            Rectangle((x, y - 0.08), 0.3, 0.16, facecolor="none", edgecolor=color, linewidth=1.8,
                      linestyle=line, hatch=hatch)
        )  # fmt: skip
        axes.text(x + 0.38, y, kind, fontsize=8.5, va="center", color=style.INK)
        x += 0.7 + 0.07 * len(kind)
    axes.add_patch(Rectangle((x, y - 0.08), 0.16, 0.16, facecolor=style.PALETTE[0], linewidth=0))
    axes.text(x + 0.24, y, "the query sees the key", fontsize=8.5, va="center", color=style.INK)
    rows = " ".join(
        f"Queries {t.first} to {t.end - 1}: keys 0 to {t.full} without a mask, to {t.end} with."
        for t in tiles
    )
    return style.Picture(figure, f"{title}. {rows}")


# ── The roof ──────────────────────────────────────────────────────────────────


class Roof(NamedTuple):
    """What a machine can do at best."""

    bandwidth: float  # bytes per second between memory and the processor
    rate: float  # operations per second in matrix products
    measured: bool  # here and now, else from a data sheet

    @property
    def bend(self) -> float:
        """Operations per byte above which the rate is the limit, and not the bandwidth."""
        return self.rate / self.bandwidth

    def attainable(self, intensity: float) -> float:
        return min(self.rate, intensity * self.bandwidth)


# NVIDIA's data sheets of the SXM modules, bfloat16; their rates count sparsity, which doubles them.
DATA_SHEETS = {
    "A100 80GB SXM": Roof(2_039e9, 624e12 / 2, measured=False),
    "H100 SXM": Roof(3_350e9, 1_979e12 / 2, measured=False),
}


def roofline_picture(roofs: Mapping[str, Roof], work: Mapping[str, float]) -> style.Picture:
    """Attainable operations per second over operations per byte (Williams et al., 2009), for
    each machine; and where each kind of work is, by its intensity."""
    own, first = next(iter(roofs)), next(iter(work))
    title = f"{_capital(first)}: {work[first]:.0f} operations per byte; {own} bends at "
    title += f"{roofs[own].bend:.0f}"
    figure, axes = style.new_axes(
        title, "operations per byte of memory traffic (batch: products with the weights)",
        "GFLOP/s: 10⁹ operations per second", height=4.6,
    )  # fmt: skip
    ends = [0.5, 4096.0]
    colors = (style.PALETTE[0], style.PALETTE[3], style.PALETTE[5], style.PALETTE[1])
    lines = ("-", "--", "-.", ":")
    for (name, roof), color, line in zip(roofs.items(), colors, lines, strict=False):
        places = [ends[0], roof.bend, ends[1]]
        note = "measured here" if roof.measured else "data sheet, bfloat16"
        axes.plot(places, [roof.attainable(x) / 1e9 for x in places], line, color=color,
                  linewidth=2.4 if roof.measured else 1.6, label=f"{name} ({note})")  # fmt: skip
        for intensity in work.values():
            axes.plot(
                [intensity], [roof.attainable(intensity) / 1e9], "o", color=color, markersize=5
            )
    axes.set(xscale="log", yscale="log", xlim=ends)
    bottom = min(roof.attainable(ends[0]) for roof in roofs.values()) / 3e9
    top = 3 * max(roof.rate for roof in roofs.values()) / 1e9
    axes.set_ylim(bottom, top)
    axes.set_yticks([10.0**i for i in range(-3, 9) if bottom < 10.0**i < top])
    axes.minorticks_off()
    axes.set_title(title, loc="left", pad=22, fontsize=11, fontweight="bold")  # over the names
    for name, intensity in work.items():
        short = name.removeprefix("decode ").removeprefix("weights, ")
        axes.axvline(intensity, color=style.FAINT, linewidth=0.6, linestyle=":", zorder=0)
        axes.annotate(short, (intensity, 1), (0, 6), fontsize=8.5, ha="center", color=style.INK,
                      xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    told = "; ".join(f"{name} {intensity:.1f}" for name, intensity in work.items())
    bends = "; ".join(f"{name} bends at {roof.bend:.0f}" for name, roof in roofs.items())
    return style.Picture(figure, f"Roofs on log scales. {title}. {bends}. Work: {told}.")
