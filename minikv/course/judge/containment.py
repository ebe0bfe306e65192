"""What a reader's code must not do to the machine it is checked on.

The limit on time is in `process`. Here are the others, all of which end in a sentence: processes
and memory, counted over everything that the code has started; the size of files; where Linux's
Landlock is at hand, the places it may write to (its own scratch folder), TCP (none) and the
processes it may send signals to (its own); where it can have a namespace of its own, no network.
A process that leaves its group is found all the same: the nursery adopts orphans.
"""

import ctypes
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY_LIMIT = 4 << 30  # bytes, of a check's processes together
PROCESS_LIMIT = 64  # a check's processes; a compiler of kernels starts some
FILE_LIMIT = 256 << 20  # bytes of one file

# Numbers of Linux's system calls and options, the same on every architecture that torch runs on.
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION, PATH_BENEATH = 1, 1
# Landlock's rights to change files, by the version that brought each in: write a file, remove and
# make entries of every kind; then move between folders; then truncate.
WRITES = {1: (1 << 1) | sum(1 << bit for bit in range(4, 13)), 2: 1 << 13, 3: 1 << 14}
TCP_SINCE, TCP = 4, 0b11  # bind and connect
SCOPES_SINCE, SCOPES = 6, 0b11  # no sockets by name, and no signals, to processes outside
NEW_USER, NEW_NETWORK, NEW_IPC = 1 << 28, 1 << 30, 1 << 27


def adopt_orphans() -> None:
    """From now on, processes that lose their parent become children of this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide(hidden: bool = True) -> None:
    """From now on, no other process of this user may look into this one, or at its files."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)


def confine(scratch: str) -> None:
    """Limit this process, and all that it starts, as far as the system can."""
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[5]) * resource.getpagesize()  # data and stack
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_LIMIT,) * 2)
    if sys.platform == "linux":
        _alone()
        triton = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton"))
        with suppress(OSError):
            triton.mkdir(parents=True, exist_ok=True)
        _landlock([Path(scratch), triton, Path("/dev")])


def isolation() -> str:
    """How far this system keeps a reader's code apart from everything else, in words."""
    found = ["limits on time, memory, processes and the size of files"]
    if sys.platform == "linux":
        version = _landlock_version()
        found += ["writes to a scratch folder alone"] * (version >= 1)
        found += ["no signals to other processes"] * (version >= SCOPES_SINCE)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if _alone() else 1)
        if os.waitpid(pid, 0)[1] == 0:
            found.append("no network")
        elif version >= TCP_SINCE:
            found.append("no TCP")
    return "; ".join(found)


def _alone() -> bool:
    """Give this process a network of its own, with nobody in it. Whether the system allows it."""
    return ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK | NEW_IPC) == 0


def _landlock_version() -> int:
    """0 or less where there is none."""
    return ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, VERSION)


def _landlock(writable: list[Path]) -> None:
    """Allow writing below `writable` alone, no TCP, and signals to what this process starts. Does
    nothing where there is no Landlock."""
    libc, version = ctypes.CDLL(None), _landlock_version()
    if version < 1:
        return
    writes = sum(bits for since, bits in WRITES.items() if since <= version)
    tcp = TCP if version >= TCP_SINCE else 0
    scopes = SCOPES if version >= SCOPES_SINCE else 0
    rights = (ctypes.c_uint64 * 3)(writes, tcp, scopes)  # struct landlock_ruleset_attr
    size = 24 if scopes else 16 if tcp else 8
    ruleset = libc.syscall(CREATE_RULESET, rights, size, 0)
    if ruleset < 0:
        return
    for path in filter(Path.exists, writable):
        folder = os.open(path, os.O_PATH)
        # struct landlock_path_beneath_attr, packed: the rights, then the folder
        rule = writes.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder)
        libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
        os.close(folder)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def descendants(ancestor: int) -> list[int]:
    """The processes below `ancestor`; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # The name stands in brackets and may hold anything: state and parent follow it.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found, new = [], [ancestor]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def excess(pids: list[int]) -> str | None:
    """Which limit these processes break together, as the end of a sentence."""
    if len(pids) > PROCESS_LIMIT:
        return f"it had started more than {PROCESS_LIMIT} processes"
    # A page that several processes share counts once, as a share of each (`_shares`). To count it
    # in each is much faster, and says enough where even that is below the limit.
    limit = MEMORY_LIMIT + (1 << 30)  # what torch and the model take
    if sum(map(_resident, pids)) > limit and sum(map(_shares, pids)) > limit:
        return f"its processes took more than {MEMORY_LIMIT >> 30} GiB of memory"
    return None


def _resident(pid: int) -> int:
    """Bytes of all pages that a process has in memory; 0 if it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _shares(pid: int) -> int:
    """The same, with a page that n processes have as an n-th of it."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    return 0


def end_all(ancestor: int) -> None:
    """End whatever lives below `ancestor`, however often it starts something new."""
    for _ in range(100):
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
