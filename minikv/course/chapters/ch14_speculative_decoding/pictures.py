"""Chapter 14: which drawn drafts are kept; what drafts gain, by their number."""

from collections.abc import Mapping, Sequence

from minikv.course.chapters.ch14_speculative_decoding.answers import expected_tokens
from minikv.course.pictures import style


def bars_picture(tokens: str, p: Sequence[int], q: Sequence[int]) -> style.Picture:
    """Two distributions in eighths, side by side for each token: where they overlap a draft is
    kept, and what p has more is missing."""
    kept = [min(one, other) for one, other in zip(p, q, strict=True)]
    title = f"Kept: {sum(kept)}/8 of the drafts; in place of the others comes what is missing"
    figure, axes = style.new_axes(title, "token", "probability, in eighths", height=2.8)
    places, missing = range(len(tokens)), [one - same for one, same in zip(p, kept, strict=True)]
    left, right = ([at + shift for at in places] for shift in (-0.19, 0.19))
    both, only_p = style.color(0), style.color(4)
    axes.bar(left, kept, 0.36, color=both, edgecolor=style.INK, label="min(p, q): kept")
    axes.bar(
        left, missing, 0.36, bottom=kept, color=only_p, edgecolor=style.INK, hatch="//",
        label="max(p − q, 0): missing",
    )  # fmt: skip
    axes.bar(
        right, kept, 0.36, color=style.tint(both), edgecolor=style.INK, label="drafts that are kept"
    )
    refused = [one - same for one, same in zip(q, kept, strict=True)]
    axes.bar(
        right, refused, 0.36, bottom=kept, color=style.PAPER, edgecolor=style.INK, hatch="..",
        label="drafts that are refused",
    )  # fmt: skip
    for name, at, heights in (("p", left, p), ("q", right, q)):
        for x, height in zip(at, heights, strict=True):
            axes.text(x, height + 0.1, name, ha="center", fontsize=9)
    axes.set_xticks(places, labels=list(tokens))
    axes.set_ylim(0, max(*p, *q) + 0.8)
    axes.legend(frameon=False, fontsize=8)
    told = [
        f"{token}: p {a}/8, q {b}/8, kept {same}/8, missing {more}/8"
        for token, a, b, same, more in zip(tokens, p, q, kept, missing, strict=True)
    ]
    return style.Picture(figure, f"{title}. {'; '.join(told)}.")


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
