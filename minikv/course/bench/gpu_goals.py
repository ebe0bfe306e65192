"""What the kernels and the engine are to reach on a GPU, and what was measured there.

Every goal is a ratio of two figures of one run, so that it means the same on every GPU.
`python -m minikv bench kernels` measures those of the kernels, `python -m minikv bench gpu`
those of the engine. Each keeps its figures in `results/` beside this file, one file per GPU
and command. `goals_table.goals_table` shows both beside each other.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from minikv.course.exercises.files import write_whole

RESULTS = Path(__file__).parent / "results"
ROUNDS = 3  # fewer say nothing about the spread
COMMANDS = {
    "kernels": "python -m minikv bench kernels",
    "gpu": "python -m minikv bench gpu",
}
# Without these, a figure says nothing.
MACHINE = ("gpu", "driver", "cuda", "python", "torch", "triton", "transformers", "minikv")


class Goal(NamedTuple):
    """A figure, as a share (shown in %) or as how many times, and what it should be."""

    bench: str  # a key of COMMANDS: what measures it
    text: str
    sign: str  # ">=" or "<="
    bound: float
    unit: str  # "%" or "×"

    def met(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound

    def show(self, value: float) -> str:
        return f"{100 * value:.0f} %" if self.unit == "%" else f"{value:.2f} ×"

    @property
    def aim(self) -> str:
        """The bound in words: "≥ 80 %"."""
        bound = f"{100 * self.bound:g} %" if self.unit == "%" else f"{self.bound:g} ×"
        return f"{'≥' if self.sign == '>=' else '≤'} {bound}"


def _decode(head_dim: int, batch: int, context: str, bound: float) -> Goal:
    text = f"decode, head dim {head_dim}, batch {batch}, context {context}: of the copy's rate"
    return Goal("kernels", text, ">=", bound, "%")


def _floor(head_dim: int, batch: int, context: str, bound: float) -> Goal:
    text = f"decode, head dim {head_dim}, batch {batch}, context {context}: over its floor"
    return Goal("kernels", text, "<=", bound, "×")


def _engine(batch: int, bound: float) -> Goal:
    return Goal("gpu", f"engine, batch {batch}, context 1k: of the roofline", ">=", bound, "%")


CONDITIONS = (
    "Kernels: 32 query and 8 KV heads, bfloat16, block 16, replayed from a CUDA graph; the copy "
    "is one from device to device, bytes read and written; a floor is the time that the copy "
    "takes for the bytes of K and V. Engine: the shape of Llama-3.2-1B, random weights, bfloat16; "
    "the roofline reads the weights and all K and V once per step, at the copy's rate."
)
GOALS: dict[str, Goal] = {
    "decode-64-4k": _decode(64, 64, "4k", 0.80),
    "decode-64-8k": _decode(64, 64, "8k", 0.85),
    "decode-128-4k": _decode(128, 64, "4k", 0.87),
    "decode-128-8k": _decode(128, 64, "8k", 0.88),
    "floor-64-batch-8": _floor(64, 8, "4k", 2),
    "floor-128-batch-1": _floor(128, 1, "8k", 2.5),
    "no-cliff": Goal(
        "kernels", "decode, the worst of batch 16 to 64, contexts 4k and 8k: of the copy's rate",
        ">=", 0.70, "%",
    ),
    "skewed": Goal("kernels", "decode, skewed lengths: over even ones of as many bytes",
                   "<=", 1.25, "×"),
    "block-size": Goal("kernels", "decode, block 16: over block 256", "<=", 1.05, "×"),
    "prefill-128-8k": Goal(
        "kernels", "prefill, head dim 128, 8k: of the rate of a matrix product", ">=", 0.45, "%"
    ),
    "engine-1": _engine(1, 0.55),
    "engine-8": _engine(8, 0.55),
    "engine-64": _engine(64, 0.65),
    "engine-256": _engine(256, 0.70),
    "generate": Goal("gpu", "batch 64: tokens/s over `generate` of transformers", ">=", 3, "×"),
    "generate_batch": Goal("gpu", "batch 64: tokens/s over its `generate_batch`", ">=", 3, "×"),
}  # fmt: skip


class Result(NamedTuple):
    """What one command measured on one machine. `goals`: by id, as in the file."""

    bench: str
    machine: dict[str, Any]
    date: str
    repeats: int
    goals: dict[str, dict[str, Any]]

    def show(self, name: str) -> str:
        """ "83 % (81 %..84 %), met" """
        goal, figure = GOALS[name], self.goals[name]
        value, low, high = (goal.show(figure[key]) for key in ("value", "low", "high"))
        return f"{value} ({low}..{high}), {'met' if figure['met'] else 'missed'}"


def require_rounds(repeats: int) -> None:
    """Raise ValueError for too few rounds."""
    if repeats < ROUNDS:
        raise ValueError(f"--repeats: was {repeats}; a goal takes at least {ROUNDS} rounds")


def judge(figures: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """By goal: the median of its figures, one a round, the least, the greatest, and whether
    the median meets the goal."""
    judged = {}
    for name, values in figures.items():
        goal, value = GOALS[name], median(values)
        judged[name] = {
            "value": value,
            "low": min(values),
            "high": max(values),
            "goal": [goal.sign, goal.bound],
            "met": goal.met(value),
        }
    return judged


def save(bench: str, where: Mapping[str, Any], content: Mapping[str, Any], folder: Path) -> Path:
    """Write a run's file, whole or not at all; returns its path.

    `where`: "machine" and "date", of `gpu_clock.machine`. `content`: "repeats", "goals" of `judge`,
    and whatever else was measured. Raises ValueError for what `load` would refuse.
    """
    folder.mkdir(exist_ok=True)
    path = folder / file_name(where["machine"]["gpu"], bench)
    full = {"bench": bench, **where, **content}
    _check(path, full)
    write_whole(path, json.dumps(full, indent=1, allow_nan=False) + "\n")
    return path


def load(path: Path) -> Result:
    """Read a file of `save`. Raises ValueError that says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid json ({error}); measure again") from None
    _check(path, content)
    return Result(*(content[field] for field in Result._fields))


def results(folder: Path | None = None) -> list[Result]:
    """All that is kept in `folder` (RESULTS), by machine. Raises ValueError as `load` does."""
    return [load(path) for path in sorted((folder or RESULTS).glob("*.json"))]


def file_name(gpu: str, bench: str) -> str:
    """NVIDIA L4, "kernels" -> nvidia-l4.kernels.json"""
    words = "".join(c if c.isalnum() else " " for c in gpu.lower()).split()
    return f"{'-'.join(words)}.{bench}.json"


def _check(path: Path, content: Any) -> None:
    """Raise ValueError unless this is a whole run of one command on a machine that has a name."""

    def want(right: bool, what: str) -> None:
        if not right:
            raise ValueError(f"{path}: {what}; measure again, or delete the file")

    want(isinstance(content, dict), "not a json object")
    bench, machine, goals = (content.get(key) for key in ("bench", "machine", "goals"))
    want(bench in COMMANDS, f"bench is {bench!r}, not one of {', '.join(COMMANDS)}")
    want(isinstance(machine, dict), "has no machine")
    for key in MACHINE:
        value = machine.get(key)
        want(isinstance(value, str) and value != "", f"machine: {key} is {value!r}, not a name")
    named = file_name(machine["gpu"], bench)
    want(path.name == named, f"holds figures of {machine['gpu']}, whose file is {named}")
    want(isinstance(content.get("date"), str), "has no date")
    repeats = content.get("repeats")
    want(isinstance(repeats, int) and repeats >= ROUNDS,
         f"repeats is {repeats!r}: want at least {ROUNDS} rounds")  # fmt: skip
    want(isinstance(goals, dict), "has no goals")
    for name, figure in goals.items():
        want(name in GOALS and GOALS[name].bench == bench, f"{name!r} is no goal of {bench}")
        want(isinstance(figure, dict), f"{name}: is {figure!r}")
        numbers = [figure.get(key) for key in ("low", "value", "high")]
        want(
            all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers)
            and numbers == sorted(numbers),
            f"{name}: low, value, high are {numbers}, not positive numbers in this order",
        )
        want(
            figure.get("goal") == [GOALS[name].sign, GOALS[name].bound]
            and figure.get("met") is GOALS[name].met(figure["value"]),
            f"{name}: goal or met differ from the table of goals",
        )
