"""The picture of chapter 00: what the length of a prompt does to both times."""

from collections.abc import Sequence

from minikv.course.pictures.style import PALETTE, Picture, new_axes


def sweep(lengths: Sequence[int], first: Sequence[float], between: Sequence[float]) -> Picture:
    """Milliseconds to the first token and between tokens, over the prompt's length."""
    takeaway = (
        f"From {lengths[0]} to {lengths[-1]} prompt tokens: TTFT grows {first[-1] / first[0]:.1f}×,"
        f" ITL {between[-1] / between[0]:.1f}×"
    )
    figure, axes = new_axes(takeaway, "prompt length (tokens)", "time (ms)")
    axes.loglog(lengths, first, "o-", color=PALETTE[0], label="to the first token (prefill)")
    axes.loglog(lengths, between, "s--", color=PALETTE[5], label="between tokens (decode)")
    axes.set_xticks(lengths, labels=map(str, lengths))
    ticks = [ms * 10.0**power for power in range(-1, 6) for ms in (1, 2, 5)]
    axes.set_yticks(ticks, labels=[f"{ms:g}" for ms in ticks])
    axes.set_ylim(0.8 * min(between), 1.25 * max(first))
    axes.minorticks_off()
    axes.legend(loc="upper left", frameon=False)
    return Picture(figure, f"Two lines over the prompt length. {takeaway}.")
