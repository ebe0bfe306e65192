"""Writing a file so that a crash at any moment leaves the old file or the new one, whole.

The data is written to a temporary file and synced, and only then renamed; last the folder, which
holds the names, is synced. Without the first `fsync` a crash may leave the new name on a file
without content, because the system writes names and contents in any order.
"""

import os
from pathlib import Path

TEMPORARY = f".{os.getpid()}.part"  # two processes may save under one name


class Folder:
    """What `save` needs of a folder. A simulated one that crashes can take its place."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def write(self, name: str, data: bytes) -> None:
        """Create or overwrite a file. Its content may still be in memory only."""
        (self.path / name).write_bytes(data)

    def sync(self, name: str) -> None:
        """Return when a file's content is on the disk."""
        _sync(self.path / name, os.O_RDWR)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in one step; replaces a file that had this name."""
        os.replace(self.path / old, self.path / new)

    def sync_folder(self) -> None:
        """Return when the names of this folder are on the disk."""
        if os.name != "nt":  # Windows cannot open a folder
            _sync(self.path, os.O_RDONLY)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(folder: Folder, name: str, data: bytes) -> None:
    """Write `data` to the file `name`: after a crash it is the old file or the new one, whole.

    Once this has returned, no crash brings the old file back. If a step up to the rename fails or
    is interrupted, the old file is still there. If `sync_folder` fails, the file is whole, old or
    new. In either case the temporary one, `name + TEMPORARY`, is gone, and the caller gets the
    error.
    """
    temporary = name + TEMPORARY
    try:
        folder.write(temporary, data)
        folder.sync(temporary)
        folder.rename(temporary, name)
    except BaseException:
        folder.remove(temporary)
        raise
    folder.sync_folder()
