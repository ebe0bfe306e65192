"""Chapter 14: what drafts gain, by their number."""

from collections.abc import Mapping, Sequence

from minikv.course.chapters.ch14_speculative_decoding.answers import expected_tokens
from minikv.course.pictures import style


def gain_picture(
    sizes: Sequence[int], seconds: Mapping[str, Sequence[float]], acceptances: Sequence[float]
) -> style.Picture:
    """Tokens per second over those without drafts, by tokens of a step: `seconds` of each way at
    these sizes, the first of which is 1. A line per way and acceptance."""
    lines = {
        (way, acceptance): [
            expected_tokens(size - 1, acceptance) * found[0] / cost
            for size, cost in zip(sizes, found, strict=True)
        ]
        for way, found in seconds.items()
        for acceptance in acceptances
    }
    best = max(max(gains) for gains in lines.values())
    title = f"The best of these is {best:.1f} times as fast; below the line drafts cost time"
    figure, axes = style.new_axes(
        title, "tokens in a step: the newest and its drafts", "times as fast"
    )
    told = []
    for (way, acceptance), gains in lines.items():
        index, place = list(seconds).index(way), list(acceptances).index(acceptance)
        label = f"{way}, acceptance {acceptance:.0%}"
        marks = "os^"[place % 3] + ("-", "--")[index % 2]
        axes.plot(sizes, gains, marks, color=style.color(3 * index), label=label)
        told.append(f"{label}: {', '.join(f'{gain:.2f}' for gain in gains)}")
    axes.axhline(1, color=style.EDGE, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=8)
    words = f"{title}. At {', '.join(map(str, sizes))} tokens in a step: {'; '.join(told)}."
    return style.Picture(figure, words)
