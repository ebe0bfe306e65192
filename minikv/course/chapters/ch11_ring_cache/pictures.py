"""Pictures of chapter 11: what many turns do to a key, and what each way to forget costs."""

from collections.abc import Mapping, Sequence

from minikv.course.pictures import style


def error_picture(counts: Sequence[int], errors: Mapping[str, Sequence[float]]) -> style.Picture:
    """errors: by dtype, K's relative error after each of `counts` turns."""
    worst = max(errors, key=lambda name: errors[name][-1])
    title = f"After {counts[-1]:,} turns, {worst} is {errors[worst][-1]:.0%} off"
    label = "turns by one position, stored after each"
    figure, axes = style.new_axes(title, label, "error of K (relative)")
    for (name, row), mark, i in zip(errors.items(), ("o-", "s--", "D-."), (0, 5, 3), strict=True):
        axes.loglog(counts, row, mark, color=style.PALETTE[i], label=name)
    axes.legend(frameon=False)
    alt = f"The error of K over the number of turns, both logarithmic. {title}."
    return style.Picture(figure, alt)


def forgetting_picture(
    curves: Mapping[str, Sequence[float]], num_tokens: int, trained: int
) -> style.Picture:
    """curves: by way, nats per token in stretches of equally many of `num_tokens` positions."""
    ends = {name: curve[-1] for name, curve in curves.items()}
    best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    title = f"At the end: {ends[worst]:.2f} nats with {worst}, {ends[best]:.2f} with {best}"
    bins = len(next(iter(curves.values())))
    middles = [(i + 0.5) * num_tokens / bins for i in range(bins)]
    label = f"position (tokens), each point a stretch of {num_tokens // bins}"
    figure, axes = style.new_axes(title, label, "nats per token", 3.8)
    marks = ("o-", "s--", "D-.", "^:", "v--", "P-.")
    for (name, curve), mark, i in zip(curves.items(), marks, (3, 0, 4, 7, 5, 6), strict=True):
        axes.plot(middles, curve, mark, color=style.PALETTE[i], label=name, markersize=5)
    axes.axvline(trained, color=style.INK, linewidth=0.8)
    axes.text(trained + 8, axes.get_ylim()[1], "trained up to here", va="top", fontsize=8)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc=(0.45, 0.56))
    told = "; ".join(f"{name} {end:.2f}" for name, end in ends.items())
    return style.Picture(figure, f"Nats per token over the position. {title}. There: {told}.")
