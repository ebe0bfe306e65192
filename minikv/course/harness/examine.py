"""Runs one exercise's checks on a reader's code, in this process: `process` calls it in another."""

import ast
import importlib
import re
import traceback
from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from types import ModuleType

from minikv.course.chapters import each
from minikv.course.harness import reader_files
from minikv.course.harness.checking import CHECKS, MODEL_RUNS, Wrong, tinypy
from minikv.course.harness.manifest import Chapter, Exercise, chapter_of, chapters
from minikv.course.harness.report import Line, Report
from minikv.course.harness.scenarios import Outcome, Played, diagnose
from minikv.course.harness.skeletons import definitions, targets

MODEL_RUN = "tinypy on your part"
MOST_FRAMES = 60  # of a stack trace
LONGEST_MESSAGE, LINES_OF_A_MESSAGE = 1_000, 10  # characters and lines of an error's message
COMPILE_LIMIT = 60.0  # seconds for a GPU's compiler, beyond the time of a check
COMPILES = "a GPU's compiler takes it, too"  # a check that waits for another process


# ── In this process ───────────────────────────────────────────────────────────


def examine(
    exercise: Exercise,
    text: str,
    own: Iterable[str] = (),
    tell: Callable[[dict], None] = lambda message: None,
) -> Report:
    """Try `text`, a reader's exercise file, on every check of `exercise`.

    `own` are exercises whose parts are the reader's too, instead of the reference's.
    `tell` hears of each check as it begins and ends.
    """
    chapter = chapter_of(exercise.id)
    own = set(own)
    import_checks(exercise.id, own)
    checks = CHECKS[exercise.id]
    done = reader_files.progress_of(exercise, text)
    tell({"total": len(checks)})
    report = Report(exercise.id, "failed", len(checks))
    report.place = place_of(exercise, done)
    report.unwritten = next(iter(done.unwritten.values()), None)
    report.fingerprint = reader_files.fingerprint(exercise, text)
    if own:
        _borrow(own, set(), chapter.number)
    started = perf_counter()
    try:
        mine = reader_files.load(chapter, text, keep={exercise.id, *own})
    except BaseException as error:
        tell({"start": "import"})
        report.lines.append(_raised("the file can be imported", error, None, None))
        report.trace = _trace(error)
        return report
    report.lines += _inherited(exercise, text)
    report.total += len(report.lines)
    played: list[tuple[Line, Outcome]] = []
    for check in checks:
        tell({"start": check.name})
        failure: BaseException | None = None
        try:
            if isinstance(check, Played):
                outcome = check.run(mine)
                line, failure = _line_of(outcome)
                played.append((line, outcome))
            else:
                check.run(mine)
                line = Line(check.name, True)
        except BaseException as error:
            line, failure = _raised(check.name, error, check.cause, check.look), error
        if failure is not None:
            report.trace = report.trace or _trace(failure)
        report.lines.append(line)
        tell({"line": vars(line)})
    causes = diagnose(outcome for _, outcome in played)
    found = definitions(reader_files.parse(chapter, text))
    for line, outcome in played:
        if outcome in causes:
            mistake = causes[outcome]
            line.cause, line.look = mistake.cause, mistake.look
            wrong = [path for path in (*mistake.edits, *mistake.sources) if path in found]
            line.at = found[wrong[0]].lineno if wrong else line.at
    if not done.started:  # a broken variant as it was found: the symptom, and nothing more
        report.status = "not started"
        for line in report.lines:
            line.cause = line.look = line.at = None
    elif all(line.ok for line in report.lines) and not done.unwritten:
        report.status = "passed"
        if exercise.id in MODEL_RUNS:
            tell({"start": MODEL_RUN})
            try:
                report.model = MODEL_RUNS[exercise.id](mine, tinypy())
            except BaseException as error:
                report.status = "failed"
                line = _raised("tinypy runs on it, with the oracle's tokens", error, None, None)
                report.lines.append(line)
                report.total += 1
                report.trace = _trace(error)
    report.seconds = perf_counter() - started
    return report


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
        proved(which, False, _raised("", error, None, None).what)

    def attempt(which: str, run: Callable[[], str]) -> None:
        called.clear()
        try:
            proved(which, True, run())
        except BaseException as error:
            failed(which, error)

    def run_alone(run: Callable[..., str], chapter: Chapter, ids: set[str]) -> str:
        module = reader_files.load(chapter, reader_files.read(chapter), keep=ids, strict=True)
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
    expected = together.expect(tinypy())  # before the reference is swapped
    writing = any(chapter_of(id_).needs is None for id_ in own)
    write = together.write if writing else together.write_naively
    _borrow(own or passed, called)
    tell({"start": "a text"})
    called.clear()
    try:
        written = write(tinypy(), expected)
        if called:
            numbers = sorted({id_[:2] for id_ in called})
            tell({"written": {"on": f"your parts of {', '.join(numbers)}"} | written})
    except BaseException as error:
        failed("together", error)
    if len({id_[:2] for id_ in own}) > 1:
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


def _inherited(exercise: Exercise, text: str) -> list[Line]:
    """A failed line for each method that hands its work to the one it should replace: classes of
    a skeleton inherit what they do not show, and with it the reference's answer."""
    found = definitions(reader_files.parse(chapter_of(exercise.id), text))
    lines = []
    for path, target in targets(chapter_of(exercise.id)).items():
        owner, _, method = path.rpartition(".")
        if target.exercise != exercise.id or not owner or path not in found:
            continue
        calls = [node.func for node in ast.walk(found[path]) if isinstance(node, ast.Call)]
        if any(ast.unparse(call) == f"super().{method}" for call in calls):
            lines.append(
                Line(
                    f"{path} is your own",
                    False,
                    f"it calls super().{method}, which is the reference's",
                    "the class inherits the answer",
                    "what would this method do if there were none above it?",
                )
            )
    return lines


def _borrow(own: set[str], called: set[str], before: str = "99") -> None:
    """Put the reader's parts of `own`, of chapters below `before`, in the reference's places.
    When they run, they add their exercises to `called`."""
    for chapter in chapters().values():  # all, before any of the reference is swapped
        targets(chapter)
    for number, chapter in chapters().items():
        kept = {id_ for id_ in own if id_.startswith(f"{number}.")}
        if number < before and kept:
            text = reader_files.read(chapter)
            module = reader_files.load(chapter, text, keep=kept, strict=True)
            _note_calls(chapter, module, kept, called)
            reader_files.borrow(chapter, module, kept)


def place_of(exercise: Exercise, done: reader_files.Progress) -> str | None:
    """Which parts are not there yet, and where they belong."""
    name = reader_files.display_name(chapter_of(exercise.id))
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


def _raised(name: str, error: BaseException, cause: str | None, look: str | None) -> Line:
    chain = [error]  # Triton wraps what a kernel raises, once for each call
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
        chain.append(error)
    if isinstance(error, Wrong):
        return Line(name, False, error.what, error.cause or cause, error.look or look)
    frames = [f for one in chain for f in traceback.extract_tb(one.__traceback__)]
    own = [f for f in frames if is_readers(f.filename)]
    at = own[-1].lineno if own else None
    if isinstance(error, NotImplementedError) and "Exercise " in str(error):
        return Line(name, False, f"not written yet: {error}", None, None, str(error), at)
    what, origin = f"{type(error).__name__}: {_cut(str(error))}".rstrip(": "), None
    if own:
        origin = f"{short(own[-1].filename)}, line {own[-1].lineno}"
        what += f"\n{origin}: {own[-1].line}"
    if isinstance(error, RecursionError):
        cause = "the function calls itself without end"
    elif isinstance(error, MemoryError):
        cause = "more memory was asked for than a check may take"
    elif (isinstance(error, RuntimeError) or len(chain) > 1) and re.search(
        "size|shape|dimension|einsum", str(error)
    ):
        cause, look = "shapes that do not fit", "the shapes of what stands on that line: print them"
    elif len(chain) > 1 and "object is not iterable" in str(error):
        cause = "a pointer is no array: x[i] is tl.load(x + i), and x[i] = … is tl.store(x + i, …)"
    elif "'function' object is not subscriptable" in str(error):
        cause = "a function without `@triton.jit` above it is no kernel"
    where = "the line that is named here" if origin else "what your code does in this case"
    return Line(name, False, what, cause, look or where, origin, at)


def _cut(message: str) -> str:
    """The beginning of a message that would fill pages."""
    message = message.encode("utf-8", "replace").decode()  # half a pair cannot be printed
    lines = message[:LONGEST_MESSAGE].splitlines()
    kept = "\n".join(lines[:LINES_OF_A_MESSAGE])
    return kept if kept == message else f"{kept} …"


def _line_of(outcome: Outcome) -> tuple[Line, BaseException | None]:
    """A group's line, and the error that the reader's code raised, if that is what differs."""
    name, first = outcome.played.name, outcome.counterexample
    if first is None:
        return Line(name, True), None
    if first.error is None:
        return Line(name, False, f"{first.story}: {first.what}", None, outcome.played.look), None
    line = _raised(name, first.error, None, outcome.played.look)
    if line.what is not None and not line.what.startswith("not written yet"):
        error, *where = line.what.splitlines()
        _, expected, kind = first.what.rpartition(", expected ")
        error += f"{expected}{kind}" if expected else ""
        line.what = "\n".join([f"{first.story}: {error}", *where])
    return line, first.error


def _trace(error: BaseException) -> str:
    return "".join(
        line[:LONGEST_MESSAGE] for line in traceback.format_exception(error)[-MOST_FRAMES:]
    )


def is_readers(file: str) -> bool:
    return Path(file).parent == reader_files.folder()


def short(file: str) -> str:
    return f"{reader_files.folder().name}/{Path(file).name}"
