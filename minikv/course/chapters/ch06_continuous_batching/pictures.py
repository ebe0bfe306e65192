"""Pictures of a workload that was served: how fast, how late, who sat where.

latency_picture(comparison)                  # from arrival to the last token
latency_picture(comparison, "first token")   # from arrival to the first
filled_picture(comparison)                   # seats and blocks over time
timeline_picture({"static": run, "continuous": other})   # the batch, seat by seat
"""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, NullLocator

from minikv.cluster.simulate import percentile
from minikv.course.chapters.ch06_continuous_batching.batching import Comparison, PreemptionCost, Run
from minikv.course.pictures import style
from minikv.course.pictures.timeline import Timeline

LINES = ("-", "--", "-.", ":")  # of the ways, so that colour is never alone
COLORS = (style.PALETTE[3], style.PALETTE[0], style.PALETTE[5], style.PALETTE[1])
# An empty seat; and one that is empty while a request waits.
EMPTY: dict[str, Any] = {"facecolor": "#ebebeb", "linewidth": 0}
HOLE: dict[str, Any] = {
    "facecolor": "#dcdcdc", "edgecolor": "#8c8c8c", "hatch": "xxx", "linewidth": 0
}  # fmt: skip


def latency_picture(comparison: Comparison, upto: str = "last token") -> style.Picture:
    """The share of requests that had their "last token" or "first token", over the time since
    they arrived; the median and the 99th percentile are marked. Of several repeats, it is the
    one with the median duration."""
    if upto not in ("last token", "first token"):
        raise ValueError(f"upto: must be 'last token' or 'first token', was {upto!r}")
    waits = {}
    for way in comparison.runs:
        run = comparison.typical(way)
        waits[way] = run.latencies if upto == "last token" else run.times_to_first_token
    first, *_, last = waits
    title = f"Half wait less than {percentile(waits[first], 50):.2f} s ({first})"
    if last != first:
        title += f" or {percentile(waits[last], 50):.2f} s ({last})"
    figure, axes = style.new_axes(
        title, f"time from arrival to {upto} (s)", "share of the requests (%)", height=3.3
    )
    words = []
    for row, (way, values) in enumerate(waits.items()):
        shares = [100 * (place + 1) / len(values) for place in range(len(values))]
        half, most = percentile(values, 50), percentile(values, 99)
        axes.step([0, *sorted(values)], [0, *shares], where="post", color=_color(row),
                  linestyle=LINES[row % len(LINES)], linewidth=2,
                  label=f"{way}: P50 {half:.2f} s, P99 {most:.2f} s")  # fmt: skip
        axes.plot([half, most], [50, 99], "o", color=_color(row), markeredgecolor=style.INK,
                  markersize=7, zorder=3)  # fmt: skip
        words.append(f"{way} P50 {half:.2f} s, P99 {most:.2f} s")
    for percent in (50, 99):
        axes.axhline(percent, color=style.FAINT, linewidth=0.6, zorder=0)
        axes.annotate(f"P{percent}", (1, percent), (2, 0), xycoords=("axes fraction", "data"),
                      textcoords="offset points", va="center", fontsize=8,
                      color=style.FAINT)  # fmt: skip
    axes.set(xlim=(0, None), ylim=(0, 103))
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    told = "; ".join(words)
    return style.Picture(figure, f"Cumulative shares up to the {upto}. {title}. {told}.")


def filled_picture(comparison: Comparison) -> style.Picture:
    """Each way's share of seats that computed something, step by step, how many were empty while a
    request waited, and the share of blocks held. Of several repeats, the one with the median
    duration."""
    runs = {way: comparison.typical(way) for way in comparison.runs}
    title = "Seats empty while a request waits: " + ", ".join(
        f"{run.holes:.0%} with {way}" for way, run in [*runs.items()][:2]
    )
    figure, axes = style.new_axes(
        title, "time since the first arrival (s)", "share (%)", height=0.9 + 1.05 * len(runs)
    )
    pitch, ticks, words = 125, [], []  # % from one way's axis to the next
    for row, (way, run) in enumerate(runs.items()):
        base = -pitch * row
        times, seats, blocks = _shares(run)
        axes.fill_between(times, base, [base + 100 * share for share in seats], step="post",
                          color=style.tint(_color(row), 0.55), linewidth=0)  # fmt: skip
        axes.step(times, [base + 100 * share for share in blocks], where="post",
                  color=style.INK, linewidth=1.2)  # fmt: skip
        axes.axhline(base, color=style.FAINT, linewidth=0.6)
        axes.axhline(base + 100, color=style.FAINT, linewidth=0.6, linestyle=":")
        axes.annotate(
            f"{way}: {run.holes:.0%} of the seats empty while a request waits; "
            f"{run.seats_filled:.0%} filled",
            (1, base + 100), (0, 2), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="bottom", fontsize=9, color=style.INK,
        )  # fmt: skip
        ticks += [(base, "0"), (base + 50, "50"), (base + 100, "100")]
        words.append(
            f"{way}: {run.holes:.0%} of the seats empty while a request waits, "
            f"{run.seats_filled:.0%} filled, {run.blocks_filled:.0%} of the blocks held"
        )
    axes.set_yticks(*zip(*ticks, strict=True), fontsize=8)
    axes.set(xlim=(0, None), ylim=(-pitch * (len(runs) - 1), 122))
    handles = [
        Patch(facecolor=style.tint(style.FAINT, 0.55), label="seats that compute"),
        axes.plot([], [], color=style.INK, linewidth=1.2, label="blocks held")[0],
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return style.Picture(figure, f"{title}. " + "; ".join(words) + ".")


def _shares(run: Run) -> tuple[list[float], list[float], list[float]]:
    """When each step began, and its shares of the seats and of the blocks; 0 where nothing ran."""
    times, seats, blocks = [], [], []
    zero = run.served[0].job.arrival
    for step, following in zip(run.steps, [*run.steps[1:], None], strict=True):
        times.append(step.start - zero)
        seats.append(len(step.entries) / run.config.max_num_seqs)
        blocks.append(step.blocks_held / run.config.num_blocks)
        if following is None or following.start > step.end:
            times.append(step.end - zero)
            seats.append(0.0)
            blocks.append(0.0)
    return times, seats, blocks


# ── The batch, seat by seat ───────────────────────────────────────────────────


class Stretch(NamedTuple):
    """Consecutive steps in which one request did the same on one seat."""

    seat: int
    request_id: int
    kind: str  # "prefill", "decode", or "idle": on its seat, but without a token of the budget
    first: int  # index of the step
    last: int
    ends: str  # "", or what happened after the last step: "finished", "preempted"


def stretches(run: Run) -> list[Stretch]:
    """Which request had which seat, by the step in which it began. A request takes the lowest
    free seat when it is admitted, and leaves it when it has finished or is preempted."""
    last_step = {
        entry.request_id: index for index, step in enumerate(run.steps) for entry in step.entries
    }
    seats: dict[int, int] = {}  # by request id
    open_: dict[int, Stretch] = {}
    done: list[Stretch] = []
    for index, step in enumerate(run.steps):
        for request_id in step.preempted:
            done.append(open_.pop(request_id)._replace(ends="preempted"))
            del seats[request_id]
        kinds = {entry.request_id: entry.kind for entry in step.entries}
        for request_id in [*seats, *(id_ for id_ in kinds if id_ not in seats)]:
            kind, now = kinds.get(request_id, "idle"), open_.get(request_id)
            if now is not None and now.kind == kind:
                open_[request_id] = now._replace(last=index)
            else:
                if now is not None:
                    done.append(now)
                else:
                    taken = set(seats.values())
                    seats[request_id] = next(s for s in range(len(taken) + 1) if s not in taken)
                open_[request_id] = Stretch(seats[request_id], request_id, kind, index, index, "")
        for request_id in [id_ for id_ in kinds if last_step[id_] == index]:
            done.append(open_.pop(request_id)._replace(ends="finished"))
            del seats[request_id]
    return sorted(done, key=lambda stretch: (stretch.first, stretch.seat))


def timeline_picture(runs: Mapping[str, Run], by: str = "time", title: str = "") -> style.Picture:
    """The batch of each run, one above the other on one axis: one row per seat, one colour and
    letter per request. `by`: "time", or "steps", where every step is equally wide. `title`: what
    to take away; by default how long the runs took."""
    if by not in ("time", "steps"):
        raise ValueError(f"by: must be 'time' or 'steps', was {by!r}")
    seats = sum(run.config.max_num_seqs for run in runs.values())
    label = "time since the first arrival (s)" if by == "time" else "step"
    figure, axes = style.new_axes(
        "", label, "seat in the batch", height=1.1 + 0.2 * (seats + 1.6 * len(runs))
    )
    ends = {
        way: f"{run.seconds:.2f} s" if by == "time" else f"{len(run.steps)} steps"
        for way, run in runs.items()
    }
    runs = {way: _from_zero(run, by) for way, run in runs.items()}
    end = max(run.steps[-1].end for run in runs.values())
    inches = (style.WIDTH - 0.9) / end
    y, ticks, kinds, words = 0.0, [], set(), []
    for way, run in runs.items():
        words.append(
            f"{way}: {ends[way]}; seats are empty {1 - run.seats_filled:.0%} of the {by}, "
            f"{run.holes:.0%} while a request waits"
        )
        axes.text(0, y + 0.35, words[-1], fontsize=10, va="center", color=style.INK)
        y += 1.3
        kinds |= _draw_run(axes, run, y, inches)
        ticks += [(y + seat, str(seat)) for seat in range(run.config.max_num_seqs)]
        y += run.config.max_num_seqs + 0.3
    (first, *_), (*_, last) = runs, runs
    if not title and first == last:
        title = f"{_capital(first)}: {ends[first]}, {run.preemptions} preemptions"
    elif not title:
        title = f"{_capital(first)}: {ends[first]}; {last}: {ends[last]}"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=style.INK)
    axes.set(xlim=(0, 1.003 * end), ylim=(y - 0.3, 0))
    axes.set_yticks(*zip(*ticks, strict=True), fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    figure.legend(
        handles=_legend(kinds), loc="outside lower left", ncols=6, frameon=False, fontsize=9
    )
    return style.Picture(figure, f"The batch, seat by seat. {title}. {'; '.join(words)}.")


def _from_zero(run: Run, by: str) -> Run:
    """The same run, with the places of its steps on the axis."""
    zero = run.steps[0].start
    steps = [
        replace(step, start=step.start - zero, end=step.end - zero)
        if by == "time"
        else replace(step, start=index, end=index + 1)
        for index, step in enumerate(run.steps)
    ]
    return replace(run, steps=steps)


def _draw_run(axes, run: Run, top: float, inches: float) -> set[str]:
    """`inches`: on paper, a unit of the axis. Returns the kinds of what was drawn."""
    rows = [top + seat for seat in range(run.config.max_num_seqs)]
    axes.barh(rows, run.steps[-1].end, 0.86, **EMPTY)
    kinds = set()
    for waits, steps in groupby(run.steps, lambda step: step.waiting > 0):
        first, *_, last = [*steps] * 2
        if waits:
            corner, width = (first.start, top - 0.43), last.end - first.start
            axes.add_patch(Rectangle(corner, width, len(rows) - 0.14, **HOLE))
            kinds.add("hole")
    for row in rows[1:]:
        axes.axhspan(row - 0.57, row - 0.43, color=style.PAPER, linewidth=0)
    for one in stretches(run):
        y, left, right = rows[one.seat], run.steps[one.first].start, run.steps[one.last].end
        color, name = style.color(one.request_id), style.letter(one.request_id)
        face, hatch = {
            "prefill": (color, "/////"),
            "decode": (style.tint(color, 0.45), None),
            "idle": (style.PAPER, "....."),
        }[one.kind]
        axes.barh(y, right - left, 0.86, left, facecolor=face, hatch=hatch, edgecolor=style.INK,
                  linewidth=0.5)  # fmt: skip
        if one.kind == "decode" and (right - left) * inches > 0.085 * len(name) + 0.03:
            axes.text((left + right) / 2, y, name, ha="center", va="center_baseline", fontsize=8,
                      fontweight="bold", color=style.INK)  # fmt: skip
        if one.ends == "preempted":
            axes.plot([right], [y], **PREEMPTED, zorder=4)
        kinds |= {one.kind, one.ends}
    return kinds


PREEMPTED: dict[str, Any] = {
    "marker": "X", "color": style.INK, "markeredgecolor": style.PAPER, "markersize": 9,
    "linestyle": "",
}  # fmt: skip


def _legend(kinds: set[str]) -> list:
    grey, ink = style.FAINT, style.INK
    handles = {
        "prefill": Patch(facecolor=grey, edgecolor=ink, hatch="/////", label="prefill"),
        "decode": Patch(facecolor=style.tint(grey, 0.45), edgecolor=ink, label="decode"),
        "idle": Patch(facecolor=style.PAPER, edgecolor=ink, hatch=".....", label="no budget left"),
        "preempted": Line2D([], [], **PREEMPTED, label="preempted"),
        "hole": Patch(**HOLE, label="empty, and a request waits"),
    }
    shown = [handle for kind, handle in handles.items() if kind in kinds]
    return [*shown, Patch(**EMPTY, label="empty")]


# ── What scheduling costs ─────────────────────────────────────────────────────


def budgets_picture(
    budgets: Mapping[int, Seq[Timeline]], writer: int, newcomer: int, before: int
) -> style.Picture:
    """The steps of one request's tokens after a long prompt came, under several token budgets, and
    when the long prompt got its first token. Of the repeats, the one with the median of the
    writer's longest pauses. `before`: the writer's steps before the prompt came."""
    chosen, worst = {}, {}
    for budget, timelines in budgets.items():
        order = sorted(timelines, key=lambda one: _longest_pause(one, writer, newcomer, before))
        chosen[budget] = order[(len(order) - 1) // 2]
        worst[budget] = _longest_pause(chosen[budget], writer, newcomer, before)
    first, small = max(budgets), min(budgets)
    title = f"A's longest pause: {worst[first]:.0f} ms in one piece, "
    title += f"{worst[small]:.0f} ms with a budget of {small}"
    figure, axes = style.new_axes(
        title, "time since the long prompt came (ms)", "token budget", height=3.0
    )
    words = []
    for row, (budget, timeline) in enumerate(chosen.items()):
        came = timeline.rows[newcomer].arrived
        chunks = {bar.step for bar in timeline.bars(newcomer) if bar.kind == "prefill"}
        for bar in timeline.bars(writer)[before:]:
            step, chunk = timeline.steps[bar.step], bar.step in chunks
            left, width = 1000 * (step.start - came), 1000 * (step.end - step.start)
            color, hatch = (style.PALETTE[3], "////") if chunk else ("#dddddd", None)
            axes.barh(row, width, 0.7, left, color=color, hatch=hatch, edgecolor="white")
        token = 1000 * timeline.time_to_first_token(newcomer)
        axes.plot([token], [row], "D", color=style.INK, markeredgecolor="white", markersize=8)
        words.append(f"budget {budget:,}: first token of the long prompt after {token:.0f} ms")
    axes.set_yticks(range(len(budgets)), labels=[f"{budget:,}" for budget in budgets])
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    for color, hatch, label in (
        (style.PALETTE[3], "////", "a token of A, with a chunk of the long prompt"),
        ("#dddddd", None, "a token of A alone"),
    ):
        axes.barh(0, 0, color=color, hatch=hatch, edgecolor="white", label=label)
    axes.plot([], [], "D", color=style.INK, label="the long prompt's first token")
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return style.Picture(
        figure, f"The steps of A after a long prompt came. {title}. {'; '.join(words)}."
    )


def _longest_pause(timeline: Timeline, writer: int, newcomer: int, before: int) -> float:
    """Between two tokens of the writer while the newcomer's prompt is computed, in ms."""
    chunks = sum(bar.kind == "prefill" for bar in timeline.bars(newcomer))
    pauses = timeline.times_between_tokens(writer)
    return 1000 * max(pauses[before - 1 : before - 1 + chunks])


def preemption_picture(costs: Seq[PreemptionCost]) -> style.Picture:
    """What a preemption costs a sequence, by the tokens in its blocks, in both ways."""
    last = costs[-1]
    title = (
        f"{last.num_tokens} tokens: {1e3 * median(last.recompute):.0f} ms to recompute, "
        f"{1e3 * median(last.swap):.1f} ms to swap out and in"
    )
    figure, axes = style.new_axes(title, "tokens in the sequence's blocks", "time (ms)")
    lengths = [cost.num_tokens for cost in costs]
    ways = {"recompute: one prefill": [cost.recompute for cost in costs]}
    ways["swap: copied to the host and back"] = [cost.swap for cost in costs]
    for row, (way, seconds) in enumerate(ways.items()):
        _line(axes, lengths, [[1e3 * one for one in values] for values in seconds], row, way)
    axes.set_yscale("log")
    _label_axis(axes.yaxis)
    axes.set_xlim(0, None)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    rows = "; ".join(
        f"{cost.num_tokens} tokens {1e3 * median(cost.recompute):.1f} and "
        f"{1e3 * median(cost.swap):.2f} ms"
        for cost in costs
    )
    return style.Picture(figure, f"Two lines over the number of tokens. {title}. {rows}.")


def _line(axes, places: Seq[float], values: list[Seq[float]], row: int, label: str) -> None:
    """Medians, with whiskers from the least to the greatest."""
    middles = [median(one) for one in values]
    below = [middle - min(one) for middle, one in zip(middles, values, strict=True)]
    above = [max(one) - middle for middle, one in zip(middles, values, strict=True)]
    axes.errorbar(places, middles, (below, above), color=_color(row), marker="os^"[row % 3],
                  linestyle=LINES[row % len(LINES)], linewidth=1.8, markersize=5, capsize=3,
                  label=label)  # fmt: skip


def _label_axis(axis) -> None:
    """A log axis with marks at 1, 3, 10, 30 …"""
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,g}")


def _color(row: int) -> str:
    return COLORS[row % len(COLORS)]


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
