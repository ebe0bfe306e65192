"""A lecturer's plan of a term: what is for which week, until when, and what it gives.

    name = "Memory, in six weeks"
    partial = true                    # points by the lines of a check that pass; else all or none
    overrides = "overrides.csv"       # beside this file: student,exercise,points,why
    roster = "roster.csv"             # name,username: of a folder, and of the tables

    [[week]]
    deadline = 2027-03-05T23:59:00
    exercises = ["04.1", "04.2"]
    points."04.2" = 5                 # otherwise its difficulty, 1 to 5

In a course's folder it is `plan.toml`, and `progress` follows it. Two come along, in
`minikv/course/plans`; each is named without `.toml`.
"""

import csv
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from importlib import resources
from pathlib import Path

from minikv.course.exercise_data.manifest import Exercise, ReaderError, chapters, find

FILE = "plan.toml"
COLUMNS = ["student", "exercise", "points", "why"]


@dataclass(frozen=True)
class Week:
    """What is due together."""

    number: int  # from 1
    exercises: tuple[Exercise, ...]
    deadline: datetime | None = None

    @property
    def minutes(self) -> int:
        return sum(exercise.minutes for exercise in self.exercises)

    @property
    def due(self) -> str:
        """ "until Fri 05 March 2027, 23:59"; "" without a deadline."""
        return f"until {self.deadline:%a %d %B %Y, %H:%M}" if self.deadline else ""


@dataclass(frozen=True)
class Override:
    """What a lecturer says instead of a check."""

    points: float
    why: str


@dataclass(frozen=True, eq=False)
class TermPlan:
    """All weeks. As a route it has `exercises`, by their ids, and no end of its own."""

    name: str
    weeks: tuple[Week, ...]
    partial: bool = False
    points: Mapping[str, float] = field(default_factory=dict)  # by id, where not the difficulty
    overrides: Mapping[tuple[str, str], Override] = field(default_factory=dict)
    roster: Mapping[str, str] = field(default_factory=dict)  # names in tables, by those of folders
    ends: str | None = None

    @cached_property
    def exercises(self) -> set[str]:
        return {exercise.id for week in self.weeks for exercise in week.exercises}

    def week(self, number: int) -> Week:
        """Raises ReaderError with the weeks that there are."""
        if not 1 <= number <= len(self.weeks):
            raise ReaderError(f"week: the plan has weeks 1 to {len(self.weeks)}, was {number}")
        return self.weeks[number - 1]

    def most(self, exercise: Exercise) -> float:
        """The points of an exercise that is passed."""
        return self.points.get(exercise.id, exercise.difficulty)


NO_PLAN = TermPlan("", ())


def read(named: str | Path) -> TermPlan:
    """The plan in a file, or one that comes along. Raises ReaderError with file and week."""
    file = Path(named)
    if not file.is_file():
        known = {one.name[:-5]: one for one in PLANS.iterdir() if one.name.endswith(".toml")}
        if str(named) not in known:
            raise ReaderError(f"plan: must be a file, or {' or '.join(known)}; was {str(named)!r}")
        text = known[str(named)].read_text(encoding="utf-8")
    else:
        text = file.read_text(encoding="utf-8")
    chapters()  # what is wrong with theirs is not told as the plan's
    try:
        fields = tomllib.loads(text)
        weeks = [_week(n, row) for n, row in enumerate(fields.pop("week", ()), 1)]
        ids = [exercise.id for week, _ in weeks for exercise in week.exercises]
        twice = sorted({id_ for id_ in ids if ids.count(id_) > 1})
        if not ids or twice:
            raise ValueError(f"in two weeks: {', '.join(twice)}" if twice else "no week has any")
        by_hand = _rows(file, fields.pop("overrides", None), COLUMNS)
        names = _rows(file, fields.pop("roster", None), ["name", "username"])
        for column in ("name", "username"):
            all_of_them = [row[column] for row in names]
            if twice := sorted({one for one in all_of_them if all_of_them.count(one) > 1}):
                raise ValueError(f"roster: {column}: twice, {', '.join(twice)}")
        if not isinstance(fields.get("partial", False), bool):
            raise ValueError(f"partial: must be true or false, was {fields['partial']!r}")
        plan = TermPlan(
            weeks=tuple(week for week, _ in weeks),
            points={id_: most for _, own in weeks for id_, most in own.items()},
            roster={row["name"]: row["username"] for row in names}, **fields,
        )  # fmt: skip
        return replace(plan, overrides=_overrides(plan, by_hand))
    except (TypeError, ValueError, AttributeError, OSError) as error:
        raise ReaderError(f"{named}: {error}") from None


PLANS = resources.files("minikv.course") / "plans"


def text_of(named: str) -> str:
    """A plan's own text, without the lecturer's tables beside it. Raises as `read`."""
    read(named)
    place = Path(named) if Path(named).is_file() else PLANS / f"{named}.toml"
    return re.sub(r"(?m)^(overrides|roster) *=.*\n", "", place.read_text(encoding="utf-8"))


def _week(number: int, row: dict) -> tuple[Week, dict[str, float]]:
    """A week, and the points that it gives to some of its exercises."""
    unknown = row.keys() - {"exercises", "deadline", "points"}
    if unknown:
        raise ValueError(f"week {number}: there is no field {', '.join(sorted(unknown))}")
    deadline, points = row.get("deadline"), row.get("points", {})
    if deadline is not None and not isinstance(deadline, datetime):
        raise ValueError(f"week {number}: deadline: must be like 2027-03-05T23:59:00")
    exercises = tuple(map(find, row.get("exercises", ())))
    other = points.keys() - {exercise.id for exercise in exercises}
    if other or not all(isinstance(most, int | float) and most >= 0 for most in points.values()):
        raise ValueError(f"week {number}: points: must be numbers for its exercises, was {points}")
    return Week(number, exercises, deadline), points


def _overrides(plan: TermPlan, rows: Iterable[dict[str, str]]) -> dict[tuple[str, str], Override]:
    """What the rows say. Raises ValueError for one that no mark can follow."""
    found: dict[tuple[str, str], Override] = {}
    for row in rows:
        mark = row["student"], row["exercise"]
        at = f"overrides: {', '.join(mark)}"
        if mark[1] not in plan.exercises:
            raise ValueError(f"{at}: the exercise is in no week")
        if mark in found:
            raise ValueError(f"{at}: there are two rows")
        most = plan.most(find(mark[1]))
        try:
            given = float(row["points"])
        except ValueError:
            given = -1
        if not 0 <= given <= most:
            raise ValueError(
                f"{at}: points must be a number from 0 to {most:g}, was {row['points']!r}"
            )
        if not row["why"].strip():
            raise ValueError(f"{at}: why: the student will ask; say it")
        found[mark] = Override(given, row["why"])
    return found


def _rows(plan: Path, name: str | None, columns: list[str]) -> list[dict[str, str]]:
    """The rows of a table beside the plan; none without a name."""
    if name is None:
        return []
    try:
        with (plan.parent / name).open(newline="", encoding="utf-8-sig") as lines:
            rows = [*csv.DictReader(lines)]
    except FileNotFoundError:
        raise ValueError(
            f"{name}: is not beside the plan; begin it with {','.join(columns)}"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: must be UTF-8: {error}") from None
    if any(None in row.values() or {*columns} - {*row} for row in rows):
        raise ValueError(f"{name}: needs the columns {','.join(columns)}")
    return rows
