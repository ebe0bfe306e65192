"""The picture of chapter 12: the time to the first token, by where K and V are."""

from collections.abc import Mapping, Sequence

from minikv.course.pictures import style

LOOKS = {"computed": ("s--", 3), "host": ("o-", 4), "disk": ("D-", 5), "slow disk": ("^:", 1)}


def first_token_picture(
    lengths: Sequence[int], times: Mapping[str, Sequence[float]]
) -> style.Picture:
    """times: by where K and V are, the seconds for each of the first `lengths`."""
    last = {kind: row[-1] for kind, row in times.items() if len(row) == len(lengths)}
    host, disk = (last["computed"] / last[kind] for kind in ("host", "disk"))
    title = f"{lengths[-1]} tokens: {host:.1f} times sooner from the host, {disk:.1f} from the disk"
    xlabel, ylabel = "length of the text served before (tokens)", "time to first token (ms)"
    figure, axes = style.new_axes(title, xlabel, ylabel, 3.2)
    for kind, (marker, color) in LOOKS.items():
        row = [1e3 * seconds for seconds in times[kind]]
        axes.plot(lengths[: len(row)], row, marker, color=style.PALETTE[color], label=kind,
                  markersize=5)  # fmt: skip
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return style.Picture(figure, f"Time to the first token by where K and V are. {title}.")
