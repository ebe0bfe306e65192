"""Has a reader's code run in a process of its own, so that whatever it does ends in a sentence.

    here ──asks──> starter ──asks──> nursery ──forks──> player     one player per check, with limits
     ^              judges             │                  │       on time, memory and output
     └───report────────┘ ^             └──how it ended    │
                         └──────────what it has seen──────┘

To import torch and to load tinypy takes longer than most checks do. The starter does both once
and waits. It plays the reference, compares and writes the report, and remembers what the reference
gives; the reader's code is never imported there. The nursery is a copy of it from before it knew
anything, and each player is a copy of the nursery: what the right answers are is in no memory that
the reader's code can read, and no verdict is written where it can write.

Where a process cannot be copied safely (macOS, Windows) a new starter does all of that itself, for
one check.
"""

import atexit
import faulthandler
import json
import math
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic, process_time

import torch

import minikv
from minikv.course.exercise_data import mistakes, reader_files
from minikv.course.exercise_data.manifest import Exercise, chapter_of, find
from minikv.course.exercise_data.skeletons import lines_of
from minikv.course.judge import containment
from minikv.course.judge.checking import COMPILING, tinypy
from minikv.course.judge.examine import (
    COMPILE_LIMIT,
    COMPILES,
    IMPORT,
    MODEL_RUN,
    examine,
    import_checks,
    place_of,
    run_parts,
)
from minikv.course.judge.observing import Confused, Gone, There, serve
from minikv.course.judge.raised import Broken, broken, is_readers, short
from minikv.course.judge.result import Line, Result
from minikv.course.judge.without_reference import files_of

TIME_LIMIT = 10.0  # processor seconds for all checks of an exercise; they need one or two
# Seconds of the clock for each of them, and at least so many: a machine that is busy with twenty
# other programs is no endless loop. They end what sleeps, and what waits for itself.
FAR, FAR_AT_LEAST = 18, 180.0
START_LIMIT = 600.0  # seconds for Python to begin and to import torch
PAUSE = 0.2  # seconds between two looks at what a child has reported
IDLE_LIMIT = 600.0  # seconds after which a starter that nobody asks ends itself
GONE_LIMIT = 30.0  # seconds in which a player that is gone has ended
END_LIMIT = 5.0  # seconds for a starter to end
KEPT_OUTPUT = 2_000  # characters of what the reader's code prints
KEPT_LINES = 12  # of them
LONGEST_STACK = 20_000  # bytes of where a player was
CUT = "not finished", "stopped: used", "the process was ended by SIGKILL"
CONFUSED = 1000  # as the status of a player that sends what no player sends
FORKS = sys.platform == "linux"
# What the reader's code finds in its environment: no key and no password of who has it checked.
OURS = ("MINIKV_TIME_LIMIT", "MINIKV_WITHOUT")
NEEDED = (
    *OURS, "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TEMP",
    "TMP", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "SYSTEMDRIVE", "USERPROFILE",
    "APPDATA", "LOCALAPPDATA", "PATHEXT", "COMSPEC", "OMP_WAIT_POLICY", "CC", "CUDA_HOME",
    "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR",
)  # fmt: skip


def run(exercise: Exercise, own: Iterable[str] = (), far: float | None = None) -> Result:
    """Check the reader's file as it is now. Never raises for what is in that file. `far`: seconds
    of the clock, for code that uses none of the processor's. Raises Broken if the course is."""
    chapter = exercise.chapter
    report = Result(exercise.id, "failed", 0)
    try:
        file = reader_files.read(chapter)
        done, report.fingerprint = file.progress_of(exercise), file.fingerprint(exercise)
    except reader_files.WorkbookError as error:
        report.place, report.place_line = str(error), error.line
        return report
    report.place = chapter.cannot_run or place_of(exercise, done)
    report.place_line = next(iter(done.unwritten.values()), None)
    if chapter.cannot_run:
        return report
    if not done.started and exercise.kind != "debug":
        report.status = "not started"
        return report
    messages, ended, printed = _in_child(exercise.id, ",".join(own), time_limit(), far)
    for message in messages:
        if "report" in message:
            lines = [Line(**line) for line in message["report"].pop("lines")]
            report = Result(**message["report"], lines=lines)
    if ended is not None:
        report.lines = [Line(**message["line"]) for message in messages if "line" in message]
        totals = [message["total"] for message in messages if "total" in message]
        running = IMPORT if totals else "the start"
        running = next((m["start"] for m in reversed(messages) if "start" in m), running)
        report.total = sum(totals)
        report.total += running == MODEL_RUN
        ended.name, what = running, ended.what or ""
        report.lines.append(ended)
        if what.startswith(CUT) or not totals:
            report.ended_with = time_limit()
        if what.startswith(CUT[0]) or not totals:  # before the code was asked anything
            report.status = "not finished"
    report.printed = printed
    return report


def parts(passed: Iterable[str], hear: Callable[[dict], None]) -> str | None:
    """`run_parts` in a process of its own: `hear` gets each message as it comes. Returns how it
    ended, if badly."""
    _, ended, _ = _in_child("parts", ",".join(passed), 6 * time_limit(), hear=hear)
    return None if ended is None else f"{ended.what}: {ended.cause}"


def time_limit() -> float:
    """Processor seconds; $MINIKV_TIME_LIMIT if the machine is a slow one."""
    return float(os.environ.get("MINIKV_TIME_LIMIT", TIME_LIMIT))


def _in_child(
    what: str,
    ids: str,
    limit: float,
    far: float | None = None,
    hear: Callable[[dict], None] = lambda message: None,
) -> tuple[list[dict], Line | None, str]:
    """(what it reported, how it ended if badly, what it printed).

    `hear` gets what it reports, as it does.
    """
    found: list[dict] = []

    def listen(message: dict) -> None:
        if "broken" in message:
            raise Broken(message["broken"])
        found.append(message)
        hear(message)

    with _temporary_folder() as folder:
        Path(folder, "scratch").mkdir()  # the reader's code can write there, and not beside it
        printed, hung = Path(folder, "printed"), Path(folder, "hung")
        with hung.open("w+b") as stacks, _Listener(printed) as listener:
            # A player ends itself after `limit`, or `far`, and tells where it was: for its checks
            # and for the model's run. If it has switched that off, it is ended from outside.
            compiles = what != "parts" and chapter_of(what).needs is not None
            more = COMPILE_LIMIT if compiles else 0
            most, latest = 2.5 * limit + more, 2.5 * _far(limit + more, far)
            job = {"what": what, "ids": ids, "limit": limit, "far": far}
            job |= {"most": most, "latest": latest, "folder": folder}
            end = _ask(job, START_LIMIT + latest, listen)
            stack = stacks.read(LONGEST_STACK).decode("utf-8", "replace")
    if end["over"] is not None:
        cause = "the code starts processes, takes memory, or writes, without end"
        look = "what does it start, allocate or write, and how often?"
        return found, Line("", False, f"stopped: {end['over']}", cause, look), listener.text
    if any("end" in message for message in found):
        return found, None, listener.text
    return found, _ending(end["status"], stack, limit, _far(limit, far)), listener.text


def _far(limit: float, far: float | None) -> float:
    """Seconds of the clock after which it is not for want of a processor that nothing comes."""
    return max(FAR_AT_LEAST, FAR * limit) if far is None else far


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """One that is removed, however deep the folders are that it has got."""
    folder = tempfile.TemporaryDirectory(prefix="minikv-")
    try:
        yield folder.name
    finally:
        try:
            folder.cleanup()
        except RecursionError:
            subprocess.run(["rm", "-rf", folder.name], check=False)


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


@contextmanager
def _telling(tell: Callable[[dict], None]) -> Iterator[Callable[[dict], None]]:
    """Tell of what is raised inside, which is the course's fault."""
    try:
        yield tell
    except Exception as error:
        tell({"broken": broken(error)})
        tell({"end": True})


def _ending(status: int | None, stack: str, limit: float, far: float) -> Line:
    """How a child ended that did not come to its end."""
    where, at = "", None
    for file, line, function in re.findall(r'File "(.+?)", line (\d{1,9}) in (\S+)', stack):
        if is_readers(file):
            at = int(line)
            where = f"\n{short(file)}, line {line}, in {function}"
            with suppress(OSError, ValueError, IndexError):  # it may be another file by now
                where += f": {lines_of(Path(file).read_text('utf-8'))[at - 1].strip()}"
            break
    if status is None or "Timeout (" in stack:  # faulthandler's; other code may write there, too
        what = f"not finished after {far:g} s; it computed for less than {limit:g} s{where}"
        cause = (
            "the machine is far too busy, also for a right solution: try again; or the code "
            "sleeps, or waits for what never comes"
        )
        look = "what does it wait for, and who would bring that?"
    elif status == -signal.SIGXCPU:
        what = f"stopped: used {limit:g} s of processor time{where}"
        cause = (
            "a loop that never ends, or one that does far too much; if your processor is a very "
            "slow one, set MINIKV_TIME_LIMIT to more seconds"
        )
        look = "what would have to change for this loop to stop?"
    elif status == CONFUSED:
        what = "what the process sent is no answer to what it was asked"
        cause = "the code writes to files that it has not opened"
        look = "every write to a file: a check sees what a function returns"
    elif status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:  # the real-time ones between the first and the last have none
            name = f"signal {-status}"
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


def _ask(job: dict, limit: float, hear: Callable[[dict], None]) -> dict:
    """Have `job` done, and hear its messages as they come. Returns how it ended: "status" as in
    `subprocess`, None if it had to be ended after a time; "over", the limit that it broke. A
    starter that was lost is started again."""
    global _starter
    environment = {k: os.environ[k] for k in OURS if k in os.environ}
    # The starter may have begun in another folder.
    environment["MINIKV_EXERCISES"] = str(reader_files.folder())
    job |= {"environment": environment}
    if _starter is None or _starter.poll() is not None:
        _starter = _start()
    starter, pid, until, begun = _starter, None, monotonic() + limit, b""
    assert starter.stdin is not None and starter.stdout is not None
    try:
        starter.stdin.write((json.dumps(job) + "\n").encode())
        starter.stdin.flush()
        while monotonic() < until:
            if not select.select([starter.stdout], [], [], PAUSE)[0]:
                continue
            data = os.read(starter.stdout.fileno(), 1 << 16)
            if not data:  # it is gone: it did the work itself
                status = starter.wait()
                _stop(starter, pid)
                return {"status": status, "over": None}
            *lines, begun = (begun + data).split(b"\n")
            for message in map(json.loads, lines):
                if "status" in message:
                    return message
                if "pid" in message:
                    pid = message["pid"]
                else:
                    hear(message["said"])
        _stop(starter, pid)
        return {"status": None, "over": None}
    except BrokenPipeError:
        _stop(starter, pid)
        return {"status": starter.wait(), "over": None}
    except BaseException:  # Control-C: nothing is left running
        _stop(starter, pid)
        raise


def _start() -> subprocess.Popen:
    paths = [
        str(Path(minikv.__file__).parents[1]),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    environment = {name: os.environ[name] for name in NEEDED if name in os.environ} | {
        "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, paths)),
        "OMP_NUM_THREADS": "1",  # small tensors: threads would only wait for each other
        "TRITON_INTERPRET": "1",  # kernels too end in a sentence, and need no GPU
        "TOKENIZERS_PARALLELISM": "false",  # threads are not copied with a process
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        # Not in the folder that we are in: it may hold files with the names of Python's modules.
        [sys.executable, "-P", "-m", "minikv.course.judge.process"], cwd=os.path.abspath(os.sep),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment, start_new_session=True,
    )  # fmt: skip


@atexit.register
def _dismiss() -> None:
    """Let the starter come to its end, and wait for that: its time is then counted as ours."""
    if _starter is not None and _starter.poll() is None:
        assert _starter.stdin is not None
        with suppress(OSError):
            _starter.stdin.close()
        try:
            _starter.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            _stop(_starter, None)


def _stop(starter: subprocess.Popen, pid: int | None) -> None:
    """End a starter and the child that it may have."""
    for group in (pid, starter.pid):
        if group is not None:
            with suppress(OSError):  # gone already
                os.killpg(group, signal.SIGKILL)
    starter.wait()


# ── The starter: judges ───────────────────────────────────────────────────────


def _serve() -> None:
    """Do jobs, a line of JSON each, until nobody asks any more."""
    torch.set_num_threads(1)
    # A step of many tokens, and one of few: players find both compiled. They may not keep on disk
    # what they compile.
    minikv.Engine(tinypy()).generate([list(range(1, 33))], minikv.SamplingParams(max_tokens=2))
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    if not FORKS:
        job = json.loads(jobs.readline() or "null")
        if job is not None:
            _enter(job)
            with _telling(lambda message: answer({"said": message})) as tell:
                _do_all(job, tell)
            answer({"status": 0, "over": None})
            os._exit(0)  # whatever threads the reader's code has left behind
        return
    control, theirs = socket.socketpair()
    nursery = os.fork()
    if nursery == 0:
        for file in (jobs, answers, control):
            file.close()
        _keep_players(theirs, apart=containment.stand_apart())
        os._exit(0)
    theirs.close()
    containment.hide()
    containment.limit_memory()  # what a player sends becomes larger when it is read
    while select.select([jobs], [], [], IDLE_LIMIT)[0]:
        line = jobs.readline()
        if not line:
            break
        _judge(json.loads(line), control, answer)
    control.shutdown(socket.SHUT_RDWR)  # to close it would not do: a file over it may be left
    os.waitpid(nursery, 0)
    os._exit(0)  # to take all of torch apart again would take seconds


def _take_over(environment: dict[str, str]) -> None:
    """Be told by who asks now, not by who asked first."""
    for name in OURS:
        os.environ.pop(name, None)
    os.environ.update(environment)


def _judge(job: dict, control: socket.socket, answer: Callable[[dict], None]) -> None:
    """Have one job done by a player, and tell what comes of it."""
    _take_over(job["environment"])
    ours, theirs = socket.socketpair()
    socket.send_fds(control, [(json.dumps(job) + "\n").encode()], [theirs.fileno()])
    theirs.close()
    reports = control.makefile("r")
    answer(json.loads(reports.readline()))  # its pid
    confused = False

    def tell(message: dict) -> None:
        answer({"said": message})

    try:
        if _all_there(job):
            with ours.makefile("r", encoding="utf-8", errors="replace") as messages:
                for line in messages:
                    tell(json.loads(line))
        else:
            exercise = find(job["what"])
            import_checks(exercise.id)
            mistakes.of_chapter(exercise.chapter)
            text = reader_files.read(exercise.chapter).text
            player = There(exercise, ours, control)
            report = examine(exercise, text, tell=tell, player=player)
            tell({"report": asdict(report)})
            tell({"end": True})
    except Gone:  # it has ended, or closed what it is asked through
        confused = not select.select([control], [], [], GONE_LIMIT)[0]
    except (Confused, json.JSONDecodeError):
        confused = True
    except Exception as error:
        tell({"broken": broken(error)})
    finally:
        ours.close()
        control.send(b".")  # it is to end now
        end = json.loads(reports.readline())
    answer(end | ({"status": CONFUSED} if confused and end["status"] is not None else {}))


def _all_there(job: dict) -> bool:
    """Whether the player does the whole work. Then the reader's code takes the reference's places,
    so its answers are compared with those of the same process; no mark depends on them."""
    return job["what"] == "parts" or bool(job["ids"])


# ── The nursery ───────────────────────────────────────────────────────────────


def _keep_players(control: socket.socket, apart: bool) -> None:
    """Fork a player for each job, and tell how it ended."""
    containment.adopt_orphans()
    containment.hide()
    while True:
        data, [*connections], _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        job = json.loads(data) | {"apart": apart}
        with suppress(Exception):  # once for all players; what fails here, the judge tells
            import_checks(job["what"], job["ids"])
        pid = os.fork()
        if pid == 0:
            os.setsid()  # a group of its own: whatever it starts ends with it
            control.close()
            containment.hide(False)  # its memory is counted from outside
            _be_a_player(job, socket.socket(fileno=connections[0]))
        os.close(connections[0])
        # Nobody outside has a name for a player that stands apart: it ends with the nursery.
        control.send((json.dumps({"pid": None if apart else pid}) + "\n").encode())
        status, over, dismissed = _wait(pid, job, control)
        control.send((json.dumps({"status": status, "over": over}) + "\n").encode())
        if not dismissed:
            control.recv(1)


def _wait(pid: int, job: dict, control: socket.socket) -> tuple[int | None, str | None, bool]:
    """(exit status of a player, the limit that it broke, whether the judge has dismissed it).

    The status is None if it was ended because it did not end. It is also ended when the judge has
    heard enough, and with it all that it started.
    """
    looked = began = monotonic()
    pause, over, dismissed, busy = 0.001, None, False, False
    scratch = str(Path(job["folder"], "scratch"))
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        now = monotonic()
        if now - looked > 0.2:
            looked = now
            pids = containment.descendants(os.getpid(), dead=True)
            over = over or containment.excess(pids, scratch)
            busy = busy or sum(map(containment.processor_seconds, pids)) > job["most"]
        if over is not None or dismissed or busy or now - began > job["latest"]:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        # A byte from the judge, or the judge's end.
        if select.select([] if dismissed else [control], [], [], pause)[0]:
            dismissed = True
            control.recv(1)
        pause = min(0.02, 1.5 * pause)
    containment.end_all(os.getpid())
    if busy:
        return -signal.SIGXCPU, over, dismissed
    late = monotonic() - began > job["latest"]
    return (None if late else os.waitstatus_to_exitcode(status)), over, dismissed


# ── A player ──────────────────────────────────────────────────────────────────


def _enter(job: dict) -> None:
    """From here on, what is printed is the reader's."""
    _take_over(job["environment"])
    pipe = os.open(Path(job["folder"], "printed"), os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(pipe, stream)


def _be_a_player(job: dict, connection: socket.socket) -> None:
    """Do one job, and end."""
    try:
        _enter(job)
        if _all_there(job):
            with connection.makefile("w", encoding="utf-8") as messages:

                def tell(message: dict) -> None:
                    messages.write(json.dumps(message) + "\n")
                    messages.flush()

                with _telling(tell):
                    _do_all(job, tell)
        else:
            exercise = find(job["what"])
            with _watched(job, unread=files_of(exercise)) as begin:
                serve(connection, exercise, begin)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # whatever threads the reader's code has left behind


def _do_all(job: dict, tell: Callable[[dict], None]) -> None:
    """Examine an exercise, or run the model on all "parts", in this process."""
    own = {id_ for id_ in job["ids"].split(",") if id_}
    import_checks(job["what"], own)
    with _watched(job) as begin:

        def tell_and_begin(message: dict) -> None:
            tell(message)
            begin(message.get("start", ""))

        if job["what"] == "parts":
            run_parts(own, tell)
        else:
            exercise = find(job["what"])
            text = reader_files.read(exercise.chapter).text
            report = examine(exercise, text, own, tell_and_begin)
            tell({"report": asdict(report)})
        tell({"end": True})


@contextmanager
def _watched(job: dict, unread: set[Path] | None = None) -> Iterator[Callable[[str], None]]:
    """Within its limits, of time above all. Gives what is to hear of each check that begins."""
    # A GPU says nothing of log(0) either.
    interpreter = r"triton\.runtime\.interpreter"
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=interpreter)
    with Path(job["folder"], "hung").open("w") as hung:

        def allow(more: float = 0) -> None:
            """From here on, the time of a check, and more."""
            limit = job["limit"] + more
            faulthandler.dump_traceback_later(_far(limit, job["far"]), exit=True, file=hung)
            most = resource.getrlimit(resource.RLIMIT_CPU)[1]  # which nobody may raise
            with suppress(ValueError):  # it is less
                used = math.ceil(process_time() + limit)
                resource.setrlimit(resource.RLIMIT_CPU, (used, most))

        def begin(name: str) -> None:
            if name == MODEL_RUN:  # with a time of its own
                allow()
            if name == COMPILES:
                allow(COMPILE_LIMIT)

        COMPILING.append(lambda begins: allow(COMPILE_LIMIT if begins else 0))
        # What the system sends who has used that. Then it ends the process, as without a handler.
        faulthandler.register(signal.SIGXCPU, file=hung, chain=True)
        scratch = str(Path(job["folder"], "scratch"))
        containment.confine(scratch, job.get("apart", False), unread)
        allow()
        yield begin
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _serve()
