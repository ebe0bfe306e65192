"""Pictures of chapter 03: bytes of models, ceilings, memory slot by slot and over time.

reservation_picture(memory, {start: ("A", slots)})     # what the slots of each piece are for
film = MemoryFilm(memory, "KB")
film.snap("A to E have started", {"A": 0, …})          # copies what is there now
film.widget()                                          # a player
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from minikv.course.chapters.ch03_kv_memory.memory import ContiguousMemory, SlotUse
from minikv.course.pictures import style
from minikv.course.pictures.player import Player

SLOT = 0.24  # inches, a slot with room around it
ENDS = 3  # slots that are drawn at the beginning of a long stretch, and as many at its end


def color_of(name: str) -> str:
    return style.color(ord(name[0]) - ord("A"))


def draw_slot(axes, x: float, y: float, state: str, name: str, size: float = SLOT) -> None:
    """One slot: "used", "future", "internal", or "free", which has no name."""
    colors = {
        "used": (color_of(name) if name else style.PAPER, style.INK, "-"),
        "future": (style.tint(color_of(name)) if name else style.PAPER, style.INK, "-"),
        "internal": ("none", style.INK, ":"),
        "free": ("none", style.FAINT, "-"),
    }
    face, edge, line = colors[state]
    room = 0.1 * size
    axes.add_patch(
        Rectangle((x + room / 2, y + room / 2), size - room, size - room, facecolor=face,
                  edgecolor=edge, linestyle=line, linewidth=0.8)
    )  # fmt: skip
    if state in ("used", "future"):
        ink = style.ink_on(color_of(name)) if state == "used" else style.INK
        axes.text(
            x + size / 2, y + size / 2, name, ha="center", va="center_baseline", color=ink,
            fontsize=min(9, 36 * size), fontweight="bold" if state == "used" else "normal",
        )  # fmt: skip


# ── Bytes and ceilings ────────────────────────────────────────────────────────


def models(sizes: Mapping[str, tuple[float, float]]) -> style.Picture:
    """KB per token of each model, by hub id: (as it is, with a KV head for every query head)."""
    kept, had = zip(*sizes.values(), strict=True)
    names = [name.rpartition("/")[2] for name in sizes]
    shares = [full / size for size, full in sizes.values() if full > size]
    title = f"{len(shares)} of {len(names)} models keep only 1/{min(shares):.0f} to "
    title += f"1/{max(shares):.0f} of what MHA would take"
    figure, axes = style.new_axes(title, "KB per token in fp16 (1,024 bytes)", "", height=4.4)
    axes.hlines(names, kept, had, color=style.FAINT, linewidth=1.5, zorder=1)
    label = "if every query head had its own KV head (MHA)"
    axes.plot(had, names, "o", markerfacecolor="white", markeredgecolor=style.INK, label=label)
    axes.plot(kept, names, "o", color=style.PALETTE[0], label="as it is")
    for place, size in enumerate(kept):
        axes.text(size / 1.12, place, f"{size:,.1f}", va="center", ha="right", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(7, 6000)
    axes.set_xticks((10, 100, 1000), labels=("10", "100", "1,000"))
    axes.minorticks_off()
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    words = "; ".join(f"{name} {k:,.1f}, with MHA {h:,.0f}" for name, (k, h) in sizes.items())
    return style.Picture(figure, f"Dots of KB per token. {title}. {words}.")


def ceilings(
    curves: Mapping[int, tuple[Sequence[int], Sequence[float]]],
    least: Mapping[int, int | None],
    claimed: float,
) -> style.Picture:
    """Tokens per second that each batch cannot exceed, by tokens of context: (batches, speeds).
    `least`: the smallest batch that reaches what is claimed."""
    title = f"{claimed:,} tokens per second take at least {least[0]} sequences, "
    title += f"or {least[8192]} with 8,192 tokens each"
    figure, axes = style.new_axes(title, "sequences in the batch", "ceiling (tokens per second)")
    looks = zip(curves.items(), ("-", "--", "-.", ":"), (0, 5, 3, 1), strict=True)
    for (context, (batches, speeds)), dashes, shade in looks:
        label = f"{context:,} tokens of context each" if context else "K and V not counted"
        color = style.PALETTE[shade]
        axes.plot(batches, speeds, dashes, color=color, linewidth=2, label=label)
        if batches[-1] < 64:
            axes.text(batches[-1] + 0.7, speeds[-1], "24 GB are full", va="center", fontsize=9)
    axes.axhline(claimed, color=style.INK, linewidth=0.8)
    axes.text(64, claimed, f"the claim: {claimed:,}", ha="right", va="bottom", fontsize=9)
    axes.set_ylim(0, 8000)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper right", frameon=False)
    found = ", ".join(f"{context:,} tokens: {b or 'none'}" for context, b in least.items())
    alt = f"Ceilings over the batch. {title}. Least batch with contexts of {found}."
    return style.Picture(figure, alt)


# ── One moment, slot by slot ──────────────────────────────────────────────────

LEGEND = (
    ("used", "holds a token"),
    ("future", "for the request's future"),
    ("internal", "never used: internal"),
    ("free", "free: external, if too small"),
)


def reservation_picture(
    memory: ContiguousMemory, held: Mapping[int, tuple[str, SlotUse]]
) -> style.Picture:
    """The whole memory in the order of addresses: one row per piece and per hole. `held`: by the
    start of each piece, the request that has it and what its slots are for."""
    rows = []  # (start, label, [(state, name, count, words)])
    for start, size in memory.pieces.items():
        name, use = held[start]
        texts = (f"{use.used:,} used", f"{use.future:,} for later", f"{use.internal:,} never used")
        states = zip(SlotUse._fields, use, texts, strict=True)
        stretches = [(state, name, count, text) for state, count, text in states if count]
        rows.append((start, f"{name} has {size:,}", stretches))
    for start, size in memory.holes:
        rows.append((start, f"hole of {size:,}", [("free", "", size, f"{size:,} free")]))
    figure, axes = style.canvas(1.0 + 0.72 * len(rows))
    used = sum(use.used for _, use in held.values())
    title = (
        f"{used} of {memory.size:,} slots hold a token; {memory.num_free:,} are free, "
        f"{memory.largest_hole:,} of them in one piece"
    )
    axes.text(0.1, 0.22, title, fontsize=11, fontweight="bold", va="center", color=style.INK)
    for row, (start, label, stretches) in enumerate(sorted(rows)):
        y = 0.52 + 0.72 * row
        axes.text(0.1, y + SLOT / 2, label, fontsize=9, va="center", color=style.INK)
        axes.text(
            1.68, y + SLOT / 2, f"{start:,}", fontsize=8, va="center", ha="right", color=style.FAINT
        )
        x, free = 1.78, 0.0
        for state, name, count, words in stretches:
            begin, x = x, _draw_stretch(axes, x, y, state, name, count)
            wide = 0.062 * len(words)
            left = max((begin + x - wide) / 2, free)  # under its slots, unless the last still is
            axes.plot([begin + 0.02, x - 0.02], [y + 0.3] * 2, color=style.FAINT, linewidth=0.8)
            axes.text(left + wide / 2, y + 0.4, words, ha="center", va="center", fontsize=8,
                      color=style.INK)  # fmt: skip
            free = left + wide + 0.1
    x, y = 0.1, 0.62 + 0.72 * len(rows)
    for state, words in LEGEND:
        draw_slot(axes, x, y, state, "" if state == "free" else "A", 0.2)
        axes.text(x + 0.25, y + 0.1, words, fontsize=8, va="center", color=style.INK)
        x += 0.45 + 0.062 * len(words)
    alt = f"{title}. " + " ".join(
        f"From address {start:,}, {label}: {', '.join(words for *_, words in stretches)}."
        for start, label, stretches in sorted(rows)
    )
    return style.Picture(figure, alt)


def _draw_stretch(axes, x: float, y: float, state: str, name: str, count: int) -> float:
    """Slots of one kind; of many, the middle is left out. Returns where the next one begins."""
    long = count > 3 * ENDS
    for index in range(2 * ENDS if long else count):
        if long and index == ENDS:
            axes.text(x + 0.3, y + SLOT / 2, "· · ·", ha="center", va="center", color=style.INK)
            x += 0.6
        draw_slot(axes, x, y, state, name)
        x += SLOT
    return x


# ── Over time ───────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Moment:
    """A memory as it was: pieces by name and holes, each (start, size); and what waits."""

    words: str
    pieces: dict[str, tuple[int, int]]
    holes: tuple[tuple[int, int], ...]
    waits: tuple[str, int] | None  # a request, and the size that it needs

    @property
    def free(self) -> int:
        return sum(size for _, size in self.holes)

    @property
    def fits(self) -> bool:
        """Whether some hole is large enough for the request that waits."""
        if self.waits is None:
            return False
        _, needed = self.waits
        return any(size >= needed for _, size in self.holes)


class MemoryFilm:
    """A `ContiguousMemory`, the reference or yours, seen step by step."""

    def __init__(self, memory, unit: str):
        self.memory, self.unit = memory, unit
        self.moments: list[Moment] = []

    def snap(
        self, words: str, starts: Mapping[str, int], waits: tuple[str, int] | None = None
    ) -> None:
        """Note the memory as it is now. `starts`: where the piece of each request starts;
        `waits`: a request that asks in vain, and the size that it needs."""
        pieces = {name: (start, self.memory.pieces[start]) for name, start in starts.items()}
        self.moments.append(Moment(words, pieces, tuple(self.memory.holes), waits))

    def describe(self, moment: Moment) -> str:
        """One step in words."""
        held = ", ".join(f"{name} at {start}" for name, (start, _) in sorted(moment.pieces.items()))
        holes = ", ".join(f"{size} {self.unit} at {start}" for start, size in moment.holes)
        return f"{moment.words}: {f'held: {held}' if held else 'nothing held'}; " + (
            f"free: {holes}." if holes else "nothing free."
        )

    def frame(self, upto: int) -> Figure:
        """The steps up to `upto`, which is marked; later ones are not drawn yet."""
        return self._figure(upto, upto)

    def _figure(self, upto: int, marked: int | None) -> Figure:
        self.unit_height = min(0.2, 4.2 / self.memory.size)  # inches, as all that follows
        self.wide = (style.WIDTH - 0.5) / len(self.moments)
        letters = max(8, int(self.wide / 0.075))
        words = [textwrap.fill(moment.words, letters) for moment in self.moments]
        self.top = 0.65 + 0.15 * max(text.count("\n") + 1 for text in words)
        figure, axes = style.canvas(self.y(self.memory.size) + 0.85)
        for address in range(0, self.memory.size + 1, max(1, self.memory.size // 5)):
            label = f"{address} {self.unit}" if address == 0 else f"{address}"
            axes.text(
                0.5, self.y(address), label, fontsize=7, ha="right", va="center", color=style.FAINT
            )
        if marked is not None:
            box = (0.52 + self.wide * marked, 0.3), self.wide - 0.04, figure.get_figheight() - 0.34
            axes.add_patch(FancyBboxPatch(*box, facecolor="#f1f1f1", edgecolor=style.FAINT,
                                          linewidth=0.8, boxstyle="round,pad=0"))  # fmt: skip
        for step in range(upto + 1):
            left = 0.5 + self.wide * step
            axes.text(left + 0.15, 0.42, words[step], fontsize=8, va="top", color=style.INK)
            self._draw(axes, left + 0.15, self.moments[step])
        return figure

    def y(self, address: float) -> float:
        return self.top + self.unit_height * address

    def _draw(self, axes, x: float, moment: Moment) -> None:
        size = self.unit_height
        for name, (start, count) in moment.pieces.items():
            for address in range(start, start + count):
                draw_slot(axes, x, self.y(address), "used", name, size)
            axes.add_patch(
                FancyBboxPatch((x, self.y(start)), size, size * count, facecolor="none",
                               edgecolor=style.INK, linewidth=1.4,
                               boxstyle="round,pad=0,rounding_size=0.05")
            )  # fmt: skip
        for start, count in moment.holes:
            for address in range(start, start + count):
                draw_slot(axes, x, self.y(address), "free", "", size)
            axes.text(x + size + 0.08, self.y(start + count / 2), f"{count} {self.unit}\nfree",
                      fontsize=8, va="center", color=style.INK)  # fmt: skip
        if moment.waits:
            (name, count), y = moment.waits, self.y(self.memory.size) + 0.2
            size = min(size, (self.wide - 0.2) / count)
            for index in range(count):
                draw_slot(axes, x + size * index, y, "future", name, size)
            what = "can start now" if moment.fits else f"needs {count} {self.unit}\nand waits"
            axes.text(x, y + size + 0.08, f"{name} {what}", fontsize=8, va="top", color=style.INK)

    def widget(self) -> Player:
        """Play, pause and a slider over the steps."""
        return Player(
            "the memory's film",
            last=len(self.moments) - 1,
            frame=self.frame,
            caption=lambda step: self.describe(self.moments[step]),
            start=len(self.moments) - 1,
        )
