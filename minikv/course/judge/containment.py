"""What a reader's code must not do to the machine it is checked on.

The limit on time is in `process`. Here are the others, all of which end in a sentence: processes
and memory, counted over everything that the code has started, and the size of files. Then, where
Linux has them, three fences around a player, each of which the others complete:

    namespaces  (`namespaces`)      it sees no other process and no network; its files are private
    Landlock    (here)              it reads what programs are made of and the folder of exercises,
                                    and writes to its scratch folder only; no TCP, no signals
    a filter    (`refused_calls`)   no sockets, no changes of modes, times, or others' limits

`reach` says what the fences of this machine leave open. A process that leaves its group is found
all the same: the nursery adopts orphans.
"""

import ctypes
import math
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from minikv.course.exercise_data import reader_files
from minikv.course.judge import namespaces, refused_calls

MEMORY_LIMIT = 4 << 30  # bytes, of a check's processes together
PROCESS_LIMIT = 64  # a check's processes; a compiler of kernels starts some
FILE_LIMIT = 256 << 20  # bytes of one file

# Numbers of Linux's system calls and options, the same on every architecture that torch runs on.
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION, PATH_BENEATH = 1, 1
CAPABILITIES = 0x20080522  # the version of their structure
# Landlock's rights to change files, by the version that brought each in: write a file, remove and
# make entries of every kind; then move between folders; then truncate.
WRITES = {1: (1 << 1) | sum(1 << bit for bit in range(4, 13)), 2: 1 << 13, 3: 1 << 14}
WRITES_A_FILE = (1 << 1) | (1 << 14)
READS_A_FILE, LISTS = 1 << 2, 1 << 3
TCP_SINCE, TCP = 4, 0b11  # bind and connect
# Where systems keep programs, and what programs ask the system about; no user's files.
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix", "/gnu", "/proc", "/sys",
    "/dev", "/etc/ld.so.cache", "/etc/passwd", "/etc/localtime",
)  # fmt: skip
SCOPES_SINCE, SCOPES = 6, 0b11  # no sockets by name, and no signals, to processes outside


def adopt_orphans() -> None:
    """From now on, processes that lose their parent become children of this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide(hidden: bool = True) -> None:
    """From now on, no other process of this user may look into this one, or at its files."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)


def stand_apart() -> bool:
    """Go on with no other process in sight and no network; False where the system forbids it."""
    return _has("namespaces") and namespaces.allowed() and namespaces.stand_apart()


def confine(scratch: str, apart: bool = False, unread: set[Path] | None = None) -> None:
    """Limit this process, and all that it starts, as far as the system can. `apart`: the process
    above stands apart. `unread`: it reads programs, packages and the folder of exercises only, and
    these files not."""
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    os.environ["TRITON_CACHE_DIR"] = str(Path(scratch, "triton"))
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory()
    if sys.platform == "linux":
        if apart:
            namespaces.private_files(scratch)
        signals = not apart and _landlock_version() < SCOPES_SINCE
        _fence(Path(scratch), signals, unread)


def limit_memory() -> None:
    """This process may take MEMORY_LIMIT from here on, where the system can count it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[5]) * resource.getpagesize()  # data and stack
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_LIMIT,) * 2)


def _fence(scratch: Path, signals: bool, unread: set[Path] | None) -> None:
    """Landlock and the filter."""
    give_up_rights()
    _landlock(scratch, unread)
    with suppress(OSError):
        if _has("filter"):
            refused_calls.refuse(signals)


def give_up_rights() -> None:
    """Be nobody special from now on, not even as root: who may mount is in no fence."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)())


def reach() -> tuple[list[str], list[str]]:
    """What a reader's code cannot do on this system, and what it can, beyond its own process."""
    apart = landlock = scopes = calls = False
    if sys.platform == "linux":
        apart = _has("namespaces") and namespaces.allowed()
        landlock, scopes = _landlock_version() >= 1, _landlock_version() >= SCOPES_SINCE
        calls = _has("filter") and namespaces.attempted(lambda: refused_calls.refuse(True))
    kept_from = {
        "read your files and the answers": landlock,
        "write to files": apart or landlock,
        "change the modes and times of files": apart or calls,
        "look into other processes": apart or landlock,
        "end other processes": apart or scopes or calls,
        "set limits on other processes": calls,
        "use the network": apart or calls,
        "talk to Unix sockets": calls,
        "fill the disk": apart or landlock,
    }
    return [what for what, so in kept_from.items() if so], [
        what for what, so in kept_from.items() if not so
    ]


def _has(fence: str) -> bool:
    """Whether a fence may be used: a test leaves some out, to see what the others hold."""
    return fence not in os.environ.get("MINIKV_WITHOUT", "").split()


def _landlock_version() -> int:
    """0 or less where there is none."""
    return ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, VERSION) if _has("landlock") else 0


def _landlock(scratch: Path, unread: set[Path] | None) -> None:
    """Allow writing below `scratch` and to the usual devices alone, no TCP, and signals to what
    this process starts; reading as in `confine`. Does nothing where there is no Landlock."""
    libc, version = ctypes.CDLL(None), _landlock_version()
    if version < 1:
        return
    writes = sum(bits for since, bits in WRITES.items() if since <= version)
    tcp = TCP if version >= TCP_SINCE else 0
    scopes = SCOPES if version >= SCOPES_SINCE else 0
    reads = 0 if unread is None else READS_A_FILE | LISTS
    rights = (ctypes.c_uint64 * 3)(writes | reads, tcp, scopes)  # struct landlock_ruleset_attr
    size = 24 if scopes else 16 if tcp else 8
    ruleset = libc.syscall(CREATE_RULESET, rights, size, 0)
    if ruleset < 0:
        return
    allowed = dict(_readable(unread)) if unread is not None else {}
    allowed[str(scratch)] = writes | reads
    for device in map(str, namespaces.DEVICES):
        allowed[device] = writes & WRITES_A_FILE | reads & READS_A_FILE
    for path, bits in allowed.items():
        with suppress(OSError):  # not every system has all of them
            place = os.open(path, os.O_PATH)
            # struct landlock_path_beneath_attr, packed: the rights, then the file
            rule = bits.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
            libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
            os.close(place)
    libc.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _readable(unread: set[Path]) -> Iterator[tuple[str, int]]:
    """What a program needs of the machine, Python and the course, and how it may be read; and the
    reader's own files, because an engine may run on their other parts. A rule holds for all that
    is below a folder, so around what is `unread` each file has a rule."""
    packages = [file for name in ("minikv", "minikv_kernels") if (file := _folder_of(name))]
    around = {str(folder) for path in unread for folder in path.parents}
    places = [*SYSTEM, sys.prefix, sys.base_prefix, *packages, str(reader_files.folder())]
    seen = set(map(str, unread))
    while places:
        place = os.path.realpath(places.pop())
        if place in seen:
            continue
        seen.add(place)
        if place in around:
            yield place, LISTS
            places += [one.path for one in os.scandir(place)]
        else:
            yield place, READS_A_FILE | (LISTS if os.path.isdir(place) else 0)


def _folder_of(package: str) -> str | None:
    spec = find_spec(package)
    return os.path.dirname(spec.origin) if spec and spec.origin else None


def descendants(ancestor: int, dead: bool = False) -> list[int]:
    """The processes below `ancestor`, with `dead` also those that nobody has waited for; none
    where there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # The name stands in brackets and may hold anything: state and parent follow it.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if dead or state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found, new = [], [ancestor]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def excess(pids: list[int], scratch: str) -> str | None:
    """Which limit these processes break together, as the end of a sentence."""
    if len(pids) > PROCESS_LIMIT:
        return f"it had started more than {PROCESS_LIMIT} processes"
    # A page that several processes share counts once, as a share of each (`_shares`). To count it
    # in each is much faster, and says enough where even that is below the limit.
    limit = MEMORY_LIMIT + (1 << 30)  # what torch and the model take
    if sum(map(_resident, pids)) > limit and sum(map(_shares, pids)) > limit:
        return f"its processes took more than {MEMORY_LIMIT >> 30} GiB of memory"
    if _on_disk(pids, scratch) > namespaces.SCRATCH_LIMIT:
        return f"it wrote more than {namespaces.SCRATCH_LIMIT >> 20} MiB to the disk"
    return None


def _on_disk(pids: list[int], scratch: str) -> float:
    """Bytes in the scratch folder, as it is seen from here, and in open files without a name."""
    total, num_files, folders = 0, 0, [scratch]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for one in entries:
                total += one.stat(follow_symlinks=False).st_blocks * 512
                num_files += 1
                if num_files > namespaces.MOST_FILES:
                    return math.inf
                folders += [one.path] if one.is_dir(follow_symlinks=False) else []
    nameless = {}
    for place in (file for pid in pids for file in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(OSError):
            about = place.stat()
            if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                nameless[about.st_dev, about.st_ino] = about.st_blocks * 512
    return total + sum(nameless.values())


def processor_seconds(pid: int) -> float:
    """Which a process has used, with all that it has waited for; 0 if it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0


def _resident(pid: int) -> int:
    """Bytes of all pages that a process has in memory; 0 if it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _shares(pid: int) -> int:
    """The same, with a page that n processes have as an n-th of it, unless it hides that."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    return _resident(pid)


def end_all(ancestor: int) -> None:
    """End whatever lives below `ancestor`, however often it starts something new."""
    for attempt in range(100):
        # Who is killed needs some time of the processor to end, and a busy machine has none to
        # spare; all these pauses together are four seconds.
        time.sleep(min(attempt, 50) / 1000)
        alive = descendants(ancestor)
        for pid in alive:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)  # so that none of them forks on
        for pid in alive:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not alive:
            return
