"""Runs tests where another user has the course: what their verdicts may not depend on.

    .venv/bin/python tests/elsewhere.py tests/course/test_update.py …

A copy of the checkout whose path has a blank and an umlaut, long names of temporary folders, a
narrow terminal, no locale, a time zone beyond UTC+12, an empty home; and, where the system lets
everybody have namespaces: no network but this machine's own, and nobody's rights, not root's.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNSEEN = ".*", "__pycache__", "build", "dist", "*.egg-info"
NETWORK = "unshare", "--user", "--map-root-user", "--net"
NOBODY = "unshare", "--user", "--map-user=1000", "--map-group=1000"
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # of a network's interface, in Linux


def loopback():
    """Bring up the interface of this machine itself, in a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", found)[1] | UP
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", flags))


def elsewhere(tests):
    """The exit status of pytest there."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "Bücher und mehr", "minikv")
        shutil.copytree(ROOT, place, symlinks=True, ignore=shutil.ignore_patterns(*UNSEEN))
        home, names = Path(folder, "home"), Path(folder, "names")
        home.mkdir()
        names.mkdir()
        # As .venv has it: the kernels under another name.
        (names / "minikv_kernels").symlink_to(place / "kernels")
        own = {
            "HOME": str(home), "COLUMNS": "40", "LC_ALL": "C", "TZ": "Pacific/Auckland",
            "PYTHONPATH": os.pathsep.join(map(str, (place, names, place / "tests" / "quick"))),
        }  # fmt: skip
        long = Path(folder, "pytest-of-codespace-student", "pytest-1234")
        long.parent.mkdir()
        command = [sys.executable, "-m", "pytest", f"--basetemp={long}", *tests]
        return subprocess.run([*apart(), *command], cwd=place, env=os.environ | own).returncode


def apart():
    """What comes before a command that is to have no network and no rights."""
    way = [*NETWORK, sys.executable, __file__, "--", *NOBODY]
    try:
        subprocess.run([*way, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"with the network, and as this user: {getattr(error, 'stderr', None) or error}")
        return []
    return way


if __name__ == "__main__":
    if sys.argv[1] == "--":
        loopback()
        os.execvp(sys.argv[2], sys.argv[2:])
    sys.exit(elsewhere(sys.argv[1:]))
