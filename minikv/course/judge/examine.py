"""Judges one exercise: has its checks played on a reader's code, and says what differs and why."""

import importlib
from collections.abc import Callable, Iterable
from functools import partial, wraps
from time import perf_counter
from types import ModuleType

from minikv.course.chapters import each
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Chapter, Exercise, chapter_of, chapters
from minikv.course.exercise_data.skeletons import Def, targets
from minikv.course.judge.checking import CHECKS, MODEL_RUNS, Check, tinypy
from minikv.course.judge.observing import MODEL_RUN, CodeRunner, Here, disagreement, handed_over
from minikv.course.judge.raised import Failure, Raised
from minikv.course.judge.result import Line, Result
from minikv.course.judge.scenarios import Outcome, Played, diagnose

IMPORT = "the file can be imported"
NO_PASS = "what your code returns, and what it replaces while it runs"
COMPILE_LIMIT = 60.0  # seconds for a GPU's compiler, beyond the time of a check
COMPILES = "a GPU's compiler takes it, too"  # a check that waits for another process


def examine(
    exercise: Exercise,
    text: str,
    own: Iterable[str] = (),
    tell: Callable[[dict], None] = lambda message: None,
    player: CodeRunner | None = None,
) -> Result:
    """Try `text`, a reader's exercise file, on every check of `exercise`.

    `own` are exercises whose parts are the reader's too, instead of the reference's. Where there
    are none, the code may run elsewhere, by a `player`: it is not even imported here. Where there
    are some, what a check by hand or the model hands over is not asked of the reference: it would
    run beside the same code.
    `tell` hears of each check as it begins and ends.
    """
    own = set(own)
    import_checks(exercise.id, own)
    player = player or Here(exercise, own)
    checks = CHECKS[exercise.id]
    file = reader_files.parsed(exercise.chapter, text)
    done = file.progress_of(exercise)
    tell({"total": len(checks)})
    report = Result(exercise.id, "failed", len(checks), place=place_of(exercise, done))
    report.place_line = next(iter(done.unwritten.values()), None)
    report.fingerprint = file.fingerprint(exercise)
    if own:
        _borrow(own, set(), exercise.chapter.number)
    started = perf_counter()
    try:
        player.load(text)
    except Failure as error:
        report.lines.append(error.raised.line(IMPORT, None, None))
        report.trace = error.raised.ask().trace
        return report
    played: list[tuple[Line, Outcome]] = []
    for check in checks:
        tell({"start": check.name})
        assert isinstance(check, Played | Check)
        line, outcome = _play(exercise, check, player, bool(own), report)
        played += [(line, outcome)] if outcome is not None else []
        report.lines.append(line)
        tell({"line": vars(line)})
    all_pass = all(line.ok for line in report.lines)
    if not all_pass:
        player.end()  # what follows is no longer its time
    if done.started:
        _name_causes(played, file.definitions)
    else:  # a broken variant as it was found is told its symptom alone: nobody need look for more
        report.status = "not started"
        for line in report.lines:
            line.cause = line.look = line.shipped = line.at = None
    if done.started and all_pass and not done.unwritten:
        report.status = "passed"
        if exercise.id in MODEL_RUNS:
            tell({"start": MODEL_RUN})
            _run_model(exercise, player, bool(own), report)
    player.end()
    report.seconds = perf_counter() - started
    return report


def _play(
    exercise: Exercise, check: Check | Played, player: CodeRunner, own: bool, report: Result
) -> tuple[Line, Outcome | None]:
    """A check's line, and what its programs have shown if it is a scenario's."""
    outcome: Outcome | None = None
    failure: Raised | None = None
    try:
        if isinstance(check, Played):
            outcome = check.run(player)
            line, failure = _line_of(outcome)
        elif check.waits and not all(line.ok for line in report.lines):
            line = Line(check.name, False, check.waits, None, "the first line that fails")
        else:
            line = Line(check.name, True)
            handed = player.by_hand(check)
            differs = None if own else disagreement(exercise, check, handed)
            if not handed:
                report.on_its_word.append(check.name)
            if differs is not None:
                line = Line(check.name, False, differs, check.cause, check.look or NO_PASS)
    except Failure as error:
        if isinstance(check, Check) and not own:
            handed_over(exercise, check)  # raises if the check is what is wrong
        failure = error.raised
        line = failure.line(check.name, check.cause, check.look)
    if failure is not None:
        report.trace = report.trace or failure.ask().trace
    return line, outcome


def _name_causes(played: list[tuple[Line, Outcome]], found: dict[str, Def]) -> None:
    """Tell each line that failed the mistake that is most like it, and where that would be."""
    causes = diagnose(outcome for _, outcome in played)
    for line, outcome in played:
        if outcome in causes:
            mistake = causes[outcome]
            line.cause, line.shipped = mistake.cause, mistake.seen
            line.look = mistake.look or line.look
            wrong = [path for path in mistake.sources if path in found]
            line.at = found[wrong[0]].lineno if wrong else line.at


def _run_model(exercise: Exercise, player: CodeRunner, own: bool, report: Result) -> None:
    """Have tinypy run on the reader's part. If it does not, a line more says so."""
    name, differs = "tinypy runs on it, with the oracle's tokens", None
    try:
        report.model, handed = player.on_model()
        differs = None if own else disagreement(exercise, None, handed)
        line = Line(name, False, differs, None, NO_PASS)
    except Failure as error:
        if not own:
            handed_over(exercise, None)
        line = error.raised.line(name, None, None)
        report.trace = error.raised.ask().trace
        differs = line.what
    if differs is not None:
        report.status, report.model = "failed", None
        report.lines.append(line)
        report.total += 1


def run_parts(passed: set[str], tell: Callable[[dict], None]) -> None:
    """Run tinypy on the reader's parts, and tell what it writes and what each run proves.

    Chapter by chapter, with the reference in every other place; then, from two chapters of the
    engine on, all of them in one engine. A run names the parts that it called.
    """
    import_checks("parts")
    in_engine = [chapter for chapter in chapters().values() if chapter.in_engine]
    own = {id_ for id_ in passed if id_ in MODEL_RUNS and chapter_of(id_) in in_engine}
    [(_, together)] = each("together")
    called: set[str] = set()  # exercises whose parts the run has called

    def proved(which: str, same: bool, words: str | None) -> None:
        tell({"proof": {"which": which, "ids": sorted(called), "same": same, "words": words}})

    def failed(which: str, error: BaseException) -> None:
        proved(which, False, Raised.of(error).ask().what)

    def attempt(which: str, run: Callable[[], str]) -> None:
        called.clear()
        try:
            proved(which, True, run())
        except BaseException as error:
            failed(which, error)

    def run_alone(run: Callable[..., str], chapter: Chapter, ids: set[str]) -> str:
        module = reader_files.read(chapter).load(keep=ids)
        _note_calls(chapter, module, ids, called)
        return run(module, tinypy())

    for number, chapter in chapters().items():
        runs: dict[Callable[..., str], set[str]] = {}  # what runs them: exercises
        for exercise in chapter.exercises:
            if exercise.id in passed and exercise.id in MODEL_RUNS:
                runs.setdefault(MODEL_RUNS[exercise.id], set()).add(exercise.id)
        if runs:
            tell({"start": number})
        for run, ids in runs.items():
            attempt(number, partial(run_alone, run, chapter, ids))
    text_ids = together.expect_text(tinypy())  # before the reference is swapped
    several = len({id_[:2] for id_ in own}) > 1
    expected = together.expect(tinypy()) if several else None
    writing = any(chapter_of(id_).needs is None for id_ in own)
    write = together.write if writing else together.write_naively
    _borrow(own or passed, called)
    tell({"start": "a text"})
    called.clear()
    try:
        written = write(tinypy(), text_ids)
        if called:
            numbers = sorted({id_[:2] for id_ in called})
            tell({"written": {"on": f"your parts of {', '.join(numbers)}"} | written})
    except BaseException as error:
        failed("together", error)
    if expected is not None:
        tell({"start": "all together"})
        decode = _decode_of(in_engine, own)
        attempt("together", partial(together.run, tinypy(), expected, decode))


def _note_calls(chapter: Chapter, module: ModuleType, ids: set[str], called: set[str]) -> None:
    """Have the reader's functions and kernels in `module` add their exercise to `called`."""

    def noting(function: Callable, id_: str) -> Callable:
        @wraps(function)
        def noted(*args, **options):
            called.add(id_)
            return function(*args, **options)

        return noted

    for path, id_ in chapter.places.items():
        owner, _, name = path.rpartition(".")
        holder = getattr(module, owner) if owner else module
        if id_ in ids:
            part = getattr(holder, name)
            if hasattr(part, "run"):  # a kernel
                holder, name, part = part, "run", part.run
            setattr(holder, name, noting(part, id_))


def _decode_of(in_engine: list[Chapter], own: set[str]) -> Callable | None:
    """The reader's function that decodes for an engine, if one of those in `own` does."""
    for chapter in in_engine:
        for id_, name in chapter.decodes:
            if id_ in own:
                return getattr(importlib.import_module(f"{chapter.package}.answers"), name)
    return None


def import_checks(what: str, own: Iterable[str] = ()) -> None:
    """The checks of one exercise's chapter; all, for "parts" or on the reader's `own` parts: then
    some of the reference is exchanged, and nobody may import it for the first time after that."""
    everything = what == "parts" or own
    for chapter in chapters().values() if everything else [chapter_of(what)]:
        if not chapter.cannot_run:
            importlib.import_module(f"{chapter.package}.scenarios")


def _borrow(own: set[str], called: set[str], before: str = "99") -> None:
    """Put the reader's parts of `own`, of chapters below `before`, in the reference's places.
    When they run, they add their exercises to `called`."""
    for chapter in chapters().values():  # all, before any of the reference is swapped
        targets(chapter)
    for number, chapter in chapters().items():
        kept = {id_ for id_ in own if id_.startswith(f"{number}.")}
        if number < before and kept:
            module = reader_files.read(chapter).load(keep=kept)
            _note_calls(chapter, module, kept, called)
            reader_files.borrow(chapter, module, kept)


def place_of(exercise: Exercise, done: reader_files.Progress) -> str | None:
    """Which parts are not there yet, and where they belong."""
    name = reader_files.display_name(exercise.chapter)
    if done.missing:
        return (
            f"{name} has no {', '.join(done.missing)} any more; "
            f'reset("{exercise.id}") brings it back'
        )
    if not done.unwritten:
        return None
    if exercise.kind == "debug":
        [(path, line), *_] = done.unwritten.items()
        return f"{name}, line {line}: {path} is as it was found. What you see:"
    still = "still raises" if done.written else "raises"
    return "\n".join(
        f'{name}, line {line}: {path} {still} NotImplementedError("Exercise {exercise.id}: …")'
        for path, line in done.unwritten.items()
    )


def _line_of(outcome: Outcome) -> tuple[Line, Raised | None]:
    """A group's line, and the error that the reader's code raised, if that is what differs."""
    name, first = outcome.played.name, outcome.counterexample
    if first is None:
        return Line(name, True), None
    if first.error is None:
        return Line(name, False, f"{first.story}: {first.what}", None, outcome.played.look), None
    line = first.error.line(name, None, outcome.played.look)
    if line.what is not None and not line.what.startswith("not written yet"):
        error, *where = line.what.splitlines()
        _, expected, kind = first.what.rpartition(", expected ")
        error += f"{expected}{kind}" if expected else ""
        line.what = "\n".join([f"{first.story}: {error}", *where])
    return line, first.error
