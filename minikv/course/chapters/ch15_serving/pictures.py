"""Chapter 15: two threads and the box between them; load, and what of it is answered in time."""

from collections.abc import Mapping, Sequence

from minikv.course.chapters.ch15_serving.given import Trial
from minikv.course.pictures import style
from minikv.course.pictures.scene import Pen
from minikv.course.pictures.snapshot import counted

LANES = {"engine's thread": 0.72, "the box": 1.57, "event loop": 2.42}  # inches from above
LEFT, STEP, HIGH = 1.45, 0.91, 0.44  # inches: where steps begin, a step, a row


def box_picture(num_steps: int, takes: Sequence[int]) -> style.Picture:
    """The thread that steps, the loop that reads, and a box for one output between them. The
    reader comes after the steps `takes`; each step has one more token."""
    pen, told = Pen(2.85), []
    title = f"{num_steps} steps, {len(takes)} takes: nothing waits, and nothing piles up"
    pen.text(0.1, 0.17, title, 11, weight="bold")
    for name, y in LANES.items():
        pen.text(0.1, y, name, 10, weight="bold")
    top, middle, bottom = LANES.values()
    pen.square(LEFT, bottom - HIGH / 2, STEP * num_steps + 0.6, HIGH, "#f1f1f1", style.FAINT)
    pen.text(LEFT + 0.1, bottom, "other clients", 8, color=style.FAINT)
    arrow, had, is_waking = {"arrowstyle": "-|>", "color": style.INK}, 0, False
    for step in range(1, num_steps + 1):
        x, end = LEFT + STEP * (step - 1), LEFT + STEP * step - 0.12
        pen.square(x, top - HIGH / 2, STEP - 0.12, HIGH, style.tint(style.color(0)))
        pen.text((x + end) / 2, top, f"step {step}", 9, "center")
        wakes = "" if is_waking else " and wakes the reader"
        told.append(f"step {step} puts {counted(step, 'token')}{wakes}")
        is_waking = True
        taken = step in takes
        wide = 0.48 if taken else STEP
        pen.square(end, middle - HIGH / 2, wide, HIGH, style.tint(style.color(4), 0.5))
        pen.text(end + wide / 2, middle, f"1 to {step}" if step > 1 else "1", 9, "center")
        pen.axes.annotate("", (end, middle - HIGH / 2), (end, top + HIGH / 2), arrowprops=arrow)
        if wakes:
            pen.text(end - 0.06, (top + middle) / 2, "wakes", 8, "right", style.FAINT)
        if taken:
            at = (end + wide, bottom - HIGH / 2)
            pen.axes.annotate("", at, (end + wide, middle + HIGH / 2), arrowprops=arrow)
            pen.text(end + wide, bottom, f"{step - had} new", 9, "center", weight="bold")
            told.append(f"the reader takes {step - had} new")
            had, is_waking = step, False
    return style.Picture(pen.figure, f"{title}. {'; '.join(told)}.")


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
