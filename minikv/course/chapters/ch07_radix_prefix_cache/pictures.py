"""Pictures of chapter 07: how much sooner a hit answers, and what the clock tells an attacker."""

from collections.abc import Mapping, Sequence as Seq
from statistics import median

from minikv.course.pictures.style import INK, PALETTE, Picture, new_axes

Times = Seq[Seq[float]]  # ms: of the right name, of wrong ones


def sooner_picture(
    lengths: Seq[int], times: Mapping[str, Seq[Seq[float]]], rest: int, sooner: float
) -> Picture:
    """Time to first token over the cached prefix: `times["miss"]` and `times["hit"]`, of each
    length the times of its prompts in ms."""
    takeaway = f"{lengths[-1]} tokens found: the first token comes {sooner:.0f}× sooner"
    figure, axes = new_axes(
        takeaway, f"cached prefix (tokens), before {rest} others", "time to first token (ms)"
    )
    for kind, marker, color in (("miss", "s--", PALETTE[3]), ("hit", "o-", PALETTE[0])):
        low, mid, high = ([pick(v) for v in times[kind]] for pick in (min, median, max))
        axes.plot(lengths, mid, marker, color=color, label=kind)
        axes.fill_between(lengths, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xticks(lengths)
    axes.legend(frameon=False, alignment="left", title="line: median, band: least to most")
    return Picture(figure, f"A miss takes longer with every token, a hit hardly does. {takeaway}.")


def guesses_picture(open_told: int, open_: Times, salted_told: int, salted: Times) -> Picture:
    """Each guess by its time to first token, without salts and with."""
    takeaway = (
        f"Names found by the clock: {open_told} of 12 without salts, {salted_told} with salts"
    )
    figure, axes = new_axes(takeaway, "time to first token of a guess (ms)", "", height=2.8)
    for place, (right, wrong) in enumerate((open_, salted)):
        for shift, values, marker, color, label in (
            (0.15, wrong, "x", INK, "a wrong name"),
            (-0.15, right, "o", PALETTE[3], "the right name"),
        ):
            spread = [place + shift + 0.05 * (i % 3 - 1) for i in range(len(values))]
            axes.plot(
                values, spread, marker, color=color, markersize=5, markerfacecolor="none",
                label=None if place else label,
            )  # fmt: skip
    axes.set_yticks([0, 1], labels=["no salts", "salts"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(left=0)
    figure.legend(frameon=False, loc="outside right center")
    return Picture(
        figure, f"Times to first token of right and of wrong guesses, in two rows. {takeaway}."
    )
