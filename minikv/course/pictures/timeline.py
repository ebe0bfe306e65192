"""A request's timeline: prefill, then one bar per token. Recorded from a live engine.

    timeline = Timeline.record(engine, "def fib(", SamplingParams(max_tokens=32))
    timeline                                        # in a notebook: the picture
    timeline.figure().savefig("timeline.png", dpi=150)
    timeline.widget()                               # in a notebook: a player

The recorder stands outside the engine. It calls `add_request`, `step` and `stats`,
looks at the clock before and after each step, and nothing else.
"""

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import cast

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minikv.course.pictures import style
from minikv.course.pictures.player import Player
from minikv.engine import Engine, Prompt
from minikv.outputs import RequestOutput
from minikv.sampling import SamplingParams

AXIS_WIDTH = style.WIDTH - 0.9  # inches, about: what fits is estimated, not measured


@dataclass(frozen=True)
class Step:
    """One `engine.step()`. Seconds since the first request was added."""

    start: float
    end: float
    num_computed: int  # tokens that went through the model, of all requests together
    outputs: dict[int, RequestOutput]  # by request id: what it returned


@dataclass(frozen=True)
class Bar:
    """What a step was to one request."""

    step: int  # index in Timeline.steps
    kind: str  # "prefill", "decode", or "waiting": no token came, and it may not have run
    num_computed: int | None  # prompt tokens computed; None: cannot be known from outside
    token_ids: list[int]  # new ones
    text: str  # what they added


@dataclass(frozen=True)
class TimelineRow:
    """One request of a timeline."""

    letter: str
    color: str
    prompt_ids: list[int]
    arrived: float  # seconds since the first request was added
    first_step: int


class Timeline:
    """Records what an engine does with some requests, step by step, and draws it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.steps: list[Step] = []
        self.rows: dict[int, TimelineRow] = {}  # by request id
        self._first: dict[int, int] = {}  # by request id: the step that gave the first token
        self._zero: float | None = None

    @classmethod
    def record(
        cls, engine: Engine, prompts: Prompt | list[Prompt], params: SamplingParams | None = None
    ) -> "Timeline":
        """Run one prompt, or several that arrive together, to the end."""
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [cast(Prompt, prompts)]
        timeline = cls(engine)
        for prompt in cast(list[Prompt], prompts):
            timeline.add(prompt, params)
        return timeline.run()

    # ── Recording ─────────────────────────────────────────────────────────────

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Add a request, also between steps; returns its request id."""
        if params is not None and params.n > 1:
            raise ValueError(f"n: a timeline draws one sample per request, was {params.n}")
        prompt_ids = self.engine.lm.encode(prompt) if isinstance(prompt, str) else list(prompt)
        now = perf_counter()
        if self._zero is None:
            self._zero = now
        request_id = self.engine.add_request(prompt_ids, params)
        index = len(self.rows)
        self.rows[request_id] = TimelineRow(
            style.letter(index), style.color(index), prompt_ids, now - self._zero, len(self.steps)
        )
        return request_id

    def step(self) -> Step:
        """Run one step of the engine and note it. Raises ValueError before the first request."""
        if self._zero is None:
            raise ValueError("nothing to record yet: add a request first")
        before = self.engine.stats().computed_tokens
        start = perf_counter()
        outputs = self.engine.step()
        end = perf_counter()
        step = Step(
            start - self._zero,
            end - self._zero,
            self.engine.stats().computed_tokens - before,
            {output.request_id: output for output in outputs if output.request_id in self.rows},
        )
        for request_id in step.outputs:
            self._first.setdefault(request_id, len(self.steps))
        self.steps.append(step)
        return step

    def run(self) -> "Timeline":
        """Step until every recorded request is finished."""
        while self.engine.has_unfinished and not all(map(self._finished, self.rows)):
            self.step()
        return self

    # ── What was recorded ─────────────────────────────────────────────────────

    def output(self, request_id: int, upto: int | None = None) -> RequestOutput | None:
        """A request as it stood after `upto` steps; None before its first token."""
        for step in reversed(self.steps[:upto]):
            if request_id in step.outputs:
                return step.outputs[request_id]
        return None

    def bars(self, request_id: int) -> list[Bar]:
        """The steps of one request, from its arrival to its end.

        From outside, only the tokens that a step returned can be seen. A step that gave this
        request none is called prefill if only this request can have been in prefill, and
        waiting otherwise.
        """
        bars, num_tokens, text = [], 0, ""
        for index in range(self.rows[request_id].first_step, len(self.steps)):
            step = self.steps[index]
            output = step.outputs.get(request_id)
            prefilling = self._without_token(index)
            num_computed = None
            if prefilling == [request_id]:  # then what is beyond the others' one token each is its
                num_computed = step.num_computed - len(step.outputs.keys() - {request_id})
            if num_tokens > 0:
                kind = "decode" if output is not None else "waiting"
            else:
                kind = "prefill" if output is not None or num_computed else "waiting"
            new_ids, new_text = [], ""
            if output is not None:
                new_ids, new_text = output.token_ids[num_tokens:], self._text(output)[len(text) :]
                num_tokens, text = num_tokens + len(new_ids), text + new_text
            bars.append(Bar(index, kind, num_computed, new_ids, new_text))
            if output is not None and output.finish_reason is not None:
                break
        return bars

    def time_to_first_token(self, request_id: int | None = None) -> float:
        """Seconds from a request's arrival (the first request's, if none is named)."""
        return self._token_times(request_id)[0]

    def times_between_tokens(self, request_id: int | None = None) -> list[float]:
        """Seconds from each token of a request to its next."""
        times = self._token_times(request_id)
        return [later - earlier for earlier, later in pairwise(times)]

    def describe(self) -> str:
        """The picture in words."""
        lines = []
        for request_id, row in self.rows.items():
            bars, between = self.bars(request_id), self.times_between_tokens(request_id)
            line = (
                f"Request {row.letter}, a prompt of {len(row.prompt_ids)} tokens: "
                f"time to first token {1000 * self.time_to_first_token(request_id):.1f} ms"
            )
            if between:
                count = sum(bar.kind == "decode" for bar in bars)
                line += (
                    f", then {count} decode bars, one per token, "
                    f"time between tokens {1000 * median(between):.1f} ms in the median"
                )
            lines.append(line + ".")
        return "A timeline. " + " ".join(lines)

    def _token_times(self, request_id: int | None) -> list[float]:
        """When each token came, in seconds since the request's arrival."""
        request_id = next(iter(self.rows)) if request_id is None else request_id
        arrived = self.rows[request_id].arrived
        return [step.end - arrived for step in self.steps if request_id in step.outputs]

    def _without_token(self, index: int) -> list[int]:
        """Requests in flight that had no token when step `index` began."""
        return [
            request_id
            for request_id, row in self.rows.items()
            if row.first_step <= index <= self._first.get(request_id, index)
        ]

    def _finished(self, request_id: int) -> bool:
        output = self.output(request_id)
        return output is not None and output.finish_reason is not None

    def _text(self, output: RequestOutput | None) -> str:
        if output is None:
            return ""
        has_text = self.engine.lm.tokenizer is not None
        return output.text if has_text else "".join(f"{id_} " for id_ in output.token_ids)

    # ── The picture ───────────────────────────────────────────────────────────

    def figure(self, upto: int | None = None) -> Figure:
        """The timeline after `upto` steps, all of them by default; the axes stay the same."""
        if not self.steps:
            raise ValueError("nothing is recorded yet: add a request and run")
        upto = len(self.steps) if upto is None else upto
        total = 1000 * self.steps[-1].end  # ms
        inches = AXIS_WIDTH / total  # on paper, per ms
        figure, axes = style.new_axes(
            self._title(),
            "time since the first request arrived (ms)",
            "request",
            height=1.35 + 1.05 * len(self.rows),
        )
        for place, (request_id, row) in enumerate(self.rows.items()):
            for bar in self.bars(request_id):
                if bar.step < upto:
                    self._draw_bar(axes, -place, row, bar, inches)
            self._draw_marks(axes, -place, request_id, upto, inches)
        axes.set(xlim=(0, total * 1.005), ylim=(0.25 - len(self.rows), 0.55))
        axes.set_yticks([-place for place in range(len(self.rows))])
        axes.set_yticklabels([row.letter for row in self.rows.values()], fontweight="bold")
        axes.tick_params(axis="y", length=0)
        grey = style.FAINT
        own = next(iter(self.rows.values())).color if len(self.rows) == 1 else grey
        handles = [
            Patch(facecolor=own, edgecolor=style.INK, label="prefill: computes the prompt"),
            Patch(facecolor=style.tint(own), edgecolor=style.INK,
                  label="decode: one step, and the token that it gives"),
        ]  # fmt: skip
        if any(bar.kind == "waiting" for id_ in self.rows for bar in self.bars(id_)):
            handles.append(Patch(facecolor="none", edgecolor=grey, linestyle=":", label="no token"))
        figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
        return figure

    def _draw_bar(self, axes, y: float, row: TimelineRow, bar: Bar, inches: float) -> None:
        step = self.steps[bar.step]
        start = 1000 * max(step.start, row.arrived)
        width = 1000 * step.end - start
        if bar.kind == "waiting":
            axes.barh(y, width, 0.5, start, facecolor="none", edgecolor=style.FAINT, linestyle=":")
            return
        prefill = bar.kind == "prefill"
        face = row.color if prefill else style.tint(row.color)
        axes.barh(y, width, 0.6, start, facecolor=face, edgecolor=style.INK, linewidth=0.7)
        room = inches * width
        if room < 0.13:  # no letter fits
            return
        label, upright = visible(bar.text), True
        if prefill:
            upright, label = room < 0.85, "prefill"
            if bar.num_computed is not None and not upright:
                label += f"\n{bar.num_computed} tokens"
        axes.text(
            start + width / 2, y, label, ha="center", va="center", fontsize=8, clip_on=True,
            rotation=90 if upright else 0, color=style.ink_on(row.color) if prefill else style.INK,
            family="sans-serif" if prefill else "monospace",
        )  # fmt: skip

    def _draw_marks(self, axes, y: float, request_id: int, upto: int, inches: float) -> None:
        """Brackets under a row: time to first token, and one time between tokens."""

        def width(label: str) -> float:
            return 0.068 * len(label) / inches  # ms

        def place(start: float, label: str) -> float:
            """Left end of a label: at its mark, or where it just fits."""
            return max(0, min(start, AXIS_WIDTH / inches - width(label)))

        arrived = self.rows[request_id].arrived
        ends = [step.end for step in self.steps[:upto] if request_id in step.outputs]
        between = self.times_between_tokens(request_id)
        marks = []  # (start, end, label)
        if ends:
            wait = f"time to first token {1000 * (ends[0] - arrived):.1f} ms"
            marks.append((1000 * arrived, 1000 * ends[0], wait))
            first = next(bar.text for bar in self.bars(request_id) if bar.token_ids)
            axes.annotate(
                f"first token: {visible(first)}", (1000 * ends[0], y + 0.3), (0, 12), fontsize=9,
                textcoords="offset points", color=style.INK, va="center",
                ha="left" if ends[0] < 0.7 * self.steps[-1].end else "right",
                arrowprops=dict(arrowstyle="-|>", color=style.INK, shrinkA=0, shrinkB=0),
            )  # fmt: skip
        middle = len(between) // 2
        if len(ends) > middle + 1:
            typical = f"time between tokens {1000 * median(between):.1f} ms (median)"
            marks.append((1000 * ends[middle], 1000 * ends[middle + 1], typical))
        for start, end, _ in marks:
            line = dict(
                arrowstyle="|-|,widthA=0.25,widthB=0.25", shrinkA=0, shrinkB=0, color=style.INK
            )
            axes.annotate("", (start, y - 0.42), (end, y - 0.42), arrowprops=line)
        labels = [(place(start, label), label) for start, _, label in marks]
        if len(labels) == 2 and labels[0][0] + width(labels[0][1]) > labels[1][0]:
            both = ", ".join(label for _, label in labels)  # no room for one beside the other
            labels = [(place(1000 * arrived, both), both)]
        for x, label in labels:
            axes.annotate(
                label, (x, y - 0.42), (3, -5), textcoords="offset points", va="top", fontsize=9,
                color=style.INK,
            )  # fmt: skip

    def _title(self) -> str:
        if len(self.rows) > 1:
            tokens = sum(len(bar.token_ids) for id_ in self.rows for bar in self.bars(id_))
            return f"{len(self.rows)} requests get {tokens} tokens from {len(self.steps)} steps"
        [request_id] = self.rows
        chunks = [bar for bar in self.bars(request_id) if bar.kind == "prefill"]
        steps = "one step" if len(chunks) == 1 else f"{len(chunks)} steps"
        tokens = sum(bar.num_computed or 0 for bar in chunks)
        return f"Prefill computes {tokens} tokens in {steps}; decode takes one step per token"

    def _repr_mimebundle_(self, include=None, exclude=None):
        return style.Picture(self.figure(), self.describe())._repr_mimebundle_(include, exclude)

    # ── The player ────────────────────────────────────────────────────────────

    def widget(self) -> Player:
        """Play, pause and a slider over the steps: the picture so far beside the text so far.

        `slider.value` is the number of steps shown.
        """
        last = len(self.steps)
        return Player("the timeline", last, self.figure, self._words, self._text_box, start=last)

    def _words(self, upto: int) -> str:
        if upto == 0:
            return "added, nothing computed yet"
        step = self.steps[upto - 1]
        tokens = "1 token" if step.num_computed == 1 else f"{step.num_computed} tokens"
        return f"Step {upto}: {tokens} computed in {1000 * (step.end - step.start):.1f} ms"

    def _text_box(self, upto: int) -> str:
        return (  # column-reverse: a long text is shown from its end
            "<div tabindex='0' style='display:flex;flex-direction:column-reverse;max-height:190px;"
            "overflow:auto;box-sizing:border-box;border:1px solid;padding:6px'>"
            "<pre style='flex:none;margin:0;"
            "white-space:pre-wrap;word-break:normal;overflow-wrap:normal;"
            "font-size:13px;line-height:1.5;color:inherit'>"
            f"{self.text_so_far(upto)}</pre></div>"
        )

    def text_so_far(self, upto: int) -> str:
        """Every request's prompt and what it had after `upto` steps, as HTML, the newest boxed."""
        parts = []
        for request_id, row in self.rows.items():
            if row.first_step > upto:
                continue
            prompt = " ".join(map(str, row.prompt_ids))
            if self.engine.lm.tokenizer is not None:
                prompt = self.engine.lm.decode(row.prompt_ids)
            text = self._text(self.output(request_id, upto))
            newest = ""
            if upto > 0 and request_id in self.steps[upto - 1].outputs:
                newest = text[len(self._text(self.output(request_id, upto - 1))) :]
            parts.append(
                f"<b>{row.letter}</b> <span style='opacity:.65'>{escape(prompt)}</span>"
                f"<b>{escape(text[: len(text) - len(newest)])}"
                f"{_chip(newest) if newest else ''}</b>"
            )
        return "\n\n".join(parts)


def _chip(token: str) -> str:
    """A token in a frame. A line end stands in it as an arrow, and breaks the line after it."""
    shown, breaks = token.replace("\n", "↵"), "\n" * token.count("\n")
    frame = "border:1.5px solid;border-radius:3px;padding:0 1px"
    return f"<span style='{frame}'>{escape(shown)}</span>{breaks}"


def visible(text: str, longest: int = 9) -> str:
    """A token's text for a label: blanks and line ends can be seen, a long one is cut."""
    text = text.replace("\n", "↵").replace("\t", "→").replace(" ", "·")
    return text if len(text) <= longest else text[: longest - 1] + "…"
