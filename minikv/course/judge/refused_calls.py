"""System calls that no exercise needs, refused by a seccomp filter.

Landlock and namespaces say which files and processes can be reached. What neither covers goes
through calls that a solution has no use for: sockets, modes and times of files, limits and memory
of other processes, and interfaces of the kernel that were new lately and had faults.

The filter is made by libseccomp, which Debian, Ubuntu and Fedora install with their base system.
It knows the numbers of calls on each architecture, and ends what uses another one's (32-bit calls
on a 64-bit machine). Five of its functions are all we need, so we call these; its Python bindings
on PyPI are the same calls, last released in 2021.
"""

import ctypes
import errno
import os

LIBRARY = "libseccomp.so.2"
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # the second with the error's number
NOT, EQUAL_IN = 1, 7  # comparisons of an argument: unlike a value; alike in these bits

WORD = 0xFFFFFFFF  # of an argument that the kernel cuts to 32 bits
NEW_USER = 1 << 28
DATAGRAM, RAW, TYPE = 2, 3, 0xF  # kinds of socket, and the bits that tell the kind
ACCESS, EMPTIES = 3, 0o1000  # O_ACCMODE, O_TRUNC

ALWAYS = [
    "socket", "connect", "bind",
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat",
    "utime", "utimes", "utimensat", "futimesat", "truncate",
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp",
    "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo",
    "shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl",
    "msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink",
    "memfd_create", "memfd_secret",  # memory that is in no process
    "unshare", "setns", "keyctl", "add_key", "request_key", "bpf", "perf_event_open",
    "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register",
]  # fmt: skip
# What cannot be looked into: programs then use the older calls, `clone` and `openat`.
UNKNOWN = ["clone3", "openat2"]
AT_ONCE = "fallocate"  # takes much of the disk in no time; who asks for it writes then instead
# (call, argument, how it is compared, with what): refused if that is so.
SOMETIMES = [
    ("clone", 0, EQUAL_IN, NEW_USER, NEW_USER),
    ("socketpair", 0, NOT, 1, 0),  # another family than AF_UNIX
    ("socketpair", 1, EQUAL_IN, TYPE, DATAGRAM),  # can send to any address
    ("socketpair", 1, EQUAL_IN, TYPE, RAW),
    # Opened to be read, and emptied by that: Landlock looks for it since Linux 6.2.
    ("open", 1, EQUAL_IN, ACCESS | EMPTIES, EMPTIES),
    ("openat", 2, EQUAL_IN, ACCESS | EMPTIES, EMPTIES),
    # Of a process that is not the caller, which is 0.
    *((name, 0, NOT, 0, 0) for name in (
        "prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler",
    )),
    *(("setpriority", place, NOT, 0, 0) for place in (0, 1)),
    ("ioprio_set", 1, NOT, 0, 0),
    # A file that sends signals to whom it is told.
    *(("fcntl", 1, EQUAL_IN, WORD, option) for option in (8, 15)),  # F_SETOWN, F_SETOWN_EX
    *(("ioctl", 1, EQUAL_IN, WORD, option) for option in (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
]  # fmt: skip


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = (
        ("argument", ctypes.c_uint), ("how", ctypes.c_int),
        ("first", ctypes.c_uint64), ("second", ctypes.c_uint64),
    )  # fmt: skip


def refuse(signals: bool) -> None:
    """From now on, in this process and all that it starts; with `signals` also those to others.
    Raises OSError where the system has no libseccomp, or no filters."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ALLOW))

    def add(name: str, error: int, *compared: Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # this architecture has it, and this libseccomp knows it
            array = (Comparison * len(compared))(*compared)
            add_rule = library.seccomp_rule_add_array
            _checked(add_rule(rules, REFUSE | error, number, len(compared), array))

    for name in ALWAYS:
        add(name, errno.EPERM)
    for name in UNKNOWN:
        add(name, errno.ENOSYS)
    add(AT_ONCE, errno.EOPNOTSUPP)
    for name, *how in SOMETIMES:
        add(name, errno.EPERM, Comparison(*how))
    if signals:
        add("tkill", errno.EPERM)
        for name in ("kill", "tgkill"):
            add(name, errno.EPERM, Comparison(0, NOT, os.getpid(), 0))
    _checked(library.seccomp_load(rules))
    library.seccomp_release(rules)


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"seccomp: {os.strerror(-result)}")
