"""What every benchmark shares: timing, spread, goals, the machine, one table, one file.

A time is the wall time of a call with the garbage collector off, as `timeit` takes it.
Contenders are timed in turns within one run, and a ratio is made from the two times of
one round, so that whatever else the machine does reaches both. Every figure is the median
of the repeats, with the least and the greatest behind it.
"""

import importlib.metadata
import json
import operator
import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import minikv
from minikv.course.exercise_data.whole_files import write_whole
from minikv.course.workloads.running_table import processor
from minikv.course.workloads.timing import timed


class Spread:
    """One figure, measured once a repeat."""

    def __init__(self, values: Sequence[float]):
        self.values = list(values)
        self.median, self.min, self.max = median(values), min(values), max(values)

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.min)}..{short(self.max)})"


def over(ones: Iterable[float], others: Iterable[float]) -> Spread:
    """The ratio of two figures of the same round, round by round."""
    return Spread([one / other for one, other in zip(ones, others, strict=True)])


class Aim(NamedTuple):
    """What the figure in `column` should be."""

    column: str
    sign: str  # ">=", "<=" or "<"
    bound: float

    def met(self, row: dict[str, Any]) -> bool:
        """By the median, where there is a spread."""
        value = row[self.column]
        compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}[self.sign]
        return compare(value.median if isinstance(value, Spread) else value, self.bound)


@dataclass
class BenchTable:
    """Rows with the same columns: labels (str), counts and figures (int, float) and Spreads."""

    title: str
    repeats: int
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Aim | None] = field(default_factory=list)

    def add(self, row: dict[str, Any], goal: Aim | None = None) -> None:
        self.rows.append(row)
        self.goals.append(goal)

    def __str__(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        lines = [[*columns, "goal"]]
        for row, goal in zip(self.rows, self.goals, strict=True):
            verdict = ""
            if goal is not None:
                met = "met" if goal.met(row) else "missed"
                verdict = f"{goal.column} {goal.sign} {short(goal.bound)}: {met}"
            lines.append([_cell(row.get(column, "")) for column in columns] + [verdict])
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        text = [self.title, *(f"  {note}" for note in self.notes), ""]
        for cells in lines:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            text.append("  ".join(padded).rstrip())
        text.insert(len(self.notes) + 3, "  ".join("─" * width for width in widths))
        return "\n".join(text)

    def as_json(self) -> dict[str, Any]:
        rows = []
        for row, goal in zip(self.rows, self.goals, strict=True):
            out = {name: vars(v) if isinstance(v, Spread) else v for name, v in row.items()}
            if goal is not None:
                out |= {"goal": goal._asdict(), "met": goal.met(row)}
            rows.append(out)
        return {"title": self.title, "repeats": self.repeats, "notes": self.notes, "rows": rows}


def short(value: float) -> str:
    """Three digits that count, whole numbers in full."""
    if isinstance(value, int) or abs(value) >= 999.5 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, str | Spread) else short(value)


class Race(NamedTuple):
    seconds: dict[str, list[float]]  # by contender; one a repeat
    results: dict[str, list[Any]]  # likewise, and the warm-up's first

    def ratio(self, slow: str, fast: str) -> Spread:
        """How many times longer `slow` took, round by round."""
        return over(self.seconds[slow], self.seconds[fast])

    def rate(self, name: str, amount: float) -> Spread:
        """`amount` per second."""
        return Spread([amount / seconds for seconds in self.seconds[name]])


def race(
    contenders: Mapping[str, Callable[[Any], Any]], inputs: Iterable[Any], progress: tqdm
) -> Race:
    """Time every contender on every input, in turns; who begins changes from round to round.

    The first input is the warm-up: its times are dropped.
    """
    result = Race({name: [] for name in contenders}, {name: [] for name in contenders})
    for round_, one in enumerate(inputs):
        for name in list(contenders)[:: 1 if round_ % 2 else -1]:
            seconds, returned = timed(partial(contenders[name], one))
            result.results[name].append(returned)
            if round_ > 0:
                result.seconds[name].append(seconds)
            progress.update()
    return result


def in_turns(
    measures: Mapping[str, Callable[[Any], Any]], inputs: Iterable[Any], progress: tqdm
) -> dict[str, list[Any]]:
    """What each function says of each input, in turns; the first one is the warm-up."""
    said = race(measures, inputs, progress).results
    return {name: values[1:] for name, values in said.items()}


def take_steps(engine: minikv.Engine, steps: int, round_: int = 0) -> None:
    """`round_`: what `race` gives to each contender; it changes nothing."""
    for _ in range(steps):
        engine.step()


def random_ids(lm: minikv.LanguageModel, draw: random.Random, length: int) -> list[int]:
    """A prompt. Token 0 ends text, or pads it: it is left out."""
    return [draw.randrange(1, lm.config.vocab_size) for _ in range(length)]


def bar(total: int, text: str) -> tqdm:
    """Progress on stderr, gone when it is done."""
    return tqdm(total=total, desc=text, leave=False)


def environment() -> dict[str, Any]:
    """The machine and the versions: without them a figure says nothing."""
    on_gpu = torch.cuda.is_available()
    return {
        "machine": {
            "cpu": processor(),
            **({"gpu": torch.cuda.get_device_name()} if on_gpu else {}),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
            "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "minikv": minikv.__version__,
            **({"cuda": torch.version.cuda, "triton": version("triton")} if on_gpu else {}),
        },
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def headline(where: dict[str, Any]) -> str:
    machine, versions = where["machine"], where["versions"]
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, torch on {machine['threads']} threads, "
        f"load before {machine['load']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
