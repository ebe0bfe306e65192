"""The result of an exercise, before anything is said about how it looks."""

from dataclasses import dataclass, field


@dataclass
class Line:
    """The result of one check."""

    name: str
    ok: bool
    what: str | None = None  # what differed
    cause: str | None = None
    look: str | None = None
    origin: str | None = None  # of an exception: file and line
    at: int | None = None  # the line of the reader's file that went wrong, or its function's
    shipped: str | None = None  # the engine that made this mistake, too


@dataclass
class Result:
    """The result of one exercise: "passed", "not started", "failed"; or "not finished", which says
    nothing about the code: too little of the machine was left for it, or it waits for ever."""

    exercise: str
    status: str
    total: int  # checks there are
    lines: list[Line] = field(default_factory=list)
    place: str | None = None  # where in the file, and what stands there
    place_line: int | None = None  # the first line that `place` names
    printed: str = ""  # what the reader's code wrote
    trace: str | None = None
    seconds: float = 0.0
    model: str | None = None  # what tinypy did on the reader's part
    fingerprint: str | None = None  # of the code that was checked
    # Processor seconds that it was allowed, if a limit or the system ended it before it was done.
    ended_with: float | None = None
    # Lines that passed where the code could touch what they compare: nothing else proves them.
    on_its_word: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def at(self) -> int | None:
        """The line of the file that went wrong first, where it is known."""
        return next((line.at for line in self.lines if not line.ok and line.at), self.place_line)
