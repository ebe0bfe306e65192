"""Linux namespaces: a process that sees no other process, no network, and files it cannot change.

    nursery   stand_apart(): the first process of a process namespace, so that what it keeps can
      │       name, signal and limit nobody outside; and no network
      └─ player   private_files(scratch): every file is read-only, except in `scratch` and /dev/shm,
                  which are in memory, empty, limited and gone with the player

An ordinary user may have these where the system allows user namespaces. Many containers and
Ubuntu's AppArmor do not, so `allowed` tries before anything relies on it.
"""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

SCRATCH_LIMIT = 512 << 20  # bytes in each of the two places that can be written to
MOST_FILES = 20_000  # in each
MOST_TASKS = 1_000  # processes and threads together: what forks without end meets an error

# Linux's numbers, the same on every architecture that torch runs on.
NEW_FILES, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
BIND = 1 << 12
MOUNT_SETATTR, HERE, RECURSIVE = 442, -100, 0x8000
READ_ONLY, NO_SETUID, NO_DEVICES = 1, 2, 4
DEVICES = [Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom")]


def allowed() -> bool:
    """Whether the system lets this user have them. Tries all of it, in a process that ends."""

    def attempt() -> None:
        if stand_apart():
            private_files("/tmp")

    return attempted(attempt)


def attempted(action: Callable[[], None]) -> bool:
    """Whether `action` succeeds, in a process of its own that ends with it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def stand_apart() -> bool:
    """Go on as the first process in namespaces of its own. True in the process that goes on;
    the calling one waits for it, and ends as it does. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_USER | NEW_PIDS | NEW_FILES | NEW_NETWORK | NEW_IPC)
    for name, text in {
        "setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1",
    }.items():  # fmt: skip
        Path("/proc/self", name).write_text(text)
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(status if status >= 0 else 1)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    if limits_tasks():
        Path("/proc/sys/kernel/pid_max").write_text(str(MOST_TASKS))
    return True


def limits_tasks() -> bool:
    """Whether this Linux has the limit for each process namespace. (Before 6.14 there was one limit
    for the machine, which we must not touch.)"""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (6, 14)


def private_files(scratch: str) -> None:
    """For a process below one that stands apart, before it gives up its rights. Raises OSError."""
    _call("unshare", NEW_FILES | NEW_IPC)
    _set_attributes(Path("/"), RECURSIVE, on=READ_ONLY | NO_SETUID | NO_DEVICES)
    for device in filter(Path.exists, DEVICES):  # no disk, no terminal, nothing else
        _call("mount", bytes(device), bytes(device), None, BIND, None)
        _set_attributes(device, 0, off=NO_DEVICES)
    options = f"size={SCRATCH_LIMIT},nr_inodes={MOST_FILES},mode=700".encode()
    for place in filter(os.path.exists, (scratch, "/dev/shm")):
        _call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", NO_SETUID | NO_DEVICES, options)


def _set_attributes(path: Path, flags: int, on: int = 0, off: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)  # struct mount_attr
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", MOUNT_SETATTR, HERE, bytes(path), flags, attributes, size)


def _call(name: str, *arguments: object) -> None:
    """A function of the C library that returns a negative number where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
