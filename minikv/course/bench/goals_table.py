"""The goals on a GPU, each with what was measured of it, and where."""

from pathlib import Path

from minikv.course.bench.gpu_goals import COMMANDS, CONDITIONS, GOALS, Result, results
from minikv.course.pictures.table import Table


class GoalsTable(Table):
    """One line a goal, one column a GPU; "not measured" where there is no figure."""

    def __init__(self, measured: list[Result]):
        self.machines: dict[str, list[Result]] = {}
        for result in measured:
            self.machines.setdefault(result.machine["gpu"], []).append(result)
        self.caption = self._caption()

    def rows(self) -> list[tuple[str, ...]]:
        header = ("what, in one run", "goal", *(self.machines or ["measured"]))
        lines = [header]
        for name, goal in GOALS.items():
            cells = [_cell(name, found) for found in self.machines.values()] or ["not measured"]
            lines.append((goal.text, goal.aim, *cells))
        return lines

    def _caption(self) -> str:
        told = [CONDITIONS]
        told += [
            f"{result.machine['gpu']}, {COMMANDS[result.bench]}: median (least..greatest) of "
            f"{result.repeats} rounds; driver {result.machine['driver']}, CUDA "
            f"{result.machine['cuda']}, Python {result.machine['python']}, torch "
            f"{result.machine['torch']}, triton {result.machine['triton']}, transformers "
            f"{result.machine['transformers']}; {result.date}."
            for found in self.machines.values()
            for result in found
        ]
        measured = {result.bench for found in self.machines.values() for result in found}
        missing = [command for bench, command in COMMANDS.items() if bench not in measured]
        if missing:
            told.append(f"Not measured yet: {' and '.join(missing)} need a CUDA GPU.")
        return " ".join(told)

    def markdown(self) -> str:
        """For the README."""
        head, *body = (" | ".join(row) for row in self.rows())
        bars = " | ".join(["---"] * len(self.rows()[0]))
        return "\n".join(f"| {line} |" for line in (head, bars, *body))


def goals_table(folder: Path | None = None) -> GoalsTable:
    """The goals with the figures kept in `folder` (`minikv.course.bench.gpu_goals.RESULTS`).

    Raises ValueError for a file there that is not a whole measurement.
    """
    return GoalsTable(results(folder))


def _cell(name: str, found: list[Result]) -> str:
    shown = [result.show(name) for result in found if name in result.goals]
    return shown[0] if shown else "not measured"
