"""The shorter routes through the course: which sections and exercises each takes (`routes.toml`).

routes()["weekend"]      # its sections, exercises and bridges, by chapter
choose("weekend")        # what `minikv start --route weekend` does
chosen()                 # the reader's, or None: everything
"""

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import ReaderError, chapters
from minikv.course.exercise_data.plan import FILE, TermPlan, read, text_of
from minikv.course.exercise_data.whole_files import write_whole

EVERYTHING = "everything"
# Every chapter ends with these, for all readers: no route is marked there.
UNMARKED = ("Your parts in the engine", "Summary", "The running table", "Three open questions",
            "What to read next")  # fmt: skip
HEADING = re.compile(r"^(#{2,3}) (.+)$", re.MULTILINE)
MARK = re.compile(r"^(## .+)\n\n?(?:`[a-z]+(?: without [^`]+)?`(?: · )?)+(?:\n\n?> \*.+)*(?=\n|$)",
                  re.MULTILINE)  # fmt: skip


@dataclass(frozen=True)
class Leg:
    """What a route takes of one chapter."""

    take: tuple[str, ...] = ()  # headings of sections; none: all but those in `skip`
    skip: tuple[str, ...] = ()
    exercises: tuple[int, ...] = ()
    bridge: dict[str, str] = field(default_factory=dict)  # by heading: what was skipped, in short

    def reads(self, section: str) -> bool:
        return section in self.take if self.take else section not in self.skip


@dataclass(frozen=True)
class Route:
    """A way through the course."""

    name: str
    hours: str  # "6 to 8"
    about: str
    legs: dict[str, Leg]  # by chapter
    ends: str | None = None  # what to run when all its exercises are passed

    @property
    def exercises(self) -> set[str]:
        """The ids of its exercises."""
        return {f"{number}.{i}" for number, leg in self.legs.items() for i in leg.exercises}

    @property
    def minutes(self) -> int:
        """Of its exercises."""
        everything = (e for chapter in chapters().values() for e in chapter.exercises)
        return sum(e.minutes for e in everything if e.id in self.exercises)


@cache
def routes() -> dict[str, Route]:
    """The shorter routes by name, the shortest first."""
    text = Path(__file__).with_name("routes.toml").read_text(encoding="utf-8")
    found = {}
    for name, kept in tomllib.loads(text).items():
        legs = {number: Leg(**leg) for number, leg in kept.items() if number.isdigit()}
        found[name] = Route(name, kept["hours"], kept["about"], legs, kept.get("ends"))
    return found


# ── The reader's choice ───────────────────────────────────────────────────────


def _file() -> Path:
    return reader_files.folder() / ".progress" / "route"


def choose(name: str) -> None:
    """Keep the reader's choice: `progress` follows it from then on. Raises ReaderError."""
    if name not in (*routes(), EVERYTHING):
        known = ", ".join([*routes(), EVERYTHING])
        raise ReaderError(f"route: must be one of {known}, was {name!r}")
    _file().parent.mkdir(parents=True, exist_ok=True)
    write_whole(_file(), name + "\n")


def follow(plan: str) -> None:
    """Put a lecturer's plan into the reader's folder: `progress` follows it. Raises ReaderError."""
    write_whole(reader_files.folder().parent / FILE, text_of(plan))


def chosen() -> Route | TermPlan | None:
    """The plan in the reader's folder, or their route; None without one, which means everything."""
    plan = reader_files.folder().parent / FILE
    if plan.exists():
        return read(plan)
    try:
        return routes().get(_file().read_text(encoding="utf-8").strip())
    except OSError:
        return None


# ── Marks in the notebooks ────────────────────────────────────────────────────


def marked(number: str, sources: list[str]) -> list[str]:
    """The Markdown cells of a chapter's notebook, with a mark under the heading of each section:
    the routes that take it, and what they need from sections that they skip."""
    sources = [MARK.sub(r"\1", source) for source in sources]
    if not any(number in route.legs for route in routes().values()):
        return sources
    inside: dict[str, list[str]] = {}  # exercises by section
    section = ""
    for hashes, title in (match.groups() for text in sources for match in HEADING.finditer(text)):
        if hashes == "##":
            section = title
        elif title.startswith(f"{number}."):
            inside.setdefault(section, []).append(title.split()[0])

    def mark(match: re.Match) -> str:
        hashes, title = match.groups()
        if hashes != "##" or title in UNMARKED:
            return match[0]
        return "\n\n".join([match[0], *_mark(number, title, inside.get(title, ()))])

    return [HEADING.sub(mark, source) for source in sources]


def _mark(number: str, title: str, exercises: Collection[str]) -> list[str]:
    names, bridges = [], []
    for route in routes().values():
        leg = route.legs.get(number)
        if leg is None or not leg.reads(title):
            continue
        left = ", ".join(id_ for id_ in exercises if id_ not in route.exercises)
        names.append(f"`{route.name} without {left}`" if left else f"`{route.name}`")
        if title in leg.bridge:
            lead = f"> *{route.name.capitalize()}, for what you skipped:*"
            bridges.append(f"{lead} {leg.bridge[title]}")
    return [" · ".join(names) or f"`{EVERYTHING}`", *bridges]
