"""A check as short programs: played on the reference and on the reader's code, and compared.

    def tables(mine, program, log):
        num_tokens, position = program
        table = mine.BlockTable(BlockPool(8), 4)
        log(f"a table of {num_tokens} tokens, blocks of 4")
        log.call("grow", table.grow, num_tokens)
        log.call(f"writable_slot({position})", table.writable_slot, position)
        log("afterwards", {"block_ids": table.block_ids})

    scenario("04.5", tables, Group("any position", [(7, 0), (7, 6), (7, 7)], look="the slot"))

`play(mine, program, log)` runs one program on a module, the reader's or the reference's, and
notes in the log whatever can be seen from outside. Nothing that a right solution may choose
freely belongs there: the order in which blocks are handed out, say, or the words of an error.

A group of programs is one line of the report. Its programs stand smallest first, so the first
one on which the two logs differ is the counterexample. The cause is found by playing the known
mistakes of the exercise (`mistakes.toml` of its chapter) on the same programs: the mistake whose
wrong observations are most like the reader's is named. Where none is alike, none is named.
"""

import math
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from io import StringIO
from time import process_time
from types import ModuleType
from typing import Any

import torch

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Chapter, chapter_of, find
from minikv.course.exercise_data.mistakes import Mistake, mistakes_of, text_of_mistake
from minikv.course.exercise_data.skeletons import skeleton
from minikv.course.judge import checking
from minikv.course.judge.checking import mismatch, plain, shown
from minikv.course.judge.plain_data import EXACT, Words, kept
from minikv.course.judge.raised import Raised
from minikv.course.judge.without_reference import without_reference

LOOKED_AT = 25  # programs that differ, and as many that do not, which the mistakes are played on
LEAST_DIFFERING, LEAST_RIGHT = 3, 2  # of one line, even if those of all lines are more than that
ENOUGH = 12  # programs of one group that differ; the rest of the group is then not played
# A mistake is named if it shares this much of what is wrong in the first line that fails, and
# that much of what is wrong altogether: less, since a reader may have made two. Or if it explains
# the first line alone, and nearly all that it gets wrong is wrong here, too.
ALIKE, ALIKE_IN_ALL, CONTAINED = 0.5, 0.3, 0.9
# Answers that many mistakes give. If nothing else agrees, all has to.
SAY_LITTLE = {"True", "False", "None", "-2", "-1", "0", "1", "2", "[]", "{}", "''", "nothing"}
PLAY_LIMIT = 2.0  # seconds for one mistake on one program: some never end
DIAGNOSIS_LIMIT = 2.0  # seconds of computing, for one report
LONGEST_STORY = 7  # events that are told before the difference, besides the first
TOLERANCE = 1e-4  # of tensors, relative to their largest value (to 1, if that is smaller)


# ── What is seen ──────────────────────────────────────────────────────────────


@dataclass
class Event:
    """One thing that happened in a program, and what could be seen of it."""

    text: str
    seen: dict[str, Any] = field(default_factory=dict)
    error: Any = None  # what was raised; a `Raised` once the program has ended
    is_call: bool = False


class Log:
    """What one program does and what comes of it, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, text: str, seen: Mapping[str, Any] | None = None) -> None:
        """Note what happens, and values that can be seen then, the most telling one first."""
        values = {name: kept(value) for name, value in (seen or {}).items()}
        self.events.append(Event(text, values))

    def call(self, text: str, function: Callable, *arguments: Any, see: bool = True) -> Any:
        """Call `function` and note what it returns, or what it raises; returns what it returns,
        None after an error. With see=False the value itself is not compared.

        An argument that can be changed is looked at again afterwards.
        """
        before = [kept(one) for one in arguments]
        event = Event(text, is_call=True)
        self.events.append(event)
        try:
            result = function(*arguments)
        except Exception as error:
            event.error = error
            return None
        if see:
            event.seen["result"] = kept(result)
        for place, (old, value) in enumerate(zip(before, arguments, strict=True)):
            if isinstance(value, list | dict | set | torch.Tensor):
                now = kept(value)
                if not same(now, old):
                    event.seen[f"argument {place + 1} afterwards"] = now
        return result


def same(found: Any, expected: Any) -> bool:
    """Whether two seen values are equal: numbers and tensors to rounding, the rest exactly."""
    if type(expected) in EXACT and type(found) in EXACT:
        return found == expected
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and mismatch(found, expected, TOLERANCE) is None
    if isinstance(found, torch.Tensor):
        return same(found.tolist(), expected)
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(map(same, found, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, float) and isinstance(found, int | float):
        with suppress(OverflowError):  # an integer that no float can hold
            return math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9) or (
                math.isnan(found) and math.isnan(expected)
            )
        return False
    return type(found) in (type(expected), bool, int, float) and found == expected


def sealed(events: list[Event]) -> list[Event]:
    """The same events, once nobody needs what was raised but to compare it and to tell of it."""
    for event in events:
        event.error = None if event.error is None else Raised.of(event.error)
    return events


# ── Programs and groups ───────────────────────────────────────────────────────

Play = Callable[[Any, Any, Log], None]


@dataclass(frozen=True, eq=False)
class Group:
    """One line of a report: programs, smallest first, and where to look if one goes wrong."""

    name: str
    programs: Sequence[Any]
    look: str


@dataclass(frozen=True, eq=False)
class Scenario:
    """All programs of one exercise."""

    exercise: str
    play: Play
    groups: tuple[Group, ...]
    read: Callable[[list[Event]], list[Event]] = sealed
    in_turn: bool = False  # a program is several cases, which end with the first that goes wrong

    def cases(self, group: Group, place: int) -> Sequence[Any]:
        """What is played of a program, one after the other."""
        program = group.programs[place]
        return program if self.in_turn else (program,)

    def log_of(self, group: Group, place: int, play: Callable[[int], list[Event]]) -> list[Event]:
        """The log of one program, whose cases `play` plays. Of those that go well nothing is
        told."""
        if not self.in_turn:
            return self.read(play(0))
        events: list[Event] = []
        for case in range(len(self.cases(group, place))):
            found = play(case)
            is_wrong = difference(found, self._expected(group, place, case)) is not None
            events += [replace(one, text=one.text if is_wrong else "") for one in found]
            if is_wrong:
                break
        return self.read(events)

    def on(self, module: Any, group: Group, place: int, case: int = 0) -> list[Event]:
        """The log of one case on one module. An error in `play` itself ends the log."""
        log = Log()
        try:
            self.play(module, self.cases(group, place)[case], log)
        except Exception as error:
            text = log.events[-1].text if log.events else "at the start"
            log.events.append(Event(text, error=error))
        return sealed(log.events)

    @cache  # noqa: B019  a scenario lives as long as its module
    def expected(self, group: Group, place: int) -> list[Event]:
        """What the reference gives. Raises ValueError for a program that does not come to its
        end even there: its author made a mistake, not the reader."""
        return self.log_of(group, place, partial(self._expected, group, place))

    @cache  # noqa: B019
    def _expected(self, group: Group, place: int, case: int) -> list[Event]:
        with reader_files.nobodys():
            events = self.on(reference_module(self.exercise), group, place, case)
        if events and events[-1].error is not None and not events[-1].is_call:
            code = getattr(self.play, "func", self.play).__code__  # of a partial, too
            error = events[-1].error
            raise ValueError(
                f"{code.co_filename}, line {code.co_firstlineno}, {self.exercise}, {group.name}, "
                f"program {place}: {error.name}: {error.message}"
            )
        return events

    @cache  # noqa: B019
    def symptoms_of(self, mistake: Mistake, group: Group, place: int) -> frozenset:
        """What is wrong with one program when this mistake is made."""
        module = _module_with(self.exercise, mistake)
        without = without_reference(find(self.exercise))

        def play(case: int) -> list[Event]:
            with without.active(module), _within(PLAY_LIMIT), redirect_stdout(StringIO()):
                return self.on(module, group, place, case)

        try:
            found = self.log_of(group, place, play)
        except (_TooLong, Exception) as error:
            found = sealed([Event("", error=error)])
        return symptoms(found, self.expected(group, place))


SCENARIOS: dict[str, list[Scenario]] = {}
MISSING = " is not among the keys"  # an answer that `numbers` asks for


def scenario(
    exercise: str,
    play: Play,
    *groups: Group,
    read: Callable[[list[Event]], list[Event]] = sealed,
    in_turn: bool = False,
) -> None:
    """Make `groups` lines of the report of `exercise`, in this order.

    `play` runs beside the reader's code, and what it notes is all that is believed. `read` runs
    where the notes are judged: it may put them into other words before they are compared.
    """
    made = Scenario(exercise, play, groups, read, in_turn)
    SCENARIOS.setdefault(exercise, []).append(made)
    lines = checking.CHECKS.setdefault(exercise, [])
    lines.extend(Played(exercise, group.name, made, group) for group in groups)


def numbers(
    exercise: str, function: str, looks: Mapping[str, tuple[str, str]], near: float = 0.0
) -> None:
    """A line for each number in the dictionary that the reader's `function` returns.

    looks: key -> (what the number is, where to look). A number that is off by at most a share
    of `near` counts as the reference's, or as that of a known mistake. The report does not say
    the right number: these are predictions.
    """

    def answers(module: Any) -> Any:
        return getattr(module, function)()

    def play(mine: Any, key: str, log: Log) -> None:
        found = log.call("", partial(answers, mine), see=False)
        if not isinstance(found, Mapping) or key not in found:
            log(looks[key][0], {"result": Words(f"nothing, {key!r}{MISSING}")})
            return
        log(looks[key][0], {"result": plain(found[key])})

    @cache
    def known(key: str) -> list:
        found = [answers(reference_module(exercise))[key]]
        for mistake in mistakes_of(find(exercise)):
            with suppress(Exception):
                found.append(answers(_module_with(exercise, mistake))[key])
        return found

    def read(events: list[Event]) -> list[Event]:
        value = events[-1].seen.get("result")
        key = next((key for key, (text, _) in looks.items() if text == events[-1].text), None)
        if key is None or isinstance(value, Words):
            return events
        if isinstance(value, int | float) and not isinstance(value, bool):
            given = [one for one in known(key) if isinstance(one, int | float)]
            value = next((one for one in given if abs(value - one) <= near * abs(one)), value)
        right = type(value) in (int, float, bool, str) and value == known(key)[0]
        other = "another answer" if isinstance(known(key)[0], str) else "another number"
        words = Words(other if right else shown(value))
        return [*events[:-1], Event(events[-1].text, {"result": words})]

    groups = [Group(key, [key], look) for key, (_, look) in looks.items()]
    scenario(exercise, play, *groups, read=read)


@dataclass(frozen=True, eq=False)
class Played:
    """A group as one of an exercise's checks."""

    exercise: str
    name: str
    scenario: Scenario
    group: Group

    @property
    def cause(self) -> str | None:
        return None  # a known mistake says it, once all groups have been played

    @property
    def look(self) -> str:
        return self.group.look

    def run(self, player: Any) -> "Outcome":
        """Have the programs played on the reader's module, by a player of `observing`, until ENOUGH
        differ."""
        differs: dict[int, Difference] = {}
        right: list[int] = []
        for place in range(len(self.group.programs)):
            expected = self.scenario.expected(self.group, place)
            play = partial(player.events, self, place)
            found = self.scenario.log_of(self.group, place, play)
            first = difference(found, expected)
            if first is None:
                right.append(place)
            else:
                differs[place] = first
                if first.error is not None and len(differs) == 1:
                    first.error.ask()  # while the program that raised it is the last
                if len(differs) == ENOUGH:
                    break
        return Outcome(self, differs, right)


def reference_module(exercise: str) -> ModuleType:
    """The chapter's module with the reference in every place."""
    return _reference_of(chapter_of(exercise))


@cache
def _reference_of(chapter: Chapter) -> ModuleType:
    with reader_files.aside(chapter):
        return reader_files.parsed(chapter, skeleton(chapter)).load(keep=set())


@cache
def _module_with(exercise: str, mistake: Mistake) -> ModuleType:
    chapter = chapter_of(exercise)
    with reader_files.aside(chapter):
        text = text_of_mistake(find(exercise), mistake)
        return reader_files.parsed(chapter, text).load(keep={exercise})


class _TooLong(BaseException):
    """A mistake did not come to its end. No play may catch it by `except Exception`."""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise _TooLong in here after some seconds of computing, where the system can (not in a
    thread)."""
    if not hasattr(signal, "setitimer") or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def stop(*_: Any) -> None:
        raise _TooLong(f"not finished after {seconds:g} s")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


# ── What differs ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Difference:
    """The first event of a program that is not as it should be."""

    story: str  # how it came there
    what: str  # what is seen, and what was expected
    symptoms: frozenset
    error: Raised | None  # that the reader's code raised, and should not have


@dataclass(frozen=True, eq=False)
class Outcome:
    """One group, played on the reader's code."""

    played: Played
    differs: dict[int, Difference]  # by the place of the program
    right: list[int]  # the places of those that were played and did not differ

    @property
    def counterexample(self) -> Difference | None:
        return self.differs[min(self.differs)] if self.differs else None


def difference(found: list[Event], expected: list[Event]) -> Difference | None:
    """Where two logs differ first; None if they are alike."""
    at = _first_difference(found, expected)
    if at is None:
        return None
    event = found[at] if at < len(found) else Event("the program goes on")
    wanted = expected[at] if at < len(expected) else None
    error = event.error
    if wanted is not None and wanted.error is not None and error is None:
        result = event.seen.get("result")
        instead = f", but {shown(plain(result), 80)}" if result is not None else ""
        what = f"no error{instead}; expected {wanted.error.name}"
    elif error is not None:
        what = f"{error.name} ({error.message})"
        if wanted is not None and wanted.error is not None:
            what += f", expected {wanted.error.name}"
    elif wanted is None:
        what = "it goes on, where nothing more should happen"
    else:
        names = (n for n in {**wanted.seen, **event.seen} if not _agree(n, event, wanted))
        name = next(names, None)
        what = "it ends, where more should happen" if name is None else _told(name, event, wanted)
    story: list[str] = []
    for one in found[: at + 1]:
        if one.text and (one.is_call or not story or one.text != story[-1]):
            story.append(one.text)
    if len(story) > LONGEST_STORY:
        story[1:-LONGEST_STORY] = ["…"]
    return Difference("; ".join(story), what, symptoms(found, expected), error)


def symptoms(found: list[Event], expected: list[Event]) -> frozenset:
    """All that is wrong at the first event that differs, in a form that can be compared."""
    at = _first_difference(found, expected)
    if at is None:
        return frozenset()
    event = found[at] if at < len(found) else Event("")
    wanted = expected[at] if at < len(expected) else Event("")
    if event.error is not None:
        message = re.sub(r"0x[0-9a-f]+|\d+", "#", event.error.message)[:80]
        return frozenset({(at, "raises", event.error.name), (at, "says", message)})
    if wanted.error is not None:
        return frozenset({(at, "raises", "nothing"), (at, "instead", _digest(event.seen))})
    wrong = [n for n in {**wanted.seen, **event.seen} if not _agree(n, event, wanted)]
    return frozenset((at, name, _digest(event.seen.get(name))) for name in wrong)


def _first_difference(found: list[Event], expected: list[Event]) -> int | None:
    for place in range(max(len(found), len(expected))):
        if place >= len(found) or place >= len(expected):
            return place
        mine, theirs = found[place], expected[place]
        if theirs.error is not None or mine.error is not None:
            if None in (theirs.error, mine.error) or not mine.error.is_a(theirs.error):
                return place
            continue
        if not all(_agree(name, mine, theirs) for name in {**theirs.seen, **mine.seen}):
            return place
    return None


def _agree(name: str, mine: Event, theirs: Event) -> bool:
    if (name in mine.seen) != (name in theirs.seen):
        return False
    return same(mine.seen[name], theirs.seen[name])


def _told(name: str, mine: Event, theirs: Event) -> str:
    if name.startswith("argument ") and name not in theirs.seen:
        now = mine.seen[name]
        has = "" if isinstance(now, torch.Tensor) else f": {shown(_short(plain(now)), 80)}"
        return f"{name.removesuffix(' afterwards')} was changed, and should not be{has}"
    label = "" if name == "result" else f"{name} "
    found, expected = mine.seen.get(name), theirs.seen.get(name)
    if isinstance(found, Words) and found.endswith(MISSING):
        return found  # whatever number was expected there
    if isinstance(expected, torch.Tensor) and expected.numel() > 8:
        if not isinstance(found, torch.Tensor):
            kind = "nothing" if found is None else f"a {type(found).__name__}"
            return f"{label}{kind}, expected a tensor of shape {tuple(expected.shape)}"
        return f"{label}{mismatch(found, expected, TOLERANCE)}"
    return label + checking.differ(_short(plain(found)), _short(plain(expected)))


def _short(value: Any) -> Any:
    """Without digits that nobody reads."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _digest(value: Any) -> str:
    """A text that is the same for values that are the same to rounding."""
    if isinstance(value, torch.Tensor):
        flat = value.double().flatten()
        finite = flat[flat.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        rounded = (flat / (scale or 1.0)).mul(200).round().tolist()
        return f"{tuple(value.shape)} {scale:.2g} {hash(tuple(str(one) for one in rounded))}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_digest, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_digest(one)}' for key, one in value.items())}}}"
    return repr(value)


# ── Why ───────────────────────────────────────────────────────────────────────


def diagnose(outcomes: Iterable[Outcome]) -> dict[Outcome, Mistake]:
    """The mistake behind each failed group, where one is known that behaves like the reader's.

    One mistake explains as many groups as it can. What it does not explain is asked again,
    so that two mistakes are told as two. A line is explained only if the program that it tells
    goes wrong as with the mistake. After DIAGNOSIS_LIMIT no further mistake is tried.
    """
    latest = process_time() + DIAGNOSIS_LIMIT
    outcomes = list(outcomes)
    failed = [one for one in outcomes if one.differs]
    named: dict[Outcome, Mistake] = {}
    told: set[Outcome] = set()
    for first in failed:
        if first in told:
            continue
        rest = [one for one in failed if one not in named]
        alike = [
            mistake
            for mistake in mistakes_of(find(first.played.exercise))
            if process_time() < latest
            and _tells(mistake, first)
            and _likeness(mistake, [first]) >= ALIKE
        ]
        scores = {mistake: _likeness(mistake, rest, outcomes) for mistake in alike}
        most = max(scores.values(), default=0.0)
        best = next(
            (
                one
                for one, score in scores.items()
                if score == most and not _is_contradicted(one, outcomes, latest)
            ),
            None,
        )
        if best is None:
            continue
        if not _says_much(best, first):
            if scores[best] < CONTAINED:
                continue
        elif scores[best] < ALIKE_IN_ALL and (
            _likeness(best, [first]) < CONTAINED
            or _likeness(best, rest, outcomes, of_mistake=True) < CONTAINED
        ):
            continue
        explained = [
            one
            for one in rest
            if one is first or (_tells(best, one) and _likeness(best, [one]) >= ALIKE)
        ]
        named |= dict.fromkeys(explained, best)
        told |= set(explained)
    return named


def _tells(mistake: Mistake, failed: Outcome) -> bool:
    """Whether reader and mistake go wrong in the same way in the program that the report tells.
    Most mistakes do not, and need not be played on more."""
    place, played = min(failed.differs), failed.played
    wrong = played.scenario.symptoms_of(mistake, played.group, place)
    return bool(failed.differs[place].symptoms & wrong)


def _is_contradicted(mistake: Mistake, outcomes: Sequence[Outcome], latest: float) -> bool:
    """Whether the reader's code is right in most of the programs that the mistake gets wrong."""
    both = alone = 0
    for outcome in outcomes:
        scenario, group = outcome.played.scenario, outcome.played.group
        both += sum(bool(scenario.symptoms_of(mistake, group, place)) for place in outcome.differs)
        for place in outcome.right:
            if process_time() > latest:
                return alone > both
            alone += bool(scenario.symptoms_of(mistake, group, place))
    return alone > both


def _says_much(mistake: Mistake, failed: Outcome) -> bool:
    """Whether what reader and mistake have in common is more than an answer of few possible ones,
    or that something was raised."""
    played, said = failed.played, set[tuple]()
    for place, differs in failed.differs.items():
        said |= differs.symptoms & played.scenario.symptoms_of(mistake, played.group, place)
    values = {value for _, name, value in said if name not in ("raises", "instead")}
    return bool(values - SAY_LITTLE) or len(values) > 2


def looked_at_right(lines: int) -> int:
    """How many programs that do not differ are looked at, of each of a report's lines."""
    return max(LEAST_RIGHT, LOOKED_AT // lines)


def _likeness(
    mistake: Mistake,
    failed: Sequence[Outcome],
    outcomes: Sequence[Outcome] = (),
    of_mistake: bool = False,
) -> float:
    """What reader and mistake have wrong in common, as a share of what either has wrong, or of
    what the mistake has: in programs that `failed`, and in some in `outcomes` that did not."""
    mine: set = set()
    theirs: set = set()
    for outcome in failed:
        played = outcome.played
        for place in sorted(outcome.differs)[: max(LEAST_DIFFERING, LOOKED_AT // len(failed))]:
            key = played.name, place
            mine |= {(key, one) for one in outcome.differs[place].symptoms}
            theirs |= {
                (key, one) for one in played.scenario.symptoms_of(mistake, played.group, place)
            }
    for outcome in outcomes:
        played = outcome.played
        for place in outcome.right[: looked_at_right(len(outcomes))]:
            key = played.name, place
            theirs |= {
                (key, one) for one in played.scenario.symptoms_of(mistake, played.group, place)
            }
    whole = theirs if of_mistake else mine | theirs
    return len(mine & theirs) / len(whole) if whole else 0.0
