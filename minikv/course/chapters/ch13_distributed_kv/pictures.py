"""The picture of chapter 13: what a long prompt does to those who decode beside it."""

from collections.abc import Mapping, Sequence

from minikv.course.pictures import style


def pauses_picture(runs: Mapping[str, Sequence[float]]) -> style.Picture:
    """runs: by name, the seconds of each step."""
    longest = ", ".join(f"{name}: {1e3 * max(seconds):.0f} ms" for name, seconds in runs.items())
    title = f"Longest pause: {longest}"
    label = "step (a token for each of the four)"
    figure, axes = style.new_axes(title, label, "milliseconds", 3.2)
    marks = zip(runs.items(), ("s-", "o-", "D-"), (3, 0, 5), strict=True)
    for (name, seconds), mark, color in marks:
        axes.plot([1e3 * one for one in seconds], mark, color=style.PALETTE[color], label=name,
                  markersize=3)  # fmt: skip
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=8)
    return style.Picture(figure, f"Milliseconds per step of four requests that decode. {title}.")
