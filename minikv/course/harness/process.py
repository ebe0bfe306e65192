"""Runs a reader's code in a process of its own, so that whatever it does ends in a sentence.

    here ──asks──> starter ──forks──> child       one child per check, with limits on time,
     ^                │                 │         memory and output; it writes what it finds,
     └───status───────┘    messages <───┘         line by line, into a file that survives it

To import torch and to load tinypy takes longer than most checks do. The starter does both once
and waits; each child is a copy of it. Where a process cannot be copied safely (macOS, Windows)
a new starter does the work of one child itself.
"""

import faulthandler
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep

import torch

import minikv
from minikv.course.harness import containment, reader_files
from minikv.course.harness.checking import tinypy
from minikv.course.harness.examine import (
    COMPILE_LIMIT,
    COMPILES,
    MODEL_RUN,
    examine,
    import_checks,
    is_readers,
    place_of,
    run_parts,
    short,
)
from minikv.course.harness.manifest import Exercise, chapter_of, find
from minikv.course.harness.report import Line, Report

TIME_LIMIT = 10.0  # seconds for all checks of an exercise; they need one or two
START_LIMIT = 120.0  # seconds for Python to begin and to import torch
PAUSE = 0.2  # seconds between two looks at what a child has reported
IDLE_LIMIT = 600.0  # seconds after which a starter that nobody asks ends itself
LOAD_LIMIT = 30.0  # seconds for a child to import the checks
KEPT_OUTPUT = 2_000  # characters of what the reader's code prints
KEPT_LINES = 12  # of them
FORKS = sys.platform == "linux"


def run(exercise: Exercise, own: Iterable[str] = ()) -> Report:
    """Check the reader's file as it is now. Never raises for what is in that file."""
    chapter = chapter_of(exercise.id)
    report = Report(exercise.id, "failed", 0)
    try:
        text = reader_files.read(chapter)
        done = reader_files.progress_of(exercise, text)
        report.fingerprint = reader_files.fingerprint(exercise, text)
    except reader_files.WorkbookError as error:
        report.place = str(error)
        return report
    report.place = chapter.cannot_run or place_of(exercise, done)
    report.unwritten = next(iter(done.unwritten.values()), None)
    if chapter.cannot_run:
        return report
    if not done.started and exercise.kind != "debug":
        report.status = "not started"
        return report
    messages, ended, printed = _in_child(exercise.id, ",".join(own))
    for message in messages:
        if "report" in message:
            lines = [Line(**line) for line in message["report"].pop("lines")]
            report = Report(**message["report"], lines=lines)
    if ended is not None:
        report.lines = [Line(**message["line"]) for message in messages if "line" in message]
        running = next((m["start"] for m in reversed(messages) if "start" in m), "the start")
        report.total = next((m["total"] for m in messages if "total" in m), 0)
        report.total += running == MODEL_RUN
        ended.name = running
        report.lines.append(ended)
    report.printed = printed
    return report


def parts(passed: Iterable[str], hear: Callable[[dict], None]) -> str | None:
    """`run_parts` in a process of its own: `hear` gets each message as it comes. Returns how it
    ended, if badly."""
    _, ended, _ = _in_child("parts", ",".join(passed), 6 * time_limit(), hear)
    return None if ended is None else f"{ended.what}: {ended.cause}"


def time_limit() -> float:
    """Seconds; $MINIKV_TIME_LIMIT if the machine is a slow one."""
    return float(os.environ.get("MINIKV_TIME_LIMIT", TIME_LIMIT))


def _in_child(
    what: str,
    ids: str,
    limit: float | None = None,
    hear: Callable[[dict], None] = lambda message: None,
) -> tuple[list[dict], Line | None, str]:
    """(what it reported, how it ended if badly, what it printed).

    `hear` gets what it reports, as it does.
    """
    limit = time_limit() if limit is None else limit
    with tempfile.TemporaryDirectory(prefix="minikv-") as scratch:
        messages, hung = Path(scratch, "messages"), Path(scratch, "hung")
        with _Listener(Path(scratch, "printed")) as listener:
            # A child ends itself after `limit`, and tells where it was: for its checks and for
            # the model's run. If it has switched that off, it is ended.
            compiles = what != "parts" and chapter_of(what).needs == "triton"
            latest = LOAD_LIMIT + 2.5 * limit + (COMPILE_LIMIT if compiles else 0)
            job = {"what": what, "ids": ids, "limit": limit, "latest": latest, "scratch": scratch}
            found: list[dict] = []

            def listen() -> None:
                lines = messages.read_text("utf-8").splitlines(True) if messages.exists() else []
                for line in lines[len(found) :]:
                    if line.endswith("}\n"):
                        found.append(json.loads(line))
                        hear(found[-1])

            status = _ask(job, START_LIMIT + latest, listen)
            listen()
        stack = hung.read_text(encoding="utf-8") if hung.exists() else ""
        stopped = Path(scratch, "stopped")
        if stopped.exists():
            what_for = stopped.read_text(encoding="utf-8")
            cause = "the code starts processes, or takes memory, without end"
            look = "what does it start or allocate, and how often?"
            return found, Line("", False, f"stopped: {what_for}", cause, look), listener.text
        if any("end" in message for message in found):
            return found, None, listener.text
        return found, _ending(status, stack, limit), listener.text


class _Listener:
    """Reads all that a child prints and keeps the beginning: a flood must not fill the pipe."""

    def __init__(self, pipe: Path):
        os.mkfifo(pipe)
        # For writing, too: so neither side waits for the other to open it.
        self._file = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._kept, self._dropped, self._ended = bytearray(), 0, False
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> "_Listener":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        os.close(self._file)

    def _listen(self) -> None:
        while True:
            ended = self._ended  # looked at before: what was printed until then is read below
            if select.select([self._file], [], [], 0.02)[0]:
                data = os.read(self._file, 1 << 16)
                room = max(0, KEPT_OUTPUT - len(self._kept))
                self._kept += data[:room]
                self._dropped += len(data[room:])
            elif ended:
                return

    @property
    def text(self) -> str:
        printed = self._kept.decode("utf-8", "replace")
        lines = printed.splitlines()
        if len(lines) > KEPT_LINES:
            more = len(lines) - KEPT_LINES
            printed = "\n".join([*lines[:KEPT_LINES], f"… and {more} more lines"])
        return printed + (f"\n… and {self._dropped:,} more bytes" if self._dropped else "")


def _ending(status: int | None, stack: str, limit: float) -> Line:
    """How a child ended that did not come to its end."""
    where, at = "", None
    for file, line, function in re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack):
        if is_readers(file):
            at = int(line)
            where = f"\n{short(file)}, line {line}, in {function}"
            with suppress(OSError, ValueError, IndexError):  # it may be another file by now
                where += f": {Path(file).read_text('utf-8').splitlines()[at - 1].strip()}"
            break
    if stack or status is None:
        what = f"stopped: not finished after {limit:g} s{where}"
        cause = (
            "a loop that never ends, or one that does far too much; on a very busy machine also "
            "a right one: try again, or set MINIKV_TIME_LIMIT to more seconds"
        )
        look = "what would have to change for this loop to stop?"
    elif status < 0:
        name = signal.Signals(-status).name
        what = f"the process was ended by {name}"
        cause = "memory ran out" if name == "SIGKILL" else "a crash below Python"
        look = "the line that your code was in"
    else:
        what = f"the process ended itself with status {status}"
        cause = "the code calls os._exit"
        look = "a function returns or raises; it does not end the program"
    return Line("", False, what, cause, look, at=at)


# ── The starter, seen from here ───────────────────────────────────────────────

_starter: subprocess.Popen | None = None


def _ask(job: dict, limit: float, meanwhile: Callable[[], None]) -> int | None:
    """Have one child do `job`; its exit status as in `subprocess`, None if it had to be killed
    after `limit` seconds. A starter that was lost is started again, once."""
    global _starter
    environment = {k: v for k, v in os.environ.items() if k.startswith("MINIKV_")}
    # The starter may have begun in another folder.
    environment["MINIKV_EXERCISES"] = str(reader_files.folder())
    job |= {"environment": environment}
    if _starter is None or _starter.poll() is not None:
        _starter = _start()
    starter, pid, until = _starter, None, monotonic() + limit
    try:
        assert starter.stdin is not None and starter.stdout is not None
        starter.stdin.write(json.dumps(job) + "\n")
        starter.stdin.flush()
        while True:
            if monotonic() > until:
                _stop(starter, pid)
                return None
            meanwhile()
            if not select.select([starter.stdout], [], [], PAUSE)[0]:
                continue
            line = starter.stdout.readline()
            if not line:  # it is gone: it did the work itself, or the reader's code ended it
                status = starter.wait()
                _stop(starter, pid)
                return status
            message = json.loads(line)
            if "status" in message:
                return message["status"]
            pid = message["pid"]
    except BrokenPipeError:
        _stop(starter, pid)
        return starter.wait()
    except BaseException:  # Control-C: nothing is left running
        _stop(starter, pid)
        raise


def _start() -> subprocess.Popen:
    root = str(Path(minikv.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",  # small tensors: threads would only wait for each other
        "TRITON_INTERPRET": "1",  # kernels too end in a sentence, and need no GPU
        "TOKENIZERS_PARALLELISM": "false",  # threads are not copied with a process
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "minikv.course.harness.process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip


def _stop(starter: subprocess.Popen, pid: int | None) -> None:
    """End a starter and the child that it may have."""
    for group in (pid, starter.pid):
        if group is not None:
            with suppress(OSError):  # gone already
                os.killpg(group, signal.SIGKILL)
    starter.wait()


# ── The starter itself ────────────────────────────────────────────────────────


def _serve() -> None:
    """Do jobs, a line of JSON each, until nobody asks any more."""
    torch.set_num_threads(1)
    # A step of many tokens, and one of few: children find both compiled. They may not keep on disk
    # what they compile.
    minikv.Engine(tinypy()).generate([list(range(1, 33))], minikv.SamplingParams(max_tokens=2))
    containment.adopt_orphans()
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)

    def answer(**message: int | None) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    while select.select([jobs], [], [], IDLE_LIMIT)[0]:
        line = jobs.readline()
        if not line:
            return
        job = json.loads(line)
        with suppress(Exception):  # once for all children; what fails here fails there, too
            import_checks(job["what"], job["ids"])
        pid = os.fork() if FORKS else 0
        if pid == 0:
            if FORKS:
                os.setsid()  # a group of its own: whatever it starts ends with it
            answer(pid=os.getpid())
            jobs.close()
            answers.close()
            _be_a_child(job)
        answer(status=_wait(pid, job))


def _wait(pid: int, job: dict) -> int | None:
    """The exit status of a child; None if it was ended for want of time. It is ended, too, when
    it breaks another limit. All that it started is ended as well."""
    pause, looked, began = 0.001, monotonic(), monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        now = monotonic()
        if now - looked > 0.2:
            looked = now
            over = containment.excess([pid, *containment.descendants(pid)])
            if over is not None:
                Path(job["scratch"], "stopped").write_text(over, encoding="utf-8")
            if over is not None or now - began > job["latest"]:
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
        sleep(pause)
        pause = min(0.02, 1.5 * pause)
    containment.end_all(os.getpid())
    late = monotonic() - began > job["latest"]
    return None if late else os.waitstatus_to_exitcode(status)


def _be_a_child(job: dict) -> None:
    """Do one job, and end."""
    try:
        os.environ.update(job["environment"])
        pipe = os.open(Path(job["scratch"], "printed"), os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(pipe, stream)
        _work(job["what"], job["ids"], job["limit"], job["scratch"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # whatever threads the reader's code has left behind


def _work(what: str, ids: str, limit: float, scratch: str) -> None:
    """What a child does: examine one exercise, or run the model on all "parts"."""
    with (
        Path(scratch, "messages").open("a", encoding="utf-8", buffering=1) as file,
        Path(scratch, "hung").open("w") as hung,
    ):

        def tell(message: dict) -> None:
            file.write(json.dumps(message) + "\n")
            if message.get("start") == MODEL_RUN:  # with a time of its own
                faulthandler.dump_traceback_later(limit, exit=True, file=hung)
            if message.get("start") == COMPILES:
                longer = limit + COMPILE_LIMIT
                faulthandler.dump_traceback_later(longer, exit=True, file=hung)

        # A GPU says nothing of log(0) either.
        interpreter = r"triton\.runtime\.interpreter"
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=interpreter)
        own = {id_ for id_ in ids.split(",") if id_}
        import_checks(what, own)
        containment.confine(scratch)
        faulthandler.dump_traceback_later(limit, exit=True, file=hung)
        if what == "parts":
            run_parts(own, tell)
        else:
            exercise = find(what)
            text = reader_files.read(chapter_of(what))
            tell({"report": asdict(examine(exercise, text, own, tell))})
        tell({"end": True})
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _serve()
