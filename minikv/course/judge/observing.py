"""Where a reader's code runs, and how the place where it is judged learns what it does.

    judge:  examine(…, player=There(socket))  ──"play program 7 of line 3"──>  player: serve(socket)
            compares with the reference       <── what was seen, as plain data ──   runs the code

A player can say what it has seen, and nothing else: no verdict passes through the socket. `Here`
is a player in the judge's own process, for tests and for systems that cannot fork.
"""

import secrets
import select
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache, partial
from typing import Any, Protocol

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Chapter, Exercise
from minikv.course.judge.checking import CHECKS, MODEL_RUNS, Check, tinypy, witnesses
from minikv.course.judge.plain_data import LARGEST, Words, pack, unpack
from minikv.course.judge.raised import Failure, Raised, Told
from minikv.course.judge.scenarios import Event, Played, reference_module, same
from minikv.course.judge.without_reference import without_reference

MODEL_RUN = "tinypy on your part"
LONGEST = 20_000  # characters of one text that a player sends about an error
MOST_EVENTS = 100_000  # of one program


class CodeRunner(Protocol):
    """Runs a reader's code. Each method raises Failure for what that code raises."""

    def load(self, text: str) -> None:
        """Import the reader's file."""

    def events(self, played: Played, place: int, case: int) -> list[Event]:
        """The log of one case of a program of a line."""

    def by_hand(self, check: Check) -> list:
        """What a check by hand handed over as a witness, if it passed."""

    def on_model(self) -> tuple[str, list]:
        """What tinypy did on the reader's part, and what was handed over."""

    def end(self) -> None:
        """No more is asked."""


# ── In this process ───────────────────────────────────────────────────────────


class Here:
    """A player in this process."""

    def __init__(self, exercise: Exercise, own: Iterable[str] = ()):
        self.exercise, self.own = exercise, own
        self.mine: Any = None
        # With more parts of the reader's, the engine calls them all: `examine` has put them there.
        self.without = None if self.own else without_reference(exercise)

    def load(self, text: str) -> None:
        with self._failing():
            keep = {self.exercise.id, *self.own}
            self.mine = reader_files.parsed(self.exercise.chapter, text).load(keep)

    def events(self, played: Played, place: int, case: int) -> list[Event]:
        with self._failing():
            return played.scenario.on(self.mine, played.group, place, case)

    def by_hand(self, check: Check) -> list:
        with self._failing(), witnesses() as found:
            check.run(self.mine)
        return found

    def on_model(self) -> tuple[str, list]:
        with self._failing(), witnesses() as found:
            said = MODEL_RUNS[self.exercise.id](self.mine, tinypy())
        return said, found

    def end(self) -> None:
        pass

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            with self.without.active(self.mine) if self.without else nullcontext():
                yield
        except BaseException as error:
            raise Failure(Raised.of(error)) from None


# ── What the reference hands over ─────────────────────────────────────────────


def disagreement(exercise: Exercise, check: Check | None, found: list) -> str | None:
    """How a passing run, of a check by hand or (None) of the model, was not the reference's."""
    expected = [] if check and not check.hands_over else handed_over(exercise, check)
    if len(found) == len(expected) and all(map(same, found, expected)):
        return None
    return "what it says is right is not what the reference gives"


def handed_over(exercise: Exercise, check: Check | None) -> list:
    """What the reference hands over. Raises what a check raises that is wrong itself."""
    if check is None:
        return _of_its_model(exercise.chapter, MODEL_RUNS[exercise.id])
    return _of_the_reference(exercise, check)


@cache
def _of_the_reference(exercise: Exercise, check: Check) -> list:
    mine = reference_module(exercise.id)
    with reader_files.nobodys(), witnesses() as found:
        check.run(mine)
    return found


@cache
def _of_its_model(chapter: Chapter, run: Callable) -> list:
    """The same run is that of several exercises of a chapter."""
    mine = reference_module(chapter.exercises[0].id)
    with reader_files.nobodys(), witnesses() as found:
        run(mine, tinypy())
    return found


# ── In another process ────────────────────────────────────────────────────────


class Gone(Exception):
    """The other process has ended."""


class Confused(Exception):
    """The other process has sent what no player sends."""


class There:
    """A player at the other end of a socket. `ended` can be read from once it is no more."""

    def __init__(self, exercise: Exercise, connection: socket.socket, ended: Any):
        self.connection, self._ended = connection, ended
        self._places = {id(check): i for i, check in enumerate(CHECKS[exercise.id])}

    def load(self, text: str) -> None:
        self._ask("load", text)

    def events(self, played: Played, place: int, case: int) -> list[Event]:
        found = self._ask("events", self._places[id(played)], place, case)
        with _believing():
            if len(found) > MOST_EVENTS:
                raise Confused(f"{len(found):,} events")
            return [self._event(i, *event) for i, event in enumerate(found)]

    def by_hand(self, check: Check) -> list:
        return self._list(self._ask("by hand", self._places[id(check)]))

    def on_model(self) -> tuple[str, list]:
        with _believing():
            said, found = self._ask("on the model")
            return _text(said), self._list(found)

    def end(self) -> None:
        self.connection.close()

    def _event(self, place: int, text: Any, seen: Any, is_call: Any, error: Any) -> Event:
        if not isinstance(seen, dict) or not all(isinstance(name, str) for name in seen):
            raise Confused("values without names")
        raised = None if error is None else self._raised(error, place)
        return Event(_text(text), seen, raised, bool(is_call))

    def _raised(self, found: Any, place: int) -> Raised:
        kinds, message = found
        return Raised([*map(_text, kinds)] or [""], _text(message), partial(self._told, place))

    def _told(self, place: int) -> Told:
        with _believing():
            found = self._ask("tell", place)
            at, unwritten = found.pop("at"), found.pop("unwritten")
            texts: dict[str, Any] = {n: one and _text(one) for n, one in found.items()}
            if not (at is None or type(at) is int):
                raise Confused("no line")
            return Told(**texts, at=at, unwritten=bool(unwritten))

    def _list(self, found: Any) -> list:
        if not isinstance(found, list):
            raise Confused("no list")
        return found

    def _ask(self, *question: Any) -> Any:
        # A number that nobody could know before: no answer has been sent ahead of its question.
        number = secrets.token_hex(8)
        try:
            _send(self.connection, [number, *question])
        except OSError:
            raise Gone from None
        with _believing():
            about, kind, answer = unpack(_receive(self.connection, self._read))
            if about != number or kind not in ("done", "raised"):
                raise Confused("an answer to another question")
            if kind == "raised":
                raise Failure(self._raised(answer, -1))
            return answer

    def _read(self, size: int) -> bytes:
        while not select.select([self.connection, self._ended], [], [])[0]:
            pass
        ready = select.select([self.connection], [], [], 0)[0]
        data = self.connection.recv(min(size, 1 << 20)) if ready else b""
        if not data:
            raise Gone
        return data


@contextmanager
def _believing() -> Iterator[None]:
    """What is read inside may be anything."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise Confused(str(error)) from None
    except OSError:
        raise Gone from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Confused("no text")
    return Words(value[:LONGEST]) if isinstance(value, Words) else value[:LONGEST]


def _send(connection: socket.socket, value: Any) -> None:
    data = pack(value)
    connection.sendall(struct.pack("<Q", len(data)) + data)


def _receive(connection: socket.socket, read: Callable[[int], bytes]) -> bytes:
    def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += read(size - len(data))
        return bytes(data)

    (size,) = struct.unpack("<Q", exactly(8))
    if size > LARGEST:
        raise Confused(f"{size:,} bytes at once")
    return exactly(size)


# ── What the other process does ───────────────────────────────────────────────


def serve(connection: socket.socket, exercise: Exercise, begin: Callable[[str], None]) -> None:
    """Answer questions until there are none. `begin` hears of each check before it runs."""
    here, checks = Here(exercise), CHECKS[exercise.id]
    without_reference(exercise).for_good()
    last: list[Raised | None] = []  # of the last program

    def read(size: int) -> bytes:
        data = connection.recv(min(size, 1 << 20))
        if not data:
            raise Gone
        return data

    while True:
        try:
            number, question, *rest = unpack(_receive(connection, read))
        except Gone:
            return
        try:
            answer: Any = None
            if question == "load":
                here.load(*rest)
            elif question == "events":
                events = here.events(checks[rest[0]], *rest[1:])
                last = [event.error for event in events]
                errors = [one and [one.kinds, one.message] for one in last]
                answer = [
                    [event.text, event.seen, event.is_call, error]
                    for event, error in zip(events, errors, strict=True)
                ]
            elif question == "by hand":
                check: Any = checks[rest[0]]
                begin(check.name)
                answer = here.by_hand(check)
            elif question == "on the model":
                begin(MODEL_RUN)
                answer = list(here.on_model())
            else:
                raised = last[rest[0]]
                answer = raised and asdict(raised.ask())
            kind = "done"
        except Failure as failure:
            last = [failure.raised]
            kind, answer = "raised", [failure.raised.kinds, failure.raised.message]
        _send(connection, [number, kind, answer])
