"""The text that tinypy is trained on, and the text that it has never seen."""

import hashlib
import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Tests are not prose, `encodings` is tables, `pydoc_data` is generated text.
SKIPPED_FOLDERS = {
    "site-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


class Corpus(NamedTuple):
    train: list[str]
    held_out: list[str]


@cache
def read_corpus() -> Corpus:
    """The standard library's modules, split into training and held-out text.

    A top-level module or package is held out as a whole when the first byte of
    the SHA-256 of its name is below 14: a rule that nobody tuned and that holds
    for every Python version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus, paths = Corpus([], []), []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # never entered: most files are there
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    for path in sorted(paths):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name.startswith("_sysconfigdata"):
            continue
        held_out = hashlib.sha256(name.encode()).digest()[0] < 14
        text = path.read_text(encoding="utf-8", errors="ignore")
        (corpus.held_out if held_out else corpus.train).append(text)
    return corpus
