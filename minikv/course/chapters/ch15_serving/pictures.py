"""Chapter 15: load, and what of it is answered in time."""

from collections.abc import Mapping, Sequence

from minikv.course.chapters.ch15_serving.given import Trial
from minikv.course.pictures import style


def load_picture(runs: Mapping[str, Sequence[Trial]]) -> style.Picture:
    """Answers per second by requests per second: those that finish, and those in time. `runs`: by
    the server's rule for admission, one trial per load."""
    ends = {name: trials[-1] for name, trials in runs.items()}
    last = max(one.offered for one in ends.values())
    told_last = ", ".join(f"{one.good:.0f} {name}" for name, one in ends.items())
    title = f"Of {last:.0f} requests per second, in time: {told_last}"
    figure, axes = style.new_axes(title, "requests that come, per second", "answers per second")
    most = max(one.offered for trials in runs.values() for one in trials)
    axes.plot([0, most], [0, most], ":", color=style.EDGE, label="all that come")
    told = []
    for place, (name, trials) in enumerate(runs.items()):
        shade, offered = style.color(3 * place), [one.offered for one in trials]
        good, finished = [one.good for one in trials], [one.finished for one in trials]
        axes.plot(offered, good, "os"[place % 2] + "-", color=shade, label=f"{name}: in time")
        axes.plot(offered, finished, "os"[place % 2] + "--", color=shade, alpha=0.6,
                  fillstyle="none", label=f"{name}: finished")  # fmt: skip
        pairs = zip(offered, good, finished, strict=True)
        told += [f"{name}, {o:.0f} per second: {g:.1f} in time, {f:.1f} finished"
                 for o, g, f in pairs]  # fmt: skip
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=8)
    return style.Picture(figure, f"{title}. {'; '.join(told)}.")
