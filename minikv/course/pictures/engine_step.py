"""One whole step of a live engine in one picture: queue, schedule, plan, model, commit, append.

engine_step(engine)      # runs a step, and draws what it was to each request
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from minikv.course.pictures import style
from minikv.course.pictures.scene import Pen
from minikv.course.pictures.snapshot import counted
from minikv.course.pictures.timeline import visible
from minikv.engine import Engine
from minikv.sequence import Sequence

STAGES = (  # (where it begins in inches, its name, what it does)
    (0.5, "queue", "who is there"),
    (1.78, "schedule", "a plan: which tokens"),
    (3.3, "model", "one pass; K and V are kept"),
    (5.3, "commit", "they now count"),
    (6.45, "append", "the new token"),
)
SQUARE, MOST = 0.25, 7  # inches; squares of one request that are drawn
ROW, HEAD = 0.56, 0.95  # inches


@dataclass
class StepRow:
    """What a step was to one request."""

    runs: bool
    known: int  # tokens of prompt and answer, before the step
    start: int  # of them computed before
    texts: list[str]  # of the tokens that this step computed
    new: str | None = None  # the token that it got
    is_finished: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.texts)

    def words(self) -> tuple[str, str, str, str]:
        """What stands in its row under queue, plan, commit and append."""
        queue = f"{'runs' if self.runs else 'waits'}: {self.start} of {self.known}\ncomputed"
        if not self.texts:
            return queue, "nothing", "–", "–"
        last = self.end - 1
        where = f"position {last}" if last == self.start else f"positions {self.start} to {last}"
        got = f"none yet:\n{self.known - self.end} are left"
        if self.new is not None:
            got = repr(self.new) + ("\nfinished" if self.is_finished else "")
        plan = f"{counted(len(self.texts), 'token')}:\n{where}"
        return queue, plan, f"{self.end} of {self.known}\ncomputed", got


@contextmanager
def _seen(engine: Engine, rows: dict[int, StepRow]) -> Iterator[None]:
    """Notes the plan between `schedule` and the model."""
    run = engine.runner.run

    def watched(plan):
        for sequence, count in zip(plan.sequences, plan.num_tokens, strict=True):
            row, start = rows[sequence.request.request_id], sequence.num_computed
            ids = sequence.token_ids[start : start + count]
            row.start, row.texts = start, [engine.lm.decode([token]) for token in ids]
        return run(plan)

    with mock.patch.object(engine.runner, "run", watched):
        yield


def engine_step(engine: Engine) -> style.Picture:
    """Run one step of an engine whose requests have one sample each, and draw it."""
    scheduler = engine.scheduler
    found: list[Sequence] = sorted(
        [*scheduler.running, *scheduler.waiting], key=lambda sequence: sequence.order
    )
    rows = {
        sequence.request.request_id: StepRow(
            sequence in scheduler.running, sequence.num_tokens, sequence.num_computed, []
        )
        for sequence in found
    }
    with _seen(engine, rows):
        outputs = engine.step()
    for output in outputs:
        row = rows[output.request_id]
        row.new = engine.lm.decode(output.token_ids[-1:])
        row.is_finished = output.finish_reason is not None
    names = {request_id: style.letter(request_id) for request_id in rows}
    return style.Picture(_drawn(rows, names), _told(rows, names))


def _told(rows: dict[int, StepRow], names: dict[int, str]) -> str:
    """The picture in words."""
    words = (" | ".join(row.words()).replace("\n", " ") for row in rows.values())
    lines = "; ".join(f"{name}: {said}" for name, said in zip(names.values(), words, strict=True))
    return f"{_title(rows)}. Queue, plan, commit and append of each request: {lines}."


def _title(rows: dict[int, StepRow]) -> str:
    count = sum(len(row.texts) for row in rows.values())
    of = sum(bool(row.texts) for row in rows.values())
    return f"One step: {counted(count, 'token')} of {counted(of, 'request')} in one pass"


def _drawn(rows: dict[int, StepRow], names: dict[int, str]):
    pen = Pen(HEAD + ROW * len(rows) + 0.1)
    pen.text(0.1, 0.17, _title(rows), 11, weight="bold")
    for (x, name, what), after in zip(STAGES, [*STAGES[1:], None], strict=True):
        pen.text(x, 0.48, name, 10, weight="bold")
        pen.text(x, 0.7, what, 8, color=style.FAINT)
        if after:
            pen.text(after[0] - 0.1, 0.48, "→", 11, "right")
    places = [x for x, *_ in STAGES]
    tall = ROW * len(rows)
    pen.square(places[2] - 0.08, HEAD, 1.91, tall, "#f1f1f1", style.FAINT)
    for line, (id_, row) in enumerate(rows.items()):
        y = HEAD + ROW * (line + 0.5)
        pen.slot(0.25, y, SQUARE, [names[id_]])
        queue, plan, commit, append = row.words()
        for x, text in zip((*places[:2], *places[3:]), (queue, plan, commit, append), strict=True):
            pen.text(x, y, text, 9, linespacing=1.15)
        shown = row.texts if len(row.texts) <= MOST else row.texts[: MOST - 1]
        for index, text in enumerate(shown):
            x = places[2] + SQUARE * (index + 0.5)
            pen.slot(x, y, SQUARE, [names[id_]], token=(visible(text, 3), 7.4))
        if len(shown) < len(row.texts):
            x = places[2] + SQUARE * len(shown) + 0.04
            pen.text(x, y, f"+{len(row.texts) - len(shown)}", 8)
    return pen.figure
