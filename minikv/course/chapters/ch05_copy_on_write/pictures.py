"""Pictures of chapter 05. (Beams have a player of their own, in `beam_tree`.)"""

from collections.abc import Mapping

from matplotlib.figure import Figure

from minikv.course.pictures.style import INK, PALETTE, Picture

Held = Mapping[tuple[int, int], int]  # blocks by (prompt tokens, samples)


def share_saved(shared: Held, copied: Held, num_new: int) -> Picture:
    """What sharing saves, by samples: the blocks of the longest prompt, and the share of each."""
    lengths, samples = (sorted({key[i] for key in shared}) for i in (0, 1))
    takeaway = "The longer the prompt and the more samples, the more is saved"
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    figure.suptitle(takeaway, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    left, right = figure.subplots(1, 2)
    for held, line, color, label in (
        (copied, "s--", PALETTE[3], "copied"),
        (shared, "o-", PALETTE[0], "shared"),
    ):
        left.plot(samples, [held[lengths[-1], n] for n in samples], line, color=color, label=label)
    left.legend(frameon=False, title=f"a prompt of {lengths[-1]} tokens")
    left.set_ylabel("blocks held")
    for mark, hue, length in zip("^Dv", (1, 5, 4), lengths, strict=True):
        share = [100 * (1 - shared[length, n] / copied[length, n]) for n in samples]
        right.plot(samples, share, f"{mark}-", color=PALETTE[hue])
        right.text(samples[-1] + 0.5, share[-1], f"a prompt of {length}", va="center", fontsize=9)
    right.set(ylabel="saved (% of the blocks copied)", ylim=(-3, 100))
    for axes, end in ((left, samples[-1] + 0.5), (right, samples[-1] + 7)):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel=f"samples, {num_new} new tokens each", xticks=samples, xlim=(0, end))
    return Picture(
        figure, f"Left: blocks over samples, copied and shared. Right: share saved. {takeaway}."
    )
