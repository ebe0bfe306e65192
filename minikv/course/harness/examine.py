"""Runs one exercise's checks on a reader's code.

`examine` does it in this process. `run` does it in a process of its own, with limits on
time, memory and output, so that an endless loop, a crash or a flood of print ends in a
sentence. The child writes what it finds, line by line, into a file that survives it.
"""

import ast
import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch

import minikv
from minikv.course.harness import reader_files
from minikv.course.harness.checking import CHECKS, MODEL_RUNS, Wrong, tinypy
from minikv.course.harness.manifest import Exercise, chapter_of, chapters, find
from minikv.course.harness.report import Line, Report
from minikv.course.harness.scenarios import Outcome, Played, diagnose
from minikv.course.harness.skeletons import definitions, targets

TIME_LIMIT = 10.0  # seconds for all checks of an exercise; they need one or two
COMPILE_LIMIT = 60.0  # seconds for a GPU's compiler, on top
START_LIMIT = 120.0  # seconds for Python to begin and to import torch
MEMORY_LIMIT = 4 << 30  # bytes that the child may take
FIRST_OF_ENGINE = "04"  # the chapter from which on the parts are the engine's
DECODES = (("08.5", "decode_split"), ("08.4", "decode_packed"), ("08.3", "decode"))
MODEL_RUN = "tinypy on your part"
COMPILES = "a GPU's compiler takes it, too"  # a check that waits for another process
KEPT_OUTPUT = 2_000  # characters of what the reader's code prints
KEPT_LINES = 12  # of them


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
    _import_checks(exercise.id, own)
    checks = CHECKS[exercise.id]
    done = reader_files.progress_of(exercise, text)
    tell({"total": len(checks)})
    report = Report(exercise.id, "failed", len(checks))
    report.place = _place(exercise, done)
    if own:
        _borrow(own, chapter.number)
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
        try:
            if isinstance(check, Played):
                outcome = check.run(mine)
                line, error = _line_of(outcome)
                played.append((line, outcome))
            else:
                check.run(mine)
                line, error = Line(check.name, True), None
        except BaseException as raised:
            line, error = _raised(check.name, raised, check.cause, check.look), raised
        if error is not None:
            report.trace = report.trace or _trace(error)
        report.lines.append(line)
        tell({"line": vars(line)})
    causes = diagnose(outcome for _, outcome in played)
    for line, outcome in played:
        if outcome in causes:
            line.cause, line.look = causes[outcome].cause, causes[outcome].look
    if not done.started:  # a broken variant as it was found: the symptom, and nothing more
        report.status = "not started"
        for line in report.lines:
            line.cause = line.look = None
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


def run_parts(passed: set[str]) -> list[tuple[str, bool, str]]:
    """Run tinypy on the reader's parts: (which, same tokens as the oracle?, a sentence) each.

    Chapter by chapter, with the reference in every other place, and then, from two chapters of
    the engine on, all of them in one engine. That one exchanges the reference in this process.
    """
    from minikv.course.harness import integration

    _import_checks("parts")
    results = []

    def attempt(which: str, ids: list[str], run: Callable[[], str]) -> None:
        try:
            results.append((which, True, f"{', '.join(ids)}: {run()}"))
        except BaseException as error:
            what = _raised("", error, None, None).what
            results.append((which, False, f"{', '.join(ids)}: {what}"))

    for number, chapter in chapters().items():
        runs: dict[Callable, list[str]] = {}  # what runs them: exercises
        for exercise in chapter.exercises:
            if exercise.id in passed and exercise.id in MODEL_RUNS:
                runs.setdefault(MODEL_RUNS[exercise.id], []).append(exercise.id)
        for run, ids in runs.items():
            attempt(
                number,
                ids,
                lambda chapter=chapter, run=run, ids=ids: run(
                    reader_files.load(chapter, reader_files.read(chapter), keep=set(ids)), tinypy()
                ),
            )
    own = {id_ for id_ in passed if id_ >= FIRST_OF_ENGINE and id_ in MODEL_RUNS}
    kernel = next((name for id_, name in DECODES if id_ in own), None)
    numbers = sorted({id_[:2] for id_ in own})
    if len(numbers) > 1:
        expected = integration.expect(tinypy())

        def all_of_them() -> str:
            _borrow(own)
            return integration.run(tinypy(), expected, kernel)

        attempt("together", [f"all parts of {', '.join(numbers)} in one engine"], all_of_them)
    return results


def _import_checks(what: str, own: Iterable[str] = ()) -> None:
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


def _borrow(own: set[str], before: str = "99") -> None:
    """Exchange the reference for the reader's parts of `own`, of chapters below `before`."""
    for chapter in chapters().values():  # all, before any of the reference is exchanged
        targets(chapter)
    for number, chapter in chapters().items():
        kept = {id_ for id_ in own if id_.startswith(f"{number}.")}
        if number < before and kept:
            module = reader_files.load(chapter, reader_files.read(chapter), keep=kept)
            reader_files.borrow(chapter, module, kept)


def _place(exercise: Exercise, done: reader_files.Progress) -> str | None:
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
    if isinstance(error, NotImplementedError) and "Exercise " in str(error):
        return Line(name, False, f"not written yet: {error}", None, None)
    what, origin = f"{type(error).__name__}: {error}".rstrip(": "), None
    frames = [f for one in chain for f in traceback.extract_tb(one.__traceback__)]
    own = [f for f in frames if _is_readers(f.filename)]
    if own:
        origin = f"{_short(own[-1].filename)}, line {own[-1].lineno}"
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
    return Line(name, False, what, cause, look or "the line that is named here", origin)


def _line_of(outcome: Outcome) -> tuple[Line, BaseException | None]:
    """A group's line, and the error that the reader's code raised, if that is what differs."""
    name, first = outcome.played.name, outcome.counterexample
    if first is None:
        return Line(name, True), None
    if first.error is None:
        return Line(name, False, f"{first.story}: {first.what}", None, outcome.played.look), None
    line = _raised(name, first.error, None, outcome.played.look)
    if not line.what.startswith("not written yet"):
        line.what = f"{first.story}: {line.what}"
    return line, first.error


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _is_readers(file: str) -> bool:
    return Path(file).parent == reader_files.folder()


def _short(file: str) -> str:
    return f"{reader_files.folder().name}/{Path(file).name}"


# ── In a process of its own ───────────────────────────────────────────────────


def run(exercise: Exercise, own: Iterable[str] = ()) -> Report:
    """Check the reader's file as it is now. Never raises for what is in that file."""
    chapter = chapter_of(exercise.id)
    report = Report(exercise.id, "failed", 0)
    try:
        text = reader_files.read(chapter)
        done = reader_files.progress_of(exercise, text)
    except reader_files.WorkbookError as error:
        report.place = str(error)
        return report
    report.place = chapter.cannot_run or _place(exercise, done)
    if chapter.cannot_run:
        return report
    if not done.started and exercise.kind != "debug":
        report.status = "not started"
        return report
    messages, ended, printed = _in_child([exercise.id, ",".join(own)])
    for message in messages:
        if "report" in message:
            lines = [Line(**line) for line in message["report"].pop("lines")]
            report = Report(**message["report"], lines=lines)
    if ended is not None:
        report.lines = [Line(**message["line"]) for message in messages if "line" in message]
        running = next((m["start"] for m in reversed(messages) if "start" in m), "the start")
        report.total = next((m["total"] for m in messages if "total" in m), 0)
        report.total += running == MODEL_RUN
        report.lines.append(Line(running, False, ended[0], ended[1], ended[2]))
    report.printed = printed
    return report


def parts(passed: set[str]) -> list[tuple[str, bool, str]]:
    """`run_parts` in a process of its own."""
    messages, ended, _ = _in_child(["parts", ",".join(sorted(passed))], limit=6 * time_limit())
    found = [tuple(message["part"]) for message in messages if "part" in message]
    return found if ended is None else [*found, ("", False, f"{ended[0]}: {ended[1]}")]


def time_limit() -> float:
    """Seconds; $MINIKV_TIME_LIMIT if the machine is a slow one."""
    return float(os.environ.get("MINIKV_TIME_LIMIT", TIME_LIMIT))


def _in_child(
    arguments: list[str], limit: float | None = None
) -> tuple[list[dict], tuple[str, str, str] | None, str]:
    """(what it reported, how it ended if badly: what, cause, where to look; what it printed)."""
    limit = time_limit() if limit is None else limit
    with tempfile.TemporaryDirectory(prefix="minikv-") as scratch:
        messages, hung = Path(scratch, "messages"), Path(scratch, "hung")
        command = [
            sys.executable,
            "-m",
            "minikv.course.harness.examine",
            *arguments,
            str(limit),
            scratch,
        ]
        root = str(Path(minikv.__file__).parents[1])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",  # small tensors: threads would only wait for each other
            "TRITON_INTERPRET": "1",  # kernels too end in a sentence, and need no GPU
            "PYTHONUNBUFFERED": "1",
        }
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment,
        )  # fmt: skip
        kept = bytearray()
        dropped = [0]

        def listen() -> None:  # reads all, keeps the beginning: a flood must not fill the pipe
            while data := os.read(child.stdout.fileno(), 1 << 16):
                room = KEPT_OUTPUT - len(kept)
                kept.extend(data[: max(0, room)])
                dropped[0] += len(data[max(0, room) :])

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            # It ends itself before that.
            status = child.wait(START_LIMIT + COMPILE_LIMIT + 3 * limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            child.kill()
            child.wait()
            listener.join(1)
            if not listener.is_alive():
                child.stdout.close()
        found = []
        if messages.exists():
            lines = messages.read_text(encoding="utf-8").splitlines()
            found = [json.loads(line) for line in lines if line.endswith("}")]
        stack = hung.read_text(encoding="utf-8") if hung.exists() else ""
        printed = kept.decode("utf-8", "replace")
        lines = printed.splitlines()
        if len(lines) > KEPT_LINES:
            printed = "\n".join(
                [*lines[:KEPT_LINES], f"… and {len(lines) - KEPT_LINES} more lines"]
            )
        if dropped[0]:
            printed += f"\n… and {dropped[0]:,} more bytes"
        if any("end" in message for message in found):
            return found, None, printed
        return found, _ending(status, stack, limit), printed


def _ending(status: int | None, stack: str, limit: float) -> tuple[str, str, str]:
    """How a child ended that did not come to its end: what, likely cause, where to look."""
    where = ""
    for file, line, function in re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack):
        if _is_readers(file):
            code = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1].strip()
            where = f"{_short(file)}, line {line}, in {function}: {code}"
            break
    if stack or status is None:
        return (
            f"stopped: not finished after {limit:g} s" + (f"\n{where}" if where else ""),
            "a loop that never ends, or one that does far too much; on a very busy machine also "
            "a right one: try again, or set MINIKV_TIME_LIMIT to more seconds",
            "what would have to change for this loop to stop?",
        )
    if status < 0:
        name = signal.Signals(-status).name
        cause = "memory ran out" if name == "SIGKILL" else "a crash below Python"
        return f"the process was ended by {name}", cause, "the line that your code was in"
    return (
        f"the process ended itself with status {status}",
        "the code calls os._exit",
        "a function returns or raises; it does not end the program",
    )


def _child(arguments: list[str]) -> None:
    """What the child does: `run` and `parts` above start it."""
    what, ids, limit, scratch = arguments
    with (
        Path(scratch, "messages").open("a", encoding="utf-8", buffering=1) as file,
        Path(scratch, "hung").open("w") as hung,
    ):

        def tell(message: dict) -> None:
            file.write(json.dumps(message) + "\n")
            if message.get("start") == MODEL_RUN:  # with a time of its own
                faulthandler.dump_traceback_later(float(limit), exit=True, file=hung)
            if message.get("start") == COMPILES:
                longer = float(limit) + COMPILE_LIMIT
                faulthandler.dump_traceback_later(longer, exit=True, file=hung)

        torch.set_num_threads(1)
        # A GPU says nothing of log(0) either.
        interpreter = r"triton\.runtime\.interpreter"
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=interpreter)
        own = {id_ for id_ in ids.split(",") if id_}
        tinypy()
        _import_checks(what, own)
        _limit_memory()
        faulthandler.dump_traceback_later(float(limit), exit=True, file=hung)
        if what == "parts":
            for part in run_parts(own):
                tell({"part": part})
        else:
            exercise = find(what)
            text = reader_files.read(chapter_of(what))
            tell({"report": asdict(examine(exercise, text, own, tell))})
        tell({"end": True})
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # whatever threads the reader's code has left behind


def _limit_memory() -> None:
    try:
        import resource

        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[5]) * resource.getpagesize()  # data and stack
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_LIMIT,) * 2)
    except (ImportError, OSError, ValueError):
        pass  # not on this system: the time limit is left


if __name__ == "__main__":
    _child(sys.argv[1:])
